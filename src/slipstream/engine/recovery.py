"""Recognise that memory ran out, free it, and suggest remedies."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.base import machine
from slipstream.base.errors import ResumableError, Text, UserError
from slipstream.config import Config, Signature
from slipstream.config.errors import format_value
from slipstream.models.shapes import count_parameters

MIN_COPIES = 3
"""Of the weights while a network trains: they, their gradients and the best so far"""
MAX_ROLLBACKS = 3
MEMORY_ERRORS = (RuntimeError, MemoryError)
"""Errors that may mean that memory ran out; `is_out_of_memory` tells"""
SIGNS = (
    *("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory"),
    *("alloc_failed", "bad_alloc", "bad allocation", "failed to allocate"),
    *("can't start new thread", "resource temporarily unavailable"),
)
"""Messages of torch, cuBLAS, oneDNN, C++ and Python, in lower case; threads need memory, too"""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):  # the latter is Arrow's as well
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def explain_shortage(error: BaseException) -> str:
    """Return why memory ran out; raise any other error again."""
    if not is_out_of_memory(error):
        raise error
    return first_line(error)


@contextmanager
def explain_out_of_memory(more: Text = "") -> Iterator[None]:
    """Turn memory that runs out into a UserError that says what to lower; `more` is another way."""
    try:
        yield
        return
    except MEMORY_ERRORS as error:
        why = explain_shortage(error)
    # past the except block, whose traceback would pin the memory
    free_memory()
    raise UserError(
        f"out of memory ({why}); {machine.get_available_memory() / 1e9:.1f} GB are left to this "
        "process: end other programs, raise its limit (ulimit -v, or the container's), or lower "
        "what it needs: engine.threads = 1, engine.workers = 0, a smaller train.batch, fewer "
        'columns in data.inputs, or Parquet files with engine.home = "stream"' + more
    )


def refuse_oversized(config: Config, signature: Signature) -> None:
    """Refuse a network that cannot fit into memory, whatever the batch, before any of it is
    built; and more models than the memory has room for."""
    parameters = count_parameters(config.model, signature)
    if parameters is None:
        return
    device, model = machine.choose_device(config.engine.device), config.model
    memory = total = machine.get_total_memory()
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    shaping = ["model.hidden", "model.layers"] if model.spec.has_hidden else []
    more = ("expansion", "kernel_size", "stacks")
    shaping += [f"model.{name}" for name in more if name in model.spec.settings]
    shaping += ["data.context"] if model.spec.flattens or model.pool == "flatten" else []
    shaping += ["data.horizon"] if config.data.horizon > 1 else []
    if 4 * parameters * MIN_COPIES > total:
        where = "the GPU" if device.type == "cuda" else "this machine"
        settings = ", ".join(f"{name} = {_format(config, name)}" for name in shaping)
        raise UserError(
            f"the network would have {parameters:,} parameters ({settings}), and training it takes "
            f"{4e-9 * parameters * MIN_COPIES:,.0f} GB at least, but {where} has "
            f"{total / 1e9:,.0f} GB; lower {' or '.join(shaping)}"
        )
    num_models = config.train.repeats * (config.data.split.walk_forward or 1)
    if 4 * parameters * num_models > memory and not config.masked:
        raise UserError(
            f"train.repeats = {config.train.repeats:,} trains {num_models:,} models of "
            f"{parameters:,} parameters, which take {4e-9 * parameters * num_models:,.0f} GB "
            f"together, but this machine has {memory / 1e9:,.0f} GB; lower it, or the network's "
            "size"
        )


def _format(config: Config, name: str) -> str:
    section, key = name.split(".")
    return format_value(getattr(getattr(config, section), key))


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def free_memory() -> None:
    """Give back what the failed step held; call it after its exception is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # they would pin the memory around them
        torch.cuda.empty_cache()


def check_device(why: str) -> None:
    """Raise a ResumableError if the GPU takes no more work from this process, as after an illegal
    access; `why` is the error that came first."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError:
        raise ResumableError(f"the GPU failed and takes no more work ({why})") from None


def suggest_remedies(config: Config) -> str:
    """Return the settings that save memory at a micro-batch of one window, with their savings."""
    context, sizes = config.data.context, config.model.sizes
    ladder = []
    if config.model.spec.is_sequential and not config.engine.recompute:
        num_layers = max(len(sizes), 1)
        ladder.append(
            f"engine.recompute = true (keeps one layer's activations of {num_layers}, and computes "
            "the rest again)"
        )
    if config.engine.precision in ("auto", "fp32", "tf32"):
        ladder.append('engine.precision = "fp16" or "bf16" (about half of the activations)')
    ladder.append(f"data.context = {max(context // 2, 1)} (half of the activations)")
    ladder.append(
        f"model.hidden = {max(max(sizes) // 2, 1)} (half of the activations, a quarter "
        "of the weights)"
    )
    return "; ".join(ladder)
