"""The names of a table of predictions: one place that makes them, for training and predicting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from slipstream.config import Config
from slipstream.data.io.table import DataTable
from slipstream.data.roles import Roles
from slipstream.errors import UserError

SERIES, ROW, FOLD, TIME, STEP = "series", "row", "fold", "time", "step"
LABEL, PREDICTED = "label", "predicted"
"""Of classes: the true one and the likeliest"""
LEVELS = {"80": 0.80, "95": 0.95}
"""Intervals by the percent that their columns are named after"""


class PredictionColumns(NamedTuple):
    """The columns of one numeric target."""

    truth: str
    predicted: str
    quantiles: tuple[str, ...]
    """In the order of the levels"""
    intervals: dict[str, tuple[str, str]]
    """By level: from, to"""


def name_columns(target: str, quantiles: Iterable[float] = ()) -> PredictionColumns:
    return PredictionColumns(
        truth=target,
        predicted=f"{target}_{PREDICTED}",
        quantiles=tuple(f"{target}_q{100 * level:g}" for level in quantiles),
        intervals={
            percent: (f"{target}_lo{percent}", f"{target}_hi{percent}") for percent in LEVELS
        },
    )


def name_probability(name: str) -> str:
    """The column that says how likely a class is."""
    return f"p_{name}"


def _every_name(config: Config, source: DataTable, targets: Iterable[str]) -> Iterator[str]:
    """All columns that a run of numbers may write. Intervals are among them whether or not it has
    any: a search trains its best settings again from several seeds, and then there are."""
    data = config.data
    yield from (SERIES, ROW)
    yield from (FOLD,) if data.split.walk_forward is not None else ()
    yield from (
        (TIME,) if data.time in source.column_names else ()
    )  # that it is not is said elsewhere
    yield from (STEP,) if data.horizon else ()
    for target in targets:
        mine = name_columns(
            target, config.train.quantiles if config.train.loss == "quantile" else ()
        )
        yield from (mine.truth, mine.predicted, *mine.quantiles)
        yield from (bound for pair in mine.intervals.values() for bound in pair)


def refuse_clashes(config: Config, source: DataTable, roles: Roles) -> None:
    """Refuse targets of which one would be written over another's column of predictions."""
    if config.data.task != "regress":
        return  # classes have fixed names, and none of the data's columns is written
    twice = find_duplicate_name(_every_name(config, source, roles.targets))
    if not twice:
        return
    if twice in roles.targets:
        raise UserError(
            f'the target "{twice}" has the name of another column of predictions.parquet; '
            "rename it, or leave it out of data.targets (or add it to data.ignore)"
        )
    raise UserError(
        f'two columns of predictions.parquet would be named "{twice}"; give train.quantiles that '
        "differ in their first six digits"
    )


def find_duplicate_name(names: Iterable[str]) -> str | None:
    """The first name that stands there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)
