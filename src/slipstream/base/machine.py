"""The machine: devices, cores, memory, load, and the processes that run on it."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from slipstream import __version__
from slipstream.base import nvml
from slipstream.base.errors import UserError
from slipstream.base.text import format_count

if TYPE_CHECKING:
    import torch


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
"""A cgroup's limit of this many bytes or more means that there is no limit"""


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
    """Yield the address space that `ulimit -v` leaves to this process, where it is limited."""
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


def signal_process_group(pid: int, number: int) -> None:
    """Send a signal to a process that was started in a session of its own, and to its children.

    Windows has neither process groups nor signals: there every signal kills.
    """
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(pid, number)
        return
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                member.kill()


def kill_process_group(pid: int) -> None:
    """Kill a process that was started in a session of its own, and its children."""
    signal_process_group(pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has no SIGKILL


def disown_process(process: subprocess.Popen[Any]) -> None:
    """Let a process outlive this one: `Popen` would warn of it, since nobody waits for its end."""
    if process.poll() is None:
        process.returncode = 0


def describe_exit(code: int, stderr: str) -> str:
    """Describe how a process ended, with the last line that it wrote to stderr."""
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    last = (stderr.strip().splitlines() or [""])[-1]
    return f"{ended}: {last}" if last else ended


WARM_UP_S = 0.3
"""How long an idle device takes to reach its full clock"""


@dataclass(frozen=True)
class GpuHint:
    """Settings that have worked on a GPU: the start of a measurement, never its end."""

    batch: int
    workers: int
    half: str
    """The half precision that the GPU computes natively, or fastest"""


HINTS = {
    "T4": GpuHint(256, 2, "fp16"),
    "2080 Ti": GpuHint(256, 6, "fp16"),
    "3090": GpuHint(512, 8, "bf16"),
    "4060": GpuHint(256, 4, "bf16"),
    "4090": GpuHint(512, 8, "bf16"),
    "A100": GpuHint(1024, 8, "bf16"),
    "H100": GpuHint(1024, 8, "bf16"),
    "H200": GpuHint(1024, 8, "bf16"),
}


def find_gpu_hint(gpu: str) -> GpuHint | None:
    return next((hint for name, hint in HINTS.items() if name in gpu), None)


def choose_device(setting: str) -> torch.device:
    """Return the device for `engine.device`; refuse CUDA where there is none."""
    import torch

    if setting == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(setting)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        built = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        raise UserError(
            f'engine.device is "{setting}" but torch {torch.__version__} {built}; '
            'use "cpu" or "auto", or install a CUDA build of torch'
        )
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f'engine.device is "{setting}" but this machine has {count} GPU(s), counted from 0'
        )
    return torch.device("cuda", index)


def describe(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions, as every plan records them."""
    import torch

    description: dict[str, Any] = {
        "cpu": read_cpu_info().name,
        "cores": count_available_cores(),
        "memory_bytes": get_total_memory(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "slipstream": __version__,
        "triton": find_triton_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        description |= {
            "gpu": gpu.name,
            "gpu_memory_bytes": gpu.total_memory,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": nvml.read_driver_version(),
        }
    return description


def find_triton_version() -> str | None:
    """Return the version of Triton, under whichever name it is installed."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def has_tf32(device: torch.device) -> bool:
    """Return whether the GPU is an Ampere or later."""
    import torch

    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_fast_bf16() -> bool:
    """Return whether this CPU multiplies bf16 natively: AMX, AVX-512-BF16 or Arm's BF16."""
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & read_cpu_info().flags)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(device: torch.device) -> None:
    """Keep the device busy until it runs at its full clock."""
    import torch

    if device.type != "cuda":
        return
    square = torch.zeros(1024, 1024, device=device)
    until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize(device)


def measure_products() -> float:
    """Return the operations a second of a product of matrices on the CPU, with all threads."""
    import torch

    size, fastest_s = 512, float("inf")
    square = torch.zeros(size, size)
    for _ in range(10):
        began = time.perf_counter()
        square @ square
        fastest_s = min(fastest_s, time.perf_counter() - began)
    return 2 * size**3 / fastest_s


def get_max_clock_mhz(device: torch.device) -> float | None:
    """Return the highest clock of the GPU's processors, where the driver reports it."""
    import torch

    with suppress(AttributeError, RuntimeError, AssertionError):
        return float(torch.cuda.get_device_properties(device).clock_rate) / 1e3
    return None


@contextmanager
def set_flags(
    *,
    threads: int,
    tf32: bool,
    onednn: bool = True,
    cudnn: bool = True,
    cudnn_benchmark: bool = False,
    deterministic: bool = False,
) -> Iterator[None]:
    """Set torch's global flags for one run and restore them afterwards; nothing else sets them."""
    import torch

    backends: Any = torch.backends  # whose annotations leave these attributes out
    matmul, rnn = backends.cuda.matmul, backends.cudnn.rnn
    mkldnn, dnn = backends.mkldnn, backends.cudnn
    before = matmul.fp32_precision, rnn.fp32_precision, mkldnn.enabled, dnn.enabled, dnn.benchmark
    before_threads = torch.get_num_threads()
    deterministic = deterministic and not torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(threads)
        matmul.fp32_precision = rnn.fp32_precision = "tf32" if tf32 else "ieee"
        mkldnn.enabled, dnn.enabled, dnn.benchmark = onednn, cudnn, cudnn_benchmark
        if deterministic:  # torch imports its compiler even to set False
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        if deterministic:
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before_threads)
        matmul.fp32_precision, rnn.fp32_precision, mkldnn.enabled, *flags = before
        dnn.enabled, dnn.benchmark = flags


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch's operations share so many threads."""
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


SPARE_CORES = 0.5
"""The number of cores by which threads and other processes together may exceed the available
ones"""
MIN_INTERVAL_S = 0.1
"""The shortest interval of which the load is computed: CPU time is counted in ticks of 10 ms"""


class CpuUsage(NamedTuple):
    """CPU seconds up to a moment."""

    at_s: float
    all_s: float
    """CPU seconds of all processes, on the cores that this process may run on"""
    own_s: float
    """CPU seconds of this process and its children"""


class CpuLoad(NamedTuple):
    """The number of cores that other processes used over an interval."""

    others: float
    """Cores that other processes kept busy"""
    cores: int
    """Cores that this process may run on"""
    available: int
    """Cores that this process may run on, up to the container's quota"""

    def is_busy_for(self, threads: int) -> bool:
        """Return whether `threads` threads would have to share cores with other processes."""
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
    for member in (process, *process.children(recursive=True)):
        try:
            own_s += sum(member.cpu_times()[:2])
        except psutil.Error:  # it has just ended
            continue
    return CpuUsage(time.perf_counter(), _read_busy_s(), own_s)


def _read_busy_s() -> float:
    """Sum the CPU seconds on the cores that this process may run on, stolen time included."""
    cores = psutil.cpu_times(percpu=True)
    visible = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    if max(visible) < len(cores):  # else some cores are offline, and numbers are no positions
        cores = [cores[number] for number in visible]
    waiting = ("idle", "iowait", "guest", "guest_nice")  # a guest's time is in the user's too
    return sum(
        sum(seconds for name, seconds in times._asdict().items() if name not in waiting)
        for times in cores
    )


def compute_load(since: CpuUsage, until: CpuUsage) -> CpuLoad | None:
    """Return the load between two moments; None if the interval is too short to tell."""
    elapsed_s = until.at_s - since.at_s
    if elapsed_s < MIN_INTERVAL_S:
        return None
    others_s = (until.all_s - since.all_s) - (until.own_s - since.own_s)
    cores = count_visible_cores()
    busy_cores = min(max(others_s / elapsed_s, 0.0), float(cores))
    return CpuLoad(busy_cores, cores, count_available_cores())
