"""Find where the time of a step goes, and report it in words first."""

from __future__ import annotations

import copy
import csv
import gzip
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as record_profile
from torch.utils.flop_counter import FlopCounterMode

from slipstream import config as configs
from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.base.text import format_count, format_ms, format_number
from slipstream.config import Config, replace_settings
from slipstream.data import dataset as datasets
from slipstream.data import defaults, windows
from slipstream.data.dataset import Dataset
from slipstream.engine import monitor, recovery
from slipstream.engine.context import RunContext
from slipstream.engine.plan import Plan
from slipstream.engine.planning import (
    TimedWorkload,
    TrainingWorkload,
    build_by_rules,
    resolve_batch_size,
)
from slipstream.models import custom
from slipstream.reporting.charts import Chart, Scale, render_svg

STEP = "slipstream: step"
KIND_NAMES = {
    "recurrent": "recurrent layers",
    "matrix": "matrix products",
    "attention": "attention",
    "optimizer": "weight update",
    "copy": "copies",
    "data": "data",
    "wait": "waiting",
    "launch": "driver calls",
    "other": "other operations",
}
ON_DEVICE = (
    ("recurrent", r"rnn|lstm|gru_"),
    ("attention", r"fmha|flash|attention"),
    ("optimizer", r"adam|multi_tensor|fused_sgd|lpnorm"),
    ("matrix", r"gemm|gemv|cutlass|xmma|cublas|splitk|nvjet"),
)
ON_HOST = (
    ("data", r"enumerate\(DataLoader\)|_index_put|aten::index$|aten::index_select"),
    ("recurrent", r"lstm|gru|rnn"),
    ("attention", r"attention|flash"),
    ("optimizer", r"adam|_foreach_|sgd|rmsprop|Optimizer|clip|_linalg_vector_norm"),
    ("matrix", r"aten::(addmm|mm|bmm|linear|matmul|baddbmm|addbmm)\b|AddmmBackward|MmBackward"),
)
INHERITED = ("recurrent", "attention", "optimizer", "data", "matrix")
WAITS = re.compile(r"Synchronize|cudaMemcpy$|cudaEventQuery|cudaStreamWait$|_local_scalar_dense")
LAUNCHES = re.compile(r"^cu(da)?(Launch|GraphLaunch|Memcpy|Memset)")


class Span(NamedTuple):
    name: str
    kind: str
    begin: float
    end: float
    place: str
    """`device` or `host`"""
    row: str
    """Stream or thread"""


@dataclass(frozen=True)
class Trace:
    steps: list[tuple[float, float]]
    """Begin and end of each step on the host"""
    device: list[Span]
    host: list[Span]
    """Spans of the training thread"""
    operations: list[dict[str, Any]]
    """By name: calls and milliseconds per step, first on the device, then on the host"""

    @property
    def begin(self) -> float:
        return self.steps[0][0]

    @property
    def end(self) -> float:
        last = max((span.end for span in self.device), default=0.0)
        return max(self.steps[-1][1], last)


def record_trace(trial: TimedWorkload, steps: int) -> tuple[Trace, bytes]:
    """Run some steps under the profiler; return the trace, parsed and in Chrome's format."""
    activities = [ProfilerActivity.CPU]
    if trial.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with trial.settings(), tempfile.TemporaryDirectory() as folder, _filter_stderr():
        trial.time_steps(1)
        with record_profile(activities=activities, acc_events=True) as profiler:
            for _ in range(steps):
                with record_function(STEP):
                    trial.step()
            trial.finish()
            machine.synchronize(trial.device)
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        chrome = path.read_bytes()
    return parse_trace(chrome), chrome


@contextmanager
def _filter_stderr() -> Iterator[None]:
    """Drop the lines that the profiler's library writes to stderr about itself."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as buffer:
        real = os.dup(2)
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            buffer.seek(0)
            kept = [line for line in buffer if not line.startswith(b"USDT:")]
            os.write(2, b"".join(kept))


def parse_trace(chrome: bytes) -> Trace:
    """Read a trace in Chrome's format."""
    content = json.loads(chrome.decode("utf-8", errors="replace"))
    events = [e for e in content["traceEvents"] if e.get("ph") == "X"]
    marks = [e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"]
    marks.sort(key=lambda e: e["ts"])
    thread = marks[0]["tid"]
    device = [_build_device_span(e) for e in events if e.get("cat") in DEVICE_EVENTS]
    host = [e for e in events if e["tid"] == thread and e.get("cat") in HOST_EVENTS]
    spans = list(_build_host_spans(host))
    count = len(marks)
    return Trace(
        steps=[(e["ts"], e["ts"] + e["dur"]) for e in marks],
        device=sorted(device, key=lambda span: span.begin),
        host=spans,
        operations=[
            *_sum_by_name(device, count),
            *_sum_by_name(list(compute_self_time(spans)), count),
        ],
    )


DEVICE_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_EVENTS = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}


def _build_device_span(event: dict[str, Any]) -> Span:
    kind = "copy" if event["cat"] == "gpu_memcpy" else _classify(event["name"], ON_DEVICE)
    if kind == "copy" and "DtoD" in event["name"]:
        kind = "other"
    stream = event.get("args", {}).get("stream", event["tid"])
    begin, end = event["ts"], event["ts"] + event["dur"]
    return Span(event["name"], kind, begin, end, "device", f"stream {stream}")


def _build_host_spans(events: list[dict[str, Any]]) -> Iterator[Span]:
    """Yield spans with their kinds: by the span's name, else the kind of the enclosing span, else
    the kind of the forward operation whose gradient the span computes."""
    events = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
    forward: dict[int, str] = {}
    around: list[Span] = []
    for event in events:
        begin, end = event["ts"], event["ts"] + event["dur"]
        while around and around[-1].end <= begin:
            around.pop()
        kind = _classify_host(event)
        if around and around[-1].kind in INHERITED and kind not in ("wait", "launch"):
            kind = around[-1].kind
        number = event.get("args", {}).get("Sequence number")
        if number is not None:
            if "Backward" in event["name"] or "evaluate_function" in event["name"]:
                kind = forward.get(number, kind)
            elif kind != "other":
                forward[number] = kind
        span = Span(event["name"], kind, begin, end, "host", "host")
        around.append(span)
        yield span


def _classify_host(event: dict[str, Any]) -> str:
    name = event["name"]
    if WAITS.search(name):
        return "wait"
    if event["cat"] in ("cuda_runtime", "cuda_driver"):
        return "launch" if LAUNCHES.search(name) else "other"
    return _classify(name, ON_HOST)


def _classify(name: str, rules: Iterable[tuple[str, str]]) -> str:
    return next((kind for kind, text in rules if re.search(text, name, re.IGNORECASE)), "other")


def compute_self_time(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans of one thread, cut so that every moment belongs to the innermost span."""
    stack: list[Span] = []
    reached = 0.0
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        while stack and stack[-1].end <= span.begin:
            top = stack.pop()
            if top.end > reached:
                yield top._replace(begin=max(reached, top.begin))
                reached = top.end
        if stack and span.begin > reached:
            yield stack[-1]._replace(begin=max(reached, stack[-1].begin), end=span.begin)
        reached = max(reached, span.begin)
        stack.append(span)
    while stack:
        top = stack.pop()
        if top.end > reached:
            yield top._replace(begin=max(reached, top.begin))
            reached = top.end


def merge_intervals(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def compute_busy_ms(trace: Trace) -> float:
    """Return how long the device worked per step."""
    spans = merge_intervals((span.begin, span.end) for span in trace.device)
    return sum(end - begin for begin, end in spans) / 1e3 / len(trace.steps)


def _sum_by_name(spans: list[Span], steps: int) -> list[dict[str, Any]]:
    sums: dict[str, list[Any]] = defaultdict(lambda: ["", "", 0, 0.0])
    for span in spans:
        entry = sums[span.name]
        entry[0], entry[1] = span.place, span.kind
        entry[2] += 1
        entry[3] += span.end - span.begin
    rows = [
        {"name": name, "place": place, "kind": kind, "calls": calls / steps, "ms": us / 1e3 / steps}
        for name, (place, kind, calls, us) in sums.items()
        if name != STEP
    ]
    return sorted(rows, key=lambda row: -row["ms"])


CHAIN_US, CHAIN_WIDTH = 1.05, 128
"""Microseconds of one LSTM step of this width with weights on chip; 0.85 to 1.25 on an H200"""
CHAIN_CLOCK_MHZ = 1980.0
"""The clock at which `CHAIN_US` was measured"""
BACKWARD = 1.3
"""Time of a recurrent step in the backward pass, relative to the forward pass"""
STATE_ACCESSES = {"adam": 10, "adamw": 10, "sgd": 8, "rmsprop": 8}
"""Reads and writes per weight and step: the weight in both passes, its gradient once, then weight,
gradient and optimizer state in the update"""
MIN_IDLE = 0.2
"""The share of the step from which idleness is the bottleneck, whatever the kernels do"""
MIN_LOADER = 0.3
"""The share of the step from which loading data is the bottleneck"""
MIN_BATCH_GAIN = 2.5
"""The gain per window of a batch four times as large from which the batch counts as too small"""
MAX_EXTRA_CORES = 0.5
"""By how many cores threads and other processes together may exceed the available ones"""
MIN_MEMORY, MEMORY_LEAD = 0.1, 1.5
"""The share of the step from which memory traffic is the bottleneck, if it also exceeds arithmetic
and chain by this factor"""
MIN_FAULTS = 0.5
"""Major page faults per step from which the job counts as swapping"""


class Floor(NamedTuple):
    """Lower bounds of the time of a step."""

    arithmetic_ms: float
    memory_ms: float
    """0 where all data of the step fit into the cache"""
    chain_ms: float
    """0 for a model without recurrent steps, or on a GPU whose speed is unknown"""

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


def compute_floor(context: RunContext, plan: Plan) -> Floor:
    """Compute the lower bounds of a training step."""
    flops_per_s, bytes_per_s, cache_bytes = measure_peaks(plan)
    train = context.config.train
    assert train.batch != "auto"
    count = train.batch * train.accumulate
    flops, saved_bytes = _measure_window(context)
    width = 2 if plan.autocast else 4
    weights = sum(p.numel() for p in context.model.parameters())
    state = 4.0 * weights * STATE_ACCESSES[train.optimizer]
    activations = 2.0 * saved_bytes * count * width / 4
    working_set = 4.0 * weights * 4 + activations / 2
    memory_s = (state + activations) / bytes_per_s if working_set > cache_bytes else 0.0
    arithmetic_ms = 1e3 * 3 * flops * count / flops_per_s
    return Floor(arithmetic_ms, 1e3 * memory_s, _compute_chain_ms(context, plan))


def _measure_window(context: RunContext) -> tuple[float, float]:
    """Count the operations of a forward pass, and the bytes that it saves for the backward pass."""
    chunk = next(context.dataset.iter_chunks("train", None, rows=context.config.engine.buffer_rows))
    batch = windows.gather(chunk.series, chunk.starts[:1])
    model = copy.deepcopy(context.model).to("cpu")
    weights = {p.data_ptr() for p in model.parameters()}
    saved = 0.0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        if tensor.untyped_storage().data_ptr() not in weights:
            saved += tensor.numel() * tensor.element_size()
        return tensor

    # so that the counter sees every product
    flags = machine.set_flags(threads=1, tf32=False, onednn=False)
    saving = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with flags, saving, FlopCounterMode(display=False) as counter:
        model(batch.inputs, batch.static)
    return float(counter.get_total_flops()), saved


def _compute_chain_ms(context: RunContext, plan: Plan) -> float:
    """Return the time of the recurrent steps that must follow one another, with weights on chip."""
    model = context.config.model
    if not model.spec.is_recurrent or plan.device.type != "cuda":
        return 0.0
    length = context.config.data.context // model.patch
    depth = len(model.sizes)
    # layers of one direction run as a wave; with two, a layer needs all of the one before
    steps = length * depth if model.bidirectional else length + depth - 1
    width = max(model.sizes)
    clock = machine.get_max_clock_mhz(plan.device) or CHAIN_CLOCK_MHZ
    step_us = CHAIN_US * (0.4 + 0.6 * width / CHAIN_WIDTH) * CHAIN_CLOCK_MHZ / clock
    return steps * step_us * (1 + BACKWARD) / 1e3


@dataclass(frozen=True)
class StepFacts:
    """The measurements that decide the verdict. Times are milliseconds per step."""

    on_gpu: bool
    wall_ms: float
    kernels: dict[str, float]
    """Time by kind of work, on the GPU or, without one, on the CPU"""
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
    """Compute the times of a step from a trace, scaled to a step without the profiler."""
    if not on_gpu:
        return _compute_host_shares(trace, wall_ms)
    count = len(trace.steps)
    kernels = [span for span in trace.device if span.kind != "copy"]
    busy = merge_intervals((span.begin, span.end) for span in kernels)
    working = merge_intervals((span.begin, span.end) for span in trace.device)
    kernel_us, working_us = (sum(e - b for b, e in spans) for spans in (busy, working))
    by_kind: dict[str, float] = defaultdict(float)
    for span in kernels:
        by_kind[span.kind] += span.end - span.begin
    overlap = kernel_us / max(sum(by_kind.values()), 1e-9)
    device_ms = working_us / 1e3 / count
    scale = min(1.0, wall_ms / device_ms)  # the profiler may slow the device itself
    kind_ms = {kind: us / 1e3 / count * overlap * scale for kind, us in by_kind.items()}
    copy_ms = (working_us - kernel_us) / 1e3 / count * scale
    idle_ms = max(wall_ms - sum(kind_ms.values()) - copy_ms, 0.0)
    causes = _find_idle_causes(trace, working)
    total = max(sum(causes.values()), 1e-9)
    return {
        "kernels": dict(sorted(kind_ms.items(), key=lambda item: -item[1])),
        "copy_ms": copy_ms,
        "idle": {cause: idle_ms * us / total for cause, us in causes.items()},
        "calls": len(trace.device) / count,
    }


def _find_idle_causes(trace: Trace, working: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the microseconds in which the device was idle, by the host's activity at the time.

    Idleness that begins while the host waits for the device counts as waiting, up to the next
    kernel: nothing was queued behind it.
    """
    gaps, reached = [], trace.begin
    for first, last in [*working, (trace.end, trace.end)]:
        if first > reached:
            gaps.append((reached, first))
        reached = max(reached, last)
    host = list(compute_self_time(trace.host))
    loading = merge_intervals((span.begin, span.end) for span in trace.host if span.kind == "data")
    waiting = [(span.begin, span.end) for span in host if span.kind == "wait"]
    causes = {"data": 0.0, "wait": 0.0, "launch": 0.0}
    for first, last in gaps:
        data = sum(max(0.0, min(last, e) - max(first, b)) for b, e in loading)
        remainder = last - first - data
        causes["data"] += data
        causes["wait" if any(b <= first <= e for b, e in waiting) else "launch"] += remainder
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
    """Return the name of the bottleneck, and an explanation with this job's figures."""
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
    name, ms, cause = max(causes, key=lambda cause: cause[1])
    share = ms / facts.wall_ms
    if share >= MIN_IDLE:
        return name, f"for {share:.0%} of a step {cause}"
    return _judge_work(facts)


def _judge_work(facts: StepFacts) -> tuple[str, str]:
    """Return the bottleneck of a processor that is always busy, and an explanation."""
    low = facts.floor
    longest = max(low.arithmetic_ms, low.chain_ms)
    if low.memory_ms >= max(MIN_MEMORY * facts.wall_ms, MEMORY_LEAD * longest):
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
    """Write timeline.svg: what the host and the device do during one step."""
    begin, end = _choose_step(trace)
    rows = {"host": [span for span in compute_self_time(trace.host) if span.name != STEP]}
    for span in trace.device:
        rows.setdefault(span.row, []).append(span)
    visible = {
        name: [s for s in spans if s.end > begin and s.begin < end] for name, spans in rows.items()
    }
    busiest = sorted(visible, key=lambda name: -sum(s.end - s.begin for s in visible[name]))
    names = ["host", *[name for name in busiest if name != "host" and visible[name]][:MAX_STREAMS]]
    labels = ["host" if name == "host" else f"device, {name}" for name in names]
    ticks = tuple((float(-number), label) for number, label in enumerate(labels))
    x, y = Scale(0.0, (end - begin) / 1e3), Scale(0.5 - len(names), 0.5, ticks=ticks)
    label = f"ms, under the profiler; without it a step takes {format_ms(wall_ms)}"
    chart = Chart(x, y, label, height=40 * len(names), x_ticks=10, grid="x")
    chart.title = f"{title}: one training step"
    for kind, colour in COLOURS.items():
        bars = [
            (max(s.begin, begin), min(s.end, end), -number)
            for number, name in enumerate(names)
            for s in visible[name]
            if s.kind == kind
        ]
        if not bars:
            continue
        first, last, place = (np.array(column, dtype=float) for column in zip(*bars, strict=True))
        sides = (first - begin) / 1e3, (last - begin) / 1e3
        chart.boxes(sides, (place - 0.36, place + 0.36), colour)
        chart.name("full", colour, KIND_NAMES[kind])
    runs.write_text(folder / "timeline.svg", render_svg([chart], width=1100))


def _choose_step(trace: Trace) -> tuple[float, float]:
    """Return the begin and the end of the step of median length."""
    starts = [begin for begin, _ in trace.steps]
    if len(starts) == 1:
        return trace.begin, trace.end
    lengths = [(later - first, first) for first, later in itertools.pairwise(starts)]
    length, first = sorted(lengths)[len(lengths) // 2]
    return first, first + length


REPEAT_S = 0.5
MAX_STEPS = 200
MIN_GAIN = 1.05
"""Gains below it are within the spread of the measurements"""
MAX_CHANGES = 3
BATCH_FACTOR = 4
LONG_STEP_MS = 250.0
"""A step that takes this long does not need a larger batch"""

Tell = Callable[[str], None]


def profile(
    config: Config | str | Path | Mapping[str, Any],
    *,
    overrides: tuple[str, ...] = (),
    steps: int = 30,
    out: str | Path | None = None,
    tensorboard: bool = False,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Find where the time of the config's training step goes, and what would make it shorter."""
    config = configs.load(config, overrides)
    custom.allow_classes(config)
    tell("loading the data ...")
    config = defaults.resolve(config).config
    dataset = datasets.load_dataset(config)
    if dataset.memory is None and config.engine.home != "stream":
        config = replace_settings(config, engine={"home": "stream"})
    result, recorded, chrome = examine(config, dataset, steps=steps, tell=tell)
    folder = runs.create_run(config.name, out=str(out or "profiles")).folder
    result |= {"folder": str(folder), "sentences": list(write_sentences(result))}
    write_files(result, recorded, chrome, folder, tensorboard=tensorboard)
    return result


def examine(
    config: Config, dataset: Dataset, *, steps: int = 30, tell: Tell = lambda _: None
) -> tuple[dict[str, Any], Trace, bytes]:
    """Return the verdict with its evidence, the trace, and the trace in Chrome's format."""
    config = resolve_batch_size(config, dataset)
    tell("timing steps as they are ...")
    workload = TrainingWorkload(config, dataset)
    try:
        measured, recorded, chrome, sample = _record(workload, dataset, steps, tell)
        trials = try_changes(workload, dataset, measured, tell)
    finally:
        workload.close()
        recovery.free_memory()
    facts = replace(measured, gains={change.name: gain for change, gain in trials})
    name, sentence = find_bottleneck(facts)
    bound = facts.floor
    result = {
        "name": config.name,
        "verdict": name,
        "sentence": sentence,
        "ms_per_step": facts.wall_ms,
        "windows_per_s": 1e3 * workload.windows_per_step / facts.wall_ms,
        "parts": list_parts(facts),
        "device_idle": facts.idle_share if facts.on_gpu else None,
        "calls_per_step": facts.calls,
        "floor": bound._asdict() | {"ms": bound.ms, "times": facts.wall_ms / bound.ms},
        "changes": recommend(trials, config, facts),
        "tried": [_describe(change, gain) for change, gain in trials],
        "operations": recorded.operations,
        "machine": sample,
        "facts": asdict(facts) | {"floor": bound._asdict()},
        "plan": workload.plan.to_dict(),
    }
    return result, recorded, chrome


def _record(
    workload: TrainingWorkload, dataset: Dataset, steps: int, tell: Tell
) -> tuple[StepFacts, Trace, bytes, dict[str, Any]]:
    """Measure the unchanged step: facts, trace, the trace in Chrome's format, a machine sample."""
    plan = workload.plan
    machine.warm_up(plan.device)
    count = count_steps(workload)
    before, faults = machine.read_cpu_usage(), _count_major_faults()
    wall_ms = min(workload.measure_ms_per_step(count) for _ in range(3))
    load = machine.compute_load(before, machine.read_cpu_usage())
    faults = _count_major_faults() - faults
    sample = monitor.sample_machine(plan.device)
    tell(f"{format_ms(wall_ms)} a step; recording {steps} steps ...")
    recorded, chrome = record_trace(workload, min(steps, MAX_STEPS))
    tell("measuring what this machine could do ...")
    context, _ = build_by_rules(workload.config, dataset)
    on_gpu = plan.device.type == "cuda"
    facts = StepFacts(
        on_gpu=on_gpu,
        wall_ms=wall_ms,
        floor=compute_floor(context, plan),
        faults=faults / (3 * count),
        threads=plan.threads,
        cores=machine.count_available_cores(),
        others=load.others if load else 0.0,
        **compute_shares(recorded, wall_ms=wall_ms, on_gpu=on_gpu),
    )
    return facts, recorded, chrome, sample


def _count_major_faults() -> int:
    """Return how many pages this process has fetched from disk so far."""
    try:
        import resource
    except ImportError:  # Windows does not count them
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class SettingChange(NamedTuple):
    """A change of settings that may make the step faster."""

    name: str
    setting: str
    """The setting as the user would write it"""
    sections: dict[str, dict[str, Any]]
    remark: str = ""
    windows_factor: int = 1
    """Windows of the changed step relative to the unchanged one"""
    resets_engine: bool = False
    """Whether all other engine settings are dropped"""


Trials = list[tuple[SettingChange, float]]
"""Each change with its speed relative to the unchanged step, in windows per second"""


def count_steps(workload: TrainingWorkload) -> int:
    """Return how many steps one repeat takes."""
    once_s = workload.time_steps(2) / 2
    return max(2, min(MAX_STEPS, int(REPEAT_S / max(once_s, 1e-6))))


def try_changes(
    unchanged: TrainingWorkload, dataset: Dataset, facts: StepFacts, tell: Tell
) -> Trials:
    """Measure the gain of each change; leave out changes that fail.

    Both steps are timed in turns, so that other work on the machine slows both.
    """
    config, trials = unchanged.config, []
    before = count_steps(unchanged)
    for change in _list_changes(config, dataset, facts):
        tell(f"trying {change.setting} ...")
        try:
            changed = replace_settings(config, reset_engine=change.resets_engine, **change.sections)
            workload = TrainingWorkload(changed, dataset)
        except (RuntimeError, ValueError, UserError):
            continue
        try:
            after = count_steps(workload)
            pairs = [
                (unchanged.measure_ms_per_step(before), workload.measure_ms_per_step(after))
                for _ in range(3)
            ]
            before_ms, after_ms = map(min, zip(*pairs, strict=True))
            trials.append((change, change.windows_factor * before_ms / after_ms))
        except RuntimeError:
            continue
        finally:
            workload.close()
            recovery.free_memory()
    return trials


def _change_engine(name: str, setting: str, **settings: Any) -> SettingChange:
    return SettingChange(name, setting, {"engine": settings})


def _list_changes(config: Config, dataset: Dataset, facts: StepFacts) -> Iterator[SettingChange]:
    engine, train = config.engine, config.train
    assert train.batch != "auto"
    if facts.on_gpu and engine.sync:
        yield _change_engine("sync", "engine.sync = false", sync=False)
    if engine.home in ("loader", "host") and dataset.memory is not None:
        yield _change_engine("home", 'engine.home = "device"', home="device")
    if engine.home in ("loader", "stream"):
        workers = max(2, min(8, facts.cores))
        if engine.workers == 0 and facts.cores > 1:
            yield _change_engine("workers", f"engine.workers = {workers}", workers=workers)
        if facts.on_gpu and not (engine.pinned and engine.non_blocking):
            setting = "engine.pinned = true, engine.non_blocking = true"
            yield _change_engine("pinned", setting, pinned=True, non_blocking=True)
    if facts.on_gpu and engine.capture is False:
        yield _change_engine("capture", "engine.capture = true", capture=True)
    if engine.threads != "auto" and not facts.on_gpu:
        yield _change_engine("threads", 'engine.threads = "auto"', threads="auto", plan="measure")
    if engine.fused is False:
        yield _change_engine("fused", "engine.fused = true", fused=True)
    if engine.model_fields_set - {"device", "plan"}:
        settings = {"engine": {"device": engine.device, "plan": "measure"}}
        yield SettingChange("auto", "[engine] left to Slipstream", settings, resets_engine=True)
    batch = BATCH_FACTOR * train.batch
    if dataset.num_windows["train"] >= 2 * batch and facts.wall_ms < LONG_STEP_MS:
        name = f"train.batch = {batch}"
        remark = "fewer, larger steps change the training; look at the validation loss"
        yield SettingChange("batch", name, {"train": {"batch": batch}}, remark, BATCH_FACTOR)


def recommend(trials: Trials, config: Config, facts: StepFacts) -> list[dict[str, Any]]:
    """Return the changes that help most, then changes that would alter the model."""
    useful = sorted((trial for trial in trials if trial[1] >= MIN_GAIN), key=lambda t: -t[1])
    advice = [_describe(change, gain) for change, gain in useful] + _list_untried(config, facts)
    return advice[:MAX_CHANGES]


def _describe(change: SettingChange, gain: float) -> dict[str, Any]:
    return {"setting": change.setting, "gain": gain, "tried": True, "remark": change.remark}


def _list_untried(config: Config, facts: StepFacts) -> list[dict[str, Any]]:
    """List changes that cannot be tried without another model, or more of the machine."""
    advice: list[dict[str, Any]] = []
    if facts.faults >= MIN_FAULTS:
        remark = "reads Parquet in pieces; or end other work"
        advice.append({"setting": 'engine.home = "stream"', "gain": None, "remark": remark})
    recurrent = facts.kernels.get("recurrent", 0.0) / facts.wall_ms
    if recurrent > 0.5 and config.model.patch == 1 and config.data.context % 4 == 0:
        remark = "four rows per time step: a chain a quarter as long, and another model"
        gain = 1 / (1 - 0.75 * recurrent)
        advice.append({"setting": "model.patch = 4", "gain": gain, "remark": remark})
    return [entry | {"tried": False} for entry in advice]
