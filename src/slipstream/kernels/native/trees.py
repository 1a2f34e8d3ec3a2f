"""The leaves that windows reach in boosted trees, on a CPU: `trees.c` says how.

Shapes: D features, B windows, M trees, S splits and L leaves of a tree, K sums.
"""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.kernels.native import library

MAX_LEAVES = 32
WORTH_COMPILING = 1 << 16
"""Trees times windows from which on the library is compiled: there are more windows to come"""
THREADED = 1 << 16
"""Trees times windows from which on several threads share them"""
_TREES = {
    "feature": torch.int32,
    "threshold": torch.float32,
    "path": torch.int8,
    "lefts": torch.int8,
    "value": torch.float32,
    "output": torch.int64,
}


class _Call(ctypes.Structure):
    """The arguments, in the order of `Call` in the C code."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "M", "S", "L", "threads")),
        *((name, ctypes.c_void_p) for name in ("features", *_TREES, "outputs")),
        *((name, ctypes.c_void_p) for name in ("parallel", "number")),
    )


def is_supported(features: Tensor, trees: Mapping[str, Tensor]) -> bool:
    """Return whether the library computes these trees of features [B, D]; it is compiled where so
    many windows make that worth while."""
    if features.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    fits = trees["value"].shape[1] <= MAX_LEAVES and features.dtype == torch.float32
    if not fits or torch._C._functorch.is_functorch_wrapped_tensor(features):
        return False
    if library.find_library("trees") is not None:
        return True
    is_worth = features.shape[0] * len(trees["output"]) >= WORTH_COMPILING
    return is_worth and library.build_library("trees")


def add_leaves(features: Tensor, trees: Mapping[str, Tensor], level: Tensor) -> Tensor:
    """Return the constants [K] and the leaves' values, added up tree by tree: [B, D] to [B, K]
    float64."""
    compiled = library.find_library("trees")
    block: int = compiled.trees_block()
    count = features.shape[0]
    more = -count % block
    by_feature = torch.nn.functional.pad(features.T, (0, more)).contiguous()
    outputs = level.double()[:, None].repeat(1, count + more)
    arrays = {name: trees[name].to(dtype).contiguous() for name, dtype in _TREES.items()}
    call = _Call(count + more, *arrays["path"].shape)
    is_large = count * call.M >= THREADED
    call.threads = torch.get_num_threads() if is_large else 1
    call.parallel, call.number = library.find_threading()
    call.features, call.outputs = by_feature.data_ptr(), outputs.data_ptr()
    for name, array in arrays.items():
        setattr(call, name, array.data_ptr())
    if compiled.trees_add(ctypes.byref(call)):
        raise MemoryError("not enough memory for the trees")
    return outputs[:, :count].T
