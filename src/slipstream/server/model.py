"""A trained run behind the server: windows from a table, calls of onnxruntime, predictions."""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import Setting, UserError
from slipstream.config import Config, Signature
from slipstream.data.filters import PredictionFilter, design_filter
from slipstream.data.predictions import WindowPositions
from slipstream.data.prepare.chain import Replay
from slipstream.data.scaler import merge_scalers
from slipstream.data.series import Floats, Ints, SeriesIndex, Times, is_date
from slipstream.exporting.formats import make_interface
from slipstream.inference.networks import RowNetwork, restore_outputs, scale_windows
from slipstream.inference.portable import PortableMember, PortableRun
from slipstream.inference.rows import (
    NewRows,
    PhysicalWindows,
    describe_unknown_future,
    find_last_windows,
    read_new_rows,
)
from slipstream.inference.stream import DefaultRegime, Regime, Stream, choose_default_regime
from slipstream.server.bodies import TableMaker
from slipstream.server.streams import ArrivedRows, RowSteps, SteppedRows, StreamReader, StreamState

if TYPE_CHECKING:
    import pyarrow as pa

Arrays = Mapping[str, npt.NDArray[Any]]
"""Arrays [windows, ...] by the name of the graph's input or output"""
GATHER_S = 0.003
"""How long a batch waits for requests that are on their way"""
BATCH, SHARE = 256, 64
"""Windows of a call, and windows that one request adds before the next one's turn"""


@dataclass
class WindowJob:
    """The windows of one request, gathered when their turn comes."""

    num_windows: int
    gather: Callable[[int, int], Arrays]
    """Returns the windows from one number to before another"""
    done: asyncio.Future[Arrays]
    position: int = 0
    """Windows that are in a batch already"""
    parts: list[Arrays] = field(default_factory=list)

    @property
    def cancelled(self) -> bool:
        return self.done.done()


@dataclass(frozen=True)
class _Slice:
    job: WindowJob
    begin: int
    end: int


class Batcher:
    """Runs the windows of all requests, in the order that they arrive, by one thread."""

    def __init__(self, run: Callable[[Arrays], Arrays], count: Callable[[int], None]) -> None:
        self._run, self._count = run, count
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._jobs: deque[WindowJob] = deque()
        self._expected = 0
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._jobs)

    @contextmanager
    def expect(self) -> Iterator[None]:
        """Announce a request whose windows are being read; batches wait for it, but briefly."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1
            self._start()

    async def predict(self, num_windows: int, gather: Callable[[int, int], Arrays]) -> Arrays:
        """Return the model's outputs for all windows."""
        job = WindowJob(num_windows, gather, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._start()
        return await job.done

    async def call(self, function: Callable[[], None]) -> None:
        """Call a function in the model's thread, between batches."""
        await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _start(self, *, overdue: bool = False) -> None:
        """Begin the next batch, unless one is running or a request is about to join it."""
        if self._busy or not self._jobs:
            return
        loop = asyncio.get_running_loop()
        if self._expected and not overdue:
            if self._timer is None:
                self._timer = loop.call_later(GATHER_S, lambda: self._start(overdue=True))
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = self._take()
        if batch:
            self._busy = True
            running = loop.run_in_executor(self._worker, self._run_batch, batch)
            running.add_done_callback(lambda result: self._finish(batch, result))

    def _take(self) -> list[_Slice]:
        """Take the next windows, some of each request in turn."""
        batch: list[_Slice] = []
        room = BATCH
        while self._jobs and room:
            job = self._jobs.popleft()
            if job.cancelled:
                continue
            size = min(SHARE, room, job.num_windows - job.position)
            batch.append(_Slice(job, job.position, job.position + size))
            job.position += size
            room -= size
            if job.position < job.num_windows:
                self._jobs.append(job)
        return batch

    def _run_batch(self, batch: list[_Slice]) -> Arrays:
        parts = [piece.job.gather(piece.begin, piece.end) for piece in batch]
        feeds = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return self._run(feeds)

    def _finish(self, batch: list[_Slice], result: asyncio.Future[Arrays]) -> None:
        """Give every request its part of a batch, and begin the next one."""
        self._busy = False
        error = None if result.cancelled() else result.exception()
        first = 0
        for piece in batch:
            past = first + piece.end - piece.begin
            if piece.job.cancelled:
                pass
            elif error is not None:
                piece.job.done.set_exception(error)
            else:
                part = {name: array[first:past] for name, array in result.result().items()}
                piece.job.parts.append(part)
                self._complete(piece.job)
            first = past
        self._count(first)
        self._start()

    @staticmethod
    def _complete(job: WindowJob) -> None:
        if sum(len(next(iter(part.values()))) for part in job.parts) < job.num_windows:
            return
        names = job.parts[0]
        whole = {name: np.concatenate([part[name] for part in job.parts]) for name in names}
        job.done.set_result(whole)


CHUNK_ROWS = 32
"""Rows that are computed before the model's thread is free for others"""


class TablePass:
    """The rows of a table on their way through a model, up to the last window of each segment."""

    def __init__(self, member: PortableMember, rows: NewRows, starts: Ints) -> None:
        model, signature = member.first, member.first.signature
        self._model = model
        self._networks = [RowNetwork(model) for model in member.models]
        whole = PhysicalWindows(rows.inputs[None], None, None)
        self._inputs = scale_windows(whole, signature, model.scaler)[0][0]
        ends = starts + signature.context - 1
        windows = PhysicalWindows(rows.inputs[ends, None], *rows.gather_beside(starts))
        self._beside = scale_windows(windows, signature, model.scaler)[1]
        segments = rows.index.segments
        self._begins = set(segments.tolist())
        self._windows = {int(row): number for number, row in enumerate(ends)}
        owner = np.searchsorted(segments, ends, side="right") - 1
        self._rows: list[int] = [
            row
            for piece in np.unique(owner)
            for row in range(segments[piece], ends[owner == piece].max() + 1)
        ]
        self._position = 0
        shape = (len(starts), *self._networks[0].output_shape)
        self._outputs = [np.empty(shape, dtype=np.float32) for _ in self._networks]

    @property
    def is_done(self) -> bool:
        return self._position == len(self._rows)

    def advance(self) -> None:
        """Compute the next rows; called by one thread at a time."""
        for row in self._rows[self._position : self._position + CHUNK_ROWS]:
            if row in self._begins:
                self._states = [network.start() for network in self._networks]
            window = self._windows.get(row)
            for i, (network, state) in enumerate(zip(self._networks, self._states, strict=True)):
                features = network.encode(self._inputs[row], state)
                if window is not None:
                    beside = None if self._beside is None else self._beside[window]
                    self._outputs[i][window] = network.decode(features, beside)
            self._position += 1

    def finish(self) -> Floats:
        """Return the windows' predictions in the shape of the graph of windows: [N, H, C], [N, H,
        C, Q] with quantiles, or [N, H, Q] for classes."""
        values = restore_outputs(self._outputs, self._model.signature, self._model.scaler)
        signature = self._model.signature
        return values if signature.classes or signature.quantiles else values[..., 0]


PADDINGS = (1, 2, 4, 8)
"""Multiples to which the number of windows in a call may have to be padded"""
TRIAL_SIZES = (1, 2, 3, 5)
"""Batch sizes that are compared to find the padding"""
SLOW_S = 0.01
"""A model that takes longer for one window has nothing to gain from batches"""
CSV_NAME = "request.csv"


class Answered(NamedTuple):
    """The table of an answer and, for a stream, its new state."""

    table: pa.Table
    state: StreamState


@dataclass(frozen=True)
class RequestWindows:
    """The windows of one request, and the function that turns predictions into an answer."""

    num_windows: int
    gather: Callable[[int, int], Arrays]
    finish: Callable[[Arrays], Answered]
    notes: tuple[str, ...]
    table_pass: TablePass | None = None
    """The pass that predicts the windows where the state is carried on"""


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
        if any(member.first.scaler.series for member in run.members):
            if len(run.members) > 1:
                raise UserError(
                    f'{self.name}: a member has data.scale_by = "series", and an ensemble with one '
                    "cannot be served; serve the members by themselves, or train them with "
                    + Setting({"data.scale_by": "window"})
                )
            self.scaler = run.first.scaler
        self.limits = run.first.limits
        self.member = run.members[run.reference]
        self.reader = StreamReader(self.config, self.signature, self.scaler)
        self.tables = TableMaker(self.interface.signature, run.half_widths)
        self.design = design_filter(self.config.predict.filter, self.signature.step)
        self.refusal = ""
        """Why there are no streams; "" where there are"""
        self.regime = choose_default_regime(run)
        """How streams are predicted, and why"""
        if regime != "auto":
            self.regime = DefaultRegime(regime, "as requested")
        self.stream = self._make_stream(run, required=regime == "carried")
        """Predicts streams row by row; None where windows do"""
        self.padding: int | None = None
        self.padding = self._find_padding()

    def _make_stream(self, run: PortableRun, *, required: bool) -> Stream | None:
        """Return what predicts streams row by row, None where windows do; refuse a run that cannot
        be streamed so where that is `required`."""
        signature, carried = self.signature, self.regime.name == "carried"
        reads_label = signature.classes and signature.targets[0] in signature.inputs
        data = self.config.data
        merges = data.duplicates != "error"
        is_plain = not (data.prepare or merges or signature.future or reads_label)
        if is_plain and not carried and not self.scaler.series:
            return None
        try:
            stream = Stream(run, regime=self.regime.name, gaps="reset")
            if stream.passed_ahead:
                names = ", ".join(stream.passed_ahead)
                raise UserError(
                    f"the model reads {names} (data.future) over the rows to predict, which a "
                    "stream of rows does not have yet"
                )
        except UserError as error:
            if required:
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
            places = WindowPositions(self.signature, rows.index, selected, rows.raw.time)
            table = self.tables.make(places, values, rows.find_factors(selected))
            return Answered(table, StreamState())

        return RequestWindows(
            num_windows=len(starts),
            gather=lambda begin, end: self._to_feeds(rows.gather(starts[begin:end])),
            finish=finish,
            notes=tuple(notes),
            table_pass=self._make_pass(rows, starts),
        )

    def _make_pass(self, rows: NewRows, starts: Ints) -> TablePass | None:
        """Return a pass over all rows for a carried state; None where windows suffice."""
        return TablePass(self.member, rows, starts) if self.signature.state == "carried" else None

    def _filter_windows(self, rows: NewRows, starts: Ints, outputs: Arrays) -> Floats:
        """Return the windows' predictions, filtered where the config sets a filter."""
        values = rows.restore(outputs[self.interface.output].astype(np.float64), starts)
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
        """Read new rows of a stream: the windows that end with them or, for a forecast, with the
        last of them."""
        with _name_source(source) as named:
            rows = self.reader.read(named, state)
        last = len(rows.inputs) - 1
        only_last = self.signature.horizon > 0 and not every
        ends = rows.ends[rows.ends == last] if only_last and self.design is None else rows.ends
        context = np.arange(1 - self.signature.context, 1)

        def gather(begin: int, end: int) -> Arrays:
            chosen = ends[begin:end]
            static = None if rows.static is None else np.repeat(rows.static[None], len(chosen), 0)
            windows = PhysicalWindows(rows.inputs[chosen[:, None] + context], static, None)
            return self._to_feeds(windows)

        def finish(outputs: Arrays) -> Answered:
            values = outputs[self.interface.output].astype(np.float64)
            after = rows.state
            if self.design is not None:
                values, after = self._filter_stream(rows, values, state)
            wanted = ends == last if only_last else np.ones(len(ends), dtype=bool)
            numbers = ends[wanted] + state.num_rows - len(state.arrays.get("inputs", ()))
            places = self._locate(name, numbers, rows.time, state.num_rows, after.num_rows)
            return Answered(self.tables.make(places, values[wanted]), after)

        return RequestWindows(len(ends), gather, finish, rows.notes)

    def _filter_stream(
        self, rows: ArrivedRows, values: Floats, state: StreamState
    ) -> tuple[Floats, StreamState]:
        """Filter predictions after the stream's earlier ones, up to a gap."""
        ends, smoother = rows.ends, self._make_filter()
        earlier = {name[7:]: a for name, a in state.arrays.items() if name.startswith("filter.")}
        follows = np.isin(ends - 1, ends) & (rows.begins[ends] == rows.begins[ends - 1])
        if earlier and len(ends):
            smoother.rows.set_state(earlier)
            follows[0] = rows.begins[ends[0]] == 0 and ends[0] == len(state.arrays["inputs"])
        filtered = smoother.apply_pieces(values, follows) if len(ends) else values
        arrays = dict(rows.state.arrays)
        if len(ends) and ends[-1] == len(rows.inputs) - 1:
            arrays |= {f"filter.{name}": a for name, a in smoother.rows.get_state().items()}
        return filtered, replace(rows.state, arrays=arrays)

    def step(self, name: str, source: pa.Table | bytes, state: StreamState) -> RowSteps:
        """Read new rows of a stream that is predicted row by row."""
        assert self.stream is not None
        with _name_source(source) as named:
            return RowSteps(name, named, state, self.stream, self.reader)

    def finish_steps(self, name: str, rows: SteppedRows, every: bool) -> Answered:
        """Return the answer to a request and the stream's new state."""
        wanted = np.ones(len(rows.ends), dtype=bool)
        if self.signature.horizon and not every:
            wanted = rows.ends == rows.num_rows - 1
        places = self._locate(name, rows.ends[wanted], rows.time, rows.first_row, rows.num_rows)
        factors = None if rows.factors is None else rows.factors[wanted]
        return Answered(self.tables.make(places, rows.values[wanted], factors), rows.state)

    def _locate(
        self,
        name: str,
        ends: Ints,
        time: Times | None,
        first_row: int,
        num_rows: int,
    ) -> WindowPositions:
        """Return the series, row and time of predictions in the whole stream, by the rows that they
        end with; `time` has the times of all rows from `first_row` on."""
        index = SeriesIndex(
            series_names=(name,),
            offsets=np.array([0, num_rows]),
            breaks=np.zeros(1, dtype=np.int64),
            group_begins=np.zeros(1, dtype=np.int64),
            group_codes=np.zeros(1, dtype=np.int64),
            group_names=(),
            step=self.signature.step,
            has_dates=time is not None and is_date(time),
        )
        return WindowPositions(self._last_row, index, ends, time, first_row)

    @cached_property
    def _last_row(self) -> Signature:
        """The signature of windows that consist of their last row."""
        return self.signature.model_copy(update={"context": 1})

    def _to_feeds(self, windows: PhysicalWindows) -> Arrays:
        """Return windows as inputs of the graph."""
        arrays = windows._asdict().items()
        dtype = self.interface.dtype
        return {name: array.astype(dtype) for name, array in arrays if array is not None}

    def run(self, feeds: Arrays) -> Arrays:
        """Call the graph so that a window's prediction does not depend on the other windows of the
        batch; called by one thread at a time."""
        count = len(feeds["rows"])
        if self.padding is None:
            results = [self._call(_slice(feeds, number, number + 1)) for number in range(count)]
            return {
                name: np.concatenate([result[name] for result in results]) for name in results[0]
            }
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
            ends = [self.interface.context if isinstance(size, str) else size for size in shape[1:]]
            names = columns.get(name, self.interface.inputs)
            width, middle = (
                np.array([by[column] for column in names]) for by in (scale.size, scale.shift)
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
                np.array_equal(result[name], results[-1][name][: len(result[name])])
                for result in results
                for name in result
            ):
                return padding
        return None

    def make_empty(self) -> Arrays:
        """Return the outputs for zero windows."""
        name = self.interface.output
        return {name: np.empty((0, *map(int, self.interface.get_output_shape(name)[1:])))}


def _slice(arrays: Arrays, begin: int, end: int) -> Arrays:
    return {name: array[begin:end] for name, array in arrays.items()}


@contextmanager
def _name_source(source: pa.Table | bytes) -> Iterator[Any]:
    """Write a CSV to a file, so that the usual reader reads it."""
    if not isinstance(source, bytes):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = Path(folder) / CSV_NAME
        path.write_bytes(source)
        yield str(path)


def _join_signatures(run: PortableRun) -> Signature:
    """Return the reference's signature with the further columns of an ensemble's other members."""
    interface, signature = make_interface(run), run.signature
    if interface.inputs[: len(interface.future)] != interface.future:
        raise UserError(
            f"{run.run.folder}: its members differ in data.future, so that one table cannot feed "
            "them; serve the members by themselves"
        )
    wider = {"inputs": interface.inputs, "static": interface.static, "future": interface.future}
    return signature.model_copy(update=wider | {"context": interface.context})
