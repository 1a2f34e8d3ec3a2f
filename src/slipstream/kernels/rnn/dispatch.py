"""One op behind every recurrent layer: of one model, or under `vmap` of many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.availability import is_triton_usable
from slipstream.kernels.precision import operand_format
from slipstream.kernels.rnn import stepwise
from slipstream.kernels.rnn.weights import LayerWeights
from slipstream.kernels.vmap import call_with_lanes


def rnn_layer(kind: str, x: Tensor, weights: Sequence[Tensor], *, last: bool = False) -> Tensor:
    """One layer, [T, B, D] to [T, B, W * H]; with `last`, each way's last output, [B, W * H].

    `weights` are those of `nn.LSTM` or `nn.GRU`, in their order: for one direction w_ih, w_hh, b_ih
    and b_hh, then those of the other. Under `vmap`, all lanes run as one program.
    """
    return call_with_lanes(partial(rnn_layer_of_lanes, kind, last), x, *weights)


def rnn_layer_of_lanes(kind: str, last: bool, x: Tensor, *weights: Tensor) -> Tensor:
    """The layer of K lanes: x [K, T, B, D] and every weight [K, ...] to [K, T, B, W * H], or with
    `last` to [K, B, W * H]."""
    both_ways = len(weights) > 4
    stacked = LayerWeights(
        *(torch.stack(weights[i::4], dim=1) if both_ways else weights[i][:, None] for i in range(4))
    )
    dtype, precision = operand_format(x)
    by_triton = x.is_cuda and is_triton_usable(x.device)
    if by_triton:
        from slipstream.kernels.rnn import fused

        way = fused.choose_options(kind, last, x, stacked, dtype, precision)
        if way is not None:
            return fused.run_layer(way, x, stacked)
    half = dtype.itemsize == 2
    own = by_triton and dtype.itemsize <= 4
    tile = None
    if by_triton:
        from slipstream.kernels.rnn import wide

        tile = wide.choose_tile(x, stacked, dtype)
    steps = stepwise.StepwiseOptions(kind, last, dtype, own, quick=own and half, tile=tile)
    return stepwise.run_layer(steps, x, stacked)
