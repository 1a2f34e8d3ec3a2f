"""Plots one step: what host and device did, and when."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from slipstream import runs
from slipstream.profiling.trace import KIND_NAMES, STEP, Span, Trace, compute_self_time
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
MAX_STREAMS = 5


def plot_timeline(trace: Trace, folder: Path, *, title: str, wall_ms: float) -> None:
    """Write timeline.svg and timeline.png."""
    begin, end = _choose_step(trace)
    host = [span for span in compute_self_time(trace.host) if span.name != STEP]
    rows = {"host": host}
    for span in trace.device:
        rows.setdefault(span.row, []).append(span)
    visible = {
        name: [s for s in spans if s.end > begin and s.begin < end] for name, spans in rows.items()
    }
    busiest = sorted(visible, key=lambda name: -sum(s.end - s.begin for s in visible[name]))
    names = ["host", *[name for name in busiest if name != "host" and visible[name]][:MAX_STREAMS]]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 1.9 + 0.55 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        for place, name in enumerate(names):
            for kind in COLOURS:
                bars = _build_bars([s for s in visible[name] if s.kind == kind], begin, end)
                axes.broken_barh(bars, (place - 0.36, 0.72), color=COLOURS[kind], lw=0)
        labels = ["host" if name == "host" else f"device, {name}" for name in names]
        axes.set_yticks(range(len(names)), labels)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, (end - begin) / 1e3)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"ms, under the profiler; without it a step takes {wall_ms:.3g} ms")
        axes.set_title(f"{title}: one training step")
        kinds = [k for k in COLOURS if any(s.kind == k for name in names for s in visible[name])]
        handles = [Patch(color=COLOURS[kind], label=KIND_NAMES[kind]) for kind in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds))
        for kind in ("svg", "png"):
            with runs.replace_atomically(folder / f"timeline.{kind}") as temporary:
                figure.savefig(temporary, format=kind, dpi=150, facecolor="white")


def _choose_step(trace: Trace) -> tuple[float, float]:
    """Return the begin of the step of median length and that of the next one."""
    starts = [begin for begin, _ in trace.steps]
    if len(starts) == 1:
        return trace.begin, trace.end
    lengths = [(later - first, first) for first, later in itertools.pairwise(starts)]
    length, first = sorted(lengths)[len(lengths) // 2]
    return first, first + length


def _build_bars(spans: Sequence[Span], begin: float, end: float) -> list[tuple[float, float]]:
    bars = []
    for span in spans:
        first, last = max(span.begin, begin), min(span.end, end)
        bars.append(((first - begin) / 1e3, (last - first) / 1e3))
    return bars
