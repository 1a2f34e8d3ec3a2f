"""Recurrent layers step by step: one batched product and a few operations over all lanes and
directions per time step. For what no kernel of ours takes: CPUs, and layers too wide for a chip.

The way back is written out. What does not depend on the chain of steps is done for all of them at
once: the products with x and the weights' gradients. Shapes as in the package, with L = K * W lanes
and directions; in [T, L, ...] time runs as the direction does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.kernels.shapes import Weights


def layer(kind: str, x: Tensor, weights: Weights, dtype: torch.dtype) -> Tensor:
    """x [K, T, B, D] to [K, T, B, W * H]; products' operands and the output are of `dtype`."""
    out: Tensor = _Layer.apply(kind, dtype, x, *weights)  # type: ignore[no-untyped-call]
    return out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        dtype: torch.dtype,
        x: Tensor,
        ih: Tensor,
        hh: Tensor,
        b_ih: Tensor,
        b_hh: Tensor,
    ) -> Tensor:
        W = hh.shape[1]
        exact = torch.promote_types(dtype, torch.float32)  # of sums and states
        products = _along(torch.einsum("ktbd,kwgd->kwtbg", x.to(dtype), ih.to(dtype)))
        across = hh.to(dtype).flatten(0, 1).mT
        biases = [bias.flatten(0, 1)[:, None].to(exact) for bias in (b_ih, b_hh)]
        walk = _lstm if kind == "lstm" else _gru
        y, kept = walk(products, across, *biases)
        ctx.kind, ctx.dtype = kind, dtype
        ctx.save_for_backward(x, ih, hh, y, *kept)
        return _across(y.to(dtype), W).flatten(3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, ih, hh, y, *kept = ctx.saved_tensors
        (K, W), H, dtype = hh.shape[:2], hh.shape[3], ctx.dtype
        dy = _along(dy.unflatten(3, (W, H)).permute(0, 3, 1, 2, 4)).to(y.dtype)
        way_back = _lstm_back if ctx.kind == "lstm" else _gru_back
        of_x, of_h = way_back(dy, y, hh.to(dtype).flatten(0, 1), kept)
        before = torch.cat([torch.zeros_like(y[:1]), y[:-1]]).to(dtype)
        d_hh = torch.einsum("tlbg,tlbh->lgh", of_h.to(dtype), before).unflatten(0, (K, W))
        spread = _across(of_x.to(dtype), W)
        d_ih = torch.einsum("ktbwg,ktbd->kwgd", spread, x.to(dtype))
        dx = None
        if ctx.needs_input_grad[2]:
            dx = torch.einsum("ktbwg,kwgd->ktbd", spread, ih.to(dtype)).to(x.dtype)
        sums = [found.sum(dim=(0, 2)).unflatten(0, (K, W)) for found in (of_x, of_h)]
        return (
            *(None, None, dx, d_ih.to(ih.dtype), d_hh.to(hh.dtype)),
            *(total.to(ih.dtype) for total in sums),
        )


_sigmoid_back = torch.ops.aten.sigmoid_backward
_tanh_back = torch.ops.aten.tanh_backward


def _along(tensor: Tensor) -> Tensor:
    """[K, W, T, B, N] as [T, L, B, N], the second direction from its end."""
    if tensor.shape[1] == 2:
        tensor = torch.stack([tensor[:, 0], tensor[:, 1].flip(1)], dim=1)
    return tensor.flatten(0, 1).transpose(0, 1)


def _across(tensor: Tensor, W: int) -> Tensor:
    """[T, L, B, N] as [K, T, B, W, N]."""
    ways: Tensor = tensor.unflatten(1, (-1, W)).permute(1, 0, 3, 2, 4)
    if W == 2:
        ways = torch.stack([ways[..., 0, :], ways[..., 1, :].flip(1)], dim=3)
    return ways


def _lstm(products: Tensor, across: Tensor, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Any]:
    """Every step's output [T, L, B, H], and what the way back needs of each."""
    bias, H = b_ih + b_hh, across.shape[1]
    h = bias.new_zeros(*products.shape[1:3], H)
    c, outs, kept = h, [], []
    for now in products:
        pre = torch.bmm(h.to(across.dtype), across) + now + bias
        i, f = torch.sigmoid(pre[..., : 2 * H]).chunk(2, dim=-1)
        g, o = torch.tanh(pre[..., 2 * H : 3 * H]), torch.sigmoid(pre[..., 3 * H :])
        before = c
        c = torch.addcmul(f * c, i, g)
        tanh_c = torch.tanh(c)
        h = o * tanh_c
        outs.append(h)
        kept.append((i, f, g, o, before, tanh_c))
    return torch.stack(outs), [tensor for step in kept for tensor in step]


def _lstm_back(dy: Tensor, y: Tensor, hh: Tensor, kept: Any) -> tuple[Tensor, Tensor]:
    """Gradients of what went into the gates, [T, L, B, 4 * H]: the same from x and from h."""
    dh = dc = torch.zeros_like(y[0])
    slots: list[Tensor] = []
    for t in reversed(range(len(y))):
        i, f, g, o, before, tanh_c = kept[6 * t : 6 * t + 6]
        dh = dh + dy[t]
        dc = dc + _tanh_back(dh * o, tanh_c)
        of_i, of_f = _sigmoid_back(dc * g, i), _sigmoid_back(dc * before, f)
        of_g, of_o = _tanh_back(dc * i, g), _sigmoid_back(dh * tanh_c, o)
        slots.append(torch.cat([of_i, of_f, of_g, of_o], dim=-1))
        dh = torch.bmm(slots[-1].to(hh.dtype), hh).to(dy.dtype)
        dc = dc * f
    found = torch.stack(slots[::-1])
    return found, found


def _gru(products: Tensor, across: Tensor, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Any]:
    H = across.shape[1]
    h = b_ih.new_zeros(*products.shape[1:3], H)
    outs, kept = [], []
    for now in products:
        from_h = torch.bmm(h.to(across.dtype), across) + b_hh
        from_x = now + b_ih
        gate = torch.sigmoid(from_x[..., : 2 * H] + from_h[..., : 2 * H])
        r, z = gate.chunk(2, dim=-1)
        n = torch.tanh(torch.addcmul(from_x[..., 2 * H :], r, from_h[..., 2 * H :]))
        kept.append((r, z, n, from_h[..., 2 * H :], h))
        h = torch.lerp(n, h, z)
        outs.append(h)
    return torch.stack(outs), [tensor for step in kept for tensor in step]


def _gru_back(dy: Tensor, y: Tensor, hh: Tensor, kept: Any) -> tuple[Tensor, Tensor]:
    """Gradients of what comes from x and of what comes from h, [T, L, B, 3 * H] each."""
    dh = torch.zeros_like(y[0])
    of_x: list[Tensor] = []
    of_h: list[Tensor] = []
    for t in reversed(range(len(y))):
        r, z, n, hidden, before = kept[5 * t : 5 * t + 5]
        dh = dh + dy[t]
        of_n = _tanh_back(dh * (1 - z), n)
        of_hidden = of_n * r
        of_r = _sigmoid_back(of_n * hidden, r)
        of_z = _sigmoid_back(dh * (before - n), z)
        of_x.append(torch.cat([of_r, of_z, of_n], dim=-1))
        of_h.append(torch.cat([of_r, of_z, of_hidden], dim=-1))
        dh = torch.bmm(of_h[-1].to(hh.dtype), hh).to(dy.dtype) + dh * z
    return torch.stack(of_x[::-1]), torch.stack(of_h[::-1])
