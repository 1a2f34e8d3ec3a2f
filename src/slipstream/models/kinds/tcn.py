"""The temporal convolutional network without torch; `models/tcn.py` has the PyTorch module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import Model, Signature
from slipstream.models.c_code import CLayers, ConstArrays, NetworkShape, format_integers
from slipstream.models.kinds import Axis, GraphState, Kind, RowEncoder, RowState
from slipstream.models.numpy_layers import (
    Array,
    Shape,
    Weights,
    apply_linear,
    list_linear,
    relu,
    to_patches,
)

if TYPE_CHECKING:
    from slipstream.models.onnx_graph import OnnxNetwork

CONVOLUTIONS = ("conv1", "conv2")
"""The convolutions of each residual block"""


def count_past(model: Model, depth: int) -> int:
    """Return how many tokens before its own the convolutions of a block read."""
    return (model.kernel_size - 1) * int(2**depth)


def join_taps(weight: Array) -> Array:
    """Return a convolution's weight [N, D, taps] as the matrix of a product, [taps * D, N]."""
    return np.ascontiguousarray(weight.transpose(2, 1, 0)).reshape(-1, weight.shape[0])


def stack_taps(tokens: Array, taps: int, dilation: int) -> Array:
    """Stack the rows that each row's output reads, the oldest first: [T, B, D] to [T, B, taps *
    D]."""
    reach = (taps - 1) * dilation
    padded = np.concatenate([np.zeros((reach, *tokens.shape[1:]), dtype=np.float32), tokens])
    parts = [padded[k * dilation : k * dilation + len(tokens)] for k in range(taps)]
    return np.concatenate(parts, axis=-1)


class RowConvolution(RowEncoder):
    """The residual blocks, row after row; a state has the last rows that each convolution reads."""

    def __init__(self, weights: Weights, model: Model) -> None:
        self.weights, self.width, self.taps = weights, model.sizes[0], model.kernel_size
        self.convolutions = [
            (
                f"rows{depth}_{number}",
                2**depth,
                join_taps(weights[f"core.layers.{depth}.{name}.weight"]),
                weights[f"core.layers.{depth}.{name}.bias"],
            )
            for depth in range(len(model.sizes))
            for number, name in enumerate(CONVOLUTIONS, start=1)
        ]

    def start(self, sequences: int) -> RowState:
        return {
            name: np.zeros(((self.taps - 1) * dilation, sequences, self.width), dtype=np.float32)
            for name, dilation, _, _ in self.convolutions
        }

    def step(self, x: Array, state: RowState) -> Array:
        tokens = hidden = apply_linear(self.weights, "core.embed", x)
        for number, (name, dilation, matrix, bias) in enumerate(self.convolutions):
            rows = np.concatenate((state[name], hidden[None]))
            columns = np.concatenate(list(rows[::dilation]), axis=-1)
            state[name] = rows[1:]
            hidden = relu(columns @ matrix + bias)
            if number % 2:  # the second one of a block
                tokens = hidden = relu(tokens + hidden)
        return tokens


class ConvolutionKind(Kind):
    """A linear embedding of each token, then residual blocks of two dilated convolutions."""

    input_weights = re.compile(r"core\.embed\.weight")
    row_encoder = RowConvolution
    c_template = "tcn"

    def list_shapes(self, model: Model, signature: Signature) -> dict[str, Shape]:
        width = model.sizes[0]
        shapes = list_linear("core.embed", signature.model_inputs * model.patch, width)
        for depth in range(len(model.sizes)):
            for name in CONVOLUTIONS:
                shapes[f"core.layers.{depth}.{name}.weight"] = (width, width, model.kernel_size)
                shapes[f"core.layers.{depth}.{name}.bias"] = (width,)
        return shapes

    def get_width(self, model: Model, signature: Signature) -> int:
        return model.sizes[0]

    def get_unit_axes(self, name: Sequence[str], model: Model) -> tuple[Axis, ...]:
        # of a convolution [units, units, taps]
        return ((0, 1), None) if name[0] == "embed" else ((0, 1), (0, 1), None)

    def encode(self, weights: Weights, model: Model, inputs: Array) -> Array:
        tokens = apply_linear(weights, "core.embed", to_patches(inputs, model.patch))
        for depth in range(len(model.sizes)):
            hidden = tokens
            for conv in CONVOLUTIONS:
                name = f"core.layers.{depth}.{conv}"
                columns = stack_taps(hidden, model.kernel_size, 2**depth)
                out = columns @ join_taps(weights[f"{name}.weight"]) + weights[f"{name}.bias"]
                hidden = relu(out)
            tokens = relu(tokens + hidden)
        return tokens

    def add_to_graph(self, network: OnnxNetwork, rows: str) -> str:
        graph, model = network.graph, network.model
        tokens = network.linear(network.to_patches(rows), "embed")
        hidden = graph.transpose(tokens, 1, 2, 0)  # [B, D, T]
        for depth in range(len(model.sizes)):
            inner = hidden
            for name in CONVOLUTIONS:
                padded = _add_convolution(network, depth, name, inner, count_past(model, depth))
                inner = graph.add("Relu", padded)
            hidden = graph.add("Relu", graph.add("Add", hidden, inner))
        return graph.transpose(hidden, 2, 0, 1)

    def list_graph_states(self, model: Model) -> Iterator[GraphState]:
        for depth, size in enumerate(model.sizes):
            if rows := count_past(model, depth):
                for name in CONVOLUTIONS:
                    yield GraphState(f"{name}_{depth}", (size, rows))

    def add_step_to_graph(self, network: OnnxNetwork, row: str, prefix: str) -> str:
        graph, model = network.graph, network.model
        hidden = graph.transpose(network.linear(row, "embed"), 1, 2, 0)  # [B, D, 1]
        for depth in range(len(model.sizes)):
            inner, rows = hidden, count_past(model, depth)
            for name in CONVOLUTIONS:
                if rows:
                    where = f"{prefix}{name}_{depth}"
                    inner = graph.concatenate(f"state_{where}", inner, axis=2)
                    last = graph.integers(1), graph.integers(rows + 1), graph.integers(2)
                    graph.add("Slice", inner, *last, name=f"new_state_{where}")
                inner = graph.add("Relu", _add_convolution(network, depth, name, inner, 0))
            hidden = graph.add("Relu", graph.add("Add", hidden, inner))
        return graph.reshape(hidden, 0, model.sizes[-1])

    def describe_c(self, shape: NetworkShape) -> CLayers:
        # a ring of tokens for each convolution; in a window, none reads further back than its start
        slots = []
        for number in range(2 * len(shape.sizes)):
            past = count_past(shape.model, number // 2)
            slots.append(1 + (past if shape.carried else min(past, shape.tokens - 1)))
        return CLayers(
            defines={"KERNEL": shape.model.kernel_size, "SLOTS": max(slots)},
            cells={"tokens": sum(slots) * shape.width},
            counters={"slot": len(slots), "count": 0},
            work={"token": 3 * shape.width},
            values={
                "first_slots": format_integers(np.cumsum([0, *slots[:-1]])),
                "num_slots": format_integers(slots),
            },
            num_bytes=16 * len(slots),
        )

    def add_c_weights(
        self, arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
    ) -> list[str]:
        embed = arrays.add_dense(f"{prefix}_embed", read("embed.weight"), read("embed.bias"))
        convolutions = []
        for depth in range(len(shape.sizes)):
            for conv in CONVOLUTIONS:
                weight = read(f"layers.{depth}.{conv}.weight")  # [units, channels, taps]
                by_tap = weight.transpose(0, 2, 1).reshape(len(weight), -1)
                bias = read(f"layers.{depth}.{conv}.bias")
                convolutions.append(arrays.add_dense(f"{prefix}_layer{depth}_{conv}", by_tap, bias))
        return [embed, "{" + ", ".join(convolutions) + "}"]


def _add_convolution(network: OnnxNetwork, depth: int, name: str, value: str, before: int) -> str:
    """Add the convolution of [B, D, T], padded with `before` rows of zeros in front."""
    where = f"core.layers.{depth}.{name}"
    parts = [
        network.graph.constant(network.weights[f"{where}.{end}"], f"{network.prefix}{where}.{end}")
        for end in ("weight", "bias")
    ]
    return network.graph.add(
        "Conv",
        value,
        *parts,
        kernel_shape=[network.model.kernel_size],
        dilations=[2**depth],
        pads=[before, 0],
    )
