"""From what was measured to a verdict: which of the known bottlenecks it is, and in which words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.profiling.floor import Floor
from slipstream.profiling.trace import Span, Trace, compute_self_time, merge_intervals

IDLE_COUNTS = 0.2
"""Share of the step from which a cause of idleness is the bottleneck, whatever the kernels do"""
LOADER_COUNTS = 0.3
BATCH_PAYS = 2.5
"""Per window, a batch four times as large: no less says that the batch is too small"""
OTHERS_COUNT = 0.5
"""Cores by which threads and other processes together may exceed what there is"""
MEMORY_COUNTS, MEMORY_LEADS = 0.1, 1.5
"""The traffic's least share of the step, and how far it must be beyond arithmetic and chain"""
FAULTS_COUNT = 0.5
"""Major page faults per step"""


@dataclass(frozen=True)
class StepFacts:
    """Everything that the verdict rests on. Times are milliseconds per step."""

    on_gpu: bool
    wall_ms: float
    kernels: dict[str, float]
    """By kind of work: the device's, or the CPU's where that is the device"""
    idle: dict[str, float]
    """GPU: by cause (data, wait, launch). CPU: data, and other time outside of operations"""
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
    """What changes brought that were tried, by name"""

    @property
    def busy_ms(self) -> float:
        return sum(self.kernels.values())

    @property
    def idle_share(self) -> float:
        return max(1 - self.busy_ms / self.wall_ms, 0.0) if self.on_gpu else 0.0


def compute_shares(trace: Trace, *, wall_ms: float, on_gpu: bool) -> dict[str, Any]:
    """The parts of `Facts` that a trace tells, scaled to the step as it is without a profiler."""
    if not on_gpu:
        return _of_host(trace, wall_ms)
    count = len(trace.steps)
    kernels = [span for span in trace.device if span.kind != "copy"]
    busy = merge_intervals((span.begin, span.end) for span in kernels)
    every = merge_intervals((span.begin, span.end) for span in trace.device)
    kernel_us, every_us = (sum(e - b for b, e in found) for found in (busy, every))
    by_kind: dict[str, float] = defaultdict(float)
    for span in kernels:
        by_kind[span.kind] += span.end - span.begin
    overlap = kernel_us / max(sum(by_kind.values()), 1e-9)
    device_ms = every_us / 1e3 / count
    stretched = min(1.0, wall_ms / device_ms)  # the profiler may slow the device itself
    found = {kind: us / 1e3 / count * overlap * stretched for kind, us in by_kind.items()}
    copy_ms = (every_us - kernel_us) / 1e3 / count * stretched
    idle_ms = max(wall_ms - sum(found.values()) - copy_ms, 0.0)
    causes = _idle_causes(trace, every)
    total = max(sum(causes.values()), 1e-9)
    return {
        "kernels": dict(sorted(found.items(), key=lambda item: -item[1])),
        "copy_ms": copy_ms,
        "idle": {cause: idle_ms * us / total for cause, us in causes.items()},
        "calls": len(trace.device) / count,
    }


def _idle_causes(trace: Trace, every: Sequence[tuple[float, float]]) -> dict[str, float]:
    """What the host did while the device had nothing to do.

    Idleness that begins while the host waits for the device is the wait's, up to the next kernel:
    nothing was queued behind it.
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


def _of_host(trace: Trace, wall_ms: float) -> dict[str, Any]:
    count = len(trace.steps)
    sums: dict[str, float] = defaultdict(float)
    calls = 0
    for span in compute_self_time(trace.host):
        sums["outside" if _is_step(span) else span.kind] += span.end - span.begin
    calls = sum(1 for span in trace.host if not _is_step(span))
    scale = wall_ms / (sum(sums.values()) / 1e3 / count)
    found = {kind: us / 1e3 / count * scale for kind, us in sums.items()}
    idle = {"data": found.pop("data", 0.0), "outside": found.pop("outside", 0.0)}
    found.pop("wait", None)
    return {
        "kernels": dict(sorted(found.items(), key=lambda item: -item[1])),
        "copy_ms": 0.0,
        "idle": idle,
        "calls": calls / count,
    }


def _is_step(span: Span) -> bool:
    return span.name.startswith("slipstream: ")


def find_bottleneck(facts: StepFacts) -> tuple[str, str]:
    """The bottleneck's name, and what it means here."""
    if facts.faults >= FAULTS_COUNT:
        return "swap", (
            f"{facts.faults:.3g} times a step, memory that the job needs has to be fetched from "
            "disk: it does not fit into what this machine has free"
        )
    wanted = facts.threads + facts.others
    if not facts.on_gpu and facts.threads > 1 and wanted > facts.cores + OTHERS_COUNT:
        beside = f" with other work that takes {facts.others:.1f} of them"
        return "oversubscribed threads", (
            f"{facts.threads} threads share {facts.cores} cores"
            + (beside if facts.others >= OTHERS_COUNT else "")
            + " and wait for one another"
        )
    return _on_gpu(facts) if facts.on_gpu else _on_cpu(facts)


def _on_gpu(facts: StepFacts) -> tuple[str, str]:
    told = {
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
    name = max(told, key=lambda key: told[key][0])
    spent, what = told[name]
    share = spent / facts.wall_ms
    if share >= IDLE_COUNTS:
        return name, f"for {share:.0%} of a step {what}"
    return _by_work(facts)


def _on_cpu(facts: StepFacts) -> tuple[str, str]:
    data = facts.idle.get("data", 0.0) / facts.wall_ms
    if data >= LOADER_COUNTS:
        return "loader-bound", f"{data:.0%} of a step goes into fetching its windows"
    return _by_work(facts)


def _by_work(facts: StepFacts) -> tuple[str, str]:
    """The processor is busy: with what?"""
    low = facts.floor
    others = max(low.arithmetic_ms, low.chain_ms)
    if low.memory_ms >= max(MEMORY_COUNTS * facts.wall_ms, MEMORY_LEADS * others):
        updating = facts.kernels.get("optimizer", 0.0) / facts.wall_ms
        return "memory-bound", (
            f"a step moves more memory than it computes: {low.memory_ms:.3g} ms for the traffic "
            f"alone, {low.arithmetic_ms:.3g} for the arithmetic"
            + (f"; the weight update takes {updating:.0%}" if updating > 0.2 else "")
        )
    if facts.gains.get("batch", 1.0) >= BATCH_PAYS:
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
