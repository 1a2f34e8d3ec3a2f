"""Numbers, durations and settings as text, and the metrics that a report shows first."""

import collections
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from slipstream.text import format_number as format_number

UNITS = {
    **{unit: unit for unit in ("mV", "kV", "mA", "kA", "mW", "kW", "MW", "Wh", "kWh", "MWh", "Ah")},
    **{unit: unit for unit in ("mAh", "Pa", "hPa", "kPa", "bar", "Hz", "kHz", "rpm", "ms", "min")},
    **{unit: unit for unit in ("mm", "cm", "km", "kg", "EUR", "USD")},
    "percent": "%",
    "pct": "%",
    "degC": "°C",
    "degF": "°F",
}
"""Units by the last part of a column's name, as in voltage_mV"""
QUANTITIES = {"voltage": "V", "current": "A", "power": "W", "time": "s", "duration": "s"}
"""Quantities that may end in a unit of one letter, as voltage_V does"""
BRACKETS = re.compile(r"[\[(]([^\[\]()]{1,12})[\])]\s*$")
METRIC_NAMES = {
    "log_loss": "log-loss",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "f1_macro": "F1 macro",
    "r2": "R²",
    "max_error": "max error",
    "bias": "bias",
    "pinball": "pinball loss",
    "coverage": "coverage",
}
"""Where the name is not the key in capitals"""
SCALED = "scaled_"
"""Start of the names of errors in standardised units, as in scaled_mse"""


def get_metric_name(key: str) -> str:
    return METRIC_NAMES.get(key, key.upper())


def format_metric(metric: str) -> str:
    """Return the name of a metric in a sentence; scaled_mse is in standardised units."""
    scaled = "scaled " if metric.startswith(SCALED) else ""
    return f"{scaled}{get_metric_name(metric.removeprefix(SCALED))}"


def format_seconds(value: float) -> str:
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def format_moment(value: float, is_date: bool) -> str:
    """Format a time: a date of so many microseconds since 1970, or a plain number."""
    if not is_date:
        return f"{value:,.10g}"
    moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=value)
    text = moment.strftime("%Y-%m-%d %H:%M:%S")
    return text.removesuffix(" 00:00:00")


def format_step(seconds: float, is_date: bool) -> str:
    """Format the time between two rows: of dates as a duration, else as a plain number."""
    if not is_date:
        return f"{seconds:,.6g}"
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= length and seconds % length == 0:
            count = round(seconds / length)
            return f"{count} {unit if count > 1 else unit[:-1]}"
    return f"{seconds:,.6g} s"


def describe_step(step: Mapping[str, Any]) -> str:
    """Describe a step of `data.prepare` in one line."""
    if step["step"] == "formula":
        return f"{step['name']} = {step['value']}"
    settings = [
        f"{key} {', '.join(map(str, value)) if isinstance(value, list | tuple) else value}"
        for key, value in step.items()
        if key != "step"
    ]
    return f"{step['step']} ({', '.join(settings)})" if settings else str(step["step"])


def format_value(value: Any) -> str:
    """Format a setting's value; floats with four significant figures."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Map settings to their names without the section, where that is unambiguous."""
    last = {name: name.partition(".")[2] or name for name in names}
    count = collections.Counter(last.values())
    return {name: short if count[short] == 1 else name for name, short in last.items()}


def find_unit(name: str) -> str:
    """Return the unit that a column's name ends with, in brackets or after an underscore."""
    if match := BRACKETS.search(name):
        return match[1].strip()
    before, _, last = name.rpartition("_")
    quantity = before.rpartition("_")[2].lower()
    return UNITS.get(last, "") or (last if before and QUANTITIES.get(quantity) == last else "")


def add_unit(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit and number != "–" else number


def sort_key(error: float | None) -> float:
    """Rank an error that is undefined last."""
    return math.inf if error is None else error


class MetricColumn(NamedTuple):
    """One metric in the table that compares the model with the baselines."""

    heading: str
    section: str
    """The summary's section: metrics or scaled"""
    key: str
    decimals: int = 8
    subset: str = "test"

    def read(self, result: Mapping[str, Any]) -> Any:
        """Return the metric's value on its set; None where it is undefined."""
        return result[self.section][self.subset][self.key]


class ReportLayout(NamedTuple):
    """The columns and parts of a report."""

    columns: tuple[MetricColumn, ...]
    compact: tuple[MetricColumn, ...]
    """The columns that fit on a terminal"""
    headline: MetricColumn
    second: MetricColumn
    facts: tuple[tuple[MetricColumn, str], ...]
    """The metrics at the top of the report, with their captions"""
    units: str
    page: str
    """The template of the task's own part of the report"""
    subset: str = "test"
    description: str = "test set"
    """Where all metrics come from"""


def _column(heading: str, key: str, decimals: int = 8) -> MetricColumn:
    return MetricColumn(heading, "metrics", key, decimals)


_MAE, _RMSE, _R2 = _column("MAE", "mae"), _column("RMSE", "rmse"), _column("R²", "r2", 4)
_MAX, _BIAS = _column("max error", "max_error"), _column("bias", "bias")
_SCALED = MetricColumn("scaled MSE", "scaled", "mse"), MetricColumn("scaled MAE", "scaled", "mae")
REGRESSION = ReportLayout(
    columns=(_MAE, _RMSE, _MAX, _BIAS, _R2, *_SCALED),
    compact=(_MAE, _RMSE, _MAX, _R2, *_SCALED),
    headline=_MAE,
    second=_RMSE,
    facts=((_MAE, "test mean absolute error"), (_R2, "test R²")),
    units="physical units",
    page="regression.html",
)
_LOG_LOSS = _column("log-loss", "log_loss", 4)
_BALANCED = _column("balanced accuracy", "balanced_accuracy", 4)
_OTHERS = {"accuracy": "accuracy", "F1 macro": "f1_macro", "AUC": "auc", "ECE": "ece"}
_CLASS_METRICS = (_LOG_LOSS, _BALANCED, *(_column(*item, 4) for item in _OTHERS.items()))
CLASSIFICATION = ReportLayout(
    columns=_CLASS_METRICS,
    compact=_CLASS_METRICS,
    headline=_LOG_LOSS,
    second=_BALANCED,
    facts=((_BALANCED, "test balanced accuracy"), (_LOG_LOSS, "test log-loss")),
    units="lower is better for log-loss and ECE",
    page="classification.html",
)
_MASKED = tuple(column._replace(subset="val") for column in REGRESSION.compact)
ENCODER = ReportLayout(
    columns=_MASKED,
    compact=_MASKED,
    headline=_MASKED[0],
    second=_MASKED[1],
    facts=((_MASKED[4], "scaled MSE of masked rows"), (_MASKED[3], "R² of masked rows")),
    units="physical units",
    page="encoder.html",
    subset="val",
    description="masked rows of the validation set",
)


def choose_layout(summary: Mapping[str, Any]) -> ReportLayout:
    """Return the layout of a run's task."""
    if summary.get("objective") == "masked":
        return ENCODER
    return CLASSIFICATION if summary.get("classes") else REGRESSION
