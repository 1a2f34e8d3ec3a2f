"""Whether a config can be trained on its data: read, prepared, split and scaled as in training.

Files up to `MOST_BYTES` are read as a whole. Of larger ones, the columns are checked on the first
rows, and the lengths of the series on all of them. This runs in a process of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import SIMULATED, Config, Data
from slipstream.config.prepare import CalendarStep, ClipStep, FilterStep, FormulaStep, UnitStep
from slipstream.data import splits
from slipstream.data.io import files
from slipstream.data.io.options import ReadOptions
from slipstream.data.labels import intervals, selection
from slipstream.data.prepare.chain.source import Source, find_source
from slipstream.data.prepare.chain.tables import PrepareChain
from slipstream.data.roles import build_signature
from slipstream.data.scaler import fit_column, order_columns
from slipstream.data.series import SeriesIndex, refuse_short
from slipstream.data.walk_forward import find_fold_windows
from slipstream.errors import UserError
from slipstream.inspection.reading import EVERY_SHEET, open_tables
from slipstream.webapp.screens.prepare.preview import MOST_BYTES, is_sampled
from slipstream.webapp.screens.prepare.split import Loaded, find_sets, load_all

SAMPLE_ROWS = 200_000
"""Rows of a large file on which columns are checked"""
KEEP_ROWS = (CalendarStep, ClipStep, FilterStep, FormulaStep, UnitStep)
"""Steps of `data.prepare` after which there are as many rows as before"""
Report = Callable[[float], None]


def check_data(config: Config, report: Report) -> dict[str, Any]:
    """Return the rows and windows that a run would have; a UserError says why it would not begin.

    `sample_rows` is how many rows were looked at where these are not all, and `unchecked` says what
    could not be checked on them.
    """
    data = config.data
    if data.paths[0].startswith(SIMULATED):
        return _check_all(config)
    every = [file for path in data.paths for file in files.expand_path(Path(path))[1]]
    size = sum(file.stat().st_size for file in every if file.exists())
    return _check_all(config) if size <= MOST_BYTES else _check_sample(config, every, report)


def _check_all(config: Config) -> dict[str, Any]:
    loaded = load_all(config)
    sets, _ = find_sets(loaded, 0, 0)
    raw, signature, data = loaded.raw, loaded.signature, loaded.data
    if data.split.stratified:
        numbers = raw.read_column(signature.targets[0]).astype(np.int64)
        training = selection.split_stratified(raw.index, numbers, data, signature)[1]
    else:
        training = splits.assign_first_split(raw.index, data).mask(splits.TRAIN)
    _fit_columns(loaded, training)
    windows = {name: sum(one.windows[name] for one in sets) for name in sets[0].windows}
    return {"rows": raw.index.num_rows, "windows": windows, "sample_rows": None, "unchecked": ""}


def _fit_columns(loaded: Loaded, training: Any) -> None:
    """Refuse columns that cannot be read as numbers, or cannot be scaled."""
    raw, signature = loaded.raw, loaded.signature
    label = signature.targets[0] if signature.classes else None
    for name in order_columns(signature):
        column = raw.read_column(name)
        if name != label:
            fit_column(name, column, training, kind=loaded.data.scale)


def _check_sample(config: Config, every: Sequence[Path], report: Report) -> dict[str, Any]:
    """Check the columns on the first rows, and the lengths of the series on all rows."""
    data = config.data
    if not is_sampled(every[0], data):
        text = f"{every[0].name} is too large to be read here"
        return {"rows": None, "windows": None, "sample_rows": 0, "unchecked": text}
    table = files.read_rows(data, every[0], 0, SAMPLE_ROWS)
    loaded = _load_sample(config, [table])
    _fit_columns(loaded, np.ones(loaded.raw.index.num_rows, dtype=bool))
    unchecked = _find_unchecked(data)
    lengths = Counter[str]() if unchecked else _count_rows(data, every, report)
    windows = None if unchecked else _count_windows(loaded, lengths)
    rows = None if unchecked else sum(lengths.values())
    return {
        "rows": rows,
        "windows": windows,
        "sample_rows": table.num_rows,
        "unchecked": unchecked and f"{unchecked}: windows were not counted",
    }


def _load_sample(config: Config, tables: list[Any]) -> Loaded:
    """Return the series of the first rows, of which none is too short: the last may go on. Classes
    are not looked for, since they need not all be among these rows."""
    data, notes = config.data, list[str]()
    if data.task == "classify":
        update = {"task": "regress", "targets": None, "labels": None, "horizon": 1}
        data = data.model_copy(update=update)
        config = config.model_copy(update={"data": data})
    if data.prepare:
        chain = PrepareChain(data)
        flags = np.ones(sum(table.num_rows for table in tables), dtype=bool)
        prepared = chain.apply(tables) if chain.is_fitted else chain.fit(tables, flags)
        data, tables = prepared.data, prepared.tables
    source: Source = find_source(config, data, tables, notes)
    raw, names, _ = intervals.prepare_with_labels(
        source.tables, source.data, source.roles, source.classes, 1
    )
    signature = build_signature(config, source.roles, raw.index.step, names)
    return Loaded(raw, signature, source.data, notes)


def _find_unchecked(data: Data) -> str:
    """Return the setting by which the lengths of series cannot be told from the file; "" for
    none."""
    settings = {
        "data.where selects rows": bool(data.where),
        "data.labels define windows": data.labels is not None,
        "data.split.by assigns rows": data.split.by is not None,
        "data.split.folders assigns files": data.split.folders,
        "data.split.stratified assigns classes": data.split.stratified,
        'data.missing = "drop" drops rows': data.missing == "drop",
        "steps of data.prepare change the number of rows": not all(
            isinstance(step, KEEP_ROWS) for step in data.prepare
        ),
    }
    return next((text for text, is_set in settings.items() if is_set), "")


def _count_rows(data: Data, every: Sequence[Path], report: Report) -> Counter[str]:
    """Count the rows of each series, in one pass over all files."""
    options = ReadOptions.from_data(data)
    options = options if options.sheets else options._replace(sheets=EVERY_SHEET.sheets)
    counts: Counter[str] = Counter()
    total, done = sum(file.stat().st_size for file in every), 0
    for file in every:
        for table in open_tables(str(file), options):
            ids = [name for name in data.ids if name in table.columns]
            for batch in table.batches:
                length = len(next(iter(batch.values()))) if batch else 0
                keys = [batch[name].cast("string").to_pylist() for name in ids]
                if keys:
                    counts.update(" ".join(map(str, one)) for one in zip(*keys, strict=True))
                else:
                    counts[file.name + table.sheet] += length
        done += file.stat().st_size
        report(done / max(total, 1))
    return counts


def _count_windows(loaded: Loaded, lengths: Counter[str]) -> dict[str, int]:
    """Return the windows of series of these lengths, as if they had no gaps."""
    data, signature = loaded.data, loaded.signature
    needed = data.context + data.horizon
    if data.short == "error":
        for name, rows in lengths.items():
            if rows < needed:
                refuse_short(name, rows, data, needed)
    used = {name: rows for name, rows in lengths.items() if rows >= needed}
    if not used:
        raise UserError(
            f"no series has the {needed} rows of one window; shorten data.context or data.horizon"
        )
    offsets = np.cumsum([0, *used.values()], dtype=np.int64)
    index = SeriesIndex(
        series_names=tuple(used),
        offsets=offsets,
        breaks=offsets[:-1],
        group_begins=offsets[:1],
        group_codes=np.zeros(1, dtype=np.int64),
        group_names=("",),
        step=loaded.raw.index.step,
        has_dates=loaded.raw.index.has_dates,
        look_ahead=loaded.raw.index.look_ahead,
    )
    if data.split.walk_forward is not None and not signature.masked:
        folds, _ = find_fold_windows(index, None, data, signature)
        return {name: sum(len(fold.starts[name]) for fold in folds) for name in splits.SETS}
    _, ranges = splits.find_windows(index, data, signature)
    return {name: len(some) for name, some in ranges.items()}
