"""Values of MATLAB as columns of a table.

Readers return numpy arrays in MATLAB's shapes: structs with named fields, cells of objects, texts.
The fields of a struct that are equally long are columns, whether they lie or stand; what is one
value holds for every row.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

MOST_LISTED = 12
MAX_DENSE = 50_000_000
"""Values of a sparse matrix, zeros included, up to which it is read"""
STEP = re.compile(r"(?P<name>[^.(){}]+)(?:[({](?P<number>\d+)[)}])?")
"""A name on the way to a variable, with the element of an array of structs or cells: cell(2)"""


class Unread(NamedTuple):
    """A value without numbers or text, such as a function."""

    kind: str


class Sparse(NamedTuple):
    """A sparse matrix: the places and the values of what is not zero."""

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
    """Fields that are no columns, and why"""


def find_variable(values: Mapping[str, Any], variable: str) -> Any:
    """Return the variable of a name, or what a path within it leads to; KeyError if nothing is."""
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
    """Yield the fields of a struct, and those of the structs and tables in it."""
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
    arrays = {name: some for name, some in cells.items() if some is not None and some.size}
    lengths = Counter(some.size for some in arrays.values() if some.ndim == 1 and some.size > 1)
    matrices = [some for some in arrays.values() if some.ndim == 2]
    if lengths:
        rows = max(lengths, key=lambda length: (lengths[length], length))
    elif matrices:
        rows = max(matrices[0].shape)
    else:
        return None
    columns: dict[str, Any] = {}
    scalars, left_out = [], []
    for name, value in fields.items():
        some = arrays.get(name)
        if some is None:
            left_out.append(f"{name} ({describe(value)})")
        elif some.size == 1:
            columns[name] = np.repeat(some.reshape(1), rows)
            scalars.append(name)
        elif some.shape == (rows,):
            columns[name] = some
        elif some.ndim == 2 and rows in some.shape:
            tall = some if some.shape[0] == rows else some.T
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
        if any(some is None or some.size != 1 for some in cells):
            return None
        columns[name] = np.concatenate([some.reshape(1) for some in cells if some is not None])
    return MatColumns(columns, {}, (), ())


def _read_table(frame: Any) -> MatColumns:
    """Return the columns of a table; the row times of a timetable are the first."""
    columns: dict[str, Any] = {}
    if frame.index.dtype.kind in "mM":
        columns[str(frame.index.name or "Time")] = to_values(frame.index.to_numpy())
    left_out = []
    for name in map(str, frame.columns):
        some = to_values(frame[name].to_numpy())
        if some is None or some.ndim > 1:
            left_out.append(f"{name} ({frame[name].dtype})")
        else:
            columns[name] = some
    units = frame.attrs.get("VariableUnits") or frame.attrs.get("varUnits") or []
    named = zip(map(str, frame.columns), units, strict=False)
    return MatColumns(columns, {name: str(u) for name, u in named if u}, (), tuple(left_out))


def to_values(value: Any) -> Any:
    """Return numbers, times or texts as an array of one dimension, or of two for a matrix.

    Durations become seconds. None for what has no such form.
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
    """Return cells that each hold one number or one text; None for others."""
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
        return f"table with {', '.join(map(str, value.columns[:MOST_LISTED]))}".removesuffix(
            " with "
        )
    fields = get_fields(value)
    if fields is not None:
        listed = ", ".join(list(fields)[:MOST_LISTED])
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
    """List what a file holds."""
    some = [f"{name} ({describe(value)})" for name, value in list(values.items())[:MOST_LISTED]]
    more = f" and {len(values) - MOST_LISTED} more" * (len(values) > MOST_LISTED)
    return ", ".join(some) + more
