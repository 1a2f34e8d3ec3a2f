"""Samples the machine during a run, and compares the run's duration with its estimates.

A side thread reads NVML and psutil, never CUDA, which may be capturing a graph. Its samples wait in
a queue until the training thread, where it waits for the device anyway, writes them to the run's
log.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Self

import psutil
import torch

from slipstream import runs
from slipstream.base.nvml import THROTTLE_REASONS, Gpu, open_gpu
from slipstream.engine import capture
from slipstream.engine.single import SingleStep
from slipstream.events import Estimate, Event, MachineSample, Start
from slipstream.runs import Run
from slipstream.runs.summary import EstimateSummary, MonitorSummary

INTERVAL_S = 1.0
GROWTH_S = 600.0
"""After this time samples come further and further apart: a day has about 3,600 of them."""
CHILD_SEARCH_SHARE = 5e-4
"""The share of time for finding child processes, which visits every process of the machine"""
LAST_SAMPLE_S = 5.0
"""How long the end of a run waits for a driver that does not answer"""
ESTIMATE_STEPS = 10

Sample = dict[str, Any]


class Monitor:
    """Samples the machine while it is entered; without that it logs nothing."""

    def __init__(self, run: Run, device: torch.device, *, on: bool = True) -> None:
        self._run = run
        self._samples: deque[MachineSample] = deque()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if on:
            # torch is asked here, not in the thread: this may initialize CUDA
            gpu = _identify_gpu(device)
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
        """Write the samples so far to the run's log."""
        while self._samples:
            self._run.append(self._samples.popleft())

    def _watch(self, gpu: tuple[str, int] | None) -> None:
        with _open_samplers(gpu) as (host, gpu_sampler):
            start = last = time.perf_counter()
            ended = False
            while not ended:  # the last sample is taken when the run ends
                ended = self._ended.wait(get_interval_s(last - start))
                now = time.perf_counter()
                seconds, last = now - last, now
                readings = host.read() | gpu_sampler.read(seconds)
                self._samples.append(MachineSample(seconds=seconds, **readings))


def get_interval_s(elapsed_s: float) -> float:
    """Return the time from one sample to the next."""
    return max(INTERVAL_S, elapsed_s / GROWTH_S)


class HostSampler:
    """Reads CPU time and memory of this process and its children."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # counts from here
        self._children: dict[psutil.Process, psutil.Process] = {}
        """The objects that have counted CPU time since they were found"""
        self._next_search = 0.0

    def read(self) -> Sample:
        cpu_percent, rss_bytes = 0.0, 0
        for process in (self._process, *self._find_children()):
            with suppress(psutil.Error, OSError):  # a worker may just have ended
                cpu_percent += process.cpu_percent()
                rss_bytes += process.memory_info().rss
        return {"cpu_percent": cpu_percent, "rss_bytes": rss_bytes}

    def _find_children(self) -> Iterable[psutil.Process]:
        """Return the children, searched for again as often as that costs little."""
        start = time.perf_counter()
        if start >= self._next_search:
            with suppress(psutil.Error, OSError):
                children = self._process.children(recursive=True)
                self._children = {child: self._children.get(child, child) for child in children}
            end = time.perf_counter()
            self._next_search = end + (end - start) / CHILD_SEARCH_SHARE
        return self._children.values()


class GpuSampler:
    """Reads one GPU, and its energy between two samples; without a GPU, nothing."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._energy_j = gpu.read_sample().get("energy_j") if gpu else None

    def read(self, seconds: float) -> Sample:
        """Return the current readings, and the energy since the last sample `seconds` ago."""
        if self._gpu is None:
            return {}
        sample = self._gpu.read_sample()
        total = sample.pop("energy_j", None)
        if total is not None and self._energy_j is not None:
            sample["energy_j"] = total - self._energy_j
        elif "power_w" in sample:
            sample["energy_j"] = sample["power_w"] * seconds
        self._energy_j = total
        return sample


def _identify_gpu(device: torch.device) -> tuple[str, int] | None:
    """Return the GPU's UUID, and its number, which CUDA_VISIBLE_DEVICES may have changed."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}", device.index or 0


@contextmanager
def _open_samplers(gpu: tuple[str, int] | None) -> Iterator[tuple[HostSampler, GpuSampler]]:
    with open_gpu(*gpu) if gpu else nullcontext() as opened:
        yield HostSampler(), GpuSampler(opened)


def sample_machine(device: torch.device) -> Sample:
    """Read the machine once."""
    with _open_samplers(_identify_gpu(device)) as (host, gpu_sampler):
        return host.read() | gpu_sampler.read(0.0)


def summarize(events: Iterable[Event]) -> MonitorSummary | None:
    """Summarize all samples of a run's log; return None where there are none.

    Means are over time. What no sample contains, as on a machine without a GPU, is None. Energy and
    GPU memory are those of the whole GPU; memory that processes share counts in each of them. Of
    several workers, power, cores and memory add up.
    """
    samples = [event for event in events if isinstance(event, MachineSample)]
    if not samples:
        return None

    def values(name: str) -> list[tuple[float, float]]:
        pairs = ((getattr(sample, name), sample.seconds) for sample in samples)
        return [(value, seconds) for value, seconds in pairs if value is not None]

    def mean(name: str) -> float | None:
        pairs = values(name)
        total = sum(seconds for _, seconds in pairs)
        return sum(value * seconds for value, seconds in pairs) / total if total else None

    workers = {sample.worker for sample in samples if sample.worker is not None}

    def elapsed_s(name: str) -> float:
        """Return the time that samples cover; those of workers are of the same time."""
        chosen = [sample for sample in samples if getattr(sample, name) is not None]
        alone = [sample.seconds for sample in chosen if sample.worker is None]
        beside = [sample.seconds for sample in chosen if sample.worker is not None]
        return sum(alone) + sum(beside) / max(len(workers), 1)

    def total_mean(name: str) -> float | None:
        time_s = elapsed_s(name)
        return sum(value * seconds for value, seconds in values(name)) / time_s if time_s else None

    def total_maximum(name: str) -> float | None:
        peaks: dict[int | None, float] = {}
        for sample in samples:
            value = getattr(sample, name)
            if value is not None:
                peaks[sample.worker] = max(value, peaks.get(sample.worker, 0))
        alone = peaks.pop(None, 0)
        return max(alone, sum(peaks.values())) or None

    def maximum(name: str) -> float | None:
        return max((value for value, _ in values(name)), default=None)

    energy = [joules for joules, _ in values("energy_j")]
    causes = [
        (sample.throttled, sample.seconds) for sample in samples if sample.throttled is not None
    ]
    caused_s = sum(seconds for _, seconds in causes)
    reasons = {
        reason: sum(s for names, s in causes if reason in names) for reason in THROTTLE_REASONS
    }
    return {
        "samples": len(samples),
        "seconds": elapsed_s("seconds"),
        "energy_wh": sum(energy) / 3600 if energy else None,
        "power_mean_w": total_mean("power_w"),
        "gpu_utilisation_mean": mean("gpu_utilisation"),
        "gpu_memory_peak_bytes": maximum("gpu_memory_bytes"),
        "temperature_max_c": maximum("temperature_c"),
        "clock_mean_mhz": mean("clock_mhz"),
        "throttled": {name: seconds / caused_s for name, seconds in reasons.items() if seconds},
        "cpu_percent_mean": total_mean("cpu_percent"),
        "rss_peak_bytes": total_maximum("rss_bytes"),
    }


class DurationEstimate:
    """Logs, once in a run, how long training will take, measured over ten of its first steps.

    The steps before them, in which libraries choose algorithms and the step is captured, do not
    count. The host waits for the device before and after the ten.
    """

    def __init__(self, run: Run, num_steps: int) -> None:
        self._run, self._num_steps = run, num_steps
        logged = any(isinstance(event, Estimate) for event in runs.read_events(run))
        self.pending = num_steps > capture.EAGER_FIRST + ESTIMATE_STEPS and not logged
        self._job: SingleStep | None = None
        self._seen = 0
        self._began = 0.0

    def record_step(self, job: SingleStep, step: int, *, since: float) -> None:
        """Count a step; `since` is the start of training, moved by all pauses between its steps."""
        if job is not self._job:  # after a recovery everything warms up again
            self._job, self._seen = job, 0
        self._seen += 1
        group = job.plan.steps_per_graph if job.plan.capture else 1
        warm_up, counted = capture.EAGER_FIRST + group, -(-ESTIMATE_STEPS // group) * group
        if self._seen == warm_up:
            self._began = _wait_for_device(job) - since
        elif self._seen == warm_up + counted:
            trained_s = _wait_for_device(job) - since
            step_s = (trained_s - self._began) / counted
            self.pending, self._job = False, None
            self._run.append(
                Estimate(
                    step=step,
                    trained_s=trained_s,
                    ms_per_step=1e3 * step_s,
                    expected_s=trained_s + step_s * (self._num_steps - step),
                )
            )


def _wait_for_device(job: SingleStep) -> float:
    """Return the time at which the device has finished all steps."""
    job.flush()
    float(job.buffers.losses[0])
    return time.perf_counter()


def compare_with_estimate(events: Iterable[Event], *, steps: int, took_s: float) -> EstimateSummary:
    """Compare the estimates before training and after ten steps with its duration.

    All are seconds of training without validations. Where a run ended early or was continued with
    more epochs, the estimates are those for the steps that ran.
    """
    logged = list(events)
    start = next((event for event in logged if isinstance(event, Start)), None)
    early = next((event for event in logged if isinstance(event, Estimate)), None)
    planned, before, after = 0, None, None
    if start is not None:
        planned = start.steps_per_epoch * start.epochs * (start.rounds or 1)
        before = start.expected_s * steps / planned if planned else None
    if early is not None and early.trained_s is not None:
        after = early.trained_s + (steps - early.step) * early.ms_per_step / 1e3
    return {
        "before_s": before,
        "before_is": start.expected_is if start else None,
        "after_ten_steps_s": after,
        "took_s": took_s,
        "before_ratio": before and before / took_s,
        "after_ten_steps_ratio": after and after / took_s,
        "planned_steps": planned or None,
    }
