"""How busy this machine is: cores, memory, GPUs, disk. Without torch."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def read_load(folder: Path) -> dict[str, Any]:
    """Return the load since the last call, and what is free."""
    memory = psutil.virtual_memory()
    load: dict[str, Any] = {
        "cpu_percent": psutil.cpu_percent(None),
        "cores": os.cpu_count(),
        "memory_used": memory.total - memory.available,
        "memory_total": memory.total,
        "gpus": _read_gpus(),
    }
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        load |= {"disk_free": usage.free, "disk_total": usage.total}
    return load


_nvml: Any = None
"""The initialized `pynvml`; False where there is none"""


def _read_gpus() -> list[dict[str, Any]]:
    global _nvml
    if _nvml is None:
        try:
            import pynvml

            pynvml.nvmlInit()
            _nvml = pynvml
        except Exception:
            _nvml = False
    if not _nvml:
        return []
    gpus = []
    with suppress(_nvml.NVMLError):
        for index in range(_nvml.nvmlDeviceGetCount()):
            handle = _nvml.nvmlDeviceGetHandleByIndex(index)
            memory = _nvml.nvmlDeviceGetMemoryInfo(handle)
            name = _nvml.nvmlDeviceGetName(handle)
            gpus.append(
                {
                    "name": name.decode() if isinstance(name, bytes) else str(name),
                    "percent": _nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                    "memory_used": memory.used,
                    "memory_total": memory.total,
                }
            )
    return gpus
