"""The NVIDIA driver and its GPUs, as NVML tells of them. Torch is not asked here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""A vendor's number on the PCI bus, and how the numbers of display controllers begin"""


def read_driver() -> dict[str, Any]:
    """The driver's version, the highest CUDA it supports and its GPUs; or `error`, which says why
    there are none to tell of."""
    found: dict[str, Any] = {"version": None, "cuda": None, "error": None, "gpus": []}
    try:
        with _nvml() as nvml:
            found["version"] = _text(nvml.nvmlSystemGetDriverVersion())
            number = _asked(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
            if number:
                found["cuda"] = f"{number // 1000}.{number % 1000 // 10}"
            found["gpus"] = [_describe(nvml, card) for card in _cards(nvml)]
    except Unreachable as error:
        found["error"] = str(error)
    return found


def read_throttling() -> dict[str, list[str]]:
    """What holds each GPU's clock back at this moment, by its UUID."""
    try:
        with _nvml() as nvml:
            return {_text(nvml.nvmlDeviceGetUUID(c)): _throttled(nvml, c) for c in _cards(nvml)}
    except Unreachable:
        return {}


def find_signs() -> list[str]:
    """What speaks for an NVIDIA GPU in this machine, whether or not it can be used."""
    paths = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/dxg")  # the last one is WSL's
    found = [path for path in paths if Path(path).exists()]
    tool = shutil.which("nvidia-smi")
    return found + ([tool] if tool else []) + list(_on_the_bus())


def _on_the_bus() -> Iterator[str]:
    for folder in sorted(PCI.glob("*")):
        try:
            vendor = (folder / "vendor").read_text().strip()
            kind = (folder / "class").read_text().strip()
        except OSError:
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            yield str(folder)


class Unreachable(Exception):
    """NVML cannot be asked; the message says why."""


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml as nvml
    except ImportError:
        raise Unreachable("nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise Unreachable(str(error)) from None
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise Unreachable(str(error)) from None
    finally:
        nvml.nvmlShutdown()


def _cards(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]


def _asked(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where this GPU or driver has none."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _describe(nvml: Any, card: Any) -> dict[str, Any]:
    memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, card)
    load = _asked(nvml, nvml.nvmlDeviceGetUtilizationRates, card)
    temperature = _asked(nvml, nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU)
    running = _asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, card) or []
    return {
        "uuid": _text(nvml.nvmlDeviceGetUUID(card)),
        "name": _text(nvml.nvmlDeviceGetName(card)),
        "memory_bytes": memory and memory.total,
        "free_bytes": memory and memory.free,
        "temperature_c": temperature,
        "busy_percent": load and load.gpu,
        "throttled": _throttled(nvml, card),
        "processes": [_process(one) for one in running if one.pid != os.getpid()],
    }


def _throttled(nvml: Any, card: Any) -> list[str]:
    bits = _asked(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, card) or 0
    heat = nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown
    power = nvml.nvmlClocksEventReasonSwPowerCap | nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    return [name for name, mask in (("heat", heat), ("power", power)) if bits & mask]


def _process(one: Any) -> dict[str, Any]:
    try:
        name = psutil.Process(one.pid).name()
    except psutil.Error:  # within a container, the number is one of the host's
        name = None
    return {"pid": one.pid, "name": name, "memory_bytes": one.usedGpuMemory}


def _text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else found
