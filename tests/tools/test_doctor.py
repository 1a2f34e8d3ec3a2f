from __future__ import annotations

import copy
import io
import json
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.reporting.terminal.results import print_doctor
from slipstream.tools.doctor import inventory, techniques
from slipstream.tools.doctor.problems import find_problems
from slipstream.tools.doctor.techniques import TIMED_OUT, IsolatedTrial, Technique
from tests.conftest import HUNG_S

CPU = torch.device("cpu")
GB = 10**9
GPU = {
    "device": "cuda:0",
    "uuid": "GPU-0",
    "name": "NVIDIA T4",
    "memory_bytes": 16 * GB,
    "free_bytes": 15 * GB,
    "compute_capability": "7.5",
    "temperature_c": 50,
    "busy_percent": 0,
    "throttled": [],
    "processes": [],
}
HEALTHY = {
    "slipstream": "0.1.0",
    "python": "3.12.1",
    "torch": "2.13.0+cu130",
    "torch_wanted": "torch<2.14,>=2.11",
    "system": "Linux x86_64",
    "gpus": [GPU],
    "driver": {"version": "580.65", "cuda": "13.0", "error": None},
    "cuda": {
        "built_for": "13.0",
        "available": True,
        "why": None,
        "cudnn": "9.10.2",
        "architectures": ["sm_75", "sm_80", "sm_90a", "compute_120"],
    },
    "nvidia_signs": ["/dev/nvidia0"],
    "triton": "3.6.0",
    "compiler": "/usr/bin/g++",
    "cpu": {"name": "A CPU", "features": ["AVX2"], "cores": 8, "usable": 8, "quota": None},
    "memory": {
        "total_bytes": 32 * GB,
        "limit_bytes": None,
        "available_bytes": 20 * GB,
        "swap_bytes": 8 * GB,
        "swap_used_bytes": 0,
    },
    "disk": {"total_bytes": 500 * GB, "free_bytes": 100 * GB},
    "shm": {"total_bytes": 16 * GB, "free_bytes": 16 * GB},
    "environment": dict.fromkeys(inventory.VARIABLES),
}
UNSEEN = {"gpus.0.device": None, "gpus.0.compute_capability": None, "cuda.available": False}
OTHER = {"pid": 77, "name": "python", "memory_bytes": 3 * GB}
FAILED = {
    "name": "capture with dropout",
    "setting": "engine.capture = true",
    "fix": "--set engine.capture=false",
    "works": False,
    "why": "operation not permitted",
    "note": None,
    "ms": None,
    "seconds": 0.1,
}


def planted(changes, failed=()):
    """What a healthy machine's examination finds, with some facts changed by their dotted names."""
    facts = copy.deepcopy(HEALTHY)
    for name, value in changes.items():
        *path, last = name.split(".")
        at = facts
        for key in path:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[last] = value
    return {"machine": facts, "techniques": list(failed)}


def test_a_healthy_machine_has_no_problems():
    assert find_problems(planted({})) == []
    assert find_problems(planted({"gpus": [], "nvidia_signs": [], "cuda.available": False})) == []


@pytest.mark.parametrize(
    ("changes", "problem", "fix"),
    [
        (
            UNSEEN | {"cuda.built_for": None, "torch": "2.13.0+cpu"},
            "torch 2.13.0+cpu is built without CUDA",
            'pip install --force-reinstall "torch<2.14,>=2.11" --index-url '
            "https://download.pytorch.org/whl/cu130",
        ),
        (
            UNSEEN | {"cuda.built_for": None, "driver.cuda": "12.4"},
            "built without CUDA",
            "whl/cu126",
        ),
        (
            {"cuda.available": False, "cuda.built_for": None, "gpus": [], "driver.cuda": None},
            "an NVIDIA GPU is here",
            "whl/cu130",
        ),
        (
            UNSEEN | {"driver.cuda": "12.4", "driver.version": "550.54"},
            "driver 550.54 goes up to CUDA 12.4, torch is built for CUDA 13.0",
            "update the driver to 580 or later, or: pip install",
        ),
        (
            UNSEEN | {"driver.cuda": "11.4", "driver.version": "470.1"},
            "driver 470.1",
            "update the driver to 580 or later",
        ),
        (
            UNSEEN | {"environment.CUDA_VISIBLE_DEVICES": ""},
            "hides it",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            UNSEEN | {"gpus": [], "driver.version": None, "driver.error": "Driver Not Loaded"},
            "no driver answers (Driver Not Loaded)",
            "docker run --gpus all",
        ),
        (
            UNSEEN | {"cuda.why": "CUDA initialization: error 802"},
            "torch sees none: CUDA initialization: error 802",
            "restart",
        ),
        ({"gpus.0.compute_capability": "6.1"}, "built for sm_75", "whl/cu126"),
        ({"gpus.0.throttled": ["heat"]}, "too hot, 50 °C, and slows its clock", "nvidia-smi -q"),
        ({"gpus.0.throttled": ["power"]}, "power limit", "nvidia-smi -pl WATTS"),
        ({"gpus.0.processes": [OTHER]}, "process 77 (python) holds 3.0 GB of cuda:0", "kill 77"),
        (
            {"gpus.0.processes": [OTHER | {"name": None, "memory_bytes": None}]},
            "process 77 is at work on cuda:0 (NVIDIA T4)",
            "kill 77",
        ),
        (
            {"gpus": [GPU | {"processes": [OTHER]}, GPU | {"device": "cuda:1"}]},
            "process 77",
            "--set engine.device=cuda:1",
        ),
        ({"gpus.0.busy_percent": 90}, "90 % busy before anything ran", "nvidia-smi"),
        ({"gpus.0.free_bytes": GB}, "1.0 of 16.0 GB free", "nvidia-smi"),
        ({"environment.CUDA_LAUNCH_BLOCKING": "1"}, "wait", "unset CUDA_LAUNCH_BLOCKING"),
        ({"cpu.quota": 2.5}, "only 2.5 cores' worth of time", "docker run --cpus=8"),
        ({"environment.OMP_NUM_THREADS": "16,2"}, "OMP_NUM_THREADS = 16", "unset OMP_NUM_THREADS"),
        ({"environment.MKL_NUM_THREADS": "9"}, "8 cores can be used", "unset MKL_NUM_THREADS"),
        ({"memory.available_bytes": 2 * GB}, "2.0 of 32.0 GB available", "ps aux"),
        (
            {"memory.limit_bytes": 4 * GB, "memory.available_bytes": GB // 2},
            "0.5 of 4.0 GB available",
            "ps aux",
        ),
        ({"memory.swap_used_bytes": 2 * GB}, "2.0 GB are swapped out", "swapoff"),
        ({"shm.free_bytes": 64 * 10**6}, "/dev/shm has 0.064 GB free", "--shm-size=2g"),
        ({"disk.free_bytes": GB}, "1.0 GB free in this folder", "--set out=FOLDER"),
        ({"triton": None}, "Triton is not installed", "pip install triton"),
        ({"compiler": None}, "no C++ compiler", "sudo apt install g++"),
    ],
)
def test_each_problem_is_seen_alone_and_has_a_fix(changes, problem, fix):
    (found,) = find_problems(planted(changes))
    assert problem in found["problem"]
    assert fix in found["fix"]


def test_a_technique_that_fails_is_a_problem_unless_a_missing_tool_explains_it():
    (found,) = find_problems(planted({}, [FAILED]))
    assert found["problem"] == "capture with dropout does not work: operation not permitted"
    assert found["fix"] == "--set engine.capture=false"
    compiled = FAILED | {"name": "torch.compile", "why": "fatal error: Python.h: No such file"}
    (found,) = find_problems(planted({}, [compiled]))
    assert found["fix"].startswith("sudo apt install python3-dev, or ")
    (found,) = find_problems(planted({"compiler": None}, [compiled]))
    assert "no C++ compiler" in found["problem"]
    assert find_problems(planted({}, [FAILED | {"works": None}])) == []


def test_a_busy_machine_and_threads_that_wait_for_one_another_are_problems():
    busy = planted({})
    busy["machine"]["cpu"]["load"] = {"others": 7.5, "cores": 8, "available": 8}
    threads = {"name": "threads", "works": True, "why": "", "fix": "", "ms": 323.0}
    busy["techniques"] = [threads | {"alternative_ms": 7.01}]
    load, slow = find_problems(busy)
    assert load["problem"] == "the machine is busy: other processes use 7.5 of 8 cores"
    assert slow["problem"].startswith("a step takes 323 ms with 8 threads and 7.01 ms with one")
    assert all("engine.threads=1" in one["fix"] for one in (load, slow))
    quiet = planted({})
    quiet["machine"]["cpu"]["load"] = {"others": 0.1, "cores": 8, "available": 8}
    quiet["techniques"] = [threads | {"alternative_ms": 200.0}]
    assert find_problems(quiet) == []


def test_versions_of_cudnn_read_as_people_write_them():
    assert inventory.format_cudnn_version(91002) == "9.10.2"
    assert inventory.format_cudnn_version(8902) == "8.9.2"
    assert inventory.format_cudnn_version(None) is None


def broken(_):
    raise RuntimeError("the first line\nand much more")


def test_what_fails_says_why_and_what_is_not_for_this_device_is_not_tried():
    found = techniques.try_technique(
        Technique("x", "engine.x", "--set engine.x=false", broken), CPU
    )
    assert found["works"] is False
    assert found["why"] == "the first line"
    assert found["fix"] == "--set engine.x=false"
    found = techniques.try_technique(Technique("x", "", "", broken, device="cuda"), CPU)
    assert found["works"] is None
    assert found["why"] == "needs a CUDA GPU"


@pytest.mark.slow
def test_a_process_that_crashes_or_hangs_is_reported_and_ended(tmp_path):
    crashed = IsolatedTrial("no such technique", CPU, str(tmp_path))
    found = crashed.wait(time.perf_counter() + HUNG_S)
    crashed.end()
    assert found["works"] is False
    assert found["why"].startswith("ended with code 1: ")
    hung = IsolatedTrial("torch.compile", CPU, str(tmp_path))
    found = hung.wait(time.perf_counter())
    while not hung.ended:
        hung.end()
    assert found["works"] is False
    assert found["why"].startswith(TIMED_OUT)


def shown(found):
    out = io.StringIO()
    print_doctor(found, Console(file=out, width=120, highlight=False, soft_wrap=True))
    return out.getvalue()


def test_a_screen_names_the_gpu_what_fails_and_the_fix():
    found = planted({"gpus.0.throttled": ["heat"]}, [FAILED])
    found["plan"] = {"job": "a job", "failed": "the device answers no more"}
    found["problems"] = find_problems(found)
    text = shown(found)
    for part in (
        "NVIDIA T4, cuda:0, compute capability 7.5, 15.0 of 16.0 GB free, 50 °C",
        "580.65, up to CUDA 13.0",
        "cuDNN 9.10.2; Triton 3.6.0",
        "operation not permitted",
        "the device answers no more",
        "too hot",
        "fix: --set engine.capture=false",
    ):
        assert part in text
    assert "\x1b" not in text


def check_examination(found, device):
    """Every technique for this device works, and the plan has its say. One that was not done when
    its time was up has failed here, on a busy machine, and that is no fault."""
    excused = set() if found["machine"]["compiler"] else {"torch.compile"}
    failed = {one["name"]: one["why"] for one in found["techniques"] if one["works"] is False}
    excused |= {name for name, why in failed.items() if why.startswith(TIMED_OUT)}
    assert not {name: why for name, why in failed.items() if name not in excused}
    tried = {one["name"] for one in found["techniques"] if one["works"]} | excused
    assert {"training step in fp32", "bf16 LSTM", "fused AdamW", "DataLoader workers"} <= tried
    assert found["plan"]["device"] == device
    assert found["plan"]["ms_per_step"] > 0
    assert found["machine"]["cpu"]["usable"] >= 1
    assert found["machine"]["memory"]["available_bytes"] > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, its own test does this")
def test_the_command_examines_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.count("\n") == 1
    assert "trying what works here" in answer.stderr
    found = json.loads(answer.stdout)
    check_examination(found, "cpu")
    elsewhere = {one["name"] for one in found["techniques"] if one["works"] is None}
    assert {"capture with dropout", "Triton kernel", "fp16 LSTM"} <= elsewhere
    text = shown(found)
    for one in found["techniques"]:
        assert one["name"] in " ".join(text.split())
    for part in ("needs a CUDA GPU", "ms a step", "Plan for", "threads"):
        assert part in text
    assert text.count("\n") < 50


def test_the_doctor_has_no_settings():
    answer = CliRunner().invoke(app, ["doctor", "--set", "engine.device=cpu"])
    assert answer.exit_code == 2
    assert "No such option: --set" in answer.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_technique_works_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    check_examination(found, "cuda:0")
    elsewhere = {one["why"] for one in found["techniques"] if one["works"] is None}
    assert elsewhere == {"for training on a CPU"}
    assert found["plan"]["capture"]
    (gpu, *_) = found["machine"]["gpus"]
    assert gpu["device"] == "cuda:0"
    assert gpu["free_bytes"] <= gpu["memory_bytes"]
    assert found["machine"]["driver"]["version"]
    assert gpu["name"] in shown(found)
