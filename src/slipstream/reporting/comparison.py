"""Writes the page that compares runs: their metrics, loss curves and settings that differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream import runs
from slipstream.reporting.plots.losses import draw_loss_curves
from slipstream.reporting.template import render_page, write_page
from slipstream.runs import Event, Run

CURVES_IN = (".", "retrained/best", "fine-tuned")
"""Where a run, a search and a probe have the log of the model that they predict with"""
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows"""


def write_comparison(
    path: Path, folders: Mapping[str, Path], tables: Mapping[str, Table], notes: Sequence[str]
) -> Path:
    """Write a self-contained page with the validation losses of the runs and four tables:
    metrics, differences, paired and settings."""
    curves = {name: events for name, folder in folders.items() if (events := read_epochs(folder))}
    page = render_page(
        "comparison.html",
        folders=folders,
        **tables,
        notes=notes,
        curves=draw_loss_curves(curves) if curves else None,
        missing=[name for name in folders if name not in curves],
    )
    return write_page(path, page)


def read_epochs(folder: Path) -> list[Event]:
    """Return the validations that a run has logged."""
    for inside in CURVES_IN:
        epochs = [
            event
            for event in runs.read_events(Run(folder / inside))
            if event["event"] == "epoch"
            and all(isinstance(event.get(key), int | float) for key in ("epoch", "val_loss"))
        ]
        if epochs:
            return epochs
    return []
