"""Numbers, durations, settings and metric names as text."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import Any

METRIC_NAMES = {"log_loss": "log-loss", "balanced_accuracy": "balanced accuracy"}


def get_metric_name(key: str) -> str:
    return METRIC_NAMES.get(key, key.upper())


def format_number(value: float | None, decimals: int = 8, *, figures: int = 4) -> str:
    """Format a number with so many significant figures and at most so many decimals."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, figures - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, decimals)}f}"


def format_seconds(value: float) -> str:
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


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


def sort_key(error: float | None) -> float:
    """Rank an error that is undefined last."""
    return math.inf if error is None else error
