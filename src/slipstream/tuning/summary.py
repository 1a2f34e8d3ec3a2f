"""Concludes a search: trains the best settings again, tests them and writes the summary.

Everything that is known is written as soon as it is: when the search ends, when the best have been
trained again, and when both have been tested. So nothing that comes later can take it back.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.runs import Event, Run
from slipstream.scoring import summary as scoring
from slipstream.tuning import retraining, sharing
from slipstream.tuning import space as spaces
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.retraining import DEFAULT, RetrainedConfig
from slipstream.tuning.search import STATE_NAMES
from slipstream.tuning.storage.journal import NOTES
from slipstream.tuning.study import TimedStudy, compute_importances, describe_trial, find_best

TESTED = (
    *("run", "metrics", "scaled", "spread", "scaled_spread"),
    *("baselines", "beaten_by", "failed"),
)
RETRAIN, TEST = "the best trials have yet to be trained again", "the test runs are yet to come"


@dataclass(frozen=True)
class Study:
    """What a search found. `summary` is what `slipstream tune --json` prints."""

    run: Path
    best: Config
    """The chosen settings"""
    summary: dict[str, Any]
    study: optuna.Study
    """Optuna's own"""


def finish_search(
    run: Run,
    settings: Config,
    board: TimedStudy,
    shelf: DatasetCache,
    data: Any,
    watch: Callable[[Event], None] | None,
    *,
    searched: Event,
    began: float,
) -> Study:
    """Train the best again, test them beside the default, and write what was found."""
    trials = sharing.select_counted(board.get_trials())
    runs.remove_manifest(run)
    runs.write_json(
        run.folder / "trials.json", [describe_trial(trial, STATE_NAMES) for trial in trials]
    )
    best = find_best(trials)
    if best is None:
        raise _fruitless(run, trials)
    chosen = spaces.apply_params(settings, board.space, best.params)
    known = {
        "space": spaces.describe_space(board.space),
        "importances": compute_importances(board.study),
    }

    def write(
        again: list[RetrainedConfig], tested: dict[str, Any], pending: str | None
    ) -> dict[str, Any]:
        runs.remove_manifest(run)
        runs.write_text(run.folder / "best.toml", configs.to_toml(chosen, only_set=True))
        summary = summarize(run, settings, trials, again, tested, searched) | known
        summary |= {"pending": pending, "seconds": time.perf_counter() - began}
        runs.write_metrics(run, summary)
        return summary

    summary = write([], {}, RETRAIN if settings.tune.retrain else None)
    if settings.tune.retrain:
        done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        ranked = sorted(done, key=lambda trial: (trial.value, trial.number))
        most = settings.tune.retrain
        again = retraining.retrain_best(run, settings, ranked[:most], board.space, shelf)
        chosen = again[0].config
        write(again, {}, TEST)
        tested = retraining.run_tests(run, settings, again, data, watch)
        summary = write(again, tested, None)
    run.append("end", seconds=summary["seconds"])
    return Study(run.folder, chosen, summary, board.study)


def _fruitless(run: Run, trials: Sequence[FrozenTrial]) -> UserError:
    reasons = {trial.user_attrs.get(NOTES, {}).get("stopped") for trial in trials}
    why = "; ".join(sorted(filter(None, reasons))[:3])
    return UserError(
        f"no trial ran to its end ({why or 'none began'}); every trial is in "
        f"{run.folder / 'trials.json'}; mend tune.space or tune.minutes and start a new search, or "
        f"try more: slipstream tune --resume {run.folder} --set tune.trials=N"
    )


def summarize(
    run: Run,
    settings: Config,
    trials: Sequence[FrozenTrial],
    again: Sequence[RetrainedConfig],
    tested: dict[str, dict[str, Any]],
    searched: Event,
) -> dict[str, Any]:
    best = find_best(list(trials))
    assert best is not None
    params = {trial.number: trial.params for trial in trials}  # numbers may have gaps
    counts = dict.fromkeys(STATE_NAMES.values(), 0)
    for trial in trials:
        if trial.state in STATE_NAMES:
            counts[STATE_NAMES[trial.state]] += 1
    return {
        "run": str(run.folder),
        "name": settings.name,
        "metric": settings.tune.metric,
        "trials": counts,
        "best": {"trial": best.number, "value": best.value, "params": best.params},
        "best_config": str(run.folder / "best.toml"),
        "search_s": searched["seconds"],
        "trials_per_hour": 3600 * sum(counts.values()) / max(searched["seconds"], 1e-9),
        "optuna_s": searched["optuna_s"],
        "optuna_share": searched["optuna_s"] / max(searched["seconds"], 1e-9),
        "packs": searched["packs"],
        "retrained": [
            {
                "trial": None if one.trial == DEFAULT else one.trial,
                "what": "default" if one.trial == DEFAULT else f"trial {one.trial}",
                "params": params.get(one.trial),
                "losses": one.losses,
                "mean": one.mean_loss,
                "sd": _sd(one.losses),
                "chosen": one is again[0],
            }
            for one in again
        ],
        "test": {
            name: {key: summary.get(key) for key in TESTED} for name, summary in tested.items()
        },
        "comparison": compare_tests(tested) if tested else None,
        "findings": list(_findings(again, tested)),
    }


def _findings(again: Sequence[RetrainedConfig], tested: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Sentences on settings that did not reach a finite loss from every seed."""
    if not again:
        return
    for name, one in (("best", again[0]), ("default", again[-1])):
        whose = "the config without a search"
        if name == "best":
            whose = f"the chosen settings (trial {one.trial})"
        failed, seeds = len(one.losses) - len(one.finite_losses), len(one.losses)
        if failed:
            of = (
                f"from any of {seeds} seeds"
                if failed == seeds
                else f"from {failed} of {seeds} seeds"
            )
            yield f"{whose} did not reach a finite loss {of}"
        elif tested.get(name, {}).get("failed"):
            yield f"{whose} did not reach a finite loss in the test run: {tested[name]['failed']}"


def compare_tests(tested: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How the chosen settings' test error compares with the default's. Where one of them has no
    model, or not two seeds to tell a spread from, the verdict says so and there is no gain."""
    chosen, default = tested["best"], tested["default"]
    if all(_spreads(one) for one in (chosen, default)):
        return retraining.compare_test_errors(chosen, default)
    verdicts = {
        (False, False): "both failed",
        (True, False): "default failed",
        (False, True): "chosen failed",
        (True, True): "too few seeds",
    }
    with_model = [one for one in (chosen, default) if not one.get("failed")]
    there = chosen in with_model, default in with_model
    kind = with_model[0]["judged_by"] if with_model else None
    nothing = dict.fromkeys(("gain", "gain_percent", "low", "high"))
    return {
        "metric": kind,
        "scaled": any("scaled" in one for one in with_model),
        "default": _over_seeds(default, kind),
        "chosen": _over_seeds(chosen, kind),
        **nothing,
        "level": retraining.LEVEL,
        "verdict": verdicts[there],
    }


def _spreads(tested: dict[str, Any]) -> bool:
    """Whether there are two seeds or more with figures to compare."""
    if tested.get("failed"):
        return False
    spread = scoring.get_error_over_seeds(tested, tested["judged_by"])
    if spread is None:
        return False
    return all(spread[key] is not None and math.isfinite(spread[key]) for key in ("mean", "sd"))


def _over_seeds(tested: dict[str, Any], kind: str | None) -> dict[str, Any] | None:
    """The error that settings are judged by: mean and deviation over the seeds, or the one figure
    that there is."""
    if tested.get("failed") or kind is None:
        return None
    value = scoring.get_error(tested, "test", kind)
    one_seed = {"mean": value, "sd": None, "min": value, "max": value, "n": 1}
    return scoring.get_error_over_seeds(tested, kind) or one_seed


def _sd(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.stdev(finite) if len(finite) > 1 else None
