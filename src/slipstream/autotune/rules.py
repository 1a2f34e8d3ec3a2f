"""Make a plan by rules of thumb; `autotune.measure` then times what they leave open."""

import torch

from slipstream import machine
from slipstream.config import Config
from slipstream.engine.plan import Plan
from slipstream.errors import UserError
from slipstream.kernels import build_library, find_library
from slipstream.models import OWN_KERNELS

MAX_OWN_HIDDEN = 512
"""Hidden units up to which our own recurrent kernels have been faster than cuDNN's"""
GB = 1e9
HALF_PAYS_HIDDEN = 128
"""Hidden units from which fp16 LSTMs have been faster than tf32 ones, with 200 to 512 sequences a
step; with 64 units and 256 sequences, tf32 was"""
HALF_PAYS = 20_000
"""Hidden units times batch from which fewer hidden units do as well"""
SMALL_ON_ARM = 2048
"""Hidden units times batch up to which oneDNN's LSTM has been faster on Arm"""
REQUESTED = "requested"
TOGETHER = "each computes its share of every batch; gradients are added up once a step"
BUILT = "our own kernels, which were built here before"


def make_plan(
    config: Config,
    *,
    data_bytes: int,
    training: bool = True,
    streamed: bool = False,
    lanes: bool = False,
) -> Plan:
    """Make the plan within what the config allows; `lanes` says that many models share it."""
    engine, model = config.engine, config.model
    device = machine.choose_device(engine.device)
    hardware = machine.describe(device)
    recurrent = model.spec.is_recurrent
    precision, precision_reason = _choose_precision(config, device, lanes=lanes)
    capture, capture_reason = False, "only training steps are captured"
    if training:
        capture, capture_reason = _choose_capture(config, device)
    home, home_reason = _choose_home(config, device, data_bytes)
    if streamed:
        home, home_reason = "stream", f"{data_bytes / 1e6:,.1f} MB of series stay on disk"
    onednn, onednn_reason = _choose_onednn(config, hardware["system"], precision)
    processes = engine.data_parallel if training else 1
    threads, threads_reason = _choose_threads(config, processes)
    algorithm, cudnn_reason = _choose_cudnn(config, device)
    workers, prefetch = _choose_workers(config, hardware.get("gpu", ""))
    return Plan(
        device=device,
        precision=precision,
        home=home,
        capture=capture,
        # elsewhere every step gets its windows from the host, into the same buffers
        steps_per_graph=engine.steps_per_graph if home == "device" else 1,
        cudnn=(algorithm,) * len(model.sizes) if recurrent else (),
        cudnn_benchmark=engine.cudnn_benchmark,
        compile=engine.compile is True and not recurrent,
        fused=engine.fused is not False,
        set_to_none=engine.set_to_none,
        deterministic=engine.deterministic,
        recompute=engine.recompute,
        threads=threads,
        onednn=onednn,
        workers=workers,
        prefetch=prefetch,
        micro_batch=None,
        reasons={
            "device": str(hardware.get("gpu", hardware["cpu"])),
            "precision": precision_reason,
            "capture": capture_reason,
            "home": home_reason,
            "compile": _explain_compile(config),
            "onednn": onednn_reason,
            "threads": threads_reason,
            "cudnn": cudnn_reason,
            **({"data_parallel": TOGETHER} if processes > 1 else {}),
        },
        hardware=hardware,
        data_parallel=processes,
    )


def _choose_precision(config: Config, device: torch.device, *, lanes: bool) -> tuple[str, str]:
    requested = config.engine.precision
    if device.type == "cpu":
        if requested in ("tf32", "fp16"):
            why = f'engine.precision is "{requested}", which a CPU does not have'
            raise UserError(f'{why}; use "fp32" or "bf16"')
        return ("fp32", "the CPU's own") if requested == "auto" else (requested, REQUESTED)
    has_tf32 = machine.has_tf32(device)
    if requested == "tf32" and not has_tf32:
        raise UserError('engine.precision is "tf32", which this GPU lacks; use "fp32" or "fp16"')
    if requested != "auto":
        return requested, REQUESTED
    if config.engine.preset == "classic":
        return "fp16", "the usual advice"
    if is_half_faster(config, lanes=lanes):
        return "fp16", "fast for recurrent layers of this size"
    return ("tf32", "this GPU has it") if has_tf32 else ("fp16", "this GPU has no tf32")


def is_half_faster(config: Config, *, lanes: bool = False) -> bool:
    """Guess whether recurrent layers are faster in fp16 than in tf32, before measuring."""
    hidden = max(config.model.sizes)
    large = hidden >= HALF_PAYS_HIDDEN or hidden * _get_batch(config) >= HALF_PAYS
    lanes = lanes or config.train.repeats > 1 or config.data.split.walk_forward is not None
    return config.model.spec.is_recurrent and (large or lanes)  # the lanes' kernels prefer fp16


def _choose_capture(config: Config, device: torch.device) -> tuple[bool, str]:
    requested = config.engine.capture
    if device.type == "cpu":
        if requested is True:
            raise UserError("engine.capture is true, but steps are captured on CUDA only")
        return False, "a CPU runs the step as it is"
    if requested == "auto":
        return True, "the whole step replays as one CUDA graph"
    return requested, REQUESTED


def _choose_home(config: Config, device: torch.device, data_bytes: int) -> tuple[str, str]:
    requested, on_cpu = config.engine.home, device.type == "cpu"
    free_bytes = machine.get_available_memory() if on_cpu else torch.cuda.mem_get_info(device)[0]
    size = f"{data_bytes / 1e6:,.1f} MB of series, {free_bytes / GB:,.0f} GB free"
    if requested == "host" and on_cpu:
        return "device", f"{size}; on a CPU, host and device are one"
    if requested != "auto":
        return requested, f"{REQUESTED}; {size}"
    if config.train.state == "carried":
        return "device", f"{size}; a carried state is computed there"
    if not on_cpu and data_bytes > free_bytes / 2:
        return "host", f"{size}: too much for the device"
    return "device", size


def _explain_compile(config: Config) -> str:
    if config.engine.compile is True and config.model.spec.is_recurrent:
        return "off: torch.compile leaves recurrent layers as they are"
    return "off: takes long to start" if config.engine.compile == "auto" else REQUESTED


def _choose_onednn(config: Config, system: str, precision: str) -> tuple[bool, str]:
    if system.split()[-1] not in ("aarch64", "arm64"):
        return True, "fast here"
    model = config.model
    small = model.spec.onednn_on_arm and max(model.sizes) * _get_batch(config) <= SMALL_ON_ARM
    if small and precision == "fp32":  # there is none in bf16 on Arm
        return True, "fast here"
    return False, "slower than ATen's recurrent layers of this size on Arm"


def _choose_threads(config: Config, processes: int) -> tuple[int, str]:
    if config.engine.threads != "auto":
        return config.engine.threads, REQUESTED
    threads, cores = machine.count_available_cores(), machine.count_visible_cores()
    if processes > 1:
        return max(threads // processes, 1), f"{threads} cores for {processes} processes"
    return threads, "every core" if threads == cores else "the container's quota"


def _choose_cudnn(config: Config, device: torch.device) -> tuple[str, str]:
    requested, model = config.engine.cudnn, config.model
    if device.type == "cpu":
        return _choose_cpu_layers(config)
    if config.train.state == "carried":
        return "persistent", "cuDNN's layers, which begin with a state"
    if requested == "off" and model.spec.is_recurrent:
        _refuse_own_kernels(max(model.sizes), recent=machine.has_tf32(device))
    return ("persistent", "as PyTorch chooses") if requested == "auto" else (requested, REQUESTED)


def _choose_cpu_layers(config: Config) -> tuple[str, str]:
    """Choose our own kernels, if they are requested or have been built here before."""
    requested = config.engine.cudnn
    if not can_use_native_kernels(config) or requested in ("persistent", "standard"):
        return "persistent", "PyTorch's recurrent layers"
    if requested == "auto":
        is_ready = find_library() is not None
        return (OWN_KERNELS, BUILT) if is_ready else ("persistent", "our own kernels are not built")
    if not build_library():
        return "persistent", "our own kernels need a C compiler that works"
    return OWN_KERNELS, REQUESTED


def can_use_native_kernels(config: Config) -> bool:
    """Whether our kernels for a CPU do what a config requests: they compute in fp32, and store what
    the backward pass needs."""
    engine = config.engine
    fits = engine.precision in ("auto", "fp32") and not engine.recompute
    return config.model.spec.is_recurrent and fits


def _refuse_own_kernels(hidden: int, *, recent: bool) -> None:
    """Raise an error if our own kernels cannot run this width or this GPU."""
    if not recent or hidden > MAX_OWN_HIDDEN:
        why = f"model.hidden is {hidden}" if recent else "this GPU is older"
        raise UserError(
            f'engine.cudnn is "off", but our own kernels take up to {MAX_OWN_HIDDEN} hidden units, '
            f'on GPUs since Ampere ({why}); use "auto"'
        )


def _choose_workers(config: Config, gpu: str) -> tuple[int, int]:
    """Return DataLoader workers and batches to prefetch, by the model, the memory and the GPU."""
    memory, engine = machine.get_total_memory() / GB, config.engine
    size = 0 if memory < 8 else 1 if memory < 16 else 2
    workers, prefetch = ((2, 4, 8)[size], 4) if config.model.spec.flattens else ((0, 2, 4)[size], 2)
    if (hint := machine.find_gpu_hint(gpu)) is not None:
        workers = min(workers, hint.workers)
    workers = min(workers, machine.count_available_cores())
    workers = workers if engine.workers == "auto" else engine.workers
    return workers, prefetch if engine.prefetch == "auto" else engine.prefetch


def _get_batch(config: Config) -> int:
    return 256 if config.train.batch == "auto" else config.train.batch
