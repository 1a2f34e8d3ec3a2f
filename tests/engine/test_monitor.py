from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch

import slipstream
from slipstream import runs
from slipstream.base.nvml import THROTTLE_REASONS, open_gpu
from slipstream.engine import monitor
from slipstream.engine.monitor import HostSampler, Monitor, compare_with_estimate, summarize
from slipstream.events import Estimate, Log, MachineSample, Start, format_event
from tests.conftest import small_config, waves

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path):
    return runs.create_run("t", out=str(tmp_path))


def samples(run):
    return [event for event in runs.read_events(run) if isinstance(event, MachineSample)]


def test_a_short_run_is_sampled_once_at_its_end(run):
    with Monitor(run, CPU):
        pass
    (sample,) = samples(run)
    assert sample.rss_bytes > 1e7
    assert sample.cpu_percent >= 0
    names = format_event(sample)
    assert not any(name.startswith(("gpu", "power", "energy")) for name in names)


def test_only_the_training_thread_writes(run, monkeypatch):
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.01)
    with Monitor(run, CPU) as watching:
        while len(watching._samples) < 3:
            time.sleep(0.01)
        assert not run.log.exists()
        watching.log()
        assert len(samples(run)) >= 3
    assert summarize(samples(run))["samples"] == len(samples(run)) >= 4


def test_the_thread_ends_with_the_run_however_it_ends(run):
    before = threading.enumerate()

    def fail():
        with Monitor(run, CPU):
            assert len(threading.enumerate()) == len(before) + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert threading.enumerate() == before
    assert not run.log.exists()


def test_switched_off_it_does_nothing(run):
    before = threading.enumerate()
    with Monitor(run, CPU, on=False) as watching:
        assert threading.enumerate() == before
        watching.log()
    assert not run.log.exists()


def test_long_runs_are_sampled_less_often():
    elapsed_s, count = 0.0, 0
    while elapsed_s < 24 * 3600:
        elapsed_s += monitor.get_interval_s(elapsed_s)
        count += 1
    assert monitor.get_interval_s(60) == 1.0
    assert 3000 < count < 4000


def test_children_count_while_they_live():
    hold = "x = bytearray(99_000_000); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        host = HostSampler()
        found = host.read()
        assert found["rss_bytes"] > psutil.Process().memory_info().rss + 90e6
        child.communicate(b"\n")
    assert host.read()["rss_bytes"] < found["rss_bytes"] - 90e6


def test_a_machine_without_nvml_has_no_card():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with open_gpu("GPU-none", 0) as gpu:
        assert gpu is None


def test_figures_are_weighted_by_time():
    first = MachineSample(seconds=1.0, cpu_percent=100.0, rss_bytes=5)
    second = MachineSample(seconds=3.0, cpu_percent=20.0, rss_bytes=4)
    found = summarize([Log(step=1), first, second])
    assert (found["samples"], found["seconds"]) == (2, 4.0)
    assert found["cpu_percent_mean"] == pytest.approx(40.0)
    assert found["rss_peak_bytes"] == 5
    assert found["energy_wh"] is found["power_mean_w"] is found["temperature_max_c"] is None
    assert found["throttled"] == {}
    gpu = {"power_w": 300.0, "energy_j": 1800.0, "gpu_utilisation": 90, "temperature_c": 50}
    warm = gpu | {"temperature_c": 70, "throttled": ["thermal", "power cap"]}
    found = summarize([replace(first, **gpu, throttled=[]), replace(second, **warm)])
    assert found["energy_wh"] == pytest.approx(1.0)
    assert found["temperature_max_c"] == 70
    assert found["throttled"] == {"power cap": 0.75, "thermal": 0.75}
    assert summarize([Log(step=1)]) is None


def test_estimates_are_held_against_the_steps_that_ran():
    start = Start(
        run="a",
        windows={},
        series=1,
        parameters=1,
        plan={},
        notes=[],
        expected_s=50.0,
        expected_is="measured",
        steps_per_epoch=10,
        epochs=10,
    )
    early = Estimate(step=14, trained_s=12.0, ms_per_step=500.0, expected_s=55.0)
    later = replace(start, expected_s=9.0)
    found = compare_with_estimate([start, early, later], steps=54, took_s=30.0)
    assert found["before_s"] == pytest.approx(27.0)
    assert found["before_ratio"] == pytest.approx(0.9)
    assert found["after_ten_steps_s"] == pytest.approx(32.0)
    assert found["after_ten_steps_ratio"] == pytest.approx(32 / 30)
    assert found["before_is"] == "measured"
    found = compare_with_estimate([], steps=9, took_s=3.0)
    assert found["before_s"] is found["before_ratio"] is found["after_ten_steps_s"] is None
    assert found["took_s"] == 3.0


@pytest.mark.gpu
def test_nvml_tells_of_the_device_that_trains(run):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    with Monitor(run, device):
        held = torch.ones(2**28, device=device)  # 1 GiB
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            held.sqrt_()
            torch.cuda.synchronize(device)
    found = samples(run)
    assert len(found) >= 2
    for sample in found:
        assert sample.gpu_memory_bytes > 2**30
        assert sample.power_w > 0
        assert sample.energy_j > 0
        assert 0 < sample.temperature_c < 120
        assert sample.clock_mhz > 0
        assert set(sample.throttled) <= set(THROTTLE_REASONS)
    assert found[-1].gpu_utilisation > 0


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_sampled_and_captured(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = small_config(tmp_path, engine={"device": "cuda"}, train={"epochs": 5})
    summary = slipstream.train(config, waves()).summary
    assert summary["plan"]["capture"]
    assert summary["monitor"]["energy_wh"] > 0
    assert summary["monitor"]["gpu_memory_peak_bytes"] > 0
    assert summary["estimate"]["after_ten_steps_s"] > 0


def test_power_cores_and_memory_of_several_workers_add_up():
    def sample(worker, **values):
        return MachineSample(at_s=0.0, seconds=2.0, worker=worker, **values)

    both = [
        sample(worker, power_w=100.0, energy_j=200.0, cpu_percent=90.0, rss_bytes=1000)
        for worker in (0, 1)
    ]
    scoring = sample(None, cpu_percent=60.0, rss_bytes=1500)
    summary = monitor.summarize([*both, scoring])
    assert summary["seconds"] == 4.0
    assert summary["power_mean_w"] == 200.0
    assert summary["energy_wh"] == 400.0 / 3600
    assert summary["cpu_percent_mean"] == (90 + 90 + 60) / 2
    assert summary["rss_peak_bytes"] == 2000
