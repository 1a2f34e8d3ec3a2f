"""What is here: GPU, driver, libraries, CPU, cores, memory, disk, as far as each can be told."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch

from slipstream import __version__, machine
from slipstream.doctor import gpus as nvidia

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
"""What /proc/cpuinfo calls the features that matter to training, and what people call them"""
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING")


def take_inventory() -> dict[str, Any]:
    """Everything that can be told without running anything on a device."""
    driver = nvidia.read_driver()  # before torch touches a GPU and is itself a process on it
    by_driver = driver.pop("gpus")
    cuda = _cuda()
    try:
        gpus = _gpus(by_driver, cuda)
    except RuntimeError as error:  # torch counts a GPU that it cannot use
        cuda |= {"available": False, "why": str(error).strip().split("\n")[0]}
        gpus = _gpus(by_driver, cuda)
    return {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_wanted": _torch_wanted(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": gpus,
        "driver": driver,
        "cuda": cuda,
        "nvidia_signs": nvidia.find_signs(),
        "triton": machine.find_package_version("triton", "pytorch-triton", "triton-windows"),
        "compiler": shutil.which(get_compiler_name()),
        "cpu": _cpu(),
        "memory": _memory(),
        "disk": _space(Path()),
        "shm": _space(Path("/dev/shm")),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }


def get_compiler_name() -> str:
    """The C++ compiler that torch.compile will call."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _torch_wanted() -> str:
    """What our own package asks of torch, as pip takes it."""
    try:
        asked = importlib.metadata.requires("slipstream") or []
    except importlib.metadata.PackageNotFoundError:  # run from its source
        asked = []
    return next((one for one in asked if one.startswith("torch")), "torch")


def _cuda() -> dict[str, Any]:
    """Torch's side of CUDA; `why` is what it says where it sees no GPU."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    told = " ".join(str(note.message).split("\n")[0] for note in noted)
    return {
        "built_for": torch.version.cuda,
        "available": available,
        "why": told or None,
        "cudnn": format_cudnn_version(torch.backends.cudnn.version())
        if torch.version.cuda
        else None,
        "architectures": torch.cuda.get_arch_list() if available else [],
    }


def format_cudnn_version(number: int | None) -> str | None:
    """91002 is 9.10.2, and before version 9, 8902 was 8.9.2."""
    if number is None:
        return None
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _gpus(by_driver: list[dict[str, Any]], cuda: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that torch sees, in its order, then the others, which have no `device`."""
    left = {gpu["uuid"]: gpu for gpu in by_driver}
    found = []
    for index in range(torch.cuda.device_count() if cuda["available"] else 0):
        card = torch.cuda.get_device_properties(index)
        unknown = {"free_bytes": None, "temperature_c": None, "busy_percent": None}
        told = left.pop(f"GPU-{card.uuid}", unknown | {"throttled": [], "processes": []})
        seen = {
            "device": f"cuda:{index}",
            "uuid": f"GPU-{card.uuid}",
            "name": card.name,
            "memory_bytes": card.total_memory,
            "compute_capability": f"{card.major}.{card.minor}",
        }
        found.append(told | seen)
    unseen = {"device": None, "compute_capability": None}
    return found + [gpu | unseen for gpu in left.values()]


def _cpu() -> dict[str, Any]:
    quota = min(machine.read_cpu_quotas(), default=None)
    return {
        "name": machine.describe(torch.device("cpu"))["cpu"],
        "features": _features(),
        "cores": os.cpu_count() or 1,
        "usable": machine.count_visible_cores(),
        "quota": quota,
    }


def _features() -> list[str]:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.split())
            return [name for flag, name in FEATURES.items() if flag in flags]
    told = torch.backends.cpu.get_cpu_capability()  # elsewhere: what torch's own kernels use
    return [] if told in ("DEFAULT", "NO AVX") else [told]


def _memory() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    with warnings.catch_warnings():  # about figures of swapping that some kernels do not keep
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


def _space(folder: Path) -> dict[str, Any] | None:
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"total_bytes": total, "free_bytes": free}


def _text(path: Path) -> str:
    """A small file's content; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
