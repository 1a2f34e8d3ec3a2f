"""Events about the machine: its load, and whether training is as fast as expected."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.events.base import Event


@dataclass(frozen=True, kw_only=True)
class Estimate(Event):
    """A better estimate of the duration, after the first steps."""

    step: int
    """Steps so far"""
    trained_s: float | None = None
    """Seconds that these steps took"""
    ms_per_step: float
    """Milliseconds per step"""
    expected_s: float
    """Upper estimate of the training time"""


@dataclass(frozen=True, kw_only=True)
class PlanComparison(Event):
    """The speed of the first epoch, compared with what the plan had measured."""

    promised_ms: float
    """Milliseconds per step that the plan measured"""
    seen_ms: float
    """Milliseconds per step in the first epoch"""
    ratio: float
    """`seen_ms` divided by `promised_ms`"""
    kernels: list[str]
    """GPU kernels that ran"""


@dataclass(frozen=True, kw_only=True)
class ThreadsReviewed(Event):
    """The number of threads was reviewed in the first epoch, and training continues with it."""

    threads: int
    """Number of threads from here on"""
    ms: float
    """Milliseconds per step with them"""
    before_threads: int
    """Planned number of threads"""
    before_ms: float
    """Milliseconds per step with the planned number"""
    planned_ms: float | None = None
    """Milliseconds per step that the plan had measured"""
    load: str | None = None
    """Use of the cores by other processes, if they are busy"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class MachineSample(Event):
    """The load of the machine since the last sample, at most once a second (`engine.monitor`)."""

    seconds: float
    """Seconds since the last sample"""
    cpu_percent: float
    """CPU use of this process and its children; 100 is one core"""
    rss_bytes: int
    """Memory of this process and its children"""
    gpu_utilisation: int | None = None
    """Percent of the time in which the GPU was busy"""
    gpu_memory_bytes: int | None = None
    """GPU memory in use by all processes"""
    temperature_c: int | None = None
    """Temperature of the GPU"""
    clock_mhz: int | None = None
    """Clock of the GPU's multiprocessors"""
    throttled: list[str] | None = None
    """Why the GPU is slowed down; empty if it is not"""
    power_w: float | None = None
    """Power of the GPU"""
    energy_j: float | None = None
    """Energy of the GPU since the last sample"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class CopiesOnDisk(Event):
    """The augmented copies of `augment.cache` are used."""

    what: str
    """writing, or reading the copies of an earlier run"""
    copies: int
    """Number of copies of each window"""
    bytes: int
    """Size of the copies"""
    folder: str
    """Folder of the copies"""
    worker: int | None = None
    """The worker that logged it, where several train"""
