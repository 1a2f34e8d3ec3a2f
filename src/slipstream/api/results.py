"""What training, a search and a probe give back: small objects over a run folder."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from slipstream import runs
from slipstream.api import inference
from slipstream.base.errors import UserError
from slipstream.base.text import format_count, format_html_table, format_number, format_table
from slipstream.config import Config
from slipstream.events import Epoch, TrialEnd
from slipstream.reporting import streaming, wording
from slipstream.reporting.wording import choose_layout, format_value, sort_key
from slipstream.runs import Run
from slipstream.runs.summary import (
    ProbeSummary,
    RunSummary,
    SearchSummary,
    Summary,
    read_metric,
)

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    import pyarrow as pa

    from slipstream.api.inference import Evaluation
    from slipstream.api.model import TrainedModel

TEXT_COLUMNS = 4
"""Metrics in the text of a result; a notebook shows more of them"""
MAX_SETTINGS = 4
"""Settings in the text of a study"""
Table = tuple[str, list[str], list[list[str]]]


@dataclass(frozen=True, repr=False, eq=False)
class RunRecord:
    """What the three have in common: a folder, its summary, and a model to use."""

    run: Path
    summary: Summary

    def __fspath__(self) -> str:
        """Stand for the folder wherever a path is accepted."""
        return str(self.run)

    @property
    def report_path(self) -> Path:
        """The run's report.html; it is written first where there is none yet."""
        path = self.run / "report.html"
        return path if path.exists() else inference.report(self.run)

    def model(self, **options: Any) -> TrainedModel:
        """Load the trained model; the options are those of `slipstream.load`."""
        return inference.load(self._model_run, **options)

    def predict(self, data: Any, **options: Any) -> pa.Table:
        """Predict new data; the options are those of `slipstream.predict`."""
        return inference.predict(self._model_run, data, **options)

    def evaluate(self, data: Any = None, **options: Any) -> Evaluation:
        """Score the test set or new data; the options are those of `slipstream.evaluate`."""
        return inference.evaluate(self._model_run, data, **options)

    @property
    def _model_run(self) -> Path:
        return self.run


@dataclass(frozen=True, repr=False, eq=False)
class Result(RunRecord):
    """The result of `train` or `pretrain`. It prints as a small table, and stands for its run
    folder wherever a path is accepted.

    Attributes:
        run: The run folder.
        metrics: By set (train, val, test): mae, rmse, mse, r2, max_error and bias in physical
            units, and relative to the size of each series mase (of forecasts), smape and wape (in
            percent); with quantiles also pinball, crps, coverage and width; for classes
            accuracy, balanced_accuracy, f1_macro, log_loss, auc and ece.
        baselines: By name (repeat, seasonal, ridge, gbm; for classes majority, logistic, gbm,
            rocket): a mapping with the same metrics, or None where a baseline does not apply.
        history: Every validation, in order: `slipstream.events.Epoch` with `epoch`, `train_loss`,
            `val_loss`, `lr`; `pandas.DataFrame(result.history)` is a table of them.
        config: The `Config` of the run, complete.
        plan: How it was trained: device, precision, threads, and why (a dict, as in plan.json).
        verdict: A sentence on the model and the baselines.
        summary: The object that `slipstream train --json` prints.
        report_path: The path of report.html; it is written first where there is none yet.
        model: A function: the trained model, as from `slipstream.load`.
        predict: A function: predictions for new data, as from `slipstream.predict`.
        evaluate: A function: metrics on a set or on new data, as from `slipstream.evaluate`.
        to_pandas: A function: a table of the metrics, one row for each set and each of the model,
            the ensemble and the baselines.
        open: A class method that returns the result of an earlier run from its folder.

    Example:
        result = slipstream.train("job.toml")
        result.metrics["test"]["mae"]
        result.predict("latest.csv").to_pandas()
        slipstream.Result.open("runs/job-20260131T120000Z").history[-1].val_loss
    """

    summary: RunSummary

    @classmethod
    def open(cls, run: str | os.PathLike[str]) -> Result:
        """Return the result of a finished run from its folder."""
        folder = runs.open_run(Path(run)).folder
        if untested := runs.describe_untested(folder):
            raise UserError(
                f"{folder}: is {untested}; it has no metrics: use slipstream.load or predict"
            )
        summary = runs.read_metrics(folder)
        if "metrics" not in summary:  # a search, whose models are runs of their own
            chosen = folder / "retrained" / "best"
            advice = (
                f"open the run that it chose: {chosen}" if chosen.exists() else "none is tested"
            )
            raise UserError(f"{folder}: is a search of many models; {advice}")
        summary.pop("detail", None)
        return cls(folder, summary)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        return cast(dict[str, dict[str, float]], self.summary["metrics"])

    @property
    def baselines(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.summary["baselines"])

    @cached_property
    def history(self) -> list[Epoch]:
        events = runs.read_events(Run(self.run))
        return [event for event in events if isinstance(event, Epoch)]

    @cached_property
    def config(self) -> Config:
        return runs.load_config(Run(self.run))

    @property
    def plan(self) -> dict[str, Any]:
        return self.summary["plan"]

    @property
    def verdict(self) -> str:
        return wording.describe_verdict(self.summary)

    def to_pandas(self) -> pd.DataFrame:
        """Return the metrics, one row for each predictor and set."""
        import pandas as pd

        rows = [
            {"name": name, "set": subset, **metrics}
            for name, result in self._list_predictors().items()
            for subset, metrics in result["metrics"].items()
        ]
        return pd.DataFrame(rows).set_index(["name", "set"])

    def __repr__(self) -> str:
        title, headings, rows = self._tabulate(TEXT_COLUMNS)
        best = self._find_best_baseline()
        rows = [row for row in rows if row[0] in ("model", "unfiltered", "ensemble", best)]
        return f"{format_table(title, headings, rows)}\nrun: {_shorten(self.run)}"

    def _repr_html_(self) -> str:
        from slipstream.reporting.plots.training import draw_history  # imports numpy

        lines = [self.verdict, f"run: {_shorten(self.run)}"]
        return _format_html(self._tabulate(), lines, draw_history(self.history))

    def _list_predictors(self) -> dict[str, Any]:
        members = dict(wording.list_members(self.summary))
        found = {
            **dict(streaming.list_unfiltered(self.summary)),
            "ensemble": self.summary.get("ensemble"),
            **members,
            **self.baselines,
        }
        return {"model": self.summary, **{name: result for name, result in found.items() if result}}

    def _find_best_baseline(self) -> str | None:
        headline = choose_layout(self.summary).headline
        errors = {
            name: sort_key(read_metric(result, headline.subset, headline.metric))
            for name, result in self.baselines.items()
            if result
        }
        return min(errors, key=lambda name: errors[name], default=None)

    def _tabulate(self, most: int | None = None) -> Table:
        """Return the title, the headings and the rows of the table of metrics."""
        layout = choose_layout(self.summary)
        columns = layout.compact[:most]
        rows = [
            [
                name,
                *(
                    format_number(
                        read_metric(result, column.subset, column.metric), column.decimals
                    )
                    for column in columns
                ),
            ]
            for name, result in self._list_predictors().items()
        ]
        windows = self.summary["windows"][layout.subset]
        title = (
            f"Result of {self.summary['name']}: {layout.description}, "
            f"{format_count(windows, 'window')}"
        )
        return title, ["", *(column.heading for column in columns)], rows


@dataclass(frozen=True, repr=False, eq=False)
class Study(RunRecord):
    """The result of `tune` and `auto`. It prints as its verdict and the chosen settings, and stands
    for its run folder wherever a path is accepted.

    Attributes:
        run: The run folder.
        best: The chosen `Config`.
        result: The `Result` of the chosen settings, retrained and tested; None without retraining.
        metrics: Those of `result`, by set; empty without retraining.
        baselines: Those of `result`; empty without retraining.
        history: Every trial, in the order of their ends: `slipstream.events.TrialEnd` with `trial`,
            `state`, `value` and `params`.
        config: The `Config` that the search began with.
        plan: How `result` was trained; empty without retraining.
        verdict: Sentences on the chosen settings and the config without a search.
        leaderboard: Of `auto`: everything that was tried, the best first, as a table.
        refit: Of `auto` with `refit=True`: the folder of the model that was trained on all rows,
            for `slipstream.predict` and `slipstream.load`; else None.
        summary: The object that `slipstream tune --json` prints.
        study: Optuna's own study.
        report_path: The path of report.html; it is written first where there is none yet.
        model: A function: the model of the best settings, as from `slipstream.load`.
        predict: A function: predictions for new data, as from `slipstream.predict`.
        evaluate: A function: metrics on a set or on new data, as from `slipstream.evaluate`.
        to_pandas: A function: a table of the trials.

    Example:
        study = slipstream.tune("job.toml")
        study.best.train.lr
        study.to_pandas().sort_values("value")
        optuna.visualization.plot_optimization_history(study.study)
    """

    summary: SearchSummary
    best: Config
    study: optuna.Study

    @cached_property
    def result(self) -> Result | None:
        tested = self.run / "retrained" / "best"
        return Result.open(tested) if (tested / "metrics.json").exists() else None

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        return self.result.metrics if self.result else {}

    @property
    def baselines(self) -> dict[str, Any]:
        return self.result.baselines if self.result else {}

    @cached_property
    def history(self) -> list[TrialEnd]:
        events = runs.read_events(Run(self.run))
        return [event for event in events if isinstance(event, TrialEnd)]

    @cached_property
    def config(self) -> Config:
        return runs.load_config(Run(self.run))

    @property
    def plan(self) -> dict[str, Any]:
        return self.result.plan if self.result else {}

    @property
    def verdict(self) -> str:
        if "leaderboard" in self.summary:
            return self.summary["verdict"]
        return wording.describe_search_verdict(self.summary, reader="python")

    @property
    def leaderboard(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.summary.get("leaderboard", []))

    @property
    def refit(self) -> Path | None:
        found = self.summary.get("refit")
        return Path(found["run"]) if found and found["run"] else None

    def to_pandas(self) -> pd.DataFrame:
        """Return the trials, one row for each, with a column for each setting."""
        import pandas as pd

        trials = runs.read_json(self.run / "trials.json")
        rows = [
            {key: value for key, value in trial.items() if not isinstance(value, (dict, list))}
            | trial["params"]
            for trial in trials
        ]
        return pd.DataFrame(rows).set_index("trial")

    def __repr__(self) -> str:
        title, headings, rows = self._tabulate()
        more = len(rows) - MAX_SETTINGS
        rows = [*rows[:MAX_SETTINGS], *([[f"and {more} more", ""]] if more > 0 else [])]
        return f"{format_table(title, headings, rows)}\nrun: {_shorten(self.run)}"

    def _repr_html_(self) -> str:
        from slipstream.reporting.plots.training import draw_history  # imports numpy

        curve = draw_history(self.result.history) if self.result else ""
        return _format_html(self._tabulate(), [self.verdict, f"run: {_shorten(self.run)}"], curve)

    def _tabulate(self) -> Table:
        chosen = wording.get_chosen(self.summary)
        count = sum(self.summary["trials"].values())
        title = (
            f"Study of {self.summary['name']}: best of {format_count(count, 'trial')}, trial "
            f"{chosen['trial']}"
        )
        rows = [[name, format_value(value)] for name, value in (chosen["params"] or {}).items()]
        return title, ["setting", "best"], rows


@dataclass(frozen=True, repr=False, eq=False)
class Probe(RunRecord):
    """The result of `probe`. It prints as its verdict and a table of metrics.

    Attributes:
        run: The folder that holds the four runs.
        results: The `Result` of each run: "scratch", "frozen" and "fine-tuned".
        metrics: By run, the mean, the deviation and the values by seed of the test metrics.
        baselines: By name, the test metrics of the baselines.
        history: The validations of the fine-tuned run.
        config: The `Config` of the fine-tuned run.
        plan: How the fine-tuned run was trained.
        verdict: Sentences on whether pre-training helped.
        summary: The object that `slipstream pretrain --probe --json` prints.
        report_path: The path of report.html; it is written first where there is none yet.
        model: A function: the fine-tuned model, as from `slipstream.load`.
        predict: A function: predictions of the fine-tuned model for new data.
        evaluate: A function: metrics of the fine-tuned model on a set or on new data.
        to_pandas: A function: a table of the test metrics, one row for each run and seed.

    Example:
        probe = slipstream.probe("bars.toml", "labels.toml")
        probe.verdict
        probe.results["fine-tuned"].metrics["test"]
    """

    summary: ProbeSummary

    @cached_property
    def results(self) -> dict[str, Result]:
        return {name: Result.open(way["run"]) for name, way in self.summary["ways"].items()}

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        return {name: dict(way["metrics"]) for name, way in self.summary["ways"].items()}

    @property
    def baselines(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.summary["baselines"])

    @property
    def history(self) -> list[Epoch]:
        return self.results[wording.FINE_TUNED].history

    @property
    def config(self) -> Config:
        return self.results[wording.FINE_TUNED].config

    @property
    def plan(self) -> dict[str, Any]:
        return self.results[wording.FINE_TUNED].plan

    @property
    def verdict(self) -> str:
        return self.summary["verdict"]

    @property
    def _model_run(self) -> Path:
        return Path(self.summary["ways"][wording.FINE_TUNED]["run"])

    def to_pandas(self) -> pd.DataFrame:
        """Return the test metrics, one row for each run and seed."""
        import pandas as pd

        rows = [
            {"run": name, "seed": seed}
            | {key: result["by_seed"][place] for key, result in way["metrics"].items()}
            for name, way in self.summary["ways"].items()
            for place, seed in enumerate(self.summary["seeds"])
        ]
        return pd.DataFrame(rows).set_index(["run", "seed"])

    def __repr__(self) -> str:
        title, headings, rows = self._tabulate()
        rows = [row for row in rows if row[0] in self.summary["ways"]]
        return format_table(title, headings, rows)

    def _repr_html_(self) -> str:
        return _format_html(self._tabulate(), [self.verdict, f"run: {_shorten(self.run)}"], "")

    def _tabulate(self) -> Table:
        helped = self.verdict.partition(":")[0]
        rows = [[row["name"], *row["cells"]] for row in wording.build_probe_rows(self.summary)]
        headings = ["", *wording.build_probe_headings(self.summary)]
        return (
            f"Probe of {self.summary['name']}: {helped}; run: {_shorten(self.run)}",
            headings,
            rows,
        )


def _shorten(path: Path) -> Path:
    """Return a path below the working folder without that folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _format_html(table: Table, lines: Sequence[str], curve: str) -> str:
    paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f"<div>{format_html_table(*table)}{curve}{paragraphs}</div>"
