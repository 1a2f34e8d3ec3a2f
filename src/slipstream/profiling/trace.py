"""Records what host and device did during some steps, with torch's profiler.

Times are microseconds. A span is one interval of work: a kernel or a copy on the device, an
operation, a call of the driver or a marked range on the host.
"""

import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as record_profile

from slipstream import machine
from slipstream.autotune.workload import TimedWorkload

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
    """Begin and end of each, on the host"""
    device: list[Span]
    host: list[Span]
    """Of the training thread"""
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
    """Run some steps under the profiler; return the trace, and the same in Chrome's format."""
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
            rest = [line for line in buffer if not line.startswith(b"USDT:")]
            os.write(2, b"".join(rest))


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
    """Yield spans with their kinds: their own, else that of the enclosing span, else that of the
    forward operation whose gradient they compute."""
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
    """Yield the spans of one thread, cut so that every moment belongs to the innermost one."""
    stack: list[Span] = []
    at = 0.0
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        while stack and stack[-1].end <= span.begin:
            top = stack.pop()
            if top.end > at:
                yield top._replace(begin=max(at, top.begin))
                at = top.end
        if stack and span.begin > at:
            yield stack[-1]._replace(begin=max(at, stack[-1].begin), end=span.begin)
        at = max(at, span.begin)
        stack.append(span)
    while stack:
        top = stack.pop()
        if top.end > at:
            yield top._replace(begin=max(at, top.begin))
            at = top.end


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
