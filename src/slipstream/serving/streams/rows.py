"""Rows that arrive at a stream, checked and in physical units, as `predict` reads those of a file.

A window never spans a gap in time or a row that is left out because a value is missing: after
either, a stream needs a full context again. Shapes: N new rows, K remembered ones, F inputs, S
static columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.config import Config, Signature, Split
from slipstream.data import missing
from slipstream.data.io.columns import read_numbers, read_times
from slipstream.data.io.files import read_tables
from slipstream.data.io.table import DataTable
from slipstream.data.roles import Roles
from slipstream.data.scaler import Scaler
from slipstream.data.series import (
    MICROSECONDS,
    Flags,
    Floats,
    Ints,
    Times,
    find_gaps,
    is_date,
    prepare_series,
)
from slipstream.errors import UserError
from slipstream.serving.limits import RequestError
from slipstream.text import format_count

MOST_NOTES = 3
"""Gaps that the notes of one request name"""


@dataclass(frozen=True)
class StreamState:
    """What a stream remembers of its rows."""

    num_rows: int = 0
    """Rows that it has received"""
    missing_rows: int = 0
    """Rows that it needs before the next one has a full context"""
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """`inputs` [K, F]: the last rows in one piece, at most one less than the context; `last` [F]:
    the last known value of each input; `static` [S]; `time` [1] of the last row; `filter.*`: the
    state of `predict.filter`. Where rows are predicted by `portable.stream`: its state"""


@dataclass(frozen=True)
class ArrivedRows:
    """The rows of one request, behind those that the stream remembers."""

    inputs: Floats
    """[K + N, F]"""
    ends: Ints
    """The new rows that end a full context, counted from the first remembered one"""
    begins: Ints
    """[K + N]: where the rows in one piece begin that each row belongs to"""
    static: Floats | None
    time: Times | None
    """[N]"""
    state: StreamState
    """What the stream remembers afterwards"""
    notes: tuple[str, ...]


class StreamReader:
    """Reads rows for a model as its config says."""

    def __init__(self, config: Config, signature: Signature, scaler: Scaler) -> None:
        split = Split(train=0.7, val=0.1, test=0.2)
        self.data = config.data.model_copy(update={"where": {}, "id": None, "split": split})
        self.untimed = self.data.model_copy(update={"time": None})
        self.signature, self.scaler = signature, scaler
        self.roles = Roles(signature.inputs, signature.targets, signature.static)

    def read(self, source: Any, state: StreamState) -> ArrivedRows:
        """Check new rows, a table or the path of a CSV, and append them to the stream's."""
        table = self.read_table(source)
        time, gaps = self.read_times(table, state)
        static = self._read_static(table, state)
        values, last = self._read_inputs(table, state)
        scaled = np.empty(len(values), dtype=np.float32)
        for number, name in enumerate(self.signature.inputs):
            self.scaler.apply(name, values[:, number], scaled)  # refuses what it cannot scale
        before = state.arrays.get("inputs", values[:0])
        inputs = np.concatenate([before, values])
        begins = _find_begins(_find_unknown(values), gaps, len(before))
        places = np.arange(len(before), len(inputs))
        long_enough = places - begins[places] + 1 >= self.signature.context
        retained = min(len(inputs) - int(begins[-1]), self.signature.context - 1)
        arrays = {"inputs": inputs[len(inputs) - retained :].copy(), "last": last, "static": static}
        arrays["time"] = None if time is None else time[-1:]
        after = StreamState(
            num_rows=state.num_rows + table.num_rows,
            missing_rows=self.signature.context - 1 - retained,
            arrays={name: array for name, array in arrays.items() if array is not None},
        )
        notes = (*self.describe_gaps(state, gaps), *self._describe_missing(state, values))
        return ArrivedRows(inputs, places[long_enough], begins, static, time, after, notes)

    def read_table(self, source: Any) -> DataTable:
        """Return the rows, a table or the path of a CSV, with numbers parsed."""
        data = self.data
        if isinstance(source, str):
            data, source = data.model_copy(update={"path": source}), None
        (table,) = read_tables(data, source)
        return table

    def read_times(self, table: DataTable, state: StreamState) -> tuple[Times | None, Flags]:
        """Return the rows' times, and which of them do not follow in time."""
        no_gaps: Flags = np.zeros(table.num_rows, dtype=bool)
        name = self.data.time_column
        if name is None:
            return None, no_gaps
        time = read_times(table, name, self.data.time_format)
        known = state.arrays.get("time")
        before = time[:1] if known is None else np.atleast_1d(known)
        if before.dtype != time.dtype:
            raise UserError(
                f'column "{name}" held dates in earlier rows and numbers now, or vice versa'
            )
        steps = np.diff(np.concatenate([before, time]))
        wrong = np.flatnonzero(steps[1:] <= 0 if known is None else steps <= 0)
        if len(wrong):
            row = int(wrong[0]) + (known is None)
            self._refuse_order(table, row, float(steps[row]))
        if self.signature.step is None:
            return time, no_gaps
        usual = self.signature.step * (MICROSECONDS if is_date(time) else 1.0)
        gaps = find_gaps(steps, usual, self.data)
        gaps[0] &= known is not None
        return time, gaps

    def _refuse_order(self, table: DataTable, row: int, step: float) -> None:
        which = "the same time as" if step == 0 else "earlier than"
        before = table.locate_row(row - 1) if row else "the last row of the stream"
        here = table.locate_cell(row, str(self.data.time_column))
        raise RequestError(409, f"{here}: {which} {before}; a stream's rows come in order of time")

    def _read_inputs(self, table: DataTable, state: StreamState) -> tuple[Floats, Floats]:
        """Return the new rows' inputs, NaN in those that are left out, and the last known ones."""
        names = self.signature.inputs
        columns = [read_numbers(table, name, "data.inputs") for name in names]
        values = np.stack(columns, axis=1)
        if self.data.missing == "error":
            if np.isnan(values).any():
                self._refuse_missing(table)
            return values, values[-1]
        nothing = np.full(len(names), np.nan)
        joined = np.concatenate([state.arrays.get("last", nothing)[None], values])
        filled = np.stack([missing.fill_forward(column) for column in joined.T], axis=1)
        return (filled if self.data.missing == "forward" else joined)[1:], filled[-1]

    def _refuse_missing(self, table: DataTable) -> None:
        """Refuse missing values as `predict` does."""
        raw = prepare_series([table], self.untimed, self.roles, min_rows=1, targets=False)
        for name in self.signature.inputs:
            raw.read_column(name)

    def _read_static(self, table: DataTable, state: StreamState) -> Floats | None:
        names = self.signature.static
        if not names:
            return None
        values = np.stack([read_numbers(table, name, "data.static") for name in names], axis=1)
        first = state.arrays.get("static", values[0])
        wrong = np.argwhere(values != first)
        if len(wrong):
            row, column = map(int, wrong[0])
            raise UserError(
                f"{table.locate_cell(row, names[column])}: is {values[row, column]:g}, not the "
                f"{first[column]:g} that the stream begins with; a data.static column is constant "
                "within a series"
            )
        return np.asarray(first)

    def describe_gaps(self, state: StreamState, gaps: Flags) -> list[str]:
        """Note where a context begins anew because of the time."""
        return [
            f"row {state.num_rows + row}: its step in time is not the {self.signature.step:g} that "
            "the model was trained on; the context begins anew there"
            for row in np.flatnonzero(gaps)[:MOST_NOTES]
        ]

    def _describe_missing(self, state: StreamState, values: Floats) -> list[str]:
        rows = np.flatnonzero(_find_unknown(values))
        if not len(rows):
            return []
        last = state.num_rows + rows[-1]
        return [
            f"left out {format_count(len(rows), 'row')} with a missing value; the context begins "
            f"anew after row {last}"
        ]


def _find_unknown(values: Floats) -> Flags:
    """Mark the rows of which a value is missing."""
    return np.asarray(np.isnan(values).any(axis=1))


def _find_begins(unknown: Flags, gaps: Flags, num_before: int) -> Ints:
    """Return for every row where the rows in one piece begin that it belongs to; behind itself for
    a row that is left out."""
    places = np.arange(len(unknown)) + num_before
    begins = np.where(unknown, places + 1, np.where(gaps, places, 0))
    return np.concatenate([np.zeros(num_before, dtype=np.int64), np.maximum.accumulate(begins)])
