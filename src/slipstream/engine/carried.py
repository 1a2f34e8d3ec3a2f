"""A carried state: chunks of series in order, for training and for prediction."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Signature
from slipstream.config.base import hash_seed
from slipstream.data import windows
from slipstream.data.series import Ints, SeriesIndex
from slipstream.data.windows import Batch, Series
from slipstream.engine import objective
from slipstream.engine.batches import CarriedStates, MicroBatch, Program
from slipstream.engine.plan import Plan

MAX_STREAMS = 1024
"""Of a pass without gradients"""
MIN_ROWS = 256
"""The shortest chunk of such a pass"""


class Pieces(NamedTuple):
    """Runs of rows without a gap."""

    begins: Ints
    ends: Ints
    """Past their last rows"""


def find_target_rows(
    starts: Ints, index: SeriesIndex, signature: Signature, stride: int
) -> npt.NDArray[np.int64]:
    """Return the rows after which training predicts: the last rows of the windows, and those at the
    start of a segment that come too early for a window, if a window begins there.

    No window of any set can predict what these early rows do, and training rows follow them.
    """
    segments, context = index.segments, signature.context
    last: Ints = np.sort(starts) + context - 1
    owner = np.searchsorted(segments, last, side="right") - 1
    firsts = np.flatnonzero(np.diff(owner, prepend=-1))
    early = [
        np.arange(row - stride, begin - 1, -stride)
        for row, begin in zip(last[firsts], segments[owner[firsts]], strict=True)
        if row - context + 1 <= begin
    ]
    more = np.sort(np.concatenate([np.empty(0, np.int64), *early]))
    ahead = signature.lead - context + 1
    low, high = more + ahead, more + ahead + signature.steps_out - 1
    if len(index.unknown):
        run = np.searchsorted(index.unknown[:, 0], high, side="right") - 1
        more = more[(run < 0) | (index.unknown[run, 1] <= low)]
    return np.sort(np.concatenate([last, more]))


def find_pieces(rows: Ints, segments: Ints, context: int) -> Pieces:
    """Return the runs of rows that training reads: a piece ends where no target follows within a
    context, and begins a context before its first one if the segment does."""
    owner = np.searchsorted(segments, rows, side="right") - 1
    is_new = (np.diff(rows, prepend=rows[0]) > context) | (np.diff(owner, prepend=-1) > 0)
    firsts = np.flatnonzero(is_new)
    begins = np.maximum(segments[owner[firsts]], rows[firsts] - context + 1)
    lasts = np.append(firsts[1:], len(rows)) - 1
    return Pieces(begins, rows[lasts] + 1)


def find_whole_pieces(rows: Ints, segments: Ints) -> Pieces:
    """Return the segments that hold some of the rows, from their beginning to the last of these."""
    owner = np.searchsorted(segments, rows, side="right") - 1
    lasts = np.append(np.flatnonzero(np.diff(owner)), len(rows) - 1)
    return Pieces(segments[owner[lasts]], rows[lasts] + 1)


@dataclass(frozen=True)
class ChunkGrid:
    """Which rows each stream reads in each step."""

    first: Ints
    """[S, N]: the first row of a chunk"""
    last: Ints
    """[S, N]: its last row"""
    is_begin: npt.NDArray[np.bool_]
    """[S, N]: whether a piece begins with it"""
    is_idle: npt.NDArray[np.bool_]
    """[S, N]: whether the stream is over; it then reads its last row again"""
    rows: int
    """T: a shorter chunk repeats its last row"""

    @property
    def num_steps(self) -> int:
        return len(self.first)

    @property
    def num_streams(self) -> int:
        return int(self.first.shape[1])

    def weigh(self, rows: Ints, *, mean: bool) -> npt.NDArray[np.float32]:
        """Return weights [S, T, N]: 1 for rows that predict, or shares of a step's mean."""
        chosen = np.zeros(int(max(self.last.max(), rows.max())) + 2, bool)
        chosen[rows] = True
        places = self.first[:, None] + np.arange(self.rows)[:, None]
        is_read = (places <= self.last[:, None]) & ~self.is_idle[:, None]
        weights = np.where(is_read, chosen[np.minimum(places, self.last[:, None])], False)
        weights = weights.astype(np.float32)
        if mean:
            weights /= np.maximum(weights.sum(axis=(1, 2), keepdims=True), 1)
        return weights


def divide_evenly(pieces: Pieces, rows: int, num_streams: int, seed: int) -> ChunkGrid:
    """Lay pieces end to end, in an order fixed by the seed, and divide them into equal streams."""
    order = np.random.default_rng(hash_seed(seed)).permutation(len(pieces.begins))
    pieces = Pieces(pieces.begins[order], pieces.ends[order])
    num_chunks = int((-(-(pieces.ends - pieces.begins) // rows)).sum())
    num_streams = min(num_streams, num_chunks)
    borders = np.arange(num_streams + 1) * num_chunks // num_streams
    return _build_grid(pieces, rows, np.diff(borders))


def lay_out_whole(pieces: Pieces, rows: int) -> ChunkGrid:
    """Distribute whole pieces over streams of similar length, the longest piece first; their chunks
    have so many rows at most."""
    rows = min(rows, int((pieces.ends - pieces.begins).max()))
    lengths = -(-(pieces.ends - pieces.begins) // rows)
    num_streams = min(-(-int(lengths.sum()) // int(lengths.max())), len(lengths), MAX_STREAMS)
    queue = [(0, stream) for stream in range(num_streams)]
    owner = np.empty(len(lengths), np.int64)
    for piece in np.argsort(-lengths, kind="stable"):
        length, stream = heapq.heappop(queue)
        owner[piece] = stream
        heapq.heappush(queue, (length + int(lengths[piece]), stream))
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, weights=lengths, minlength=num_streams).astype(np.int64)
    return _build_grid(Pieces(pieces.begins[order], pieces.ends[order]), rows, counts)


def _build_grid(pieces: Pieces, rows: int, counts: Ints) -> ChunkGrid:
    """Cut pieces into chunks and give so many of them, one after the other, to each stream."""
    per_piece = -(-(pieces.ends - pieces.begins) // rows)
    within = np.arange(per_piece.sum()) - np.repeat(np.cumsum(per_piece) - per_piece, per_piece)
    first = np.repeat(pieces.begins, per_piece) + within * rows
    last = np.minimum(first + rows, np.repeat(pieces.ends, per_piece)) - 1
    before = np.cumsum(counts) - counts
    step = np.arange(counts.max())[:, None]
    is_idle = step >= counts
    chunk = before + np.minimum(step, counts - 1)
    return ChunkGrid(
        first=np.where(is_idle, last[chunk], first[chunk]),
        last=last[chunk],
        is_begin=(within[chunk] == 0) & ~is_idle,
        is_idle=is_idle,
        rows=rows,
    )


class CarriedSource:
    """Gathers the chunks of a grid on the device, and keeps the streams' states there."""

    def __init__(
        self,
        series: Series,
        grid: ChunkGrid,
        weights: npt.NDArray[np.float32],
        states: Sequence[Tensor],
        streams_per_pass: int,
    ) -> None:
        self.series, self.states, self.num_steps = series, states, grid.num_steps
        self.passes = [
            slice(begin, min(begin + streams_per_pass, grid.num_streams))
            for begin in range(0, grid.num_streams, streams_per_pass)
        ]
        device = series.values.device
        self._rows = torch.arange(grid.rows, device=device)[:, None]

        def send(values: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        origin = np.tile(np.arange(grid.num_streams), (grid.num_steps, 1))
        origin[0] = np.maximum(origin[0] - 1, 0)  # where a divided piece goes on
        tape = grid.first, grid.last, weights, origin, grid.is_begin, grid.is_idle
        self._tape = [send(values) for values in tape]

    def start_epoch(self, epoch: int, *, step: int = 0) -> None:
        pass  # all epochs are the same

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        """Yield the current step's chunks; once they are done, the states are those after it."""
        first, last, weights, origin, is_begin, is_idle = (
            values.index_select(0, cursor)[0] for values in self._tape
        )
        count = self.series.sequences_per_window
        if count > 1:
            origin = (origin[:, None] * count + torch.arange(count, device=origin.device)).flatten()
            is_begin, is_idle = (values.repeat_interleave(count) for values in (is_begin, is_idle))
        before = [
            state.index_select(1, origin).masked_fill(is_begin[:, None], 0.0)
            for state in self.states
        ]
        states_after = []
        for part in self.passes:
            rows = torch.minimum(first[part] + self._rows, last[part])
            sequences = slice(part.start * count, part.stop * count)
            carried = CarriedStates([state[:, sequences].contiguous() for state in before], [])
            batch = windows.gather_rows(self.series, rows)
            yield MicroBatch(batch, weights[:, part].flatten(), carried)
            states_after.append(carried.after)
        for state, old, parts in zip(
            self.states, before, zip(*states_after, strict=True), strict=True
        ):
            state.copy_(torch.where(is_idle[:, None], old, torch.cat(parts, dim=1)))

    def wrap_program(self, program: Program, cursor: Tensor | None = None) -> Program:
        return program

    def close(self) -> None:
        pass


PASS_ROWS = 1 << 16
"""Rows of all streams that are computed at a time, roughly"""


class CarriedPredictor:
    """Predicts windows after a pass over all rows before their last one, from a zero state at the
    start of each series and after each gap.

    The first call for some series computes all of their rows. What is stored of a row is the
    narrower of the model's features and its outputs.
    """

    def __init__(self, model: Any, plan: Plan, signature: Signature) -> None:
        self.model, self.plan, self.signature = model, plan, signature
        self._series: Series | None = None
        self._rows = torch.empty(0)

    def __call__(self, series: Series, starts: Tensor) -> Tensor:
        if series is not self._series:
            self._rows = self._compute_rows(series)
            self._series = series
        last = starts + self.signature.context - 1
        chosen = self._rows[last].flatten(0, 1)
        if self._stores_outputs:
            return chosen.view(-1, *self._output_shape)
        static = windows.gather_rows(series, last[None]).static
        prediction: Tensor = self.model.decode_rows(chosen, static)
        return prediction

    @property
    def _output_shape(self) -> tuple[int, int, int]:
        model = self.model
        return model.steps, model.targets, model.quantiles

    @property
    def _stores_outputs(self) -> bool:
        return bool(np.prod(self._output_shape) <= self.model.core.width)

    def _compute_rows(self, series: Series) -> Tensor:
        """Return what is stored of every row, [rows, sequences, D or outputs]."""
        assert series.segments is not None
        model, device, num_rows = self.model, series.values.device, len(series.values)
        begins, count = series.segments.cpu().numpy(), series.sequences_per_window
        length = max(PASS_ROWS // min(len(begins), MAX_STREAMS), MIN_ROWS)
        grid = lay_out_whole(Pieces(begins, np.append(begins[1:], num_rows)), length)
        is_read = grid.weigh(np.arange(num_rows), mean=False)
        states = model.make_states(grid.num_streams * count, device)
        source = CarriedSource(series, grid, is_read, states, grid.num_streams)
        within = torch.arange(grid.rows, device=device)[:, None]
        width = int(np.prod(self._output_shape)) if self._stores_outputs else model.core.width
        stored = torch.zeros(num_rows, count, width, device=device)
        model.eval()
        for step, first in enumerate(torch.from_numpy(grid.first).to(device)):
            for batch, weights, states in source.get_micro_batches(
                torch.tensor([step], device=device)
            ):
                out = self._run(batch, states).unflatten(0, (-1, count))
                counted = weights > 0
                stored[(first + within).flatten()[counted]] = out[counted]
        return stored

    def _run(self, batch: Batch, states: CarriedStates | None) -> Tensor:
        """Return what is stored of a batch's rows, and hand on their states."""
        assert states is not None
        with objective.autocast(self.plan):
            features, after = self.model.encode_rows(batch.inputs, states.before)
        states.after.extend(after)
        flat: Tensor = features.flatten(0, 1).float()
        if not self._stores_outputs:
            return flat
        outputs: Tensor = self.model.decode_rows(flat, batch.static).flatten(1)
        return outputs
