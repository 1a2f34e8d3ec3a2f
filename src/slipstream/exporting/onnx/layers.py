"""The layers of each kind of network as ONNX nodes.

Shapes as in `slipstream.models`: T tokens, B sequences, D a width; time comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.config import Model, Signature
from slipstream.exporting.onnx.builder import GraphBuilder
from slipstream.portable.networks.arithmetic import LEAK, NORM_EPSILON
from slipstream.portable.networks.encoders import make_positions

Weights = Mapping[str, npt.NDArray[np.float32]]
ORDERS = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}
"""ONNX's gates by their place in PyTorch's: input, output, forget, cell; update, reset, hidden"""


class Network(NamedTuple):
    """One trained network, and the graph that it becomes a part of."""

    graph: GraphBuilder
    model: Model
    signature: Signature
    weights: Weights
    prefix: str = ""
    """Of the names of its weights in the graph"""

    def has(self, name: str) -> bool:
        return f"core.{name}.weight" in self.weights

    def linear(self, value: str, name: str) -> str:
        weight, bias = (self.weights[f"core.{name}.{end}"] for end in ("weight", "bias"))
        return self.graph.linear(value, weight, bias, f"{self.prefix}core.{name}")

    def normalize(self, value: str, name: str) -> str:
        """Apply a LayerNorm over the last axis."""
        parts = [
            self.graph.constant(
                self.weights[f"core.{name}.{end}"], f"{self.prefix}core.{name}.{end}"
            )
            for end in ("weight", "bias")
        ]
        return self.graph.add("LayerNormalization", value, *parts, axis=-1, epsilon=NORM_EPSILON)

    def apply_activation(self, value: str, kind: str) -> str:
        add = self.graph.add
        match kind:
            case "relu":
                return add("Relu", value)
            case "gelu":
                one, half, root = (
                    self.graph.constant(np.float32(x)) for x in (1, 0.5, math.sqrt(0.5))
                )
                error = add("Erf", add("Mul", value, root))
                return add("Mul", add("Mul", value, half), add("Add", error, one))
            case "silu":
                return add("Mul", value, add("Sigmoid", value))
            case "elu":
                return add("Elu", value, alpha=1.0)
            case "leaky_relu":
                return add("LeakyRelu", value, alpha=float(LEAK))
            case "tanh":
                return add("Tanh", value)
        raise AssertionError(kind)


def to_patches(network: Network, rows: str) -> str:
    """[T, B, F] to [T / patch, B, patch * F]."""
    graph, patch = network.graph, network.model.patch
    if patch == 1:
        return rows
    flat = graph.reshape(
        graph.transpose(rows, 1, 0, 2), 0, -1, patch * network.signature.model_inputs
    )
    return graph.transpose(flat, 1, 0, 2)


def flatten_time(network: Network, sequence: str) -> str:
    """[T, B, D] to [B, T * D]; T is the context's."""
    return network.graph.reshape(network.graph.transpose(sequence, 1, 0, 2), 0, -1)


def encode(network: Network, rows: str) -> str:
    """Rows [T, B, F] to tokens [T / patch, B, D]."""
    tokens = to_patches(network, rows)
    match network.model.kind:
        case "lstm" | "gru":
            return _encode_recurrent(network, tokens)
        case "transformer":
            return _encode_transformer(network, tokens)
        case "tcn":
            return _encode_tcn(network, tokens)
    raise AssertionError(network.model.kind)


# recurrent


def _encode_recurrent(network: Network, sequence: str) -> str:
    graph, model = network.graph, network.model
    for depth, size in enumerate(model.sizes):
        outputs = graph.reserve(model.kind)
        run_cell(network, depth, sequence, (), [outputs])
        if model.bidirectional:  # [T, directions, B, D]
            sequence = graph.reshape(graph.transpose(outputs, 0, 2, 1, 3), 0, 0, 2 * size)
        else:
            sequence = graph.squeeze(outputs, 1)
        if model.layer_norm:
            sequence = network.normalize(sequence, f"norms.{depth}")
    return sequence


def run_cell(
    network: Network, depth: int, sequence: str, states: tuple[str, ...], names: list[str]
) -> None:
    """Add the LSTM or GRU of one layer, from zero states or these; `names` are those of its
    results: the outputs, then the states."""
    graph, model = network.graph, network.model
    where = f"{network.prefix}core.layers.{depth}"
    matrices = [
        graph.constant(values, f"{where}.{name}")
        for name, values in zip("WRB", _join_weights(network, depth), strict=True)
    ]
    attributes = {"hidden_size": model.sizes[depth]}
    if model.kind == "gru":  # PyTorch's form; the other one multiplies by the reset gate first
        attributes["linear_before_reset"] = 1
    graph.add_many(
        model.kind.upper(),
        sequence,
        *matrices,
        *(("", *states) if states else ()),
        names=names,
        direction="bidirectional" if model.bidirectional else "forward",
        **attributes,
    )


def _join_weights(network: Network, depth: int) -> list[npt.NDArray[np.float32]]:
    """Return W [directions, G * H, D], R [directions, G * H, H] and B [directions, 2 * G * H]."""

    def read(name: str, end: str) -> npt.NDArray[np.float32]:
        values = network.weights[f"core.layers.{depth}.{name}_l0{end}"]
        gates = np.split(values, len(order))
        return np.concatenate([gates[place] for place in order])

    order = ORDERS[network.model.kind]
    ends = ("", "_reverse") if network.model.bidirectional else ("",)
    inputs, hidden = (np.stack([read(n, end) for end in ends]) for n in ("weight_ih", "weight_hh"))
    biases = [np.concatenate([read("bias_ih", end), read("bias_hh", end)]) for end in ends]
    return [inputs, hidden, np.stack(biases)]


# convolutions


def _encode_tcn(network: Network, tokens: str) -> str:
    graph, model = network.graph, network.model
    hidden = graph.transpose(network.linear(tokens, "embed"), 1, 2, 0)  # [B, D, T]
    for depth in range(len(model.sizes)):
        inner = hidden
        for name in ("conv1", "conv2"):
            before = (model.kernel_size - 1) * 2**depth
            inner = graph.add("Relu", convolve(network, depth, name, inner, before))
        hidden = graph.add("Relu", graph.add("Add", hidden, inner))
    return graph.transpose(hidden, 2, 0, 1)


def convolve(network: Network, depth: int, name: str, value: str, before: int) -> str:
    """Convolve [B, D, T] after so many rows of zeros."""
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


# attention


def _encode_transformer(network: Network, tokens: str) -> str:
    graph, model, context = network.graph, network.model, network.signature.context
    places = network.weights.get("core.positions")
    if places is None:
        places = make_positions(context // model.patch, model.sizes[0])
    tokens = graph.add("Add", network.linear(tokens, "embed"), graph.constant(places))
    for depth in range(len(model.sizes)):
        where = f"layers.{depth}"
        inner = _attend(network, depth, network.normalize(tokens, f"{where}.norm1"))
        tokens = graph.add("Add", tokens, inner)
        inner = network.linear(network.normalize(tokens, f"{where}.norm2"), f"{where}.linear1")
        inner = network.linear(network.apply_activation(inner, "gelu"), f"{where}.linear2")
        tokens = graph.add("Add", tokens, inner)
    return network.normalize(tokens, "norm")


def _attend(network: Network, depth: int, tokens: str) -> str:
    graph, heads = network.graph, network.model.heads
    width = network.model.sizes[depth] // heads
    where = f"core.layers.{depth}.self_attn"
    weight, bias = (network.weights[f"{where}.in_proj_{end}"] for end in ("weight", "bias"))
    joined = graph.linear(tokens, weight, bias, f"{network.prefix}{where}.in_proj")
    parts = graph.transpose(graph.reshape(joined, 0, 0, 3, heads, width), 2, 1, 3, 0, 4)
    query, key, value = (graph.take(parts, i, axis=0) for i in range(3))  # [B, heads, T, width]
    query = graph.add("Mul", query, graph.constant(np.float32(1 / math.sqrt(width))))
    scores = graph.add("MatMul", query, graph.transpose(key, 0, 1, 3, 2))
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), value)
    rows = graph.reshape(graph.transpose(mixed, 2, 0, 1, 3), 0, 0, heads * width)
    return network.linear(rows, f"layers.{depth}.self_attn.out_proj")
