"""Layers to hold against the definition, and how far they are from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

from slipstream.kernels.rnn import reference
from slipstream.kernels.rnn.weights import LayerWeights

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
    x, weights, states = tensors[0], LayerWeights(*tensors[1:5]), [*tensors[5:], None, None][:2]
    out = reference.run_layer(shape.kind, x, weights, *states)
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
    from slipstream.kernels import layer_norm

    torch.manual_seed(0)
    K, D = shape[0], shape[-1]
    x = (3 * torch.randn(shape) + 1).to(device, dtype).requires_grad_()
    weight, bias = (torch.randn(K, D, device=device, requires_grad=True) for _ in range(2))
    given = with_gaps(weight, 1), with_gaps(bias, 1)
    found = vmap(lambda *one: layer_norm.layer_norm(*one, 1e-5, out))(x, *given)
    grad = torch.randn(shape).to(device, out)
    wide, *by_lane = (one.detach().double().requires_grad_() for one in (x, weight, bias))
    off = wide - wide.mean(-1, keepdim=True)
    normal = off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    scale, shift = (one.view(K, *[1] * (len(shape) - 2), D) for one in by_lane)
    wanted = normal * scale + shift
    mine = [found, *torch.autograd.grad(found, [x, weight, bias], grad)]
    theirs = torch.autograd.grad(wanted, [wide, *by_lane], grad.double())
    return apart(mine, [wanted.detach(), *theirs])


class Attention(NamedTuple):
    K: int
    T: int
    B: int
    heads: int
    D: int


def attention_shapes(count: int, *, most: Attention, seed: int = 0) -> Iterator[Attention]:
    """What fills a program, what hardly needs one, and some drawn at random; all that is taken in
    fp32."""
    yield Attention(1, 1, 1, 1, 1)
    yield Attention(2, 64, 1, 1, 32)
    yield Attention(1, 32, 2, 1, 64)
    yield Attention(3, 20, 2, 4, 8)
    draw = random.Random(seed)
    for _ in range(count):
        shape = Attention(*(draw.randint(1, largest) for largest in most))
        yield shape._replace(D=min(shape.D, 32)) if shape.T > 32 else shape


def seen(joined: Tensor, heads: int) -> Tensor:
    """Attention by its definition: [..., T, B, 3 * D] to [..., T, B, D]."""
    q, k, v = joined.unflatten(-1, (3, heads, -1)).unbind(-3)
    scores = torch.einsum("...tbhd,...sbhd->...bhts", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("...bhts,...sbhd->...tbhd", torch.softmax(scores, -1), v).flatten(-2)


def attention_error(
    shape: Attention, dtype: torch.dtype, device: str = "cpu", *, loose: bool = False
) -> float:
    """Attention by our kernel, of lanes by `vmap`. Where `loose`, lanes do not come first, and what
    comes in has gaps, either way."""
    from slipstream.kernels import short_attention

    K, T, B, heads, D = shape
    torch.manual_seed(0)
    joined = (1.5 * torch.randn(K, T, B, 3 * heads * D)).to(device, dtype).requires_grad_()
    grad = torch.randn(K, T, B, heads * D).to(device, dtype)
    given = with_gaps(joined.transpose(0, 1), 0) if loose else joined
    found = vmap(short_attention.short_attention, (int(loose), None))(given, heads)
    wide = joined.detach().double().requires_grad_()
    wanted = seen(wide, heads)
    (mine,) = torch.autograd.grad(found, joined, with_gaps(grad, -1) if loose else grad)
    (theirs,) = torch.autograd.grad(wanted, wide, grad.double())
    return apart([found, *mine.chunk(3, -1)], [wanted.detach(), *theirs.chunk(3, -1)])


def attention_is_the_same_alone(dtype: torch.dtype, device: str = "cpu") -> bool:
    """To the bit, both ways: a lane among others and by itself, where the way back computes it
    anew, and a few windows among others and by themselves."""
    from slipstream.kernels import short_attention

    torch.manual_seed(0)
    joined, grad = (torch.randn(3, 20, 5, w).to(device, dtype) for w in (3 * 32, 32))

    def both_ways(joined: Tensor, grad: Tensor) -> list[Tensor]:
        leaf = joined.clone().requires_grad_()
        if leaf.dim() == 4:
            out = vmap(short_attention.short_attention, (0, None))(leaf, 4)
        else:
            out = checkpoint(short_attention.short_attention, leaf, 4, use_reentrant=False)
        return [out, *torch.autograd.grad(out, leaf, grad)]

    same = True
    together = both_ways(joined, grad)
    for lane in range(3):
        alone = both_ways(joined[lane], grad[lane])
        fewer = both_ways(joined[lane, :, 1:3], grad[lane, :, 1:3])
        for a, b, c in zip(together, alone, fewer, strict=True):
            same = same and torch.equal(a[lane], b) and torch.equal(b[:, 1:3], c)
    return same


def with_gaps(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([tensor, torch.full_like(tensor, torch.nan)], dim).split(
        tensor.shape[dim], dim
    )[0]


def draws_agree(device: str, *, rows: int, batch: int, keys: int) -> bool:
    """Numbers drawn by our kernel are those of torch's operations, to the bit: for lanes with one
    key each, or one for each window."""
    from slipstream.kernels import counter_rng
    from slipstream.models import noise

    many = torch.arange(1, 1 + 3 * keys).view(3, keys) * 0x1234567890ABCD
    many = (many[:, 0] if keys == 1 else many).to(device)
    found = True
    for site in (0, 7, 1 << 20):
        how = counter_rng.CounterHash(noise._hash_site(site), noise.MIX, noise.BITS)
        for name, dtype in (
            ("int64", torch.int64),
            ("uniform", torch.float32),
            ("signed", torch.float32),
        ):

            def one(key: Tensor, how=how, name=name, dtype=dtype) -> Tensor:
                return counter_rng.draw_numbers(
                    key, how, rows, batch, dtype, signed=name == "signed"
                )

            wanted = [getattr(noise, f"draw_{name}")(key.cpu(), site, rows, batch) for key in many]
            mine = vmap(one)(many).cpu()
            found = found and torch.equal(mine, torch.stack(wanted))
            found = found and torch.equal(one(many[0]).cpu(), wanted[0])
    return found
