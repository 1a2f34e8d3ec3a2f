"""A run's report: one self-contained HTML page, drawn from what the run folder holds. No torch."""

from slipstream.reporting.page import report
from slipstream.reporting.shown import shown
from slipstream.reporting.words import (
    covered,
    energy,
    foresight,
    lanes_told,
    number,
    seconds,
    usage,
    verdict,
)

__all__ = [
    "covered",
    "energy",
    "foresight",
    "lanes_told",
    "number",
    "report",
    "seconds",
    "shown",
    "usage",
    "verdict",
]
