"""A run's report: one self-contained HTML page, drawn from what the run folder holds. No torch."""

from slipstream.reporting.page import report
from slipstream.reporting.words import energy, foresight, number, seconds, usage, verdict

__all__ = ["energy", "foresight", "number", "report", "seconds", "usage", "verdict"]
