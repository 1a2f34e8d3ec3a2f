"""Reports: one self-contained HTML page from the files of a run folder. No torch."""

from slipstream.reporting.formatting import (
    format_number,
    format_seconds,
    format_value,
    shorten_names,
)
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
    get_chosen,
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
