"""The end of a command that makes a run: its summary, then its report."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.cli.output import Printer, print_result
from slipstream.errors import Interrupted
from slipstream.phases import PhaseTimer
from slipstream.terminal.results import print_report, print_training
from slipstream.terminal.search import SearchDisplay
from slipstream.terminal.streams import SafeStream
from slipstream.terminal.training import TrainingDisplay

if TYPE_CHECKING:
    from slipstream.runs import Event

REPORTING = "slipstream.reporting.page"


def show_event(event: Event, display: TrainingDisplay | SearchDisplay, has_classes: bool) -> None:
    """Show an event; from the first epoch on, prepare the command's end."""
    display.show(event)
    if event["event"] == "epoch" and REPORTING not in sys.modules:
        threading.Thread(target=_prepare_end, args=(has_classes,), daemon=True).start()


def _prepare_end(has_classes: bool) -> None:
    """Import what fits baselines and draws the report, and compile its templates, while the model
    trains."""
    with suppress(Exception):  # who needs it raises it again
        importlib.import_module(REPORTING)
        if has_classes:
            importlib.import_module("scipy.optimize")
        importlib.import_module("slipstream.reporting.template").compile_templates()


class Output(NamedTuple):
    """How a summary is printed."""

    as_json: bool
    quiet: bool
    print_text: Printer = print_training


class DrawnReport(NamedTuple):
    """The report of a run, or the exit code of the signal that came while it was drawn."""

    path: Path | None
    exit_code: int = 0


def finish(summary: dict[str, Any], output: Output, timer: PhaseTimer | None = None) -> None:
    """Print the summary, then draw the report; JSON has the path of the report, and comes last."""
    closed = None
    if not output.as_json:
        try:
            print_result(summary, *output)
        except SystemExit as stop:  # the reader of stdout has gone
            closed = stop
    report = _draw_report(summary, timer)
    path = report.path and str(report.path)
    if output.as_json:
        print_result(summary | {"report": path}, *output)
    elif not closed:
        paths = {"run": summary["run"], "report": path}
        print_result(paths, *output._replace(print_text=print_report))
    if closed:
        raise closed
    if path is None:
        message = "the run is complete, but its report was interrupted; draw it with: slipstream "
        SafeStream(sys.stderr).write(f"slipstream: {message}report {summary['run']}\n")
        raise SystemExit(report.exit_code)


def _draw_report(summary: dict[str, Any], timer: PhaseTimer | None) -> DrawnReport:
    """Draw the report, and count its time. The run is complete by then, so an interrupt only leaves
    the report out."""
    from slipstream import runs

    folder = Path(summary["run"])
    try:
        from slipstream.reporting.page import report

        path = report(folder)
        if timer is not None:
            summary["time"] = timer.extend(summary["time"], "report_s")
            runs.update_metrics(folder, time=summary["time"])
        return DrawnReport(path)
    except KeyboardInterrupt:
        return DrawnReport(None, 128 + signal.SIGINT)
    except Interrupted as stop:
        return DrawnReport(None, stop.exit_code)
