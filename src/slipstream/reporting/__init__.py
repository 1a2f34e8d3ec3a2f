"""A run's report: one self-contained HTML page, drawn from what the run folder holds. No torch."""

from slipstream.reporting.page import report
from slipstream.reporting.probe import headings as probe_headings
from slipstream.reporting.probe import probe_verdict
from slipstream.reporting.probe import rows as probe_rows
from slipstream.reporting.shown import shown
from slipstream.reporting.words import (
    beats,
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
    "beats",
    "chosen",
    "covered",
    "energy",
    "foresight",
    "lanes_told",
    "number",
    "probe_headings",
    "probe_rows",
    "probe_verdict",
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
