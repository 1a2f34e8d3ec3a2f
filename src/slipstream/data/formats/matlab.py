"""MATLAB files of every version."""

from __future__ import annotations

import re
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream.base.errors import UserError
from slipstream.data.formats.isolated import read_isolated
from slipstream.data.formats.reader import InputFile, ReadOptions, TableReader
from slipstream.data.table import DataTable, summarize_error, wrap_table

MAX_LISTED = 12
MAX_DENSE = 50_000_000
"""The largest sparse matrix that is read, in values with zeros included"""
STEP = re.compile(r"(?P<name>[^.(){}]+)(?:[({](?P<number>\d+)[)}])?")
"""A name on the way to a variable, with the element of an array of structs or cells: cell(2)"""


class Unread(NamedTuple):
    """A value without numbers or text, such as a function."""

    kind: str


class Sparse(NamedTuple):
    """A sparse matrix: the rows, columns and values of its nonzero elements."""

    shape: tuple[int, int]
    rows: Any
    columns: Any
    values: Any

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def size(self) -> int:
        return prod(self.shape)

    def toarray(self) -> Any:
        full = np.zeros(self.shape, self.dtype)
        full[self.rows, self.columns] = self.values
        return full


class MatColumns(NamedTuple):
    """The columns of a variable."""

    columns: dict[str, Any]
    units: dict[str, str]
    scalars: tuple[str, ...]
    """Columns that repeat one value"""
    left_out: tuple[str, ...]
    """Fields that are no columns, with their type"""


def find_variable(values: Mapping[str, Any], variable: str) -> Any:
    """Return the variable of this name, or the value that a path within it leads to; KeyError if
    there is none."""
    if variable in values:
        return values[variable]
    fields: Mapping[str, Any] = values
    value: Any = None
    for part in variable.split("."):
        step = STEP.fullmatch(part.strip())
        if step is None or step["name"] not in fields:
            raise KeyError(part)
        value = fields[step["name"]]
        if step["number"] is not None:
            elements = value.reshape(-1, order="F") if hasattr(value, "reshape") else value
            if not 1 <= int(step["number"]) <= len(elements):
                raise KeyError(part)
            value = elements[int(step["number"]) - 1]
        fields = get_fields(value) or {}
    return value


def get_fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a single struct; None for anything else."""
    names = getattr(getattr(value, "dtype", None), "names", None)
    if not names or "s0" in names or value.size != 1:
        return None
    element = value if isinstance(value, np.void) else value.reshape(-1)[0]
    return {name: element[name] for name in names}


def is_table(value: Any) -> bool:
    return hasattr(value, "attrs") and hasattr(value, "columns")


def to_columns(value: Any, name: str = "") -> MatColumns | None:
    """Return the columns of a struct, an array of structs, a table or a matrix.

    None where nothing in it has more than one row.
    """
    if is_table(value):
        read = _read_table(value)
        return read if read.columns else None
    fields = get_fields(value)
    if fields is None and getattr(getattr(value, "dtype", None), "names", None):
        return _read_elements(value)
    return select_columns(dict(_flatten(fields if fields is not None else {name: value})))


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a struct, and the fields of the structs and tables nested in it."""
    for name, value in fields.items():
        inner = get_fields(value)
        if inner is not None:
            yield from _flatten(inner, f"{prefix}{name}.")
        elif is_table(value):
            yield from _flatten(_read_table(value).columns, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def select_columns(fields: dict[str, Any]) -> MatColumns | None:
    """Select the fields of the usual length, with matrices column by column."""
    cells = {name: to_values(value) for name, value in fields.items()}
    arrays = {name: array for name, array in cells.items() if array is not None and array.size}
    lengths = Counter(array.size for array in arrays.values() if array.ndim == 1 and array.size > 1)
    matrices = [array for array in arrays.values() if array.ndim == 2]
    if lengths:
        rows = max(lengths, key=lambda length: (lengths[length], length))
    elif matrices:
        rows = max(matrices[0].shape)
    else:
        return None
    columns: dict[str, Any] = {}
    scalars, left_out = [], []
    for name, value in fields.items():
        array = arrays.get(name)
        if array is None:
            left_out.append(f"{name} ({describe(value)})")
        elif array.size == 1:
            columns[name] = np.repeat(array.reshape(1), rows)
            scalars.append(name)
        elif array.shape == (rows,):
            columns[name] = array
        elif array.ndim == 2 and rows in array.shape:
            tall = array if array.shape[0] == rows else array.T
            columns |= {f"{name}_{i + 1}": tall[:, i] for i in range(tall.shape[1])}
        else:
            left_out.append(f"{name} ({describe(value)})")
    return MatColumns(columns, {}, tuple(scalars), tuple(left_out))


def _read_elements(array: Any) -> MatColumns | None:
    """Return an array of structs as a table, if every field is one value in each of them."""
    columns: dict[str, Any] = {}
    if array.size < 2:
        return None
    for name in array.dtype.names:
        cells = [to_values(element[name]) for element in array.reshape(-1, order="F")]
        if any(cell is None or cell.size != 1 for cell in cells):
            return None
        columns[name] = np.concatenate([cell.reshape(1) for cell in cells if cell is not None])
    return MatColumns(columns, {}, (), ())


def _read_table(frame: Any) -> MatColumns:
    """Return the columns of a table; the row times of a timetable are the first."""
    columns: dict[str, Any] = {}
    if frame.index.dtype.kind in "mM":
        columns[str(frame.index.name or "Time")] = to_values(frame.index.to_numpy())
    left_out = []
    for name in map(str, frame.columns):
        values = to_values(frame[name].to_numpy())
        if values is None or values.ndim > 1:
            left_out.append(f"{name} ({frame[name].dtype})")
        else:
            columns[name] = values
    units = frame.attrs.get("VariableUnits") or frame.attrs.get("varUnits") or []
    named = zip(map(str, frame.columns), units, strict=False)
    return MatColumns(columns, {name: str(u) for name, u in named if u}, (), tuple(left_out))


def to_values(value: Any) -> Any:
    """Return numbers, times or texts as an array of one dimension, or of two for a matrix.

    Durations become seconds. None for all other values.
    """
    if hasattr(value, "toarray"):
        if prod(value.shape) > MAX_DENSE:
            return None
        value = value.toarray()
    if hasattr(value, "categories"):
        value = np.asarray(value)
    if isinstance(value, (str, bytes)):
        value = np.array([value], dtype=object)
    if not isinstance(value, np.ndarray):
        return np.asarray(value) if np.isscalar(value) else None
    if value.dtype.names or value.dtype.kind == "c":
        return None
    if value.dtype.kind == "O":
        value = _read_cells(value)
        if value is None:
            return None
    if value.dtype.kind == "m":
        if np.datetime_data(value.dtype)[0] in ("Y", "M"):  # how long these are depends
            return None
        value = value / np.timedelta64(1, "s")
    if sum(side > 1 for side in value.shape) > 2:
        return None
    squeezed = value.squeeze()
    return squeezed.reshape(-1) if squeezed.ndim < 2 else squeezed


def _read_cells(cells: Any) -> Any:
    """Return a cell array as an array if each cell holds one number or one text; else None."""
    values = []
    for cell in cells.reshape(-1, order="F"):
        while isinstance(cell, np.ndarray) and cell.size == 1 and not cell.dtype.names:
            cell = cell.reshape(-1)[0]
        if isinstance(cell, np.ndarray) and not cell.size:
            cell = None
        if not (cell is None or np.isscalar(cell)):
            return None
        values.append(cell)
    if any(isinstance(cell, str) for cell in values):
        return np.array([None if cell is None else str(cell) for cell in values], dtype=object)
    numbers = [np.nan if cell is None else cell for cell in values]
    return np.array(numbers)


def to_arrow(columns: Mapping[str, Any]) -> pa.Table:
    """Return the columns as an Arrow table; text stays text."""
    arrays = {}
    for name, values in columns.items():
        if values.dtype.kind in "OUS":
            texts = [None if text is None or text != text else str(text) for text in values]
            arrays[name] = pa.array(texts, pa.string())
        elif values.dtype.kind == "M":
            arrays[name] = pa.array(values.astype("datetime64[us]"))
        else:
            # a copy: the rest of what was read need not stay in memory
            arrays[name] = pa.array(np.array(values, values.dtype.newbyteorder("=")))
    return pa.table(arrays)


def describe(value: Any) -> str:
    """Describe a value of MATLAB in a few words: its size and type."""
    if isinstance(value, Unread):
        return value.kind
    if is_table(value):
        return f"table with {', '.join(map(str, value.columns[:MAX_LISTED]))}".removesuffix(
            " with "
        )
    fields = get_fields(value)
    if fields is not None:
        listed = ", ".join(list(fields)[:MAX_LISTED])
        return f"struct with {listed}" if fields else "struct"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    if dtype is None:
        return type(value).__name__
    size = " x ".join(map(str, shape)) if shape else "1"
    if dtype.names:
        kind = "object" if "s0" in dtype.names else f"struct with {', '.join(dtype.names)}"
        return f"{size} {kind}"
    if dtype.kind in "US":
        return "text" if value.size == 1 else f"{value.size} texts"
    if not value.size:
        return "empty"
    return f"{size} {'cell' if dtype.kind == 'O' else dtype}"


def list_content(values: Mapping[str, Any]) -> str:
    """List the variables of a file, with their sizes and types."""
    listed = [f"{name} ({describe(value)})" for name, value in list(values.items())[:MAX_LISTED]]
    more = f" and {len(values) - MAX_LISTED} more" * (len(values) > MAX_LISTED)
    return ", ".join(listed) + more


Shape = tuple[int, ...]

HEADER_BYTES = 128
MATRIX, COMPRESSED = 14, 15
TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8"}
TYPES |= {13: "u8", 16: "u1", 17: "u2", 18: "u4"}
"""How the numbers of an element are stored; 16 to 18 are text in UTF-8, UTF-16 and UTF-32"""
CODECS = {"i1": "latin-1", "u1": "latin-1", "u2": "utf-16", "u4": "utf-32"}
UTF8 = 16
CELL, STRUCT, OBJECT, CHAR, SPARSE, FUNCTION, OPAQUE = 1, 2, 3, 4, 5, 16, 17
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4"}
CLASSES |= {14: "i8", 15: "u8"}
"""What MATLAB calls double, single, int8 and so on"""
COMPLEX, LOGICAL = 0x800, 0x200
MAX_DEPTH = 50
"""The deepest nesting of structs and cells that is read"""
MAX_DIMENSIONS, MAX_VALUES = 32, 2**48
MAX_RATIO = 1032
"""The largest ratio of unpacked to compressed size that the format can reach"""
TAG_BYTES = 8
OLD_TYPES = ("f8", "f4", "i4", "i2", "u2", "u1")
OLD_TEXT, OLD_SPARSE = 1, 2


class DamagedError(Exception):
    """The bytes of a file contradict each other, or ask for more memory than there is."""


class MatFile(NamedTuple):
    """The variables of a file."""

    values: dict[str, Any]
    has_objects: bool
    """Whether the file has tables, datetimes or other objects, which this reader skips"""


def read_mat_file(path: Path, version: str) -> MatFile:
    """Read all variables of a file of version 4 or 5; a DamagedError says what is wrong with it."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size > _get_memory():
            raise DamagedError(f"its {size:,} bytes do not fit into memory")
        if version == "4":
            return MatFile(dict(_iter_old_variables(file, size)), has_objects=False)
        return _read_variables(file, size)


def _get_memory() -> int:
    from slipstream.base.machine import get_available_memory  # takes 20 ms, which other files save

    return get_available_memory()


def find_byte_order(head: bytes) -> str | None:
    """Return the byte order of a file of version 5; None where its header is of another format."""
    mark = head[HEADER_BYTES - 4 : HEADER_BYTES]
    return {b"\0\1IM": "<", b"\1\0MI": ">"}.get(mark)


def _read_variables(file: IO[bytes], size: int) -> MatFile:
    order = find_byte_order(file.read(HEADER_BYTES))
    if order is None:
        raise DamagedError("its header is damaged")
    values: dict[str, Any] = {}
    has_objects = False
    while tag := file.read(TAG_BYTES):
        if not any(tag) and not any(file.read()):
            break  # zeros fill up the end
        kind, length = struct.unpack(f"{order}II", tag.ljust(TAG_BYTES, b"\xff"))
        if len(tag) < TAG_BYTES or length > size - file.tell():
            raise DamagedError("it ends in the middle of a variable")
        content = file.read(length)
        if kind == COMPRESSED:
            kind, content = _decompress(content, order)
        if kind != MATRIX:
            raise DamagedError(f"a variable has the unknown type {kind}")
        reader = _ElementReader(content, order)
        name, value = reader.read_matrix(0)
        has_objects |= reader.has_objects or not name  # without a name: what objects consist of
        if name:
            values[name] = value
    return MatFile(values, has_objects)


def _decompress(content: bytes, order: str) -> tuple[int, bytes]:
    """Return the type and the content of the element that compressed data hold."""
    stream = zlib.decompressobj()
    try:
        tag = stream.decompress(content, TAG_BYTES)
        if len(tag) < TAG_BYTES:
            raise DamagedError("compressed data end early")
        kind, length = struct.unpack(f"{order}II", tag)
        if length > MAX_RATIO * len(content) + HEADER_BYTES:
            raise DamagedError(f"{len(content):,} compressed bytes claim to hold {length:,}")
        if length > _get_memory():
            raise DamagedError(f"{length:,} bytes of compressed data do not fit into memory")
        unpacked = stream.decompress(stream.unconsumed_tail, length) if length else b""
        surplus = stream.decompress(stream.unconsumed_tail, 1)
    except zlib.error as error:
        raise DamagedError(f"compressed data are damaged ({error})") from None
    if len(unpacked) < length or surplus or not stream.eof:
        raise DamagedError("compressed data are of another length than they say")
    return kind, unpacked


class _ElementReader:
    """Takes the elements of one variable, front to back, and nothing beyond the end of each."""

    def __init__(self, content: bytes, order: str) -> None:
        self.content, self.order = content, order
        self.position, self.end = 0, len(content)
        """First unread byte and end of the current value, which may be nested in others"""
        self.name = ""
        """The variable's name, for errors"""
        self.has_objects = False
        self._read_word = struct.Struct(f"{order}I").unpack_from
        self._read_words = struct.Struct(f"{order}II").unpack_from

    def fail(self, problem: str) -> DamagedError:
        return DamagedError(f'variable "{self.name}": {problem}' if self.name else problem)

    @property
    def left(self) -> int:
        """The number of bytes that are left to read."""
        return self.end - self.position

    def read_element(self) -> tuple[int, int, int]:
        """Read the next element's tag; return its type, and where its bytes begin and end."""
        begin = self.position + TAG_BYTES
        if begin > self.end:
            raise self.fail(f"{TAG_BYTES} bytes are announced where {self.left:,} are left")
        kind, length = self._read_words(self.content, self.position)
        if kind >> 16:  # up to four bytes stand within the tag
            kind, length = kind & 0xFFFF, kind >> 16
            if length > 4:
                raise self.fail(f"a short element has {length:,} bytes")
            self.position = begin
            return kind, begin - 4, begin - 4 + length
        if length > self.end - begin:
            left = self.end - begin
            raise self.fail(f"{length:,} bytes are announced where {left:,} are left")
        self.position = min(begin + length + -length % TAG_BYTES, self.end)
        return kind, begin, begin + length

    def read_numbers(self) -> npt.NDArray[Any]:
        """Read the next element as numbers of the type in which they are stored."""
        return self.to_numbers(*self.read_element())

    def to_numbers(self, kind: int, begin: int, end: int) -> npt.NDArray[Any]:
        if kind not in TYPES:
            raise self.fail(f"numbers have the unknown type {kind}")
        stored = np.dtype(self.order + TYPES[kind])
        if (end - begin) % stored.itemsize:
            raise self.fail(f"{end - begin:,} bytes are no whole number of values")
        if begin == end:
            return np.empty(0, stored)
        return np.frombuffer(self.content, stored, (end - begin) // stored.itemsize, begin)

    def read_text(self) -> str:
        """Read the next element as a name."""
        _, begin, end = self.read_element()
        return _decode_name(self.content[begin:end])

    def read_matrix(self, depth: int) -> tuple[str, Any]:
        """Read a whole value; return it with its name, which is empty for a nested value."""
        if depth > MAX_DEPTH:
            raise self.fail(f"values lie more than {MAX_DEPTH} deep within each other")
        _, begin, end = self.read_element()
        if end - begin < TAG_BYTES:
            raise self.fail("the kind of a value is missing")
        (word,) = self._read_word(self.content, begin)
        kind = word & 0xFF
        if kind == OPAQUE:
            self.has_objects = True
            return self.read_text(), Unread("object")
        _, begin, end = self.read_element()
        sides = (end - begin) // 4
        if not 0 < sides <= MAX_DIMENSIONS or (end - begin) % 4:
            raise self.fail(f"a value has {sides:,} dimensions")
        shape: Shape = struct.unpack_from(f"{self.order}{sides}i", self.content, begin)
        if min(shape) < 0:
            raise self.fail(f"a value has {min(shape):,} rows or columns")
        if 0 in shape and prod(filter(None, shape)) > MAX_VALUES:  # numpy has no such array
            raise self.fail(f"a value has {' x '.join(f'{side:,}' for side in shape)} numbers")
        name = self.read_text()
        if not depth:
            self.name = name
        return name, self._read_value(kind, word, shape, depth)

    def _read_value(self, kind: int, word: int, shape: Shape, depth: int) -> Any:
        if kind in CLASSES:
            values = self._read_array(shape, word)
            return values if word & LOGICAL else self._convert(values, CLASSES[kind])
        if kind == CHAR:
            return self._read_chars(shape)
        if kind == CELL:
            return self._read_cells(shape, depth)
        if kind in (STRUCT, OBJECT):
            if kind == OBJECT:
                self.read_text()  # the name of its class
            return self._read_struct(shape, depth)
        if kind == SPARSE:
            return self._read_sparse(shape, word)
        if kind == FUNCTION:
            return Unread("function")
        raise self.fail(f"a value is of the unknown kind {kind}")

    def _convert(self, values: npt.NDArray[Any], kind: str) -> npt.NDArray[Any]:
        """Return numbers in their MATLAB type; the file stores small numbers in smaller types."""
        target = np.dtype("c16" if kind == "f8" else "c8") if values.dtype.kind == "c" else kind
        return values.astype(target, copy=False) if values.dtype != target else values

    def _read_array(self, shape: Shape, word: int) -> npt.NDArray[Any]:
        parts = [self.read_numbers() for _ in range(2 if word & COMPLEX else 1)]
        if any(part.size != prod(shape) for part in parts):
            sides = " x ".join(f"{side:,}" for side in shape)
            raise self.fail(f"{sides} values are announced, but there are {parts[0].size:,}")
        values = parts[0] if len(parts) == 1 else parts[0] + 1j * parts[1]
        return _to_native(values.astype(bool) if word & LOGICAL else values).reshape(
            shape, order="F"
        )

    def _read_chars(self, shape: Shape) -> npt.NDArray[Any]:
        """Return the rows of a matrix of characters, each as one text."""
        kind, begin, end = self.read_element()
        codec = CODECS.get(TYPES.get(kind, ""))
        if codec is None:
            raise self.fail(f"text has the unknown type {kind}")
        size = prod(shape)
        if not size:
            return NO_TEXT
        if codec != "latin-1":
            codec += "-le" if self.order == "<" else "-be"
        text = self.content[begin:end].decode("utf-8" if kind == UTF8 else codec, "replace")
        if size == shape[-1]:  # one row; MATLAB sizes some characters twice
            return np.array([text[:size]]).reshape((1,) * (len(shape) - 1))
        if len(text) < size:
            raise self.fail(f"{size:,} characters are announced, but there are {len(text):,}")
        characters = np.array(list(text[:size])).reshape(shape, order="F")
        return np.ascontiguousarray(characters).view(f"U{shape[-1]}")[..., 0]

    def _count_inner(self, number: int) -> int:
        """Return the number of nested values; a number that the remaining bytes cannot hold is
        refused."""
        if number * TAG_BYTES > self.left:
            raise self.fail(f"{number:,} values are announced where {self.left:,} bytes are left")
        return number

    def _read_inner(self, depth: int) -> Any:
        kind, begin, end = self.read_element()
        if kind != MATRIX:
            raise self.fail(f"a value has the unknown type {kind}")
        if begin == end:
            return EMPTY
        outer = self.position, self.end
        self.position, self.end = begin, end
        _, value = self.read_matrix(depth + 1)
        self.position, self.end = outer
        return value

    def _read_cells(self, shape: Shape, depth: int) -> npt.NDArray[Any]:
        cells = np.empty(self._count_inner(prod(shape)), dtype=object)
        for i in range(cells.size):
            cells[i] = self._read_inner(depth)
        return cells.reshape(shape, order="F")

    def _read_struct(self, shape: Shape, depth: int) -> npt.NDArray[Any]:
        lengths, packed = self.read_numbers(), self.read_numbers()
        length = int(lengths[0]) if lengths.size == 1 and lengths.dtype.kind != "f" else 0
        if length < 1 or packed.itemsize > 1 or packed.size % length:
            raise self.fail("the names of fields are damaged")
        names = [_decode_name(part.tobytes()) for part in packed.reshape(-1, length)]
        if "" in names:
            raise self.fail("a field has no name")
        if not names:
            return EMPTY
        counts: Counter[str] = Counter()
        for i, name in enumerate(names):  # some versions of MATLAB allowed a name twice
            counts[name] += 1
            names[i] = f"{name}_{counts[name]}" if counts[name] > 1 else name
        if len(set(names)) < len(names):
            raise self.fail("two fields have the same name")
        size = self._count_inner(prod(shape) * len(names)) // len(names)
        fields = {name: np.empty(size, dtype=object) for name in names}
        for i in range(size):
            for field in fields.values():
                field[i] = self._read_inner(depth)
        elements = np.empty(size, dtype=[(name, object) for name in names])
        for name, field in fields.items():
            elements[name] = field
        return elements.reshape(shape, order="F")

    def _read_sparse(self, shape: Shape, word: int) -> Sparse:
        rows, ends = self.read_numbers(), self.read_numbers()
        if word & LOGICAL:  # a byte for each, whatever the type says
            _, begin, end = self.read_element()
            parts = [np.frombuffer(self.content[begin:end], np.uint8)]
        else:
            parts = [self.read_numbers() for _ in range(2 if word & COMPLEX else 1)]
        if len(shape) != 2 or rows.dtype.kind == "f" or ends.dtype.kind == "f":
            raise self.fail("a sparse matrix is damaged")
        counts: npt.NDArray[np.int64] = np.diff(ends.astype(np.int64)).astype(np.int64)
        used = int(ends[-1]) if ends.size else -1
        if ends.size != shape[1] + 1 or ends[0] or (counts < 0).any():
            raise self.fail("the columns of a sparse matrix are damaged")
        if used > min(rows.size, *(part.size for part in parts)):
            raise self.fail("the values of a sparse matrix are missing")
        positions = rows[:used].astype(np.int64)
        if used and not (positions.min() >= 0 and positions.max() < shape[0]):
            raise self.fail("a value of a sparse matrix is outside of it")
        values = parts[0] if len(parts) == 1 else parts[0][:used] + 1j * parts[1][:used]
        values = _to_native(values[:used].astype(bool) if word & LOGICAL else values[:used])
        return Sparse(
            (shape[0], shape[1]), positions, np.repeat(np.arange(shape[1]), counts), values
        )


EMPTY, NO_TEXT = np.empty((0, 0)), np.array([], dtype="U1")
"""Empty values, as MATLAB writes [] and ''; all of them share one object"""


def _decode_name(content: bytes) -> str:
    return content.split(b"\0", 1)[0].decode("utf-8", "replace")


def _to_native(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _iter_old_variables(file: IO[bytes], size: int) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a file of version 4."""
    while header := file.read(20):
        if len(header) < 20:
            raise DamagedError("it ends in the middle of a variable")
        order = "<" if 0 <= struct.unpack("<i", header[:4])[0] < 10_000 else ">"
        kind, rows, columns, is_complex, name_length = struct.unpack(f"{order}5i", header)
        digits = [kind // 1000, kind // 100 % 10, kind // 10 % 10, kind % 10]
        if digits[0] != (order == ">") or digits[1] or digits[2] >= 6 or digits[3] > OLD_SPARSE:
            raise DamagedError(f"a variable is of the unknown kind {kind}")
        if min(rows, columns) < 0 or name_length < 1 or is_complex not in (0, 1):
            raise DamagedError("the size of a variable is damaged")
        stored = np.dtype(order + OLD_TYPES[digits[2]])
        length = rows * columns * stored.itemsize
        if name_length + length * (1 + is_complex) > size - file.tell():
            raise DamagedError("it ends in the middle of a variable")
        name = file.read(name_length).split(b"\0")[0].decode("latin-1")
        parts = [
            _to_native(np.frombuffer(file.read(length), stored)).reshape((rows, columns), order="F")
            for _ in range(1 + is_complex)
        ]
        values = parts[0] if not is_complex else parts[0] + 1j * parts[1]
        if digits[3] == OLD_TEXT:
            yield name, np.array(["".join(map(_to_character, row)) for row in values])
        elif digits[3] == OLD_SPARSE:
            yield name, _read_old_sparse(name, values)
        else:
            yield name, values


def _to_character(code: float) -> str:
    return chr(int(code)) if 0 <= code < 0xD800 else "\N{REPLACEMENT CHARACTER}"


def _read_old_sparse(name: str, table: npt.NDArray[Any]) -> Sparse:
    """Return a sparse matrix of version 4, whose last row has its size."""
    if table.ndim != 2 or not len(table) or table.shape[1] not in (3, 4):
        raise DamagedError(f'variable "{name}": a sparse matrix is damaged')
    real = table.real.astype(np.float64)
    limits = real[-1, :2]
    positions = real[:-1, :2]
    if not ((limits >= 0) & (limits < 2**31)).all() or not np.isfinite(positions).all():
        raise DamagedError(f'variable "{name}": a sparse matrix is damaged')
    if len(positions) and not ((positions >= 1) & (positions <= limits)).all():
        raise DamagedError(f'variable "{name}": a value of a sparse matrix is outside of it')
    values = real[:-1, 2] if table.shape[1] == 3 else real[:-1, 2] + 1j * real[:-1, 3]
    rows, columns = (positions[:, side].astype(np.int64) - 1 for side in (0, 1))
    return Sparse((int(limits[0]), int(limits[1])), rows, columns, values)


HDF5 = b"\x89HDF\r\n\x1a\n"
USER_BLOCK = 512
"""Bytes before the HDF5 data of version 7.3"""
INSTALL = 'pip install "slipstream[matlab]"'
MAX_NAMES = 5


class MatlabReader(TableReader):
    """Reads the columns of a variable; objects and version 7.3 in a process of its own."""

    def read(self, file: InputFile, options: ReadOptions) -> list[DataTable]:
        table = read_matlab(file.local_path, file.name, file.head, options)
        if table is not None:
            return [table]
        return read_isolated(read_objects, file, options, kind="a MATLAB file")


def read_matlab(path: Path, name: str, head: bytes, options: ReadOptions) -> DataTable | None:
    """Read a variable's fields as columns: the one that is named, or the only one there is.

    None where the file needs mat-io, which `read_objects` uses, in a process of its own.
    """
    version = _find_version(path, head)
    if version == "7.3":
        _require_matio(path, "is a MATLAB 7.3 file, which is HDF5")
        return None
    try:
        read = read_mat_file(path, version)
    except DamagedError as error:
        raise _explain(path, error) from None
    except MemoryError:
        raise _explain(path, DamagedError("it needs more memory than there is")) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if read.has_objects:
        _require_matio(path, "holds tables, datetimes or other objects of MATLAB")
        return None
    return _make_table(path, name, version, read.values, options)


def read_objects(path: Path, name: str, options: ReadOptions) -> list[DataTable]:
    """Read a file of version 7.3, or one with tables and other objects, as one table.

    Called in a process of its own (`isolated`): a damaged file can end it.
    """
    with path.open("rb") as file:
        version = _find_version(path, file.read(USER_BLOCK + len(HDF5)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about options of pandas, formats of durations
        import matio

        try:
            values = matio.load_from_mat(str(path), add_table_attrs=True)
        except Exception as error:  # what a damaged file raises has no type of its own
            raise _explain(path, error) from None
    named = {key: value for key, value in values.items() if not key.startswith("__")}
    return [_make_table(path, name, version, named, options)]


def _require_matio(path: Path, problem: str) -> None:
    if find_spec("matio") is None:
        raise UserError(f"{path}: {problem}; to read it: {INSTALL}")


def _make_table(
    path: Path, name: str, version: str, values: dict[str, Any], options: ReadOptions
) -> DataTable:
    variable, read = _choose(path, values, options.variable)
    notes = [f"left out: {', '.join(read.left_out[:MAX_NAMES])}"] if read.left_out else []
    if len(read.left_out) > MAX_NAMES:
        notes[0] += f" and {len(read.left_out) - MAX_NAMES} more"
    if read.scalars:
        listed = ", ".join(read.scalars[:MAX_NAMES])
        more = f" and {len(read.scalars) - MAX_NAMES} more" * (len(read.scalars) > MAX_NAMES)
        notes.append(
            f"one value for all rows, no input unless data.inputs names it: {listed}{more}"
        )
    details = [f"MATLAB {version}", *([f"variable {variable}"] if variable else [])]
    return wrap_table(
        to_arrow(read.columns),
        name,
        path=path,
        format=", ".join(details),
        units=read.units,
        scalars=read.scalars,
        notes=tuple(notes),
    )


def _find_version(path: Path, head: bytes) -> str:
    """Return the version of the format; other files are refused."""
    if head[USER_BLOCK:].startswith(HDF5):
        return "7.3"
    if head.startswith(HDF5):
        raise UserError(
            f"{path}: is an HDF5 file, but none of MATLAB's; save it in MATLAB, or export it as "
            "CSV or Parquet"
        )
    if find_byte_order(head) is not None or head.startswith(b"MATLAB 5"):
        return "5"
    if head[:4] == b"PK\x03\x04" or b"\0" not in head:
        content = "a ZIP or Excel file" if head.startswith(b"PK") else "a text file"
        ending = ".zip or .xlsx" if head.startswith(b"PK") else ".csv"
        raise UserError(f"{path}: is {content}, not a MATLAB file; rename it to {ending}")
    return "4"


def _explain(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path}: cannot be read as a MATLAB file: {summarize_error(error)}; save it again in "
        "MATLAB, or export it as CSV or Parquet"
    )


def _choose(path: Path, values: dict[str, Any], variable: str | None) -> tuple[str, MatColumns]:
    """Return the name and the columns of a variable; without a name, of the file's vectors."""
    content = f"it holds {list_content(values)}" if values else "it holds no variable"
    if variable is not None:
        try:
            value = find_variable(values, variable)
        except KeyError:
            raise UserError(f'{path}: has no "{variable}" (data.variable); {content}') from None
        read = to_columns(value, variable.rpartition(".")[2])
        if read is None:
            fields = get_fields(value)
            inside = f"it holds {list_content(fields)}" if fields else f"it is {describe(value)}"
            raise UserError(
                f'{path}: "{variable}" (data.variable) has no columns, which are vectors of equal '
                f"length; {inside}"
            )
        return variable, read
    tables = {
        name: read
        for name, value in values.items()
        if (is_table(value) or getattr(getattr(value, "dtype", None), "names", None))
        and (read := to_columns(value)) is not None
    }
    if len(tables) == 1:
        ((name, read),) = tables.items()
        unread = [f"{n} ({describe(v)})" for n, v in values.items() if n != name]
        return name, read._replace(left_out=(*read.left_out, *unread))
    vectors = {name: value for name, value in values.items() if name not in tables}
    read = _read_vectors(vectors) if not tables else None
    if read is None:
        raise UserError(
            f"{path}: set data.variable to what holds the columns, as in "
            f'"{next(iter(tables or values), "meas")}"; {content}'
        )
    return "", read


def _read_vectors(values: dict[str, Any]) -> MatColumns | None:
    """Return the vectors of a file as columns; None if the file has structs without columns."""
    if any(get_fields(value) is not None for value in values.values()) or not values:
        return None
    return select_columns(values)
