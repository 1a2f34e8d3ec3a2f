"""Tables for the estimator: what scikit-learn passes, with names, and predictions as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from slipstream.base.errors import UserError
from slipstream.config import Data
from slipstream.data.files import read_tables
from slipstream.data.series import MICROSECONDS, Ints, OrderedRows, iter_ordered, list_rows
from slipstream.data.table import to_arrow

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


class EstimatorError(UserError, ValueError):
    """A mistake in what was passed to an estimator: a ValueError too, as scikit-learn raises."""


def has_names(X: Any) -> bool:
    """Whether a table has names for its columns."""
    if hasattr(X, "toarray"):  # a sparse matrix, of which one kind is a dict
        return False
    return isinstance(X, (dict, pa.Table)) or hasattr(X, "columns") or hasattr(X, "collect_schema")


def read_inputs(X: Any, *, names: Sequence[str] | None, time: str | None) -> pa.Table:
    """Return the table of `X`; an array gets the names, or x0, x1 ..."""
    if has_names(X):
        return to_arrow(X, time=time)
    array = to_matrix(X, "X")
    if array.ndim != 2:
        raise EstimatorError(
            f"Expected 2D array, got {array.ndim}D array instead: Reshape your data: X has rows x "
            "columns"
        )
    if not array.shape[1]:
        raise EstimatorError(
            f"0 feature(s) (shape={array.shape}) while a minimum of 1 is required."
        )
    names = [f"x{i}" for i in range(array.shape[1])] if names is None else names
    if len(names) != array.shape[1]:
        raise EstimatorError(
            f"X has {array.shape[1]} features, but Forecaster is expecting {len(names)} features "
            "as input"
        )
    return pa.table(dict(zip(names, array.T, strict=True)))


def to_matrix(values: Any, name: str) -> Array:
    """Return finite numbers as an array of float64."""
    if hasattr(values, "toarray"):
        raise EstimatorError(f"{name} is a sparse matrix; pass a dense one: {name}.toarray()")
    array = np.asarray(values)
    if np.iscomplexobj(array):
        raise EstimatorError(f"Complex data not supported: {name} holds complex numbers")
    try:
        array = array.astype(np.float64)
    except ValueError as error:
        raise EstimatorError(f"{name}: {error}") from None
    if not np.isfinite(array).all():
        raise EstimatorError(f"Input {name} contains NaN, or infinity (inf)")
    return array


def refuse_dates(table: pa.Table, name: str, *, is_index: bool) -> None:
    """Refuse an input of dates, and say what they are for; it may be the index of pandas."""
    if not pa.types.is_temporal(table.schema.field(name).type):
        return
    dates, drop = f'X has a column of dates, "{name}"', "leave it out of X"
    if is_index:
        dates, drop = "X has an index of dates", "X.reset_index(drop=True) to leave it out"
    raise EstimatorError(
        f'{dates}, which is no input; set time="{name}" to order the rows and find gaps by it, or '
        f"{drop}"
    )


def read_targets(y: Any, num_rows: int, *, are_classes: bool) -> dict[str, Array]:
    """Return the columns of `y` by name; one without a name is called y."""
    if hasattr(y, "reset_index"):  # its index is that of X
        y = y.reset_index(drop=True)
    if has_names(y):
        columns = {name: np.asarray(column) for name, column in to_arrow(y).to_pydict().items()}
    else:
        array = np.asarray(y) if are_classes else to_matrix(y, "y")
        if are_classes and array.dtype.kind == "f" and (array != np.floor(array)).any():
            raise EstimatorError("Unknown label type: y is continuous; pass texts or integers")
        name = str(getattr(y, "name", None) or "y")
        if array.ndim == 1 or array.shape[1:] == (1,):
            columns = {name: array.reshape(-1)}
        else:
            columns = {f"{name}{i}": column for i, column in enumerate(array.T)}
    for column in columns.values():
        if len(column) != num_rows:
            raise EstimatorError(f"y has {len(column)} rows, and X has {num_rows}")
    return columns


def add_columns(table: pa.Table, columns: dict[str, Array]) -> pa.Table:
    """Return a table with more columns; one that it has already must be the same."""
    for name, column in columns.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.array(column))
        elif not _is_same(table[name].to_numpy(zero_copy_only=False), column):
            raise EstimatorError(
                f'X has a column "{name}" with other values than y, which has that name; rename one'
            )
    return table


def _is_same(first: Array, second: Array) -> bool:
    if first.dtype.kind in "fiu" and second.dtype.kind in "fiu":
        return bool(np.array_equal(first.astype(float), second.astype(float), equal_nan=True))
    return bool(first.tolist() == second.tolist())


class SeriesPlaces(NamedTuple):
    """The rows of one series among those of a table, in the order of time."""

    name: str
    rows: Ints
    repeated: tuple[tuple[int, Ints], ...] = ()
    """Rows of one time that `data.duplicates` merges: the one of `rows` that they become, and all
    of them"""


def find_series(table: pa.Table, data: Data) -> list[SeriesPlaces]:
    """Return where the rows of each series are, as predictions count them."""
    whole = data.model_copy(update={"where": {}, "path": None})
    (read,) = read_tables(whole, table)
    series = [SeriesPlaces(part.name, list_rows(part.rows)) for part in iter_ordered(read, whole)]
    if data.duplicates == "error":
        return series
    grouped = iter_ordered(read, whole.model_copy(update={"duplicates": "mean"}))
    last = -1 if data.duplicates == "last" else 0
    return [
        places._replace(repeated=tuple((int(rows[last]), rows) for rows in _list_groups(part)))
        for places, part in zip(series, grouped, strict=True)
    ]


def _list_groups(series: OrderedRows) -> list[Ints]:
    """Return the rows of each time that several rows have."""
    repeated = series.repeated
    return [] if repeated is None else np.split(repeated.rows, repeated.begins[1:])


def take_columns(table: pa.Table, names: Sequence[str]) -> Array:
    """Return columns of predictions as an array."""
    columns = [table[name].to_numpy(zero_copy_only=False) for name in names]
    return np.stack(columns, axis=-1) if columns else np.empty((table.num_rows, 0))


def place_rows(
    predictions: pa.Table, names: Sequence[str], series: Sequence[SeriesPlaces], num_rows: int
) -> Array:
    """Return columns of estimates, each in the row of the table that it is for; NaN in others."""
    values = take_columns(predictions, names)
    has_text = values.dtype == object
    fill = None if has_text else np.nan
    placed: Array = np.full((num_rows, len(names)), fill, dtype=object if has_text else np.float64)
    owners, numbers = predictions["series"].to_pylist(), predictions["row"].to_numpy()
    rows_of = {places.name: places.rows for places in series}
    placed[[rows_of[owner][number] for owner, number in zip(owners, numbers, strict=True)]] = values
    return placed


def pad_start(table: pa.Table, rows: Ints, count: int, time: str | None, step: float) -> pa.Table:
    """Return the first rows of a series after as many copies of its first row, at its time step."""
    numbers = np.concatenate([np.repeat(rows[:1], count), rows[:count]])
    padded = table.take(pa.array(numbers))
    if time is None or time not in table.column_names:
        return padded
    place, kind = table.column_names.index(time), table[time].type
    known = table[time].take(pa.array(rows[:count]))
    back = np.arange(-count, 0)
    if pa.types.is_temporal(kind):
        moments = known.cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
        before = moments[0] + np.round(back * step * MICROSECONDS).astype(np.int64)
        column = pa.array(np.concatenate([before, moments])).cast(pa.timestamp("us")).cast(kind)
    else:
        values = known.to_numpy().astype(float)
        column = pa.array(np.concatenate([values[0] + back * step, values]))
    return padded.set_column(place, time, column)
