"""What products multiply."""

from __future__ import annotations

import torch
from torch import Tensor


def operands(x: Tensor) -> tuple[torch.dtype, str]:
    """The type that products' operands have here, and how those of fp32 are multiplied."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type), "tf32"
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return x.dtype, "tf32" if tf32 else "ieee"
