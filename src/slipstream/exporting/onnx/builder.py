"""Nodes and constants of an ONNX graph, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

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
        """Add a constant; of equal ones, there is one."""
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
        """Reshape; 0 stands for the dimension at that place, -1 for what is left."""
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
