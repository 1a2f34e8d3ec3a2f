"""Tables after the steps of `data.prepare`, and what each of their columns is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from slipstream.config import Config, Data
from slipstream.data import prediction_columns
from slipstream.data.io.table import DataTable, SourceFile
from slipstream.data.labels import classes
from slipstream.data.prepare.chain.frames import POSITION, mark_positions
from slipstream.data.prepare.chain.replay import Limits
from slipstream.data.roles import (
    Roles,
    adapt_to_pretraining,
    find_roles,
    refuse_unknown_jitter,
    sort_roles,
)
from slipstream.data.series import Flags, SeriesIndex, prepare_series


class Source(NamedTuple):
    """Tables and what each of their columns is for."""

    data: Data
    tables: list[DataTable]
    roles: Roles
    classes: tuple[str, ...]
    notes: list[str]
    limits: dict[str, Limits]
    latency: int = 0
    features: tuple[str, ...] = ()
    """The columns that steps of `data.prepare` make, of those that a model may read"""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(file for table in self.tables for file in table.files)


def find_source(
    config: Config, data: Data, tables: list[DataTable], before: Sequence[str]
) -> Source:
    """Find the roles of the columns, and read labels as class numbers; `before` are notes."""
    roles, notes = find_roles(tables[0], data)
    notes += before
    if config.masked:
        roles, data = adapt_to_pretraining(roles, data)
    else:
        prediction_columns.refuse_clashes(config, tables[0], roles)
    roles = sort_roles(roles)
    refuse_unknown_jitter(config.augment.jitter, roles.inputs)
    names: tuple[str, ...] = ()
    if data.task == "classify" and data.labels is None:
        tables, names = classes.encode_labels(tables, roles.targets[0], "data.targets")
        classes.refuse_too_few(names, f'column "{roles.targets[0]}"')
    return Source(data, tables, roles, names, notes, {})


def mark_source_rows(source: Source, training: Flags, index: SeriesIndex) -> Flags:
    """Mark the training rows by their position before the first step; `training` marks them after
    the last one."""
    data, roles, min_rows = source.data, source.roles, source.data.context + source.data.horizon
    counted = Roles(roles.inputs, (POSITION,), roles.static)
    tables = [replace(one, column_names=(*one.column_names, POSITION)) for one in source.tables]
    positions = prepare_series(tables, data, counted, min_rows=min_rows).read_column(POSITION)
    return mark_positions(positions, training, index.offsets)
