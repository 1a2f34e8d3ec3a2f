"""The least time of a step, by its arithmetic, its memory traffic and its chain of recurrent steps.

The machine's peaks are measured; a step cannot be faster than the longest of the three.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from slipstream import machine
from slipstream.data import windows
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask

CHAIN_US, CHAIN_WIDTH = 1.05, 128
"""One step of an LSTM of this width whose weights stay on chip, H200: 0.85 to 1.25 us were seen"""
CHAIN_CLOCK_MHZ = 1980.0
BACKWARD = 1.3
"""Time of a recurrent step in the backward pass, relative to the forward pass"""
STATE_ACCESSES = {"adam": 10, "adamw": 10, "sgd": 8, "rmsprop": 8}
"""Reads and writes per weight and step: the weight in both passes, its gradient once, then weight,
gradient and optimizer state in the update"""


class MachinePeaks(NamedTuple):
    """The measured peaks of a machine."""

    flops_per_s: float
    bytes_per_s: float
    cache_bytes: float


class Floor(NamedTuple):
    """Lower bounds of the time of a step."""

    arithmetic_ms: float
    memory_ms: float
    """0 where all data of the step fit into the cache"""
    chain_ms: float
    """0 where the model has none, or its speed is unknown"""

    @property
    def ms(self) -> float:
        return max(self)


def measure_peaks(plan: Plan) -> MachinePeaks:
    """Measure matrix products and copies on the plan's device."""
    device, on_gpu = plan.device, plan.device.type == "cuda"
    dtype = plan.autocast or torch.float32
    size = 4096 if on_gpu else 768
    with plan.flags():
        left = torch.ones(size, size, device=device, dtype=dtype)
        product_s = _time_fastest(lambda: left @ left, device)
        source = torch.ones(64_000_000 if on_gpu else 8_000_000, device=device)
        target = torch.empty_like(source)
        copy_s = _time_fastest(lambda: target.copy_(source), device)
    return MachinePeaks(
        flops_per_s=2.0 * size**3 / product_s,
        bytes_per_s=8.0 * source.numel() / copy_s,
        cache_bytes=_get_cache_bytes(device),
    )


def _time_fastest(work: Callable[[], Tensor], device: torch.device) -> float:
    times = []
    for _ in range(6):
        machine.synchronize(device)
        start = time.perf_counter()
        for _ in range(3):
            work()
        machine.synchronize(device)
        times.append((time.perf_counter() - start) / 3)
    return min(times)


def _get_cache_bytes(device: torch.device) -> float:
    """Return the size of the last cache before memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [2.0**20]  # all that is assumed on macOS and Windows
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(float(text.rstrip("KM")) * (2**20 if text.endswith("M") else 2**10))
    return max(sizes)


def compute_floor(task: TrainingTask, plan: Plan, peaks: MachinePeaks) -> Floor:
    """Compute the lower bounds of a training step."""
    train = task.config.train
    assert train.batch != "auto"
    count = train.batch * train.accumulate
    flops, saved_bytes = _measure_window(task)
    width = 2 if plan.autocast else 4
    weights = sum(p.numel() for p in task.model.parameters())
    state = 4.0 * weights * STATE_ACCESSES[train.optimizer]
    activations = 2.0 * saved_bytes * count * width / 4
    traffic = state + activations
    working_set = 4.0 * weights * 4 + activations / 2
    memory_s = traffic / peaks.bytes_per_s if working_set > peaks.cache_bytes else 0.0
    return Floor(
        arithmetic_ms=1e3 * 3 * flops * count / peaks.flops_per_s,
        memory_ms=1e3 * memory_s,
        chain_ms=_compute_chain_ms(task, plan),
    )


def _measure_window(task: TrainingTask) -> tuple[float, float]:
    """Count the operations of a forward pass, and the bytes that it saves for the backward pass."""
    chunk = next(task.dataset.iter_chunks("train", None, rows=task.config.engine.buffer_rows))
    batch = windows.gather(chunk.series, chunk.starts[:1])
    model = copy.deepcopy(task.model).to("cpu")
    own = {p.data_ptr() for p in model.parameters()}
    saved = 0.0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        if tensor.untyped_storage().data_ptr() not in own:
            saved += tensor.numel() * tensor.element_size()
        return tensor

    flags = machine.set_flags(
        threads=1, tf32=False, onednn=False
    )  # so that the counter sees every product
    saving = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with flags, saving, FlopCounterMode(display=False) as counter:
        model(batch.inputs, batch.static)
    return float(counter.get_total_flops()), saved


def _compute_chain_ms(task: TrainingTask, plan: Plan) -> float:
    """Return the time of the recurrent steps that must follow one another, with weights on chip."""
    model = task.config.model
    if not model.spec.is_recurrent or plan.device.type != "cuda":
        return 0.0
    length = task.config.data.context // model.patch
    depth = len(model.sizes)
    # layers of one direction run as a wave; with two, a layer needs all of the one before
    steps = length * depth if model.bidirectional else length + depth - 1
    width = max(model.sizes)
    clock = machine.get_max_clock_mhz(plan.device) or CHAIN_CLOCK_MHZ
    step_us = CHAIN_US * (0.4 + 0.6 * width / CHAIN_WIDTH) * CHAIN_CLOCK_MHZ / clock
    return steps * step_us * (1 + BACKWARD) / 1e3
