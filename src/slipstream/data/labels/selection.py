"""Windows that have labels: those whose target rows are known, and the split class by class."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Data, Signature
from slipstream.data import splits, windows
from slipstream.data.series import Flags, Ints, RawSeries, SeriesIndex
from slipstream.data.splits import SETS, SplitAssignment
from slipstream.errors import UserError

MOST_NAMED = 10


def read_class_numbers(store: RawSeries) -> Ints:
    """Each row's class, from the store's last column; below 0 where there is no label."""
    return store.read_column(store.column_names[-1]).astype(np.int64)


def filter_labelled(
    starts: dict[str, Tensor], numbers: Ints, signature: Signature, *, fold: str = ""
) -> dict[str, Tensor]:
    """The windows whose target rows all have a label; every set must have some."""
    found = {name: some[_known(some.numpy(), numbers, signature)] for name, some in starts.items()}
    for name, some in found.items():
        if not len(some):
            where = f" of fold {fold}" if fold else ""
            raise UserError(
                f"no {name} window{where} has a label: its {len(starts[name]):,} windows end at "
                "rows without one; label more rows, or choose another data.split"
            )
    return found


def _known(starts: Ints, numbers: Ints, signature: Signature) -> Tensor:
    known = np.ones(len(starts), dtype=bool)
    for step in range(signature.steps_out):
        known &= numbers[starts + signature.lead + step] >= 0
    return torch.from_numpy(known)


def split_stratified(
    layout: SeriesIndex, numbers: Ints, data: Data, signature: Signature
) -> tuple[dict[str, Ints], Flags]:
    """Each class's windows cut by shares, in time order within a series, and the training rows.

    A window's class is that of its first target row. Windows that share a row with one of a later
    set are left out.
    """
    everything = SplitAssignment(
        np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int8), layout.num_rows
    )
    starts = windows.find_ranges(
        layout.breaks,
        everything,
        which=0,
        lead=signature.lead,
        steps_out=signature.steps_out,
        stride=data.stride,
    ).list_starts()
    starts = starts[_known(starts, numbers, signature).numpy()]
    sets = _sets(starts, numbers[starts + signature.lead], layout, data)
    length = signature.lead + signature.steps_out
    by_set = {name: starts[sets == index] for index, name in enumerate(SETS)}
    by_set["val"] = _apart(by_set["val"], by_set["test"], length, layout.num_rows)
    later = np.union1d(by_set["val"], by_set["test"])
    by_set["train"] = _apart(by_set["train"], later, length, layout.num_rows)
    for name, found in by_set.items():
        if not len(found):
            raise UserError(
                f"data.split.stratified leaves no {name} window: those of one set must not share "
                f"rows with a later one, and each has {length} rows; shorten data.context, or "
                "split by shares alone"
            )
    return by_set, _covered(by_set["train"], length, layout.num_rows)


def _sets(starts: Ints, found: Ints, layout: SeriesIndex, data: Data) -> npt.NDArray[np.int8]:
    """Each window's set: its place among those of its series and class."""
    sets = np.full(len(starts), splits.UNUSED, dtype=np.int8)
    series = np.searchsorted(layout.offsets, starts, side="right")
    shares = [data.split.train, data.split.val, data.split.test]
    borders = np.cumsum([0.0, *(share for share in shares if isinstance(share, float))])
    for owner in np.unique(series):
        for number in np.unique(found[series == owner]):
            mine = np.flatnonzero((series == owner) & (found == number))
            at = np.round(borders * len(mine)).astype(np.int64)
            for index, (begin, end) in enumerate(pairwise(at)):
                sets[mine[begin:end]] = index
    return sets


def _covered(starts: Ints, length: int, num_rows: int) -> Flags:
    """The rows that windows of a length hold."""
    change = np.zeros(num_rows + 1, dtype=np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + length, -1)
    return np.asarray(np.cumsum(change)[:-1] > 0)


def _apart(starts: Ints, others: Ints, length: int, num_rows: int) -> Ints:
    """Those that share no row with the others."""
    before = np.concatenate([[0], np.cumsum(_covered(others, length, num_rows))])
    free: Flags = before[starts + length] == before[starts]
    return starts[free]


def balance_weights(counts: Ints) -> tuple[float, ...]:
    """Weights that make every class count alike in training: 1 on average over its windows."""
    seen = counts > 0
    weights = np.where(seen, counts.sum() / (seen.sum() * np.maximum(counts, 1)), 1.0)
    return tuple(float(weight) for weight in weights)


def describe_classes(
    names: tuple[str, ...], counts: Ints, weights: str | tuple[float, ...], *, fold: str
) -> list[str]:
    """How many windows of each class there are to learn from; weights that fit no class are
    refused."""
    if isinstance(weights, tuple) and len(weights) != len(names):
        raise UserError(
            f"train.class_weights has {len(weights)} weights, but there are {len(names)} classes: "
            f"{', '.join(names[:20])}"
        )
    shown = np.argsort(-counts, kind="stable")[:MOST_NAMED]
    told = ", ".join(f"{names[i]} {counts[i]:,}" for i in shown)
    rest = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    unseen = [name for name, count in zip(names, counts, strict=True) if not count]
    found = [f"classes (training windows{fold}): {told}{rest}"]
    if unseen:
        found.append(f"no training window{fold} has the class {', '.join(unseen[:MOST_NAMED])}")
    return found
