"""LSTM and GRU.

On CUDA the layers' weights are concatenated (and cast, in half precision) once per pass and handed
to cuDNN as the one buffer that it wants. Layers of one size without dropout between them go in
one call, which cuDNN runs as a wavefront. Left to itself, PyTorch would cast and copy every matrix
on every call, in fp16 even where bf16 was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.config import Model
from slipstream.kernels import rnn_layer
from slipstream.models.layers import Head, Pool, apply_norm, to_patches
from slipstream.models.noise.dropout import Noise, dropout
from slipstream.models.padding import Axis

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}
GATES = {"lstm": 4, "gru": 3}


class Recurrent(nn.Module):
    """Layers of one cell kind, each with its own width, dropout between them."""

    input_weights = re.compile(r"core\.layers\.0\.weight_ih_l0(_reverse)?")

    def __init__(
        self, model: Model, *, context: int, inputs: int, static: int, outputs: int | None
    ) -> None:
        """Without `outputs` it is an encoder: no pool, no head, and its tokens come out."""
        super().__init__()
        self.patch = model.patch
        self.algorithms: tuple[str, ...] = ("persistent",) * len(model.sizes)
        """cuDNN's, by layer: as PyTorch chooses, or the standard one; the plan sets them."""
        self.recompute = False
        self.own = False
        """Layers by our own op, which `vmap` can make one program of for many lanes"""
        self.kind = model.kind
        self.zeros: dict[tuple[Any, ...], Tensor] = {}
        """Initial states by shape: constants, which nobody writes to"""
        self.one_size = len(set(model.sizes)) == 1
        self.ways = ways = 2 if model.bidirectional else 1
        width = inputs * model.patch
        self.layers = nn.ModuleList()
        for size in model.sizes:
            self.layers.append(CELLS[model.kind](width, size, bidirectional=model.bidirectional))
            width = size * ways
        self.norms: nn.ModuleList | None = None
        if model.layer_norm:
            self.norms = nn.ModuleList(nn.LayerNorm(size * ways) for size in model.sizes)
        self.width: int = width
        self.pool: Pool | None = None
        self.head: Head | None = None
        if outputs is not None:
            length, both_ways = context // model.patch, model.bidirectional
            self.pool = Pool(model.pool, width=width, length=length, both_ways=both_ways)
            self.head = Head(self.pool.out, static, outputs)

    @staticmethod
    def unit_axes(name: list[str], model: Model) -> tuple[Axis, ...]:
        """For padding: the layer whose units lie along each axis of a weight."""
        if name[0] == "norms":  # such models differ in no width: zeros would count as units
            return (None,)
        layer = int(name[1])
        below = (layer - 1, 2 if model.bidirectional else 1) if layer else None
        across = (layer, 1) if name[2].startswith("weight_hh") else below
        return (layer, GATES[model.kind]), across

    def encode(self, inputs: Tensor, noise: Noise | None = None) -> Tensor:
        """Tokens [T / patch, B, D]."""
        sequence = to_patches(inputs, self.patch)
        return self._by_own_op(sequence, noise) if self.own else self._by_torch(sequence, noise)

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        if self.pool is None or self.head is None:
            return self.encode(inputs, noise)
        if self.own and self.norms is None and self.pool.kind == "last":
            pooled = self._by_own_op(to_patches(inputs, self.patch), noise, last=True)
        else:
            pooled = self.pool(self.encode(inputs, noise))
        if self.pool.kind != "flatten":  # a head this small costs less than its casts
            with torch.autocast(pooled.device.type, enabled=False):
                small: Tensor = self.head(pooled.float(), static)
                return small
        out: Tensor = self.head(pooled, static)
        return out

    def _by_own_op(self, sequence: Tensor, noise: Noise | None, *, last: bool = False) -> Tensor:
        """The layers; with `last`, each way's last output, [B, D]."""
        end = len(self.layers) - 1
        for depth, layer in enumerate(self.layers):
            weights = [weight for way in _weights(layer) for weight in way]
            if depth:
                sequence = dropout(sequence, noise, depth, ways=self.ways)
            sequence = rnn_layer(self.kind, sequence, weights, last=last and depth == end)
            sequence = self._normed(depth, sequence)
        return sequence

    def _normed(self, depth: int, sequence: Tensor) -> Tensor:
        """A layer's outputs, normalized where the model asks for it."""
        if self.norms is None:
            return sequence
        return apply_norm(cast(nn.LayerNorm, self.norms[depth]), sequence, sequence.dtype)

    def _by_torch(self, sequence: Tensor, noise: Noise | None) -> Tensor:
        if sequence.is_cuda:
            return self._on_cuda(sequence, noise)
        for depth, layer in enumerate(self.layers):
            if depth:
                sequence = dropout(sequence, noise, depth, ways=self.ways)
            sequence = self._kept_or_not(partial(_call_module, layer), sequence)
            sequence = self._normed(depth, sequence)
        return sequence

    def _on_cuda(self, sequence: Tensor, noise: Noise | None) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            sequence = sequence.to(torch.get_autocast_dtype("cuda"))
        merge = self.one_size and noise is None and self.norms is None
        merge = merge and len(set(self.algorithms)) == 1
        calls = [list(self.layers)] if merge else [[layer] for layer in self.layers]
        with torch.autocast("cuda", enabled=False):
            for depth, (layers, algorithm) in enumerate(zip(calls, self.algorithms, strict=False)):
                if depth:
                    sequence = dropout(sequence, noise, depth, ways=self.ways)
                call = partial(_call_cudnn, layers, algorithm, self._zeros(layers, sequence))
                sequence = self._normed(depth, self._kept_or_not(call, sequence))
        return sequence

    def _zeros(self, layers: Sequence[Any], sequence: Tensor) -> Tensor:
        shape = (len(layers) * self.ways, sequence.shape[1], layers[0].hidden_size)
        key = (*shape, sequence.dtype, sequence.device)
        if key not in self.zeros:
            self.zeros[key] = torch.zeros(shape, dtype=sequence.dtype, device=sequence.device)
        return self.zeros[key]

    def _kept_or_not(self, layer: Callable[[Tensor], Tensor], sequence: Tensor) -> Tensor:
        """Run a layer; keep its activations for the way back, or compute them again there."""
        if not (self.recompute and self.training):
            return layer(sequence)
        out: Tensor = checkpoint(layer, sequence, use_reentrant=False, preserve_rng_state=False)
        return out


def _call_module(layer: nn.Module, sequence: Tensor) -> Tensor:
    out: Tensor = layer(sequence)[0]
    return out


def _call_cudnn(layers: Sequence[Any], algorithm: str, zeros: Tensor, sequence: Tensor) -> Tensor:
    """Run layers of one size, [T, B, D] to [T, B, H * ways], in the sequence's precision."""
    first = layers[0]
    both_ways, depth = first.bidirectional, len(layers)
    run: Any = torch._VF.lstm if isinstance(first, nn.LSTM) else torch._VF.gru
    time, batch, width = sequence.shape
    state = (zeros, zeros) if isinstance(first, nn.LSTM) else zeros
    weights = _one_buffer(layers, sequence.dtype)
    rest = (True, depth, 0.0, first.training, both_ways)
    if algorithm == "persistent":
        out: Tensor = run(sequence, state, weights, *rest, False)[0]
        return out
    # a packed sequence of equal lengths is the only way to cuDNN's standard algorithm
    lengths = torch.full((time,), batch, dtype=torch.int64)
    packed: Tensor = run(sequence.reshape(-1, width), lengths, state, weights, *rest)[0]
    return packed.view(time, batch, -1)


def _weights(layer: Any) -> list[list[Tensor]]:
    """By direction: w_ih, w_hh, b_ih, b_hh."""
    found: list[list[Tensor]] = layer.all_weights
    return found


def _one_buffer(layers: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Every weight as a part of one tensor, laid out as cuDNN wants it: matrices, then biases."""
    directions = [weights for layer in layers for weights in _weights(layer)]
    matrices = [matrix for weights in directions for matrix in weights[:2]]
    ordered = matrices + [bias for weights in directions for bias in weights[2:]]
    buffer = torch.cat([weight.reshape(-1) for weight in ordered]).to(dtype)
    parts = buffer.split([weight.numel() for weight in ordered])
    shaped = [part.view(weight.shape) for part, weight in zip(parts, ordered, strict=True)]
    middle = len(matrices)
    return [
        shaped[start + offset]
        for pair in range(len(directions))
        for start in (2 * pair, middle + 2 * pair)
        for offset in range(2)
    ]
