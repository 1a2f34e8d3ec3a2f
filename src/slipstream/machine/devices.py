"""The device of a run: choosing it, describing it, waiting for it, and torch's global flags.

torch is imported by the functions that need it: cores and memory are asked for without it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream import __version__
from slipstream.errors import UserError
from slipstream.machine import nvml
from slipstream.machine.limits import count_available_cores, get_total_memory, read_cpu_info

if TYPE_CHECKING:
    import torch

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
    cudnn_benchmark: bool = False,
    deterministic: bool = False,
) -> Iterator[None]:
    """Set torch's global flags for one run and restore them afterwards; nothing else sets them."""
    import torch

    backends: Any = torch.backends  # whose annotations leave these attributes out
    matmul, rnn = backends.cuda.matmul, backends.cudnn.rnn
    mkldnn, cudnn = backends.mkldnn, backends.cudnn
    before = matmul.fp32_precision, rnn.fp32_precision, mkldnn.enabled, cudnn.benchmark
    before_threads = torch.get_num_threads()
    deterministic = deterministic and not torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(threads)
        matmul.fp32_precision = rnn.fp32_precision = "tf32" if tf32 else "ieee"
        mkldnn.enabled, cudnn.benchmark = onednn, cudnn_benchmark
        if deterministic:  # torch imports its compiler even to set False
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        if deterministic:
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before_threads)
        matmul.fp32_precision, rnn.fp32_precision, mkldnn.enabled, cudnn.benchmark = before
