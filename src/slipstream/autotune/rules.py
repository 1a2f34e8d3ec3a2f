"""Make a plan by rules of thumb; `autotune.measure` then times what they leave open."""

from __future__ import annotations

import torch

from slipstream import machine
from slipstream.config import Config
from slipstream.engine.plan import Plan
from slipstream.errors import UserError

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


def make_plan(
    config: Config,
    *,
    data_bytes: int,
    training: bool = True,
    streamed: bool = False,
    lanes: bool = False,
) -> Plan:
    """The plan by rules of thumb, within what the config asks for; of many models, with `lanes`."""
    engine, model = config.engine, config.model
    device = machine.choose_device(engine.device)
    found = machine.describe(device)
    reasons = {"device": str(found.get("gpu", found["cpu"]))}
    precision, reasons["precision"] = _precision(config, device, lanes=lanes)
    capture, reasons["capture"] = False, "only training steps are captured"
    if training:
        capture, reasons["capture"] = _capture(config, device)
    home, reasons["home"] = _home(config, device, data_bytes)
    if streamed:
        home, reasons["home"] = "stream", f"{data_bytes / 1e6:,.1f} MB of series stay on disk"
    recurrent = model.spec.is_recurrent
    if engine.compile is True and recurrent:
        reasons["compile"] = "off: torch.compile leaves recurrent layers as they are"
    else:
        reasons["compile"] = "asked for" if engine.compile != "auto" else "off: takes long to start"
    arm = found["system"].split()[-1] in ("aarch64", "arm64")
    small = model.spec.onednn_on_arm and max(model.sizes) * _batch(config) <= SMALL_ON_ARM
    onednn = not arm or (small and precision == "fp32")  # there is none in bf16 on Arm
    reasons["onednn"] = (
        "fast here" if onednn else "slower than ATen's recurrent layers of this size on Arm"
    )
    threads = machine.count_available_cores() if engine.threads == "auto" else engine.threads
    every = "every core" if threads == machine.count_visible_cores() else "the container's quota"
    reasons["threads"] = every if engine.threads == "auto" else "asked for"
    if engine.cudnn == "off" and recurrent and device.type == "cuda":
        _refuse_own(max(model.sizes), recent=machine.has_tf32(device))
    algorithm = "persistent" if engine.cudnn == "auto" else engine.cudnn
    reasons["cudnn"] = "as PyTorch chooses" if engine.cudnn == "auto" else "asked for"
    workers, prefetch = _workers(config, found.get("gpu", ""))
    return Plan(
        device=device,
        precision=precision,
        home=home,
        capture=capture,
        steps_per_graph=engine.steps_per_graph,
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
        reasons=reasons,
        hardware=found,
    )


def _refuse_own(hidden: int, *, recent: bool) -> None:
    if not recent or hidden > MAX_OWN_HIDDEN:
        why = f"model.hidden is {hidden}" if recent else "this GPU is older"
        raise UserError(
            f'engine.cudnn is "off", but our own kernels take up to {MAX_OWN_HIDDEN} hidden units, '
            f'on GPUs since Ampere ({why}); use "auto"'
        )


def _precision(config: Config, device: torch.device, *, lanes: bool) -> tuple[str, str]:
    asked = config.engine.precision
    if device.type == "cpu":
        if asked in ("tf32", "fp16"):
            raise UserError(
                f'engine.precision is "{asked}", which a CPU does not have; use "fp32" or "bf16"'
            )
        return ("fp32", "the CPU's own") if asked == "auto" else (asked, "asked for")
    has_tf32 = machine.has_tf32(device)
    if asked == "tf32" and not has_tf32:
        raise UserError('engine.precision is "tf32", which this GPU lacks; use "fp32" or "fp16"')
    if asked != "auto":
        return asked, "asked for"
    if config.engine.preset == "classic":
        return "fp16", "the usual advice"
    if half_pays(config, lanes=lanes):
        return "fp16", "fast for recurrent layers of this size"
    return ("tf32", "this GPU has it") if has_tf32 else ("fp16", "this GPU has no tf32")


def half_pays(config: Config, *, lanes: bool = False) -> bool:
    """Whether recurrent layers are taken to be faster in fp16 than in tf32, before measuring."""
    hidden = max(config.model.sizes)
    large = hidden >= HALF_PAYS_HIDDEN or hidden * _batch(config) >= HALF_PAYS
    lanes = lanes or config.train.repeats > 1 or config.data.split.walk_forward is not None
    return config.model.spec.is_recurrent and (large or lanes)  # lanes run by kernels made for fp16


def _batch(config: Config) -> int:
    return 256 if config.train.batch == "auto" else config.train.batch


def _capture(config: Config, device: torch.device) -> tuple[bool, str]:
    asked = config.engine.capture
    if device.type == "cpu":
        if asked is True:
            raise UserError("engine.capture is true, but steps are captured on CUDA only")
        return False, "a CPU runs the step as it is"
    if asked == "auto":
        return True, "the whole step replays as one CUDA graph"
    return asked, "asked for"


def _home(config: Config, device: torch.device, data_bytes: int) -> tuple[str, str]:
    asked = config.engine.home
    if device.type == "cpu":
        room = machine.get_available_memory()
    else:
        room = torch.cuda.mem_get_info(device)[0]
    size = f"{data_bytes / 1e6:,.1f} MB of series, {room / GB:,.0f} GB free"
    if asked == "host" and device.type == "cpu":
        return "device", f"{size}; on a CPU, host and device are one"
    if asked != "auto":
        return asked, f"asked for; {size}"
    if device.type == "cuda" and data_bytes > room / 2:
        return "host", f"{size}: too much for the device"
    return "device", size


def _workers(config: Config, gpu: str) -> tuple[int, int]:
    """Readers and batches ahead, by the kind of model, the memory there is and the card."""
    known = machine.find_gpu_hint(gpu)
    memory = machine.get_total_memory() / GB
    size = 0 if memory < 8 else 1 if memory < 16 else 2
    if config.model.spec.flattens:
        workers, prefetch = (2, 4, 8)[size], 4
    else:
        workers, prefetch = (0, 2, 4)[size], 2
    if known is not None and workers:
        workers = min(workers, known.workers)
    engine = config.engine
    return (
        min(workers, machine.count_available_cores())
        if engine.workers == "auto"
        else engine.workers,
        prefetch if engine.prefetch == "auto" else engine.prefetch,
    )
