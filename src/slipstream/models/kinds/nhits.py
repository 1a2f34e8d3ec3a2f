"""N-HiTS without torch; `models/nhits.py` has the PyTorch module.

Shapes: B sequences, F inputs, T context rows, N coefficients, D width of the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import Model, Signature
from slipstream.models.c_code import LANES, CLayers, ConstArrays, NetworkShape, format_integers
from slipstream.models.kinds import Axis, Kind
from slipstream.models.kinds.mlp import C_ACTIVATIONS
from slipstream.models.numpy_layers import (
    ACTIVATIONS,
    Array,
    Shape,
    Weights,
    apply_head,
    apply_linear,
    list_linear,
)

if TYPE_CHECKING:
    from slipstream.models.onnx_graph import OnnxNetwork

RATE_RATIO = 4
"""How many times coarser a stack is than the one after it"""
MAX_INT32 = 2**31 - 1


def list_rates(model: Model) -> list[int]:
    """Return the rows per group and coefficient of each stack: the coarsest first, 1 last."""
    return [RATE_RATIO**power for power in reversed(range(model.stacks))]


def count_groups(rows: int, rate: int) -> int:
    """Return how many groups of `rate` rows there are, or coefficients for so many rows."""
    return -(-rows // rate)


def make_interpolation(count: int, rows: int) -> Array:
    """Return the table [count, rows] that interpolates `count` values linearly, each at the centre
    of its share of the rows; before the first centre and after the last, the value is constant."""
    centred = (2 * np.arange(rows) + 1) * count - rows
    place = (centred / (2 * rows)).clip(0, count - 1)
    table = np.maximum(1 - np.abs(place - np.arange(count)[:, None]), 0)
    return np.asarray(table, dtype=np.float32)


def pool_rows(rows: Array, rate: int) -> Array:
    """Return the mean of each group of `rate` rows, [B, F, T] to [B, F, T / rate]; rows that the
    first group lacks count as zero."""
    rate = min(rate, rows.shape[-1])
    missing = -rows.shape[-1] % rate
    padded = np.pad(rows, ((0, 0), (0, 0), (missing, 0))) if missing else rows
    return np.asarray(padded.reshape(*rows.shape[:2], -1, rate).mean(axis=-1))


class NHiTSKind(Kind):
    """Stacks of MLPs over the pooled window; each but the last also has a backcast and a forecast
    of few coefficients. The head is the forecast of the last one."""

    c_template = "nhits"

    def list_shapes(self, model: Model, signature: Signature) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        inputs = signature.model_inputs
        for number, rate in enumerate(list_rates(model)):
            width = count_groups(signature.context, rate) * inputs
            for depth, size in enumerate(model.sizes):
                shapes |= list_linear(f"core.stacks.{number}.layers.{depth}", width, size)
                width = size
        for number, (backcast, forecast) in enumerate(self._count_coefficients(model, signature)):
            shapes |= list_linear(f"core.coarse.{number}.backcast", width, backcast * inputs)
            outputs = forecast * signature.model_targets * signature.outputs
            shapes |= list_linear(f"core.coarse.{number}.forecast", width, outputs)
        return shapes

    def get_width(self, model: Model, signature: Signature) -> int:
        return model.sizes[-1]

    def get_unit_axes(self, name: Sequence[str], model: Model) -> tuple[Axis, ...]:
        if name[0] == "coarse":
            return None, (len(model.sizes) - 1, 1)
        layer = int(name[3])
        return (layer, 1), (layer - 1, 1) if layer else None

    def count_constant_products(self, model: Model, signature: Signature, tokens: int) -> int:
        outputs = signature.model_targets * signature.outputs
        return sum(
            backcast * signature.context * signature.model_inputs
            + forecast * signature.steps_out * outputs
            for backcast, forecast in self._count_coefficients(model, signature)
        )

    def encode(self, weights: Weights, model: Model, inputs: Array) -> Array:
        """Return the features of the last stack, then the coefficients of the other forecasts."""
        rows = np.ascontiguousarray(inputs.transpose(1, 2, 0))  # [B, F, T]
        forecasts = []
        for number, rate in enumerate(list_rates(model)):
            hidden = pool_rows(rows, rate).reshape(len(rows), -1)
            for depth in range(len(model.sizes)):
                product = apply_linear(weights, f"core.stacks.{number}.layers.{depth}", hidden)
                hidden = ACTIVATIONS[model.activation](product)
            if number < model.stacks - 1:
                backcast = apply_linear(weights, f"core.coarse.{number}.backcast", hidden)
                by_column = backcast.reshape(*rows.shape[:2], -1)
                rows = rows - by_column @ make_interpolation(by_column.shape[-1], rows.shape[-1])
                forecasts.append(apply_linear(weights, f"core.coarse.{number}.forecast", hidden))
        return np.concatenate([hidden, *forecasts], axis=-1)

    def apply_head(
        self,
        weights: Weights,
        model: Model,
        signature: Signature,
        features: Array,
        static: Array | None,
    ) -> Array:
        out = apply_head(weights, signature, features[:, : model.sizes[-1]], static)
        for begin, end, count in self._split_features(model, signature):
            by_output = features[:, begin:end].reshape(len(out), -1, count)
            forecast = by_output @ make_interpolation(count, signature.steps_out)
            out = out + forecast.swapaxes(1, 2).reshape(out.shape)
        return out

    def add_to_graph(self, network: OnnxNetwork, rows: str) -> str:
        graph, model, signature = network.graph, network.model, network.signature
        rows = graph.transpose(rows, 1, 2, 0)  # [B, F, T]
        forecasts = []
        counts = self._count_coefficients(model, signature)
        for number, rate in enumerate(list_rates(model)):
            hidden = graph.reshape(_add_pool(network, rows, rate), 0, -1)
            for depth in range(len(model.sizes)):
                product = network.linear(hidden, f"stacks.{number}.layers.{depth}")
                hidden = network.apply_activation(product, model.activation)
            if number < model.stacks - 1:
                backcast = network.linear(hidden, f"coarse.{number}.backcast")
                by_column = graph.reshape(backcast, 0, signature.model_inputs, -1)
                table = make_interpolation(next(counts)[0], signature.context)
                filled = graph.add("MatMul", by_column, graph.constant(table))
                rows = graph.add("Sub", rows, filled)
                forecasts.append(network.linear(hidden, f"coarse.{number}.forecast"))
        return graph.concatenate(hidden, *forecasts, axis=-1)

    def add_head_to_graph(self, network: OnnxNetwork, features: str, static: str | None) -> str:
        graph, model, signature = network.graph, network.model, network.signature
        hidden = features
        if model.stacks > 1:
            hidden = graph.slice(features, 0, model.sizes[-1], axis=1)
        out = network.apply_head(hidden, static)
        for begin, end, count in self._split_features(model, signature):
            flat = graph.slice(features, begin, end, axis=1)
            by_output = graph.reshape(flat, 0, -1, count)
            table = graph.constant(make_interpolation(count, signature.steps_out))
            forecast = graph.transpose(graph.add("MatMul", by_output, table), 0, 2, 1)
            out = graph.add("Add", out, graph.reshape(forecast, 0, -1))
        return out

    def describe_c(self, shape: NetworkShape) -> CLayers:
        signature, rates = shape.signature, list_rates(shape.model)
        features, outputs = signature.model_inputs, signature.model_targets * signature.outputs
        counts = list(self._count_coefficients(shape.model, signature))
        work = {
            "hidden": shape.widest * min(len(shape.sizes), 2),
            "pooled": shape.rows_at_once * features,
        }
        if counts:
            backcasts = sum(backcast for backcast, _ in counts) * features
            forecast = max(forecast for _, forecast in counts) * outputs
            # as long as a block of a product, or compilers warn
            work |= {"backcasts": max(backcasts, LANES), "forecast": max(forecast, LANES)}
        longest = max(signature.context, signature.steps_out)
        return CLayers(
            defines={"STACKS": len(rates)},
            work=work,
            values={
                "activation": C_ACTIVATIONS[shape.model.activation],
                "stacks": len(rates),
                "rates": format_integers(rates),
                # of a place between two coefficients, in halves of rows
                "place_type": "int32_t" if 2 * longest * longest < MAX_INT32 else "int64_t",
            },
            num_bytes=4 * len(rates),
        )

    def add_c_weights(
        self, arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
    ) -> list[str]:
        def add(name: str, source: str, weight: Any = None) -> str:
            matrix = read(f"{source}.weight") if weight is None else weight
            return arrays.add_dense(f"{prefix}_{name}", matrix, read(f"{source}.bias"))

        features = shape.signature.model_inputs
        stacks = []
        for number in range(shape.model.stacks):
            layers = []
            for depth in range(len(shape.sizes)):
                source = f"stacks.{number}.layers.{depth}"
                weight = read(f"{source}.weight")
                if depth == 0:  # the C code pools row after row, with all columns of each
                    by_column = weight.reshape(len(weight), features, -1)
                    weight = by_column.transpose(0, 2, 1).reshape(len(weight), -1)
                layers.append(add(f"stack{number}_layer{depth}", source, weight))
            stacks.append("{" + ", ".join(layers) + "}")
        members = ["{" + ", ".join(stacks) + "}"]
        for part in ("backcast", "forecast") if shape.model.stacks > 1 else ():
            coarse = range(shape.model.stacks - 1)
            parts = [add(f"{part}{number}", f"coarse.{number}.{part}") for number in coarse]
            members.append("{" + ", ".join(parts) + "}")
        return members

    def _count_coefficients(self, model: Model, signature: Signature) -> Iterator[tuple[int, int]]:
        """Yield the number of coefficients of each backcast and forecast, of every stack but the
        last, for one column."""
        for rate in list_rates(model)[:-1]:
            yield count_groups(signature.context, rate), count_groups(signature.steps_out, rate)

    def _split_features(self, model: Model, signature: Signature) -> Iterator[tuple[int, int, int]]:
        """Yield where the coefficients of each forecast begin and end in what `encode` returns, and
        how many belong to one output."""
        end = model.sizes[-1]
        for _, count in self._count_coefficients(model, signature):
            begin, end = end, end + count * signature.model_targets * signature.outputs
            yield begin, end, count


def _add_pool(network: OnnxNetwork, rows: str, rate: int) -> str:
    """Add the mean of each group of rows [B, F, T], as `pool_rows`."""
    graph, context = network.graph, network.signature.context
    rate = min(rate, context)
    if rate == 1:
        return rows
    if missing := -context % rate:
        rows = graph.add("Pad", rows, graph.integers(0, 0, missing, 0, 0, 0))
    groups = graph.reshape(rows, 0, 0, count_groups(context, rate), rate)
    return graph.add("ReduceMean", groups, axes=[3], keepdims=0)
