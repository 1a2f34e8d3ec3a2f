"""Load the data of a config: read, split, scale and index it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.base.errors import Setting, UserError
from slipstream.config import Config, Data, Signature
from slipstream.data import labels, splits, stream, windows
from slipstream.data import series as missing
from slipstream.data.folds import Fold, find_search_folds, select_known_rows
from slipstream.data.loading import (
    LoadedSeries,
    WindowSets,
    find_sets,
    load_series,
    read_source,
    refuse_undecided,
    should_stream,
)
from slipstream.data.prepare.chain import Replay, Source, mark_unknown_rows
from slipstream.data.prepare.steps import Limits
from slipstream.data.roles import build_signature
from slipstream.data.scaler import (
    Scaler,
    complete_scaler,
    fit_scaler,
    make_series_fit,
    merge_scalers,
    scale_static,
)
from slipstream.data.series import Floats, Ints, SeriesIndex, Times, merge_on_disk
from slipstream.data.splits import SplitAssignment, WindowRanges
from slipstream.data.stream import StreamedSeries
from slipstream.data.table import DataTable, SourceFile, concatenate_tables
from slipstream.data.times import describe_unused_time
from slipstream.data.windows import Series, WindowChunk

COUNT_ROWS = 1_000_000
"""The number of target rows whose classes are counted at a time, to limit memory"""
FEW_STRETCHES = 4096
"""Stretches of rows that are marked one after the other, which is faster than counting how many
each row is in"""
MAX_FILES = 100
"""The number of files that a summary describes one by one"""


@dataclass(frozen=True)
class Dataset:
    """The windows of each set, their series, and the metadata that predictions need."""

    signature: Signature
    scaler: Scaler
    index: SeriesIndex
    num_windows: dict[str, int]
    """Number of windows, by set"""
    period: int | None
    """Rows of one season, where known."""
    notes: tuple[str, ...]
    files: tuple[SourceFile, ...] = ()
    """A summary of each file that was read"""
    memory: HostSeries | None = None
    """The series themselves, unless they are streamed"""
    stream: StreamedSeries | None = None
    folds: tuple[Fold, ...] = ()
    """The folds of a walk-forward split, the earliest first; `num_windows` and `memory` are those
    of the last fold"""
    search_folds: tuple[SearchFold, ...] = ()
    """The folds of a search before the split itself, the earliest first"""
    left_out: dict[str, int] = field(default_factory=dict)
    """Windows without a target, by set, of all folds together; they are not in `num_windows`"""
    limits: dict[str, Limits] = field(default_factory=dict)
    """The ranges that steps of `data.prepare` were fitted to, by the step's number"""
    by_window: bool = False
    """Whether the model scales each window by itself (`data.scale_by = "window"`)"""
    latency: int = 0
    """The number of rows after which a row's inputs are known, because steps look ahead"""

    @property
    def data_bytes(self) -> int:
        columns = len(set(self.signature.inputs) | set(self.signature.targets))
        return 4 * columns * self.index.num_rows

    def summarize_files(self) -> list[dict[str, Any]]:
        """Return a summary of each file that was read; of the first files where there are many."""
        return [file.summarize() for file in self.files[:MAX_FILES]]

    def compute_fingerprint(self) -> str:
        """Hash the content: the values themselves, or the statistics of a streamed table."""
        scaler = asdict(self.scaler)
        # as runs have it that began before series had scales, and seasons their size
        if not self.scaler.series:
            scaler = {key: value for key, value in scaler.items() if not key.startswith("series")}
        if not self.scaler.season:
            del scaler["season"]
        digest = hashlib.sha256(json.dumps([scaler, self.num_windows]).encode())
        digest.update(self.index.offsets.tobytes())
        if self.folds:
            digest.update(json.dumps([fold.num_windows for fold in self.folds]).encode())
        if self.memory is not None:
            tensors = [self.memory.series.values, *self.memory.starts.values()]
            tensors += [starts for fold in self.folds for starts in fold.starts.values()]
            if self.memory.series.static is not None:
                tensors.append(self.memory.series.static)
            for tensor in tensors:
                digest.update(tensor.contiguous().view(-1).numpy().data)
        return digest.hexdigest()

    def select_fold(self, fold: Fold) -> Dataset:
        """Return one fold's windows as an ordinary split, over the same series."""
        assert self.memory is not None
        memory = replace(self.memory, starts=fold.starts)
        return replace(
            self,
            num_windows=fold.num_windows,
            memory=memory,
            folds=(),
            left_out=fold.left_out,
        )

    def count_classes(self, set_name: str = "train") -> Ints:
        """Return the number of target rows of each class over a set's windows; with folds, of the
        first fold."""
        dataset = self.select_fold(self.folds[0]) if self.folds else self
        counts = np.zeros(len(self.signature.classes), dtype=np.int64)
        for chunk in dataset.iter_chunks(set_name, None, rows=COUNT_ROWS):
            for batch in chunk.starts.split(-(-COUNT_ROWS // self.signature.steps_out)):
                rows = batch[:, None] + chunk.series.target_rows
                numbers = chunk.series.targets[rows, 0].long().flatten()
                counts += np.bincount(numbers.numpy(), minlength=len(counts))
        return counts

    @cached_property
    def naive_errors(self) -> Tensor:
        """[series, targets] float64: the mean absolute difference, in the scale of the whole table,
        from the row one season before (`period`, or one row) over the training rows of each series.
        Without any, as of new data, over all of its rows; NaN where there are no two such rows."""
        num_series, season = len(self.index.series_names), self.period or 1
        shape = 2, num_series, len(self.signature.targets)
        over_training, over_all = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        set_name = "train" if "train" in self.num_windows else next(iter(self.num_windows))
        lead, steps = self.signature.lead, self.signature.steps_out
        for chunk in self.iter_chunks(set_name, None, rows=COUNT_ROWS):
            series, num_rows = chunk.series, len(chunk.series.values)
            offsets = series.offsets.numpy()
            borders = offsets[:-1] if series.segments is None else series.segments.numpy()
            is_target = _mark_targets(chunk.starts.numpy() + lead, steps, num_rows)
            has_earlier = ~_mark_stretches(borders, borders + season, num_rows)
            has_earlier[: borders[0]] = False
            has_rows = np.diff(offsets) > 0
            owners, begins = chunk.series_ids[torch.from_numpy(has_rows)], offsets[:-1][has_rows]
            for target in range(series.num_targets):  # one by one, which bounds the memory
                errors = series.compute_differences(target, season)
                known = torch.from_numpy(has_earlier) & ~errors.isnan()
                used = known & torch.from_numpy(is_target)
                for sums, mask in ((over_training, used), (over_all, known)):
                    terms = torch.where(mask, errors, 0.0), mask.double()
                    added = np.stack([np.add.reduceat(term.numpy(), begins) for term in terms])
                    sums[:, :, target].index_add_(1, owners, torch.from_numpy(added))
        total, count = over_training
        return torch.where(count > 0, total / count, over_all[0] / over_all[1])

    def iter_chunks(
        self, set_name: str, series: Series | None, *, rows: int, with_time: bool = False
    ) -> Iterator[WindowChunk]:
        """Yield every window of a set: at once from `series`, or in chunks of `rows` from disk."""
        if self.stream is not None:
            yield from self.stream.iter_chunks(set_name, rows, with_time=with_time)
            return
        assert self.memory is not None
        memory, ids = self.memory, torch.arange(len(self.index.series_names))
        yield WindowChunk(series or memory.series, memory.starts[set_name], 0, ids, memory.time)


def _mark_targets(firsts: Ints, steps: int, num_rows: int) -> npt.NDArray[np.bool_]:
    """Return which rows are in any stretch of `steps` rows from one of `firsts`."""
    # those of windows that follow each other are one stretch
    is_break = np.diff(firsts) != 1
    begins = firsts[np.concatenate([[True], is_break])[: len(firsts)]]
    lasts = firsts[np.concatenate([is_break, [True]])[: len(firsts)]]
    return _mark_stretches(begins, lasts + steps, num_rows)


def _mark_stretches(begins: Ints, ends: Ints, num_rows: int) -> npt.NDArray[np.bool_]:
    """Return which rows are in any of the stretches."""
    if len(begins) <= FEW_STRETCHES:
        marks = np.zeros(num_rows, dtype=bool)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            marks[begin:end] = True
        return marks
    changes = np.zeros(num_rows + 1, dtype=np.int32)
    np.add.at(changes, np.minimum(begins, num_rows), 1)
    np.add.at(changes, np.minimum(ends, num_rows), -1)
    return np.asarray(np.cumsum(changes[:-1], dtype=np.int32) > 0)


@dataclass(frozen=True)
class HostSeries:
    """Scaled series on the host."""

    series: Series
    starts: dict[str, Tensor]
    """First rows of the windows, by set."""
    time: Times | None


@dataclass(frozen=True)
class SearchFold:
    """A fold that validates on rows which the split itself trains on."""

    starts: dict[str, Tensor]
    """First rows of the windows, train and val"""
    series: Series
    """The series, scaled by the fold's own training rows"""


def load_dataset(
    config: Config,
    table: Any = None,
    *,
    known: Scaler | None = None,
    num_folds: int = 1,
    replay: Replay | None = None,
    whole: bool = False,
) -> Dataset:
    """Read, check, split, scale and index the data that `config.data` names, or the table passed
    instead.

    Columns of the scaler `known` are scaled by it; the others are fitted on these rows. A search
    has `num_folds`, back from the validation block; a table that stays on disk has none. `replay`
    holds the fitted ranges of the steps of `data.prepare`, where they are not to be fitted again.
    `whole`: the rows of all sets train, see `find_sets`; such a table is read into memory.
    """
    if known is None and replay is None:
        refuse_undecided(config.data)
    source = read_source(config, table, replay=replay, num_folds=num_folds, whole=whole)
    if not whole and should_stream(config, source.tables, source.roles):
        dataset = _load_stream(config, source, known)
    else:
        dataset = _load_memory(config, source, known, num_folds, whole=whole)
    dataset = replace(
        dataset,
        limits=source.limits,
        latency=source.latency,
        by_window=config.data.scale_by == "window",
        notes=(
            *dataset.notes,
            *describe_unused_time(source.tables[0], config.data),
            *splits.describe_gaps(dataset.index, source.data, dataset.signature),
        ),
    )
    if not dataset.signature.classes:
        return dataset
    names, counts = dataset.signature.classes, dataset.count_classes()
    fold = ", first fold" if dataset.folds else ""
    notes = labels.describe_classes(names, counts, config.train.class_weights, fold=fold)
    return replace(dataset, notes=(*dataset.notes, *notes))


def _load_memory(
    config: Config, source: Source, known: Scaler | None, num_folds: int, *, whole: bool
) -> Dataset:
    loaded = load_series(config, source)
    raw, signature, data, intervals = loaded
    sets = find_sets(loaded, whole=whole)
    folds = tuple(Fold.from_windows(fold) for fold in sets.folds)
    left_out = _sum_by_set([fold.left_out for fold in folds])
    notes = [*source.notes, *sets.notes]
    if data.labels is None:
        num_windows = _sum_by_set([fold.num_windows for fold in folds])
        notes += missing.describe_left_out(left_out, num_windows, signature)
    if intervals is not None and data.label_rows == "end":
        used = [starts for fold in sets.folds for starts in fold.starts.values()]
        notes += labels.describe_unused(intervals, used, signature.lead)
    scaler, rows = fit_scaler(raw, signature, sets.training, data, known)
    series = windows.build_series(*rows, raw.index.offsets, signature, raw.index.segments)
    return Dataset(
        signature=signature,
        scaler=scaler,
        index=raw.index,
        num_windows=folds[-1].num_windows,
        period=data.period or raw.index.infer_period(),
        notes=(*notes, *raw.notes),
        files=source.files,
        memory=HostSeries(series, folds[-1].starts, raw.time),
        folds=folds if sets.is_walk_forward else (),
        left_out=left_out,
        search_folds=_load_search_folds(loaded, sets, known, num_folds),
    )


def _sum_by_set(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def _load_search_folds(
    loaded: LoadedSeries, sets: WindowSets, known: Scaler | None, count: int
) -> tuple[SearchFold, ...]:
    """Scale the folds before the split itself, each without its own validation rows."""
    raw, signature, data, _ = loaded
    scaled = []
    search_folds = find_search_folds(loaded, sets, count)
    for number, fold in enumerate(search_folds[:-1], start=1):
        rows = select_known_rows(sets.training, fold["train"], raw.index, signature)
        try:
            _, fold_rows = fit_scaler(raw, signature, rows, data, known)
        except UserError as error:
            raise UserError(
                f"tune.folds = {count}, fold {number}: " + error.message, setting="tune.folds"
            ) from None
        series = windows.build_series(*fold_rows, raw.index.offsets, signature, raw.index.segments)
        scaled.append(SearchFold(fold, series))
    return tuple(scaled)


@dataclass(frozen=True)
class OpenedStream:
    """A table on disk after a first pass: its series and the set of each row."""

    table: DataTable
    data: Data
    index: SeriesIndex
    static: Floats
    """[series, static columns]"""
    signature: Signature
    assignment: SplitAssignment
    ranges: dict[str, WindowRanges]
    """The windows of each set; those without a target are among them"""
    notes: list[str]
    """Notes on rows of one time that were merged"""


def open_stream(config: Config, source: Source) -> OpenedStream:
    """Find the series and sets of a source whose rows stay on disk."""
    data, roles, table = source.data, source.roles, source.tables[0]
    stream.refuse_unstreamable(data)
    if config.train.state == "carried":
        raise UserError(
            'train.state = "carried" reads series from memory, but these stay on disk; set '
            + Setting({"engine.home": "device"})
            + ", or "
            + Setting({"train.state": "windows"}),
            setting="train.state",
        )
    if len(source.tables) > 1:
        table = concatenate_tables(source.tables)
        data = data.model_copy(update={"id": data.id or table.file_column})
    merged: list[str] = []
    if not data.prepare:  # whose steps read a table in which each time occurs once
        table, merged = merge_on_disk(table, data)
    index, static = stream.scan_index(table, data, roles.static)
    if data.prepare:
        index = mark_unknown_rows(table, index, source.features)
        index = replace(index, look_ahead=source.tables[0].look_ahead)
    signature = build_signature(config, roles, index.step, source.classes)
    assignment, ranges = splits.find_windows(index, data, signature)
    return OpenedStream(table, data, index, static, signature, assignment, ranges, merged)


def _load_stream(config: Config, source: Source, known: Scaler | None) -> Dataset:
    opened = open_stream(config, source)
    table, data, index, static = opened.table, opened.data, opened.index, opened.static
    signature, assignment = opened.signature, opened.assignment
    trained = assignment.find_series(splits.TRAIN, index.offsets)
    fit = make_series_fit(index, signature, data, trained, known)
    scaler, unknown, num_missing = stream.scan_values(
        table, signature, assignment, data.scale, index, fit
    )
    index = replace(index, unknown=unknown, num_missing=num_missing)
    ranges, left_out = splits.exclude_unknown(opened.ranges, index, signature)
    num_windows = {name: len(windows) for name, windows in ranges.items()}
    scaler = complete_scaler(scaler, signature, static, trained, known)
    if fit is not None:
        parts = [fit.finish(name, scaler, data.scale_by, known) for name in fit.columns]
        if data.scale_by == "series":
            scaler = fit.to_scaler(scaler)
        else:
            selected = [part.select(part.shift) for part in parts]
            scaler, fit = merge_scalers(data.scale, [scaler, *selected]), None
    scaled = scale_static(static, scaler, signature)
    return Dataset(
        signature=signature,
        scaler=scaler,
        index=index,
        num_windows=num_windows,
        left_out=left_out,
        period=data.period or index.infer_period(),
        notes=(
            *source.notes,
            *opened.notes,
            *missing.describe_left_out(left_out, num_windows, signature),
        ),
        files=source.files,
        stream=StreamedSeries(table, data, signature, scaler, index, scaled, ranges, fit),
    )


def shares_rows(dataset: Dataset, data: Data) -> bool:
    """Return whether test windows have targets in rows that another split trains or validates."""
    assert dataset.memory is not None
    starts_by_fold = [dataset.memory.starts, *(fold.starts for fold in dataset.folds)]
    assignment = splits.assign_first_split(dataset.index, data)
    learnt = assignment.mask(splits.TRAIN) | assignment.mask(splits.VAL)
    lead, steps = dataset.signature.lead, dataset.signature.steps_out
    return any(
        bool(learnt[starts["test"].numpy() + lead + ahead].any())
        for starts in starts_by_fold
        for ahead in range(steps)
    )
