"""How busy the cores are: the CPU time of other processes beside our own."""

import os
import time
from typing import NamedTuple

import psutil

from slipstream.machine.limits import count_available_cores, count_visible_cores
from slipstream.text import format_count

SPARE_CORES = 0.5
"""By how many cores threads and other processes together may exceed the cores"""
MIN_INTERVAL_S = 0.1
"""CPU time is counted in ticks of 10 ms: a shorter interval says nothing"""


class CpuUsage(NamedTuple):
    """CPU seconds up to a moment."""

    at_s: float
    all_s: float
    """Of all processes, on the cores that this one may run on"""
    own_s: float
    """Of this process and its children"""


class CpuLoad(NamedTuple):
    """How much of the cores other processes used over an interval."""

    others: float
    """Cores that they kept busy"""
    cores: int
    """That this process may run on"""
    available: int
    """The same, up to the container's quota"""

    def is_busy_for(self, threads: int) -> bool:
        """Whether so many threads of ours would have to share cores with other processes."""
        threads = min(threads, self.available)
        return self.others >= SPARE_CORES and threads + self.others > self.cores + SPARE_CORES

    @property
    def is_busy(self) -> bool:
        return self.is_busy_for(self.available)

    def describe(self) -> str:
        return f"other processes use {self.others:.1f} of {format_count(self.cores, 'core')}"


def read_cpu_usage() -> CpuUsage:
    """Read the CPU time of all processes and of this one with its children."""
    process, own_s = psutil.Process(), 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            own_s += sum(one.cpu_times()[:2])
        except psutil.Error:  # it has just ended
            continue
    return CpuUsage(time.perf_counter(), _read_busy_s(), own_s)


def _read_busy_s() -> float:
    """Sum the CPU seconds on the cores that this process may run on, stolen time included."""
    every = psutil.cpu_times(percpu=True)
    visible = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
    if max(visible) < len(every):  # else some cores are offline, and numbers are no positions
        every = [every[core] for core in visible]
    waiting = ("idle", "iowait", "guest", "guest_nice")  # a guest's time is in the user's too
    return sum(
        sum(seconds for name, seconds in one._asdict().items() if name not in waiting)
        for one in every
    )


def compute_load(since: CpuUsage, until: CpuUsage) -> CpuLoad | None:
    """Return the load between two moments; None if the interval is too short to tell."""
    elapsed_s = until.at_s - since.at_s
    if elapsed_s < MIN_INTERVAL_S:
        return None
    others_s = (until.all_s - since.all_s) - (until.own_s - since.own_s)
    cores = count_visible_cores()
    others = min(max(others_s / elapsed_s, 0.0), float(cores))
    return CpuLoad(others, cores, count_available_cores())
