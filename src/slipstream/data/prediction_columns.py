"""Names of the columns in a table of predictions, for training and prediction alike."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from slipstream.config import Config
from slipstream.data.io.table import DataTable
from slipstream.data.roles import Roles
from slipstream.errors import UserError

SERIES, ROW, FOLD, TIME, STEP = "series", "row", "fold", "time", "step"
LABEL, PREDICTED = "label", "predicted"
"""Classes: the true one and the likeliest"""
LEVELS = {"80": 0.80, "95": 0.95}
"""Levels of prediction intervals, by the percentage in their columns' names"""


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
    """Return the name of the column with a class's probability."""
    return f"p_{name}"


def _list_names(config: Config, table: DataTable, targets: Iterable[str]) -> Iterator[str]:
    """List all columns that a regression run may write.

    Intervals are among them even if it has none: a search trains its best settings again from
    several seeds, and those runs have intervals.
    """
    data = config.data
    yield from (SERIES, ROW)
    yield from (FOLD,) if data.split.walk_forward is not None else ()
    if data.time_column in table.column_names:  # another check refuses a missing column
        yield TIME
    yield from (STEP,) if data.horizon else ()
    quantiles = config.train.quantiles if config.train.loss == "quantile" else ()
    for target in targets:
        mine = name_columns(target, quantiles)
        yield from (mine.truth, mine.predicted, *mine.quantiles)
        yield from (bound for pair in mine.intervals.values() for bound in pair)


def refuse_clashes(config: Config, table: DataTable, roles: Roles) -> None:
    """Refuse targets of which one would be written over another's column of predictions."""
    if config.data.task != "regress":
        return  # classes have fixed names, and none of the data's columns is written
    duplicate = find_duplicate_name(_list_names(config, table, roles.targets))
    if not duplicate:
        return
    if duplicate in roles.targets:
        raise UserError(
            f'the target "{duplicate}" has the name of another column of predictions.parquet; '
            "rename it, or leave it out of data.targets (or add it to data.ignore)"
        )
    raise UserError(
        f'two columns of predictions.parquet would be named "{duplicate}"; give train.quantiles '
        "that differ in their first six digits"
    )


def find_duplicate_name(names: Iterable[str]) -> str | None:
    """Return the first name that occurs more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)
