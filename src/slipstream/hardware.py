"""What this machine is, which device a run takes, and the one place that sets torch's flags."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from slipstream.errors import UserError


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


@contextmanager
def flags(*, threads: int, tf32: bool) -> Iterator[None]:
    """Torch's global settings for one run, put back afterwards."""
    # typed as Any: torch sets these through module attributes that its annotations leave out
    matmul: Any = torch.backends.cuda.matmul
    rnn: Any = torch.backends.cudnn.rnn
    onednn: Any = torch.backends.mkldnn
    before = torch.get_num_threads(), matmul.fp32_precision, rnn.fp32_precision, onednn.enabled
    try:
        torch.set_num_threads(threads)
        matmul.fp32_precision = rnn.fp32_precision = "tf32" if tf32 else "ieee"
        if platform.machine() in ("aarch64", "arm64"):
            # oneDNN has no fast LSTM on Arm: 1.4 to 1.9x slower there than ATen's (dev/LOG.md)
            onednn.enabled = False
        yield
    finally:
        torch.set_num_threads(before[0])
        matmul.fp32_precision, rnn.fp32_precision, onednn.enabled = before[1:]


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
