"""After a search: the best settings from other seeds, beside those without a search.

A search picks the luckiest of many trials, so its best score flatters. Here the best few are
trained again from seeds that the search did not use, and the one with the lowest mean validation
loss is chosen. Only then is the test set looked at, once: for the chosen settings and for those
that the config had before the search.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial

from slipstream import config as configs
from slipstream import runs, training
from slipstream.config import Config
from slipstream.errors import DivergedError
from slipstream.runs import Event, Run
from slipstream.scoring import summary
from slipstream.tuning import space as spaces
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.packing.scheduler import PackScheduler
from slipstream.tuning.packing.trial import TrialRun

DEFAULT = -1
"""Instead of a trial's number: the config as it was before the search"""
SEED_OFFSET = 1000
"""From the config's own seed to the first one here"""
LEVEL = 0.95


class RetrainedConfig(NamedTuple):
    """One of the best, or the default, over several seeds."""

    trial: int
    config: Config
    losses: list[float]
    """Validation losses, by seed"""

    @property
    def mean_loss(self) -> float:
        return statistics.fmean(self.losses) if self.losses else math.inf

    @property
    def finite_losses(self) -> list[float]:
        return [loss for loss in self.losses if math.isfinite(loss)]

    @property
    def rank(self) -> tuple[int, float]:
        """The lower, the better: seeds that failed, then the mean of the others."""
        failed = len(self.losses) - len(self.finite_losses)
        return failed, statistics.fmean(self.finite_losses) if self.finite_losses else math.inf


def get_first_seed(base: Config) -> int:
    """The first of the seeds here; past the largest that a config takes, they go on from 0."""
    return (base.seed + SEED_OFFSET) % (2**63 - base.tune.retrain_seeds)


class Retraining:
    """Hands the candidates out, and notes how they end."""

    def __init__(self, run: Run, base: Config, entries: Sequence[tuple[int, Config]]) -> None:
        self.run, self.seeds = run, base.tune.retrain_seeds
        self.results = {trial: RetrainedConfig(trial, config, []) for trial, config in entries}
        first = get_first_seed(base)
        self.runs = [
            (trial, seed, config.model_copy(update={"seed": seed}))
            for trial, config in entries
            for seed in range(first, first + self.seeds)
        ]
        known = {
            (event["trial"], event["seed"]): event["loss"]
            for event in runs.read_events(run)
            if event["event"] == "retrained" and {"trial", "seed", "loss"} <= event.keys()
        }
        self.finished = set(known)
        """Whose result stands, by trial and seed"""
        for trial, seed, _ in self.runs:
            if (trial, seed) in known:
                self.results[trial].losses.append(_number(known[trial, seed]))
        self.pending = [
            number
            for number, (trial, seed, _) in enumerate(self.runs)
            if (trial, seed) not in known
        ]

    def ask(self) -> TrialRun | None:
        return self.reopen(self.pending.pop(0)) if self.pending else None

    def reopen(self, number: int) -> TrialRun:
        self.pending = [one for one in self.pending if one != number]
        trial, seed, config = self.runs[number]
        return TrialRun(number, config, is_final=(trial, seed) in self.finished)

    def report(self, one: TrialRun, epoch: int, loss: float) -> str:
        return ""

    def finish_fold(self, one: TrialRun, fold: int) -> None:
        pass

    def finish(self, one: TrialRun) -> None:
        trial, seed, _ = self.runs[one.number]
        self.results[trial].losses.append(one.score)
        self.finished.add((trial, seed))
        self.run.append("retrained", trial=trial, seed=seed, loss=one.score, **one.summarize())

    def fail(self, one: TrialRun, why: str) -> None:
        trial, seed, _ = self.runs[one.number]
        self.results[trial].losses.append(math.inf)
        self.finished.add((trial, seed))
        self.run.append("retrained", trial=trial, seed=seed, loss=math.inf, stopped=why)

    def list_extremes(self, config: Config) -> Sequence[Config]:
        return []  # all are known from the start


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def retrain_best(
    run: Run,
    base: Config,
    best: Sequence[FrozenTrial],
    space: Mapping[str, Any],
    shelf: DatasetCache,
) -> list[RetrainedConfig]:
    """Train the best trials and the default again; the chosen one first, the default last."""
    plain = configs.replace_settings(base, {"train.metric": base.tune.metric})
    entries = [(t.number, spaces.apply_params(base, space, t.params)) for t in best]
    director = Retraining(run, base, [*entries, (DEFAULT, plain)])
    if base.tune.folds is not None:
        once = base.tune.model_copy(update={"folds": None})  # unchecked: a pruner may need them
        shelf = DatasetCache(base.model_copy(update={"tune": once}), shelf.table)
    trainer = PackScheduler(run, shelf, director, parallel=max(len(director.runs), 1))
    trainer.train()
    found = director.results
    ranked = sorted((found[trial] for trial, _ in entries), key=lambda again: again.rank)
    return [*ranked, found[DEFAULT]]


def run_tests(
    run: Run,
    base: Config,
    again: Sequence[RetrainedConfig],
    data: Any,
    watch: Callable[[Event], None] | None,
) -> dict[str, dict[str, Any]]:
    """Ordinary runs of the chosen settings and of the default, over several seeds each; `failed`
    says of either why it has no model."""
    found = {}
    for name, config, one in (("best", again[0].config, again[0]), ("default", base, again[-1])):
        repeated = configs.replace_settings(
            config,
            {
                "name": f"{base.name}-{name}",
                "seed": get_first_seed(base),
                "train.repeats": base.tune.retrain_seeds,
                "train.metric": base.tune.metric,
            },
        )
        folder = run.folder / "retrained" / name
        try:
            if not one.finite_losses:  # from these very seeds
                raise DivergedError(
                    f"no validation loss was finite, from any of {len(one.losses)} seeds"
                )
            found[name] = training.train_or_resume(folder, repeated, data, watch)
        except DivergedError as error:
            found[name] = {"run": str(folder), "failed": str(error)}
    return found


def compare_test_errors(chosen: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """How much lower the chosen settings' test error is than the default's, given the seeds. Of
    numbers it is in standardised units, so that no target counts for its unit.

    The interval is Welch's, for the difference of two means.
    """
    from scipy import stats  # takes a second, and workers do without

    kind = chosen["judged_by"]
    a, b = (summary.get_error_over_seeds(one, kind) for one in (default, chosen))
    assert a is not None
    assert b is not None
    n = a["n"], b["n"]
    spread = [one["sd"] ** 2 / count for one, count in zip((a, b), n, strict=True)]
    gain, error = a["mean"] - b["mean"], math.sqrt(sum(spread))
    freedom = sum(spread) ** 2 / max(
        sum(part**2 / (count - 1) for part, count in zip(spread, n, strict=True)), 1e-300
    )
    reach = float(stats.t.ppf((1 + LEVEL) / 2, max(freedom, 1.0))) * error if error else 0.0
    low, high = gain - reach, gain + reach
    verdict = "better" if low > 0 else "worse" if high < 0 else "no difference shown"
    return {
        "metric": kind,
        "scaled": bool(chosen.get("scaled_spread")),
        "default": a,
        "chosen": b,
        "gain": gain,
        "gain_percent": 100 * gain / a["mean"] if a["mean"] else None,
        "low": low,
        "high": high,
        "level": LEVEL,
        "verdict": verdict,
    }
