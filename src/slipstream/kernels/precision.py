"""Number formats and constants that several implementations of an operation share."""

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants, torch's defaults"""


def operand_format(x: Tensor) -> tuple[torch.dtype, str]:
    """Return the type of operands of products in the current context, and the precision of products
    of fp32."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type), "tf32"
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return x.dtype, "tf32" if tf32 else "ieee"


def multiply_in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Return products summed over all steps and windows in fp32: half precision may be too narrow
    for these sums."""
    if left.is_cuda and left.dtype.itemsize == 2:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right)
