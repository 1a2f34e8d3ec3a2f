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
    """Seconds that they took"""
    ms_per_step: float
    """Milliseconds per step"""
    expected_s: float
    """The longest that training should take"""


@dataclass(frozen=True, kw_only=True)
class PlanComparison(Event):
    """The speed of the first epoch, compared with what the plan had measured."""

    promised_ms: float
    """Milliseconds per step of the plan"""
    seen_ms: float
    """Milliseconds per step of the epoch"""
    ratio: float
    """The second by the first"""
    kernels: list[str]
    """GPU kernels that ran"""


@dataclass(frozen=True, kw_only=True)
class ThreadsReviewed(Event):
    """The number of threads was reviewed in the first epoch, and training continues with it."""

    threads: int
    """From here on"""
    ms: float
    """Milliseconds per step"""
    before_threads: int
    """As planned"""
    before_ms: float
    """Milliseconds per step with them"""
    planned_ms: float | None = None
    """Milliseconds per step that the plan had measured"""
    load: str | None = None
    """What other processes use of the cores, where they are busy"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class MachineSample(Event):
    """The load of the machine since the last sample, at most once a second (`engine.monitor`)."""

    seconds: float
    """Since the last sample"""
    cpu_percent: float
    """Of this process and its children; 100 is one core"""
    rss_bytes: int
    """Their memory"""
    gpu_utilisation: int | None = None
    """Percent of the time in which the GPU was busy"""
    gpu_memory_bytes: int | None = None
    """In use, of all processes"""
    temperature_c: int | None = None
    """Of the GPU"""
    clock_mhz: int | None = None
    """Of its multiprocessors"""
    throttled: list[str] | None = None
    """Why the GPU is slowed down; empty if it is not"""
    power_w: float | None = None
    """Of the GPU"""
    energy_j: float | None = None
    """Of the GPU, since the last sample"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class CopiesOnDisk(Event):
    """The augmented copies of `augment.cache` are used."""

    what: str
    """writing, or reading those of an earlier run"""
    copies: int
    """Of each window"""
    bytes: int
    """Their size"""
    folder: str
    """Where they are"""
    worker: int | None = None
    """The worker that logged it, where several train"""
