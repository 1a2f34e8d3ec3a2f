"""Filters of predictions in words."""

from collections.abc import Mapping
from typing import Any

FILTERS = {
    "moving_average": "moving average",
    "ema": "exponential average",
    "savgol": "Savitzky-Golay",
    "butterworth": "Butterworth low-pass",
}


def describe_filter(summary: Mapping[str, Any]) -> str:
    """Return the filter of a summary and its delay; empty where there is none."""
    settings = summary.get("filter")
    if not settings:
        return ""
    parts = [FILTERS[settings["kind"]]]
    parts += [f"{settings['rows']} rows"] if "rows" in settings else []
    parts += [f"cut-off {settings['cutoff_hz']:g} Hz"] if "cutoff_hz" in settings else []
    parts += [f"order {settings['order']}"] if "order" in settings else []
    delay = settings["delay_rows"]
    late = f"a steady change is {delay:.3g} rows late" if delay else "a steady change is not late"
    return f"predictions are filtered ({', '.join(parts)}): {late}"


def list_unfiltered(summary: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """List the model without `predict.filter`, where there is one, by the name of its row."""
    return [("unfiltered", summary["unfiltered"])] if summary.get("unfiltered") else []
