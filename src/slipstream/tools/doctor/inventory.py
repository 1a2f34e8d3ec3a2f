"""The inventory of this machine: GPUs, driver, libraries, CPU, memory and disk."""

import importlib.metadata
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from slipstream import __version__
from slipstream.base import machine, nvml
from slipstream.base.machine import find_triton_version, read_cpu_info, read_text

FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "sve": "SVE",
    "sve2": "SVE2",
    "bf16": "bf16",
}
"""The instruction sets that matter to training: their names in /proc/cpuinfo and in prose"""
THROTTLE_CAUSES = {"heat": {"thermal"}, "power": {"power cap", "power brake"}}
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING")
COMPILERS = {"darwin": "clang++", "win32": "cl"}
PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""NVIDIA's vendor number on the PCI bus, and how the class numbers of displays begin"""


def take_inventory() -> dict[str, Any]:
    """Return the inventory; nothing is run on a device."""
    driver = nvml.read_driver()  # before torch touches a GPU and is itself a process on it
    known = driver.pop("gpus")
    for gpu in known:
        gpu["throttled"] = name_throttle_causes(gpu["throttled"])
    # the C++ compiler that torch.compile calls
    compiler = os.environ.get("CXX") or COMPILERS.get(sys.platform, "g++")
    cuda = _describe_cuda()
    try:
        gpus = _list_gpus(known, cuda)
    except RuntimeError as error:  # torch counts a GPU that it cannot use
        cuda |= {"available": False, "why": str(error).strip().split("\n")[0]}
        gpus = _list_gpus(known, cuda)
    return {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_wanted": _find_torch_requirement(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": gpus,
        "driver": driver,
        "cuda": cuda,
        "nvidia_signs": list(_find_nvidia_signs()),
        "triton": find_triton_version(),
        "compiler": shutil.which(compiler),
        "cpu": _describe_cpu(),
        "memory": _describe_memory(),
        "disk": _measure_space(Path()),
        "shm": _measure_space(Path("/dev/shm")),  # None on macOS and Windows
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }


def name_throttle_causes(reasons: Iterable[str]) -> list[str]:
    """Translate NVML's reasons for a reduced clock into "heat" and "power"."""
    present = set(reasons)
    return [cause for cause, group in THROTTLE_CAUSES.items() if present & group]


def _find_torch_requirement() -> str:
    """Return Slipstream's requirement on torch, in pip's notation."""
    requirements: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):  # run from its source
        requirements = importlib.metadata.requires("slipstream") or []
    return next(
        (requirement for requirement in requirements if requirement.startswith("torch")), "torch"
    )


def _describe_cuda() -> dict[str, Any]:
    """Return torch's view of CUDA; `why` is its explanation where it sees no GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    reasons = " ".join(str(warning.message).split("\n")[0] for warning in caught)
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        "built_for": torch.version.cuda,
        "available": available,
        "why": reasons or None,
        "cudnn": format_cudnn_version(cudnn),
        "architectures": torch.cuda.get_arch_list() if available else [],
    }


def format_cudnn_version(number: int | None) -> str | None:
    """Format 91002 as 9.10.2; before version 9, 8902 was 8.9.2."""
    if number is None:
        return None
    major, remainder = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{remainder // 100}.{remainder % 100}"


def _list_gpus(known: list[dict[str, Any]], cuda: dict[str, Any]) -> list[dict[str, Any]]:
    """List the GPUs that torch sees, in its order, then the others, whose `device` is None."""
    unseen = {gpu["uuid"]: gpu for gpu in known}
    gpus = []
    for index in range(torch.cuda.device_count() if cuda["available"] else 0):
        properties = torch.cuda.get_device_properties(index)
        unknown: dict[str, Any] = dict.fromkeys(("free_bytes", "temperature_c", "busy_percent"))
        unknown |= {"throttled": [], "processes": []}
        uuid = f"GPU-{properties.uuid}"
        by_torch = {
            "device": f"cuda:{index}",
            "uuid": uuid,
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
        gpus.append(unseen.pop(uuid, unknown) | by_torch)
    return gpus + [gpu | {"device": None, "compute_capability": None} for gpu in unseen.values()]


def _find_nvidia_signs() -> Iterator[str]:
    """Yield the signs of an NVIDIA GPU in this machine, whether or not it can be used."""
    paths = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/dxg")  # the last one is WSL's
    yield from (path for path in paths if Path(path).exists())
    if tool := shutil.which("nvidia-smi"):
        yield tool
    for folder in sorted(PCI.glob("*")):
        vendor, kind = (read_text(folder / name).strip() for name in ("vendor", "class"))
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            yield str(folder)


def _describe_cpu() -> dict[str, Any]:
    return {
        "name": read_cpu_info().name,
        "features": _list_features(),
        "cores": os.cpu_count() or 1,
        "usable": machine.count_visible_cores(),
        "quota": min(machine.read_cpu_quotas(), default=None),
    }


def _list_features() -> list[str]:
    flags = read_cpu_info().flags
    if flags:
        return [name for flag, name in FEATURES.items() if flag in flags]
    level = torch.backends.cpu.get_cpu_capability()  # elsewhere: what torch's own kernels use
    return [] if level in ("DEFAULT", "NO AVX") else [level]


def _describe_memory() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    with warnings.catch_warnings():  # about swap figures that some kernels do not keep
        warnings.simplefilter("ignore")
        swap = psutil.swap_memory()
    limits = [limit for limit, _ in machine.read_memory_limits() if limit < memory.total]
    return {
        "total_bytes": memory.total,
        "limit_bytes": min(limits, default=None),
        "available_bytes": machine.get_available_memory(),
        "swap_bytes": swap.total,
        "swap_used_bytes": swap.used,
    }


def _measure_space(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError):
        total, _, free = shutil.disk_usage(folder)
        return {"total_bytes": total, "free_bytes": free}
    return None
