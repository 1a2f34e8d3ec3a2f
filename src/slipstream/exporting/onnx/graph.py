"""The ONNX graph of a model: a window at a time, or row after row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, checker, helper

from slipstream import __version__
from slipstream.base.statistics import find_median
from slipstream.config import Signature
from slipstream.data.scaler import Scaler, scale_limits
from slipstream.exporting.formats import Interface, make_interface
from slipstream.inference.networks import explain_no_steps
from slipstream.inference.portable import PortableModel, PortableRun
from slipstream.models.kinds import GraphState, load_kind
from slipstream.models.numpy_layers import SMALLEST_VARIANCE
from slipstream.models.onnx_graph import ELEMENTS, GraphBuilder, OnnxNetwork


class Scaled(NamedTuple):
    """The inputs of a network: rows [T, S, F], and static and future numbers [S, K], if any."""

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
    num_shared = len(signature.inputs) - count
    rows = graph.reshape(graph.slice(inputs.rows, num_shared, num_shared + count, axis=2), 0, -1, 1)
    if num_shared:
        shared = graph.unsqueeze(graph.slice(inputs.rows, 0, num_shared, axis=2), 2)
        shared = graph.add("Tile", shared, graph.integers(1, 1, count, 1))
        rows = graph.concatenate(graph.reshape(shared, 0, -1, num_shared), rows, axis=2)
    static = inputs.static
    if static is not None:
        tiled = graph.add("Tile", graph.unsqueeze(static, 1), graph.integers(1, count, 1))
        static = graph.reshape(tiled, -1, signature.static_width)
    return Scaled(rows, static)


def predict_window(network: OnnxNetwork, inputs: Scaled) -> str:
    """Turn scaled rows [T, B, F] into scaled predictions [B, H, C, Q], or logits."""
    graph, signature = network.graph, network.signature
    rows, static = split_channels(graph, inputs, signature)
    rows, centre, spread = _normalize(network, rows)
    features = load_kind(network.model).add_to_graph(network, rows)
    if network.model.spec.is_sequential:
        features = _pool(network, features)
    out = predict_from(network, features, static)
    if centre is not None and signature.model_shared:
        out = _restore(network, out, centre, spread)
    return merge_channels(graph, out, signature)


def predict_from(network: OnnxNetwork, features: str, static: str | None) -> str:
    """Turn features [S, D] into predictions [S, H, targets of a sequence, Q]."""
    graph, signature = network.graph, network.signature
    out = load_kind(network.model).add_head_to_graph(network, features, static)
    return graph.reshape(out, -1, signature.steps_out, signature.model_targets, signature.outputs)


def merge_channels(graph: GraphBuilder, out: str, signature: Signature) -> str:
    """Turn [B * C, H, 1, Q] into [B, H, C, Q]."""
    count = signature.sequences_per_window
    if count == 1:
        return out
    by_channel = graph.reshape(out, -1, count, signature.steps_out, signature.outputs)
    return graph.transpose(by_channel, 0, 2, 1, 3)


def _normalize(network: OnnxNetwork, rows: str) -> tuple[str, str | None, str | None]:
    """Return the normalized rows, and the centre and the spread of each window."""
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
    smallest = graph.constant(np.float32(SMALLEST_VARIANCE))
    deviation = graph.add("Sqrt", graph.add("Add", variance, smallest))
    spread = _leave_out(graph, deviation, future, 1.0)
    mean = _leave_out(graph, mean, future, 0.0)
    away = graph.add("Sub", rows, mean) if future else away
    return graph.add("Div", away, spread), graph.add("Add", centre, mean), spread


def _leave_out(graph: GraphBuilder, by_column: str, count: int, value: float) -> str:
    """Replace the first `count` columns of [S, F], which are known ahead, by a constant."""
    if not count:
        return by_column
    further = graph.slice(by_column, count, np.iinfo(np.int32).max, axis=1)
    fill = graph.constant(np.array(value, dtype=np.float32))
    return graph.add("Pad", further, graph.integers(0, count, 0, 0), fill, mode="constant")


def _restore(network: OnnxNetwork, out: str, centre: str, spread: str | None) -> str:
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


def _pool(network: OnnxNetwork, tokens: str) -> str:
    """Pool tokens [T, S, D] into features [S, D]."""
    graph, model = network.graph, network.model
    match model.pool:
        case "attention":
            weight = graph.add("Softmax", network.linear(tokens, "pool.score"), axis=0)
            total = graph.add("Mul", weight, tokens)
            return graph.add("ReduceSum", total, graph.integers(0), keepdims=0)
        case "mean":
            return graph.add("ReduceMean", tokens, axes=[0], keepdims=0)
        case "flatten":
            return network.flatten_time(tokens)
    if not model.bidirectional:
        return graph.take(tokens, -1, axis=0)
    size = model.sizes[-1]  # the backward direction ends at the first token
    forward = graph.slice(graph.take(tokens, -1, axis=0), 0, size, axis=1)
    backward = graph.slice(graph.take(tokens, 0, axis=0), size, 2 * size, axis=1)
    return graph.concatenate(forward, backward, axis=-1)


def sort_quantiles(graph: GraphBuilder, out: str, signature: Signature) -> str:
    """Put the quantiles of predictions [B, H, C, Q] in order; a network may swap them."""
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


OPSET, IR_VERSION = 17, 8
"""Versions of 2022, which browsers, MATLAB and onnxruntime since 1.13 can read"""


class Shape(NamedTuple):
    """An input or an output of the graph."""

    name: str
    dtype: Any
    dims: Sequence[str | int]


def build_window_graph(run: PortableRun) -> ModelProto:
    """Return the graph from windows of physical rows to physical predictions."""
    interface, graph = make_interface(run), GraphBuilder()
    reader = InputReader(graph, interface)
    predictions = [
        predict_window(network, reader.read(model)) for model, network in list_networks(graph, run)
    ]
    results = finish(graph, run, interface, predictions)
    inputs = [
        Shape(name, np.dtype(interface.dtype), dims)
        for name, dims in interface.get_input_shapes().items()
    ]
    return to_model(graph, inputs, results, interface.describe() | {"model": run.description})


def list_models(run: PortableRun) -> list[PortableModel]:
    """List the networks of members that have a weight."""
    members = zip(run.members, run.weights, strict=True)
    return [model for member, weight in members if weight for model in member.models]


def list_networks(graph: GraphBuilder, run: PortableRun) -> list[tuple[PortableModel, OnnxNetwork]]:
    """Return each of these networks, to be added to the graph."""
    models = list_models(run)
    prefixes = [f"{number}/" for number in range(len(models))] if len(models) > 1 else [""]
    return [
        (model, OnnxNetwork(graph, model.config.model, model.signature, model.weights, prefix))
        for model, prefix in zip(models, prefixes, strict=True)
    ]


class InputReader:
    """Selects and scales the columns of each network; equal scalings are computed once."""

    def __init__(self, graph: GraphBuilder, interface: Interface) -> None:
        self._graph, self._interface = graph, interface
        self._scaled: dict[tuple[Any, ...], str] = {}

    def read(self, model: PortableModel) -> Scaled:
        """Return the rows [T, B, F] and the static and future numbers [B, K] of one network."""
        graph, interface, signature = self._graph, self._interface, model.signature
        rows = self._scale("rows", signature.inputs, interface.inputs, model.scaler)
        if signature.context < interface.context:
            rows = graph.slice(rows, -signature.context, np.iinfo(np.int32).max, axis=1)
        return Scaled(graph.transpose(rows, 1, 0, 2), self.read_static(model))

    def read_static(self, model: PortableModel) -> str | None:
        graph, interface, signature = self._graph, self._interface, model.signature
        parts = []
        if signature.static:
            parts.append(self._scale("static", signature.static, interface.static, model.scaler))
        ahead, columns = signature.future_shape
        if ahead:
            future = self._scale("future", signature.future, interface.future, model.scaler)
            parts.append(graph.reshape(future, 0, ahead * columns))
        return graph.concatenate(*parts, axis=-1) if parts else None

    def read_row(self, model: PortableModel) -> str:
        """Return one row [B, F]."""
        columns = self._interface.inputs
        return self._scale("row", model.signature.inputs, columns, model.scaler)

    def _scale(
        self, name: str, columns: Sequence[str], available: Sequence[str], scaler: Scaler
    ) -> str:
        sizes = tuple((scaler.shift[column], scaler.size[column]) for column in columns)
        key = (name, tuple(columns), sizes)
        if key not in self._scaled:
            value = name
            if tuple(columns) != tuple(available):
                positions = self._graph.integers(*(available.index(column) for column in columns))
                value = self._graph.add("Gather", value, positions, axis=-1)
            dtype = np.dtype(self._interface.dtype)
            self._scaled[key] = scale(self._graph, value, columns, scaler, dtype)
        return self._scaled[key]


def finish(
    graph: GraphBuilder, run: PortableRun, interface: Interface, predictions: Sequence[str]
) -> list[Shape]:
    """Average scaled predictions, and return the outputs of the graph in physical units."""
    signature, dtype = interface.signature, np.dtype(interface.dtype)
    if signature.classes:
        _average_classes(graph, run, predictions)
        return [
            Shape("probability", np.dtype(np.float32), interface.get_output_shape("probability"))
        ]
    scaler = run.first.scaler
    scaled = _average(graph, run, predictions)  # [B, H, C, Q]
    if dtype == np.float64:
        scaled = graph.cast(scaled, dtype)
    size, shift = (
        np.array([by[name] for name in signature.targets]) for by in (scaler.size, scaler.shift)
    )
    physical = graph.add("Mul", scaled, graph.constant(size[:, None].astype(dtype)))
    physical = graph.add("Add", physical, graph.constant(shift[:, None].astype(dtype)))
    _limit(
        graph,
        physical if signature.quantiles else graph.squeeze(physical, 3),
        interface,
        "prediction",
    )
    if interface.levels:
        _add_intervals(graph, run, interface)
    return [Shape(name, dtype, interface.get_output_shape(name)) for name in interface.outputs]


def _add_intervals(graph: GraphBuilder, run: PortableRun, interface: Interface) -> None:
    """Add `lower` and `upper` [B, H, C, L] around the limited prediction."""
    if interface.signature.quantiles:
        point = _select_median(graph, "prediction", interface.signature, interface.dtype)
    else:
        point = graph.unsqueeze("prediction", 3)
    widths = np.stack([(run.half_widths or {})[level] for level in interface.levels], axis=-1)
    reach = graph.constant(widths.astype(interface.dtype))
    for name, kind in (("lower", "Sub"), ("upper", "Add")):
        _limit(graph, graph.add(kind, point, reach), interface, name)


def _select_median(graph: GraphBuilder, value: str, signature: Signature, dtype: str) -> str:
    """Return the point prediction [B, H, C, 1] from quantiles [B, H, C, Q]."""
    low, high, share = find_median(signature.quantiles)
    below = graph.slice(value, low, low + 1, axis=3)
    if not share:
        return below
    above = graph.slice(value, high, high + 1, axis=3)
    factors = [graph.constant(np.array(factor, dtype=dtype)) for factor in (1 - share, share)]
    return graph.add("Add", *map(partial(graph.add, "Mul"), (below, above), factors))


def _limit(graph: GraphBuilder, value: str, interface: Interface, name: str) -> None:
    """Limit a physical output to `model.output_range` and give it its name."""
    limits = interface.signature.output_range
    if limits is None:
        graph.add("Identity", value, name=name)
        return
    edges = [graph.constant(np.array(edge, dtype=interface.dtype)) for edge in limits]
    graph.add("Clip", value, *edges, name=name)


def _average_classes(graph: GraphBuilder, run: PortableRun, logits: Sequence[str]) -> None:
    shape = (-1, run.signature.steps_out, len(run.signature.classes))
    parts = []
    for weight, value in zip(_list_weights(run), logits, strict=True):
        part = graph.add("Softmax", graph.reshape(value, *shape), axis=-1)
        if len(logits) > 1:
            part = graph.add("Mul", part, graph.constant(np.float32(weight)))
        parts.append(part)
    total = parts[0] if len(parts) == 1 else graph.add("Sum", *parts)
    graph.add("Identity", total, name="probability")


def _average(graph: GraphBuilder, run: PortableRun, predictions: Sequence[str]) -> str:
    """Return the weighted mean in the reference's scaling, each limited to its output range."""
    models = list_models(run)
    predictions = [
        sort_quantiles(graph, value, model.signature)
        for model, value in zip(models, predictions, strict=True)
    ]
    if len(models) == 1 and models[0] is run.first:
        return predictions[0]
    parts = []
    for model, weight, value in zip(models, _list_weights(run), predictions, strict=True):
        value = clamp(graph, value, model.signature, model.scaler)
        value = _convert(graph, value, model, run)
        parts.append(graph.add("Mul", value, graph.constant(np.float32(weight))))
    return parts[0] if len(parts) == 1 else graph.add("Sum", *parts)


def _list_weights(run: PortableRun) -> list[float]:
    """Return the weight of each network in the mean."""
    return [
        weight / len(member.models)
        for member, weight in zip(run.members, run.weights, strict=True)
        for _ in member.models
        if weight
    ]


def _convert(graph: GraphBuilder, value: str, model: PortableModel, run: PortableRun) -> str:
    """Bring predictions [B, H, C, Q] to the targets, quantiles and scaling of the reference."""
    signature, joint, scaler = model.signature, run.signature, run.first.scaler
    if signature.quantiles != joint.quantiles:
        value = _select_median(graph, value, signature, "float32")
    if signature.targets != joint.targets:
        order = graph.integers(*(signature.targets.index(name) for name in joint.targets))
        value = graph.add("Gather", value, order, axis=2)
    size = np.array([[model.scaler.size[n] / scaler.size[n]] for n in joint.targets])
    shift = np.array(
        [[(model.scaler.shift[n] - scaler.shift[n]) / scaler.size[n]] for n in joint.targets]
    )
    if (size == 1).all() and not shift.any():
        return value
    value = graph.add("Mul", value, graph.constant(size.astype(np.float32)))
    return graph.add("Add", value, graph.constant(shift.astype(np.float32)))


def to_model(
    graph: GraphBuilder,
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    metadata: Mapping[str, Any],
) -> ModelProto:
    """Return the graph as a model that is checked; metadata are JSON texts."""

    def declare(shape: Shape) -> Any:
        return helper.make_tensor_value_info(
            shape.name, ELEMENTS[np.dtype(shape.dtype)], shape.dims
        )

    proto = helper.make_graph(
        graph.nodes,
        "slipstream",
        [declare(shape) for shape in inputs],
        [declare(shape) for shape in outputs],
        list(graph.constants.values()),
    )
    model = helper.make_model(
        proto,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="slipstream",
        producer_version=__version__,
    )
    helper.set_model_props(model, {key: json.dumps(value) for key, value in metadata.items()})
    checker.check_model(model)
    return model


def explain_no_step_graph(run: PortableRun) -> str | None:
    """Return the reason why a run has no graph for single rows; None where it has one."""
    reasons = (explain_no_steps(member.first.config.model) for member in run.members)
    return next(filter(None, reasons), None)


def build_step_graph(run: PortableRun) -> ModelProto:
    """Return the graph from one physical row and states to predictions and states."""
    interface, graph = make_interface(run), GraphBuilder()
    reader = InputReader(graph, interface)
    sequences = "batch" if run.signature.sequences_per_window == 1 else "sequences"
    states: list[GraphState] = []
    predictions = []
    networks = list_networks(graph, run)
    for number, (model, network) in enumerate(networks):
        prefix = f"{number}_" if len(networks) > 1 else ""
        row = graph.unsqueeze(reader.read_row(model), 0)
        inputs = split_channels(graph, Scaled(row, reader.read_static(model)), model.signature)
        kind = load_kind(model.config.model)
        features = kind.add_step_to_graph(network, inputs.rows, prefix)
        out = predict_from(network, features, inputs.static)
        predictions.append(merge_channels(graph, out, model.signature))
        states += [
            state._replace(name=f"{prefix}{state.name}")
            for state in kind.list_graph_states(model.config.model)
        ]
    outputs = finish(graph, run, interface, predictions)
    dtype, shapes = np.dtype(interface.dtype), interface.get_input_shapes()
    inputs_ = [Shape("row", dtype, ["batch", len(interface.inputs)])]
    inputs_ += [Shape(name, dtype, dims) for name, dims in shapes.items() if name != "rows"]
    single = np.dtype(np.float32)
    for state in states:
        inputs_.append(Shape(f"state_{state.name}", single, [sequences, *state.shape]))
        outputs.append(Shape(f"new_state_{state.name}", single, [sequences, *state.shape]))
    metadata = interface.describe() | {
        "model": run.description,
        "states": {f"state_{state.name}": [sequences, *state.shape] for state in states},
    }
    return to_model(graph, inputs_, outputs, metadata)
