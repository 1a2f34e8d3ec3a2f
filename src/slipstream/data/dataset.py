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
from slipstream.data import bars, cell, folds, prepare, scaling, splits, stream, tables, windows
from slipstream.data.folds import Fold
from slipstream.data.prepare import Layout, Store, Times
from slipstream.data.roles import Roles, find_roles
from slipstream.data.scaling import Scaler
from slipstream.data.splits import SETS, Runs
from slipstream.data.stream import Stream
from slipstream.data.tables import Source
from slipstream.data.windows import Piece, Ranges, Series
from slipstream.errors import UserError

DAY_S = 86400.0


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
    if _streams(config, sources, roles):
        return _streamed(config, data, sources, roles, notes, known)
    store = prepare.build(sources, data, roles, min_rows=data.context + data.horizon)
    del sources
    layout = store.layout
    signature = _signature(config, roles, layout.step)
    found: tuple[Fold, ...] = ()
    if data.split.walk_forward is None or config.masked:
        runs, ranges = find_windows(layout, data, signature)
        starts = {name: torch.from_numpy(some.starts()) for name, some in ranges.items()}
    else:
        runs, found, told = folds.find(layout, store.time, data, signature)
        starts, notes = found[-1].starts, [*notes, *told]
    scaler = _fit(store, roles, runs.mask(splits.TRAIN, 0, layout.num_rows), data, known)
    series = scaled_series(store, scaler, signature)
    return Dataset(
        signature=signature,
        scaler=scaler,
        layout=layout,
        count={name: len(some) for name, some in starts.items()},
        period=data.period or season(layout),
        notes=(*notes, *store.notes),
        memory=InMemory(series, starts, store.time),
        stream=None,
        folds=found,
    )


def _for_an_encoder(roles: Roles, data: Data) -> tuple[Roles, Data]:
    """What masked rows are filled in from: inputs alone, and windows of nothing but context."""
    targets = roles.targets if data.channels == "independent" else ()
    return Roles(roles.inputs, targets), data.model_copy(update={"horizon": 0, "static": ()})


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
    known: Scaler | None,
) -> Dataset:
    stream.refuse_what_needs_memory(data)
    source = sources[0]
    if len(sources) > 1:
        source = tables.join(sources)
        data = data.model_copy(update={"id": data.id or tables.FILE})
    layout, static = stream.scan_layout(source, data, roles.static)
    signature = _signature(config, roles, layout.step)
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
    return Dataset(
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


def _signature(config: Config, roles: Roles, step: float | None) -> Signature:
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
        decoder=config.pretrain.decoder if config.masked else 0,
    )


def _fit(
    store: Store,
    roles: Roles,
    training: npt.NDArray[np.bool_],
    data: Data,
    known: Scaler | None,
) -> Scaler:
    scaler = scaling.fit(
        store.values, store.columns, store.anchors, training, kind=data.scale, known=known
    )
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
