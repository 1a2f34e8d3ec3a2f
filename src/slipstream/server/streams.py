"""Streams of the server: a state for each, rows in, predictions out."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
import zipfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.text import format_count
from slipstream.config import Config, Signature, Split
from slipstream.config.prepare import ResampleStep
from slipstream.data import series
from slipstream.data.columns import read_numbers, read_times
from slipstream.data.files import read_tables
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
from slipstream.data.table import DataTable
from slipstream.inference.stream import Stream, StreamPrediction, parse_time
from slipstream.server.bodies import RequestError, ServerLimits

MAX_NOTES = 3
"""Gaps that the notes of one request name"""


@dataclass(frozen=True)
class StreamState:
    """The state of a stream: its latest rows and counts."""

    num_rows: int = 0
    """Rows that the stream has received"""
    missing_rows: int = 0
    """Rows that the stream needs before the next row has a full context"""
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """`inputs` [K, F]: the last rows in one piece, at most one less than the context; `last` [F]:
    the last known value of each input; `static` [S]; `time` [1] of the last row; `filter.*`: the
    state of `predict.filter`. Where rows are predicted by `portable.stream`: its state"""


@dataclass(frozen=True)
class ArrivedRows:
    """The rows of one request, after the rows of the stream's state."""

    inputs: Floats
    """[K + N, F]"""
    ends: Ints
    """The new rows that end a full context, counted from the first row of the state"""
    begins: Ints
    """[K + N]: the first row of the segment without gaps that each row belongs to"""
    static: Floats | None
    time: Times | None
    """[N]"""
    state: StreamState
    """The new state of the stream"""
    notes: tuple[str, ...]


class StreamReader:
    """Reads rows of a stream by the run's config."""

    def __init__(self, config: Config, signature: Signature, scaler: Scaler) -> None:
        split = Split(train=0.7, val=0.1, test=0.2)
        self.data = config.data.model_copy(update={"where": {}, "id": None, "split": split})
        self.untimed = self.data.model_copy(update={"time": None})
        self.signature, self.scaler = signature, scaler
        self.resamples = any(isinstance(step, ResampleStep) for step in self.data.prepare)
        """Whether rows become others, whose times are not those of the rows"""
        self.roles = Roles(signature.inputs, signature.targets, signature.static)

    def read(self, source: Any, state: StreamState) -> ArrivedRows:
        """Check new rows, a table or the path of a CSV, and append them to the stream's rows."""
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
        """Return the rows' times, and which rows come after a gap."""
        no_gaps: Flags = np.zeros(table.num_rows, dtype=bool)
        name = self.data.time_column
        if name is None:
            return None, no_gaps
        time = read_times(table, name, self.data.time_format)
        known = state.arrays.get("arrived", state.arrays.get("time"))
        before = time[:1] if known is None else np.atleast_1d(known)
        if before.dtype != time.dtype:
            raise UserError(
                f'column "{name}" held dates in earlier rows and numbers now, or vice versa'
            )
        steps = np.diff(np.concatenate([before, time]))
        disordered = steps < 0 if series.accepts_repeated(self.data) else steps <= 0
        wrong = np.flatnonzero(disordered[1:] if known is None else disordered)
        if len(wrong):
            row = int(wrong[0]) + (known is None)
            self._refuse_order(table, row, float(steps[row]))
        if self.signature.step is None or self.resamples:
            return time, no_gaps
        usual = self.signature.step * (MICROSECONDS if is_date(time) else 1.0)
        gaps = find_gaps(steps, usual, self.data) & (steps > 0)
        gaps[0] &= known is not None
        return time, gaps

    def _refuse_order(self, table: DataTable, row: int, step: float) -> None:
        order = "the same time as" if step == 0 else "earlier than"
        before = table.locate_row(row - 1) if row else "the last row of the stream"
        here = table.locate_cell(row, str(self.data.time_column))
        raise RequestError(409, f"{here}: {order} {before}; a stream's rows come in order of time")

    def _read_inputs(self, table: DataTable, state: StreamState) -> tuple[Floats, Floats]:
        """Return the new rows' inputs, NaN in rows that are left out, and the last known inputs."""
        names = self.signature.inputs
        columns = [read_numbers(table, name, "data.inputs") for name in names]
        values = np.stack(columns, axis=1)
        if self.data.missing == "error":
            if np.isnan(values).any():
                self._refuse_missing(table)
            return values, values[-1]
        nothing = np.full(len(names), np.nan)
        joined = np.concatenate([state.arrays.get("last", nothing)[None], values])
        filled = np.stack([series.fill_forward(column) for column in joined.T], axis=1)
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
        """Note where a context starts again after a gap in time."""
        return [
            f"row {state.num_rows + row}: its step in time is not the {self.signature.step:g} that "
            "the model was trained on; the context begins anew there"
            for row in np.flatnonzero(gaps)[:MAX_NOTES]
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
    """Mark the rows with a missing value."""
    return np.asarray(np.isnan(values).any(axis=1))


def _find_begins(unknown: Flags, gaps: Flags, num_before: int) -> Ints:
    """Return the first row of each row's segment without gaps; a row that is left out gets the row
    after itself."""
    places = np.arange(len(unknown)) + num_before
    begins = np.where(unknown, places + 1, np.where(gaps, places, 0))
    return np.concatenate([np.zeros(num_before, dtype=np.int64), np.maximum.accumulate(begins)])


VERSION = 1
"""Version of the file of streams; a file of another version is refused"""
HEADER = "streams.json"


def save_streams(path: Path, states: Mapping[str, StreamState], hashes: Mapping[str, str]) -> None:
    """Write all streams; `hashes` are the sums of the model's files."""
    streams = [
        {"id": name, "rows": state.num_rows, "missing_rows": state.missing_rows}
        for name, state in states.items()
    ]
    header = {"version": VERSION, "model": dict(hashes), "streams": streams}
    try:
        with (
            runs.replace_atomically(path) as temporary,
            zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
        ):
            archive.writestr(HEADER, json.dumps(header))
            for number, state in enumerate(states.values()):
                for name, array in state.arrays.items():
                    archive.writestr(f"{number}/{name}", _to_bytes(array))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None


def load_streams(path: Path, hashes: Mapping[str, str]) -> dict[str, StreamState]:
    """Read the streams of a file; there are none where it does not exist."""
    if not path.exists():
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; create it first")
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read(HEADER))
            if header["version"] != VERSION or header["model"] != dict(hashes):
                raise UserError(
                    f"{path}: its streams are of another model; name another file for the state, "
                    "or remove this one"
                )
            arrays: dict[str, dict[str, Any]] = {}
            for inner in archive.namelist():
                number, _, name = inner.partition("/")
                if name:
                    content = io.BytesIO(archive.read(inner))
                    arrays.setdefault(number, {})[name] = np.load(content, allow_pickle=False)
            return {
                stream["id"]: StreamState(
                    stream["rows"], stream["missing_rows"], arrays[str(number)]
                )
                for number, stream in enumerate(header["streams"])
            }
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is no file of streams, or is damaged ({error})") from None


def _to_bytes(array: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=False)
    return sink.getvalue()


ID = re.compile(r"[A-Za-z0-9._~:@-]{1,128}")


@dataclass
class OpenStream:
    """A stream's state; requests to it are worked on one after the other."""

    state: StreamState
    used_s: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Streams:
    """All streams, the least recently used first."""

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self._streams: OrderedDict[str, OpenStream] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    @asynccontextmanager
    async def open(self, name: str, expected: int | None) -> AsyncIterator[OpenStream]:
        """Enter a stream, which is created if need be; one that has received nothing does not
        stay. It has to have the expected number of rows."""
        _check_name(name)
        while True:
            stream = self._find_or_create(name)
            async with stream.lock:
                if self._streams.get(name) is not stream:
                    continue  # removed while this request waited for its turn
                try:
                    _check_position(name, stream.state.num_rows, expected)
                    yield stream
                    stream.used_s = self.clock()
                    self._streams.move_to_end(name)
                finally:
                    if not stream.state.num_rows:
                        self._streams.pop(name, None)
                return

    def find(self, name: str) -> OpenStream:
        """Return a stream that has received rows."""
        _check_name(name)
        self._remove_idle()
        stream = self._streams.get(name)
        if stream is None or not stream.state.num_rows:
            raise RequestError(404, f'there is no stream "{name}"; the first rows sent create it')
        return stream

    async def remove(self, name: str) -> None:
        """Remove a stream, once the requests before this one are done with it."""
        stream = self.find(name)
        async with stream.lock:
            if self._streams.get(name) is stream:
                del self._streams[name]

    def export_states(self) -> dict[str, StreamState]:
        return {name: stream.state for name, stream in self._streams.items()}

    def import_states(self, states: dict[str, StreamState]) -> None:
        """Add streams that an earlier server saved, as used now."""
        for name, state in list(states.items())[-self.limits.streams :]:
            self._streams[name] = OpenStream(state, self.clock())

    def _find_or_create(self, name: str) -> OpenStream:
        self._remove_idle()
        if name not in self._streams:
            if len(self._streams) >= self.limits.streams:
                raise RequestError(
                    503,
                    f"there are {len(self._streams):,} streams, as many as the server keeps; "
                    "remove those that are done (DELETE /streams/ID)",
                    {"Retry-After": "60"},
                )
            self._streams[name] = OpenStream(StreamState(), self.clock())
        return self._streams[name]

    def _remove_idle(self) -> None:
        """Remove streams that had no row for too long."""
        oldest = self.clock() - self.limits.idle_s
        while self._streams:
            name, stream = next(iter(self._streams.items()))
            if stream.used_s >= oldest or stream.lock.locked():
                return
            del self._streams[name]


def _check_name(name: str) -> None:
    if not ID.fullmatch(name):
        raise RequestError(
            422, "a stream's id has 1 to 128 letters, digits or characters of . _ ~ : @ -"
        )


def _check_position(name: str, num_rows: int, expected: int | None) -> None:
    if expected is not None and expected != num_rows:
        raise RequestError(
            409,
            f'stream "{name}" has {num_rows} rows, not {expected}; go on from there, or remove the '
            "stream and send the rows of the last context again",
            extra={"rows": num_rows},
        )


COUNTS = re.compile(r"\d+\.counts")
"""The arrays of a stream's state that begin with the rows of a member's context"""
CHUNK_ROWS = 32
"""Rows that are predicted before the model's thread is free for others"""


class SteppedRows(NamedTuple):
    """The predictions of the rows of one request."""

    values: Floats
    """[N, H, C], [N, H, C, Q] with quantiles, or [N, H, Q] for classes"""
    ends: Ints
    """Rows of the stream after which there is a prediction, as the model counts them: where rows
    are resampled or merged, those that they become"""
    time: Times | None
    """Times of all rows from `first_row` on"""
    first_row: int
    num_rows: int
    """Rows of the stream, as the model counts them"""
    state: StreamState
    notes: tuple[str, ...]
    factors: Floats | None = None
    """[N, 1, C]: the relative size of the stream's series, with `data.scale_by = "series"`"""


class RowSteps:
    """The rows of one request on their way through the model, which leaves the stream's own state
    unchanged."""

    def __init__(
        self, name: str, source: Any, state: StreamState, stream: Stream, reader: StreamReader
    ) -> None:
        self._name, self._before, self._stream = name, state, stream
        table = reader.read_table(source)
        self._time, gaps = reader.read_times(table, state)
        self._notes = tuple(reader.describe_gaps(state, gaps))
        columns = [_list_values(table, name) for name in table.column_names]
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
        """Predict the next rows; called by one thread at a time."""
        stream, name = self._stream, self._name
        if self._arrays:
            stream.load_state(self._arrays, name)
        try:
            for _ in range(min(CHUNK_ROWS, len(self._rows) - self._position)):
                prediction = stream.push(self._rows[self._position], id=name)
                for found in () if prediction is None else (*prediction.earlier, prediction):
                    row = self._before.num_rows + self._position
                    self._predictions[found.row if stream.merges else row] = found
                self._position += 1
            self._arrays = stream.save_state(name)
        except UserError as error:
            raise UserError(f"row {self._position + 1} of the request: {error}") from None
        finally:
            if name in stream.ids:
                stream.reset(name)

    def finish(self, signature: Any) -> SteppedRows:
        """Return the predictions of all rows and the stream's new state."""
        predictions = list(self._predictions.values())
        shape = (signature.steps_out, len(signature.classes or signature.targets))
        values = np.empty(
            (0, *shape, *((len(signature.quantiles),) if signature.quantiles else ()))
        )
        if predictions:
            values = np.stack([_select(prediction) for prediction in predictions])
        missing = 0
        if self._stream.regime == "window":
            counts = [int(a[0]) for n, a in self._arrays.items() if COUNTS.fullmatch(n)]
            missing = max(signature.context - 1 - min(counts, default=0), 0)
        state = StreamState(self._before.num_rows + len(self._rows), missing, self._arrays)
        ends = np.array(list(self._predictions), dtype=np.int64)
        factors = None
        if predictions and predictions[0].factor is not None:
            factors = np.stack([np.asarray(prediction.factor) for prediction in predictions])
        time, first_row, num_rows = self._time, self._before.num_rows, state.num_rows
        if self._stream.merges:
            num_rows = int(self._arrays["count"])
            first_row = int(ends[0]) if len(ends) else num_rows
            time = self._list_times(first_row, num_rows)
        return SteppedRows(values, ends, time, first_row, num_rows, state, self._notes, factors)

    def _list_times(self, first_row: int, num_rows: int) -> Times | None:
        """Return the times of the rows that the model was given, from the first prediction on;
        those after which there is no prediction count on by the usual step."""
        if self._time is None:
            return None
        unit = MICROSECONDS if is_date(self._time) else 1.0
        step = (self._stream.signature.step or 0.0) * unit
        times = np.zeros(num_rows - first_row, dtype=self._time.dtype)
        for row in range(first_row, num_rows):
            prediction = self._predictions.get(row)
            if prediction is None:
                times[row - first_row] = times[row - first_row - 1] + step
            else:
                assert prediction.time is not None
                times[row - first_row] = parse_time(prediction.time, None).value
        return times


def _list_values(table: DataTable, name: str) -> list[Any]:
    try:
        values: list[Any] = table.read_column(name).to_pylist()
    except (pa.ArrowException, OverflowError, ValueError, LookupError) as error:
        # a date beyond year 9999, a zone that does not exist, text that is not UTF-8
        raise UserError(f'column "{name}": a value is out of range ({error})') from None
    return values


def _select(prediction: StreamPrediction) -> Floats:
    """Return the numbers of a prediction in the shape of the graph's output."""
    if prediction.probabilities is not None:
        return prediction.probabilities
    if prediction.quantiles is not None:
        return prediction.quantiles
    assert prediction.point is not None
    return prediction.point
