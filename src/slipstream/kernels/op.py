"""One op behind every recurrent layer: of one model, or under `vmap` of many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels import stepwise
from slipstream.kernels.available import triton_runs
from slipstream.kernels.operands import operands
from slipstream.kernels.shapes import Weights
from slipstream.kernels.vmapped import of_lanes


def recurrent(kind: str, x: Tensor, weights: Sequence[Tensor], *, last: bool = False) -> Tensor:
    """One layer, [T, B, D] to [T, B, W * H]; with `last`, each way's last output, [B, W * H].

    `weights` are those of `nn.LSTM` or `nn.GRU`, in their order: for one direction w_ih, w_hh, b_ih
    and b_hh, then those of the other. Under `vmap`, all lanes run as one program.
    """
    return of_lanes(partial(lanes, kind, last), x, *weights)


def lanes(kind: str, last: bool, x: Tensor, *weights: Tensor) -> Tensor:
    """The layer of K lanes: x [K, T, B, D] and every weight [K, ...] to [K, T, B, W * H], or with
    `last` to [K, B, W * H]."""
    both_ways = len(weights) > 4
    stacked = Weights(
        *(torch.stack(weights[i::4], dim=1) if both_ways else weights[i][:, None] for i in range(4))
    )
    dtype, precision = operands(x)
    by_triton = x.is_cuda and triton_runs(x.device)
    if by_triton:
        from slipstream.kernels import fused

        way = fused.choose(kind, last, x, stacked, dtype, precision)
        if way is not None:
            return fused.layer(way, x, stacked)
    half = dtype.itemsize == 2
    own = by_triton and dtype.itemsize <= 4
    tile = None
    if by_triton:
        from slipstream.kernels import split

        tile = split.choose(x, stacked, dtype)
    steps = stepwise.Way(kind, last, dtype, own, quick=own and half, tile=tile)
    return stepwise.layer(steps, x, stacked)
