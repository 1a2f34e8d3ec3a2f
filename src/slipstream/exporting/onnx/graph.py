"""The ONNX graph of a model: a window at a time, or row after row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper

from slipstream import __version__
from slipstream.base.statistics import find_median
from slipstream.config import Model, Signature
from slipstream.data.scaler import Scaler, scale_limits
from slipstream.exporting.interface import Interface, make_interface
from slipstream.inference.networks import SMALLEST_VARIANCE, explain_no_steps
from slipstream.inference.portable import PortableModel, PortableRun
from slipstream.models.numpy_networks import LEAK, NORM_EPSILON, make_positions

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


def explain_no_step_graph(run: PortableRun) -> str | None:
    """Say why a run has no graph of one row; None where it has one."""
    reasons = (explain_no_steps(member.first.config.model) for member in run.members)
    return next(filter(None, reasons), None)


class State(NamedTuple):
    """What a network carries from row to row; the graph's input and output are named by it."""

    name: str
    shape: tuple[int, ...]
    """Of one sequence"""


def list_states(model: Model, prefix: str) -> Iterator[State]:
    """List the states of a network, layer by layer."""
    for depth, size in enumerate(model.sizes):
        if model.kind == "tcn":
            rows = (model.kernel_size - 1) * 2**depth
            for name in ("conv1", "conv2") if rows else ():
                yield State(f"{prefix}{name}_{depth}", (size, rows))
        else:
            yield State(f"{prefix}h_{depth}", (size,))
            if model.kind == "lstm":
                yield State(f"{prefix}c_{depth}", (size,))


def build_step_graph(run: PortableRun) -> ModelProto:
    """Return the graph from one physical row and states to predictions and states."""
    interface, graph = make_interface(run), GraphBuilder()
    reader = InputReader(graph, interface)
    sequences = "batch" if run.signature.sequences_per_window == 1 else "sequences"
    states, predictions = [], []
    networks = list_networks(graph, run)
    for number, (model, network) in enumerate(networks):
        prefix = f"{number}_" if len(networks) > 1 else ""
        row = graph.unsqueeze(reader.read_row(model), 0)
        inputs = split_channels(graph, Scaled(row, reader.read_static(model)), model.signature)
        features = _advance(network, inputs.rows, prefix)
        out = predict_from(network, features, inputs.static)
        predictions.append(merge_channels(graph, out, model.signature))
        states += list(list_states(model.config.model, prefix))
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


def _advance(network: Network, row: str, prefix: str) -> str:
    """Read one row [1, S, F] and return the last layer's output [S, D]."""
    if network.model.kind == "tcn":
        return _advance_tcn(network, row, prefix)
    graph, model = network.graph, network.model
    names = ("h", "c") if model.kind == "lstm" else ("h",)
    for depth in range(len(model.sizes)):
        before = tuple(graph.unsqueeze(f"state_{prefix}{name}_{depth}", 0) for name in names)
        after = [graph.reserve(f"{model.kind}_{name}") for name in names]
        run_cell(network, depth, row, before, ["", *after])
        for name, value in zip(names, after, strict=True):
            new = f"new_state_{prefix}{name}_{depth}"
            graph.add("Squeeze", value, graph.integers(0), name=new)
        row = after[0]  # [1, S, D]: one direction is one row
        if model.layer_norm:
            row = network.normalize(row, f"norms.{depth}")
    return graph.squeeze(row, 0)


def _advance_tcn(network: Network, row: str, prefix: str) -> str:
    graph, model = network.graph, network.model
    hidden = graph.transpose(network.linear(row, "embed"), 1, 2, 0)  # [S, D, 1]
    for depth in range(len(model.sizes)):
        inner, rows = hidden, (model.kernel_size - 1) * 2**depth
        for name in ("conv1", "conv2"):
            if rows:
                where = f"{prefix}{name}_{depth}"
                inner = graph.concatenate(f"state_{where}", inner, axis=2)
                last = graph.integers(1), graph.integers(rows + 1), graph.integers(2)
                graph.add("Slice", inner, *last, name=f"new_state_{where}")
            inner = graph.add("Relu", convolve(network, depth, name, inner, 0))
        hidden = graph.add("Relu", graph.add("Add", hidden, inner))
    return graph.reshape(hidden, 0, model.sizes[-1])
