"""Whether Triton kernels can run."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def should_use_triton(tensor: Tensor) -> bool:
    """Whether one of our kernels runs an operation on this tensor. Not within torch.compile, which
    fuses plain operations by itself."""
    return tensor.is_cuda and not torch.compiler.is_compiling() and is_triton_usable(tensor.device)


@cache
def is_triton_usable(device: torch.device) -> bool:
    """Whether Triton is installed, the GPU is Turing or later, and a kernel compiles and runs on
    it, which needs a C compiler."""
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (7, 5):
        return False
    from slipstream.kernels import dropout

    return dropout.can_launch(device)
