"""Layers that several networks share. Shapes as in the package's docstring; D is a width."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.config import Model
from slipstream.kernels import linear, should_use_triton
from slipstream.models.noise import Noise
from slipstream.models.numpy_layers import ROW_UNITS

NO_FUTURE = (0, 0)
"""The shape (rows, columns) of inputs known ahead where there are none"""


def to_patches(inputs: Tensor, patch: int) -> Tensor:
    """Return tokens of `patch` rows each: [T, B, F] to [T / patch, B, patch * F]."""
    if patch == 1:
        return inputs
    time, batch, features = inputs.shape
    rows = inputs.reshape(time // patch, patch, batch, features)
    return rows.transpose(1, 2).reshape(time // patch, batch, patch * features)


def flatten_time(sequence: Tensor) -> Tensor:
    """Return the rows of each window as one: [T, B, D] to [B, T * D]."""
    return sequence.transpose(0, 1).flatten(1)


def apply_norm(norm: nn.LayerNorm, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x normalized in fp32 and converted to `dtype`."""
    if should_use_triton(x):
        from slipstream.kernels import layer_norm

        if layer_norm.is_supported(x):
            return layer_norm.layer_norm(x, norm.weight, norm.bias, norm.eps, dtype)
    with torch.autocast(x.device.type, enabled=False):
        out: Tensor = norm(x.to(norm.weight.dtype))
    return out.to(dtype)


def apply_linear(layer: Any, x: Tensor) -> Tensor:
    """Apply an `nn.Linear`; with lanes this takes fewer kernels than calling it."""
    return linear(x, layer.weight, layer.bias)


def split_future(static: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Split static [B, K] into the static columns and the rows of this shape at its end."""
    ahead = shape[0] * shape[1]
    fixed, future = static.split([static.shape[-1] - ahead, ahead], dim=-1)
    return fixed, future.unflatten(-1, shape)


class Pool(nn.Module):
    """A sequence [T, B, D] to one vector per window."""

    def __init__(self, kind: str, *, width: int, length: int, bidirectional: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.bidirectional = bidirectional
        self.out = width * length if kind == "flatten" else width
        self.score = nn.Linear(width, 1) if kind == "attention" else None

    def forward(self, sequence: Tensor) -> Tensor:
        if self.score is not None:
            weight = torch.softmax(self.score(sequence).float(), dim=0)
            return (weight * sequence).sum(dim=0)
        if self.kind == "mean":
            return sequence.mean(dim=0)
        if self.kind == "flatten":
            return flatten_time(sequence)
        if self.bidirectional:  # the backward direction ends at the first token
            forward, backward = sequence.chunk(2, dim=-1)
            return torch.cat([forward[-1], backward[0]], dim=-1)
        return sequence[-1]


class Head(nn.Module):
    """Features [B, D] and static [B, K] to the outputs of one window, flat.

    Where static ends with rows that are known ahead, `ahead` adds to each predicted row.
    """

    def __init__(
        self, features: int, static: int, outputs: int, future: tuple[int, int] = NO_FUTURE
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(features + static, outputs)
        self.ahead = RowDecoder(features, static, outputs, future) if future[0] else None

    def forward(self, features: Tensor, static: Tensor | None) -> Tensor:
        joined = features if static is None else torch.cat([features, static], dim=-1)
        out = apply_linear(self.linear, joined)
        return out if self.ahead is None or static is None else out + self.ahead(features, static)


class RowDecoder(nn.Module):
    """The contribution of each row known ahead to the outputs of that row: a small network over the
    row and the window's features, the same for every row.

    The head's linear layer sees all rows ahead, which suffices for sums and lags. This network adds
    nonlinear effects, and effects that depend on the window.
    """

    def __init__(self, features: int, static: int, outputs: int, future: tuple[int, int]) -> None:
        super().__init__()
        self.shape = future
        rows, columns = future
        self.window = nn.Linear(features + static - rows * columns, ROW_UNITS)
        self.row = nn.Linear(columns, ROW_UNITS)
        self.out = nn.Linear(ROW_UNITS, outputs // rows)

    def forward(self, features: Tensor, static: Tensor) -> Tensor:
        fixed, future = split_future(static, self.shape)
        window = apply_linear(self.window, torch.cat([features, fixed], dim=-1))
        row = apply_linear(self.row, future)
        return apply_linear(self.out, torch.relu(row + window[:, None])).flatten(1)


class SequenceNetwork(nn.Module):
    """A network that reads sequences. Without `outputs` it is an encoder: it has no pool, no head,
    and returns its tokens."""

    pool: Pool | None
    head: Head | None
    width: int
    recompute = False

    def add_head(
        self,
        model: Model,
        context: int,
        static: int,
        outputs: int | None,
        future: tuple[int, int],
    ) -> None:
        """Add the pool and head above tokens of the network's width."""
        self.pool = self.head = None
        if outputs is not None:
            length, bidirectional = context // model.patch, model.bidirectional
            self.pool = Pool(
                model.pool, width=self.width, length=length, bidirectional=bidirectional
            )
            self.head = Head(self.pool.out, static, outputs, future)

    def encode(self, inputs: Tensor, noise: Noise | None = None) -> Tensor:
        """Return tokens [T / patch, B, D]."""
        raise NotImplementedError

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        """Return the outputs of each window, flat, or an encoder's tokens."""
        tokens = self.encode(inputs, noise)
        if self.pool is None or self.head is None:
            return tokens
        out: Tensor = self.head(self.pool(tokens), static)
        return out


def call_layer(layer: Callable[..., Tensor], *args: Any, recompute: bool) -> Tensor:
    """Run a layer; its activations are saved for the backward pass, or computed again there."""
    if not recompute:
        return layer(*args)
    out: Tensor = checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
    return out


def load_network(model: Model) -> Any:
    """Import the class that the model's spec names.

    Every network is made with `(model, context=, inputs=, static=, outputs=, future=)` and maps
    inputs [T, B, F], static [B, K] or None, and noise or None to [B, outputs]. The last numbers of
    static are rows that are known ahead, as many and as long as `future` says. A network that reads
    sequences is an encoder where `outputs` is None: it has a `width` and returns its tokens.
    """
    module, _, name = model.spec.network.partition(":")
    return getattr(import_module(module), name)
