"""Rows of a stream that are predicted one after the other by `portable.stream`: where a state is
carried from row to row, or steps of `data.prepare` make the model's columns.

Shapes: N predictions, H predicted rows, C targets, Q quantiles or classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from slipstream.data.io.table import DataTable
from slipstream.data.series import Floats, Ints, Times
from slipstream.errors import UserError
from slipstream.portable.stream import Stream, StreamPrediction
from slipstream.serving.streams.rows import StreamReader, StreamState

CHUNK_ROWS = 32
"""Rows that are predicted before the model's thread is free for others"""


class SteppedRows(NamedTuple):
    """What the rows of one request gave."""

    values: Floats
    """[N, H, C], with quantiles behind, or [N, H, Q] of classes"""
    ends: Ints
    """Rows of the stream after which there is a prediction"""
    time: Times | None
    """Of all new rows"""
    state: StreamState
    notes: tuple[str, ...]


class RowSteps:
    """The rows of one request on their way through the model; the stream's own state is not
    touched."""

    def __init__(
        self, name: str, source: Any, state: StreamState, stream: Stream, reader: StreamReader
    ) -> None:
        self._name, self._before, self._stream = name, state, stream
        table = reader.read_table(source)
        self._time, gaps = reader.read_times(table, state)
        self._notes = tuple(reader.describe_gaps(state, gaps))
        columns = [_list_values(table, one) for one in table.column_names]
        self._rows = [
            dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)
        ]
        self._arrays = dict(state.arrays)
        self._position = 0
        self._predictions: dict[int, StreamPrediction] = {}

    @property
    def is_done(self) -> bool:
        return self._position == len(self._rows)

    def advance(self) -> None:
        """Predict the next rows; one thread does at a time."""
        stream, name = self._stream, self._name
        if self._arrays:
            stream.load_state(self._arrays, name)
        try:
            for _ in range(min(CHUNK_ROWS, len(self._rows) - self._position)):
                prediction = stream.push(self._rows[self._position], id=name)
                if prediction is not None:
                    self._predictions[self._before.num_rows + self._position] = prediction
                self._position += 1
            self._arrays = stream.save_state(name)
        except UserError as error:
            raise UserError(f"row {self._position + 1} of the request: {error}") from None
        finally:
            if name in stream.ids:
                stream.reset(name)

    def finish(self, signature: Any) -> SteppedRows:
        """Return the predictions of all rows and the stream's new state."""
        every = list(self._predictions.values())
        shape = (signature.steps_out, len(signature.classes or signature.targets))
        values = np.empty(
            (0, *shape, *((len(signature.quantiles),) if signature.quantiles else ()))
        )
        if every:
            values = np.stack([_select(one) for one in every])
        missing = 0
        if self._stream.regime == "window":
            counts = [int(a[0]) for n, a in self._arrays.items() if n.endswith(".counts")]
            missing = max(signature.context - 1 - min(counts, default=0), 0)
        state = StreamState(self._before.num_rows + len(self._rows), missing, self._arrays)
        ends = np.array(list(self._predictions), dtype=np.int64)
        return SteppedRows(values, ends, self._time, state, self._notes)


def _list_values(table: DataTable, name: str) -> list[Any]:
    try:
        values: list[Any] = table.read_column(name).to_pylist()
    except (pa.ArrowException, OverflowError, ValueError, LookupError) as error:
        # a date beyond year 9999, a zone that does not exist, text that is not UTF-8
        raise UserError(f'column "{name}": a value is out of range ({error})') from None
    return values


def _select(prediction: StreamPrediction) -> Floats:
    """Return the numbers of a prediction as the graph has them."""
    if prediction.probabilities is not None:
        return prediction.probabilities
    if prediction.quantiles is not None:
        return prediction.quantiles
    assert prediction.point is not None
    return prediction.point
