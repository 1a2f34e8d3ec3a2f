"""Writes a profile as files, its verdict in words, and the timeline of one step."""

import csv
import gzip
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from slipstream import runs
from slipstream.profiling.bottleneck import StepFacts
from slipstream.profiling.trace import KIND_NAMES, STEP, Trace, compute_self_time
from slipstream.reporting.figure_style import STYLE
from slipstream.text import format_ms, format_number

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


def list_parts(facts: StepFacts) -> list[dict[str, Any]]:
    """List all parts of the step, largest first."""
    parts = {KIND_NAMES[kind]: ms for kind, ms in facts.kernels.items()}
    if facts.on_gpu:
        parts["copies to the GPU"] = facts.copy_ms
        parts["GPU idle: data"] = facts.idle["data"]
        parts["GPU idle: host waited"] = facts.idle["wait"]
        parts["GPU idle: launches, host"] = facts.idle["launch"]
    else:
        parts["data"] = facts.idle["data"]
        parts["Python, between operations"] = facts.idle["outside"]
    rows = sorted(((part, ms) for part, ms in parts.items() if ms > 0), key=lambda row: -row[1])
    return [{"part": part, "ms": ms, "share": ms / facts.wall_ms} for part, ms in rows]


def write_sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield the verdict in words."""
    yield (
        f"{result['verdict'].capitalize()}: {result['sentence']}. A step takes "
        f"{format_ms(result['ms_per_step'])} ({result['windows_per_s']:,.0f} windows a second)."
    )
    floor = result["floor"]
    names = {"arithmetic_ms": "arithmetic", "memory_ms": "memory", "chain_ms": "recurrent chain"}
    why = ", ".join(
        f"{name} {format_ms(floor[key])}" for key, name in names.items() if floor[key] > 0
    )
    times = f"{floor['times']:.1f}" if floor["times"] < 10 else f"{floor['times']:,.0f}"
    yield f"It is {times} times its floor of {format_ms(floor['ms'])} ({why})."
    if not result["changes"]:
        yield "Nothing that could be tried here makes it more than 5 % faster."
    for change in result["changes"]:
        gain = f"{format_number(change['gain'], figures=2)}x" if change["gain"] else ""
        how = f"{gain} as fast, tried" if change["tried"] else f"{gain} expected, not tried".strip()
        remark = f" ({change['remark']})" if change["remark"] else ""
        yield f"{change['setting']}: {how}{remark}."


def write_files(
    result: dict[str, Any], trace: Trace, chrome: bytes, folder: Path, *, tensorboard: bool
) -> None:
    """Write the result, the trace, the operations, the timeline and a summary into the folder."""
    runs.write_json(folder / "profile.json", result)
    with runs.replace_atomically(folder / "trace.json.gz") as temporary:
        temporary.write_bytes(gzip.compress(chrome, compresslevel=4))
    if tensorboard:
        target = folder / "tensorboard"
        target.mkdir()
        shutil.copyfile(folder / "trace.json.gz", target / "slipstream.pt.trace.json.gz")
    utf8: dict[str, Any] = {"mode": "w", "newline": "", "encoding": "utf-8"}
    with runs.replace_atomically(folder / "operations.csv") as path, path.open(**utf8) as file:
        writer = csv.DictWriter(file, ["place", "kind", "name", "calls", "ms"])
        writer.writeheader()
        writer.writerows(trace.operations)
    plot_timeline(trace, folder, title=result["name"], wall_ms=result["ms_per_step"])
    runs.write_text(folder / "summary.md", _format_summary(result))


def _format_summary(result: dict[str, Any]) -> str:
    lines = [f"# {result['name']}: {result['verdict']}", "", *result["sentences"], ""]
    lines += ["| part of the step | ms | share |", "|---|---|---|"]
    lines += [
        f"| {p['part']} | {format_number(p['ms'], figures=3)} | {p['share']:.0%} |"
        for p in result["parts"]
    ]
    lines += ["", "| operation | where | calls a step | ms a step |", "|---|---|---|---|"]
    lines += [
        f"| {o['name'][:80]} | {o['place']} | {format_number(o['calls'], figures=3)} | "
        f"{format_number(o['ms'], figures=3)} |"
        for o in result["operations"][:25]
    ]
    return "\n".join(lines) + "\n"


def plot_timeline(trace: Trace, folder: Path, *, title: str, wall_ms: float) -> None:
    """Write timeline.svg and timeline.png."""
    begin, end = _choose_step(trace)
    rows = {"host": [span for span in compute_self_time(trace.host) if span.name != STEP]}
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
                cut = [(max(s.begin, begin), s) for s in visible[name] if s.kind == kind]
                bars = [((b - begin) / 1e3, (min(s.end, end) - b) / 1e3) for b, s in cut]
                axes.broken_barh(bars, (place - 0.36, 0.72), color=COLOURS[kind], lw=0)
        labels = ["host" if name == "host" else f"device, {name}" for name in names]
        axes.set_yticks(range(len(names)), labels)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, (end - begin) / 1e3)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"ms, under the profiler; without it a step takes {format_ms(wall_ms)}")
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
