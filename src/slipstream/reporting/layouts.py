"""What of a run's figures is shown first, by its task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class MetricColumn(NamedTuple):
    """One figure of the table that holds the model against the baselines."""

    heading: str
    section: str
    """Of the summary: metrics or scaled"""
    key: str
    decimals: int = 8
    which: str = "test"

    def of(self, found: Mapping[str, Any]) -> Any:
        """On its set; None where it means nothing."""
        return found[self.section][self.which][self.key]


class ReportLayout(NamedTuple):
    columns: tuple[MetricColumn, ...]
    brief: tuple[MetricColumn, ...]
    """What a terminal has room for"""
    headline: MetricColumn
    second: MetricColumn
    facts: tuple[tuple[MetricColumn, str], ...]
    """What stands at the top of the report, with its caption"""
    units: str
    page: str
    """The part of the report that is this task's own"""
    which: str = "test"
    what: str = "test set"
    """What all of it is of"""


def _column(heading: str, key: str, decimals: int = 8) -> MetricColumn:
    return MetricColumn(heading, "metrics", key, decimals)


_MAE, _RMSE, _R2 = _column("MAE", "mae"), _column("RMSE", "rmse"), _column("R²", "r2", 4)
_MOST, _BIAS = _column("max error", "max_error"), _column("bias", "bias")
_SCALED = MetricColumn("scaled MSE", "scaled", "mse"), MetricColumn("scaled MAE", "scaled", "mae")
NUMBERS = ReportLayout(
    columns=(_MAE, _RMSE, _MOST, _BIAS, _R2, *_SCALED),
    brief=(_MAE, _RMSE, _MOST, _R2, *_SCALED),
    headline=_MAE,
    second=_RMSE,
    facts=((_MAE, "test mean absolute error"), (_R2, "test R²")),
    units="physical units",
    page="numbers.html",
)
_LOSS = _column("log-loss", "log_loss", 4)
_BALANCED = _column("balanced accuracy", "balanced_accuracy", 4)
_CLASSES = (
    _LOSS,
    _BALANCED,
    _column("accuracy", "accuracy", 4),
    _column("F1 macro", "f1_macro", 4),
    _column("AUC", "auc", 4),
    _column("ECE", "ece", 4),
)
CLASSES = ReportLayout(
    columns=_CLASSES,
    brief=_CLASSES,
    headline=_LOSS,
    second=_BALANCED,
    facts=((_BALANCED, "test balanced accuracy"), (_LOSS, "test log-loss")),
    units="lower is better for log-loss and ECE",
    page="classes.html",
)
_FILLED = tuple(column._replace(which="val") for column in NUMBERS.brief)
ENCODER = ReportLayout(
    columns=_FILLED,
    brief=_FILLED,
    headline=_FILLED[0],
    second=_FILLED[1],
    facts=((_FILLED[4], "scaled MSE of masked rows"), (_FILLED[3], "R² of masked rows")),
    units="physical units",
    page="encoder.html",
    which="val",
    what="masked rows of the validation set",
)


def choose_layout(summary: Mapping[str, Any]) -> ReportLayout:
    if summary.get("objective") == "masked":
        return ENCODER
    return CLASSES if summary.get("classes") else NUMBERS
