"""The NVML client, with a stand-in for the driver's own library."""

# ruff: noqa: N802, N815 (the names are those of the library)
from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from slipstream.base import nvml


class DriverError(Exception):
    pass


class Driver:
    """Two GPUs, of which the first reports everything and the second next to nothing."""

    NVMLError = DriverError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, nvmlMemory_v2 = 0, 1, 2

    def __init__(self):
        self.sessions, self.bits = 0, 0

    def nvmlInit(self):
        self.sessions += 1

    def nvmlShutdown(self):
        self.sessions -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 1:
            raise DriverError("not found")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1":
            raise DriverError("not found")
        return 1

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, handle):
        return "T4"

    def nvmlSystemGetDriverVersion(self):
        return b"580.65"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13020

    def __getattr__(self, name):
        answers = {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=16, free=10, used=6),
            "nvmlDeviceGetTemperature": 50,
            "nvmlDeviceGetClockInfo": 1500,
            "nvmlDeviceGetPowerUsage": 70_000,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000,
            "nvmlDeviceGetCurrentClocksEventReasons": self.bits,
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
                SimpleNamespace(pid=2**31 - 7, usedGpuMemory=3),
            ],
        }

        def answer(handle, *_, **__):
            if handle:
                raise DriverError("not supported")
            return answers[name]

        return answer


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def test_a_sample_contains_what_the_gpu_reports(driver):
    driver.bits = 0x04 | 0x40 | 0x01  # the last bit is that of an idle GPU
    with nvml.open_gpu("GPU-0", 0) as gpu:
        assert gpu.read_sample() == {
            "gpu_utilisation": 0,
            "gpu_memory_bytes": 6,
            "temperature_c": 50,
            "clock_mhz": 1500,
            "throttled": ["power cap", "thermal"],
            "power_w": 70.0,
            "energy_j": 5.0,
        }
    with nvml.open_gpu("GPU-1", 0) as gpu:
        assert gpu.uuid == "GPU-1"
        assert gpu.read_sample() == {}
    with nvml.open_gpu("GPU-9", 9) as gpu:
        assert gpu is None
    assert driver.sessions == 0


def test_a_session_ends_however_its_block_ends(driver):
    def fail():
        with nvml.open_gpu("GPU-0", 0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert driver.sessions == 0


def test_the_driver_lists_its_gpus_and_their_other_processes(driver):
    found = nvml.read_driver()
    assert (found["version"], found["cuda"], found["error"]) == ("580.65", "13.2", None)
    first, second = found["gpus"]
    assert first["processes"] == [{"pid": 2**31 - 7, "name": None, "memory_bytes": 3}]
    assert (first["memory_bytes"], first["free_bytes"], first["busy_percent"]) == (16, 10, 0)
    assert second["memory_bytes"] is second["temperature_c"] is second["busy_percent"] is None
    assert second["throttled"] == []
    assert nvml.read_throttling() == {"GPU-0": [], "GPU-1": []}
    assert nvml.read_driver_version() == "580.65"
    assert driver.sessions == 0


def test_without_a_driver_the_reason_is_reported(driver, monkeypatch):
    def refuse():
        raise DriverError("Driver Not Loaded")

    monkeypatch.setattr(driver, "nvmlInit", refuse)
    assert nvml.read_driver()["error"] == "Driver Not Loaded"
    assert nvml.read_driver_version() is None
    assert nvml.read_throttling() == {}
    with nvml.open_gpu("GPU-0", 0) as gpu:
        assert gpu is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.read_driver()["error"] == "nvidia-ml-py is not installed"
