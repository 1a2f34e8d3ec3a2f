"""Logistic regression without torch: the logistic baseline as a member of an ensemble.

`models/logistic.py` has the PyTorch module, `scoring/baselines.py` fits it. Shapes: T context rows,
B windows, F inputs, D features, H predicted rows, Q classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from slipstream.config import Model, Signature
from slipstream.models.c_code import CLayers, ConstArrays, NetworkShape
from slipstream.models.kinds import Kind
from slipstream.models.kinds.convolutions import add_c_classifier, add_classifier, classify
from slipstream.models.numpy_layers import Array, Shape, Weights

if TYPE_CHECKING:
    from slipstream.models.onnx_graph import OnnxNetwork

STATISTICS = ("mean", "deviation", "first", "last", "least", "most", "slope")
"""The statistics of each input that are features"""


def read_values(model: Model) -> int:
    """Return how many values of each input are features beside the statistics."""
    return cast(int, model.options["values"])


def count_features(values: int, inputs: int, static: int) -> int:
    """Return the number of features D; `static` numbers are beside the window."""
    return (len(STATISTICS) + values) * inputs + static


def list_bins(context: int, values: int) -> list[tuple[int, int]]:
    """Return the first row of each mean of neighbouring rows, and the row after its last."""
    return [
        (number * context // values, -(-(number + 1) * context // values))
        for number in range(values)
    ]


def make_pooling(context: int, values: int) -> npt.NDArray[np.float64]:
    """Return the table [T, values] of these means."""
    table = np.zeros((context, values))
    for number, (begin, end) in enumerate(list_bins(context, values)):
        table[begin:end, number] = 1 / (end - begin)
    return table


def make_slope(context: int) -> npt.NDArray[np.float64]:
    """Return the weight of each row in the slope, [T]."""
    time = np.arange(context) - (context - 1) / 2
    return np.asarray(time / max(float(np.square(time).sum()), 1.0), dtype=np.float64)


class LogisticKind(Kind):
    """A linear classifier on standardised features; all of them are in double precision."""

    c_template = "logistic"

    def list_shapes(self, model: Model, signature: Signature) -> dict[str, Shape]:
        count = self.get_width(model, signature)
        outputs = signature.steps_out * signature.model_targets * signature.outputs
        return {
            "core.mean": (count,),
            "core.size": (count,),
            "core.weights": (count + 1, outputs),
        }

    def get_width(self, model: Model, signature: Signature) -> int:
        values = read_values(model)
        return count_features(values, signature.model_inputs, signature.static_width)

    def encode(self, weights: Weights, model: Model, inputs: Array) -> Array:
        rows, values = inputs.astype(np.float64), read_values(model)
        slope = np.tensordot(make_slope(len(rows)), rows, 1)
        parts = [rows.mean(axis=0), rows.std(axis=0), rows[0], rows[-1]]
        parts += [rows.min(axis=0), rows.max(axis=0), slope]
        if values:
            pooled = rows.transpose(1, 2, 0) @ make_pooling(len(rows), values)
            parts.append(pooled.reshape(len(pooled), -1))
        return np.concatenate(parts, axis=1)

    def apply_head(
        self,
        weights: Weights,
        model: Model,
        signature: Signature,
        features: Array,
        static: Array | None,
    ) -> Array:
        joined = features if static is None else np.concatenate([features, static], axis=1)
        return classify(weights, joined)

    def add_to_graph(self, network: OnnxNetwork, rows: str) -> str:
        graph, context = network.graph, network.signature.context
        double, values = graph.cast(rows, np.float64), read_values(network.model)

        def reduce(kind: str, value: str) -> str:
            return graph.add(kind, value, axes=[0], keepdims=0)

        mean = reduce("ReduceMean", double)
        away = graph.add("Sub", double, mean)
        deviation = graph.add("Sqrt", reduce("ReduceMean", graph.add("Mul", away, away)))
        last_axis = graph.transpose(double, 1, 2, 0)  # [B, F, T]
        slope = graph.add("MatMul", last_axis, graph.constant(make_slope(context)))
        parts = [mean, deviation, graph.take(double, 0, axis=0), graph.take(double, -1, axis=0)]
        parts += [reduce("ReduceMin", double), reduce("ReduceMax", double), slope]
        if values:
            table = graph.constant(make_pooling(context, values))
            parts.append(graph.reshape(graph.add("MatMul", last_axis, table), 0, -1))
        return graph.concatenate(*parts, axis=1)

    def add_head_to_graph(self, network: OnnxNetwork, features: str, static: str | None) -> str:
        if static is not None:
            double = network.graph.cast(static, np.float64)
            features = network.graph.concatenate(features, double, axis=1)
        return add_classifier(network, features)

    def describe_c(self, shape: NetworkShape) -> CLayers:
        context = shape.signature.context
        squares = max(float(np.square(np.arange(context) - (context - 1) / 2).sum()), 1.0)
        return CLayers(
            defines={"VALUES": read_values(shape.model)},
            values={"values": read_values(shape.model), "time_squares": repr(squares)},
        )

    def add_c_weights(
        self, arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
    ) -> list[str]:
        return [
            *(arrays.add_floats(f"{prefix}_{name}", read(name)) for name in ("mean", "size")),
            add_c_classifier(arrays, read("weights"), prefix),
        ]
