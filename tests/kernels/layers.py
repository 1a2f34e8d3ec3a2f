"""Layers to hold against the definition, and how far they are from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from slipstream.kernels import reference
from slipstream.kernels.shapes import Weights

GATES = {"lstm": 4, "gru": 3}


class Shape(NamedTuple):
    kind: str
    K: int
    T: int
    B: int
    D: int
    H: int
    W: int = 1
    last: bool = False
    states: bool = False


def drawn(shape: Shape, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0) -> list[Tensor]:
    """x, the weights and, where asked for, initial states; numbers that `dtype` has."""
    generator = torch.Generator().manual_seed(seed)
    kind, K, T, B, D, H, W, _, states = shape
    G = GATES[kind] * H
    sizes = [(K, T, B, D), (K, W, G, D), (K, W, G, H), (K, W, G), (K, W, G)]
    sizes += [(K, W, B, H)] * (2 if kind == "lstm" else 1) * states
    spread = [1.0, *[max(H, 4) ** -0.5] * 4, 0.5, 0.5]
    return [
        (s * torch.randn(size, generator=generator)).to(dtype).float().to(device).requires_grad_()
        for s, size in zip(spread, sizes, strict=False)
    ]


def defined(shape: Shape, given: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and all gradients by the definition, in float64."""
    tensors = [tensor.detach().double().requires_grad_() for tensor in given]
    x, weights, states = tensors[0], Weights(*tensors[1:5]), [*tensors[5:], None, None][:2]
    out = reference.layer(shape.kind, x, weights, *states)
    if shape.last:
        H = shape.H
        out = torch.cat([out[:, -1, :, :H], out[:, 0, :, H:]], dim=-1)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.double())]


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative error; not a number where anything is none."""
    errors = [
        float((a.detach().double() - b).norm() / b.norm().clamp(min=1e-12))
        for a, b in zip(found, wanted, strict=True)
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")


def norm_error(
    shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype, device: str = "cpu"
) -> float:
    """Layer norms by our kernel: x [K, ..., D] in one type, normalized in another, and gaps between
    lanes' weights."""
    from slipstream.kernels import norms

    torch.manual_seed(0)
    K, D = shape[0], shape[-1]
    x = (3 * torch.randn(shape) + 1).to(device, dtype).requires_grad_()
    weight, bias = (torch.randn(K, D, device=device, requires_grad=True) for _ in range(2))
    given = with_gaps(weight, 1), with_gaps(bias, 1)
    found = vmap(lambda *one: norms.norm(*one, 1e-5, out))(x, *given)
    grad = torch.randn(shape).to(device, out)
    wide, *by_lane = (one.detach().double().requires_grad_() for one in (x, weight, bias))
    off = wide - wide.mean(-1, keepdim=True)
    normal = off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    scale, shift = (one.view(K, *[1] * (len(shape) - 2), D) for one in by_lane)
    wanted = normal * scale + shift
    mine = [found, *torch.autograd.grad(found, [x, weight, bias], grad)]
    theirs = torch.autograd.grad(wanted, [wide, *by_lane], grad.double())
    return apart(mine, [wanted.detach(), *theirs])


def with_gaps(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([tensor, torch.full_like(tensor, torch.nan)], dim).split(
        tensor.shape[dim], dim
    )[0]


def draws_agree(device: str, *, rows: int, batch: int, keys: int) -> bool:
    """Numbers drawn by our kernel are those of torch's operations, to the bit: for lanes with one
    key each, or one for each window."""
    from slipstream.kernels import hashes
    from slipstream.models import draws

    many = torch.arange(1, 1 + 3 * keys).view(3, keys) * 0x1234567890ABCD
    many = (many[:, 0] if keys == 1 else many).to(device)
    found = True
    for site in (0, 7, 1 << 20):
        how = hashes.Hash(draws._of_site(site), draws.MIX, draws.BITS)
        for name, dtype in (
            ("whole", torch.int64),
            ("uniform", torch.float32),
            ("signed", torch.float32),
        ):

            def one(key: Tensor, how=how, name=name, dtype=dtype) -> Tensor:
                return hashes.draw(key, how, rows, batch, dtype, signed=name == "signed")

            wanted = [getattr(draws, name)(key.cpu(), site, rows, batch) for key in many]
            mine = vmap(one)(many).cpu()
            found = found and torch.equal(mine, torch.stack(wanted))
            found = found and torch.equal(one(many[0]).cpu(), wanted[0])
    return found
