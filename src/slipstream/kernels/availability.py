"""Whether Triton kernels can run."""

import threading
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_trying = threading.Lock()


def should_use_triton(tensor: Tensor) -> bool:
    """Return whether one of our kernels runs an operation on this tensor. Not within torch.compile,
    which fuses plain operations by itself."""
    return tensor.is_cuda and not torch.compiler.is_compiling() and is_triton_usable(tensor.device)


def is_triton_usable(device: torch.device) -> bool:
    """Return whether Triton is installed, the GPU is Turing or later, and a kernel compiles and
    runs on it, which needs a C compiler."""
    with _trying:  # `prepare_device` may be at it in another thread
        return _try_triton(device)


@cache
def _try_triton(device: torch.device) -> bool:
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (7, 5):
        return False
    from slipstream.kernels import dropout

    return dropout.can_launch(device)


def prepare_device(device: torch.device) -> None:
    """Load the driver and the libraries that a first step would otherwise wait for."""
    if device.type != "cuda":
        return
    for dtype in (torch.float32, torch.float16):
        square = torch.zeros(16, 16, device=device, dtype=dtype)
        (square @ square).sum()
    is_triton_usable(device)
