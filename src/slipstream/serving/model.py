"""A trained run behind the server: windows from a table, calls of onnxruntime, predictions."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slipstream.config import Config, Signature
from slipstream.data.prepare.chain.replay import Replay
from slipstream.data.scaler import merge_scalers
from slipstream.data.series import Floats, Ints, SeriesIndex, Times, is_date
from slipstream.errors import UserError
from slipstream.exporting.interface import make_interface
from slipstream.portable.filters import PredictionFilter, design_filter
from slipstream.portable.model import PortableRun
from slipstream.portable.rows import (
    NewRows,
    PhysicalWindows,
    describe_unknown_future,
    find_last_windows,
    read_new_rows,
)
from slipstream.portable.stream import Regime, Stream
from slipstream.portable.table import WindowPlaces
from slipstream.serving.batching import Arrays
from slipstream.serving.carried import TablePass
from slipstream.serving.streams.rows import ArrivedRows, StreamReader, StreamState
from slipstream.serving.streams.stepwise import RowSteps, SteppedRows
from slipstream.serving.tables import TableMaker

if TYPE_CHECKING:
    import pyarrow as pa

PADDINGS = (1, 2, 4, 8)
"""What the number of windows in a call may have to be a multiple of"""
TRIAL_SIZES = (1, 2, 3, 5)
SLOW_S = 0.01
"""A model that takes longer for one window has nothing to gain from batches"""
CSV_NAME = "request.csv"


class Answered(NamedTuple):
    """The table of an answer and, of a stream, its new state."""

    table: pa.Table
    state: StreamState


@dataclass(frozen=True)
class RequestWindows:
    """The windows of one request, and how their predictions become an answer."""

    num_windows: int
    gather: Callable[[int, int], Arrays]
    finish: Callable[[Arrays], Answered]
    notes: tuple[str, ...]
    table_pass: TablePass | None = None
    """What predicts them instead, where the state is carried on"""


class ServedModel:
    """A run and its graph in onnxruntime."""

    def __init__(self, run: PortableRun, graph: bytes, regime: Regime = "auto") -> None:
        from slipstream.exporting.onnx.sessions import open_session

        self.interface = make_interface(run)
        self.session = open_session(graph)
        self.name = run.run.folder.name
        self.description = run.description
        self.config: Config = run.first.config
        self.signature: Signature = _join_signatures(run)
        parts = [member.first.scaler for member in (*run.members, run.members[run.reference])]
        self.scaler = merge_scalers(run.first.scaler.kind, parts)
        self.limits = run.first.limits
        self.member = run.members[run.reference]
        self.reader = StreamReader(self.config, self.signature, self.scaler)
        self.tables = TableMaker(self.interface.signature, run.half_widths)
        self.design = design_filter(self.config.predict.filter, self.signature.step)
        self.refusal = ""
        """Why there are no streams; empty where there are"""
        self.stream = self._make_stream(run, regime)
        """What predicts streams row by row; None where windows do"""
        self.padding: int | None = None
        self.padding = self._find_padding()

    def _make_stream(self, run: PortableRun, regime: Regime) -> Stream | None:
        signature = self.signature
        carried = regime == "carried" or (regime == "auto" and signature.state == "carried")
        reads_label = signature.classes and signature.targets[0] in signature.inputs
        if not (carried or self.config.data.prepare or signature.future or reads_label):
            return None
        try:
            stream = Stream(run, regime=regime, gaps="reset")
            if stream.passed_ahead:
                names = ", ".join(stream.passed_ahead)
                raise UserError(
                    f"the model reads {names} (data.future) over the rows to predict, which a "
                    "stream of rows does not have yet"
                )
        except UserError as error:
            if regime == "carried":
                raise
            self.refusal = str(error)
            return None
        return stream

    def read(
        self, source: pa.Table | bytes, *, every: bool = False, resample: bool = False
    ) -> RequestWindows:
        """Read the windows that `slipstream predict` would predict; a CSV comes as bytes."""
        with _name_source(source) as named:
            options: dict[str, Any] = {"resample": resample, "replay": Replay(self.limits)}
            rows = read_new_rows(self.config, self.signature, self.scaler, named, **options)
        notes, starts, selected = list(rows.notes), rows.starts, rows.starts
        settings = self.config.data
        if self.signature.horizon and not every:
            selected = find_last_windows(rows.index, settings, self.signature, starts)
            starts = selected if self.design is None else starts  # a filter needs those before
        else:
            notes += describe_unknown_future(settings, self.signature, rows.left_out, len(starts))

        def finish(outputs: Arrays) -> Answered:
            values = self._filter_windows(rows, starts, outputs)[np.isin(starts, selected)]
            places = WindowPlaces(self.signature, rows.index, selected, rows.raw.time)
            return Answered(self.tables.make(places, values), StreamState())

        return RequestWindows(
            num_windows=len(starts),
            gather=lambda begin, end: self._to_feeds(rows.gather(starts[begin:end])),
            finish=finish,
            notes=tuple(notes),
            table_pass=self._make_pass(rows, starts),
        )

    def _make_pass(self, rows: NewRows, starts: Ints) -> TablePass | None:
        """Return what predicts windows after all rows before them; None where windows suffice."""
        return TablePass(self.member, rows, starts) if self.signature.state == "carried" else None

    def _filter_windows(self, rows: NewRows, starts: Ints, outputs: Arrays) -> Floats:
        """Return the windows' predictions, filtered where the config sets a filter."""
        values = outputs[self.interface.output].astype(np.float64)
        if self.design is None:
            return values
        pieces = np.searchsorted(rows.index.breaks, starts, side="right")
        follows = (np.diff(starts, prepend=-2) == 1) & (np.diff(pieces, prepend=-1) == 0)
        return self._make_filter().apply_pieces(values, follows)

    def _make_filter(self) -> PredictionFilter:
        assert self.design is not None
        return PredictionFilter(self.design, self.interface.signature)

    def append(
        self, name: str, source: pa.Table | bytes, state: StreamState, *, every: bool = False
    ) -> RequestWindows:
        """Read new rows of a stream: the windows that end with them or, of a forecast, with the
        last of them."""
        with _name_source(source) as named:
            rows = self.reader.read(named, state)
        last = len(rows.inputs) - 1
        only_last = self.signature.horizon > 0 and not every
        ends = rows.ends[rows.ends == last] if only_last and self.design is None else rows.ends
        context = np.arange(1 - self.signature.context, 1)

        def gather(begin: int, end: int) -> Arrays:
            some = ends[begin:end]
            static = None if rows.static is None else np.repeat(rows.static[None], len(some), 0)
            windows = PhysicalWindows(rows.inputs[some[:, None] + context], static, None)
            return self._to_feeds(windows)

        def finish(outputs: Arrays) -> Answered:
            values = outputs[self.interface.output].astype(np.float64)
            after = rows.state
            if self.design is not None:
                values, after = self._filter_stream(rows, values, state)
            wanted = ends == last if only_last else np.ones(len(ends), dtype=bool)
            numbers = ends[wanted] + state.num_rows - len(state.arrays.get("inputs", ()))
            places = self._locate(name, numbers, rows.time, state, after)
            return Answered(self.tables.make(places, values[wanted]), after)

        return RequestWindows(len(ends), gather, finish, rows.notes)

    def _filter_stream(
        self, rows: ArrivedRows, values: Floats, state: StreamState
    ) -> tuple[Floats, StreamState]:
        """Filter predictions after those that the stream had, up to a gap."""
        ends, one = rows.ends, self._make_filter()
        earlier = {name[7:]: a for name, a in state.arrays.items() if name.startswith("filter.")}
        follows = np.isin(ends - 1, ends) & (rows.begins[ends] == rows.begins[ends - 1])
        if earlier and len(ends):
            one.rows.set_state(earlier)
            follows[0] = rows.begins[ends[0]] == 0 and ends[0] == len(state.arrays["inputs"])
        filtered = one.apply_pieces(values, follows) if len(ends) else values
        arrays = dict(rows.state.arrays)
        if len(ends) and ends[-1] == len(rows.inputs) - 1:
            arrays |= {f"filter.{name}": a for name, a in one.rows.get_state().items()}
        return filtered, replace(rows.state, arrays=arrays)

    def step(self, name: str, source: pa.Table | bytes, state: StreamState) -> RowSteps:
        """Read new rows of a stream that is predicted row by row."""
        assert self.stream is not None
        with _name_source(source) as named:
            return RowSteps(name, named, state, self.stream, self.reader)

    def finish_steps(
        self, name: str, rows: SteppedRows, before: StreamState, every: bool
    ) -> Answered:
        wanted = np.ones(len(rows.ends), dtype=bool)
        if self.signature.horizon and not every:
            wanted = rows.ends == rows.state.num_rows - 1
        places = self._locate(name, rows.ends[wanted], rows.time, before, rows.state)
        return Answered(self.tables.make(places, rows.values[wanted]), rows.state)

    def _locate(
        self,
        name: str,
        ends: Ints,
        time: Times | None,
        before: StreamState,
        after: StreamState,
    ) -> WindowPlaces:
        """Return where predictions belong in the whole stream, by the rows that they end with."""
        index = SeriesIndex(
            series_names=(name,),
            offsets=np.array([0, after.num_rows]),
            breaks=np.zeros(1, dtype=np.int64),
            group_begins=np.zeros(1, dtype=np.int64),
            group_codes=np.zeros(1, dtype=np.int64),
            group_names=(),
            step=self.signature.step,
            has_dates=time is not None and is_date(time),
        )
        return WindowPlaces(self._last_row, index, ends, time, before.num_rows)

    @cached_property
    def _last_row(self) -> Signature:
        """The signature of windows that are their last row, wherever the others are."""
        return self.signature.model_copy(update={"context": 1})

    def _to_feeds(self, windows: PhysicalWindows) -> Arrays:
        """Return windows as the graph takes them."""
        arrays = windows._asdict().items()
        dtype = self.interface.dtype
        return {name: array.astype(dtype) for name, array in arrays if array is not None}

    def run(self, feeds: Arrays) -> Arrays:
        """Call the graph so that a window's prediction is the same in whatever company it comes;
        one thread does at a time."""
        count = len(feeds["rows"])
        if self.padding is None:
            every = [self._call(_slice(feeds, number, number + 1)) for number in range(count)]
            return {name: np.concatenate([one[name] for one in every]) for name in every[0]}
        padding = -count % self.padding
        if padding:
            feeds = {
                name: np.concatenate([array, np.repeat(array[-1:], padding, axis=0)])
                for name, array in feeds.items()
            }
        return _slice(self._call(feeds), 0, count)

    def _call(self, feeds: Arrays) -> Arrays:
        name = self.interface.output  # intervals are computed from it
        return {name: self.session.run([name], dict(feeds))[0]}

    def _find_padding(self) -> int | None:
        """Return what the number of windows has to be a multiple of for equal bits in batches of
        any size, which depends on the processor; None where windows should be alone.

        Matrix products of other sizes may add in another order.
        """
        size, scale, shapes = max(TRIAL_SIZES), self.scaler, self.interface.get_input_shapes()
        columns = {name: getattr(self.interface, name) for name in ("static", "future")}
        feeds = {}
        for name, shape in shapes.items():
            ends = [self.interface.context if isinstance(one, str) else one for one in shape[1:]]
            names = columns.get(name, self.interface.inputs)
            width, middle = (
                np.array([by[one] for one in names]) for by in (scale.size, scale.shift)
            )
            waves = np.sin(np.arange(size * math.prod(ends)) ** 1.5).reshape(size, *ends)
            values = waves * width + middle
            feeds[name] = values.astype(self.interface.dtype)
        self._call(_slice(feeds, 0, 1))  # the first one allocates
        begin = time.thread_time()
        self._call(_slice(feeds, 0, 1))
        if time.thread_time() - begin > SLOW_S:
            return None
        for padding in PADDINGS:
            self.padding = padding
            results = [self.run(_slice(feeds, 0, count)) for count in TRIAL_SIZES]
            if all(
                np.array_equal(one[name], results[-1][name][: len(one[name])])
                for one in results
                for name in one
            ):
                return padding
        return None

    def make_empty(self) -> Arrays:
        """Return the outputs of no window."""
        name = self.interface.output
        return {name: np.empty((0, *map(int, self.interface.get_output_shape(name)[1:])))}


def _slice(arrays: Arrays, begin: int, end: int) -> Arrays:
    return {name: array[begin:end] for name, array in arrays.items()}


@contextmanager
def _name_source(source: pa.Table | bytes) -> Iterator[Any]:
    """Put a CSV into a file, so that it is read by the same code as any other."""
    if not isinstance(source, bytes):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = Path(folder) / CSV_NAME
        path.write_bytes(source)
        yield str(path)


def _join_signatures(run: PortableRun) -> Signature:
    """Return the reference's signature with what other members of an ensemble read beside it."""
    interface, signature = make_interface(run), run.signature
    if interface.inputs[: len(interface.future)] != interface.future:
        raise UserError(
            f"{run.run.folder}: its members differ in data.future, so that one table cannot feed "
            "them; serve the members by themselves"
        )
    wider = {"inputs": interface.inputs, "static": interface.static, "future": interface.future}
    return signature.model_copy(update=wider | {"context": interface.context})
