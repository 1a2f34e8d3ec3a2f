"""Labelled windows, split class by class and counted."""

from itertools import pairwise

import numpy as np

from slipstream.config import Data, Signature
from slipstream.data import splits
from slipstream.data.series import Flags, Ints, SeriesIndex
from slipstream.data.splits import SETS
from slipstream.errors import UserError

MOST_NAMED = 10


def split_stratified(
    index: SeriesIndex, numbers: Ints, data: Data, signature: Signature
) -> tuple[dict[str, Ints], Flags]:
    """Split each class's windows by shares, in time order within a series.

    Return the windows by set and a mask of the training rows.

    A window's class is that of its first target row. Windows that share a row with one of a later
    set are left out.
    """
    rows = splits.assign_all(index)
    ranges = splits.find_set_windows(index.breaks, rows, 0, data, signature)
    starts = ranges.exclude(index.unknown, signature).list_starts()
    sets = _assign_windows(starts, numbers[starts + signature.lead], index, data)
    length = signature.lead + signature.steps_out
    reach = length + index.look_ahead
    by_set = {name: starts[sets == which] for which, name in enumerate(SETS)}
    by_set["val"] = _drop_overlapping(by_set["val"], by_set["test"], reach, index.num_rows)
    later = np.union1d(by_set["val"], by_set["test"])
    by_set["train"] = _drop_overlapping(by_set["train"], later, reach, index.num_rows)
    for name, some in by_set.items():
        if not len(some):
            raise UserError(
                f"data.split.stratified leaves no {name} window: those of one set must not share "
                f"rows with a later one, and each has {length} rows; shorten data.context, or "
                "split by shares alone"
            )
    return by_set, _cover_rows(by_set["train"], length, index.num_rows)


def _assign_windows(starts: Ints, numbers: Ints, index: SeriesIndex, data: Data) -> Ints:
    """Return each window's set, by its position among those of its series and class."""
    sets = np.full(len(starts), splits.UNUSED)
    series = np.searchsorted(index.offsets, starts, side="right")
    shares = (data.split.train, data.split.val, data.split.test)
    borders = np.cumsum([0.0, *(share for share in shares if isinstance(share, float))])
    for owner in np.unique(series):
        for number in np.unique(numbers[series == owner]):
            mine = np.flatnonzero((series == owner) & (numbers == number))
            at = np.round(borders * len(mine)).astype(np.int64)
            for which, (begin, end) in enumerate(pairwise(at)):
                sets[mine[begin:end]] = which
    return sets


def _cover_rows(starts: Ints, length: int, num_rows: int) -> Flags:
    """Mark the rows that windows of a length hold."""
    change = np.zeros(num_rows + 1, dtype=np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, np.minimum(starts + length, num_rows), -1)
    return np.asarray(np.cumsum(change)[:-1] > 0)


def _drop_overlapping(starts: Ints, others: Ints, length: int, num_rows: int) -> Ints:
    """Return the windows that share no row with the others."""
    before = np.concatenate([[0], np.cumsum(_cover_rows(others, length, num_rows))])
    free: Flags = before[np.minimum(starts + length, num_rows)] == before[starts]
    return starts[free]


def balance_weights(counts: Ints) -> tuple[float, ...]:
    """Return weights that make classes count alike in training: 1 on average over the windows."""
    seen = counts > 0
    weights = np.where(seen, counts.sum() / (seen.sum() * np.maximum(counts, 1)), 1.0)
    return tuple(float(weight) for weight in weights)


def describe_classes(
    names: tuple[str, ...], counts: Ints, weights: str | tuple[float, ...], *, fold: str
) -> list[str]:
    """Note the training windows of each class; a list of weights must fit the classes."""
    if isinstance(weights, tuple) and len(weights) != len(names):
        raise UserError(
            f"train.class_weights has {len(weights)} weights, but there are {len(names)} classes: "
            f"{', '.join(names[:20])}"
        )
    largest = np.argsort(-counts, kind="stable")[:MOST_NAMED]
    listed = ", ".join(f"{names[i]} {counts[i]:,}" for i in largest)
    rest = f" and {len(names) - len(largest)} more" if len(names) > len(largest) else ""
    unseen = [name for name, count in zip(names, counts, strict=True) if not count]
    notes = [f"classes (training windows{fold}): {listed}{rest}"]
    if unseen:
        notes.append(f"no training window{fold} has the class {', '.join(unseen[:MOST_NAMED])}")
    return notes
