"""The result of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.text import format_html_table, format_table

REGRESSION = {"mae": "MAE", "rmse": "RMSE", "r2": "R²"}
CLASSIFICATION = {
    "log_loss": "log-loss",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
}


@dataclass(frozen=True, repr=False)
class Result:
    """The result of `train` or `pretrain`; it prints as a table of metrics.

    Attributes:
        run: The run folder.
        metrics: By set (train, val, test): mae, rmse, mse, r2, max_error and bias in physical
            units; for classes accuracy, balanced_accuracy, f1_macro, log_loss, auc and ece.
        baselines: By name (repeat, seasonal, ridge; for classes majority and logistic): a mapping
            with the same metrics, or None where a baseline does not apply.
        summary: The object that `slipstream train --json` prints.

    Example:
        result = slipstream.train("job.toml")
        result.metrics["test"]["mae"]
        result.baselines["ridge"]["metrics"]["test"]["mae"]
    """

    run: Path
    metrics: dict[str, dict[str, float]]
    baselines: dict[str, Any]
    summary: dict[str, Any]

    def __repr__(self) -> str:
        return format_table(*self._tabulate())

    def _repr_html_(self) -> str:
        return format_html_table(*self._tabulate())

    def _tabulate(self) -> tuple[str, list[str], list[list[str]]]:
        """Return the title, the headings and the rows of the table of metrics."""
        which = "test" if "test" in self.metrics else "val"  # an encoder has no test set
        columns = CLASSIFICATION if self.summary.get("classes") else REGRESSION
        others = {"ensemble": self.summary.get("ensemble"), **self.baselines}
        metrics = {"model": self.metrics}
        metrics |= {name: one["metrics"] for name, one in others.items() if one}
        rows = []
        for name, by_set in metrics.items():
            values = (by_set[which].get(key) for key in columns)
            rows.append([name, *("–" if value is None else f"{value:.4g}" for value in values)])
        return f"Result of {self.run} ({which} set)", ["", *columns.values()], rows
