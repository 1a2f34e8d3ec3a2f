"""A run's report: one self-contained HTML page, drawn from what the run folder holds. No torch."""

from slipstream.reporting.layouts import choose_layout
from slipstream.reporting.page import report
from slipstream.reporting.probe import build_headings as probe_headings
from slipstream.reporting.probe import build_rows as probe_rows
from slipstream.reporting.probe import describe_probe
from slipstream.reporting.wording import (
    beats_majority,
    describe_coverage,
    describe_estimate,
    describe_lanes,
    describe_search,
    describe_search_verdict,
    describe_settings,
    describe_usage,
    describe_verdict,
    format_energy,
    format_number,
    format_seconds,
    format_value,
    get_chosen,
    shorten_names,
)

__all__ = [
    "beats_majority",
    "choose_layout",
    "describe_coverage",
    "describe_estimate",
    "describe_lanes",
    "describe_probe",
    "describe_search",
    "describe_search_verdict",
    "describe_settings",
    "describe_usage",
    "describe_verdict",
    "format_energy",
    "format_number",
    "format_seconds",
    "format_value",
    "get_chosen",
    "probe_headings",
    "probe_rows",
    "report",
    "shorten_names",
]
