"""How a run trains on this machine: chosen before it starts, printed, and written to plan.json.

On a CPU, the number of threads is reviewed once in the first epoch.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch

from slipstream.base import machine
from slipstream.base.machine import CpuLoad, CpuUsage
from slipstream.base.text import format_count, format_speedup
from slipstream.config.train import upgrade_plan
from slipstream.events import ThreadsReviewed
from slipstream.kernels import NATIVE_KERNELS
from slipstream.models.forecaster import OWN_KERNELS

SLOW_RATIO = 1.5
"""Steps that take so many times the planned time are a reason to review the threads"""
FASTER_RATIO = 0.8
"""Other threads must take less than this share of the time"""
REVIEW_S = 0.5
"""Time until the first look; each later one comes after twice the time"""
NUM_RECENT = 5
NUM_TRIED = 4
"""Steps with another number of threads; the first one does not count"""


@dataclass(frozen=True)
class Plan:
    """Every choice about how a run trains, its reasons, and what was measured."""

    device: torch.device
    precision: str
    home: str
    capture: bool
    steps_per_graph: int
    rnn: tuple[str, ...]
    """What runs each recurrent layer: "cudnn" with the algorithm that PyTorch chooses,
    "cudnn-standard", "slipstream" (our own kernels, in all layers), or "torch"; empty for other
    kinds of models"""
    cudnn_benchmark: bool
    compile: bool
    fused: bool
    set_to_none: bool
    deterministic: bool
    recompute: bool
    threads: int
    onednn: bool
    """CPU: recurrent layers through oneDNN"""
    workers: int
    prefetch: int
    micro_batch: int | None
    """Windows of one forward pass, where the whole batch did not fit"""
    reasons: dict[str, str]
    """Why each choice was made"""
    hardware: dict[str, Any]
    ms_per_step: float | None = None
    """As measured; None if nothing was"""
    kernels: list[str] = field(default_factory=list)
    """Recurrent and attention kernels that ran when it was measured"""
    evidence: list[dict[str, Any]] = field(default_factory=list)
    """Every candidate: what it was, its time, or why it has none"""
    data_parallel: int = 1
    """Processes that train the model together"""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The value and the reason of each setting that the data have decided, by its dotted name"""

    @property
    def autocast(self) -> torch.dtype | None:
        """The type that matrix operands are cast to, if any"""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    @property
    def native_kernels(self) -> list[str]:
        """Our kernels for a CPU, if recurrent layers run on them"""
        on_cpu = self.device.type == "cpu"
        return NATIVE_KERNELS if on_cpu and OWN_KERNELS in self.rnn else []

    def flags(self) -> AbstractContextManager[None]:
        """Set torch's global flags as the plan needs them; they are restored at the end."""
        return machine.set_flags(
            threads=self.threads,
            tf32=self.precision == "tf32",
            onednn=self.onednn,
            cudnn="torch" not in self.rnn,
            cudnn_benchmark=self.cudnn_benchmark,
            deterministic=self.deterministic,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"device": str(self.device)}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        saved = upgrade_plan(saved)
        return cls(
            **(saved | {"device": torch.device(saved["device"]), "rnn": tuple(saved["rnn"])})
        )


ONE_AT_A_TIME = "one at a time"


@dataclass(frozen=True)
class PackChoice:
    """How many lanes of a run train at a time, and how."""

    mode: str = ONE_AT_A_TIME
    """As one program ("together"), side by side ("branches"), or "one at a time\""""
    num_lanes: int = 1
    """At a time"""
    evidence: list[dict[str, Any]] = field(default_factory=list)
    """Every candidate: its time and windows a second of all its lanes, or why it has none"""
    reason: str = ""
    workers: dict[str, Any] = field(default_factory=dict)
    """How many there were and what each trained, where there were several"""

    def summarize(self, total: int) -> dict[str, Any]:
        """Return what plan.json and the log say of it, for a run of `total` lanes."""
        return {
            "lanes": total,
            "places": self.num_lanes,
            "mode": self.mode,
            "why": self.reason,
            "evidence": self.evidence,
            **self.workers,
        }


@dataclass
class ThreadReview:
    """Tries other numbers of threads on real steps, if these are much slower than planned.

    Where the plan was not measured, cores that other processes use are the reason to try.
    """

    threads: int
    planned_ms: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    """Milliseconds of the last steps with the plan's threads"""
    interval_ms: float = field(default_factory=lambda: 1e3 * REVIEW_S)
    since_look_ms: float = 0.0
    queue: list[int] = field(default_factory=list)
    """Numbers of threads to try"""
    tried: dict[int, list[float]] = field(default_factory=dict)
    load: CpuLoad | None = None
    is_over: bool = False
    usage: CpuUsage = field(default_factory=machine.read_cpu_usage)
    """Up to the first step"""

    @property
    def next_threads(self) -> int:
        """The number of threads for the next step"""
        return self.queue[0] if self.queue else self.threads

    @property
    def slow_ms(self) -> float:
        return statistics.median(self.recent)

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Set the threads for a step of the training and take its time."""
        torch.set_num_threads(self.next_threads)
        began = time.perf_counter()
        yield
        ms = 1e3 * (time.perf_counter() - began)
        self.record_step(ms, lambda: machine.compute_load(self.usage, machine.read_cpu_usage()))

    def record_step(self, ms: float, read_load: Callable[[], CpuLoad | None]) -> None:
        """Take the time of a step with `next_threads`; `read_load` returns the load so far."""
        if self.queue:
            self._record_trial(ms)
            return
        self.recent.append(ms)
        self.since_look_ms += ms
        if len(self.recent) == NUM_RECENT and self.since_look_ms >= self.interval_ms:
            self.since_look_ms, self.interval_ms = 0.0, 2 * self.interval_ms
            self._look(read_load)

    def _look(self, read_load: Callable[[], CpuLoad | None]) -> None:
        if self.planned_ms is not None and self.slow_ms <= SLOW_RATIO * self.planned_ms:
            return
        self.load = load = read_load()
        if self.planned_ms is None and (load is None or not load.is_busy_for(self.threads)):
            return
        free = 1 if load is None else int(load.cores - load.others)
        self.queue = sorted({1, min(max(free, 1), self.threads)} - {self.threads})

    def _record_trial(self, ms: float) -> None:
        times = self.tried.setdefault(self.queue[0], [])
        times.append(ms)
        is_slow = len(times) > 1 and ms > SLOW_RATIO * self.slow_ms
        if is_slow or len(times) == NUM_TRIED:
            self.queue.pop(0)
            self.is_over = not self.queue

    def choose(self) -> tuple[int, float]:
        """Return the best number of threads, and the milliseconds of its steps."""
        medians = {count: statistics.median(times[1:]) for count, times in self.tried.items()}
        best = min(medians, key=lambda count: medians[count])
        if medians[best] < FASTER_RATIO * self.slow_ms:
            return best, medians[best]
        return self.threads, self.slow_ms

    def apply(self, plan: Plan) -> Plan:
        """Return the plan with the chosen number of threads and its reason."""
        threads, ms = self.choose()
        if threads == self.threads:
            return plan
        reason = format_speedup(format_count(self.threads, "thread"), self.slow_ms, ms)
        reasons = plan.reasons | {"threads": f"changed in the first epoch, {reason}"}
        if self.load is not None and self.load.is_busy:
            reasons["load"] = f"the machine is busy: {self.load.describe()}"
        return replace(plan, threads=threads, reasons=reasons)

    def describe(self) -> ThreadsReviewed:
        """Return the event of the review."""
        threads, ms = self.choose()
        return ThreadsReviewed(
            threads=threads,
            ms=ms,
            before_threads=self.threads,
            before_ms=self.slow_ms,
            planned_ms=self.planned_ms,
            load=self.load.describe() if self.load and self.load.is_busy else None,
        )


def plan_review(plan: Plan, *, is_open: bool) -> ThreadReview | None:
    """Return the review of a plan; None where the number of threads is fixed or 1, or on a GPU."""
    if not is_open or plan.device.type != "cpu" or plan.threads == 1:
        return None
    return ThreadReview(plan.threads, plan.ms_per_step)
