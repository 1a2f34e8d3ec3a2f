"""The processor, and how many cores and how much memory this process may use.

A container, a job scheduler or `ulimit` often allows less than the machine has.
"""

import functools
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class CpuInfo(NamedTuple):
    name: str
    flags: frozenset[str]
    """Instruction sets as /proc/cpuinfo names them; empty on macOS and Windows, which lack it"""


@functools.cache
def read_cpu_info() -> CpuInfo:
    """Read the processor's name and instruction sets."""
    fields: dict[str, str] = {}
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags") or fields.get("Features") or ""  # x86, Arm
    return CpuInfo(name, frozenset(flags.split()))


def read_text(path: Path) -> str:
    """Return the content of a small file, or an empty string where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


UNLIMITED = 2**60
"""From here on, a cgroup's limit in bytes means that there is none."""


class Cgroup(NamedTuple):
    """Where Linux describes this process's control groups; other systems have no such files."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def list_folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the groups, in both versions of cgroups, up to the root."""
        for line in read_text(self.membership).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = self.root / controller if controllers else self.root
            folder = top / path.lstrip("/")
            yield from [folder, *folder.parents][: len(folder.parts) - len(top.parts) + 1]


OWN = Cgroup()


def count_visible_cores() -> int:
    """Count the cores that this process may run on, which a cpuset or taskset can reduce."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_available_cores(cgroup: Cgroup = OWN) -> int:
    """Count the visible cores, up to the container's quota of CPU time and to what SLURM has
    allocated, which a cluster need not enforce."""
    quotas = (max(math.ceil(quota), 1) for quota in read_cpu_quotas(cgroup))
    return min([count_visible_cores(), *quotas, *_read_allocated_cores()])


def _read_allocated_cores() -> Iterator[int]:
    """Yield the cores that SLURM has allocated to this task, or to its job on this machine."""
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text):
            yield int(text)
            return


def get_total_memory(cgroup: Cgroup = OWN) -> int:
    """Return the bytes of memory that this process can ever have, within its cgroups' limits."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in read_memory_limits(cgroup))])


def get_available_memory(cgroup: Cgroup = OWN) -> int:
    """Return the bytes of memory that this process can still allocate."""
    left = (max(limit - used, 0) for limit, used in read_memory_limits(cgroup))
    available: int = psutil.virtual_memory().available
    return min([available, *left, *_read_address_space_left()])


def _read_address_space_left() -> Iterator[int]:
    """Yield what `ulimit -v` leaves of this process's address space, where that is limited."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield max(limit - psutil.Process().memory_info().vms, 0)


def read_cpu_quotas(cgroup: Cgroup = OWN) -> Iterator[float]:
    """Yield every limit on this process's CPU time, in cores."""
    for folder in cgroup.list_folders("cpu"):
        words = read_text(folder / "cpu.max").split()
        older = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = words or [read_text(folder / name).strip() for name in older]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():  # not "max", not -1
            yield int(words[0]) / int(words[1])


def read_memory_limits(cgroup: Cgroup = OWN) -> Iterator[tuple[int, int]]:
    """Yield every limit on this process's memory and its usage, without cached files."""
    for folder in cgroup.list_folders("memory"):
        for limit_name, used_name, cached_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = (read_text(folder / name).strip() for name in (limit_name, used_name))
            if not (limit.isdigit() and used.isdigit()) or int(limit) >= UNLIMITED:
                continue
            lines = (line.split() for line in read_text(folder / "memory.stat").splitlines())
            cached = next((int(words[1]) for words in lines if words[0] == cached_name), 0)
            yield int(limit), max(int(used) - cached, 0)
