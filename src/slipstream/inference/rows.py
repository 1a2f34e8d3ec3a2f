"""New data for a trained model: read, prepared, at the model's time step, scaled, in windows.

`read_new_rows` shows the whole path; the functions below it follow in its order.

Shapes: N windows, T context rows, F inputs, S static columns, H predicted rows, U inputs that are
known ahead.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from slipstream.base.errors import Option, UserError
from slipstream.base.text import format_count
from slipstream.config import Config, Data, Signature, Split
from slipstream.data import labels, splits
from slipstream.data.files import read_tables
from slipstream.data.labels import prepare_with_labels
from slipstream.data.prepare.chain import PrepareChain, Replay, plan_steps, select_steps
from slipstream.data.roles import Roles
from slipstream.data.scaler import ScaledRows, Scaler, order_columns, scale_rows
from slipstream.data.series import (
    MICROSECONDS,
    NO_RUNS,
    Floats,
    Ints,
    RawSeries,
    SeriesIndex,
    describe_left_out,
    encode_runs,
    prepare_series,
)
from slipstream.data.table import DataTable, describe_files

STEP_TOLERANCE = 0.02
"""The share by which the time step of new data may differ from the training data's"""
SAME_ROW = 1e-6
"""Distance in steps up to which an old row counts as being at the time of a new one"""
OUTLIER_SHARE = 0.05
"""The share of a column's values outside the training range from which on there is a note"""


class PhysicalWindows(NamedTuple):
    """The inputs of a model for some windows, in physical units."""

    rows: Floats
    """[N, T, F], in the order of `signature.inputs`"""
    static: Floats | None
    """[N, S]"""
    future: Floats | None
    """[N, H, U]: the first inputs over the rows to predict"""


@dataclass(frozen=True)
class NewRows:
    """New data for a trained model: all series end to end, and the windows among their rows."""

    signature: Signature
    raw: RawSeries
    scaled: ScaledRows
    starts: Ints
    """First rows of the windows"""
    left_out: int
    """Windows without a target or, where nothing but the context is needed, without the rows that
    are known ahead"""
    notes: tuple[str, ...]
    scaler: Scaler
    """What the rows are scaled by"""

    @property
    def index(self) -> SeriesIndex:
        return self.raw.index

    @cached_property
    def inputs(self) -> Floats:
        """The inputs of every row [rows, F] in physical units. Where each series has its own
        scale, they are moved to the scale of the whole table, which a network without torch reads;
        `restore` moves its predictions back."""
        columns = [self.raw.read_column(name) for name in self.signature.inputs]
        inputs = np.stack(columns, axis=1)
        if self.scaled.scales is None:
            return inputs
        size = np.array([self.scaler.size[name] for name in self.signature.inputs])
        shift = np.array([self.scaler.shift[name] for name in self.signature.inputs])
        offsets = self.index.offsets
        owners = np.searchsorted(offsets, np.arange(len(inputs)), side="right") - 1
        factor, offset = (
            values[owners, : len(self.signature.inputs)] for values in self.scaled.scales
        )
        moved: Floats = ((inputs - shift) / size - offset) / factor * size + shift
        return moved

    def restore(self, values: Floats, starts: Ints) -> Floats:
        """Return predictions [N, H, C] or [N, H, C, Q] of windows, made from `inputs`, in physical
        units."""
        if self.scaled.scales is None or self.signature.classes:
            return values
        targets = self.signature.targets
        size = np.array([self.scaler.size[name] for name in targets])
        shift = np.array([self.scaler.shift[name] for name in targets])
        owners = np.searchsorted(self.index.offsets, starts, side="right") - 1
        factor, offset = (
            part[owners, None, part.shape[1] - len(targets) :] for part in self.scaled.scales
        )
        if values.ndim == 4:
            size, shift, factor, offset = (a[..., None] for a in (size, shift, factor, offset))
        restored: Floats = ((values - shift) / size * factor + offset) * size + shift
        return restored

    def find_factors(self, starts: Ints) -> Floats | None:
        """Return the size of the targets of each window's series, relative to that of the whole
        table, [N, 1, C]; None where all series have that scale."""
        if self.scaled.scales is None:
            return None
        owners = np.searchsorted(self.index.offsets, starts, side="right") - 1
        factor = self.scaled.scales.factor
        factors: Floats = factor[owners, None, factor.shape[1] - len(self.signature.targets) :]
        return factors

    def gather(self, starts: Ints) -> PhysicalWindows:
        """Return the windows that begin at `starts`."""
        rows = self.inputs[starts[:, None] + np.arange(self.signature.context)]
        return PhysicalWindows(rows, *self.gather_beside(starts))

    def gather_beside(self, starts: Ints) -> tuple[Floats | None, Floats | None]:
        """Return the static columns of windows, and the inputs that are known ahead."""
        signature = self.signature
        static = future = None
        if signature.static:
            owner = np.searchsorted(self.index.offsets, starts, side="right") - 1
            static = self.raw.static[owner]
        steps, columns = signature.future_shape
        if columns:
            ahead = starts[:, None] + signature.lead + np.arange(steps)
            future = self.inputs[:, :columns][ahead]
        return static, future


def read_new_rows(
    config: Config,
    signature: Signature,
    scaler: Scaler,
    source: Any,
    *,
    targets: bool = False,
    resample: bool = False,
    replay: Replay | None = None,
) -> NewRows:
    """Read new data for a trained model: a path, a table in memory or a dict of columns.

    With `targets`, every window whose target rows are known is returned. Without, targets may be
    absent, and every window whose context is known is returned, up to each series' last row.
    `replay` has the fitted limits of `data.prepare`. A model that reads `data.future` needs these
    columns for the rows to predict; they may come as further rows at the end of each series, with
    all other columns empty.
    """
    split = Split(train=0.7, val=0.1, test=0.2)
    data = config.data.model_copy(update={"where": {}, "split": split})
    if isinstance(source, (str, os.PathLike)):
        data, source = data.model_copy(update={"path": str(source)}), None
    known = signature.horizon if targets else 0
    data, tables, notes = _read_prepared(data, signature, source, targets, replay)
    min_rows = signature.context + known
    raw = _read_series(data, signature, tables, targets, min_rows=min_rows)
    if _needs_resampling(raw.index, signature, resample):
        _refuse_resampling(raw.index, signature, targets)
        raw = resample_series(raw, signature.step or 0.0)
    index, left_out = raw.index, 0
    if signature.future and not targets:
        ranges, left_out = _find_windows_ahead(index, config.data, signature)
    else:
        stride = data.stride if targets else 1
        ranges = _find_windows(index, signature.context, known, stride)
    if not len(ranges):
        raise UserError(splits.explain_empty_set("full", index, index.num_rows, data))
    if targets:
        with_targets, without = splits.exclude_unknown({"all": ranges}, index, signature)
        ranges, left_out = with_targets["all"], without["all"]
        notes += describe_left_out(without, {"all": len(ranges)}, signature)
    scaled = scale_rows(raw, scaler, signature)
    outliers = _describe_outliers(raw, scaled, scaler, signature)
    notes = [*notes, *outliers, *raw.notes]
    return NewRows(signature, raw, scaled, ranges.list_starts(), left_out, tuple(notes), scaler)


def _read_prepared(
    data: Data, signature: Signature, source: Any, targets: bool, replay: Replay | None
) -> tuple[Data, list[DataTable], list[str]]:
    """Read the tables and repeat the steps that make the model's inputs and targets."""
    if not data.prepare:
        tables = read_tables(data, source)
        return data, tables, describe_files(tables)
    needed = (*signature.inputs, *signature.static, *(signature.targets if targets else ()))
    chain = PrepareChain(data, needed, replay)
    if signature.future and not targets and chain.plan.makes_from_times(signature.future):
        chain.ahead = signature.horizon
    tables = read_tables(data, source)
    notes = describe_files(tables)
    prepared = chain.apply(tables)
    return prepared.data, prepared.tables, [*notes, *prepared.left_out]


def _read_series(
    data: Data, signature: Signature, tables: list[DataTable], targets: bool, *, min_rows: int
) -> RawSeries:
    """Return the series, with labels numbered as in training."""
    roles = Roles(signature.inputs, signature.targets, signature.static, signature.future)
    needs_labels = targets or signature.targets[0] in signature.inputs
    if signature.classes and data.labels is None and needs_labels:
        label, names = signature.targets[0], signature.classes
        tables, _ = labels.encode_labels(tables, label, "data.targets", names)
    if targets:
        return prepare_with_labels(tables, data, roles, signature.classes, min_rows)[0]
    return prepare_series(tables, data, roles, min_rows=min_rows, targets=False)


def _needs_resampling(index: SeriesIndex, signature: Signature, resample: bool) -> bool:
    """Return whether the time step differs from the training data's."""
    if signature.step is None or index.step is None:
        return False
    if math.isclose(index.step, signature.step, rel_tol=STEP_TOLERANCE):
        return False
    if not resample:
        raise UserError(
            f"the rows are {index.step:g} apart, those that the model was trained on "
            f"{signature.step:g} (seconds, or the time column's unit); resample them to that "
            "step, or pass " + Option("resample", True)
        )
    return True


def _refuse_resampling(index: SeriesIndex, signature: Signature, targets: bool) -> None:
    if targets and signature.classes:
        raise UserError(
            "labels cannot be resampled: what lies between two classes is neither; bring the "
            f"rows and their labels to the step {signature.step:g} beforehand"
        )
    if index.padding is not None:
        raise UserError(
            "rows that data.prepare pads cannot be resampled; add a resample step before pad, "
            f"or bring the rows to the step {signature.step:g} beforehand"
        )


def resample_series(raw: RawSeries, step: float) -> RawSeries:
    """Return the series at another step, from gap to gap.

    A coarser row is the mean of the old rows after the new row before it, up to its own time, so
    that no row looks ahead. A finer row is interpolated linearly between its neighbours.
    """
    index = raw.index
    assert raw.time is not None
    assert index.step is not None
    width = step * MICROSECONDS if index.has_dates else step
    coarser = step > index.step
    segments = list(itertools.pairwise([*index.breaks.tolist(), index.num_rows]))
    positions, times, breaks, offsets = [], [], [0], [0]
    for begin, end in segments:
        if begin in index.offsets[1:-1]:
            offsets.append(breaks[-1])
        old = raw.time[begin:end].astype(np.float64)
        position = (old - old[0]) / width
        grid = np.arange(int(position[-1] + SAME_ROW) + 1)
        positions.append((position, grid))
        times.append((old[0] + grid * width).astype(raw.time.dtype))
        breaks.append(breaks[-1] + len(grid))

    def resample(column: Floats) -> Floats:
        parts = []
        for (begin, end), (position, grid) in zip(segments, positions, strict=True):
            new = np.interp(grid, position, column[begin:end])
            if coarser:
                _write_means(new, column[begin:end], np.ceil(position - SAME_ROW))
            parts.append(new)
        return np.concatenate(parts)

    unknown, ahead = np.zeros(index.num_rows), np.zeros(index.num_rows)
    for first, past in index.unknown:
        unknown[first:past] = 1.0
    for past, count in zip(index.offsets[1:], index.ahead, strict=True):
        ahead[past - count : past] = 1.0
    begins = np.array([*offsets, breaks[-1]])
    return replace(
        raw,
        index=replace(
            index,
            offsets=begins,
            breaks=np.array(breaks[:-1]),
            group_begins=np.zeros(1, dtype=np.int64),
            group_codes=np.zeros(1, dtype=np.int64),
            step=step,
            skipped=NO_RUNS,
            unknown=encode_runs(resample(unknown) > 0),
            ahead=np.add.reduceat((resample(ahead) > 0).astype(np.int64), begins[:-1]),
        ),
        read_column=lambda name: resample(raw.read_column(name)),
        time=np.concatenate(times),
        notes=(*raw.notes, f"resampled from a step of {index.step:g} to {step:g}"),
    )


def _write_means(new: Floats, values: Floats, owner: Floats) -> None:
    """Replace each new value by the mean of the old values that belong to it, if any."""
    inside = owner < len(new)
    owner, values = owner[inside].astype(np.int64), values[inside]
    size = np.bincount(owner, minlength=len(new))
    total = np.bincount(owner, weights=values, minlength=len(new))
    new[size > 0] = total[size > 0] / size[size > 0]


def _find_windows(index: SeriesIndex, context: int, known: int, stride: int) -> splits.WindowRanges:
    """Find the windows whose context and this many rows after it have no gap."""
    rows, lead = splits.assign_all(index), context - (not known)
    return splits.find_ranges(
        index.breaks, rows, set_index=0, lead=lead, steps_out=max(known, 1), stride=stride
    )


def _find_windows_ahead(
    index: SeriesIndex, data: Data, signature: Signature
) -> tuple[splits.WindowRanges, int]:
    """Find the windows with a full context and all rows to predict, and count those that lack
    such rows."""

    def find(known: int) -> splits.WindowRanges:
        ranges = _find_windows(index, signature.context, known, 1)
        owner = np.searchsorted(index.offsets, ranges.first, side="right") - 1
        ends = (index.offsets[1:] - index.ahead)[owner]
        return ranges.restrict(0, ends - signature.context + 1)

    with_context, ranges = find(0), find(signature.horizon)
    if len(with_context) and not len(ranges):
        raise UserError(_explain_unknown_future(index, data, signature, 0))
    return ranges, len(with_context) - len(ranges)


def _describe_outliers(
    raw: RawSeries, rows: ScaledRows, scaler: Scaler, signature: Signature
) -> tuple[str, ...]:
    """Note columns with many values far outside the training range: perhaps in other units."""
    notes = []
    for i, name in enumerate(order_columns(signature)):
        if name not in raw.column_names:
            continue
        low, high = scaler.low[name], scaler.high[name]
        shift, size = scaler.shift[name], scaler.size[name]
        scaled, margin = rows.values[:, i], high - low
        if rows.scales is not None:
            owners = np.searchsorted(raw.index.offsets, np.arange(len(scaled)), side="right") - 1
            scaled = scaled * rows.scales.factor[owners, i] + rows.scales.offset[owners, i]
        below, above = (low - margin - shift) / size, (high + margin - shift) / size
        share = float(np.mean((scaled < below) | (scaled > above)))
        if share > OUTLIER_SHARE:
            edges = np.nanmin(scaled), np.nanmax(scaled)
            first, last = (float(edge) * size + shift for edge in edges)
            notes.append(
                f'column "{name}": {100 * share:.0f} % of the values are far outside of what '
                f"training saw ({low:g} to {high:g}; here {first:g} to {last:g}); "
                "are its units the same?"
            )
    return tuple(notes)


def find_last_windows(index: SeriesIndex, data: Data, signature: Signature, starts: Ints) -> Ints:
    """Return the starts of the windows whose context ends with the last known row of a series."""
    last: Ints = index.offsets[1:] - index.ahead - signature.context
    is_window = np.isin(last, starts)
    if not is_window.all():
        series = int(np.flatnonzero(~is_window)[0])
        if signature.future and _has_full_context(index, signature, series):
            raise UserError(_explain_unknown_future(index, data, signature, series))
        name = index.series_names[series]
        raise UserError(
            f'series "{name}" has a gap within its last {signature.context} rows, so there '
            "is no full context to forecast from"
        )
    return last


def list_known_ahead(data: Data, signature: Signature) -> tuple[str, ...]:
    """Return the columns that new data need in the rows to predict: columns of `data.future` that
    no step makes, and the sources of the others. Steps that read only times need none."""
    if not data.prepare:
        return signature.future
    steps = select_steps(plan_steps(data), signature.future)
    given = [name for name in signature.future if name not in steps.written]
    return tuple(dict.fromkeys([*given, *steps.list_sources()])) or signature.future


def describe_unknown_future(
    data: Data, signature: Signature, left_out: int, num_windows: int
) -> list[str]:
    """Note how many windows are left out because columns of `data.future` are not known."""
    if not left_out:
        return []
    names = ", ".join(list_known_ahead(data, signature))
    windows = f"windows of which the rows to predict lack {names} (data.future)"
    return [f"left out {windows}: {left_out:,} of {left_out + num_windows:,}"]


def _has_full_context(index: SeriesIndex, signature: Signature, series: int) -> bool:
    """Return whether a series has no gap in the context that ends with its last known row."""
    end = int(index.offsets[1:][series] - index.ahead[series])
    inside = (index.breaks > end - signature.context) & (index.breaks < end)
    return not inside.any()


def _explain_unknown_future(
    index: SeriesIndex, data: Data, signature: Signature, series: int
) -> str:
    """Say how many rows a series needs at its end so that a forecast can start at its last known
    row."""
    rows, ahead = signature.horizon, int(index.ahead[series])
    end = int(index.offsets[series + 1])
    breaks = index.breaks[(index.breaks >= end - ahead) & (index.breaks < end)]
    in_line = int(breaks[0]) - (end - ahead) if len(breaks) else ahead
    names, name = ", ".join(list_known_ahead(data, signature)), index.series_names[series]
    has = f"{format_count(in_line, 'such row')} in line" if in_line else "no such row"
    return (
        f"the model reads {names} (data.future) also for the {format_count(rows, 'row')} that it "
        f'predicts; series "{name}" has {has} after its last known one: append '
        f"{format_count(rows - in_line, 'row')} with {names} there and leave its other inputs empty"
    )
