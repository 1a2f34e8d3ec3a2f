"""Watches the machine while a run goes on, and the run's time against what was expected of it.

A side thread asks NVML and psutil, never CUDA, which may be in the middle of a capture. What it
finds waits in a queue until the training thread, where it waits for the device anyway, writes it to
the run's log.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Self

import psutil
import torch

from slipstream import runs
from slipstream.engine import capture
from slipstream.engine.single import SingleStep
from slipstream.runs import Event, Run

INTERVAL_S = 1.0
GROWTH_S = 600.0
"""From then on samples come further and further apart: a day has some 3,600 of them."""
LOOKING = 5e-4
"""What the search for child processes may take of the time: it looks at every process there is."""
LAST_SAMPLE_S = 5.0
"""How long the end of a run waits for a driver that does not answer."""
TEN = 10
THROTTLES = {"power cap": 0x04, "hardware slowdown": 0x08, "thermal": 0x60, "power brake": 0x80}
"""NVML's bits for a clock that was held back; those of an idle GPU or a chosen clock are no loss"""

Sample = dict[str, Any]


class Monitor:
    """Samples the machine while it is entered; one that never was has nothing to log."""

    def __init__(self, run: Run, device: torch.device, *, on: bool = True) -> None:
        self._run = run
        self._samples: deque[Sample] = deque()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if on:
            gpu = _name(device) if device.type == "cuda" else None
            self._thread = threading.Thread(target=self._watch, args=[gpu], daemon=True)

    def __enter__(self) -> Self:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join(LAST_SAMPLE_S)
        if not failed:
            self.log()

    def log(self) -> None:
        """Write what was sampled to the run's log."""
        while self._samples:
            self._run.append("monitor", **self._samples.popleft())

    def _watch(self, gpu: tuple[str, int] | None) -> None:
        host, card = HostSampler(), _card(*gpu) if gpu else None
        began = last = time.perf_counter()
        ended = False
        while not ended:  # the last sample is taken when the run ends
            ended = self._ended.wait(get_interval_s(last - began))
            now = time.perf_counter()
            seconds, last = now - last, now
            sample = {"seconds": seconds} | host.read()
            self._samples.append(sample | (card.read(seconds) if card else {}))
        if card:
            card.close()


def get_interval_s(elapsed_s: float) -> float:
    """From one sample to the next."""
    return max(INTERVAL_S, elapsed_s / GROWTH_S)


class HostSampler:
    """CPU time and memory of this process and its children, as psutil tells them."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # counts from here
        self._children: dict[psutil.Process, psutil.Process] = {}  # those that count already
        self._look_at = 0.0

    def read(self) -> Sample:
        cpu_percent, rss_bytes = 0.0, 0
        for process in (self._process, *self._look()):
            with suppress(psutil.Error, OSError):  # a worker may just have ended
                cpu_percent += process.cpu_percent()
                rss_bytes += process.memory_info().rss
        return {"cpu_percent": cpu_percent, "rss_bytes": rss_bytes}

    def _look(self) -> Iterable[psutil.Process]:
        """The children, looked for anew as often as that costs little."""
        began = time.perf_counter()
        if began >= self._look_at:
            with suppress(psutil.Error, OSError):
                found = self._process.children(recursive=True)
                self._children = {child: self._children.get(child, child) for child in found}
            now = time.perf_counter()
            self._look_at = now + (now - began) / LOOKING
        return self._children.values()


class GpuSampler:
    """One GPU, as NVML tells; what it does not tell is left out."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._calls: dict[str, Callable[[], Any]] = {
            "gpu_utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_memory_bytes": lambda: (
                nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used
            ),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "throttled": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
        }
        self._energy_j = self._ask().get("energy_j")

    def read(self, seconds: float) -> Sample:
        """The figures of now, and the energy since the last reading, so many seconds ago."""
        found = self._ask()
        if "throttled" in found:
            bits = found["throttled"]
            found["throttled"] = [name for name, mask in THROTTLES.items() if bits & mask]
        total = found.pop("energy_j", None)
        if total is not None and self._energy_j is not None:
            found["energy_j"] = total - self._energy_j
        elif "power_w" in found:
            found["energy_j"] = found["power_w"] * seconds
        self._energy_j = total
        return found

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _ask(self) -> Sample:
        found: Sample = {}
        for name, call in self._calls.items():
            with suppress(self._nvml.NVMLError):
                found[name] = call()
        return found


def _name(device: torch.device) -> tuple[str, int]:
    """What NVML calls the device, and its number, which CUDA_VISIBLE_DEVICES may have changed."""
    uuid = torch.cuda.get_device_properties(device).uuid
    return f"GPU-{uuid}", device.index or 0


def _card(uuid: str, index: int) -> GpuSampler | None:
    """The GPU of this name, else of this number; None where NVML is not there."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        with suppress(nvml.NVMLError):
            return GpuSampler(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        return GpuSampler(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
    return None


def sample_machine(device: torch.device) -> Sample:
    """The machine as it is now, once."""
    host, card = HostSampler(), _card(*_name(device)) if device.type == "cuda" else None
    found = host.read()
    if card:
        found |= card.read(0.0)
        card.close()
    return found


def summarize(events: Iterable[Event]) -> dict[str, Any] | None:
    """The figures of all samples in a run's log; None where there are none.

    Means are over time. What no sample has, as on a machine without a GPU, is None. Energy and GPU
    memory are the whole card's, memory that processes share counts in each.
    """
    samples = [event for event in events if event["event"] == "monitor"]
    if not samples:
        return None

    def values(name: str) -> list[tuple[float, float]]:
        return [(s[name], s["seconds"]) for s in samples if s.get(name) is not None]

    def mean(name: str) -> float | None:
        found = values(name)
        total = sum(seconds for _, seconds in found)
        return sum(value * seconds for value, seconds in found) / total if total else None

    def most(name: str) -> float | None:
        return max((value for value, _ in values(name)), default=None)

    energy = [joules for joules, _ in values("energy_j")]
    return {
        "samples": len(samples),
        "seconds": sum(sample["seconds"] for sample in samples),
        "energy_wh": sum(energy) / 3600 if energy else None,
        "power_mean_w": mean("power_w"),
        "gpu_utilisation_mean": mean("gpu_utilisation"),
        "gpu_memory_peak_bytes": most("gpu_memory_bytes"),
        "temperature_max_c": most("temperature_c"),
        "clock_mean_mhz": mean("clock_mhz"),
        "throttled": _throttled(samples),
        "cpu_percent_mean": mean("cpu_percent"),
        "rss_peak_bytes": most("rss_bytes"),
    }


def _throttled(samples: list[Event]) -> dict[str, float]:
    """For every reason that held the GPU back, its share of the time."""
    asked = [sample for sample in samples if "throttled" in sample]
    total = sum(sample["seconds"] for sample in asked)
    shares = {
        name: sum(sample["seconds"] for sample in asked if name in sample["throttled"]) / total
        for name in THROTTLES
        if total
    }
    return {name: share for name, share in shares.items() if share}


class DurationEstimate:
    """Tells, once in a run, how long training will take, from ten of its first steps.

    Those before them, in which libraries choose and the step is captured, do not count. The host
    waits for the device before and after the ten.
    """

    def __init__(self, run: Run, num_steps: int) -> None:
        self._run, self._num_steps = run, num_steps
        told = any(event["event"] == "estimate" for event in runs.read_events(run))
        self.pending = num_steps > capture.EAGER_FIRST + TEN and not told
        self._job: SingleStep | None = None
        self._seen = 0
        self._began = 0.0

    def record_step(self, job: SingleStep, step: int, *, since: float) -> None:
        """A step was taken; `since` is when training began, had nothing come between its steps."""
        if job is not self._job:  # after a recovery everything warms up anew
            self._job, self._seen = job, 0
        self._seen += 1
        group = job.plan.steps_per_graph if job.plan.capture else 1
        warm_up, counted = capture.EAGER_FIRST + group, -(-TEN // group) * group
        if self._seen == warm_up:
            self._began = _waited(job) - since
        elif self._seen == warm_up + counted:
            trained_s = _waited(job) - since
            step_s = (trained_s - self._began) / counted
            self.pending, self._job = False, None
            self._run.append(
                "estimate",
                step=step,
                trained_s=trained_s,
                ms_per_step=1e3 * step_s,
                expected_s=trained_s + step_s * (self._num_steps - step),
            )


def _waited(job: SingleStep) -> float:
    """The time, with everything asked of the device done."""
    job.flush()
    float(job.buffers.losses[0])
    return time.perf_counter()


def compare_with_estimate(events: Iterable[Event], *, steps: int, took_s: float) -> dict[str, Any]:
    """What was expected of training before it and after ten steps, beside what it took.

    Seconds of training without validations. Where it ended early or was given more epochs, the
    expectations are those for the steps that ran.
    """
    first: dict[str, Event] = {}
    for event in events:
        first.setdefault(event["event"], event)
    start, early = first.get("start", {}), first.get("estimate")
    planned = start.get("steps_per_epoch", 0) * start.get("epochs", 0) * start.get("rounds", 1)
    before = start["expected_s"] * steps / planned if "expected_s" in start and planned else None
    after = early and early["trained_s"] + (steps - early["step"]) * early["ms_per_step"] / 1e3
    return {
        "before_s": before,
        "before_is": start.get("expected_is"),
        "after_ten_steps_s": after,
        "took_s": took_s,
        "before_ratio": before and before / took_s,
        "after_ten_steps_ratio": after and after / took_s,
        "planned_steps": planned or None,
    }
