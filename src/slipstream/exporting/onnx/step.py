"""The graph of one row: states in, states out.

States start at zero. Shapes: B windows, S sequences (B, or B * C with independent channels), F
inputs, D a width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from onnx import ModelProto

from slipstream.config import Model
from slipstream.exporting.interface import make_interface
from slipstream.exporting.onnx.builder import GraphBuilder
from slipstream.exporting.onnx.layers import Network, convolve, run_cell
from slipstream.exporting.onnx.model import (
    InputReader,
    Shape,
    finish,
    list_networks,
    to_model,
)
from slipstream.exporting.onnx.window import Scaled, merge_channels, predict_from, split_channels
from slipstream.portable.model import PortableRun
from slipstream.portable.networks.steps import explain_no_steps


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
