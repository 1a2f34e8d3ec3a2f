"""What a terminal shows. Results go to stdout, everything else to stderr; cli calls these."""

from slipstream.screen.bench import Meter, show_bench, show_profile
from slipstream.screen.console import for_results
from slipstream.screen.doctor import show_doctor
from slipstream.screen.probe import show_probe
from slipstream.screen.search import SearchScreen, show_search
from slipstream.screen.streams import Unfailing, discard, prepare
from slipstream.screen.training import (
    Screen,
    show_evaluation,
    show_prediction,
    show_report,
    show_training,
)

__all__ = [
    "Meter",
    "Screen",
    "SearchScreen",
    "Unfailing",
    "discard",
    "for_results",
    "prepare",
    "show_bench",
    "show_doctor",
    "show_evaluation",
    "show_prediction",
    "show_probe",
    "show_profile",
    "show_report",
    "show_search",
    "show_training",
]
