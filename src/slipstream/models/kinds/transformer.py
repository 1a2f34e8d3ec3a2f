"""The transformer without torch; `models/transformer.py` has the PyTorch module."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import Model, Signature
from slipstream.models.c_code import (
    POINTER_BYTES,
    CLayers,
    ConstArrays,
    NetworkShape,
    format_float,
)
from slipstream.models.kinds import Kind
from slipstream.models.numpy_layers import (
    Array,
    Shape,
    Weights,
    apply_linear,
    gelu,
    list_linear,
    list_norm,
    normalize_layer,
    softmax,
    to_patches,
)

if TYPE_CHECKING:
    from slipstream.models.onnx_graph import OnnxNetwork

POSITIONS = "core.positions"


class TransformerKind(Kind):
    """A pre-norm encoder over tokens, with learned or sinusoidal positions."""

    input_weights = re.compile(r"core\.embed\.weight")
    added_weights = frozenset({POSITIONS})
    c_template = "transformer"

    def list_shapes(self, model: Model, signature: Signature) -> dict[str, Shape]:
        width, inner = model.sizes[0], model.sizes[0] * model.expansion
        shapes = list_linear("core.embed", signature.model_inputs * model.patch, width)
        if model.positions == "learned":
            shapes[POSITIONS] = (signature.context // model.patch, 1, width)
        for depth in range(len(model.sizes)):
            name = f"core.layers.{depth}"
            shapes[f"{name}.self_attn.in_proj_weight"] = (3 * width, width)
            shapes[f"{name}.self_attn.in_proj_bias"] = (3 * width,)
            shapes |= list_linear(f"{name}.self_attn.out_proj", width, width)
            shapes |= list_linear(f"{name}.linear1", width, inner)
            shapes |= list_linear(f"{name}.linear2", inner, width)
            shapes |= list_norm(f"{name}.norm1", width) | list_norm(f"{name}.norm2", width)
        return shapes | list_norm("core.norm", width)

    def get_width(self, model: Model, signature: Signature) -> int:
        return model.sizes[0]

    def count_constant_products(self, model: Model, signature: Signature, tokens: int) -> int:
        # scores of all pairs of tokens, and their sums
        return 2 * tokens**2 * sum(model.sizes)

    def encode(self, weights: Weights, model: Model, inputs: Array) -> Array:
        tokens = apply_linear(weights, "core.embed", to_patches(inputs, model.patch))
        positions = weights.get(POSITIONS)
        tokens = tokens + (make_positions(*tokens.shape[::2]) if positions is None else positions)
        for depth in range(len(model.sizes)):
            name = f"core.layers.{depth}"
            normal = normalize_layer(weights, f"{name}.norm1", tokens)
            tokens = tokens + attend(weights, f"{name}.self_attn", normal, model.heads)
            normal = normalize_layer(weights, f"{name}.norm2", tokens)
            inner = gelu(apply_linear(weights, f"{name}.linear1", normal))
            tokens = tokens + apply_linear(weights, f"{name}.linear2", inner)
        return normalize_layer(weights, "core.norm", tokens)

    def add_to_graph(self, network: OnnxNetwork, rows: str) -> str:
        graph, model, context = network.graph, network.model, network.signature.context
        tokens = network.to_patches(rows)
        table = network.weights.get(POSITIONS)
        if table is None:
            table = make_positions(context // model.patch, model.sizes[0])
        tokens = graph.add("Add", network.linear(tokens, "embed"), graph.constant(table))
        for depth in range(len(model.sizes)):
            where = f"layers.{depth}"
            inner = _add_attention(network, depth, network.normalize(tokens, f"{where}.norm1"))
            tokens = graph.add("Add", tokens, inner)
            inner = network.linear(network.normalize(tokens, f"{where}.norm2"), f"{where}.linear1")
            inner = network.linear(network.apply_activation(inner, "gelu"), f"{where}.linear2")
            tokens = graph.add("Add", tokens, inner)
        return network.normalize(tokens, "norm")

    def describe_c(self, shape: NetworkShape) -> CLayers:
        width, heads = shape.width, shape.model.heads
        inner = width * shape.model.expansion
        numbers = shape.tokens * width
        return CLayers(
            defines={"HEADS": heads, "HEAD": width // heads, "INNER": inner},
            work={
                **dict.fromkeys(("tokens", "keys", "values"), numbers),
                **dict.fromkeys(("normed", "out", "mixed"), width),
                "inner": inner,
                "scores": shape.tokens,
            },
            values={
                "sqrt_half": format_float(math.sqrt(0.5)),
                "attention_scale": format_float(1 / math.sqrt(width // heads)),
            },
        )

    def add_c_weights(
        self, arrays: ConstArrays, shape: NetworkShape, read: Callable[..., Any], prefix: str
    ) -> list[str]:
        width = shape.width
        embed = arrays.add_dense(f"{prefix}_embed", read("embed.weight"), read("embed.bias"))
        if shape.model.positions == "learned":
            positions = arrays.add_floats(f"{prefix}_positions", read("positions"))
        else:  # the same in every network
            table = read("positions", make_positions(shape.tokens, width))
            positions = arrays.add_shared("positions", table)
        arrays.num_bytes += POINTER_BYTES
        layers = []
        for depth in range(len(shape.sizes)):
            name, source = f"{prefix}_layer{depth}", f"layers.{depth}"
            parts = [arrays.add_norm(f"{name}_norm{i}", read, f"{source}.norm{i}") for i in (1, 2)]
            weights = read(f"{source}.self_attn.in_proj_weight")
            biases = read(f"{source}.self_attn.in_proj_bias")
            for i, part in enumerate(("query", "key", "value")):
                rows = slice(i * width, (i + 1) * width)
                parts.append(arrays.add_dense(f"{name}_{part}", weights[rows], biases[rows]))
            for part in ("self_attn.out_proj", "linear1", "linear2"):
                weight, bias = read(f"{source}.{part}.weight"), read(f"{source}.{part}.bias")
                short = part.rpartition(".")[2]
                parts.append(arrays.add_dense(f"{name}_{short}", weight, bias))
            layers.append("{" + ", ".join(parts) + "}")
        last = arrays.add_norm(f"{prefix}_norm", read, "norm")
        return [embed, positions, "{" + ", ".join(layers) + "}", last]


def attend(weights: Weights, name: str, tokens: Array, heads: int) -> Array:
    """Return the multi-head attention of a sequence [T, B, D] to itself."""
    time, batch, width = tokens.shape
    joined = tokens @ weights[f"{name}.in_proj_weight"].T + weights[f"{name}.in_proj_bias"]
    split = joined.reshape(time, batch, 3, heads, width // heads).transpose(2, 1, 3, 0, 4)
    q, k, v = split[0], split[1], split[2]
    scores = (q * np.float32(1 / math.sqrt(width // heads))) @ k.swapaxes(-1, -2)
    mixed = softmax(scores) @ v
    joined = mixed.transpose(2, 0, 1, 3).reshape(time, batch, width)
    return apply_linear(weights, f"{name}.out_proj", joined)


def make_positions(tokens: int, width: int) -> Array:
    """Return a table [tokens, 1, width] of sines and cosines of falling frequency."""
    powers = np.arange(0, width, 2, dtype=np.float32) * np.float32(-math.log(10_000.0))
    rates = np.exp(powers / np.float32(width))
    angles = np.arange(tokens, dtype=np.float32)[:, None] * rates
    table = np.zeros((tokens, 1, width), dtype=np.float32)
    table[:, 0, 0::2] = np.sin(angles)
    table[:, 0, 1::2] = np.cos(angles)[:, : width // 2]
    return table


def _add_attention(network: OnnxNetwork, depth: int, tokens: str) -> str:
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
