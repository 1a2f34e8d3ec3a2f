"""From a config to windows: the whole way of the data in one function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from slipstream.config import SIMULATED, Config, Data, Signature
from slipstream.data import (
    bars,
    cell,
    classes,
    folds,
    labelled,
    labels,
    prepare,
    scaling,
    splits,
    stream,
    tables,
    windows,
)
from slipstream.data.folds import Fold
from slipstream.data.prepare import Ints, Layout, Store, Times
from slipstream.data.roles import Roles, find_roles
from slipstream.data.scaling import Scaler
from slipstream.data.splits import SETS, Runs
from slipstream.data.stream import Stream
from slipstream.data.tables import Source
from slipstream.data.windows import Piece, Ranges, Series
from slipstream.errors import UserError

DAY_S = 86400.0
COUNT_ROWS = 1_000_000


@dataclass(frozen=True)
class Dataset:
    """The windows of each set, and what is needed to explain them."""

    signature: Signature
    scaler: Scaler
    layout: Layout
    count: dict[str, int]
    """Windows, by set"""
    period: int | None
    """Rows of one season, where known."""
    notes: tuple[str, ...]
    memory: InMemory | None
    """The series themselves, unless they are streamed"""
    stream: Stream | None
    folds: tuple[Fold, ...] = ()
    """Of a walk-forward split, the earliest first; `count` and `memory` are those of the last"""

    @property
    def data_bytes(self) -> int:
        columns = len(set(self.signature.inputs) | set(self.signature.targets))
        return 4 * columns * self.layout.num_rows

    def fingerprint(self) -> str:
        """A hash of the content: the values themselves, or what was read of all of them."""
        found = hashlib.sha256(json.dumps([self.scaler.to_dict(), self.count]).encode())
        found.update(self.layout.offsets.tobytes())
        if self.folds:
            found.update(json.dumps([fold.count for fold in self.folds]).encode())
        if self.memory is not None:
            tensors = [self.memory.series.values, *self.memory.starts.values()]
            tensors += [starts for fold in self.folds for starts in fold.starts.values()]
            if self.memory.series.static is not None:
                tensors.append(self.memory.series.static)
            for tensor in tensors:
                found.update(tensor.contiguous().view(-1).numpy().data)
        return found.hexdigest()

    def only(self, fold: Fold) -> Dataset:
        """One fold's windows as an ordinary split, over the same series."""
        assert self.memory is not None
        memory = replace(self.memory, starts=fold.starts)
        return replace(self, count=fold.count, memory=memory, folds=())

    def class_counts(self, which: str = "train") -> Ints:
        """Target rows of each class over a set's windows; of a walk, of its first fold's."""
        dataset = self.only(self.folds[0]) if self.folds else self
        counts = np.zeros(len(self.signature.classes), dtype=np.int64)
        for piece in dataset.pieces(which, None, rows=COUNT_ROWS):
            for some in piece.starts.split(-(-COUNT_ROWS // self.signature.steps_out)):
                rows = some[:, None] + piece.series.target_rows
                numbers = piece.series.targets[rows, 0].long().flatten()
                counts += np.bincount(numbers.numpy(), minlength=len(counts))
        return counts

    def pieces(
        self, which: str, series: Series | None, *, rows: int, with_time: bool = False
    ) -> Iterator[Piece]:
        """Every window of a set: at once from `series`, or by stretches of `rows` from disk."""
        if self.stream is not None:
            yield from self.stream.pieces(which, rows, with_time=with_time)
            return
        assert self.memory is not None
        owners = torch.arange(len(self.layout.series))
        yield Piece(
            series or self.memory.series, self.memory.starts[which], 0, owners, self.memory.time
        )


@dataclass(frozen=True)
class InMemory:
    """Scaled series on the host."""

    series: Series
    starts: dict[str, Tensor]
    """First rows of the windows, by set."""
    time: Times | None


def load(config: Config, table: Any = None, *, known: Scaler | None = None) -> Dataset:
    """Read, check, split, scale and index what `config.data` names, or the given table.

    Columns that are `known` to a scaler are scaled by it, and not learnt from these rows.
    """
    data = config.data
    sources = read_sources(data, table)
    roles, notes = find_roles(sources[0], data)
    if config.masked:
        roles, data = _for_an_encoder(roles, data)
    roles = _in_stored_order(roles)
    names: tuple[str, ...] = ()
    if data.task == "classify" and data.labels is None:
        sources, names = classes.coded(sources, roles.targets[0], "data.targets")
        classes.refuse_few(names, f'column "{roles.targets[0]}"')
    if _streams(config, sources, roles):
        return _streamed(config, data, sources, roles, notes, names, known)
    store, names, spans = build_store(sources, data, roles, names, data.context + data.horizon)
    del sources
    layout = store.layout
    signature = _signature(config, roles, layout.step, names)
    starts, found, training, told = _split(store, data, signature)
    if spans is not None and data.label_rows == "end":
        every = [fold.starts for fold in found] or [starts]
        used = [some.numpy() for sets in every for some in sets.values()]
        told += labels.told(spans, used, signature.lead)
    scaler = _fit(store, roles, training, data, names, known)
    series = scaled_series(store, scaler, signature)
    made = Dataset(
        signature=signature,
        scaler=scaler,
        layout=layout,
        count={name: len(some) for name, some in starts.items()},
        period=data.period or season(layout),
        notes=(*notes, *told, *store.notes),
        memory=InMemory(series, starts, store.time),
        stream=None,
        folds=found,
    )
    return _with_notes_on_classes(made, config) if names else made


def _split(
    store: Store, data: Data, signature: Signature
) -> tuple[dict[str, Tensor], tuple[Fold, ...], npt.NDArray[np.bool_], list[str]]:
    """The windows by set, the folds of a walk, the rows that training may know, and notes."""
    layout = store.layout
    found: tuple[Fold, ...] = ()
    told: list[str] = []
    numbers = labelled.numbers(store) if signature.classes else None
    if data.split.stratified:
        assert numbers is not None
        by_set, training = labelled.stratified(layout, numbers, data, signature)
        return {name: torch.from_numpy(some) for name, some in by_set.items()}, (), training, []
    if data.split.walk_forward is None or signature.masked:
        runs, ranges = find_windows(layout, data, signature)
        starts = {name: torch.from_numpy(some.starts()) for name, some in ranges.items()}
    else:
        runs, found, told = folds.find(layout, store.time, data, signature)
        starts = found[-1].starts
    if numbers is not None:
        starts = labelled.kept(starts, numbers, signature)
        found = tuple(
            replace(fold, starts=labelled.kept(fold.starts, numbers, signature, fold=fold.label))
            for fold in found
        )
    return starts, found, runs.mask(splits.TRAIN, 0, layout.num_rows), told


def build_store(
    sources: list[Source],
    data: Data,
    roles: Roles,
    names: tuple[str, ...],
    min_rows: int,
) -> tuple[Store, tuple[str, ...], labels.Spans | None]:
    """The store, its classes, and where the labels of a table lie if they come from one."""
    if data.labels is None:
        return prepare.build(sources, data, roles, min_rows=min_rows), names, None
    plain = prepare.build(sources, data, replace(roles, targets=()), min_rows=min_rows)
    store, names, spans = labels.attach(plain, data, names)
    classes.refuse_few(names, data.labels)
    return store, names, spans


def _with_notes_on_classes(dataset: Dataset, config: Config) -> Dataset:
    told = labelled.notes(
        dataset.signature.classes,
        dataset.class_counts(),
        config.train.class_weights,
        fold=", first fold" if dataset.folds else "",
    )
    return replace(dataset, notes=(*dataset.notes, *told))


def _for_an_encoder(roles: Roles, data: Data) -> tuple[Roles, Data]:
    """What masked rows are filled in from: inputs alone, and windows of nothing but context."""
    targets = roles.targets if data.channels == "independent" else ()
    split = data.split.model_copy(update={"stratified": False})
    unasked = {"horizon": 0, "static": (), "task": "regress", "labels": None, "split": split}
    return Roles(roles.inputs, targets), data.model_copy(update=unasked)


def _streams(config: Config, sources: list[Source], roles: Roles) -> bool:
    """Whether the rows stay on disk: if asked to, or where they would fill half of the memory."""
    home = config.engine.home
    if home not in ("auto", "stream"):
        return False
    on_disk = all(source.groups for source in sources)
    columns = len(set(roles.inputs) | set(roles.targets))
    needed = 4 * columns * sum(source.num_rows for source in sources)
    if home == "stream" and not on_disk:
        raise UserError('engine.home = "stream" reads Parquet and Arrow files; convert the data')
    return home == "stream" or (on_disk and needed > psutil.virtual_memory().available / 2)


def _streamed(
    config: Config,
    data: Data,
    sources: list[Source],
    roles: Roles,
    notes: list[str],
    names: tuple[str, ...],
    known: Scaler | None,
) -> Dataset:
    stream.refuse_what_needs_memory(data)
    source = sources[0]
    if len(sources) > 1:
        source = tables.join(sources)
        data = data.model_copy(update={"id": data.id or tables.FILE})
    layout, static = stream.scan_layout(source, data, roles.static)
    signature = _signature(config, roles, layout.step, names)
    runs, ranges = find_windows(layout, data, signature)
    scaler, anchors = stream.scan_values(source, signature, runs, data.scale)
    if known is not None:
        scaler = scaler.joined(known.only(scaler.shift))
    if roles.static:
        trained = np.array(
            [
                runs.mask(SETS.index("train"), int(a), int(b)).any()
                for a, b in zip(layout.offsets[:-1], layout.offsets[1:], strict=True)
            ]
        )
        scaler = scaler.joined(fit_static(static, roles.static, trained, data))
    if names:
        scaler = scaler.joined(scaling.as_it_is(roles.targets[0], high=len(names) - 1.0))
    made = Dataset(
        signature=signature,
        scaler=scaler,
        layout=layout,
        count={name: len(found) for name, found in ranges.items()},
        period=data.period or season(layout),
        notes=tuple(notes),
        memory=None,
        stream=Stream(
            source=source,
            data=data,
            signature=signature,
            scaler=scaler,
            anchors=anchors,
            layout=layout,
            static=scaled_static(static, scaler, signature) if roles.static else None,
            ranges=ranges,
        ),
    )
    return _with_notes_on_classes(made, config) if names else made


def find_windows(
    layout: Layout, data: Data, signature: Signature
) -> tuple[Runs, dict[str, Ranges]]:
    """Which rows belong to which set, and each set's windows; every set must have some.

    An encoder's test rows are left alone, and so are those of a walk's first fold and all later.
    """
    runs = _assigned(layout, data)
    ranges = {
        name: windows.find_ranges(
            layout.breaks,
            runs,
            which=index,
            lead=signature.lead,
            steps_out=signature.steps_out,
            stride=data.stride,
        )
        for index, name in enumerate(SETS)
    }
    if signature.masked:
        ranges["test"] = ranges["test"].within(0, 0)
    for index, (name, found) in enumerate(ranges.items()):
        if not (len(found) or (signature.masked and name == "test")):
            raise UserError(splits.no_window(name, layout, runs.count(index), data))
    return runs, ranges


def _assigned(layout: Layout, data: Data) -> Runs:
    walks = data.split.walk_forward is not None
    return splits.walk_forward(layout, data.split)[0] if walks else splits.assign(layout, data)


def shares_rows(dataset: Dataset, data: Data) -> bool:
    """Whether test windows of a dataset have targets in what another split trains or validates."""
    assert dataset.memory is not None
    every = [dataset.memory.starts, *(fold.starts for fold in dataset.folds)]
    runs, rows = _assigned(dataset.layout, data), dataset.layout.num_rows
    seen = runs.mask(splits.TRAIN, 0, rows) | runs.mask(splits.VAL, 0, rows)
    lead, steps = dataset.signature.lead, dataset.signature.steps_out
    return any(
        bool(seen[starts["test"].numpy() + lead + ahead].any())
        for starts in every
        for ahead in range(steps)
    )


def read_sources(data: Data, table: Any) -> list[Source]:
    """The tables that the config names, or the one given in its place."""
    if table is not None:
        return [tables.from_memory(table)]
    if not data.paths:
        raise UserError("data.path is not set; name a file or a folder, or pass a table")
    if data.paths[0].startswith(SIMULATED):
        return [_simulated(data.paths[0])]
    if data.split.folders:
        _check_folders(data)
    sources = list(tables.read_all(data.paths))
    if (len(sources) > 1 or tables.FILE in data.ids) and data.ids and not data.split.folders:
        return [tables.join(sources)]
    return sources


def _simulated(path: str) -> Source:
    embedded = {f"{SIMULATED}cell": cell.simulate, f"{SIMULATED}bars": bars.simulate}
    if path not in embedded:
        known = " and ".join(f'"{name}"' for name in embedded)
        raise UserError(f'data.path is "{path}", but the embedded data sets are {known}')
    return tables.of_table(path, embedded[path]())


def _check_folders(data: Data) -> None:
    if len(data.paths) != 1 or not Path(data.paths[0]).is_dir():
        raise UserError("data.split.folders needs data.path to be one folder")
    for name in SETS:
        if not (Path(data.paths[0]) / name).is_dir():
            raise UserError(f"data.split.folders: {data.paths[0]} has no folder {name}/")


def _in_stored_order(roles: Roles) -> Roles:
    """What is only an input first, then what is both, then what is only a target."""
    both = [name for name in roles.targets if name in roles.inputs]
    return Roles(
        inputs=(*(name for name in roles.inputs if name not in both), *both),
        targets=(*both, *(name for name in roles.targets if name not in both)),
        static=roles.static,
    )


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


def _fit(
    store: Store,
    roles: Roles,
    training: npt.NDArray[np.bool_],
    data: Data,
    names: tuple[str, ...],
    known: Scaler | None,
) -> Scaler:
    """A label, which stands last, is a class's number and stays one."""
    columns = store.columns[:-1] if names else store.columns
    scaler = scaling.fit(
        store.values, columns, store.anchors, training, kind=data.scale, known=known
    )
    if names:
        scaler = scaler.joined(scaling.as_it_is(store.columns[-1], high=len(names) - 1.0))
    if not roles.static:
        return scaler
    trained = np.logical_or.reduceat(training, store.layout.offsets[:-1])
    return scaler.joined(fit_static(store.static, roles.static, trained, data))


def fit_static(
    static: npt.NDArray[np.float64],
    names: tuple[str, ...],
    trained: npt.NDArray[np.bool_],
    data: Data,
) -> Scaler:
    anchors = dict.fromkeys(names, 0.0)
    return scaling.fit(static.astype(np.float32), names, anchors, trained, kind=data.scale)


def scaled_series(store: Store, scaler: Scaler, signature: Signature) -> Series:
    """The store's values, scaled in place, in the signature's order of columns."""
    columns = tuple(dict.fromkeys((*signature.inputs, *signature.targets)))
    values = store.values
    for i, name in enumerate(store.columns):
        scaler.apply(name, values[:, i], store.anchors[name])
    if store.columns != columns:  # targets that predict was not given are left unknown
        found = {name: i for i, name in enumerate(store.columns)}
        ordered = np.full((len(values), len(columns)), np.nan, dtype=np.float32)
        for i, name in enumerate(columns):
            if name in found:
                ordered[:, i] = values[:, found[name]]
        values = ordered
    static = scaled_static(store.static, scaler, signature) if signature.static else None
    offsets = torch.from_numpy(store.layout.offsets)
    return windows.build(torch.from_numpy(values), static, offsets, signature)


def scaled_static(static: npt.NDArray[np.float64], scaler: Scaler, signature: Signature) -> Tensor:
    scaled = static.astype(np.float32)
    for i, name in enumerate(signature.static):
        scaler.apply(name, scaled[:, i], 0.0)
    return torch.from_numpy(scaled)


def season(layout: Layout) -> int | None:
    """Rows per day for steps below a day, per week for days, per year for weeks to quarters."""
    if layout.step is None or not layout.dated:
        return None
    days = layout.step / DAY_S
    for length, low, high in ((7, 0.99, 1.01), (52, 6.9, 7.1), (12, 27, 32), (4, 88, 93)):
        if low <= days <= high:
            return length
    rows = round(1 / days) if days < 1 else 0
    return rows if rows > 1 and abs(rows * days - 1) < 1e-6 else None
