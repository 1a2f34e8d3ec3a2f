"""A trained run behind the server: windows from a table, calls of onnxruntime, predictions."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config import Config, Signature
from slipstream.data.prepare.chain.replay import Replay
from slipstream.data.scaler import merge_scalers
from slipstream.data.series import Ints, SeriesIndex, is_date
from slipstream.errors import UserError
from slipstream.exporting.interface import make_interface
from slipstream.portable.model import PortableRun
from slipstream.portable.rows import (
    NewRows,
    PhysicalWindows,
    describe_unknown_future,
    find_last_windows,
    read_new_rows,
)
from slipstream.portable.table import WindowPlaces
from slipstream.serving.batching import Arrays
from slipstream.serving.limits import RequestError
from slipstream.serving.streams.rows import ArrivedRows, StreamReader, StreamState
from slipstream.serving.tables import make_table

if TYPE_CHECKING:
    import pyarrow as pa

PADDINGS = (1, 2, 4, 8)
"""What the number of windows in a call may have to be a multiple of"""
TRIAL_SIZES = (1, 2, 3, 5)
SLOW_S = 0.01
"""A model that takes longer for one window has nothing to gain from batches"""
CSV_NAME = "request.csv"


@dataclass(frozen=True)
class RequestWindows:
    """The windows of one request, and how their predictions become a table."""

    num_windows: int
    gather: Callable[[int, int], Arrays]
    to_table: Callable[[Arrays], pa.Table]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class StreamWindows(RequestWindows):
    """The windows that end with new rows of a stream."""

    state: StreamState
    """Of the stream once they are predicted"""


class ServedModel:
    """A run and its graph in onnxruntime."""

    def __init__(self, run: PortableRun, graph: bytes) -> None:
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
        self.reader = StreamReader(self.config, self.signature, self.scaler)
        self.padding: int | None = None
        self.padding = self._find_padding()

    def read(
        self, source: pa.Table | bytes, *, every: bool = False, resample: bool = False
    ) -> RequestWindows:
        """Read the windows that `slipstream predict` would predict; a CSV comes as bytes."""
        with _name_source(source) as named:
            options: dict[str, Any] = {"resample": resample, "replay": Replay(self.limits)}
            rows = read_new_rows(self.config, self.signature, self.scaler, named, **options)
        notes, starts = list(rows.notes), rows.starts
        if self.signature.horizon and not every:
            starts = find_last_windows(rows.index, self.signature, starts)
        else:
            notes += describe_unknown_future(self.signature, rows.left_out, len(starts))
        return self._make_windows(rows, starts, tuple(notes))

    def _make_windows(self, rows: NewRows, starts: Ints, notes: tuple[str, ...]) -> RequestWindows:
        places = WindowPlaces(self.signature, rows.index, starts, rows.raw.time)
        return RequestWindows(
            num_windows=len(starts),
            gather=lambda begin, end: self._to_feeds(rows.gather(starts[begin:end])),
            to_table=lambda outputs: make_table(self.interface, places, outputs),
            notes=notes,
        )

    def append(
        self, name: str, source: pa.Table | bytes, state: StreamState, *, every: bool = False
    ) -> StreamWindows:
        """Read new rows of a stream: the windows that end with them or, of a forecast, with the
        last of them."""
        if reason := self.reader.explain_refusal():
            raise RequestError(422, f"there are no streams here: {reason}; send tables to /predict")
        with _name_source(source) as named:
            rows = self.reader.read(named, state)
        ends = rows.ends
        if self.signature.horizon and not every:
            ends = ends[ends == len(rows.inputs) - 1]
        context = np.arange(1 - self.signature.context, 1)

        def gather(begin: int, end: int) -> Arrays:
            some = ends[begin:end]
            static = rows.state.static
            repeated = None if static is None else np.repeat(static[None], len(some), axis=0)
            return self._to_feeds(
                PhysicalWindows(rows.inputs[some[:, None] + context], repeated, None)
            )

        places = self._locate(name, rows, ends, state)
        return StreamWindows(
            num_windows=len(ends),
            gather=gather,
            to_table=lambda outputs: make_table(self.interface, places, outputs),
            notes=rows.notes,
            state=rows.state,
        )

    def _locate(
        self, name: str, rows: ArrivedRows, ends: Ints, before: StreamState
    ) -> WindowPlaces:
        """Return where windows lie in the whole stream."""
        first = before.num_rows - len(before.inputs)
        index = SeriesIndex(
            series_names=(name,),
            offsets=np.array([0, rows.state.num_rows]),
            breaks=np.zeros(1, dtype=np.int64),
            group_begins=np.zeros(1, dtype=np.int64),
            group_codes=np.zeros(1, dtype=np.int64),
            group_names=(),
            step=self.signature.step,
            has_dates=rows.time is not None and is_date(rows.time),
        )
        starts = ends + first + 1 - self.signature.context
        return WindowPlaces(self.signature, index, starts, rows.time, before.num_rows)

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
        names = self.interface.outputs
        return dict(zip(names, self.session.run(list(names), dict(feeds)), strict=True))

    def _find_padding(self) -> int | None:
        """Return what the number of windows has to be a multiple of for equal bits in batches of
        any size, which depends on the processor; None where windows should be alone.

        Matrix products of other sizes may add in another order.
        """
        draw, shapes = np.random.default_rng(0), self.interface.get_input_shapes()
        size, scale = max(TRIAL_SIZES), self.scaler
        columns = {name: getattr(self.interface, name) for name in ("static", "future")}
        feeds = {}
        for name, shape in shapes.items():
            ends = [self.interface.context if isinstance(one, str) else one for one in shape[1:]]
            names = columns.get(name, self.interface.inputs)
            width, middle = (
                np.array([by[one] for one in names]) for by in (scale.size, scale.shift)
            )
            values = draw.standard_normal((size, *ends)) * width + middle
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
        shapes = {name: self.interface.get_output_shape(name) for name in self.interface.outputs}
        return {name: np.empty((0, *map(int, shape[1:]))) for name, shape in shapes.items()}


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
