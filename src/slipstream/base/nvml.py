"""The NVIDIA driver and its GPUs, as NVML reports them. Torch is not asked here.

NVML may be called at any time from any thread, also while CUDA captures a graph.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil

THROTTLE_REASONS = {
    "power cap": 0x04,
    "hardware slowdown": 0x08,
    "thermal": 0x60,
    "power brake": 0x80,
}
"""NVML's bits for a reduced clock; those of an idle GPU or a chosen clock cost nothing"""


class NvmlError(Exception):
    """NVML cannot be used; the message says why."""


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield the initialized `pynvml`, and turn its errors into `NvmlError`."""
    try:
        import pynvml
    except ImportError:
        raise NvmlError("nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # there is no driver, as on macOS
        raise NvmlError(str(error)) from None
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from None
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class Gpu:
    """One GPU; readings that its driver does not report are None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def _query(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return function(self._handle, *arguments, **named)
        except self._nvml.NVMLError:
            return None

    @property
    def uuid(self) -> str:
        return _to_text(self._nvml.nvmlDeviceGetUUID(self._handle))

    def read_throttling(self) -> list[str] | None:
        """Return the reasons for which the clock is reduced at this moment."""
        bits = self._query(self._nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if bits is None:
            return None
        return [name for name, mask in THROTTLE_REASONS.items() if bits & mask]

    def read_sample(self) -> dict[str, Any]:
        """Return the current readings; `energy_j` counts from the start of the driver."""
        nvml = self._nvml
        load = self._query(nvml.nvmlDeviceGetUtilizationRates)
        # in version 2 the driver's own memory does not count as used
        memory = self._query(nvml.nvmlDeviceGetMemoryInfo, version=nvml.nvmlMemory_v2)
        power_mw = self._query(nvml.nvmlDeviceGetPowerUsage)
        energy_mj = self._query(nvml.nvmlDeviceGetTotalEnergyConsumption)
        sample = {
            "gpu_utilisation": load and load.gpu,
            "gpu_memory_bytes": memory and memory.used,
            "temperature_c": self._query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "clock_mhz": self._query(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "throttled": self.read_throttling(),
            "power_w": None if power_mw is None else power_mw / 1e3,
            "energy_j": None if energy_mj is None else energy_mj / 1e3,
        }
        return {name: value for name, value in sample.items() if value is not None}

    def describe(self) -> dict[str, Any]:
        """Return name, memory, load and the other processes on the GPU."""
        nvml = self._nvml
        memory = self._query(nvml.nvmlDeviceGetMemoryInfo)
        load = self._query(nvml.nvmlDeviceGetUtilizationRates)
        running = self._query(nvml.nvmlDeviceGetComputeRunningProcesses) or []
        return {
            "uuid": self.uuid,
            "name": _to_text(nvml.nvmlDeviceGetName(self._handle)),
            "memory_bytes": memory and memory.total,
            "free_bytes": memory and memory.free,
            "temperature_c": self._query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "busy_percent": load and load.gpu,
            "throttled": self.read_throttling() or [],
            "processes": [
                _describe_process(process) for process in running if process.pid != os.getpid()
            ],
        }


@contextmanager
def open_gpu(uuid: str, index: int) -> Iterator[Gpu | None]:
    """Yield the GPU of this UUID, or else of this number; None where NVML cannot be used."""
    with ExitStack() as stack:
        gpu: Gpu | None = None
        with suppress(NvmlError):
            gpu = _find_gpu(stack.enter_context(open_nvml()), uuid, index)
        yield gpu


def _find_gpu(nvml: Any, uuid: str, index: int) -> Gpu | None:
    with suppress(nvml.NVMLError):
        return Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    with suppress(nvml.NVMLError):
        return Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
    return None


def read_driver_version() -> str | None:
    with suppress(NvmlError), open_nvml() as nvml:
        return _to_text(nvml.nvmlSystemGetDriverVersion())
    return None


def read_driver() -> dict[str, Any]:
    """Return the driver's version, the highest CUDA it supports and its GPUs; where there are none,
    `error` says why."""
    driver: dict[str, Any] = {"version": None, "cuda": None, "error": None, "gpus": []}
    try:
        with open_nvml() as nvml:
            driver["version"] = _to_text(nvml.nvmlSystemGetDriverVersion())
            with suppress(nvml.NVMLError):
                number = nvml.nvmlSystemGetCudaDriverVersion_v2()
                driver["cuda"] = f"{number // 1000}.{number % 1000 // 10}"
            driver["gpus"] = [gpu.describe() for gpu in _list_gpus(nvml)]
    except NvmlError as error:
        driver["error"] = str(error)
    return driver


def read_throttling() -> dict[str, list[str]]:
    """Return the reasons for which each GPU's clock is reduced at this moment, by UUID."""
    with suppress(NvmlError), open_nvml() as nvml:
        return {gpu.uuid: gpu.read_throttling() or [] for gpu in _list_gpus(nvml)}
    return {}


def _list_gpus(nvml: Any) -> list[Gpu]:
    indices = range(nvml.nvmlDeviceGetCount())
    return [Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in indices]


def _describe_process(process: Any) -> dict[str, Any]:
    try:
        name = psutil.Process(process.pid).name()
    except psutil.Error:  # in a container, the number is that of the host
        name = None
    return {"pid": process.pid, "name": name, "memory_bytes": process.usedGpuMemory}


def _to_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
