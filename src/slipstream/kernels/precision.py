"""Number formats and constants that several implementations of an operation share."""

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's, as torch has them by default"""


def operand_format(x: Tensor) -> tuple[torch.dtype, str]:
    """The type that operands of products have here, and how those of fp32 are multiplied."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type), "tf32"
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return x.dtype, "tf32" if tf32 else "ieee"


def multiply_in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply over all steps and windows, whose sum half precision may be too narrow for."""
    if left.is_cuda and left.dtype.itemsize == 2:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right)
