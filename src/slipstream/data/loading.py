"""Loading of a config's series and of the windows of each set, before scaling and without torch.

Training (`data/dataset`) and the app, which shows rows, sets and fitted steps before training, load
data with these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from slipstream.base import machine
from slipstream.base.errors import Setting, UserError
from slipstream.config import ALL_ROWS, Config, Data, Signature, Split, replace_settings
from slipstream.data import labels, splits
from slipstream.data.files import read_tables
from slipstream.data.labels import LabelIntervals
from slipstream.data.prepare.chain import (
    PrepareChain,
    Replay,
    Source,
    find_source,
    mark_source_rows,
)
from slipstream.data.roles import SERIES, Roles, build_signature
from slipstream.data.series import Flags, Ints, RawSeries, merge_on_disk
from slipstream.data.splits import FoldWindows, SplitAssignment
from slipstream.data.table import DataTable, describe_files

DEFAULT_SPLIT = Split(train=0.7, val=0.1, test=0.2)


class LoadedSeries(NamedTuple):
    """The series of a config in physical units."""

    raw: RawSeries
    signature: Signature
    data: Data
    """The settings of the data, as the steps of `data.prepare` leave them"""
    intervals: LabelIntervals | None = None
    """The labelled rows, where a table of labels is named (`data.labels`)"""


class WindowSets(NamedTuple):
    """The windows of each set: of one split, or of every fold of a walk-forward split."""

    folds: list[FoldWindows]
    """The folds; for a single split, one fold without a label"""
    training: Flags
    """The rows that columns are scaled by"""
    notes: list[str]
    is_walk_forward: bool = False


def should_stream(config: Config, tables: list[DataTable], roles: Roles) -> bool:
    """Return whether rows stay on disk: if requested, or if they would fill half of the memory."""
    home = config.engine.home
    if home not in ("auto", "stream"):
        return False
    on_disk = all(table.row_groups for table in tables)
    columns = len(set(roles.inputs) | set(roles.targets))
    needed_bytes = 4 * columns * sum(table.num_rows for table in tables)
    if home == "stream" and not on_disk:
        name = next(table.name for table in tables if not table.row_groups)
        raise UserError(
            f'engine.home = "stream" reads Parquet and Arrow files, which {name} is not; '
            "convert it, or set " + Setting({"engine.home": "auto"}),
            setting="engine.home",
        )
    return home == "stream" or (on_disk and needed_bytes > machine.get_available_memory() / 2)


def refuse_undecided(data: Data) -> None:
    """Refuse to train by a config in which `slipstream inspect` has left a question open."""
    for name, question in data.undecided.items():
        if name not in data.accept:
            raise UserError(
                f"data.undecided: {question} ("
                + Setting({"data.accept": [*data.accept, name]})
                + "); or remove the question once the settings answer it",
                setting="data.undecided",
            )
    for name in data.accept:
        if name not in data.undecided:
            known = ", ".join(f'"{known}"' for known in data.undecided) or "empty"
            raise UserError(
                f'data.accept has "{name}", which is not in data.undecided ({known}); remove it',
                setting="data.accept",
            )


def read_source(
    config: Config,
    table: Any = None,
    *,
    replay: Replay | None = None,
    num_folds: int = 1,
    in_memory: bool = False,
    whole: bool = False,
) -> Source:
    """Read the tables that a config names, carry out the steps of `data.prepare`, and find roles.

    `replay` holds the fitted ranges of the steps, where they are not to be fitted again. With the
    `num_folds` of a search, steps are fitted on the training rows of the first fold. Steps run over
    rows that stay on disk where training would stream them, unless all rows are wanted `in_memory`.
    `whole`: all rows of the split are training rows.
    """
    data = config.data
    if not data.prepare:
        tables = read_tables(data, table)
        return find_source(config, data, tables, describe_files(tables))
    chain = PrepareChain(data, replay=replay)
    tables = read_tables(data, table)
    notes = describe_files(tables)
    roles = Roles(chain.list_inputs(tables[0]), ())
    if not in_memory and should_stream(config, tables, roles):
        merged = [merge_on_disk(table, data) for table in tables]
        notes += [note for _, described in merged for note in described]
        prepared = chain.stream([table for table, _ in merged])
    elif chain.is_fitted:
        prepared = chain.apply(tables)
    else:
        draft = chain.draft(tables)
        source = find_source(config, draft.data, draft.tables, [])
        prepared = chain.fit(tables, _mark_training_rows(config, source, num_folds, whole))
    source = find_source(
        config, prepared.data, prepared.tables, [*notes, *prepared.notes, *prepared.left_out]
    )
    limits, latency = prepared.limits, prepared.latency
    return source._replace(limits=limits, latency=latency, features=chain.features)


def _mark_training_rows(config: Config, source: Source, num_folds: int, whole: bool) -> Flags:
    """Mark the training rows by their position before the first step of `data.prepare`; with folds,
    the training rows of the first fold."""
    loaded = load_series(config, source)
    sets = find_sets(loaded, whole=whole)
    training = sets.training
    if num_folds > 1:
        from slipstream.data import folds  # imports torch

        first = folds.find_search_folds(loaded, sets, num_folds)[0]
        index, signature = loaded.raw.index, loaded.signature
        training = folds.select_known_rows(training, first["train"], index, signature)
    return mark_source_rows(source, training, loaded.raw.index)


def resolve_context(config: Config, table: Any = None) -> Config:
    """Return a config whose `data.context` is a number of rows: "all" is the length of the longest
    series of its data, or of the table passed instead.

    Series that are shorter are padded, and shares of the split become shares of the series.
    """
    data = config.data
    if data.context != ALL_ROWS:
        return config
    split = data.split if data.split.by or data.split.folders else DEFAULT_SPLIT
    whole = data.model_copy(update={"context": 1, "split": split})
    draft = config.model_copy(update={"data": whole})
    index = load_series(draft, read_source(draft, table), min_rows=1).raw.index
    lengths = np.diff(index.offsets)
    longest = int(lengths.max())
    if config.model.spec.is_sequential:  # patches of so many rows cover a window
        longest = -(-longest // config.model.patch) * config.model.patch
    settings: dict[str, Any] = {"context": longest}
    if (lengths != longest).any():
        steps = data.model_dump(exclude_unset=True).get("prepare", ())
        settings["prepare"] = (*steps, {"step": "pad", "length": longest})
    if not (data.split.by or data.split.folders):
        shares = {name: getattr(data.split, name) for name in ("train", "val", "test")}
        if sum(share or 0.0 for share in shares.values()) > 1 - 1e-9:
            del shares["train"]  # the rest
        settings["split"] = {"by": SERIES, **shares}
    return replace_settings(config, data=settings)


def load_series(config: Config, source: Source, *, min_rows: int | None = None) -> LoadedSeries:
    """Separate and order the series of a source; a series shorter than `min_rows`, by default the
    rows of one window, is refused or dropped."""
    data, roles = source.data, source.roles
    needed = data.context + data.horizon if min_rows is None else min_rows
    raw, names, intervals = labels.prepare_with_labels(
        source.tables, data, roles, source.classes, needed
    )
    signature = build_signature(config, roles, raw.index.step, names)
    return LoadedSeries(raw, signature, data, intervals)


def find_sets(loaded: LoadedSeries, *, whole: bool = False) -> WindowSets:
    """Find the windows of each set; a set without windows is refused.

    `whole`: every window trains, whichever set of the split its rows are in, none tests, and the
    validation windows are also training windows.
    """
    raw, signature, data, _ = loaded
    index = raw.index
    if whole:
        return _find_whole(loaded, find_sets(loaded).folds[-1].starts)
    if data.split.stratified:
        numbers = raw.read_column(signature.targets[0]).astype(np.int64)
        starts, training = labels.split_stratified(index, numbers, data, signature)
        return WindowSets([FoldWindows("", None, starts, {})], training, [])
    if data.split.walk_forward is not None and not signature.masked:
        folds, notes = splits.find_fold_windows(index, raw.time, data, signature)
        first = folds[0].assignment
        assert first is not None
        return WindowSets(folds, first.mask(splits.TRAIN), notes, is_walk_forward=True)
    assignment, ranges = splits.find_windows(index, data, signature)
    ranges, left_out = splits.exclude_unknown(ranges, index, signature)
    starts = {name: windows.list_starts() for name, windows in ranges.items()}
    fold = FoldWindows("", assignment, starts, left_out)
    return WindowSets([fold], assignment.mask(splits.TRAIN), [])


def _find_whole(loaded: LoadedSeries, split: Mapping[str, Ints]) -> WindowSets:
    """Return the windows of all sets as training windows; `split` are those of each set."""
    raw, signature, data, _ = loaded
    index = raw.index
    assignment = splits.assign_used(index, data)
    ranges = splits.find_set_windows(index.breaks, assignment, splits.TRAIN, data, signature)
    known = ranges.exclude(index.unknown, signature)
    starts = {"train": known.list_starts(), "val": split["val"], "test": split["test"][:0]}
    left_out = {"train": len(ranges) - len(known), "val": 0, "test": 0}
    fold = FoldWindows("", assignment, starts, left_out)
    return WindowSets([fold], assignment.mask(splits.TRAIN), [])


def assign_predicted_rows(loaded: LoadedSeries, fold: FoldWindows) -> SplitAssignment:
    """Return the set of each row: as the split assigns rows, or where it assigns windows
    (stratified), the set of the window that predicts the row."""
    if fold.assignment is not None:
        return fold.assignment
    num_rows, signature = loaded.raw.index.num_rows, loaded.signature
    sets = np.full(num_rows, splits.UNUSED, dtype=np.int8)
    for number, name in enumerate(splits.SETS):
        for ahead in range(signature.steps_out):
            sets[fold.starts[name] + signature.lead + ahead] = number
    changes = np.flatnonzero(np.diff(sets, prepend=np.int8(-1)))
    return SplitAssignment(changes, sets[changes], num_rows)
