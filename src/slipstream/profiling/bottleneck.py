"""Names the bottleneck of a step by what was measured, and explains it in words.

The floor is the least time of a step, by its arithmetic, memory traffic and recurrent chain.

The machine's peaks are measured; a step cannot be faster than the longest of the three.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from slipstream import machine
from slipstream.data import windows
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask
from slipstream.profiling.trace import KIND_NAMES, STEP, Trace, compute_self_time, merge_intervals
from slipstream.text import format_count, format_ms, format_number

CHAIN_US, CHAIN_WIDTH = 1.05, 128
"""One step of an LSTM of this width whose weights stay on chip, H200: 0.85 to 1.25 us were seen"""
CHAIN_CLOCK_MHZ = 1980.0
BACKWARD = 1.3
"""Time of a recurrent step in the backward pass, relative to the forward pass"""
STATE_ACCESSES = {"adam": 10, "adamw": 10, "sgd": 8, "rmsprop": 8}
"""Reads and writes per weight and step: the weight in both passes, its gradient once, then weight,
gradient and optimizer state in the update"""
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


class Floor(NamedTuple):
    """Lower bounds of the time of a step."""

    arithmetic_ms: float
    memory_ms: float
    """0 where all data of the step fit into the cache"""
    chain_ms: float
    """0 where the model has none, or its speed is unknown"""

    @property
    def ms(self) -> float:
        return max(self)


def measure_peaks(plan: Plan) -> tuple[float, float, float]:
    """Measure matrix products and copies on the plan's device: operations and bytes per second, and
    the size of the last cache before memory."""
    device, on_gpu = plan.device, plan.device.type == "cuda"
    dtype = plan.autocast or torch.float32
    size = 4096 if on_gpu else 768
    with plan.flags():
        left = torch.ones(size, size, device=device, dtype=dtype)
        product_s = _time_fastest(lambda: left @ left, device)
        source = torch.ones(64_000_000 if on_gpu else 8_000_000, device=device)
        target = torch.empty_like(source)
        copy_s = _time_fastest(lambda: target.copy_(source), device)
    flops_per_s, bytes_per_s = 2.0 * size**3 / product_s, 8.0 * source.numel() / copy_s
    return flops_per_s, bytes_per_s, _get_cache_bytes(device)


def _time_fastest(work: Callable[[], Tensor], device: torch.device) -> float:
    times = []
    for _ in range(6):
        machine.synchronize(device)
        start = time.perf_counter()
        for _ in range(3):
            work()
        machine.synchronize(device)
        times.append((time.perf_counter() - start) / 3)
    return min(times)


def _get_cache_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [2.0**20]  # all that is assumed on macOS and Windows
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(float(text.rstrip("KM")) * (2**20 if text.endswith("M") else 2**10))
    return max(sizes)


def compute_floor(task: TrainingTask, plan: Plan) -> Floor:
    """Compute the lower bounds of a training step."""
    flops_per_s, bytes_per_s, cache_bytes = measure_peaks(plan)
    train = task.config.train
    assert train.batch != "auto"
    count = train.batch * train.accumulate
    flops, saved_bytes = _measure_window(task)
    width = 2 if plan.autocast else 4
    weights = sum(p.numel() for p in task.model.parameters())
    state = 4.0 * weights * STATE_ACCESSES[train.optimizer]
    activations = 2.0 * saved_bytes * count * width / 4
    working_set = 4.0 * weights * 4 + activations / 2
    memory_s = (state + activations) / bytes_per_s if working_set > cache_bytes else 0.0
    arithmetic_ms = 1e3 * 3 * flops * count / flops_per_s
    return Floor(arithmetic_ms, 1e3 * memory_s, _compute_chain_ms(task, plan))


def _measure_window(task: TrainingTask) -> tuple[float, float]:
    """Count the operations of a forward pass, and the bytes that it saves for the backward pass."""
    chunk = next(task.dataset.iter_chunks("train", None, rows=task.config.engine.buffer_rows))
    batch = windows.gather(chunk.series, chunk.starts[:1])
    model = copy.deepcopy(task.model).to("cpu")
    own = {p.data_ptr() for p in model.parameters()}
    saved = 0.0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        if tensor.untyped_storage().data_ptr() not in own:
            saved += tensor.numel() * tensor.element_size()
        return tensor

    # so that the counter sees every product
    flags = machine.set_flags(threads=1, tf32=False, onednn=False)
    saving = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with flags, saving, FlopCounterMode(display=False) as counter:
        model(batch.inputs, batch.static)
    return float(counter.get_total_flops()), saved


def _compute_chain_ms(task: TrainingTask, plan: Plan) -> float:
    """Return the time of the recurrent steps that must follow one another, with weights on chip."""
    model = task.config.model
    if not model.spec.is_recurrent or plan.device.type != "cuda":
        return 0.0
    length = task.config.data.context // model.patch
    depth = len(model.sizes)
    # layers of one direction run as a wave; with two, a layer needs all of the one before
    steps = length * depth if model.bidirectional else length + depth - 1
    width = max(model.sizes)
    clock = machine.get_max_clock_mhz(plan.device) or CHAIN_CLOCK_MHZ
    step_us = CHAIN_US * (0.4 + 0.6 * width / CHAIN_WIDTH) * CHAIN_CLOCK_MHZ / clock
    return steps * step_us * (1 + BACKWARD) / 1e3


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
    gaps, at = [], trace.begin
    for first, last in [*every, (trace.end, trace.end)]:
        if first > at:
            gaps.append((at, first))
        at = max(at, last)
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
        sums["outside" if span.name == STEP else span.kind] += span.end - span.begin
    calls = sum(span.name != STEP for span in trace.host)
    scale = wall_ms / (sum(sums.values()) / 1e3 / count)
    kind_ms = {kind: us / 1e3 / count * scale for kind, us in sums.items()}
    idle = {"data": kind_ms.pop("data", 0.0), "outside": kind_ms.pop("outside", 0.0)}
    kind_ms.pop("wait", None)
    ordered = dict(sorted(kind_ms.items(), key=lambda item: -item[1]))
    return {"kernels": ordered, "copy_ms": 0.0, "idle": idle, "calls": calls / count}


def find_bottleneck(facts: StepFacts) -> tuple[str, str]:
    """Return the name of the bottleneck, and what it means here."""
    if facts.faults >= MIN_FAULTS:
        return "swap", (
            f"{format_number(facts.faults, figures=3)} times a step, memory that the job needs has "
            "to be fetched from "
            "disk: it does not fit into what this machine has free"
        )
    needed = facts.threads + facts.others
    if not facts.on_gpu and facts.threads > 1 and needed > facts.cores + MAX_EXTRA_CORES:
        beside = f" with other work that takes {facts.others:.1f} of them"
        return "oversubscribed threads", (
            f"{format_count(facts.threads, 'thread')} share {format_count(facts.cores, 'core')}"
            + (beside if facts.others >= MAX_EXTRA_CORES else "")
            + " and wait for one another"
        )
    if facts.on_gpu:
        return _judge_gpu(facts)
    data = facts.idle.get("data", 0.0) / facts.wall_ms
    if data >= MIN_LOADER:
        return "loader-bound", f"{data:.0%} of a step goes into fetching its windows"
    return _judge_work(facts)


def _judge_gpu(facts: StepFacts) -> tuple[str, str]:
    data, wait, launch = (facts.idle.get(cause, 0.0) for cause in ("data", "wait", "launch"))
    queue = "the GPU has nothing queued, because the host waited for it before going on"
    launches = f"the GPU waits for the host to launch the next of {facts.calls:.0f} kernels"
    causes = [
        ("loader-bound", data, "the GPU waits for the DataLoader"),
        ("sync-bound", wait, queue),
        ("launch-bound", launch, launches),
        ("copy-bound", facts.copy_ms, "the GPU does nothing but receive data"),
    ]
    name, ms, what = max(causes, key=lambda cause: cause[1])
    share = ms / facts.wall_ms
    if share >= MIN_IDLE:
        return name, f"for {share:.0%} of a step {what}"
    return _judge_work(facts)


def _judge_work(facts: StepFacts) -> tuple[str, str]:
    """Return what keeps a busy processor busy."""
    low = facts.floor
    others = max(low.arithmetic_ms, low.chain_ms)
    if low.memory_ms >= max(MIN_MEMORY * facts.wall_ms, MEMORY_LEAD * others):
        updating = facts.kernels.get("optimizer", 0.0) / facts.wall_ms
        return "memory-bound", (
            f"a step moves more memory than it computes: {format_ms(low.memory_ms)} for the "
            "traffic "
            f"alone, {format_ms(low.arithmetic_ms)} for the arithmetic"
            + (f"; the weight update takes {updating:.0%}" if updating > 0.2 else "")
        )
    if facts.gains.get("batch", 1.0) >= MIN_BATCH_GAIN:
        return "too small a batch", (
            "four times the batch costs little more time a step: "
            f"{facts.gains['batch']:.1f} times the windows a second"
        )
    most = max(facts.kernels, key=lambda kind: facts.kernels[kind])
    share = facts.kernels[most] / facts.wall_ms
    names = {kind: KIND_NAMES[kind] for kind in ("recurrent", "matrix", "attention")}
    names["optimizer"] = "the weight update"
    work = names.get(most, "small operations between the layers")
    return "kernel-bound", f"the processor is busy; {share:.0%} of a step are {work}"
