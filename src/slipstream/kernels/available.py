"""Whether kernels in Triton can be had."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def triton_runs(device: torch.device) -> bool:
    """Triton is installed, the GPU is Turing or later, and a kernel can be built and run on it,
    which wants a C compiler."""
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (7, 5):
        return False
    from slipstream.kernels import drops

    return drops.works(device)
