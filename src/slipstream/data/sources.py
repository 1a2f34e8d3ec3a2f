"""The tables that a config names, and the store of their rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream import hardware
from slipstream.config import SIMULATED, Config, Data
from slipstream.data import bars, cell, classes, labels, prepare, tables
from slipstream.data.prepare import Store
from slipstream.data.roles import Roles
from slipstream.data.splits import SETS
from slipstream.data.tables import Source
from slipstream.errors import UserError


def read_sources(data: Data, table: Any) -> list[Source]:
    """The tables that the config names, or the one given in its place."""
    if table is not None:
        return [tables.from_memory(table, decimal=data.decimal)]
    if not data.paths:
        raise UserError("data.path is not set; name a file or a folder, or pass a table")
    if data.paths[0].startswith(SIMULATED):
        return [_simulated(data.paths[0])]
    if data.split.folders:
        _check_folders(data)
    sources = list(tables.read_all(data.paths, decimal=data.decimal))
    if data.split.folders:  # a set's files stay tables of their own
        return [tables.join([each]) for each in sources] if tables.FILE in data.ids else sources
    if data.ids and (len(sources) > 1 or tables.FILE in data.ids):
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


def stay_on_disk(config: Config, sources: list[Source], roles: Roles) -> bool:
    """Whether the rows stay on disk: if asked to, or where they would fill half of the memory."""
    home = config.engine.home
    if home not in ("auto", "stream"):
        return False
    on_disk = all(source.groups for source in sources)
    columns = len(set(roles.inputs) | set(roles.targets))
    needed = 4 * columns * sum(source.num_rows for source in sources)
    if home == "stream" and not on_disk:
        raise UserError('engine.home = "stream" reads Parquet and Arrow files; convert the data')
    return home == "stream" or (on_disk and needed > hardware.available_memory() / 2)


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
