"""The settings of the engine."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slipstream.config.base import Count, PositiveOrInf, Section, match_pattern

CLASSIC: dict[str, Any] = {"plan": "off", "home": "loader", "sync": True, "cudnn": "persistent"}
CLASSIC |= dict.fromkeys(("capture", "compile", "fused"), False)
PRESETS: dict[str, dict[str, Any]] = {
    "auto": {},
    "classic": CLASSIC | {"cudnn_benchmark": True},
    "baseline": CLASSIC
    | {"precision": "fp32", "workers": 0, "pinned": False, "non_blocking": False},
}


class Engine(Section):
    """How training runs; results are the same within rounding."""

    preset: Literal["auto", "classic", "baseline"] = "auto"
    """Defaults for this section: `"auto"`; `"classic"`, the usual advice (DataLoader workers,
    pinned memory, fp16, cuDNN benchmark); `"baseline"`, the naive loop (DataLoader, fp32, a
    synchronisation after every step). Single settings override it."""
    plan: Literal["cached", "measure", "off"] = "cached"
    """Choose by timing real steps: once per machine and shape, every time, or not at all (rules of
    thumb). Takes at most ten seconds or 5 % of the run."""
    device: Annotated[
        str, match_pattern(r"^(auto|cpu|cuda|cuda:\d+)$", '"auto", "cpu", "cuda", "cuda:1"')
    ] = "auto"
    """`"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Operands of matrix products; weights, optimizer state and loss stay fp32."""
    home: Literal["auto", "device", "host", "stream", "loader"] = "auto"
    """Where the series are: on the training device, in pinned host memory, on disk (Parquet or
    Arrow larger than memory), or behind a DataLoader over single windows, as in most scripts."""
    capture: bool | Literal["auto"] = "auto"
    """CUDA: record the whole training step once and replay it."""
    steps_per_graph: Annotated[int, Field(ge=1, le=10_000)] = 1
    """CUDA: training steps recorded into one graph, where the data are on the device."""
    cudnn: Literal["auto", "persistent", "standard", "off"] = "auto"
    """Recurrent models. CUDA: cuDNN's persistent or standard algorithm; `"off"`: our own kernels,
    for up to 512 hidden units on Ampere and newer GPUs. CPU: PyTorch's layers, or with `"off"` our
    own kernels, which need a C compiler (gcc or clang) and compute in fp32. `"auto"` measures, and
    starts with our own kernels in runs that are long enough to pay for compiling them."""
    cudnn_benchmark: bool = False
    """CUDA: let cuDNN time its convolutions; recurrent models have none."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile for feed-forward and attention models; it does not affect recurrent layers."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole weight update, where the optimizer has one."""
    set_to_none: bool = True
    """Drop gradients between steps instead of filling them with zeros."""
    deterministic: bool = False
    """CUDA: use only kernels that give the same bits in every run, where torch has them."""
    recompute: bool = False
    """Recompute activations of recurrent and attention layers in the backward pass instead of
    storing them."""
    sync: bool = False
    """Synchronise with the device after every step, as loops with `.item()` do."""
    data_parallel: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Number of processes that train one model together, each on its own GPU, or on a CPU: each
    computes a part of every batch, and one all-reduce per step adds up the gradients. Pays only if
    a part of the batch still fills a GPU; for repeats and folds, `--workers` is faster."""
    threads: Annotated[int, Field(ge=1, le=1_024)] | Literal["auto"] = "auto"
    """CPU threads for one operation (torch, OMP and MKL alike)."""
    workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = "auto"
    """Homes stream and loader: number of reading processes."""
    prefetch: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = "auto"
    """Homes stream and loader: batches that each worker reads ahead."""
    persistent_workers: bool = True
    """Homes stream and loader: keep the workers from epoch to epoch."""
    pinned: bool = True
    """Homes host, stream and loader: use page-locked memory for copies to the device."""
    non_blocking: bool = True
    """Homes host, stream and loader: copy while the device computes."""
    buffer_rows: Count = 1_000_000
    """Home stream: rows that each worker holds and draws windows from."""
    async_checkpoints: bool = True
    """Write checkpoints in a background thread."""
    checkpoint_minutes: PositiveOrInf = 1.0
    """Longest time between two checkpoints; more follow validations, as long as they take at most
    one percent of the time."""
    log_every: Count = 50
    """Steps between two readings of the loss, the only synchronisations within an epoch."""
    monitor: bool = True
    """Sample GPU, CPU, memory and energy, at most once a second, in a side thread."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and isinstance(settings.get("preset"), str):
            return PRESETS.get(settings["preset"], {}) | settings
        return settings
