"""Reads the files of a report; damage is reported instead of drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream import runs
from slipstream.errors import UserError
from slipstream.runs import Event, Run

RUN_FILES = (
    *("config.toml", "plan.json", "metrics.json"),
    *("predictions.parquet", "reconstructions.parquet"),
)
SEARCH_FILES = ("config.toml", "metrics.json", "trials.json", "best.toml")
PROBE_FILES = ("summary.json", "labels.toml", "encoder.toml")
PLOTTED = {
    "log": ("epoch", "loss", "lr"),
    "epoch": ("epoch", "train_loss", "val_loss"),
    "monitor": ("seconds",),
}
"""Numbers that curves are drawn from, by event"""
DAMAGE_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors that damaged files may raise while drawing; Arrow's errors derive from these too"""


@contextmanager
def verify_sources(folder: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Compare files with the run's checksums before drawing from them.

    Runs of version 0.1 have no checksums; there, an error while drawing reveals the damage.
    """
    runs.verify_files(folder, *names)
    try:
        yield
    except DAMAGE_ERRORS as error:
        on_writing = isinstance(error, OSError) and error.errno is not None
        if on_writing or (folder / "manifest.json").exists():  # the sources are intact
            raise
        raise UserError(
            f"{folder}: cannot draw the report, because one of {', '.join(names)} is damaged or "
            f"incomplete ({type(error).__name__}: {error}); restore it from a copy, or train again"
        ) from None


def read_plot_events(run: Run) -> tuple[list[Event], list[str]]:
    """Return the events that curves can be drawn from, and notes on skipped lines."""
    events, notes = runs.read_log(run)
    return [event for event in events if _is_plottable(event)], notes


def _is_plottable(event: Event) -> bool:
    return all(
        name in event and (event[name] is None or isinstance(event[name], (int, float)))
        for name in PLOTTED.get(event["event"], ())
    )
