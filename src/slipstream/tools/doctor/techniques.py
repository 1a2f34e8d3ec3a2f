"""Tries which techniques work here, each in a tiny real run; a failure comes with its reason."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.base import machine, nvml
from slipstream.base.errors import Interrupted
from slipstream.base.text import format_ms
from slipstream.engine import recovery
from slipstream.engine.single import SingleStep
from slipstream.kernels import find_compiler
from slipstream.tools.doctor import trials

TIMEOUT_S = 60.0
"""How long a technique may take in a process of its own"""
TIMED_OUT = "no end after"
"""The start of the reason where a technique ran out of time"""


class NotApplicable(Exception):
    """A technique does not apply to this machine, which is no fault; the message says why."""


@dataclass(frozen=True)
class Technique:
    name: str
    setting: str
    """The setting that requests the technique"""
    fix: str
    """The command or setting that helps where the technique fails"""
    run: Callable[[torch.device], tuple[float | None, str] | tuple[float, str, float]]
    """Returns milliseconds per step, where they mean something, a remark, and the milliseconds of
    the alternative, where there is one; or raises"""
    device: str | None = None
    """The kind of device that the technique needs; None for any"""
    capability: tuple[int, int] = (0, 0)
    """The compute capability that the technique needs"""
    isolated: bool = False
    """Whether the technique may hang or crash, and so runs in a process of its own"""

    def check(self, device: torch.device) -> None:
        """Refuse a device to which the technique does not apply."""
        if self.device not in (None, device.type):
            cuda = self.device == "cuda"
            raise NotApplicable("needs a CUDA GPU" if cuda else "for training on a CPU")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < self.capability:
            raise NotApplicable("needs compute capability {}.{}".format(*self.capability))


class IsolatedTrial:
    """A technique that is tried in another process."""

    def __init__(self, name: str, device: torch.device, cache: str) -> None:
        # an empty cache, so that the technique really compiles
        caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        self._start = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.tools.doctor", name, str(device)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | caches,
            start_new_session=True,  # so that `end` reaches its workers; Windows ignores it
        )

    def wait(self, deadline: float) -> dict[str, Any]:
        """Return the result of the technique, or the reason why there is none."""
        try:
            left = max(deadline - time.perf_counter(), 0.1)
            out, err = self._process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            seconds = time.perf_counter() - self._start
            why = f"{TIMED_OUT} {seconds:.0f} s; it hangs, or other work keeps the machine busy"
            return {"works": False, "why": why, "seconds": seconds}
        with suppress(ValueError, TypeError, IndexError):
            return dict(json.loads(out.splitlines()[-1]))
        why = machine.describe_exit(self._process.returncode, err)
        return {"works": False, "why": why, "seconds": time.perf_counter() - self._start}

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill the process and its children, if it still runs."""
        if not self.ended:
            machine.kill_process_group(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=5)


def try_in_process(device: torch.device) -> list[dict[str, Any]]:
    """Try every technique that is safe in this process."""
    results = [
        try_technique(technique, device) for technique in TECHNIQUES if not technique.isolated
    ]
    trials.time_plain_step.cache_clear()
    with suppress(RuntimeError):  # from a device that no longer answers
        recovery.free_memory()
    return results


def try_isolated(device: torch.device) -> list[dict[str, Any]]:
    """Try the other techniques, each in a process of its own, all at the same time."""
    running: dict[str, IsolatedTrial] = {}
    deadline = time.perf_counter() + TIMEOUT_S
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        try:
            for technique in TECHNIQUES:
                if technique.isolated and technique.device in (None, device.type):
                    running[technique.name] = IsolatedTrial(technique.name, device, cache)
            return [
                _build_result(technique, running[technique.name].wait(deadline))
                if technique.name in running
                else try_technique(technique, device)
                for technique in TECHNIQUES
                if technique.isolated
            ]
        finally:
            for process in running.values():
                process.end()


def try_technique(technique: Technique, device: torch.device) -> dict[str, Any]:
    """Report whether the technique works, why not, and how long the trial took."""
    start = time.perf_counter()
    try:
        technique.check(device)
        ms, remark, *alternative = technique.run(device)
        outcome: dict[str, Any] = {"works": True, "note": remark, "ms": ms}
        if alternative:
            outcome["alternative_ms"] = alternative[0]
    except Interrupted:
        raise
    except NotApplicable as error:
        outcome = {"works": None, "why": str(error)}
    except Exception as error:  # whatever it is, it belongs in the report
        outcome = {"works": False, "why": trials.summarize_error(error)}
    return _build_result(technique, outcome | {"seconds": time.perf_counter() - start})


def _build_result(technique: Technique, outcome: Mapping[str, Any]) -> dict[str, Any]:
    empty = {"works": None, "why": None, "note": None, "ms": None, "seconds": 0.0}
    about = {"setting": technique.setting, "fix": technique.fix}
    return {"name": technique.name, **about, **empty, **outcome}


def try_by_name(name: str, device: str) -> dict[str, Any]:
    """Try the technique of this name; the main function of an isolated process."""
    return try_technique(
        next(technique for technique in TECHNIQUES if technique.name == name), torch.device(device)
    )


def _try_setting(**engine: Any) -> Callable[[torch.device], tuple[float, str]]:
    return lambda device: (trials.time_changed_step(device, **engine).ms, "")


def _try_bf16(device: torch.device) -> tuple[float, str]:
    emulated = device.type == "cpu" and not machine.has_fast_bf16()
    ms = trials.time_changed_step(device, precision="bf16").ms
    return ms, "emulated by this CPU" if emulated else ""


def _try_fused(device: torch.device) -> tuple[float, str]:
    def check(job: SingleStep) -> None:
        if not job.optimizer.defaults.get("fused"):
            raise RuntimeError("torch used another update")

    return trials.time_changed_step(device, fused=True, check=check).ms, ""


def _try_onednn(device: torch.device) -> tuple[float, str]:
    if not torch.backends.mkldnn.is_available():
        raise NotApplicable("torch is built without oneDNN")
    if not _uses_onednn():
        raise RuntimeError("torch used its own recurrent layers instead of oneDNN's")
    ms, plain_ms = (
        trials.time_changed_step(device, change={"onednn": on}).ms for on in (True, False)
    )
    return ms, f"torch's own layers {format_ms(plain_ms)}"


def _try_native_kernels(device: torch.device) -> tuple[float, str]:
    if find_compiler() is None:
        raise NotApplicable("needs a C compiler (gcc or clang)")
    plain_ms = trials.time_plain_step(device).ms

    def check(job: SingleStep) -> None:
        if not job.kernels():
            raise RuntimeError("the C compiler failed")

    ms = trials.time_changed_step(device, rnn="slipstream", check=check).ms
    return ms, f"PyTorch's layers {format_ms(plain_ms)}"


def _uses_onednn() -> bool:
    """Return whether an LSTM runs through oneDNN, by the nodes of its backward graph."""
    with machine.set_flags(threads=1, tf32=False, onednn=True), torch.random.fork_rng([]):
        left = [torch.nn.LSTM(4, 8)(torch.zeros(4, 2, 4))[0].grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            if "Mkldnn" in node.name():
                return True
            left += [inner for inner, _ in node.next_functions]
    return False


def _try_threads(device: torch.device) -> tuple[float, str] | tuple[float, str, float]:
    cores = machine.count_available_cores()
    single_ms = trials.time_changed_step(device, threads=1).ms
    if cores == 1:
        return single_ms, "there is one core to use"
    ms = trials.time_changed_step(device, threads=cores).ms
    return ms, f"with one thread {format_ms(single_ms)}", single_ms


def _try_workers(device: torch.device) -> tuple[None, str]:
    trials.time_changed_step(device, home="loader", workers=2)
    return None, "two of them"


def _try_compile(device: torch.device) -> tuple[None, str]:
    trials.time_changed_step(device, "mlp", compile=True)
    return None, "a small MLP"


def _try_own_kernels(device: torch.device) -> tuple[float, str]:
    cudnn_ms = trials.time_changed_step(device, precision="fp16").ms
    ms = trials.time_changed_step(device, precision="fp16", rnn="slipstream").ms
    return ms, f"by cuDNN {format_ms(cudnn_ms)}"


def _try_triton(device: torch.device) -> tuple[None, str]:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton is not installed")
    from slipstream.tools.doctor import trials

    trials.check_kernel(device)
    return None, "compiled and run"


def _try_counters(_: torch.device) -> tuple[None, str]:
    driver = nvml.read_driver()
    if driver["error"]:
        raise RuntimeError(driver["error"])
    return None, "clock, heat, power"


TF32, FP16 = ('engine.precision = "tf32"', 'engine.precision = "fp16"')
NO_HALF = "--set engine.precision=fp32"
COMPILE, NO_COMPILE = "engine.compile = true", "--set engine.compile=false"
TECHNIQUES = (
    Technique(
        "training step in fp32",
        'engine.precision = "fp32"',
        "restart the machine; until then, train on the CPU: --set engine.device=cpu",
        lambda device: (trials.time_plain_step(device).ms, ""),
    ),
    Technique(
        "capture with dropout",
        "engine.capture = true",
        "--set engine.capture=false",
        _try_setting(capture=True),
        device="cuda",
    ),
    Technique("tf32 LSTM", TF32, NO_HALF, _try_setting(precision="tf32"), "cuda", (8, 0)),
    Technique("fp16 LSTM", FP16, NO_HALF, _try_setting(precision="fp16"), "cuda"),
    Technique("bf16 LSTM", 'engine.precision = "bf16"', NO_HALF, _try_bf16, capability=(8, 0)),
    Technique("fused AdamW", "engine.fused = true", "--set engine.fused=false", _try_fused),
    Technique(
        "oneDNN LSTM",
        "the plan's to choose",
        "nothing to do: the plan takes torch's own layers",
        _try_onednn,
        device="cpu",
    ),
    Technique(
        "recurrent kernels in C",
        'engine.rnn = "slipstream"',
        "--set engine.rnn=torch, or install gcc or clang",
        _try_native_kernels,
        device="cpu",
    ),
    Technique("threads", "engine.threads", "--set engine.threads=1", _try_threads, device="cpu"),
    Technique(
        "pinned-memory copies",
        'engine.home = "host"',
        "--set engine.home=device",
        _try_setting(home="host"),
        device="cuda",
    ),
    Technique(
        "NVML counters",
        "engine.monitor",
        "pip install nvidia-ml-py; if it is there, restart the machine",
        _try_counters,
        device="cuda",
    ),
    Technique(
        "DataLoader workers",
        "engine.workers = 2",
        "--set engine.workers=0",
        _try_workers,
        isolated=True,
    ),
    Technique("torch.compile", COMPILE, NO_COMPILE, _try_compile, None, (7, 0), isolated=True),
    Technique(
        "own recurrent kernels",
        'engine.rnn = "slipstream"',
        "--set engine.rnn=cudnn",
        _try_own_kernels,
        device="cuda",
        capability=(8, 0),
        isolated=True,
    ),
    Technique("Triton kernel", COMPILE, NO_COMPILE, _try_triton, "cuda", (7, 0), isolated=True),
)
