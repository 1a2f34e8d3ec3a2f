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
from slipstream.tuning import shared
from slipstream.tuning import space as spaces
from slipstream.tuning.candidates import Candidate
from slipstream.tuning.shared import Share
from slipstream.tuning.shelf import Shelf
from slipstream.tuning.study import PRUNED, TAKEN, Board, best_of, num_trials

OUT_OF_TIME = "tune.minutes have passed"
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Search:
    """What `packs.Trainer` asks for trials, and tells how they go."""

    def __init__(
        self,
        base: Config,
        board: Board,
        run: Run,
        shelf: Shelf,
        *,
        spent_s: float = 0.0,
        share: Share | None = None,
    ) -> None:
        self.base, self.board, self.run, self.shelf = base, board, run, shelf
        self.share = share
        self.trials = num_trials(base.tune, board.space)
        self.under_way: dict[int, Trial] = {}
        self.began = time.perf_counter() - spent_s
        found = best_of(board.trials())
        self.best = math.inf if found is None or found.value is None else found.value
        self.left: list[Candidate] = []
        """Trials that had begun when the search was broken off, to be trained from their start"""

    @property
    def late(self) -> bool:
        minutes = self.base.tune.minutes
        return minutes is not None and time.perf_counter() - self.began > 60 * minutes

    def next(self) -> Candidate | None:
        """A trial that was broken off, or a new one of Optuna's."""
        while not self.late:
            if self.left:
                return self.left.pop(0)
            if self.share is not None:
                self.share.tidy()
            trials = self.board.trials()
            again = any(trial.state == TrialState.WAITING for trial in trials)
            if not again and shared.begun(trials) >= self.trials:
                return None
            trial = self.board.ask()
            if self.share is not None:
                self.share.mark(trial)
                if shared.is_beyond(trial, self.board.trials(), self.trials):
                    self.board.tell(trial, TrialState.FAIL, None, {"stopped": shared.SURPLUS})
                    continue
            try:
                return self._candidate(trial)
            except UserError as error:
                self._tell(trial, TrialState.FAIL, None, {"stopped": str(error)})
        while self.left:
            self.failed(self.left.pop(), OUT_OF_TIME)
        return None

    def _candidate(self, trial: Trial) -> Candidate:
        config = spaces.applied(self.base, self.board.space, trial.params)
        self.under_way[trial.number] = trial
        return Candidate(trial.number, config, folds=self.base.tune.folds or 1)

    def again(self, number: int) -> Candidate:
        self.left = [one for one in self.left if one.number != number]
        trial = self.board.trials()[number]
        params, settled = trial.params, trial.state.is_finished()
        if not settled:
            self.under_way[number] = self.board.again(number)
            params = self.under_way[number].params
        config = spaces.applied(self.base, self.board.space, params)
        return Candidate(number, config, folds=self.base.tune.folds or 1, settled=settled)

    def pick_up(self) -> None:
        """Find this worker's trials that were under way when the search was broken off."""
        under_way = self.board.trials(TrialState.RUNNING)
        mine = [trial for trial in under_way if self.share is None or self.share.owns(trial)]
        for trial in mine:
            try:
                one = self.again(trial.number)
                self.left.append(one)
            except UserError as error:  # it was killed before this could be told
                begun = self.under_way.pop(trial.number)
                self._tell(begun, TrialState.FAIL, None, {"stopped": str(error)})

    def validated(self, one: Candidate, epoch: int, loss: float) -> str:
        if not math.isfinite(loss):
            return ""
        trial, wilcoxon = self.under_way[one.number], self.base.tune.pruner == "wilcoxon"
        why = "" if wilcoxon else self.board.report(trial, loss, epoch - 1)
        if why == TAKEN:
            self._give_up(one)
        return OUT_OF_TIME if self.late and why != TAKEN else why

    def lane_ended(self, one: Candidate, fold: int) -> None:
        loss = one.outcomes[fold].loss
        if self.base.tune.pruner == "wilcoxon" and math.isfinite(loss):
            why = self.board.report(self.under_way[one.number], loss, fold)
            if why == TAKEN:
                self._give_up(one)

    def ended(self, one: Candidate) -> None:
        told, score = one.told(), one.score
        stops = {end.stopped for end in one.outcomes.values()}
        state, value = TrialState.COMPLETE, score
        if not math.isfinite(score):
            state = TrialState.FAIL
        elif PRUNED in stops:
            state = TrialState.PRUNED
        elif score < self.best:  # kept before it counts: no kill can part the two
            self.best = score
            self._keep(one)
        self._tell(
            self.under_way.pop(one.number),
            state,
            value if state == TrialState.COMPLETE else None,
            told,
        )

    def failed(self, one: Candidate, why: str) -> None:
        trial = self.under_way.pop(one.number, None)
        if trial is None:  # it stood already, or is another worker's by now
            return
        self._tell(trial, TrialState.FAIL, None, one.told() | {"stopped": why})

    def extremes(self, config: Config) -> Sequence[Config]:
        """With dropout, and with every optimizer, where trials may have them."""
        space = self.board.space
        dropout = space.get("model.dropout")
        found: list[Mapping[str, Any]] = []
        if dropout is not None:
            most = dropout.high if isinstance(dropout, Range) else max(dropout)
            found.append({"model.dropout": most})
        optimizers = space.get("train.optimizer", ())
        found += [{"train.optimizer": name} for name in optimizers]
        return [configs.changed(config, one) for one in found]

    def _tell(
        self, trial: Trial, state: TrialState, value: float | None, notes: Mapping[str, Any]
    ) -> None:
        told = self.board.tell(trial, state, value, notes)
        if told is None:
            self.run.append("fallback", what=f"not counting trial {trial.number} here", why=TAKEN)
            return
        self.run.append(
            "trial",
            trial=trial.number,
            state=STATES[state],
            value=told.value,
            params=told.params,
            **notes,
            best=value is not None and value == self.best,
        )

    def _give_up(self, one: Candidate) -> None:
        """Another worker trains it from its start; what is left of it here does not count."""
        one.settled = True
        del self.under_way[one.number]
        self.run.append("fallback", what=f"not counting trial {one.number} here", why=TAKEN)

    def _keep(self, one: Candidate) -> None:
        """Write the best trial's weights and settings."""
        dataset = self.shelf.get(one.config).dataset
        text = runs.config_text(one.config)
        with runs.replacing(self.run.folder / "best") as temporary:
            temporary.mkdir()
            (temporary / "config.toml").write_text(text, encoding="utf-8")
            folder = Run(temporary, origin={"config": text})
            checkpoint.save_model(folder, one.weights, dataset.signature, dataset.scaler)
