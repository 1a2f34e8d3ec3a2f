"""The doctor's findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.padding import Padding

from slipstream.terminal.console import TextTable, print_text, to_text
from slipstream.terminal.training import describe_kernels
from slipstream.text import format_ms

if TYPE_CHECKING:
    from rich.console import Console

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def print_doctor(findings: dict[str, Any], console: Console) -> None:
    def section(title: str, rows: Iterator[tuple[str, ...]]) -> None:
        table = TextTable.grid(padding=(0, 2), pad_edge=True)
        for cells in rows:
            table.add_row(*cells)
        for column in table.columns[:-1]:
            column.no_wrap = True
        print_text(console, f"\n{title}", "bold")
        console.print(table, soft_wrap=False)

    section("This machine", _machine_rows(findings["machine"]))
    techniques = findings["techniques"]
    title = "Techniques and their settings in [engine], each tried with a tiny run"
    section(title, _technique_rows(techniques))
    for why in dict.fromkeys(one["why"] for one in techniques if one["works"] is None):
        names = [one["name"] for one in techniques if one["works"] is None and one["why"] == why]
        text = to_text(f"{why}: {', '.join(names)}")
        console.print(Padding(text, (0, 2)), soft_wrap=False)
    plan = findings["plan"]
    section(f"Plan for {plan['job']}", _plan_rows(plan))
    if job := findings.get("job"):
        _print_job(job, console)
    problems = findings["problems"]
    print_text(console, "\nProblems" if problems else "\nNo problems found", "bold")
    for problem in problems:
        print_text(console, f"  - {problem['problem']}\n    fix: {problem['fix']}")


def _print_job(job: dict[str, Any], console: Console) -> None:
    """Print the notes on a job's data and settings, and what was measured."""
    counts = ", ".join(f"{count:,} {name}" for name, count in job["windows"].items())
    print_text(console, f"\nJob {job['config']}", "bold")
    print_text(console, f"  {job['series']:,} series; windows: {counts}")
    for line in (*(f"note: {note}" for note in job["notes"]), *job["advice"]["lines"]):
        print_text(console, f"  {line}")


def _machine_rows(machine: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the machine's properties, one line each."""
    driver, cuda, cpu = machine["driver"], machine["cuda"], machine["cpu"]
    memory, disk, shm = machine["memory"], machine["disk"], machine["shm"]
    for gpu in machine["gpus"]:
        parts = [gpu["name"], gpu["device"] or "not visible to torch"]
        if gpu["compute_capability"]:
            parts.append(f"compute capability {gpu['compute_capability']}")
        parts.append(_free(gpu["free_bytes"], gpu["memory_bytes"]))
        if gpu["temperature_c"] is not None:
            parts.append(f"{gpu['temperature_c']} °C")
        yield "GPU", ", ".join(parts)
    if not machine["gpus"]:
        yield "GPU", "none"
    if driver["version"]:
        yield "driver", f"{driver['version']}, up to CUDA {driver['cuda'] or 'unknown'}"
    elif machine["gpus"] or machine["nvidia_signs"]:
        yield "driver", f"does not respond ({driver['error']})"
    built = "torch is built without CUDA"
    if cuda["built_for"]:
        built = f"torch is built for {cuda['built_for']}, cuDNN {cuda['cudnn'] or 'missing'}"
    yield "CUDA", f"{built}; Triton {machine['triton'] or 'not installed'}"
    yield "CPU", ", ".join([cpu["name"], *cpu["features"]])
    quota = "" if cpu["quota"] is None else f", quota {cpu['quota']:g}"
    variables = {name: machine["environment"][name] for name in THREADS}
    threads = ", ".join(f"{name} {value or 'not set'}" for name, value in variables.items())
    yield "cores", f"{cpu['usable']} usable of {cpu['cores']}{quota}; {threads}"
    swap = f"{memory['swap_used_bytes'] / 1e9:.1f} GB" if memory["swap_bytes"] else "none"
    total = memory["limit_bytes"] or memory["total_bytes"]
    limit = ", the container's limit" if memory["limit_bytes"] else ""
    room = f"{memory['available_bytes'] / 1e9:.1f} of {total / 1e9:.1f} GB available{limit}"
    yield "memory", f"{room}; swap in use: {swap}"
    spaces = [f"{_free(disk['free_bytes'], disk['total_bytes'])} in this folder"] if disk else []
    spaces += [f"/dev/shm {_free(shm['free_bytes'], shm['total_bytes'])}"] if shm else []
    yield "disk", "; ".join(spaces) or "unknown"
    yield "compiler", machine["compiler"] or "no C++ compiler"
    versions = [f"{name} {machine[name]}" for name in ("slipstream", "torch")]
    yield "software", ", ".join([*versions, f"Python {machine['python']}", machine["system"]])


def _free(free: int | None, total: int) -> str:
    room = f"{total / 1e9:.1f} GB"
    return room if free is None else f"{free / 1e9:.1f} of {room} free"


def _technique_rows(techniques: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the techniques that were tried, one line each."""
    for one in techniques:
        if one["works"] is not None:
            speed = "" if one["ms"] is None else f"{format_ms(one['ms'])} a step"
            parts = ", ".join(part for part in (speed, one["note"]) if part) or one["why"]
            setting, took = one["setting"].removeprefix("engine."), f"{one['seconds']:.1f} s"
            yield "works" if one["works"] else "FAILS", one["name"], setting, took, parts


def _plan_rows(plan: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the choices and their reasons, one line each."""
    if "failed" in plan:
        yield "none", plan["failed"]
        return
    reasons = plan["reasons"]
    yield "device", f"{plan['device']} ({reasons['device']})"
    yield "home", f"{plan['home']} ({reasons['home']})"
    yield "precision", f"{plan['precision']} ({reasons['precision']})"
    if plan["device"] == "cpu":
        yield "threads", f"{plan['threads']} ({reasons['threads']})"
        if "off" in plan["cudnn"]:
            yield "layers", describe_kernels(plan)
        else:
            yield "oneDNN", f"{'yes' if plan['onednn'] else 'no'} ({reasons['onednn']})"
    else:
        yield "capture", f"{'yes' if plan['capture'] else 'no'} ({reasons['capture']})"
        yield "cuDNN", describe_kernels(plan).removeprefix("cuDNN ")
    if plan["ms_per_step"] is not None:
        yield "speed", f"{format_ms(plan['ms_per_step'])} a step; {reasons['plan']}"
    if "load" in reasons:
        yield "load", reasons["load"]
    for item in plan["evidence"][1:]:
        why = item.get("failed") or item.get("refused")
        if why:
            yield "rejected", f"{item['candidate']}: {why}"
    timings = [
        f"{item['candidate']}: {format_ms(item['ms'])}" for item in plan["evidence"] if "ms" in item
    ]
    if timings:
        yield "measured", ", ".join(timings)
