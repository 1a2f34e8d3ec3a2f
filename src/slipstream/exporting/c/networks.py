"""What the C code has of each kind of network: its tables of weights, sizes and work memory.

The names of the weights are those of the safetensors file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base.text import format_c_double
from slipstream.config import Model, Signature
from slipstream.models.files import Weights

Floats = npt.NDArray[np.float32]
LANES = 8
"""Rows of a matrix that the C code computes side by side: as many sums fit into registers"""
PER_LINE = 8
POINTER_BYTES = 4
"""Of a 32-bit microcontroller"""
LARGEST_INT8 = 127


class Quantized(NamedTuple):
    """A matrix [N, K] in 8 bits: row n is values[n] * scales[n]."""

    values: npt.NDArray[np.int8]
    scales: Floats


@dataclass
class ConstArrays:
    """The arrays of a source file in their order."""

    int8: bool
    """Whether matrices are stored in 8 bits"""
    lines: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_weights: int = 0

    def add_floats(self, name: str, values: npt.ArrayLike) -> str:
        """Add an array of float and return its name."""
        flat = np.asarray(values, dtype=np.float32).ravel()
        self._add("float", name, format_floats(flat), flat.nbytes)
        self.num_weights += flat.size
        return name

    def add_matrix(self, name: str, matrix: Floats) -> str:
        """Add a matrix and return the initializer of its `matrix`."""
        rows, columns = matrix.shape
        self.num_bytes += 2 * POINTER_BYTES  # rows and columns, as int
        if not self.int8:
            self.add_floats(name, to_blocks(matrix))
            self.num_bytes += POINTER_BYTES
            return f"{{{name}, {rows}, {columns}}}"
        values, scales = quantize(matrix)
        flat = to_blocks(values)
        self._add("int8_t", name, (str(one) for one in flat.tolist()), flat.nbytes)
        self.num_weights += flat.size
        self.add_floats(f"{name}_scale", scales)
        self.num_weights -= scales.size
        self.num_bytes += 2 * POINTER_BYTES
        return f"{{{name}, {name}_scale, {rows}, {columns}}}"

    def add_dense(self, name: str, matrix: Floats, bias: Floats) -> str:
        """Add a matrix and a bias, and return the initializer of their `dense`."""
        weight = self.add_matrix(f"{name}_weight", matrix)
        self.num_bytes += POINTER_BYTES
        return f"{{{weight}, {self.add_floats(f'{name}_bias', bias)}}}"

    def _add(self, kind: str, name: str, values: Iterable[str], num_bytes: int) -> None:
        every = list(values)
        lines = [", ".join(every[at : at + PER_LINE]) for at in range(0, len(every), PER_LINE)]
        body = ",\n    ".join(lines)
        self.lines.append(f"static const {kind} {name}[{len(every)}] = {{\n    {body}}};\n")
        self.num_bytes += num_bytes


def to_blocks(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a matrix [N, K] as the C code reads it: blocks of LANES rows, column by column, then
    the remaining rows one after the other."""
    whole = len(matrix) - len(matrix) % LANES
    blocks = matrix[:whole].reshape(-1, LANES, matrix.shape[1]).transpose(0, 2, 1)
    return np.concatenate([blocks.ravel(), matrix[whole:].ravel()])


def quantize(matrix: Floats) -> Quantized:
    """Round each row to multiples of its largest value / 127."""
    largest = np.abs(matrix).max(axis=1)
    scales = np.where(largest > 0, largest / LARGEST_INT8, 1.0).astype(np.float32)
    values = np.rint(matrix / scales[:, None]).clip(-LARGEST_INT8, LARGEST_INT8)
    return Quantized(values.astype(np.int8), scales)


def format_floats(values: Iterable[Any]) -> Iterable[str]:
    """Return float literals that are exact."""
    texts = (format_c_double(float(value)) for value in values)
    return (text if text.endswith(("N", "Y")) else f"{text}f" for text in texts)


def format_list(values: Iterable[Any], *, double: bool = False) -> str:
    """Return the initializer of a small array."""
    every = [format_c_double(float(value)) for value in values] if double else format_floats(values)
    return f"{{{', '.join(every)}}}"


TEMPLATES = {"lstm": "recurrent", "gru": "recurrent", "tcn": "tcn", "mlp": "flat", "linear": "flat"}
"""The kinds that can be exported, and the template of their layers"""
GATES = {"lstm": 4, "gru": 3}
LOADED = 64
"""Numbers of a window that an MLP reads at a time"""
ACTIVATIONS = {
    "relu": "x < 0.0f ? 0.0f : x",
    "gelu": "0.5f * x * (1.0f + erff(x * 0.70710678f))",
    "silu": "x / (1.0f + expf(-x))",
    "elu": "x > 0.0f ? x : expm1f(x)",
    "leaky_relu": "x > 0.0f ? x : 0.01f * x",
    "tanh": "tanhf(x)",
}


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a network."""

    model: Model
    signature: Signature
    holds: bool = False
    """Whether a missing value is the last known one: `data.missing = "forward"`"""
    carried: bool = False
    """Whether steps carry the network's state on"""

    @property
    def template(self) -> str:
        return TEMPLATES[self.model.kind]

    @property
    def is_flat(self) -> bool:
        return self.template == "flat"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Width of each layer."""
        return self.model.sizes if self.model.spec.has_hidden else ()

    @property
    def directions(self) -> int:
        return 2 if self.model.bidirectional else 1

    @property
    def tokens(self) -> int:
        return self.signature.context // self.patch

    @property
    def patch(self) -> int:
        return 1 if self.is_flat else self.model.patch

    @property
    def width(self) -> int:
        """Of what the head reads at a time."""
        if not self.sizes:
            return self.signature.context * self.signature.model_inputs
        return self.sizes[-1] * self.directions

    @property
    def widest(self) -> int:
        return max(self.sizes, default=0) * self.directions

    @property
    def rows_at_once(self) -> int:
        if not self.is_flat:
            return self.patch
        return min(max(LOADED // self.signature.model_inputs, 1), self.signature.context)

    @property
    def decoder(self) -> bool:
        """Whether a small network reads each row that is known ahead."""
        return self.signature.future_shape[0] > 0 and bool(self.sizes)

    @property
    def slots(self) -> list[int]:
        """Tokens that each convolution of a TCN keeps; in a window, none reads further back."""
        if self.template != "tcn":
            return []
        numbers = range(2 * len(self.sizes))
        back = [(self.model.kernel_size - 1) * 2 ** (number // 2) for number in numbers]
        return [1 + (one if self.carried else min(one, self.tokens - 1)) for one in back]

    @property
    def cells(self) -> dict[str, int]:
        """The arrays of one network's state, by name, and how many numbers each has."""
        if self.template == "tcn":
            return {"tokens": sum(self.slots) * self.width}
        units = sum(self.sizes) if self.directions == 1 else max(self.sizes)
        return {"hidden": units, "cell": units} if self.model.kind == "lstm" else {"hidden": units}

    def count_multiply_adds(self) -> tuple[int, int]:
        """Return the multiply-adds of one token's layers, and of the head."""
        inputs, token, before = self.signature.model_inputs * self.patch, 0, 0
        if self.template == "recurrent":
            before = inputs
            for size in self.sizes:
                gates = GATES[self.model.kind] * size * self.directions
                token += gates * (before + size)
                before = size * self.directions
        elif self.template == "tcn":
            taps = 2 * len(self.sizes) * self.model.kernel_size
            token = self.width * (inputs + taps * self.width)
        else:
            before = self.signature.context * inputs
            for size in self.sizes:
                token, before = token + before * size, size
        if self.model.pool == "attention" and not self.is_flat:
            token += self.width
        return token, self._count_head()

    def _count_head(self) -> int:
        signature, features = self.signature, self.width
        if self.model.pool == "flatten" and not self.is_flat:
            features *= self.tokens
        outputs = signature.steps_out * signature.model_targets * signature.outputs
        total = (features + signature.static_width) * outputs
        if self.decoder:
            units, (rows, columns) = decoder_units(), signature.future_shape
            total += (features + len(signature.static)) * units
            total += rows * units * (columns + outputs // rows)
        return total


def decoder_units() -> int:
    """Return the hidden units of the network that reads rows ahead."""
    return 64


def add_network(arrays: ConstArrays, shape: NetworkShape, weights: Weights, number: int) -> str:
    """Add a network's weights to the arrays and return the initializer of its `network`."""

    def read(name: str) -> Any:
        return weights[f"core.{name}"]

    def add(name: str, source: str) -> str:
        return arrays.add_dense(
            f"n{number}_{name}", read(f"{source}.weight"), read(f"{source}.bias")
        )

    parts = _ADD_LAYERS[shape.template](arrays, shape, read, f"n{number}")
    if shape.model.pool == "attention" and not shape.is_flat:
        parts.append(add("score", "pool.score"))
    parts.append(add("head", "head.linear"))
    if shape.decoder:
        parts += [add(f"ahead_{one}", f"head.ahead.{one}") for one in ("window", "row", "out")]
    return "{" + ", ".join(parts) + "}"


def _add_recurrent(
    arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
) -> list[str]:
    layers = []
    for depth in range(len(shape.sizes)):
        for suffix in ("", "_reverse")[: shape.directions]:
            name = f"{prefix}_layer{depth}{suffix}"
            matrices = [read(f"layers.{depth}.weight_{one}_l0{suffix}") for one in ("ih", "hh")]
            biases = [read(f"layers.{depth}.bias_{one}_l0{suffix}") for one in ("ih", "hh")]
            if shape.model.kind == "lstm":
                joint = biases[0].astype(np.float64) + biases[1]
                joined = arrays.add_dense(f"{name}_input", matrices[0], joint)
                hidden = f"{{{arrays.add_matrix(f'{name}_hidden_weight', matrices[1])}, 0}}"
                arrays.num_bytes += POINTER_BYTES
            else:
                joined = arrays.add_dense(f"{name}_input", matrices[0], biases[0])
                hidden = arrays.add_dense(f"{name}_hidden", matrices[1], biases[1])
            layers.append(f"{{{joined}, {hidden}}}")
    parts = ["{" + ", ".join(layers) + "}"]
    if shape.model.layer_norm:
        norms = []
        for depth in range(len(shape.sizes)):
            names = [
                arrays.add_floats(f"{prefix}_norm{depth}_{one}", read(f"norms.{depth}.{one}"))
                for one in ("weight", "bias")
            ]
            norms.append("{" + ", ".join(names) + "}")
        arrays.num_bytes += 2 * POINTER_BYTES * len(norms)
        parts.append("{" + ", ".join(norms) + "}")
    return parts


def _add_tcn(
    arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
) -> list[str]:
    parts = [arrays.add_dense(f"{prefix}_embed", read("embed.weight"), read("embed.bias"))]
    convolutions = []
    for depth in range(len(shape.sizes)):
        for conv in ("conv1", "conv2"):
            weight = read(f"layers.{depth}.{conv}.weight")  # [units, channels, taps]
            by_tap = weight.transpose(0, 2, 1).reshape(len(weight), -1)
            bias = read(f"layers.{depth}.{conv}.bias")
            convolutions.append(arrays.add_dense(f"{prefix}_layer{depth}_{conv}", by_tap, bias))
    return [*parts, "{" + ", ".join(convolutions) + "}"]


def _add_flat(
    arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
) -> list[str]:
    layers = [
        arrays.add_dense(
            f"{prefix}_layer{depth}",
            read(f"body.{3 * depth}.weight"),
            read(f"body.{3 * depth}.bias"),
        )
        for depth in range(len(shape.sizes))
    ]
    return ["{" + ", ".join(layers) + "}"] if layers else []


_ADD_LAYERS = {"recurrent": _add_recurrent, "tcn": _add_tcn, "flat": _add_flat}


def list_defines(shape: NetworkShape) -> dict[str, int]:
    """Return the sizes that the layers' template names."""
    defines = {"LAYERS": len(shape.sizes), "WIDEST": shape.widest}
    if shape.decoder:
        defines["DECODER"] = decoder_units()
    if not shape.is_flat:
        defines |= {"TOKENS": shape.tokens, "PATCH": shape.patch}
    if shape.template == "recurrent":
        defines["DIRECTIONS"] = shape.directions
    if shape.template == "tcn":
        defines |= {"KERNEL": shape.model.kernel_size, "SLOTS": max(shape.slots)}
    return {name: value for name, value in defines.items() if value}


def list_work(shape: NetworkShape) -> dict[str, int]:
    """Return the arrays of float that one call needs, beside the rows and the outputs."""
    features, work = shape.signature.model_inputs, {}
    if shape.model.normalize != "none":
        work["centre"] = features
    if shape.model.normalize == "window":
        work["mean"] = work["spread"] = features
    if shape.signature.static_width:
        work["extra"] = shape.signature.static_width
    if shape.decoder:
        work["window"] = decoder_units()
    if shape.is_flat and shape.sizes:
        work["hidden"] = shape.widest * min(len(shape.sizes), 2)
    if shape.template == "recurrent":
        work["gates"] = max(shape.sizes) * {"lstm": 4, "gru": 6}[shape.model.kind]
        if shape.model.layer_norm and shape.directions == 1:
            work["normed"] = 2 * shape.widest
        if shape.directions == 2:
            work["sequence"] = shape.tokens * shape.widest * min(len(shape.sizes), 2)
    if shape.template == "tcn":
        work["token"] = 3 * shape.width
    if not shape.is_flat and shape.model.pool in ("mean", "attention"):
        work["pooled"] = shape.width
    return work
