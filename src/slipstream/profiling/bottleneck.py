"""Names the bottleneck of a step by what was measured, and explains it in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.profiling.floor import Floor
from slipstream.profiling.trace import Span, Trace, compute_self_time, merge_intervals

MIN_IDLE = 0.2
"""The share of the step from which idleness is the bottleneck, whatever the kernels do"""
MIN_LOADER = 0.3
MIN_BATCH_GAIN = 2.5
"""The gain per window of a batch four times as large from which the batch counts as too small"""
MAX_EXTRA_CORES = 0.5
"""By how many cores threads and other processes together may exceed the available ones"""
MIN_MEMORY, MEMORY_LEAD = 0.1, 1.5
"""The least share of memory traffic, and how far it must exceed arithmetic and chain"""
MIN_FAULTS = 0.5
"""Major page faults per step from which the job counts as swapping"""


@dataclass(frozen=True)
class StepFacts:
    """Everything that decides the verdict. Times are milliseconds per step."""

    on_gpu: bool
    wall_ms: float
    kernels: dict[str, float]
    """Time by kind of work: of the GPU, or of the CPU without one"""
    idle: dict[str, float]
    """GPU: time by cause (data, wait, launch). CPU: data, and other time outside of operations"""
    copy_ms: float
    """GPU: copies to it while no kernel runs"""
    floor: Floor
    faults: float
    """Major page faults per step"""
    threads: int
    cores: int
    others: float
    """Cores that other processes keep busy"""
    calls: float
    """Kernels launched, or operations called, per step"""
    gains: dict[str, float] = field(default_factory=dict)
    """The gains of the changes that were tried, by name"""

    @property
    def busy_ms(self) -> float:
        return sum(self.kernels.values())

    @property
    def idle_share(self) -> float:
        return max(1 - self.busy_ms / self.wall_ms, 0.0) if self.on_gpu else 0.0


def compute_shares(trace: Trace, *, wall_ms: float, on_gpu: bool) -> dict[str, Any]:
    """Compute the facts that a trace contains, scaled to a step without the profiler."""
    if not on_gpu:
        return _compute_host_shares(trace, wall_ms)
    count = len(trace.steps)
    kernels = [span for span in trace.device if span.kind != "copy"]
    busy = merge_intervals((span.begin, span.end) for span in kernels)
    every = merge_intervals((span.begin, span.end) for span in trace.device)
    kernel_us, every_us = (sum(e - b for b, e in spans) for spans in (busy, every))
    by_kind: dict[str, float] = defaultdict(float)
    for span in kernels:
        by_kind[span.kind] += span.end - span.begin
    overlap = kernel_us / max(sum(by_kind.values()), 1e-9)
    device_ms = every_us / 1e3 / count
    scale = min(1.0, wall_ms / device_ms)  # the profiler may slow the device itself
    kind_ms = {kind: us / 1e3 / count * overlap * scale for kind, us in by_kind.items()}
    copy_ms = (every_us - kernel_us) / 1e3 / count * scale
    idle_ms = max(wall_ms - sum(kind_ms.values()) - copy_ms, 0.0)
    causes = _find_idle_causes(trace, every)
    total = max(sum(causes.values()), 1e-9)
    return {
        "kernels": dict(sorted(kind_ms.items(), key=lambda item: -item[1])),
        "copy_ms": copy_ms,
        "idle": {cause: idle_ms * us / total for cause, us in causes.items()},
        "calls": len(trace.device) / count,
    }


def _find_idle_causes(trace: Trace, every: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return what the host did while the device had nothing to do, in microseconds.

    Idleness that begins while the host waits for the device counts as waiting, up to the next
    kernel: nothing was queued behind it.
    """
    begin, end = trace.begin, trace.end
    gaps, at = [], begin
    for first, last in every:
        if first > at:
            gaps.append((at, first))
        at = max(at, last)
    if end > at:
        gaps.append((at, end))
    host = list(compute_self_time(trace.host))
    loading = merge_intervals((span.begin, span.end) for span in trace.host if span.kind == "data")
    waiting = [(span.begin, span.end) for span in host if span.kind == "wait"]
    causes = {"data": 0.0, "wait": 0.0, "launch": 0.0}
    for first, last in gaps:
        data = sum(max(0.0, min(last, e) - max(first, b)) for b, e in loading)
        rest = last - first - data
        causes["data"] += data
        causes["wait" if any(b <= first <= e for b, e in waiting) else "launch"] += rest
    return causes


def _compute_host_shares(trace: Trace, wall_ms: float) -> dict[str, Any]:
    count = len(trace.steps)
    sums: dict[str, float] = defaultdict(float)
    for span in compute_self_time(trace.host):
        sums["outside" if _is_step(span) else span.kind] += span.end - span.begin
    calls = sum(1 for span in trace.host if not _is_step(span))
    scale = wall_ms / (sum(sums.values()) / 1e3 / count)
    kind_ms = {kind: us / 1e3 / count * scale for kind, us in sums.items()}
    idle = {"data": kind_ms.pop("data", 0.0), "outside": kind_ms.pop("outside", 0.0)}
    kind_ms.pop("wait", None)
    return {
        "kernels": dict(sorted(kind_ms.items(), key=lambda item: -item[1])),
        "copy_ms": 0.0,
        "idle": idle,
        "calls": calls / count,
    }


def _is_step(span: Span) -> bool:
    return span.name.startswith("slipstream: ")


def find_bottleneck(facts: StepFacts) -> tuple[str, str]:
    """Return the name of the bottleneck, and what it means here."""
    if facts.faults >= MIN_FAULTS:
        return "swap", (
            f"{facts.faults:.3g} times a step, memory that the job needs has to be fetched from "
            "disk: it does not fit into what this machine has free"
        )
    needed = facts.threads + facts.others
    if not facts.on_gpu and facts.threads > 1 and needed > facts.cores + MAX_EXTRA_CORES:
        beside = f" with other work that takes {facts.others:.1f} of them"
        return "oversubscribed threads", (
            f"{facts.threads} threads share {facts.cores} cores"
            + (beside if facts.others >= MAX_EXTRA_CORES else "")
            + " and wait for one another"
        )
    return _judge_gpu(facts) if facts.on_gpu else _judge_cpu(facts)


def _judge_gpu(facts: StepFacts) -> tuple[str, str]:
    causes = {
        "loader-bound": (facts.idle.get("data", 0.0), "the GPU waits for the DataLoader"),
        "sync-bound": (
            facts.idle.get("wait", 0.0),
            "the GPU has nothing queued, because the host waited for it before going on",
        ),
        "launch-bound": (
            facts.idle.get("launch", 0.0),
            f"the GPU waits for the host to launch the next of {facts.calls:.0f} kernels",
        ),
        "copy-bound": (facts.copy_ms, "the GPU does nothing but receive data"),
    }
    name = max(causes, key=lambda key: causes[key][0])
    ms, what = causes[name]
    share = ms / facts.wall_ms
    if share >= MIN_IDLE:
        return name, f"for {share:.0%} of a step {what}"
    return _judge_work(facts)


def _judge_cpu(facts: StepFacts) -> tuple[str, str]:
    data = facts.idle.get("data", 0.0) / facts.wall_ms
    if data >= MIN_LOADER:
        return "loader-bound", f"{data:.0%} of a step goes into fetching its windows"
    return _judge_work(facts)


def _judge_work(facts: StepFacts) -> tuple[str, str]:
    """Return what keeps a busy processor busy."""
    low = facts.floor
    others = max(low.arithmetic_ms, low.chain_ms)
    if low.memory_ms >= max(MIN_MEMORY * facts.wall_ms, MEMORY_LEAD * others):
        updating = facts.kernels.get("optimizer", 0.0) / facts.wall_ms
        return "memory-bound", (
            f"a step moves more memory than it computes: {low.memory_ms:.3g} ms for the traffic "
            f"alone, {low.arithmetic_ms:.3g} for the arithmetic"
            + (f"; the weight update takes {updating:.0%}" if updating > 0.2 else "")
        )
    if facts.gains.get("batch", 1.0) >= MIN_BATCH_GAIN:
        return "too small a batch", (
            "four times the batch costs little more time a step: "
            f"{facts.gains['batch']:.1f} times the windows a second"
        )
    most = max(facts.kernels, key=lambda kind: facts.kernels[kind])
    share = facts.kernels[most] / facts.wall_ms
    names = {
        "recurrent": "recurrent layers",
        "matrix": "matrix products",
        "attention": "attention",
        "optimizer": "the weight update",
    }
    return "kernel-bound", (
        f"the processor is busy; {share:.0%} of a step are "
        f"{names.get(most, 'small operations between the layers')}"
    )
