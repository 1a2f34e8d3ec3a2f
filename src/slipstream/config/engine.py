"""How it runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from slipstream.config.base import PositiveFloat, Section

PRESETS: dict[str, dict[str, Any]] = {
    "auto": {},
    "classic": {
        "plan": "off",
        "home": "loader",
        "capture": False,
        "compile": False,
        "fused": False,
        "cudnn_benchmark": True,
        "sync": True,
    },
    "baseline": {
        "plan": "off",
        "precision": "fp32",
        "home": "loader",
        "capture": False,
        "compile": False,
        "fused": False,
        "sync": True,
        "workers": 0,
        "pinned": False,
        "non_blocking": False,
    },
}


class Engine(Section):
    """How it runs. Results do not depend on it, beyond rounding."""

    preset: Literal["auto", "classic", "baseline"] = "auto"
    """Defaults for this section: ours; `"classic"`, the usual advice (DataLoader workers, pinned
    memory, fp16, cuDNN benchmark); `"baseline"`, the naive loop (DataLoader, fp32, waiting for
    every step). Single settings still win."""
    plan: Literal["cached", "measure", "off"] = "cached"
    """Choose by timing real steps: once per machine and shape, every time, or not at all (rules of
    thumb). Takes at most ten seconds or a twentieth of the run."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:\d+)$")] = "auto"
    """`"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Operands of matrix products; weights, optimizer state and loss stay fp32."""
    home: Literal["auto", "device", "host", "stream", "loader"] = "auto"
    """Where the series live: on the device that trains, in pinned host memory, on disk (Parquet or
    Arrow larger than memory), or behind a DataLoader over single windows, as most scripts do."""
    capture: bool | Literal["auto"] = "auto"
    """CUDA: record the whole training step once and replay it."""
    steps_per_graph: PositiveInt = 1
    """CUDA: training steps recorded into one graph."""
    cudnn: Literal["auto", "persistent", "standard", "off"] = "auto"
    """CUDA, recurrent models: the algorithm that PyTorch prefers for small layers, or the other;
    `"off"`: our own kernels, for up to 512 hidden units on cards since Ampere. `"auto"` measures,
    and begins with our own kernels in runs that are worth building them for."""
    cudnn_benchmark: bool = False
    """CUDA: let cuDNN time its convolutions; recurrent models have none."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile for feed-forward and attention models; recurrent layers stay out of it."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole weight update, where the optimizer has one."""
    set_to_none: bool = True
    """Drop gradients between steps instead of filling them with zeros."""
    deterministic: bool = False
    """CUDA: only kernels that repeat the same bits from run to run, where torch has them."""
    recompute: bool = False
    """Keep no activations of recurrent and attention layers; compute them again going backward."""
    sync: bool = False
    """Wait for the device after every step, as loops with `.item()` do."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads for one operation (torch, OMP and MKL alike)."""
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Homes stream and loader: processes that read."""
    prefetch: PositiveInt | Literal["auto"] = "auto"
    """Homes stream and loader: batches that each worker reads ahead."""
    persistent_workers: bool = True
    """Homes stream and loader: keep the workers from epoch to epoch."""
    pinned: bool = True
    """Homes host, stream and loader: page-locked memory for what is copied to the device."""
    non_blocking: bool = True
    """Homes host, stream and loader: copy while the device computes."""
    buffer_rows: PositiveInt = 1_000_000
    """Home stream: rows that each worker holds and draws windows from."""
    async_checkpoints: bool = True
    """Write checkpoints while training goes on."""
    checkpoint_minutes: PositiveFloat = 1.0
    """Longest time between two checkpoints; after validations there are more, as long as they take
    no more than a hundredth of the time."""
    log_every: PositiveInt = 50
    """Steps between two readings of the loss, the only times the host waits within an epoch."""
    monitor: bool = True
    """Sample GPU, CPU, memory and energy, at most once a second, in a thread of its own."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and isinstance(settings.get("preset"), str):
            return PRESETS.get(settings["preset"], {}) | settings
        return settings
