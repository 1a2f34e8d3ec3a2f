"""What of a run's figures is shown first, by its task."""

from __future__ import annotations

from typing import Any, NamedTuple


class Column(NamedTuple):
    """One figure of the table that holds the model against the baselines."""

    heading: str
    section: str
    """Of the summary: metrics or scaled"""
    key: str
    decimals: int = 8

    def of(self, found: dict[str, Any]) -> Any:
        """On the test set; None where it means nothing."""
        return found[self.section]["test"][self.key]


class Shown(NamedTuple):
    columns: tuple[Column, ...]
    brief: tuple[Column, ...]
    """What a terminal has room for"""
    headline: Column
    second: Column
    facts: tuple[tuple[Column, str], ...]
    """What stands at the top of the report, with its caption"""
    units: str
    page: str
    """The part of the report that is this task's own"""


def _column(heading: str, key: str, decimals: int = 8) -> Column:
    return Column(heading, "metrics", key, decimals)


_MAE, _RMSE, _R2 = _column("MAE", "mae"), _column("RMSE", "rmse"), _column("R²", "r2", 4)
_MOST, _BIAS = _column("max error", "max_error"), _column("bias", "bias")
_SCALED = Column("scaled MSE", "scaled", "mse"), Column("scaled MAE", "scaled", "mae")
NUMBERS = Shown(
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
CLASSES = Shown(
    columns=_CLASSES,
    brief=_CLASSES,
    headline=_LOSS,
    second=_BALANCED,
    facts=((_BALANCED, "test balanced accuracy"), (_LOSS, "test log-loss")),
    units="lower is better for log-loss and ECE",
    page="classes.html",
)


def shown(summary: dict[str, Any]) -> Shown:
    return CLASSES if summary.get("classes") else NUMBERS
