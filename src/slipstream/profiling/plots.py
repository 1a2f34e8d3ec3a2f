"""One step as a picture: what host and device did, and when."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from slipstream import runs
from slipstream.profiling.trace import STEP, Span, Trace, compute_self_time
from slipstream.reporting.plots.style import STYLE

COLOURS = {
    "recurrent": "#2563eb",
    "matrix": "#7c3aed",
    "attention": "#0891b2",
    "optimizer": "#10b981",
    "copy": "#f97316",
    "data": "#f59e0b",
    "wait": "#ef4444",
    "launch": "#94a3b8",
    "other": "#cbd5e1",
}
NAMES = {
    "recurrent": "recurrent layers",
    "matrix": "matrix products",
    "optimizer": "weight update",
    "copy": "copies",
    "wait": "waiting",
    "launch": "driver calls",
    "other": "other operations",
}
MOST_ROWS = 5


def plot_timeline(trace: Trace, folder: Path, *, title: str, wall_ms: float) -> None:
    """timeline.svg and timeline.png."""
    begin, end = _window(trace)
    host = [span for span in compute_self_time(trace.host) if span.name != STEP]
    rows = {"host": host}
    for span in trace.device:
        rows.setdefault(span.row, []).append(span)
    shown = {
        name: [s for s in spans if s.end > begin and s.begin < end] for name, spans in rows.items()
    }
    busiest = sorted(shown, key=lambda name: -sum(s.end - s.begin for s in shown[name]))
    names = ["host", *[name for name in busiest if name != "host" and shown[name]][:MOST_ROWS]]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 1.9 + 0.55 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        for place, name in enumerate(names):
            for kind in COLOURS:
                bars = _bars([s for s in shown[name] if s.kind == kind], begin, end)
                axes.broken_barh(bars, (place - 0.36, 0.72), color=COLOURS[kind], lw=0)
        labels = ["host" if name == "host" else f"device, {name}" for name in names]
        axes.set_yticks(range(len(names)), labels)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, (end - begin) / 1e3)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"ms, under the profiler; without it a step takes {wall_ms:.3g} ms")
        axes.set_title(f"{title}: one training step")
        kinds = [k for k in COLOURS if any(s.kind == k for name in names for s in shown[name])]
        handles = [Patch(color=COLOURS[kind], label=NAMES.get(kind, kind)) for kind in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds))
        for kind in ("svg", "png"):
            with runs.replace_atomically(folder / f"timeline.{kind}") as temporary:
                figure.savefig(temporary, format=kind, dpi=150, facecolor="white")


def _window(trace: Trace) -> tuple[float, float]:
    """A step of middling length, from its begin to the next one's."""
    starts = [begin for begin, _ in trace.steps]
    if len(starts) == 1:
        return trace.begin, trace.end
    lengths = [(later - first, first) for first, later in itertools.pairwise(starts)]
    length, first = sorted(lengths)[len(lengths) // 2]
    return first, first + length


def _bars(spans: Sequence[Span], begin: float, end: float) -> list[tuple[float, float]]:
    found = []
    for span in spans:
        first, last = max(span.begin, begin), min(span.end, end)
        found.append(((first - begin) / 1e3, (last - first) / 1e3))
    return found
