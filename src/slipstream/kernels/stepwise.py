"""Recurrent layers step by step: one batched product and a few operations over all lanes and
directions per time step. For what no kernel of ours takes: CPUs, and layers too wide for a chip.

The way back is written out. What does not depend on the chain of steps is done for all of them at
once: the products with x, the factors that gradients are multiplied by (as in `recurrence`), and
the weights' gradients. Shapes as in the package, with L = K * W lanes and directions; in
[T, L, ...] time runs as the direction does.
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
    """Every step's output [T, L, B, H], and what the way back needs: gates and cells."""
    bias, H = b_ih + b_hh, across.shape[1]
    h = bias.new_zeros(*products.shape[1:3], H)
    c, outs, gates, cells = h, [], [], []
    for now in products:
        pre = torch.bmm(h.to(across.dtype), across) + now + bias
        gate = torch.sigmoid(pre)
        gate[..., 2 * H : 3 * H] = torch.tanh(pre[..., 2 * H : 3 * H])
        i, f, g, o = gate.chunk(4, dim=-1)
        c = torch.addcmul(f * c, i, g)
        h = o * torch.tanh(c)
        outs.append(h)
        gates.append(gate)
        cells.append(c)
    return torch.stack(outs), (torch.stack(gates), torch.stack(cells))


def _lstm_back(dy: Tensor, y: Tensor, hh: Tensor, kept: Any) -> tuple[Tensor, Tensor]:
    """Gradients of what went into the gates, [T, L, B, 4 * H]: the same from x and from h."""
    gates, cells = kept
    i, f, g, o = gates.chunk(4, dim=-1)
    before = torch.cat([torch.zeros_like(cells[:1]), cells[:-1]])
    tanh_c = torch.tanh(cells)
    of_cell = torch.cat([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], dim=-1)
    of_h, to_cell = y * (1 - o), o - y * tanh_c
    slots = torch.empty_like(gates)
    H = o.shape[-1]
    dh = dc = torch.zeros_like(y[0])
    for t in reversed(range(len(y))):
        dh = dh + dy[t]
        dc = torch.addcmul(dc, dh, to_cell[t])
        torch.mul(of_cell[t], dc.repeat(1, 1, 3), out=slots[t, ..., : 3 * H])
        torch.mul(of_h[t], dh, out=slots[t, ..., 3 * H :])
        dh = torch.bmm(slots[t].to(hh.dtype), hh).to(dy.dtype)
        dc = dc * f[t]
    return slots, slots


def _gru(products: Tensor, across: Tensor, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Any]:
    H = across.shape[1]
    h = b_ih.new_zeros(*products.shape[1:3], H)
    outs, gates, news, hidden = [], [], [], []
    for now in products:
        from_h = torch.bmm(h.to(across.dtype), across) + b_hh
        from_x = now + b_ih
        gate = torch.sigmoid(from_x[..., : 2 * H] + from_h[..., : 2 * H])
        r, z = gate.chunk(2, dim=-1)
        n = torch.tanh(torch.addcmul(from_x[..., 2 * H :], r, from_h[..., 2 * H :]))
        h = torch.lerp(n, h, z)
        outs.append(h)
        gates.append(gate)
        news.append(n)
        hidden.append(from_h[..., 2 * H :])
    return torch.stack(outs), tuple(torch.stack(found) for found in (gates, news, hidden))


def _gru_back(dy: Tensor, y: Tensor, hh: Tensor, kept: Any) -> tuple[Tensor, Tensor]:
    """Gradients of what comes from x and of what comes from h, [T, L, B, 3 * H] each."""
    gates, n, hidden = kept
    r, z = gates.chunk(2, dim=-1)
    before = torch.cat([torch.zeros_like(y[:1]), y[:-1]])
    of_new = (1 - z) * (1 - n * n)
    of_hidden = of_new * r
    of_r, of_z = of_hidden * (1 - r) * hidden, (before - n) * z * (1 - z)
    factors = torch.cat([of_r, of_z, of_hidden], dim=-1)
    of_h = torch.empty_like(factors)
    grads = torch.empty_like(y)
    dh = torch.zeros_like(y[0])
    for t in reversed(range(len(y))):
        dh = dh + dy[t]
        grads[t] = dh
        torch.mul(factors[t], dh.repeat(1, 1, 3), out=of_h[t])
        dh = torch.bmm(of_h[t].to(hh.dtype), hh).to(dy.dtype) + dh * z[t]
    H = n.shape[-1]
    return torch.cat([of_h[..., : 2 * H], of_new * grads], dim=-1), of_h
