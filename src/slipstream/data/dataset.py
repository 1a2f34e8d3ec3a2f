"""From a config to windows: the whole way of the data in one function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import Config, Data, Signature
from slipstream.data import fitting, folds, prediction_columns, sets, splits, stream
from slipstream.data.folds import Fold
from slipstream.data.io import table as tables
from slipstream.data.io.duplicates import find_duplicates
from slipstream.data.io.files import prepare_with_labels, read_tables, should_stream
from slipstream.data.io.table import DataTable
from slipstream.data.labels import classes, intervals, selection
from slipstream.data.roles import Roles, adapt_to_pretraining, find_roles, sort_roles
from slipstream.data.scaler import Scaler
from slipstream.data.series import Flags, Ints, RawSeries, SeriesIndex, Times
from slipstream.data.stream import StreamedSeries
from slipstream.data.windows import Series, WindowChunk
from slipstream.errors import UserError

DAY_S = 86400.0
COUNT_ROWS = 1_000_000


@dataclass(frozen=True)
class Dataset:
    """The windows of each set, and what is needed to explain them."""

    signature: Signature
    scaler: Scaler
    index: SeriesIndex
    num_windows: dict[str, int]
    """Windows, by set"""
    period: int | None
    """Rows of one season, where known."""
    notes: tuple[str, ...]
    memory: HostSeries | None
    """The series themselves, unless they are streamed"""
    stream: StreamedSeries | None
    folds: tuple[Fold, ...] = ()
    """Of a walk-forward split, the earliest first; `count` and `memory` are those of the last"""
    search_folds: tuple[SearchFold, ...] = ()
    """Of a search, the folds before the split itself, the earliest first"""

    @property
    def data_bytes(self) -> int:
        columns = len(set(self.signature.inputs) | set(self.signature.targets))
        return 4 * columns * self.index.num_rows

    def compute_fingerprint(self) -> str:
        """A hash of the content: the values themselves, or what was read of all of them."""
        found = hashlib.sha256(json.dumps([self.scaler.to_dict(), self.num_windows]).encode())
        found.update(self.index.offsets.tobytes())
        if self.folds:
            found.update(json.dumps([fold.num_windows for fold in self.folds]).encode())
        if self.memory is not None:
            tensors = [self.memory.series.values, *self.memory.starts.values()]
            tensors += [starts for fold in self.folds for starts in fold.starts.values()]
            if self.memory.series.static is not None:
                tensors.append(self.memory.series.static)
            for tensor in tensors:
                found.update(tensor.contiguous().view(-1).numpy().data)
        return found.hexdigest()

    def select_fold(self, fold: Fold) -> Dataset:
        """One fold's windows as an ordinary split, over the same series."""
        assert self.memory is not None
        memory = replace(self.memory, starts=fold.starts)
        return replace(self, num_windows=fold.num_windows, memory=memory, folds=())

    def count_classes(self, which: str = "train") -> Ints:
        """Target rows of each class over a set's windows; of a walk, of its first fold's."""
        dataset = self.select_fold(self.folds[0]) if self.folds else self
        counts = np.zeros(len(self.signature.classes), dtype=np.int64)
        for piece in dataset.iter_chunks(which, None, rows=COUNT_ROWS):
            for some in piece.starts.split(-(-COUNT_ROWS // self.signature.steps_out)):
                rows = some[:, None] + piece.series.target_rows
                numbers = piece.series.targets[rows, 0].long().flatten()
                counts += np.bincount(numbers.numpy(), minlength=len(counts))
        return counts

    def iter_chunks(
        self, which: str, series: Series | None, *, rows: int, with_time: bool = False
    ) -> Iterator[WindowChunk]:
        """Every window of a set: at once from `series`, or by stretches of `rows` from disk."""
        if self.stream is not None:
            yield from self.stream.iter_chunks(which, rows, with_time=with_time)
            return
        assert self.memory is not None
        owners = torch.arange(len(self.index.series_names))
        yield WindowChunk(
            series or self.memory.series, self.memory.starts[which], 0, owners, self.memory.time
        )


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
    """Scaled by the fold's own training rows"""


def load_dataset(
    config: Config, table: Any = None, *, known: Scaler | None = None, num_folds: int = 1
) -> Dataset:
    """Read, check, split, scale and index what `config.data` names, or the given table.

    Columns that are `known` to a scaler are scaled by it, and not learnt from these rows. A search
    has `num_folds`, back from the validation block; a table that stays on disk has none.
    """
    data = config.data
    sources = read_tables(data, table)
    roles, notes = find_roles(sources[0], data)
    notes += find_duplicates(sources)
    if config.masked:
        roles, data = adapt_to_pretraining(roles, data)
    else:
        prediction_columns.refuse_clashes(config, sources[0], roles)
    roles = sort_roles(roles)
    names: tuple[str, ...] = ()
    if data.task == "classify" and data.labels is None:
        sources, names = classes.encode_labels(sources, roles.targets[0], "data.targets")
        classes.refuse_too_few(names, f'column "{roles.targets[0]}"')
    if should_stream(config, sources, roles):
        return _streamed(config, data, sources, roles, notes, names, known)
    store, names, spans = prepare_with_labels(
        sources, data, roles, names, data.context + data.horizon
    )
    del sources
    layout = store.index
    signature = _signature(config, roles, layout.step, names)
    starts, found, training, told = sets.split_windows(store, data, signature)
    if spans is not None and data.label_rows == "end":
        every = [fold.starts for fold in found] or [starts]
        used = [some.numpy() for by_set in every for some in by_set.values()]
        told += intervals.describe_unused(spans, used, signature.lead)
    scaler, series = fitting.fit_scaler(store, signature, training, data, known)
    first = found[0].starts if found else starts  # of a walk, what comes later is tested on
    earlier = _earlier(store, signature, first, training, data, known, num_folds)
    made = Dataset(
        signature=signature,
        scaler=scaler,
        index=layout,
        num_windows={name: len(some) for name, some in starts.items()},
        period=data.period or infer_period(layout),
        notes=(*notes, *told, *store.notes),
        memory=HostSeries(series, starts, store.time),
        stream=None,
        folds=found,
        search_folds=earlier,
    )
    return _with_notes_on_classes(made, config) if names else made


def _earlier(
    store: RawSeries,
    signature: Signature,
    starts: dict[str, Tensor],
    training: Flags,
    data: Data,
    known: Scaler | None,
    count: int,
) -> tuple[SearchFold, ...]:
    """The folds before the split itself, none of which knows its own validation rows."""
    layout = store.index
    offsets, purge = torch.from_numpy(layout.offsets), data.split.purge
    walked = folds.find_search_folds(
        starts, count, offsets=offsets, signature=signature, purge=purge
    )
    found = []
    for number, fold in enumerate(walked[:-1], start=1):
        rows = folds.select_known_rows(training, fold["train"], layout, signature)
        try:
            _, series = fitting.fit_scaler(store, signature, rows, data, known)
        except UserError as error:
            raise UserError(f"tune.folds = {count}, fold {number}: {error}") from None
        found.append(SearchFold(fold, series))
    return tuple(found)


def _streamed(
    config: Config,
    data: Data,
    sources: list[DataTable],
    roles: Roles,
    notes: list[str],
    names: tuple[str, ...],
    known: Scaler | None,
) -> Dataset:
    stream.refuse_unstreamable(data)
    source = sources[0]
    if len(sources) > 1:
        source = tables.concatenate_tables(sources)
        data = data.model_copy(update={"id": data.id or source.file_column})
    layout, static = stream.scan_index(source, data, roles.static)
    signature = _signature(config, roles, layout.step, names)
    runs, ranges = sets.find_windows(layout, data, signature)
    scaler = stream.scan_values(source, signature, runs, data.scale)
    trained = runs.find_series(splits.TRAIN, layout.offsets)
    scaler = fitting.complete_scaler(scaler, signature, static, trained, data, known)
    made = Dataset(
        signature=signature,
        scaler=scaler,
        index=layout,
        num_windows={name: len(found) for name, found in ranges.items()},
        period=data.period or infer_period(layout),
        notes=tuple(notes),
        memory=None,
        stream=StreamedSeries(
            source=source,
            data=data,
            signature=signature,
            scaler=scaler,
            index=layout,
            static=fitting.scale_static(static, scaler, signature) if roles.static else None,
            ranges=ranges,
        ),
    )
    return _with_notes_on_classes(made, config) if names else made


def _signature(
    config: Config, roles: Roles, step: float | None, names: tuple[str, ...]
) -> Signature:
    data = config.data
    return Signature(
        inputs=roles.inputs,
        targets=roles.targets,
        static=roles.static,
        shared=len(set(roles.inputs) & set(roles.targets)),
        context=data.context,
        horizon=0 if config.masked else data.horizon,
        channels=data.channels,
        quantiles=config.train.quantiles if config.train.loss == "quantile" else (),
        step=step,
        classes=names,
        decoder=config.pretrain.decoder if config.masked else 0,
    )


def _with_notes_on_classes(dataset: Dataset, config: Config) -> Dataset:
    told = selection.describe_classes(
        dataset.signature.classes,
        dataset.count_classes(),
        config.train.class_weights,
        fold=", first fold" if dataset.folds else "",
    )
    return replace(dataset, notes=(*dataset.notes, *told))


def shares_rows(dataset: Dataset, data: Data) -> bool:
    """Whether test windows of a dataset have targets in what another split trains or validates."""
    assert dataset.memory is not None
    every = [dataset.memory.starts, *(fold.starts for fold in dataset.folds)]
    runs, rows = sets.assign_first_split(dataset.index, data), dataset.index.num_rows
    seen = runs.mask(splits.TRAIN, 0, rows) | runs.mask(splits.VAL, 0, rows)
    lead, steps = dataset.signature.lead, dataset.signature.steps_out
    return any(
        bool(seen[starts["test"].numpy() + lead + ahead].any())
        for starts in every
        for ahead in range(steps)
    )


def infer_period(layout: SeriesIndex) -> int | None:
    """Rows per day for steps below a day, per week for days, per year for weeks to quarters."""
    if layout.step is None or not layout.has_dates:
        return None
    days = layout.step / DAY_S
    for length, low, high in ((7, 0.99, 1.01), (52, 6.9, 7.1), (12, 27, 32), (4, 88, 93)):
        if low <= days <= high:
            return length
    rows = round(1 / days) if days < 1 else 0
    return rows if rows > 1 and abs(rows * days - 1) < 1e-6 else None
