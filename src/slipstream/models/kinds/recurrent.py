"""LSTM and GRU without torch; `models/rnn.py` has the PyTorch module."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slipstream.config import Model, Signature
from slipstream.models.c_code import POINTER_BYTES, CLayers, ConstArrays, NetworkShape
from slipstream.models.kinds import Axis, GraphState, Kind, RowEncoder, RowState
from slipstream.models.numpy_layers import (
    HALF,
    ONE,
    Array,
    Shape,
    Weights,
    list_norm,
    normalize_layer,
    sigmoid,
    to_patches,
)

if TYPE_CHECKING:
    from slipstream.models.onnx_graph import OnnxNetwork


class RecurrentKind(Kind):
    """Layers of one cell, each with its own width, in one direction or both."""

    input_weights = re.compile(r"core\.layers\.0\.weight_ih_l0(_reverse)?")
    c_template = "recurrent"
    num_gates: ClassVar[int]
    parts: ClassVar[tuple[str, ...]]
    """The parts of a layer's state: h, and the cell state c of an LSTM"""
    onnx_cell: ClassVar[str]
    """The name of ONNX's operator"""
    onnx_gates: ClassVar[tuple[int, ...]]
    """The positions of ONNX's gates among PyTorch's"""
    onnx_attributes: ClassVar[dict[str, int]] = {}
    c_gates: ClassVar[int]
    """The numbers per unit that the C code computes for one step"""

    @abstractmethod
    def run_layer(self, weights: Weights, name: str, suffix: str, sequence: Array) -> Array:
        """Return the outputs [T, B, D] of one direction of a layer, from a state of zero."""

    def list_shapes(self, model: Model, signature: Signature) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        width, gates = signature.model_inputs * model.patch, self.num_gates
        directions = ("_l0", "_l0_reverse") if model.bidirectional else ("_l0",)
        for depth, size in enumerate(model.sizes):
            layer = f"core.layers.{depth}"
            for suffix in directions:
                shapes[f"{layer}.weight_ih{suffix}"] = (gates * size, width)
                shapes[f"{layer}.weight_hh{suffix}"] = (gates * size, size)
                shapes[f"{layer}.bias_ih{suffix}"] = (gates * size,)
                shapes[f"{layer}.bias_hh{suffix}"] = (gates * size,)
            width = size * len(directions)
            if model.layer_norm:
                shapes |= list_norm(f"core.norms.{depth}", width)
        return shapes

    def get_width(self, model: Model, signature: Signature) -> int:
        return model.sizes[-1] * (2 if model.bidirectional else 1)

    def get_unit_axes(self, name: Sequence[str], model: Model) -> tuple[Axis, ...]:
        if name[0] == "norms":  # such models differ in no width: zeros would count as units
            return (None,)
        layer = int(name[1])
        below = (layer - 1, 2 if model.bidirectional else 1) if layer else None
        across = (layer, 1) if name[2].startswith("weight_hh") else below
        return (layer, self.num_gates), across

    def encode(self, weights: Weights, model: Model, inputs: Array) -> Array:
        sequence = to_patches(inputs, model.patch)
        for depth in range(len(model.sizes)):
            name = f"core.layers.{depth}"
            forward = self.run_layer(weights, name, "_l0", sequence)
            if model.bidirectional:
                backward = self.run_layer(weights, name, "_l0_reverse", sequence[::-1])[::-1]
                forward = np.concatenate([forward, backward], axis=-1)
            sequence = forward
            if model.layer_norm:
                sequence = normalize_layer(weights, f"core.norms.{depth}", sequence)
        return sequence

    def add_to_graph(self, network: OnnxNetwork, rows: str) -> str:
        graph, model = network.graph, network.model
        sequence = network.to_patches(rows)
        for depth, size in enumerate(model.sizes):
            outputs = graph.reserve(self.onnx_cell)
            self._add_cell(network, depth, sequence, (), [outputs])
            if model.bidirectional:  # [T, directions, B, D]
                sequence = graph.reshape(graph.transpose(outputs, 0, 2, 1, 3), 0, 0, 2 * size)
            else:
                sequence = graph.squeeze(outputs, 1)
            if model.layer_norm:
                sequence = network.normalize(sequence, f"norms.{depth}")
        return sequence

    def list_graph_states(self, model: Model) -> Iterator[GraphState]:
        for depth, size in enumerate(model.sizes):
            for part in self.parts:
                yield GraphState(f"{part}_{depth}", (size,))

    def add_step_to_graph(self, network: OnnxNetwork, row: str, prefix: str) -> str:
        graph, model = network.graph, network.model
        for depth in range(len(model.sizes)):
            before = tuple(
                graph.unsqueeze(f"state_{prefix}{part}_{depth}", 0) for part in self.parts
            )
            after = [graph.reserve(f"{self.onnx_cell}_{part}") for part in self.parts]
            self._add_cell(network, depth, row, before, ["", *after])
            for part, value in zip(self.parts, after, strict=True):
                new = f"new_state_{prefix}{part}_{depth}"
                graph.add("Squeeze", value, graph.integers(0), name=new)
            row = after[0]  # [1, B, D]: one direction is one row
            if model.layer_norm:
                row = network.normalize(row, f"norms.{depth}")
        return graph.squeeze(row, 0)

    def _add_cell(
        self,
        network: OnnxNetwork,
        depth: int,
        sequence: str,
        states: tuple[str, ...],
        names: list[str],
    ) -> None:
        """Add the operator of one layer, starting from zero states or the given ones; `names` are
        the names of its results: the outputs, then the states."""
        graph, model = network.graph, network.model
        where = f"{network.prefix}core.layers.{depth}"
        matrices = [
            graph.constant(values, f"{where}.{name}")
            for name, values in zip("WRB", self._join_gates(network, depth), strict=True)
        ]
        graph.add_many(
            self.onnx_cell,
            sequence,
            *matrices,
            *(("", *states) if states else ()),
            names=names,
            direction="bidirectional" if model.bidirectional else "forward",
            hidden_size=model.sizes[depth],
            **self.onnx_attributes,
        )

    def _join_gates(self, network: OnnxNetwork, depth: int) -> list[Array]:
        """Return W [directions, G * H, D], R [directions, G * H, H], B [directions, 2 * G * H]."""

        def read(name: str, end: str) -> Array:
            values = network.weights[f"core.layers.{depth}.{name}_l0{end}"]
            gates = np.split(values, self.num_gates)
            return np.concatenate([gates[position] for position in self.onnx_gates])

        ends = ("", "_reverse") if network.model.bidirectional else ("",)
        inputs, hidden = (
            np.stack([read(name, end) for end in ends]) for name in ("weight_ih", "weight_hh")
        )
        biases = [np.concatenate([read("bias_ih", end), read("bias_hh", end)]) for end in ends]
        return [inputs, hidden, np.stack(biases)]

    def describe_c(self, shape: NetworkShape) -> CLayers:
        units = sum(shape.sizes) if shape.directions == 1 else max(shape.sizes)
        work = {"gates": max(shape.sizes) * self.c_gates}
        if shape.model.layer_norm and shape.directions == 1:
            work["normed"] = 2 * shape.widest
        if shape.directions == 2:
            work["sequence"] = shape.tokens * shape.widest * min(len(shape.sizes), 2)
        return CLayers(
            defines={"DIRECTIONS": shape.directions},
            cells={"hidden": units, "cell": units} if "c" in self.parts else {"hidden": units},
            work=work,
            values={
                "has_cell": "c" in self.parts,
                "directions": shape.directions,
                "layer_norm": shape.model.layer_norm,
            },
        )

    def add_c_weights(
        self, arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
    ) -> list[str]:
        layers = []
        for depth in range(len(shape.sizes)):
            for suffix in ("", "_reverse")[: shape.directions]:
                name = f"{prefix}_layer{depth}{suffix}"
                matrices = [read(f"layers.{depth}.weight_{end}_l0{suffix}") for end in ("ih", "hh")]
                biases = [read(f"layers.{depth}.bias_{end}_l0{suffix}") for end in ("ih", "hh")]
                layers.append(self._add_c_layer(arrays, name, matrices, biases))
        parts = ["{" + ", ".join(layers) + "}"]
        if shape.model.layer_norm:
            norms = [
                arrays.add_norm(f"{prefix}_norm{depth}", read, f"norms.{depth}")
                for depth in range(len(shape.sizes))
            ]
            parts.append("{" + ", ".join(norms) + "}")
        return parts

    def _add_c_layer(
        self, arrays: ConstArrays, name: str, matrices: list[Array], biases: list[Array]
    ) -> str:
        """Add one direction of a layer and return the initializer of its `layer`."""
        joined = arrays.add_dense(f"{name}_input", matrices[0], biases[0])
        return f"{{{joined}, {arrays.add_dense(f'{name}_hidden', matrices[1], biases[1])}}}"


def pack_gates(weights: Weights, name: str, suffix: str = "_l0") -> tuple[Array, Array, Array]:
    """Return the matrices of an LSTM layer for its inputs and its state, and the bias.

    The gates come in the order input, forget, output, new. Arguments of a sigmoid are halved, so
    that one tanh computes all gates: sigmoid(x) = tanh(x / 2) / 2 + 1 / 2.
    """
    bias = weights[f"{name}.bias_ih{suffix}"] + weights[f"{name}.bias_hh{suffix}"]
    size = len(bias) // 4
    order = np.r_[0 : 2 * size, 3 * size : 4 * size, 2 * size : 3 * size]
    factor = np.where(np.arange(len(bias)) < 3 * size, HALF, ONE)
    matrices = (weights[f"{name}.weight_{part}{suffix}"][order].T for part in ("ih", "hh"))
    along, across = (np.ascontiguousarray(matrix * factor) for matrix in matrices)
    return along, across, bias[order] * factor


def step_lstm(gates: Array, cell: Array) -> tuple[Array, Array]:
    """Return the new state and cell from packed gates [B, 4 * D], which are overwritten."""
    size = cell.shape[1]
    np.tanh(gates, out=gates)
    shares = gates[:, : 3 * size]
    shares *= HALF
    shares += HALF
    new = shares[:, size : 2 * size] * cell
    new += shares[:, :size] * gates[:, 3 * size :]
    h = np.tanh(new)
    h *= shares[:, 2 * size :]
    return h, new


class RowLstm(RowEncoder):
    """LSTM layers, row after row."""

    def __init__(self, weights: Weights, model: Model) -> None:
        self.sizes, self.weights, self.has_norm = model.sizes, weights, model.layer_norm
        self.layers: list[tuple[Array, Array]] = []
        for depth in range(len(model.sizes)):
            along, across, bias = pack_gates(weights, f"core.layers.{depth}")
            self.layers.append((np.concatenate([along, across]), bias))

    def start(self, sequences: int) -> RowState:
        zeros = [np.zeros((sequences, size), dtype=np.float32) for size in self.sizes]
        return {
            f"{part}{depth}": zero.copy() for part in ("h", "c") for depth, zero in enumerate(zeros)
        }

    def step(self, x: Array, state: RowState) -> Array:
        for depth, (matrix, bias) in enumerate(self.layers):
            h, c = f"h{depth}", f"c{depth}"
            gates = np.concatenate((x, state[h]), axis=1) @ matrix
            gates += bias
            x, state[c] = step_lstm(gates, state[c])
            state[h] = x
            if self.has_norm:
                x = normalize_layer(self.weights, f"core.norms.{depth}", x)
        return x


class LstmKind(RecurrentKind):
    """LSTM: input, forget, cell and output gate, as PyTorch orders them."""

    row_encoder = RowLstm
    num_gates, parts = 4, ("h", "c")
    onnx_cell, onnx_gates = "LSTM", (0, 3, 1, 2)  # input, output, forget, cell
    c_gates = 4

    def run_layer(self, weights: Weights, name: str, suffix: str, sequence: Array) -> Array:
        along, across, bias = pack_gates(weights, name, suffix)
        products = sequence @ along + bias
        width = len(across)
        h = c = np.zeros((sequence.shape[1], width), dtype=np.float32)
        out = np.empty((*sequence.shape[:2], width), dtype=np.float32)
        for t, product in enumerate(products):
            gates = h @ across
            gates += product
            h, c = step_lstm(gates, c)
            out[t] = h
        return out

    def _add_c_layer(
        self, arrays: ConstArrays, name: str, matrices: list[Array], biases: list[Array]
    ) -> str:
        # both biases are only ever added up: one array of their sum
        joint = biases[0].astype(np.float64) + biases[1]
        joined = arrays.add_dense(f"{name}_input", matrices[0], joint)
        hidden = f"{{{arrays.add_matrix(f'{name}_hidden_weight', matrices[1])}, 0}}"
        arrays.num_bytes += POINTER_BYTES
        return f"{{{joined}, {hidden}}}"


class RowGru(RowEncoder):
    """GRU layers, row after row."""

    def __init__(self, weights: Weights, model: Model) -> None:
        self.sizes, self.weights, self.has_norm = model.sizes, weights, model.layer_norm
        self.layers = [
            tuple(
                np.ascontiguousarray(weights[f"core.layers.{depth}.{part}_l0"].T)
                for part in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
            )
            for depth in range(len(model.sizes))
        ]

    def start(self, sequences: int) -> RowState:
        return {
            f"h{depth}": np.zeros((sequences, size), dtype=np.float32)
            for depth, size in enumerate(self.sizes)
        }

    def step(self, x: Array, state: RowState) -> Array:
        for depth, (of_x, bias_x, of_h, bias_h) in enumerate(self.layers):
            size, h = self.sizes[depth], state[f"h{depth}"]
            now, past = x @ of_x + bias_x, h @ of_h + bias_h
            gates = sigmoid(now[:, : 2 * size] + past[:, : 2 * size])
            new = np.tanh(now[:, 2 * size :] + gates[:, :size] * past[:, 2 * size :])
            x = state[f"h{depth}"] = new + gates[:, size:] * (h - new)
            if self.has_norm:
                x = normalize_layer(self.weights, f"core.norms.{depth}", x)
        return x


class GruKind(RecurrentKind):
    """GRU: reset, update and new gate, as PyTorch orders them."""

    row_encoder = RowGru
    num_gates, parts = 3, ("h",)
    onnx_cell, onnx_gates = "GRU", (1, 0, 2)  # update, reset, hidden
    # PyTorch's form; ONNX's other one multiplies by the reset gate first
    onnx_attributes: ClassVar[dict[str, int]] = {"linear_before_reset": 1}
    c_gates = 6  # those of the inputs and those of the state: the reset gate keeps them apart

    def run_layer(self, weights: Weights, name: str, suffix: str, sequence: Array) -> Array:
        across, of_h = weights[f"{name}.weight_hh{suffix}"].T, weights[f"{name}.bias_hh{suffix}"]
        products = (
            sequence @ weights[f"{name}.weight_ih{suffix}"].T + weights[f"{name}.bias_ih{suffix}"]
        )
        width = len(across)
        h = np.zeros((sequence.shape[1], width), dtype=np.float32)
        out = np.empty((*sequence.shape[:2], width), dtype=np.float32)
        for t, product in enumerate(products):
            past = h @ across + of_h
            gates = sigmoid(product[:, : 2 * width] + past[:, : 2 * width])
            reset, update = gates[:, :width], gates[:, width:]
            new = np.tanh(product[:, 2 * width :] + reset * past[:, 2 * width :])
            h = new + update * (h - new)
            out[t] = h
        return out
