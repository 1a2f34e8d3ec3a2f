"""The definition of LSTM and GRU layers in plain PyTorch, which tests compare every implementation
with. Shapes as in the package."""

import torch
from torch import Tensor

from slipstream.kernels.rnn.weights import LayerWeights


def run_layer(
    kind: str, x: Tensor, weights: LayerWeights, h0: Tensor | None, c0: Tensor | None
) -> Tensor:
    """Map x [K, T, B, D] to every step's output [K, T, B, W * H]; states are [K, W, B, H]."""
    K, _, B, _ = x.shape
    W, H = weights.hh.shape[1], weights.hh.shape[3]
    cell = {"lstm": _run_lstm, "gru": _run_gru}[kind]
    zeros = x.new_zeros(K, W, B, H)
    h0 = zeros if h0 is None else h0
    c0 = zeros if c0 is None else c0
    outputs = [
        cell(x, LayerWeights(*(w[:, d] for w in weights)), h0[:, d], c0[:, d], d) for d in range(W)
    ]
    return torch.cat(outputs, dim=-1)


def _run_lstm(x: Tensor, weights: LayerWeights, h: Tensor, c: Tensor, backwards: int) -> Tensor:
    ih, hh, b_ih, b_hh = weights
    gates_x = torch.einsum("ktbd,kgd->ktbg", x, ih) + (b_ih + b_hh)[:, None, None]
    out: list[Tensor] = []
    for t in _order(x.shape[1], backwards):
        i, f, g, o = (gates_x[:, t] + h @ hh.mT).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(h)
    return torch.stack(out[::-1] if backwards else out, dim=1)


def _run_gru(x: Tensor, weights: LayerWeights, h: Tensor, _: Tensor, backwards: int) -> Tensor:
    ih, hh, b_ih, b_hh = weights
    gates_x = torch.einsum("ktbd,kgd->ktbg", x, ih) + b_ih[:, None, None]
    out: list[Tensor] = []
    for t in _order(x.shape[1], backwards):
        xr, xz, xn = gates_x[:, t].chunk(3, dim=-1)
        hr, hz, hn = (h @ hh.mT + b_hh[:, None]).chunk(3, dim=-1)
        update = torch.sigmoid(xz + hz)
        new = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        h = (1 - update) * new + update * h
        out.append(h)
    return torch.stack(out[::-1] if backwards else out, dim=1)


def _order(steps: int, backwards: int) -> range:
    return range(steps - 1, -1, -1) if backwards else range(steps)
