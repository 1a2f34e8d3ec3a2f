"""The operation behind every recurrent layer, of one model or under `vmap` of many."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.cuda import rnn as cuda
from slipstream.kernels.launch import is_triton_usable
from slipstream.kernels.native import rnn as native
from slipstream.kernels.operands import call_with_lanes, operand_format
from slipstream.kernels.rnn import stepwise
from slipstream.kernels.rnn.weights import LayerWeights, StepwiseOptions


def rnn_layer(kind: str, x: Tensor, weights: Sequence[Tensor], *, last: bool = False) -> Tensor:
    """Map [T, B, D] to [T, B, W * H]; with `last`, to each direction's last output, [B, W * H].

    `weights` are those of `nn.LSTM` or `nn.GRU`, in their order: for one direction w_ih, w_hh, b_ih
    and b_hh, then those of the other. Under `vmap`, all lanes run as one program.
    """
    return call_with_lanes(partial(rnn_layer_of_lanes, kind, last), x, *weights)


def has_cuda_kernels(device: torch.device, hidden: int) -> bool:
    """Whether layers of so many units can run on the kernels in CUDA C++ on a GPU."""
    return hidden <= cuda.MAX_UNITS and cuda.explain_unusable(device) is None


def explain_no_half_kernels(
    device: torch.device, hidden: int, *, carried: bool = False
) -> str | None:
    """Say why layers of so many units cannot run on our kernels for half precision on a GPU; None
    where they can. `carried`: from states that are given, as the kernels in Triton cannot."""
    if has_cuda_kernels(device, hidden):
        return None
    why = cuda.explain_unusable(device)
    if carried:
        return why or f"with a carried state they take up to {cuda.MAX_UNITS} hidden units"
    if cuda.get_limits(device).architecture < cuda.AMPERE:
        return why or f"on this GPU they take up to {cuda.MAX_UNITS} hidden units"
    return None if is_triton_usable(device) else "they need Triton and a C compiler"


def continue_rnn_layer(
    kind: str, x: Tensor, state: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Map [T, B, D] and the state before it, [P, B, H], to [T, B, H] and the state after it; the
    gradient ends at the state. P is 2 in an LSTM (h and c), 1 in a GRU. None where our kernels
    cannot."""
    stacked = LayerWeights(*(weight[None, None] for weight in weights))
    if not x.is_cuda:
        out, after = native.continue_layer(kind, x[None], state, stacked)
        return out[0], after
    dtype, _ = operand_format(x)
    options = cuda.choose_options(kind, False, x[None], stacked, dtype, states=True)
    if options is None or not cuda.prepare(options, x, save=torch.is_grad_enabled()):
        return None
    h0, *c0 = state.detach()[:, None, None]
    out, *states = cuda.continue_layer(options, x[None], stacked, h0, *(c0 or [None]))
    return out[0], torch.cat([part[0] for part in states if part is not None])


def rnn_layer_of_lanes(kind: str, last: bool, x: Tensor, *weights: Tensor) -> Tensor:
    """Run the layer of K lanes: x [K, T, B, D] and every weight [K, ...] to [K, T, B, W * H], or
    with `last` to [K, B, W * H]."""
    bidirectional = len(weights) > 4
    stacked = LayerWeights(
        *(
            torch.stack(weights[i::4], dim=1) if bidirectional else weights[i][:, None]
            for i in range(4)
        )
    )
    dtype, precision = operand_format(x)
    if native.is_supported(x, dtype):
        return native.run_layer(kind, last, x, stacked)
    if x.is_cuda and not torch.compiler.is_compiling():
        chosen = cuda.choose_options(kind, last, x, stacked, dtype, states=False)
        needs_grad = torch.is_grad_enabled() and (x.requires_grad or stacked.hh.requires_grad)
        if chosen is not None and cuda.prepare(chosen, x, save=needs_grad):
            return cuda.run_layer(chosen, x, stacked)
    if not (x.is_cuda and is_triton_usable(x.device)):
        return stepwise.run_layer(StepwiseOptions(kind, last, dtype), x, stacked)
    from slipstream.kernels.rnn import fused, wide

    options = fused.choose_options(kind, last, x, stacked, dtype, precision)
    if options is not None:
        return fused.run_layer(options, x, stacked)
    usable, half = dtype.itemsize <= 4, dtype.itemsize == 2
    tile = wide.choose_tile(x, stacked, dtype)
    return stepwise.run_layer(StepwiseOptions(kind, last, dtype, usable, half, tile), x, stacked)
