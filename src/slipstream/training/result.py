"""The result of a training run."""

from __future__ import annotations

from collections.abc import Iterator
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
        return format_table(self._title, self._headings, list(self._rows()))

    def _repr_html_(self) -> str:
        return format_html_table(self._title, self._headings, list(self._rows()))

    @property
    def _set(self) -> str:
        """The set whose metrics are shown: an encoder has no test set."""
        return "test" if "test" in self.metrics else "val"

    @property
    def _columns(self) -> dict[str, str]:
        return CLASSIFICATION if self.summary.get("classes") else REGRESSION

    @property
    def _title(self) -> str:
        return f"Result of {self.run} ({self._set} set)"

    @property
    def _headings(self) -> list[str]:
        return ["", *self._columns.values()]

    def _rows(self) -> Iterator[list[str]]:
        others = {"ensemble": self.summary.get("ensemble"), **self.baselines}
        metrics = {"model": self.metrics} | {
            name: found["metrics"] for name, found in others.items() if found
        }
        for name, by_set in metrics.items():
            values = (by_set[self._set].get(key) for key in self._columns)
            yield [name, *("–" if value is None else f"{value:.4g}" for value in values)]
