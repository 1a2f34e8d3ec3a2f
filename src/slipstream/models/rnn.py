"""LSTM and GRU.

On CUDA the layers' weights are concatenated (and cast, in half precision) once per pass and handed
to cuDNN as the one buffer that it wants. Layers of one size without dropout between them go in
one call, which cuDNN runs as a wavefront. Left to itself, PyTorch would cast and copy every matrix
on every call, in fp16 even where the config says bf16.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from slipstream.config import Model
from slipstream.kernels import continue_rnn_layer, rnn_layer
from slipstream.models.layers import NO_FUTURE, SequenceNetwork, apply_norm, call_layer, to_patches
from slipstream.models.noise import Noise, dropout

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}
STANDARD = "cudnn-standard"
"""The name of cuDNN's standard algorithm, instead of the algorithm that PyTorch chooses"""


class Recurrent(SequenceNetwork):
    """Layers of one cell kind, each with its own width, dropout between them."""

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        inputs: int,
        static: int,
        outputs: int | None,
        future: tuple[int, int] = NO_FUTURE,
    ) -> None:
        super().__init__()
        self.patch = model.patch
        self.algorithms: tuple[str, ...] = ("cudnn",) * len(model.sizes)
        """The implementation that runs each layer, as in `Plan.rnn`; set by the plan"""
        self.use_own_kernels = False
        """Run layers by our own operation, which has a vmap rule, instead of cuDNN's"""
        self.kind = model.kind
        self.zeros: dict[tuple[Any, ...], Tensor] = {}
        """Initial states by shape: constants"""
        self.one_size = len(set(model.sizes)) == 1
        self.directions = directions = 2 if model.bidirectional else 1
        width = inputs * model.patch
        self.layers = nn.ModuleList()
        for size in model.sizes:
            self.layers.append(CELLS[model.kind](width, size, bidirectional=model.bidirectional))
            width = size * directions
        self.norms: nn.ModuleList | None = None
        if model.layer_norm:
            self.norms = nn.ModuleList(nn.LayerNorm(size * directions) for size in model.sizes)
        self.width = width
        self.add_head(model, context, static, outputs, future)

    def encode(self, inputs: Tensor, noise: Noise | None = None) -> Tensor:
        sequence = to_patches(inputs, self.patch)
        if self.use_own_kernels:
            return self._run_own_kernels(sequence, noise)
        if sequence.is_cuda:
            return self._run_cudnn(sequence, noise)
        recompute = self.recompute and self.training
        for depth, layer in enumerate(self.layers):
            if depth:
                sequence = dropout(sequence, noise, depth, directions=self.directions)
            sequence = call_layer(_call_module, layer, sequence, recompute=recompute)
            sequence = self._normalize(depth, sequence)
        return sequence

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        if self.pool is None or self.head is None:
            return self.encode(inputs, noise)
        if self.use_own_kernels and self.norms is None and self.pool.kind == "last":
            pooled = self._run_own_kernels(to_patches(inputs, self.patch), noise, last=True)
        else:
            pooled = self.pool(self.encode(inputs, noise))
        if self.pool.kind != "flatten":  # a head this small costs less than its casts
            with torch.autocast(pooled.device.type, enabled=False):
                small: Tensor = self.head(pooled.float(), static)
                return small
        out: Tensor = self.head(pooled, static)
        return out

    def make_states(self, batch: int, device: torch.device) -> list[Tensor]:
        """Return a state of zeros for each layer, [P, B, H]: P is 2 in an LSTM (h and c), 1 in a
        GRU."""
        parts = 2 if self.kind == "lstm" else 1
        sizes = [cast(nn.RNNBase, layer).hidden_size for layer in self.layers]
        return [torch.zeros(parts, batch, size, device=device) for size in sizes]

    def encode_rows(
        self, inputs: Tensor, states: Sequence[Tensor], noise: Noise | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the tokens of rows, continuing from these states, and the states after them, in
        fp32."""
        sequence, after = inputs, []
        if sequence.is_cuda and torch.is_autocast_enabled("cuda"):
            sequence = sequence.to(torch.get_autocast_dtype("cuda"))
        for depth, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            if depth:
                sequence = dropout(sequence, noise, depth)
            run = self._continue_own if self.use_own_kernels else _continue_layer
            sequence, new = run(layer, state, sequence)
            after.append(new.float())
            sequence = self._normalize(depth, sequence)
        return sequence, after

    def _continue_own(self, layer: Any, state: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        found = continue_rnn_layer(self.kind, sequence, state, layer.all_weights[0])
        return _continue_layer(layer, state, sequence) if found is None else found

    def _run_own_kernels(
        self, sequence: Tensor, noise: Noise | None, *, last: bool = False
    ) -> Tensor:
        """Run the layers; with `last`, return each direction's last output, [B, D]."""
        end = len(self.layers) - 1
        layer: Any
        for depth, layer in enumerate(self.layers):
            weights = [weight for direction in layer.all_weights for weight in direction]
            if depth:
                sequence = dropout(sequence, noise, depth, directions=self.directions)
            sequence = rnn_layer(self.kind, sequence, weights, last=last and depth == end)
            sequence = self._normalize(depth, sequence)
        return sequence

    def _normalize(self, depth: int, sequence: Tensor) -> Tensor:
        """Normalize a layer's outputs where `model.layer_norm` is set."""
        if self.norms is None:
            return sequence
        return apply_norm(cast(nn.LayerNorm, self.norms[depth]), sequence, sequence.dtype)

    def _run_cudnn(self, sequence: Tensor, noise: Noise | None) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            sequence = sequence.to(torch.get_autocast_dtype("cuda"))
        merge = self.one_size and noise is None and self.norms is None
        merge = merge and len(set(self.algorithms)) == 1
        recompute = self.recompute and self.training
        calls = [list(self.layers)] if merge else [[layer] for layer in self.layers]
        with torch.autocast("cuda", enabled=False):
            for depth, (layers, algorithm) in enumerate(zip(calls, self.algorithms, strict=False)):
                if depth:
                    sequence = dropout(sequence, noise, depth, directions=self.directions)
                args = layers, algorithm, self._make_zeros(layers, sequence), sequence
                sequence = call_layer(_call_cudnn, *args, recompute=recompute)
                sequence = self._normalize(depth, sequence)
        return sequence

    def _make_zeros(self, layers: Sequence[Any], sequence: Tensor) -> Tensor:
        shape = (len(layers) * self.directions, sequence.shape[1], layers[0].hidden_size)
        key = (*shape, sequence.dtype, sequence.device)
        if key not in self.zeros:
            self.zeros[key] = torch.zeros(shape, dtype=sequence.dtype, device=sequence.device)
        return self.zeros[key]


def _call_module(layer: nn.Module, sequence: Tensor) -> Tensor:
    out: Tensor = layer(sequence)[0]
    return out


def _continue_layer(layer: Any, state: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Run a layer from a state [P, B, H]; return its outputs [T, B, H] and the state after them."""
    is_lstm = isinstance(layer, nn.LSTM)
    if not sequence.is_cuda:
        out, after = layer(sequence, (state[:1], state[1:]) if is_lstm else state)
        return out, torch.cat(after) if is_lstm else after
    run: Any = torch._VF.lstm if is_lstm else torch._VF.gru
    state = state.to(sequence.dtype)
    before = (state[:1], state[1:]) if is_lstm else state
    with torch.autocast("cuda", enabled=False):
        weights = _join_weights([layer], sequence.dtype)
        options = (True, 1, 0.0, layer.training, False, False)
        out, *parts = run(sequence, before, weights, *options)
    return out, torch.cat(parts)


def _call_cudnn(layers: Sequence[Any], algorithm: str, zeros: Tensor, sequence: Tensor) -> Tensor:
    """Run layers of one size, [T, B, D] to [T, B, H * directions], in the sequence's precision."""
    first = layers[0]
    bidirectional, depth = first.bidirectional, len(layers)
    run: Any = torch._VF.lstm if isinstance(first, nn.LSTM) else torch._VF.gru
    time, batch, width = sequence.shape
    state = (zeros, zeros) if isinstance(first, nn.LSTM) else zeros
    weights = _join_weights(layers, sequence.dtype)
    options = (True, depth, 0.0, first.training, bidirectional)
    if algorithm != STANDARD:
        out: Tensor = run(sequence, state, weights, *options, False)[0]
        return out
    # a packed sequence of equal lengths is the only way to cuDNN's standard algorithm
    lengths = torch.full((time,), batch, dtype=torch.int64)
    packed: Tensor = run(sequence.reshape(-1, width), lengths, state, weights, *options)[0]
    return packed.view(time, batch, -1)


def _join_weights(layers: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Copy all weights into one tensor, in cuDNN's order: matrices, then biases."""
    directions = [weights for layer in layers for weights in layer.all_weights]
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
