"""MLP and linear models without torch; `models/mlp.py` has the PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.config import Model, Signature
from slipstream.models.c_code import CLayers, ConstArrays, NetworkShape
from slipstream.models.kinds import Axis, Kind
from slipstream.models.numpy_layers import (
    ACTIVATIONS,
    Array,
    Shape,
    Weights,
    apply_linear,
    flatten_rows,
    list_linear,
)

if TYPE_CHECKING:
    from slipstream.models.onnx_graph import OnnxNetwork

C_ACTIVATIONS = {
    "relu": "x < 0.0f ? 0.0f : x",
    "gelu": "0.5f * x * (1.0f + erff(x * 0.70710678f))",
    "silu": "x / (1.0f + expf(-x))",
    "elu": "x > 0.0f ? x : expm1f(x)",
    "leaky_relu": "x > 0.0f ? x : 0.01f * x",
    "tanh": "tanhf(x)",
}


def name_layer(depth: int) -> str:
    """Return the name of a hidden layer: of linear, activation and dropout, the first has
    weights."""
    return f"body.{3 * depth}"


class FeedForwardKind(Kind):
    """Hidden layers over the flattened window; a linear model has none."""

    c_template = "flat"

    def list_sizes(self, model: Model) -> tuple[int, ...]:
        """Return the width of each hidden layer."""
        return model.sizes if model.spec.has_hidden else ()

    def list_shapes(self, model: Model, signature: Signature) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        width = signature.context * signature.model_inputs
        for depth, size in enumerate(self.list_sizes(model)):
            shapes |= list_linear(f"core.{name_layer(depth)}", width, size)
            width = size
        return shapes

    def get_width(self, model: Model, signature: Signature) -> int:
        sizes = self.list_sizes(model)
        return sizes[-1] if sizes else signature.context * signature.model_inputs

    def get_unit_axes(self, name: Sequence[str], model: Model) -> tuple[Axis, ...]:
        layer = int(name[1]) // 3
        return (layer, 1), (layer - 1, 1) if layer else None

    def encode(self, weights: Weights, model: Model, inputs: Array) -> Array:
        hidden = flatten_rows(inputs)
        for depth in range(len(self.list_sizes(model))):
            product = apply_linear(weights, f"core.{name_layer(depth)}", hidden)
            hidden = ACTIVATIONS[model.activation](product)
        return hidden

    def add_to_graph(self, network: OnnxNetwork, rows: str) -> str:
        model, hidden = network.model, network.flatten_time(rows)
        for depth in range(len(self.list_sizes(model))):
            product = network.linear(hidden, name_layer(depth))
            hidden = network.apply_activation(product, model.activation)
        return hidden

    def describe_c(self, shape: NetworkShape) -> CLayers:
        hidden = shape.widest * min(len(shape.sizes), 2)
        return CLayers(
            work={"hidden": hidden} if hidden else {},
            values={"activation": C_ACTIVATIONS[shape.model.activation]},
        )

    def add_c_weights(
        self, arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
    ) -> list[str]:
        layers = []
        for depth in range(len(shape.sizes)):
            weight, bias = (read(f"{name_layer(depth)}.{end}") for end in ("weight", "bias"))
            layers.append(arrays.add_dense(f"{prefix}_layer{depth}", weight, bias))
        return ["{" + ", ".join(layers) + "}"] if layers else []
