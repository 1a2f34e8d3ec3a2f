"""Constant arrays, literals and sizes of a network in C source, for `exporting/c`.

The layers of each kind are in `models/kinds`, their code in `exporting/c/templates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base.text import format_c_double
from slipstream.config import Model, Signature
from slipstream.models.kinds import load_kind
from slipstream.models.numpy_layers import ROW_UNITS, Weights

Floats = npt.NDArray[np.float32]
LANES = 8
"""The number of matrix rows that the C code computes side by side: as many sums as fit into
registers"""
PER_LINE = 8
POINTER_BYTES = 4
"""The size of a pointer on a 32-bit microcontroller"""
# -128 is left out, so that values are symmetric about zero
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
    has_text: bool = True
    """Whether the source is wanted, and not its sizes alone: the text of many numbers takes long"""
    lines: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_weights: int = 0
    shared: set[str] = field(default_factory=set)

    def add_floats(self, name: str, values: npt.ArrayLike) -> str:
        """Add an array of float and return its name."""
        flat = np.asarray(values, dtype=np.float32).ravel()
        self._add("float", name, format_floats(flat), flat.nbytes)
        self.num_weights += flat.size
        return name

    def add_shared(self, name: str, values: npt.ArrayLike) -> str:
        """Add an array of float that every network of the source has, once."""
        if name not in self.shared:
            self.shared.add(name)
            self.add_floats(name, values)
        return name

    def add_integers(self, name: str, values: npt.ArrayLike, kind: str) -> str:
        """Add an array of integers of this C type and return its name."""
        flat = np.asarray(values).astype(np.int64).ravel()
        size = int(kind.strip("uint_")) // 8
        self._add(kind, name, map(str, flat.tolist()), flat.size * size)
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
        self._add("int8_t", name, (str(value) for value in flat.tolist()), flat.nbytes)
        self.num_weights += flat.size
        self.add_floats(f"{name}_scale", scales)
        self.num_weights -= scales.size
        self.num_bytes += 2 * POINTER_BYTES
        return f"{{{name}, {name}_scale, {rows}, {columns}}}"

    def add_dense(self, name: str, matrix: Floats, bias: npt.ArrayLike) -> str:
        """Add a matrix and a bias, and return the initializer of their `dense`."""
        weight = self.add_matrix(f"{name}_weight", matrix)
        self.num_bytes += POINTER_BYTES
        return f"{{{weight}, {self.add_floats(f'{name}_bias', bias)}}}"

    def add_norm(self, name: str, read: Callable[[str], Any], source: str) -> str:
        """Add the weights of a layer norm and return the initializer of their `norm`."""
        self.num_bytes += 2 * POINTER_BYTES
        ends = ("weight", "bias")
        parts = [self.add_floats(f"{name}_{end}", read(f"{source}.{end}")) for end in ends]
        return "{" + ", ".join(parts) + "}"

    def _add(self, kind: str, name: str, values: Iterable[str], num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if not self.has_text:
            return
        texts = list(values)
        starts = range(0, len(texts), PER_LINE)
        lines = [", ".join(texts[start : start + PER_LINE]) for start in starts]
        body = ",\n    ".join(lines)
        self.lines.append(f"static const {kind} {name}[{len(texts)}] = {{\n    {body}}};\n")


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


def format_float(value: float) -> str:
    """Return the literal of a number rounded to float."""
    return next(iter(format_floats([np.float32(value)])))


def format_list(values: Iterable[Any], *, double: bool = False) -> str:
    """Return the initializer of a small array."""
    texts = [format_c_double(float(value)) for value in values] if double else format_floats(values)
    return f"{{{', '.join(texts)}}}"


def format_integers(values: Iterable[Any]) -> str:
    """Return the initializer of a small array of integers."""
    return "{" + ", ".join(str(int(value)) for value in values) + "}"


class CLayers(NamedTuple):
    """The sizes and arrays that the layers of a kind need in C, besides their weights."""

    defines: Mapping[str, int] = {}
    """Sizes that the template names"""
    cells: Mapping[str, int] = {}
    """Arrays of float that are one network's state, and their lengths"""
    counters: Mapping[str, int] = {}
    """Arrays of int32_t of the state, and their lengths; 0 for a single number"""
    work: Mapping[str, int] = {}
    """Arrays of float that one call needs, and their lengths"""
    values: Mapping[str, Any] = {}
    """Other values that the template names"""
    num_bytes: int = 0
    """Bytes of constant tables in the template"""


ROW_NUMBERS = 64
"""The number of a window's values that a network without tokens reads at a time"""


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a network."""

    model: Model
    signature: Signature
    holds: bool = False
    """Whether a missing value is replaced by the last known one: `data.missing = "forward"`"""
    carried: bool = False
    """Whether the network's state is carried from step to step"""

    @property
    def template(self) -> str:
        """The name of the template of the layers."""
        return load_kind(self.model).c_template

    @cached_property
    def layers(self) -> CLayers:
        """The sizes and arrays that the layers need."""
        return load_kind(self.model).describe_c(self)

    @property
    def is_flat(self) -> bool:
        """Whether a window is read as one row, not as tokens."""
        return not self.model.spec.is_sequential

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
        """The number of features that the head reads at a time."""
        return load_kind(self.model).get_width(self.model, self.signature)

    @property
    def widest(self) -> int:
        return max(self.sizes, default=0) * self.directions

    @property
    def rows_at_once(self) -> int:
        if not self.is_flat:
            return self.patch
        return min(max(ROW_NUMBERS // self.signature.model_inputs, 1), self.signature.context)

    @property
    def decoder(self) -> bool:
        """Whether a small network reads each row that is known ahead."""
        return self.signature.future_shape[0] > 0 and bool(self.sizes)

    def list_defines(self) -> dict[str, int]:
        """Return the sizes that the layers' template names."""
        defines = {"LAYERS": len(self.sizes), "WIDEST": self.widest}
        if self.decoder:
            defines["DECODER"] = ROW_UNITS
        if not self.is_flat:
            defines |= {"TOKENS": self.tokens, "PATCH": self.patch}
        defines |= self.layers.defines
        return {name: value for name, value in defines.items() if value}

    def list_work(self) -> dict[str, int]:
        """Return the arrays of float that one call needs, beside the rows and the outputs."""
        features, work = self.signature.model_inputs, {}
        if self.model.normalize != "none":
            work["centre"] = features
        if self.model.normalize == "window":
            work["mean"] = work["spread"] = features
        if self.signature.static_width:
            work["extra"] = self.signature.static_width
        if self.decoder:
            work["window"] = ROW_UNITS
        work |= self.layers.work
        if not self.is_flat and self.model.pool in ("mean", "attention"):
            work["pooled"] = self.width
        return work


def add_network(arrays: ConstArrays, shape: NetworkShape, weights: Weights, number: int) -> str:
    """Add a network's weights to the arrays and return the initializer of its `network`."""

    def read(name: str, default: Any = None) -> Any:
        return weights[f"core.{name}"] if default is None else weights.get(f"core.{name}", default)

    def add(name: str, source: str) -> str:
        return arrays.add_dense(
            f"n{number}_{name}", read(f"{source}.weight"), read(f"{source}.bias")
        )

    parts = load_kind(shape.model).add_c_weights(arrays, shape, read, f"n{number}")
    if shape.model.pool == "attention" and not shape.is_flat:
        parts.append(add("score", "pool.score"))
    if not shape.model.spec.is_fitted:
        parts.append(add("head", "head.linear"))
    if shape.decoder:
        parts += [add(f"ahead_{part}", f"head.ahead.{part}") for part in ("window", "row", "out")]
    return "{" + ", ".join(parts) + "}"
