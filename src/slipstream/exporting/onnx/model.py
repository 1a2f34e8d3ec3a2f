"""The whole graph of a run: every network, their mean, and intervals, in physical units.

Shapes: B windows, T rows, H predicted rows, C targets, Q quantiles or classes, L levels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, checker, helper

from slipstream import __version__
from slipstream.config import Signature
from slipstream.data.scaler import Scaler
from slipstream.exporting.interface import Interface, make_interface
from slipstream.exporting.onnx.builder import ELEMENTS, GraphBuilder
from slipstream.exporting.onnx.layers import Network
from slipstream.exporting.onnx.window import (
    Scaled,
    clamp,
    predict_window,
    scale,
    sort_quantiles,
)
from slipstream.portable.model import PortableModel, PortableRun
from slipstream.stats import find_median

OPSET, IR_VERSION = 17, 8
"""Of 2022: current browsers, MATLAB and onnxruntime since 1.13 read them"""


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


def list_networks(graph: GraphBuilder, run: PortableRun) -> list[tuple[PortableModel, Network]]:
    """Return each of these networks, to be added to the graph."""
    models = list_models(run)
    prefixes = [f"{number}/" for number in range(len(models))] if len(models) > 1 else [""]
    return [
        (model, Network(graph, model.config.model, model.signature, model.weights, prefix))
        for model, prefix in zip(models, prefixes, strict=True)
    ]


class InputReader:
    """Selects and scales what each network reads; equal scalings are computed once."""

    def __init__(self, graph: GraphBuilder, interface: Interface) -> None:
        self._graph, self._interface = graph, interface
        self._scaled: dict[tuple[Any, ...], str] = {}

    def read(self, model: PortableModel) -> Scaled:
        """Return the rows [T, B, F] and the numbers beside them [B, K] of one network."""
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
        sizes = tuple((scaler.shift[one], scaler.size[one]) for one in columns)
        key = (name, tuple(columns), sizes)
        if key not in self._scaled:
            value = name
            if tuple(columns) != tuple(available):
                places = self._graph.integers(*(available.index(one) for one in columns))
                value = self._graph.add("Gather", value, places, axis=-1)
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
    widths = np.stack([(run.half_widths or {})[one] for one in interface.levels], axis=-1)
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
    shares = [graph.constant(np.array(one, dtype=dtype)) for one in (1 - share, share)]
    return graph.add("Add", *map(partial(graph.add, "Mul"), (below, above), shares))


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
    for share, value in zip(_list_shares(run), logits, strict=True):
        part = graph.add("Softmax", graph.reshape(value, *shape), axis=-1)
        if len(logits) > 1:
            part = graph.add("Mul", part, graph.constant(np.float32(share)))
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
    for model, share, value in zip(models, _list_shares(run), predictions, strict=True):
        value = clamp(graph, value, model.signature, model.scaler)
        value = _convert(graph, value, model, run)
        parts.append(graph.add("Mul", value, graph.constant(np.float32(share))))
    return parts[0] if len(parts) == 1 else graph.add("Sum", *parts)


def _list_shares(run: PortableRun) -> list[float]:
    """Return the share of each network in the mean."""
    return [
        weight / len(member.models)
        for member, weight in zip(run.members, run.weights, strict=True)
        for _ in member.models
        if weight
    ]


def _convert(graph: GraphBuilder, value: str, model: PortableModel, run: PortableRun) -> str:
    """Bring predictions [B, H, C, Q] to the targets, quantiles and scaling of the reference."""
    own, joint, scaler = model.signature, run.signature, run.first.scaler
    if own.quantiles != joint.quantiles:
        value = _select_median(graph, value, own, "float32")
    if own.targets != joint.targets:
        order = graph.integers(*(own.targets.index(name) for name in joint.targets))
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

    def declare(one: Shape) -> Any:
        return helper.make_tensor_value_info(one.name, ELEMENTS[np.dtype(one.dtype)], one.dims)

    proto = helper.make_graph(
        graph.nodes,
        "slipstream",
        [declare(one) for one in inputs],
        [declare(one) for one in outputs],
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
