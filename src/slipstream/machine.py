"""What this machine is, which device a run takes, and the one place that sets torch's flags."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from slipstream import __version__
from slipstream.errors import UserError

WARM_UP_S = 0.3
"""A device that has rested needs so long to come to its full clock."""
UNLIMITED = 2**60
"""From here on, a cgroup's limit of bytes is none."""


class Cgroup(NamedTuple):
    """Where the kernel tells of the control groups that this process is in."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def list_folders(self, controller: str) -> Iterator[Path]:
        """The groups, in both versions of cgroups, up to the root."""
        for line in _text(self.membership).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = self.root / controller if controllers else self.root
            folder = top / path.lstrip("/")
            yield from [folder, *folder.parents][: len(folder.parts) - len(top.parts) + 1]


OWN = Cgroup()


def describe(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, as kept with every plan."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": count_available_cores(),
        "memory_bytes": get_total_memory(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "slipstream": __version__,
        "triton": find_package_version("triton", "pytorch-triton", "triton-windows"),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": card.name,
            "gpu_memory_bytes": card.total_memory,
            "compute_capability": f"{card.major}.{card.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver_version(),
        }
    return found


def find_package_version(*names: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver_version() -> str | None:
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            told = nvml.nvmlSystemGetDriverVersion()
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
    return told.decode() if isinstance(told, bytes) else str(told)


def choose_device(setting: str) -> torch.device:
    """The device for `engine.device`; refuses CUDA where there is none."""
    if setting == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(setting)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = "sees no GPU" if torch.version.cuda else "is built without CUDA"
            raise UserError(
                f'engine.device is "{setting}" but torch {torch.__version__} {built}; '
                'use "cpu" or "auto", or install a CUDA build of torch'
            )
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise UserError(
                f'engine.device is "{setting}" but this machine has {torch.cuda.device_count()} '
                "GPU(s), counted from 0"
            )
        return torch.device("cuda", index)
    return device


def count_visible_cores() -> int:
    """Cores that this process may run on, which a cpuset or taskset can make fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_available_cores(cgroup: Cgroup = OWN) -> int:
    """Cores that this process may keep busy: those it sees, within a container's quota of time."""
    return min(
        [count_visible_cores(), *(max(math.ceil(quota), 1) for quota in read_cpu_quotas(cgroup))]
    )


def get_total_memory(cgroup: Cgroup = OWN) -> int:
    """Bytes of memory that this process may ever have: the machine's, within its groups' limits."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in read_memory_limits(cgroup))])


def get_available_memory(cgroup: Cgroup = OWN) -> int:
    """Bytes of memory that this process can still take."""
    left = (max(limit - used, 0) for limit, used in read_memory_limits(cgroup))
    available: int = psutil.virtual_memory().available
    return min([available, *left, *_address_space()])


def _address_space() -> Iterator[int]:
    """What `ulimit -v` leaves of this process's address space, where that is limited."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield max(limit - psutil.Process().memory_info().vms, 0)


def read_cpu_quotas(cgroup: Cgroup = OWN) -> Iterator[float]:
    """Every limit on this process's CPU time, in cores."""
    for folder in cgroup.list_folders("cpu"):
        words = _text(folder / "cpu.max").split()
        older = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = words or [_text(folder / name).strip() for name in older]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():  # not "max", not -1
            yield int(words[0]) / int(words[1])


def read_memory_limits(cgroup: Cgroup = OWN) -> Iterator[tuple[int, int]]:
    """Every limit on this process's memory, and what counts against it: cached files do not."""
    for folder in cgroup.list_folders("memory"):
        for limit_name, used_name, cached_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = (_text(folder / name).strip() for name in (limit_name, used_name))
            if not (limit.isdigit() and used.isdigit()) or int(limit) >= UNLIMITED:
                continue
            lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
            cached = next((int(words[1]) for words in lines if words[0] == cached_name), 0)
            yield int(limit), max(int(used) - cached, 0)


def _text(path: Path) -> str:
    """A small file's content; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


@dataclass(frozen=True)
class GpuHint:
    """What has worked on a card: where to start looking, never where to stop."""

    batch: int
    workers: int
    half: str
    """The half precision that it does natively, or best"""


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
    return next((found for name, found in HINTS.items() if name in gpu), None)


def has_tf32(device: torch.device) -> bool:
    """Ampere and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively: AMX, AVX-512-BF16 or Arm's BF16."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            words = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return False
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(words.split()))


def synchronize(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(device: torch.device) -> None:
    """Keep the device busy until its clock is up."""
    if device.type != "cuda":
        return
    square = torch.zeros(1024, 1024, device=device)
    until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize(device)


def get_max_clock_mhz(device: torch.device) -> float | None:
    """The highest clock of the device's processors, where the driver tells."""
    try:
        return float(torch.cuda.get_device_properties(device).clock_rate) / 1e3
    except (AttributeError, RuntimeError, AssertionError):
        return None


@contextmanager
def set_flags(
    *,
    threads: int,
    tf32: bool,
    onednn: bool = True,
    cudnn_benchmark: bool = False,
    deterministic: bool = False,
) -> Iterator[None]:
    """Torch's global settings for one run, put back afterwards."""
    # typed as Any: torch sets these through module attributes that its annotations leave out
    matmul: Any = torch.backends.cuda.matmul
    rnn: Any = torch.backends.cudnn.rnn
    mkldnn: Any = torch.backends.mkldnn
    cudnn: Any = torch.backends.cudnn
    before = matmul.fp32_precision, rnn.fp32_precision, mkldnn.enabled, cudnn.benchmark
    before_threads = torch.get_num_threads()
    deterministic = deterministic and not torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(threads)
        matmul.fp32_precision = rnn.fp32_precision = "tf32" if tf32 else "ieee"
        mkldnn.enabled, cudnn.benchmark = onednn, cudnn_benchmark
        if deterministic:  # else not even a look: it would import torch's compiler
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        if deterministic:
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before_threads)
        matmul.fp32_precision, rnn.fp32_precision, mkldnn.enabled, cudnn.benchmark = before


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
