"""Finishes a search: retrains and tests the best settings and writes the summary.

The summary is written as soon as each part of it is known: after the search, after the retraining
and after the test. So a failure in a later part cannot lose an earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from slipstream import config as configs
from slipstream import runs, stats
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.reporting.formatting import format_value
from slipstream.reporting.wording import describe_search_verdict, get_chosen
from slipstream.runs import Event, Run
from slipstream.text import format_html_table, format_table
from slipstream.tuning import retraining, sharing
from slipstream.tuning import space as spaces
from slipstream.tuning.comparison import compare_tests
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.retraining import DEFAULT, RetrainedConfig
from slipstream.tuning.storage.journal import NOTES, STATE_NAMES
from slipstream.tuning.study import TimedStudy, compute_importances, describe_trial, find_best

TEST_KEYS = (
    *("run", "metrics", "scaled", "spread", "scaled_spread"),
    *("baselines", "beaten_by", "failed"),
)
"""What the summary contains of each test run"""
RETRAINING_PENDING = "the best trials have yet to be retrained"
TEST_PENDING = "the test runs have yet to finish"


@dataclass(frozen=True, repr=False)
class Study:
    """The result of `tune`; it prints as its verdict and the chosen settings.

    Attributes:
        run: The run folder.
        best: The chosen config.
        summary: The object that `slipstream tune --json` prints.
        study: Optuna's own study.

    Example:
        study = slipstream.tune("job.toml")
        study.best.train.lr
        optuna.visualization.plot_optimization_history(study.study)
    """

    run: Path
    best: Config
    summary: dict[str, Any]
    study: optuna.Study

    def __repr__(self) -> str:
        return format_table(self._title, ("setting", "value"), self._rows())

    def _repr_html_(self) -> str:
        return format_html_table(self._title, ("setting", "value"), self._rows())

    @property
    def _title(self) -> str:
        return f"Study of {self.run}: {describe_search_verdict(self.summary)}"

    def _rows(self) -> list[tuple[str, str]]:
        params = get_chosen(self.summary)["params"]
        return [(name, format_value(value)) for name, value in params.items()]


def finish_search(
    run: Run,
    config: Config,
    study: TimedStudy,
    datasets: DatasetCache,
    *,
    search_result: Event,
    started_at: float,
) -> Study:
    """Retrain the best trials, test the chosen settings and the default, and write the summary."""
    trials = sharing.select_counted(study.get_trials())
    runs.remove_manifest(run)
    runs.write_json(run.folder / "trials.json", [describe_trial(trial) for trial in trials])
    best = find_best(trials)
    if best is None:
        raise _make_no_result_error(run, trials)
    chosen = spaces.apply_params(config, study.space, best.params)
    space = {
        "space": spaces.describe_space(study.space),
        "importances": compute_importances(study.study),
    }

    def write(
        retrained: list[RetrainedConfig], tests: dict[str, Any], pending: str | None
    ) -> dict[str, Any]:
        runs.remove_manifest(run)
        runs.write_text(run.folder / "best.toml", configs.to_toml(chosen, only_set=True))
        summary = summarize(run, config, trials, retrained, tests, search_result) | space
        summary |= {"pending": pending, "seconds": time.perf_counter() - started_at}
        runs.write_metrics(run, summary)
        return summary

    summary = write([], {}, RETRAINING_PENDING if config.tune.retrain else None)
    if config.tune.retrain:
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        ranked = sorted(complete, key=lambda trial: (trial.value, trial.number))
        retrained = retraining.retrain_best(
            run, config, ranked[: config.tune.retrain], study.space, datasets
        )
        chosen = retrained[0].config
        write(retrained, {}, TEST_PENDING)
        tests = retraining.run_tests(run, config, retrained, datasets.table)
        summary = write(retrained, tests, None)
    run.append("end", seconds=summary["seconds"])
    return Study(run.folder, chosen, summary, study.study)


def _make_no_result_error(run: Run, trials: Sequence[FrozenTrial]) -> UserError:
    reasons = {trial.user_attrs.get(NOTES, {}).get("stopped") for trial in trials}
    reason = "; ".join(sorted(filter(None, reasons))[:3])
    return UserError(
        f"no trial finished ({reason or 'none started'}); {run.folder / 'trials.json'} lists every "
        "trial; correct tune.space or tune.minutes and start a new search, or add trials: "
        f"slipstream tune --resume {run.folder} --set tune.trials=N"
    )


def summarize(
    run: Run,
    config: Config,
    trials: Sequence[FrozenTrial],
    retrained: Sequence[RetrainedConfig],
    tests: dict[str, dict[str, Any]],
    search_result: Event,
) -> dict[str, Any]:
    best = find_best(list(trials))
    assert best is not None
    params = {trial.number: trial.params for trial in trials}  # numbers may have gaps
    counts = dict.fromkeys(STATE_NAMES.values(), 0)
    for trial in trials:
        if trial.state in STATE_NAMES:
            counts[STATE_NAMES[trial.state]] += 1
    search_s, optuna_s = search_result["seconds"], search_result["optuna_s"]
    return {
        "run": str(run.folder),
        "name": config.name,
        "metric": config.tune.metric,
        "trials": counts,
        "best": {"trial": best.number, "value": best.value, "params": best.params},
        "best_config": str(run.folder / "best.toml"),
        "search_s": search_s,
        "trials_per_hour": 3600 * sum(counts.values()) / max(search_s, 1e-9),
        "optuna_s": optuna_s,
        "optuna_share": optuna_s / max(search_s, 1e-9),
        "packs": search_result["packs"],
        "retrained": [
            {
                "trial": None if result.trial == DEFAULT else result.trial,
                "what": "default" if result.trial == DEFAULT else f"trial {result.trial}",
                "params": params.get(result.trial),
                "losses": result.losses,
                "mean": result.mean_loss,
                "sd": stats.compute_deviation(result.losses),
                "chosen": result is retrained[0],
            }
            for result in retrained
        ],
        "test": {name: {key: test.get(key) for key in TEST_KEYS} for name, test in tests.items()},
        "comparison": compare_tests(tests) if tests else None,
        "findings": list(_describe_failures(retrained, tests)),
    }


def _describe_failures(
    retrained: Sequence[RetrainedConfig], tests: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Yield a sentence for settings that did not reach a finite loss from every seed."""
    if not retrained:
        return
    for name, result in (("best", retrained[0]), ("default", retrained[-1])):
        settings = "the config without a search"
        if name == "best":
            settings = f"the chosen settings (trial {result.trial})"
        failed, num_seeds = result.num_failed, len(result.losses)
        if failed:
            share = "any" if failed == num_seeds else str(failed)
            yield f"{settings} did not reach a finite loss from {share} of {num_seeds} seeds"
        elif reason := tests.get(name, {}).get("failed"):
            yield f"{settings} did not reach a finite loss in the test run: {reason}"
