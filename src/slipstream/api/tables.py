"""Tables for the estimator: what scikit-learn passes, with names, and predictions as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from slipstream.data.io.memory import to_arrow
from slipstream.errors import UserError

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


def read_targets(y: Any, num_rows: int, *, are_classes: bool) -> dict[str, Array]:
    """Return the columns of `y` by name; one without a name is called y."""
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
    for name, column in columns.items():
        if name in table.column_names:
            raise EstimatorError(f'X has a column "{name}", which is the name of y; rename one')
        table = table.append_column(name, pa.array(column))
    return table


def place_rows(table: pa.Table, names: Sequence[str], *, num_rows: int | None) -> Array:
    """Return columns as an array; with `num_rows`, every row in its place, and NaN in others."""
    columns = [table[name].to_numpy(zero_copy_only=False) for name in names]
    values = np.stack(columns, axis=-1) if columns else np.empty((table.num_rows, 0))
    if num_rows is None:
        return values
    has_text = values.dtype == object
    fill = None if has_text else np.nan
    placed: Array = np.full((num_rows, len(names)), fill, dtype=object if has_text else np.float64)
    placed[table["row"].to_numpy()] = values
    return placed
