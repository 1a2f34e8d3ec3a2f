"""The search itself: Optuna decides what is tried and what is hopeless, lanes train."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import Trial, TrialState

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config, Range
from slipstream.engine import checkpoint
from slipstream.errors import UserError
from slipstream.runs import Run
from slipstream.tuning import sharing
from slipstream.tuning import space as spaces
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.packing.trial import TrialRun
from slipstream.tuning.sharing import StudyMembership
from slipstream.tuning.study import PRUNED, REASSIGNED, TimedStudy, count_trials, find_best

OUT_OF_TIME = "tune.minutes have passed"
STATE_NAMES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class OptunaSearch:
    """What `packs.Trainer` asks for trials, and tells how they go."""

    def __init__(
        self,
        base: Config,
        board: TimedStudy,
        run: Run,
        shelf: DatasetCache,
        *,
        spent_s: float = 0.0,
        share: StudyMembership | None = None,
    ) -> None:
        self.config, self.study, self.run, self.datasets = base, board, run, shelf
        self.membership = share
        self.num_trials = count_trials(base.tune, board.space)
        self.running: dict[int, Trial] = {}
        self.started_at = time.perf_counter() - spent_s
        found = find_best(board.get_trials())
        self.best_value = math.inf if found is None or found.value is None else found.value
        self.interrupted: list[TrialRun] = []
        """Trials that had begun when the search was broken off, to be trained from their start"""

    @property
    def is_out_of_time(self) -> bool:
        minutes = self.config.tune.minutes
        return minutes is not None and time.perf_counter() - self.started_at > 60 * minutes

    def ask(self) -> TrialRun | None:
        """A trial that was broken off, or a new one of Optuna's."""
        while not self.is_out_of_time:
            if self.interrupted:
                return self.interrupted.pop(0)
            if self.membership is not None:
                self.membership.fail_stale_trials()
            trials = self.study.get_trials()
            again = any(trial.state == TrialState.WAITING for trial in trials)
            if not again and sharing.count_started(trials) >= self.num_trials:
                return None
            trial = self.study.ask()
            if self.membership is not None:
                self.membership.claim(trial)
                if sharing.exceeds_limit(trial, self.study.get_trials(), self.num_trials):
                    self.study.tell(trial, TrialState.FAIL, None, {"stopped": sharing.SURPLUS})
                    continue
            try:
                return self._candidate(trial)
            except UserError as error:
                self._tell(trial, TrialState.FAIL, None, {"stopped": str(error)})
        while self.interrupted:
            self.fail(self.interrupted.pop(), OUT_OF_TIME)
        return None

    def _candidate(self, trial: Trial) -> TrialRun:
        config = spaces.apply_params(self.config, self.study.space, trial.params)
        self.running[trial.number] = trial
        return TrialRun(trial.number, config, num_folds=self.config.tune.folds or 1)

    def reopen(self, number: int) -> TrialRun:
        self.interrupted = [one for one in self.interrupted if one.number != number]
        trial = self.study.get_trials()[number]
        params, settled = trial.params, trial.state.is_finished()
        if not settled:
            self.running[number] = self.study.reopen(number)
            params = self.running[number].params
        config = spaces.apply_params(self.config, self.study.space, params)
        return TrialRun(number, config, num_folds=self.config.tune.folds or 1, is_final=settled)

    def resume_interrupted(self) -> None:
        """Find this worker's trials that were under way when the search was broken off."""
        under_way = self.study.get_trials(TrialState.RUNNING)
        mine = [
            trial for trial in under_way if self.membership is None or self.membership.owns(trial)
        ]
        for trial in mine:
            try:
                one = self.reopen(trial.number)
                self.interrupted.append(one)
            except UserError as error:  # it was killed before this could be told
                begun = self.running.pop(trial.number)
                self._tell(begun, TrialState.FAIL, None, {"stopped": str(error)})

    def report(self, one: TrialRun, epoch: int, loss: float) -> str:
        if not math.isfinite(loss):
            return ""
        trial, wilcoxon = self.running[one.number], self.config.tune.pruner == "wilcoxon"
        why = "" if wilcoxon else self.study.report(trial, loss, epoch - 1)
        if why == REASSIGNED:
            self._give_up(one)
        return OUT_OF_TIME if self.is_out_of_time and why != REASSIGNED else why

    def finish_fold(self, one: TrialRun, fold: int) -> None:
        loss = one.fold_results[fold].loss
        if self.config.tune.pruner == "wilcoxon" and math.isfinite(loss):
            why = self.study.report(self.running[one.number], loss, fold)
            if why == REASSIGNED:
                self._give_up(one)

    def finish(self, one: TrialRun) -> None:
        told, score = one.summarize(), one.score
        stops = {end.stopped for end in one.fold_results.values()}
        state, value = TrialState.COMPLETE, score
        if not math.isfinite(score):
            state = TrialState.FAIL
        elif PRUNED in stops:
            state = TrialState.PRUNED
        elif score < self.best_value:  # kept before it counts: no kill can part the two
            self.best_value = score
            self._keep(one)
        self._tell(
            self.running.pop(one.number),
            state,
            value if state == TrialState.COMPLETE else None,
            told,
        )

    def fail(self, one: TrialRun, why: str) -> None:
        trial = self.running.pop(one.number, None)
        if trial is None:  # it stood already, or is another worker's by now
            return
        self._tell(trial, TrialState.FAIL, None, one.summarize() | {"stopped": why})

    def list_extremes(self, config: Config) -> Sequence[Config]:
        """With dropout, and with every optimizer, where trials may have them."""
        space = self.study.space
        dropout = space.get("model.dropout")
        found: list[Mapping[str, Any]] = []
        if dropout is not None:
            most = dropout.high if isinstance(dropout, Range) else max(dropout)
            found.append({"model.dropout": most})
        optimizers = space.get("train.optimizer", ())
        found += [{"train.optimizer": name} for name in optimizers]
        return [configs.replace_settings(config, one) for one in found]

    def _tell(
        self, trial: Trial, state: TrialState, value: float | None, notes: Mapping[str, Any]
    ) -> None:
        told = self.study.tell(trial, state, value, notes)
        if told is None:
            self.run.append(
                "fallback", what=f"not counting trial {trial.number} here", why=REASSIGNED
            )
            return
        self.run.append(
            "trial",
            trial=trial.number,
            state=STATE_NAMES[state],
            value=told.value,
            params=told.params,
            **notes,
            best=value is not None and value == self.best_value,
        )

    def _give_up(self, one: TrialRun) -> None:
        """Another worker trains it from its start; what is left of it here does not count."""
        one.is_final = True
        del self.running[one.number]
        self.run.append("fallback", what=f"not counting trial {one.number} here", why=REASSIGNED)

    def _keep(self, one: TrialRun) -> None:
        """Write the best trial's weights and settings."""
        dataset = self.datasets.get(one.config).dataset
        text = runs.format_config(one.config)
        with runs.replace_atomically(self.run.folder / "best") as temporary:
            temporary.mkdir()
            (temporary / "config.toml").write_text(text, encoding="utf-8")
            folder = Run(temporary, origin={"config": text})
            checkpoint.save_model(folder, one.weights, dataset.signature, dataset.scaler)
