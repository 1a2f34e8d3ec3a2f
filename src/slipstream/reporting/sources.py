"""What a page is drawn from, read so that damage is named and not drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream import runs
from slipstream.errors import UserError
from slipstream.runs import Event, Run

OF_RUN = (
    *("config.toml", "plan.json", "metrics.json"),
    *("predictions.parquet", "reconstructions.parquet"),
)
OF_SEARCH = ("config.toml", "metrics.json", "trials.json", "best.toml")
OF_PROBE = ("summary.json", "labels.toml", "encoder.toml")
NUMBERS = {
    "log": ("epoch", "loss", "lr"),
    "epoch": ("epoch", "train_loss", "val_loss"),
    "monitor": ("seconds",),
}
"""What curves are drawn from, by event"""
BROKEN = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What drawing from damaged figures may end in; Arrow's errors are of these kinds too"""


@contextmanager
def verify_sources(folder: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Compare files with the run's sums before a page is drawn from them.

    Without sums, as in runs of version 0.1, drawing shows whether they are sound.
    """
    runs.verify_files(folder, *names)
    try:
        yield
    except BROKEN as error:
        on_writing = isinstance(error, OSError) and error.errno is not None
        if on_writing or (folder / "manifest.json").exists():  # what is read is sound
            raise
        raise UserError(
            f"{folder}: no report can be drawn, since one of {', '.join(names)} is damaged or "
            f"incomplete ({type(error).__name__}: {error}); restore it from a copy, or train again"
        ) from None


def read_plot_events(run: Run) -> tuple[list[Event], list[str]]:
    """The lines of the log that curves can be drawn from, and notes on those left out."""
    events, notes = runs.read_log(run)
    return [event for event in events if _can_be_drawn(event)], notes


def _can_be_drawn(event: Event) -> bool:
    return all(
        name in event and (event[name] is None or isinstance(event[name], (int, float)))
        for name in NUMBERS.get(event["event"], ())
    )
