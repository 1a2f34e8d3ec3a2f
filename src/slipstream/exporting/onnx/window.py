"""From physical rows to scaled predictions: a network, and what lies around it in training.

Shapes: B windows, T rows, F inputs, K numbers beside them, H predicted rows, C targets, Q quantiles
or classes; S sequences, B or B * C with independent channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream.config import Signature
from slipstream.data.scaler import Scaler, scale_limits
from slipstream.exporting.onnx.builder import GraphBuilder
from slipstream.exporting.onnx.layers import Network, encode, flatten_time
from slipstream.portable.networks.windows import SMALLEST_VARIANCE


class Scaled(NamedTuple):
    """What a network reads: rows [T, S, F] and the numbers beside them [S, K], if any."""

    rows: str
    static: str | None


def scale(
    graph: GraphBuilder, value: str, columns: Sequence[str], scaler: Scaler, dtype: Any
) -> str:
    """Scale physical columns, which lie along the last axis, to float32."""
    shift, size = (np.array([by[name] for name in columns]) for by in (scaler.shift, scaler.size))
    if not shift.any() and (size == 1).all():
        return value if dtype == np.float32 else graph.cast(value, np.float32)
    high = shift.astype(dtype)
    value = graph.add("Sub", value, graph.constant(high))
    low = (shift - high).astype(dtype)
    if low.any():  # what float32 rounds off the shift would be an error of every row
        value = graph.add("Sub", value, graph.constant(low))
    value = graph.add("Div", value, graph.constant(size.astype(dtype)))
    return value if dtype == np.float32 else graph.cast(value, np.float32)


def split_channels(graph: GraphBuilder, inputs: Scaled, signature: Signature) -> Scaled:
    """Make one sequence of each independent channel: [T, B, F] to [T, B * C, F - C + 1]."""
    count = signature.sequences_per_window
    if count == 1:
        return inputs
    others = len(signature.inputs) - count
    own = graph.reshape(graph.slice(inputs.rows, others, others + count, axis=2), 0, -1, 1)
    if others:
        shared = graph.unsqueeze(graph.slice(inputs.rows, 0, others, axis=2), 2)
        shared = graph.add("Tile", shared, graph.integers(1, 1, count, 1))
        own = graph.concatenate(graph.reshape(shared, 0, -1, others), own, axis=2)
    static = inputs.static
    if static is not None:
        tiled = graph.add("Tile", graph.unsqueeze(static, 1), graph.integers(1, count, 1))
        static = graph.reshape(tiled, -1, signature.static_width)
    return Scaled(own, static)


def predict_window(network: Network, inputs: Scaled) -> str:
    """Scaled rows [T, B, F] to scaled predictions [B, H, C, Q], or logits."""
    graph, signature = network.graph, network.signature
    rows, static = split_channels(graph, inputs, signature)
    rows, centre, spread = _normalize(network, rows)
    if network.model.spec.is_sequential:
        features = _pool(network, encode(network, rows))
    else:
        features = _apply_hidden_layers(network, flatten_time(network, rows))
    out = predict_from(network, features, static)
    if centre is not None and signature.model_shared:
        out = _restore(network, out, centre, spread)
    return merge_channels(graph, out, signature)


def predict_from(network: Network, features: str, static: str | None) -> str:
    """Features [S, D] to predictions [S, H, targets of a sequence, Q]."""
    graph, signature = network.graph, network.signature
    joined = features if static is None else graph.concatenate(features, static, axis=-1)
    out = network.linear(joined, "head.linear")
    if static is not None and network.has("head.ahead.out"):
        out = graph.add("Add", out, _decode_rows_ahead(network, features, static))
    return graph.reshape(out, -1, signature.steps_out, signature.model_targets, signature.outputs)


def _decode_rows_ahead(network: Network, features: str, static: str) -> str:
    """What rows that are known ahead add to the outputs of each, flat."""
    graph, signature = network.graph, network.signature
    (rows, columns), width = signature.future_shape, signature.static_width
    fixed = width - rows * columns
    future = graph.reshape(graph.slice(static, fixed, width, axis=1), 0, rows, columns)
    if fixed:
        features = graph.concatenate(features, graph.slice(static, 0, fixed, axis=1), axis=-1)
    window = graph.unsqueeze(network.linear(features, "head.ahead.window"), 1)
    row = network.linear(future, "head.ahead.row")
    hidden = graph.add("Relu", graph.add("Add", row, window))
    return graph.reshape(network.linear(hidden, "head.ahead.out"), 0, -1)


def merge_channels(graph: GraphBuilder, out: str, signature: Signature) -> str:
    """[B * C, H, 1, Q] to [B, H, C, Q]."""
    count = signature.sequences_per_window
    if count == 1:
        return out
    by_channel = graph.reshape(out, -1, count, signature.steps_out, signature.outputs)
    return graph.transpose(by_channel, 0, 2, 1, 3)


def _normalize(network: Network, rows: str) -> tuple[str, str | None, str | None]:
    """Return the rows, and what was subtracted from each window and what it was divided by."""
    graph, kind, future = network.graph, network.model.normalize, len(network.signature.future)
    if kind == "none":
        return rows, None, None
    centre = _leave_out(graph, graph.take(rows, -1, axis=0), future, 0.0)
    rows = graph.add("Sub", rows, centre)
    if kind == "last":
        return rows, centre, None
    mean = graph.add("ReduceMean", rows, axes=[0], keepdims=0)  # of differences, as in PyTorch
    away = graph.add("Sub", rows, mean)
    variance = graph.add("ReduceMean", graph.add("Mul", away, away), axes=[0], keepdims=0)
    smallest = graph.constant(SMALLEST_VARIANCE)
    deviation = graph.add("Sqrt", graph.add("Add", variance, smallest))
    spread = _leave_out(graph, deviation, future, 1.0)
    mean = _leave_out(graph, mean, future, 0.0)
    away = graph.add("Sub", rows, mean) if future else away
    return graph.add("Div", away, spread), graph.add("Add", centre, mean), spread


def _leave_out(graph: GraphBuilder, by_column: str, count: int, value: float) -> str:
    """Set a value for the first columns of [S, F], those known ahead."""
    if not count:
        return by_column
    rest = graph.slice(by_column, count, np.iinfo(np.int32).max, axis=1)
    fill = graph.constant(np.array(value, dtype=np.float32))
    return graph.add("Pad", rest, graph.integers(0, count, 0, 0), fill, mode="constant")


def _restore(network: Network, out: str, centre: str, spread: str | None) -> str:
    """Undo the normalization of the targets that are inputs too."""
    graph, signature = network.graph, network.signature
    shared, targets, inputs = (
        signature.model_shared,
        signature.model_targets,
        signature.model_inputs,
    )

    def align(by_column: str) -> str:
        """[S, F] to [S, 1, shared, 1]"""
        return graph.reshape(
            graph.slice(by_column, inputs - shared, inputs, axis=1), -1, 1, shared, 1
        )

    restored = out if shared == targets else graph.slice(out, 0, shared, axis=2)
    if spread is not None:
        restored = graph.add("Mul", restored, align(spread))
    restored = graph.add("Add", restored, align(centre))
    if shared == targets:
        return restored
    return graph.concatenate(restored, graph.slice(out, shared, targets, axis=2), axis=2)


def _pool(network: Network, tokens: str) -> str:
    """Tokens [T, S, D] to features [S, D]."""
    graph, model = network.graph, network.model
    match model.pool:
        case "attention":
            weight = graph.add("Softmax", network.linear(tokens, "pool.score"), axis=0)
            total = graph.add("Mul", weight, tokens)
            return graph.add("ReduceSum", total, graph.integers(0), keepdims=0)
        case "mean":
            return graph.add("ReduceMean", tokens, axes=[0], keepdims=0)
        case "flatten":
            return flatten_time(network, tokens)
    if not model.bidirectional:
        return graph.take(tokens, -1, axis=0)
    size = model.sizes[-1]  # the backward direction ends at the first token
    forward = graph.slice(graph.take(tokens, -1, axis=0), 0, size, axis=1)
    backward = graph.slice(graph.take(tokens, 0, axis=0), size, 2 * size, axis=1)
    return graph.concatenate(forward, backward, axis=-1)


def _apply_hidden_layers(network: Network, hidden: str) -> str:
    """Apply the hidden layers of an mlp; a linear model has none."""
    model = network.model
    for depth in range(len(model.sizes) if model.spec.has_hidden else 0):
        hidden = network.linear(hidden, f"body.{3 * depth}")
        hidden = network.apply_activation(hidden, model.activation)
    return hidden


def sort_quantiles(graph: GraphBuilder, out: str, signature: Signature) -> str:
    """Put the quantiles of predictions [B, H, C, Q] in order, as those of a network need not be."""
    count = len(signature.quantiles)
    if count < 2:
        return out
    names = [graph.reserve("sorted"), graph.reserve("order")]
    return graph.add_many("TopK", out, graph.integers(count), names=names, axis=-1, largest=0)[0]


def clamp(graph: GraphBuilder, out: str, signature: Signature, scaler: Scaler) -> str:
    """Limit scaled predictions [B, H, C, Q] to `model.output_range`, rounded outwards."""
    if (limits := scale_limits(signature, scaler)) is None:
        return out
    low, high = map(graph.constant, limits)
    return graph.add("Min", graph.add("Max", out, low), high)
