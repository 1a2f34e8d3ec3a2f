"""The operation behind every recurrent layer, of one model or under `vmap` of many."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

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


def continue_rnn_layer(
    kind: str, x: Tensor, state: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Map [T, B, D] and the state before it to [T, B, H] and the state after it, on a CPU whose
    kernels are built; the gradient ends at the state."""
    stacked = LayerWeights(*(weight[None, None] for weight in weights))
    out, after = native.continue_layer(kind, x[None], state, stacked)
    return out[0], after


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
    if not (x.is_cuda and is_triton_usable(x.device)):
        return stepwise.run_layer(StepwiseOptions(kind, last, dtype), x, stacked)
    from slipstream.kernels.rnn import fused, wide

    options = fused.choose_options(kind, last, x, stacked, dtype, precision)
    if options is not None:
        return fused.run_layer(options, x, stacked)
    usable, half = dtype.itemsize <= 4, dtype.itemsize == 2
    tile = wide.choose_tile(x, stacked, dtype)
    return stepwise.run_layer(StepwiseOptions(kind, last, dtype, usable, half, tile), x, stacked)
