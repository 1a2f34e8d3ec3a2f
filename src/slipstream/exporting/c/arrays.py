"""Weights as constant arrays of C, with the number of bytes that they take."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    texts = (format_double(float(value)) for value in values)
    return (text if text.endswith(("N", "Y")) else f"{text}f" for text in texts)


def format_double(value: float) -> str:
    """Return a hexadecimal literal, which is exact; whole numbers stay readable."""
    if not math.isfinite(value):
        return "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
    if value == int(value) and abs(value) < 1e6:
        return f"{value:.1f}"
    digits, _, exponent = value.hex().partition("p")
    whole, _, fraction = digits.partition(".")
    fraction = fraction.rstrip("0")
    return f"{whole}.{fraction or '0'}p{exponent}"


def format_list(values: Iterable[Any], *, double: bool = False) -> str:
    """Return the initializer of a small array."""
    every = [format_double(float(value)) for value in values] if double else format_floats(values)
    return f"{{{', '.join(every)}}}"
