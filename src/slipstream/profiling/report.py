"""Writes a profile as files, and its verdict in words."""

from __future__ import annotations

import csv
import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.profiling import plots
from slipstream.profiling.bottleneck import StepFacts
from slipstream.profiling.trace import KIND_NAMES, Trace


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
    rows = [
        {"part": part, "ms": ms, "share": ms / facts.wall_ms}
        for part, ms in parts.items()
        if ms > 0
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def write_sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield the verdict in words."""
    yield (
        f"{result['verdict'].capitalize()}: {result['sentence']}. A step takes "
        f"{result['ms_per_step']:.3g} ms ({result['windows_per_s']:,.0f} windows a second)."
    )
    floor = result["floor"]
    names = {"arithmetic_ms": "arithmetic", "memory_ms": "memory", "chain_ms": "recurrent chain"}
    why = ", ".join(f"{name} {floor[key]:.3g} ms" for key, name in names.items() if floor[key] > 0)
    times = f"{floor['times']:.1f}" if floor["times"] < 10 else f"{floor['times']:,.0f}"
    yield f"It is {times} times its floor of {floor['ms']:.3g} ms ({why})."
    if not result["changes"]:
        yield "Nothing that could be tried here makes it more than 5 % faster."
    for change in result["changes"]:
        gain = f"{change['gain']:.2g}x" if change["gain"] else ""
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
        (folder / "tensorboard").mkdir()
        target = folder / "tensorboard" / "slipstream.pt.trace.json.gz"
        shutil.copyfile(folder / "trace.json.gz", target)
    table = folder / "operations.csv"
    with (
        runs.replace_atomically(table) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, ["place", "kind", "name", "calls", "ms"])
        writer.writeheader()
        writer.writerows(trace.operations)
    plots.plot_timeline(trace, folder, title=result["name"], wall_ms=result["ms_per_step"])
    runs.write_text(folder / "summary.md", _format_summary(result))


def _format_summary(result: dict[str, Any]) -> str:
    lines = [f"# {result['name']}: {result['verdict']}", "", *result["sentences"], ""]
    lines += ["| part of the step | ms | share |", "|---|---|---|"]
    lines += [f"| {p['part']} | {p['ms']:.3g} | {p['share']:.0%} |" for p in result["parts"]]
    lines += ["", "| operation | where | calls a step | ms a step |", "|---|---|---|---|"]
    lines += [
        f"| {o['name'][:80]} | {o['place']} | {o['calls']:.3g} | {o['ms']:.3g} |"
        for o in result["operations"][:25]
    ]
    return "\n".join(lines) + "\n"
