"""Builds ONNX graphs: nodes, constants and the layers that several networks share.

Only exports import this module, since onnx is an extra; `exporting/onnx` makes whole models of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from slipstream.config import Model, Signature
from slipstream.models.numpy_layers import LEAK, NORM_EPSILON

Array = npt.NDArray[Any]
ELEMENTS = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float64): TensorProto.DOUBLE,
    np.dtype(np.int64): TensorProto.INT64,
}


class GraphBuilder:
    """Collects nodes; every method that adds one returns the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._counts: dict[str, int] = {}

    def add(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node with one result."""
        return self.add_many(kind, *inputs, names=[name or self._make_name(kind)], **attributes)[0]

    def add_many(
        self, kind: str, *inputs: str, names: Sequence[str], **attributes: Any
    ) -> Sequence[str]:
        """Add a node with several results, of these names; an empty one is not used."""
        label = next(filter(None, names))
        self.nodes.append(helper.make_node(kind, inputs, names, name=label, **attributes))
        return names

    def reserve(self, kind: str) -> str:
        """Return a name that no other result has."""
        return self._make_name(kind)

    def constant(self, values: Any, name: str = "") -> str:
        """Add a constant and return its name; equal constants share one name."""
        array = np.ascontiguousarray(values).reshape(np.shape(values))
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self._names:
            name = name or self._make_name("constant")
            self._names[key] = name
            self.constants[name] = numpy_helper.from_array(array, name)
        return self._names[key]

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def cast(self, value: str, dtype: Any) -> str:
        return self.add("Cast", value, to=ELEMENTS[np.dtype(dtype)])

    def reshape(self, value: str, *shape: int) -> str:
        """Reshape a tensor; 0 keeps the dimension at that position, -1 takes what is left."""
        return self.add("Reshape", value, self.integers(*shape))

    def transpose(self, value: str, *order: int) -> str:
        return self.add("Transpose", value, perm=list(order))

    def slice(self, value: str, begin: int, end: int, *, axis: int) -> str:
        parts = (self.integers(begin), self.integers(end), self.integers(axis))
        return self.add("Slice", value, *parts)

    def take(self, value: str, index: int, *, axis: int) -> str:
        """Return one entry along an axis, without the axis."""
        return self.add("Gather", value, self.constant(np.int64(index)), axis=axis)

    def unsqueeze(self, value: str, axis: int) -> str:
        return self.add("Unsqueeze", value, self.integers(axis))

    def squeeze(self, value: str, axis: int) -> str:
        return self.add("Squeeze", value, self.integers(axis))

    def concatenate(self, *values: str, axis: int) -> str:
        return values[0] if len(values) == 1 else self.add("Concat", *values, axis=axis)

    def linear(self, value: str, weight: Array, bias: Array, name: str = "") -> str:
        """Apply weight [N, D] and bias [N] along the last axis."""
        matrix = self.constant(weight.T, f"{name}.weight" if name else "")
        shift = self.constant(bias, f"{name}.bias" if name else "")
        return self.add("Add", self.add("MatMul", value, matrix), shift)

    def _make_name(self, kind: str) -> str:
        number = self._counts[kind] = self._counts.get(kind, -1) + 1
        return f"{kind.lower()}_{number}"


class OnnxNetwork(NamedTuple):
    """One trained network, and the graph that it becomes a part of."""

    graph: GraphBuilder
    model: Model
    signature: Signature
    weights: Mapping[str, npt.NDArray[np.float32]]
    prefix: str = ""
    """The prefix of the names of the network's weights in the graph"""

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
                unit, half, root = (
                    self.graph.constant(np.float32(x)) for x in (1, 0.5, math.sqrt(0.5))
                )
                error = add("Erf", add("Mul", value, root))
                return add("Mul", add("Mul", value, half), add("Add", error, unit))
            case "silu":
                return add("Mul", value, add("Sigmoid", value))
            case "elu":
                return add("Elu", value, alpha=1.0)
            case "leaky_relu":
                return add("LeakyRelu", value, alpha=float(LEAK))
            case "tanh":
                return add("Tanh", value)
        raise AssertionError(kind)

    def to_patches(self, rows: str) -> str:
        """Return tokens of `patch` rows each: [T, B, F] to [T / patch, B, patch * F]."""
        graph, patch = self.graph, self.model.patch
        if patch == 1:
            return rows
        flat = graph.reshape(
            graph.transpose(rows, 1, 0, 2), 0, -1, patch * self.signature.model_inputs
        )
        return graph.transpose(flat, 1, 0, 2)

    def flatten_time(self, sequence: str) -> str:
        """Return the rows of each sequence as one: [T, B, D] to [B, T * D], where T is the
        context."""
        return self.graph.reshape(self.graph.transpose(sequence, 1, 0, 2), 0, -1)

    def apply_head(self, features: str, static: str | None) -> str:
        """Return the outputs of each sequence, flat, from features [S, D] and static [S, K]."""
        graph = self.graph
        joined = features if static is None else graph.concatenate(features, static, axis=-1)
        out = self.linear(joined, "head.linear")
        if static is not None and self.has("head.ahead.out"):
            out = graph.add("Add", out, self._decode_rows_ahead(features, static))
        return out

    def _decode_rows_ahead(self, features: str, static: str) -> str:
        """Return the contribution of each row that is known ahead to the outputs, flat."""
        graph, signature = self.graph, self.signature
        (rows, columns), width = signature.future_shape, signature.static_width
        fixed = width - rows * columns
        future = graph.reshape(graph.slice(static, fixed, width, axis=1), 0, rows, columns)
        if fixed:
            features = graph.concatenate(features, graph.slice(static, 0, fixed, axis=1), axis=-1)
        window = graph.unsqueeze(self.linear(features, "head.ahead.window"), 1)
        row = self.linear(future, "head.ahead.row")
        hidden = graph.add("Relu", graph.add("Add", row, window))
        return graph.reshape(self.linear(hidden, "head.ahead.out"), 0, -1)
