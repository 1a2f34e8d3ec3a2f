"""What this machine is, which device a run takes, and the one place that sets torch's flags."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from slipstream.errors import UserError

WARM_UP_S = 0.3
"""A device that has rested needs so long to come to its full clock."""


def describe(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, as kept with every plan."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "torch": torch.__version__,
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
        }
    return found


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


def available_cores() -> int:
    """Cores that this process may use, which a container or taskset can make fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Hint:
    """What has worked on a card: where to start looking, never where to stop."""

    batch: int
    workers: int
    half: str
    """The half precision that it does natively, or best"""


HINTS = {
    "T4": Hint(256, 2, "fp16"),
    "2080 Ti": Hint(256, 6, "fp16"),
    "3090": Hint(512, 8, "bf16"),
    "4060": Hint(256, 4, "bf16"),
    "4090": Hint(512, 8, "bf16"),
    "A100": Hint(1024, 8, "bf16"),
    "H100": Hint(1024, 8, "bf16"),
    "H200": Hint(1024, 8, "bf16"),
}


def hint(gpu: str) -> Hint | None:
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


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wake(device: torch.device) -> None:
    """Keep the device busy until its clock is up."""
    if device.type != "cuda":
        return
    square = torch.zeros(1024, 1024, device=device)
    until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize(device)


def clock_mhz(device: torch.device) -> float | None:
    """The highest clock of the device's processors, where the driver tells."""
    try:
        return float(torch.cuda.get_device_properties(device).clock_rate) / 1e3
    except (AttributeError, RuntimeError, AssertionError):
        return None


@contextmanager
def flags(
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
