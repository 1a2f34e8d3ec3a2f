"""A run's report: one self-contained HTML page, drawn from what the run folder holds. No torch."""

from slipstream.reporting.page import number, report, seconds, verdict

__all__ = ["number", "report", "seconds", "verdict"]
