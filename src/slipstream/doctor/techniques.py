"""Which techniques work here: each is tried with a tiny real run, and what fails says why."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from slipstream import machine
from slipstream.doctor import gpus, trials
from slipstream.doctor.isolation import IsolatedTrial
from slipstream.engine import recovery
from slipstream.engine.single import SingleStep
from slipstream.errors import Interrupted

PATIENCE_S = 60.0
"""How long a technique may take in a process of its own."""


class NotApplicable(Exception):
    """A technique is no part of this machine, which is no fault; the message says why."""


@dataclass(frozen=True)
class Technique:
    name: str
    setting: str
    """What asks for it"""
    fix: str
    """What to type where it fails"""
    run: Callable[[torch.device], tuple[float | None, str]]
    """Milliseconds per step where they mean something, and a remark; or an exception"""
    device: str | None = None
    """The only kind of device that it is for"""
    capability: tuple[int, int] = (0, 0)
    """Compute capability that it needs"""
    apart: bool = False
    """Whether it may hang or crash, and so gets a process of its own"""

    def check(self, device: torch.device) -> None:
        """Refuse a device that it is not for."""
        if self.device not in (None, device.type):
            cuda = self.device == "cuda"
            raise NotApplicable("needs a CUDA GPU" if cuda else "for training on a CPU")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < self.capability:
            raise NotApplicable(
                f"needs compute capability {self.capability[0]}.{self.capability[1]}"
            )


def try_in_process(device: torch.device) -> list[dict[str, Any]]:
    """Every technique that is safe to try in this process."""
    found = [try_technique(one, device) for one in TECHNIQUES if not one.apart]
    trials.time_plain_step.cache_clear()
    with suppress(RuntimeError):  # of a device that answers nothing any more
        recovery.free_memory()
    return found


def try_isolated(device: torch.device) -> list[dict[str, Any]]:
    """The others, each in a process of its own, side by side."""
    running: dict[str, IsolatedTrial] = {}
    deadline = time.perf_counter() + PATIENCE_S
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        try:
            for one in TECHNIQUES:
                if one.apart and one.device in (None, device.type):
                    running[one.name] = IsolatedTrial(one.name, device, cache)
            return [
                _result(one, running[one.name].wait(deadline))
                if one.name in running
                else try_technique(one, device)
                for one in TECHNIQUES
                if one.apart
            ]
        finally:
            for process in running.values():
                process.end()


def try_technique(technique: Technique, device: torch.device) -> dict[str, Any]:
    """Whether it works, why not, and how long it took to find out."""
    began = time.perf_counter()
    try:
        technique.check(device)
        ms, remark = technique.run(device)
        told: dict[str, Any] = {"works": True, "note": remark, "ms": ms}
    except Interrupted:
        raise
    except NotApplicable as error:
        told = {"works": None, "why": str(error)}
    except Exception as error:  # whatever it is, it belongs into the report
        told = {"works": False, "why": trials.summarize_error(error)}
    return _result(technique, told | {"seconds": time.perf_counter() - began})


def _result(technique: Technique, told: Mapping[str, Any]) -> dict[str, Any]:
    empty = {"works": None, "why": None, "note": None, "ms": None, "seconds": 0.0}
    about = {"setting": technique.setting, "fix": technique.fix}
    return {"name": technique.name, **about, **empty, **told}


def try_one(name: str, device: str) -> dict[str, Any]:
    """What the process of its own does for one technique."""
    return try_technique(next(one for one in TECHNIQUES if one.name == name), torch.device(device))


def _plain_step(device: torch.device) -> tuple[float, str]:
    return trials.time_plain_step(device).ms, ""


def _changed(**engine: Any) -> Callable[[torch.device], tuple[float, str]]:
    return lambda device: (trials.time_changed_step(device, **engine).ms, "")


def _bf16(device: torch.device) -> tuple[float, str]:
    emulated = device.type == "cpu" and not machine.has_fast_bf16()
    return trials.time_changed_step(
        device, precision="bf16"
    ).ms, "emulated by this CPU" if emulated else ""


def _fused(device: torch.device) -> tuple[float, str]:
    def check(job: SingleStep) -> None:
        if not job.optimizer.defaults.get("fused"):
            raise RuntimeError("torch took another update")

    return trials.time_changed_step(device, fused=True, check=check).ms, ""


def _onednn(device: torch.device) -> tuple[float, str]:
    if not torch.backends.mkldnn.is_available():
        raise NotApplicable("torch is built without oneDNN")
    if not _takes_onednn():
        raise RuntimeError("torch took its own recurrent layers instead of oneDNN's")
    ms, other = (trials.time_changed_step(device, change={"onednn": on}).ms for on in (True, False))
    return ms, f"torch's own layers {other:.3g}"


def _takes_onednn() -> bool:
    """Whether an LSTM goes through oneDNN, told by what its way back is made of."""
    with machine.set_flags(threads=1, tf32=False, onednn=True), torch.random.fork_rng([]):
        left = [torch.nn.LSTM(4, 8)(torch.zeros(4, 2, 4))[0].grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            if "Mkldnn" in node.name():
                return True
            left += [other for other, _ in node.next_functions]
    return False


def _threads(device: torch.device) -> tuple[float, str]:
    cores = machine.count_available_cores()
    one = trials.time_changed_step(device, threads=1).ms
    if cores == 1:
        return one, "there is one core to use"
    return trials.time_changed_step(device, threads=cores).ms, f"with one thread {one:.3g}"


def _workers(device: torch.device) -> tuple[None, str]:
    trials.time_changed_step(device, home="loader", workers=2)
    return None, "two of them"


def _compile(device: torch.device) -> tuple[None, str]:
    trials.time_changed_step(device, "mlp", compile=True)
    return None, "a small MLP"


def _own(device: torch.device) -> tuple[float, str]:
    other = trials.time_changed_step(device, precision="fp16").ms
    return trials.time_changed_step(
        device, precision="fp16", cudnn="off"
    ).ms, f"by cuDNN {other:.3g}"


def _triton(device: torch.device) -> tuple[None, str]:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton is not installed")
    from slipstream.doctor import triton_check

    triton_check.check_kernel(device)
    return None, "compiled and run"


def _counters(_: torch.device) -> tuple[None, str]:
    found = gpus.read_driver()
    if found["error"]:
        raise RuntimeError(found["error"])
    return None, "clock, heat, power"


NO_HALF = "--set engine.precision=fp32"
NO_COMPILE = "--set engine.compile=false"
TECHNIQUES = (
    Technique(
        "training step in fp32",
        'engine.precision = "fp32"',
        "restart the machine; until then, train on the CPU: --set engine.device=cpu",
        _plain_step,
    ),
    Technique(
        "capture with dropout",
        "engine.capture = true",
        "--set engine.capture=false",
        _changed(capture=True),
        device="cuda",
    ),
    Technique(
        "tf32 LSTM",
        'engine.precision = "tf32"',
        NO_HALF,
        _changed(precision="tf32"),
        device="cuda",
        capability=(8, 0),
    ),
    Technique(
        "fp16 LSTM",
        'engine.precision = "fp16"',
        NO_HALF,
        _changed(precision="fp16"),
        device="cuda",
    ),
    Technique("bf16 LSTM", 'engine.precision = "bf16"', NO_HALF, _bf16, capability=(8, 0)),
    Technique("fused AdamW", "engine.fused = true", "--set engine.fused=false", _fused),
    Technique(
        "oneDNN LSTM",
        "the plan's to choose",
        "nothing to do: the plan takes torch's own layers",
        _onednn,
        device="cpu",
    ),
    Technique("threads", "engine.threads", "--set engine.threads=1", _threads, device="cpu"),
    Technique(
        "pinned-memory copies",
        'engine.home = "host"',
        "--set engine.home=device",
        _changed(home="host"),
        device="cuda",
    ),
    Technique(
        "NVML counters",
        "engine.monitor",
        "pip install nvidia-ml-py; if it is there, restart the machine",
        _counters,
        device="cuda",
    ),
    Technique(
        "DataLoader workers",
        "engine.workers = 2",
        "--set engine.workers=0",
        _workers,
        apart=True,
    ),
    Technique(
        "torch.compile",
        "engine.compile = true",
        NO_COMPILE,
        _compile,
        capability=(7, 0),
        apart=True,
    ),
    Technique(
        "own recurrent kernels",
        'engine.cudnn = "off"',
        "--set engine.cudnn=persistent",
        _own,
        device="cuda",
        capability=(8, 0),
        apart=True,
    ),
    Technique(
        "Triton kernel",
        "engine.compile = true",
        NO_COMPILE,
        _triton,
        device="cuda",
        capability=(7, 0),
        apart=True,
    ),
)
