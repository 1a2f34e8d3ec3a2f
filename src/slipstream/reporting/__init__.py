"""A run's report: one self-contained HTML page, drawn from what the run folder holds. No torch."""

from slipstream.reporting.page import report
from slipstream.reporting.shown import shown
from slipstream.reporting.words import (
    chosen,
    covered,
    energy,
    foresight,
    lanes_told,
    number,
    search_told,
    search_verdict,
    seconds,
    setting,
    settings_told,
    short_names,
    usage,
    verdict,
)

__all__ = [
    "chosen",
    "covered",
    "energy",
    "foresight",
    "lanes_told",
    "number",
    "report",
    "search_told",
    "search_verdict",
    "seconds",
    "setting",
    "settings_told",
    "short_names",
    "shown",
    "usage",
    "verdict",
]
