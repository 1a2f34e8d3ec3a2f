"""Connects the study to the packs: Optuna proposes and prunes trials, lanes train them."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.config import Config, Range
from slipstream.config import search_space as spaces
from slipstream.engine import checkpoint
from slipstream.engine.lanes import LaneResult
from slipstream.engine.recovery import refuse_oversized
from slipstream.events import Fallback, TrialEnd
from slipstream.runs import Run
from slipstream.search import sharing
from slipstream.search.budget import ModelCosts, SearchBudget, TrainingCosts
from slipstream.search.packs import (
    FORWARD_SHARE,
    NOT_STARTED,
    DatasetCache,
    PackCosts,
    TrialData,
    TrialRun,
    TrialSource,
)
from slipstream.search.sharing import StudyMembership
from slipstream.search.storage import OUT_OF_TIME, TIME_REASONS, name_state
from slipstream.search.study import (
    PRUNED,
    REASSIGNED,
    TimedStudy,
    count_trials,
    import_evaluator,
    rank_trials,
)
from slipstream.training import trained_lanes

LANE = "lane"
"""In the folder of the best model: what a run of it needs, where it may not be retrained"""


class OptunaSearch(TrialSource):
    """A source that asks a study for trials and tells it their results."""

    def __init__(
        self,
        config: Config,
        study: TimedStudy,
        run: Run,
        datasets: DatasetCache,
        membership: StudyMembership | None = None,
        *,
        budget: SearchBudget | None = None,
    ) -> None:
        self.config, self.study, self.run, self.datasets = config, study, run, datasets
        self.signature = datasets.get(config).dataset.signature
        self.membership = membership
        """Set if other workers may use the study"""
        self.num_trials = count_trials(config.tune, study.space)
        self.running: dict[int, Trial] = {}
        self.budget = budget or SearchBudget(config.tune, config.train.max_epochs)
        self.costs = TrainingCosts(config.train.max_epochs)
        self.started_at = time.perf_counter() - self.budget.spent_s
        ranked = rank_trials(study.get_trials(TrialState.COMPLETE))
        self.best_value = ranked[0].values[0] if ranked else math.inf
        self.lowest_cut_off = math.inf
        """The lowest loss of the trials that were cut off"""
        self.interrupted: list[TrialRun] = []
        """Trials that ran when the search was interrupted; without a checkpoint they start again"""
        self.has_trained = sharing.count_started(study.get_trials()) > 0
        """Whether a trial of the study has; until then the search goes on, however late it is"""
        self.was_cut = False
        """What trained had to stop within its epoch"""
        self.is_exhausted = False
        """All trials have started; workers of a shared study may get those of others later"""

    def is_over(self) -> bool:
        """Whether another epoch would take time that retraining and reports need."""
        is_late = self.budget.is_over(self.costs.estimate_model(), self.costs.epoch_s)
        return self.was_cut or (is_late and self.has_trained)

    def find_cut(self, costs: PackCosts | None = None) -> str:
        """Return why the trials have to stop within their epochs, so that the best is tested."""
        self.has_trained = True
        model, validate_s = self.costs.estimate_model(), 0.0
        if costs is not None:
            validate_s = costs.validate_s
            if model is None:  # in the first epoch
                epoch_s = costs.epoch_s / max(len(costs.trials), 1)
                model = ModelCosts(0.0, FORWARD_SHARE * epoch_s)
        self.was_cut = self.was_cut or self.budget.is_past(model, validate_s)
        return OUT_OF_TIME if self.was_cut else ""

    def is_finished(self) -> bool:
        """Whether all trials have ended."""
        return self.is_exhausted and not self.running and not self.interrupted

    def ask(self) -> TrialRun | None:
        """Return an interrupted trial, or a new one from the study."""
        while not self.is_over() and not self.is_exhausted:
            if self.interrupted:
                return self.interrupted.pop(0)
            if self.membership:
                for measure, why in self.membership.fail_stale_trials():
                    self.run.append(Fallback(what=measure, why=why))
            trials = self.study.get_trials()
            has_retry = any(trial.state == TrialState.WAITING for trial in trials)
            if not has_retry and sharing.count_started(trials) >= self.num_trials:
                self.is_exhausted = self.membership is None
                return None
            trial = self._ask_study(trials)
            if self.membership is not None:
                self.membership.claim(trial)
                if sharing.exceeds_limit(trial, self.study.get_trials(), self.num_trials):
                    self.study.tell(trial, TrialState.FAIL, None, {"stopped": sharing.SURPLUS})
                    continue
            try:
                run = self._make_run(trial.number, trial.params)
            except UserError as error:
                self._tell(trial, TrialState.FAIL, None, {"stopped": str(error)})
            else:
                self.running[trial.number] = trial
                return run
        while self.interrupted:
            self.fail(self.interrupted.pop(), OUT_OF_TIME)
        return None

    def _ask_study(self, trials: Sequence[FrozenTrial]) -> Trial:
        """Return a new trial, or one that waits; `trials` are those of the study."""
        return self.study.ask()

    def _make_run(self, number: int, params: Mapping[str, Any], is_final: bool = False) -> TrialRun:
        config = spaces.apply_params(self.config, self.study.space, params)
        update = {"context": config.data.context}
        refuse_oversized(config, self.signature.model_copy(update=update))
        return TrialRun(number, config, self.config.tune.folds or 1, is_final)

    def reopen(self, number: int) -> TrialRun:
        self.interrupted = [trial for trial in self.interrupted if trial.number != number]
        frozen = self.study.get_trials()[number]
        if frozen.state.is_finished():
            return self._make_run(number, frozen.params, is_final=True)
        self.running[number] = self.study.reopen(number)
        return self._make_run(number, self.running[number].params)

    def resume_interrupted(self) -> None:
        """Find this worker's trials that ran when the search was interrupted."""
        for trial in self.study.get_trials(TrialState.RUNNING):
            if self.membership is not None and not self.membership.owns(trial):
                continue
            try:
                run = self.reopen(trial.number)  # replaces the list
                self.interrupted.append(run)
            except UserError as error:  # a kill came before the trial was told as failed
                running = self.running.pop(trial.number)
                self._tell(running, TrialState.FAIL, None, {"stopped": str(error)})

    def report(self, trial: TrialRun, epoch: int, loss: float) -> str:
        self.costs.record_epoch(trial.number, trial.num_folds)
        if not math.isfinite(loss):
            return ""
        reason = ""
        if self.config.tune.pruner != "wilcoxon":  # which compares folds, not epochs
            reason = self.study.report(self.running[trial.number], loss, epoch - 1)
        if reason == REASSIGNED:
            self._give_up(trial)
        elif self.is_over():
            return OUT_OF_TIME
        return reason

    def finish_fold(self, trial: TrialRun, fold: int, ended: LaneResult, data: TrialData) -> None:
        loss = trial.fold_results[fold].loss
        if self.config.tune.pruner != "wilcoxon" or not math.isfinite(loss):
            return
        if self.study.report(self.running[trial.number], loss, fold) == REASSIGNED:
            self._give_up(trial)

    def finish(self, trial: TrialRun) -> None:
        score, summary = trial.score, trial.summarize()
        reasons = {result.stopped for result in trial.fold_results.values()}
        state = TrialState.COMPLETE
        if not math.isfinite(score):
            state = TrialState.FAIL
        elif reasons & {PRUNED, *TIME_REASONS}:
            state = TrialState.PRUNED
        elif score < self.best_value:  # saved before it counts: a kill cannot separate the two
            self.best_value = score
            self._save_best(trial)
        if state == TrialState.PRUNED and PRUNED not in reasons:
            summary["lowest"] = score
            if score < self.lowest_cut_off and math.isinf(self.best_value):
                self.lowest_cut_off = score
                self._save_best(trial)
        import_evaluator()  # the first trial has ended: the device is busy with others
        is_complete = state == TrialState.COMPLETE
        self.costs.record_end(trial.number, summary["epochs"], is_complete=is_complete)
        value = score if is_complete else None
        self._tell(self.running.pop(trial.number), state, value, summary)

    def fail(self, trial: TrialRun, reason: str) -> None:
        # without an entry, its result is known, or another worker trains it now
        if running := self.running.pop(trial.number, None):
            state = TrialState.PRUNED if reason in TIME_REASONS else TrialState.FAIL
            notes = trial.summarize() | {"stopped": reason}
            if reason == NOT_STARTED:  # which is no result
                self.study.tell(running, state, None, notes)
            else:
                self._tell(running, state, None, notes)

    def wants_lane(self, trial: TrialRun, fold: int, loss: float) -> bool:
        """Whether the lane is that of the best trial so far, which is tested as it is where
        `tune.minutes` leave no time to retrain it."""
        is_limited = self.config.tune.minutes is not None and self.config.tune.retrain > 0
        is_best = loss < self.best_value or trial.num_folds > 1  # a mean is not known yet
        return is_limited and is_best and fold == trial.num_folds - 1

    def list_extremes(self, config: Config) -> Sequence[Config]:
        """List variants with the largest dropout and with every optimizer of the space."""
        space = self.study.space
        variants: list[Mapping[str, Any]] = []
        if (dropout := space.get("model.dropout")) is not None:
            largest = dropout.high if isinstance(dropout, Range) else max(dropout)
            variants.append({"model.dropout": largest})
        variants += [{"train.optimizer": name} for name in space.get("train.optimizer", ())]
        return [configs.replace_settings(config, variant) for variant in variants]

    def _tell(
        self, trial: Trial, state: TrialState, value: float | None, notes: Mapping[str, Any]
    ) -> None:
        frozen = self.study.tell(trial, state, value, notes)
        if frozen is None:
            self._log_reassigned(trial.number)
            return
        self.run.append(
            TrialEnd(
                trial=trial.number,
                state=name_state(state, notes),
                value=notes.get("lowest", frozen.value),
                params=frozen.params,
                **notes,
                best=value is not None and value == self.best_value,
            )
        )

    def _give_up(self, trial: TrialRun) -> None:
        """Ignore the rest of a trial that another worker trains from its start."""
        trial.is_final = True
        del self.running[trial.number]
        self._log_reassigned(trial.number)

    def _log_reassigned(self, number: int) -> None:
        self.run.append(Fallback(what=f"not counting trial {number} here", why=REASSIGNED))

    def _save_best(self, trial: TrialRun) -> None:
        """Write the weights and the config of the best trial so far."""
        dataset = self.datasets.get(trial.config).dataset
        text = runs.format_config(trial.config)
        with runs.replace_atomically(self.run.folder / "best") as temporary:
            temporary.mkdir()
            (temporary / "config.toml").write_text(text, encoding="utf-8")
            folder = Run(temporary, origin={"config": text})
            checkpoint.save_model(
                folder, trial.weights, dataset.signature, dataset.scaler, dataset.limits
            )
            if trial.trained is not None:
                trained_lanes.save_lane(temporary / LANE, trial.trained)
