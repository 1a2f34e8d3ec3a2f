"""Terminal output. Results go to stdout, progress to stderr; `cli` calls these functions."""

from slipstream.terminal.bench import ProgressMeter, print_bench, print_profile
from slipstream.terminal.console import create_result_console
from slipstream.terminal.doctor import print_doctor
from slipstream.terminal.results import (
    print_evaluation,
    print_prediction,
    print_probe,
    print_report,
    print_training,
)
from slipstream.terminal.search import SearchDisplay
from slipstream.terminal.search_results import print_search
from slipstream.terminal.streams import SafeStream, discard_output, prepare_streams
from slipstream.terminal.training import TrainingDisplay

__all__ = [
    "ProgressMeter",
    "SafeStream",
    "SearchDisplay",
    "TrainingDisplay",
    "create_result_console",
    "discard_output",
    "prepare_streams",
    "print_bench",
    "print_doctor",
    "print_evaluation",
    "print_prediction",
    "print_probe",
    "print_profile",
    "print_report",
    "print_search",
    "print_training",
]
