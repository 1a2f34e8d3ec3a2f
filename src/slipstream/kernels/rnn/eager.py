"""The steps of a recurrent layer by PyTorch's operations, forward and backward: for CPUs, and for
GPUs that no kernel of ours runs on. `stepwise` says what goes in and out; `cell` is the same in
Triton.

What the backward pass needs is saved as it was computed: factors for all steps at once would leave
the CPU's cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.rnn.weights import StepwiseOptions

_sigmoid_back = torch.ops.aten.sigmoid_backward
_tanh_back = torch.ops.aten.tanh_backward


def forward(
    products: Tensor, hh: Tensor, bias: Tensor, options: StepwiseOptions, *, save: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the output, y, and what `backward` needs."""
    W, H = products.shape[3], hh.shape[2]
    x = _order_by_direction(products.permute(0, 3, 1, 2, 4))
    L, T, B, _ = x.shape
    y = x.new_empty(L, T, B, H)
    h = c = bias.new_zeros(L, B, H)
    across, saved = hh.mT, []
    for t in range(T):
        from_h = torch.bmm(h.to(hh.dtype), across)
        if options.is_lstm:
            h, c, needed = _step_lstm(x[:, t], from_h, bias[:, None], c)
        else:
            h, needed = _step_gru(x[:, t], from_h, bias[:, None], h)
        y[:, t] = h
        saved += needed if save else []
    return (select_last(y, W) if options.last else _order_by_time(y, W)), y, saved


def backward(
    dy: Tensor, hh: Tensor, saved: Sequence[Tensor], options: StepwiseOptions, *, T: int, W: int
) -> Tensor:
    """Return the slots' gradients."""
    H, last, lstm = hh.shape[2], options.last, options.is_lstm
    dy = dy.unflatten(-1, (W, H)).movedim(-2, 1)  # [K, W, (T,) B, H]
    incoming = dy.flatten(0, 1)[:, None] if last else _order_by_direction(dy)
    per_step = len(saved) // T
    L, _, B, _ = incoming.shape
    slots = incoming.new_empty(L, T, B, 4 * H, dtype=hh.dtype)
    dh = dc = torch.zeros_like(saved[0])
    for t in reversed(range(T)):
        if not last or t == T - 1:
            dh = dh + incoming[:, -1 if last else t]
        step_back = _step_lstm_back if lstm else _step_gru_back
        grads, carried = step_back(dh, dc, *saved[per_step * t : per_step * (t + 1)])
        slots[:, t] = grads
        if t:
            of_h = grads if lstm else grads[..., H:]
            dh = torch.bmm(of_h.to(hh.dtype), hh).to(dh.dtype)
            dh, dc = (dh, carried) if lstm else (dh + carried, dc)
    return slots


def select_last(y: Tensor, W: int) -> Tensor:
    """Return each direction's last output, [K, B, W * H]."""
    directions: Tensor = y[:, -1].unflatten(0, (-1, W))
    return directions.transpose(1, 2).flatten(2)


def _order_by_direction(tensor: Tensor) -> Tensor:
    """Return [K, W, T, B, N] as [L, T, B, N], the second direction reversed in time."""
    if tensor.shape[1] == 2:
        tensor = torch.stack([tensor[:, 0], tensor[:, 1].flip(1)], dim=1)
    return tensor.flatten(0, 1)


def _order_by_time(y: Tensor, W: int) -> Tensor:
    """Return [L, T, B, H] as [K, T, B, W * H], in the order of time."""
    if W == 1:
        return y
    directions = y.unflatten(0, (-1, W))
    return torch.cat([directions[:, 0], directions[:, 1].flip(1)], dim=-1)


def _step_lstm(
    now: Tensor, from_h: Tensor, bias: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    H = c.shape[-1]
    pre = from_h + now + bias
    i, f = torch.sigmoid(pre[..., : 2 * H]).chunk(2, dim=-1)
    g, o = torch.tanh(pre[..., 2 * H : 3 * H]), torch.sigmoid(pre[..., 3 * H :])
    new = torch.addcmul(f * c, i, g)
    tanh_c = torch.tanh(new)
    return o * tanh_c, new, [i, f, g, o, c, tanh_c]


def _step_lstm_back(
    dh: Tensor,
    dc: Tensor,
    i: Tensor,
    f: Tensor,
    g: Tensor,
    o: Tensor,
    before: Tensor,
    tanh_c: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the slots' gradients, and the part of dc that is passed on."""
    dc = dc + _tanh_back(dh * o, tanh_c)
    of_i, of_f = _sigmoid_back(dc * g, i), _sigmoid_back(dc * before, f)
    of_g, of_o = _tanh_back(dc * i, g), _sigmoid_back(dh * tanh_c, o)
    return torch.cat([of_i, of_f, of_g, of_o], dim=-1), dc * f


def _step_gru(now: Tensor, from_h: Tensor, bias: Tensor, h: Tensor) -> tuple[Tensor, list[Tensor]]:
    H = h.shape[-1]
    from_x = now + bias[..., : 3 * H]
    gate = torch.sigmoid(from_x[..., H:] + from_h[..., : 2 * H])
    r, z = gate.chunk(2, dim=-1)
    hidden = from_h[..., 2 * H :] + bias[..., 3 * H :]
    n = torch.tanh(torch.addcmul(from_x[..., :H], r, hidden))
    return torch.lerp(n, h, z), [r, z, n, hidden, h]


def _step_gru_back(
    dh: Tensor, _: Tensor, r: Tensor, z: Tensor, n: Tensor, hidden: Tensor, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the slots' gradients, and the part of dh that is passed on."""
    of_n = _tanh_back(dh * (1 - z), n)
    of_r = _sigmoid_back(of_n * hidden, r)
    of_z = _sigmoid_back(dh * (before - n), z)
    return torch.cat([of_n, of_r, of_z, of_n * r], dim=-1), dh * z
