"""The tables that a config names, and the store of their rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream import machine
from slipstream.config import SIMULATED, Config, Data
from slipstream.data import series
from slipstream.data.io import table as tables
from slipstream.data.io.table import DataTable
from slipstream.data.labels import classes, intervals
from slipstream.data.roles import Roles
from slipstream.data.series import RawSeries
from slipstream.data.simulated import bars, cell
from slipstream.data.splits import SETS
from slipstream.errors import UserError


def read_tables(data: Data, table: Any) -> list[DataTable]:
    """The tables that the config names, or the one given in its place."""
    if table is not None:
        return [tables.read_memory(table, decimal=data.decimal)]
    if not data.paths:
        raise UserError("data.path is not set; name a file or a folder, or pass a table")
    if data.paths[0].startswith(SIMULATED):
        return [_simulated(data.paths[0])]
    if data.split.folders:
        _check_folders(data)
    sources = list(tables.read_files(data.paths, decimal=data.decimal))
    if data.split.folders:  # a set's files stay tables of their own
        return (
            [tables.concatenate_tables([each]) for each in sources]
            if tables.FILE_COLUMN in data.ids
            else sources
        )
    if data.ids and (len(sources) > 1 or tables.FILE_COLUMN in data.ids):
        return [tables.concatenate_tables(sources)]
    return sources


def _simulated(path: str) -> DataTable:
    embedded = {f"{SIMULATED}cell": cell.simulate, f"{SIMULATED}bars": bars.simulate}
    if path not in embedded:
        known = " and ".join(f'"{name}"' for name in embedded)
        raise UserError(f'data.path is "{path}", but the embedded data sets are {known}')
    return tables.make_table(path, embedded[path]())


def _check_folders(data: Data) -> None:
    if len(data.paths) != 1 or not Path(data.paths[0]).is_dir():
        raise UserError("data.split.folders needs data.path to be one folder")
    for name in SETS:
        if not (Path(data.paths[0]) / name).is_dir():
            raise UserError(f"data.split.folders: {data.paths[0]} has no folder {name}/")


def should_stream(config: Config, sources: list[DataTable], roles: Roles) -> bool:
    """Whether the rows stay on disk: if asked to, or where they would fill half of the memory."""
    home = config.engine.home
    if home not in ("auto", "stream"):
        return False
    on_disk = all(source.row_groups for source in sources)
    columns = len(set(roles.inputs) | set(roles.targets))
    needed = 4 * columns * sum(source.num_rows for source in sources)
    if home == "stream" and not on_disk:
        raise UserError('engine.home = "stream" reads Parquet and Arrow files; convert the data')
    return home == "stream" or (on_disk and needed > machine.get_available_memory() / 2)


def prepare_with_labels(
    sources: list[DataTable],
    data: Data,
    roles: Roles,
    names: tuple[str, ...],
    min_rows: int,
) -> tuple[RawSeries, tuple[str, ...], intervals.LabelIntervals | None]:
    """The store, its classes, and where the labels of a table lie if they come from one."""
    if data.labels is None:
        return series.prepare_series(sources, data, roles, min_rows=min_rows), names, None
    plain = series.prepare_series(sources, data, replace(roles, targets=()), min_rows=min_rows)
    store, names, spans = intervals.attach_labels(plain, data, names)
    classes.refuse_too_few(names, data.labels)
    return store, names, spans
