"""The folds of a walk-forward split and of a search, as tensors of first rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.base.errors import UserError
from slipstream.config import Signature
from slipstream.data.loading import LoadedSeries, WindowSets
from slipstream.data.series import Flags, SeriesIndex
from slipstream.data.splits import FoldWindows


@dataclass(frozen=True)
class Fold:
    """One split of a walk-forward split."""

    label: str
    """The first and last time, or row of the series, of the fold's test block"""
    starts: dict[str, Tensor]
    """First rows of the windows, by set"""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of windows without a target, by set"""

    @classmethod
    def from_windows(cls, fold: FoldWindows) -> Fold:
        """Return the windows of a fold as tensors."""
        starts = {name: torch.from_numpy(rows) for name, rows in fold.starts.items()}
        return cls(fold.label, starts, fold.left_out)

    @property
    def num_windows(self) -> dict[str, int]:
        """Return the number of windows by set."""
        return {name: len(starts) for name, starts in self.starts.items()}


def find_search_folds(
    loaded: LoadedSeries, sets: WindowSets, count: int
) -> tuple[dict[str, Tensor], ...]:
    """Return the folds of a search over the windows of a split, train and val windows only."""
    # later folds of a walk-forward split are for tests
    starts = Fold.from_windows(sets.folds[0]).starts
    index = loaded.raw.index
    purge = max(loaded.data.split.purge, index.look_ahead)
    offsets = torch.from_numpy(index.offsets)
    return divide_training(starts, count, offsets, loaded.signature, purge)


def divide_training(
    starts: dict[str, Tensor], count: int, offsets: Tensor, signature: Signature, purge: int
) -> tuple[dict[str, Tensor], ...]:
    """Return the folds of a search, train and val windows only.

    The last fold is the split itself. Every fold before it validates on the block of the same
    length before the next fold's, and trains on earlier rows; where the split divides whole series,
    it validates on as many other series and trains on the rest. No fold has a test window.
    """
    train, val = starts["train"], starts["val"]
    if count == 1:
        return ({"train": train, "val": val},)
    owners = [torch.bucketize(part, offsets, right=True) - 1 for part in (train, val)]
    trained, validated = (owner.unique() for owner in owners)
    if not bool(torch.isin(trained, validated).any()):
        folds = _rotate_series(starts, owners, trained, len(validated), count)
        return (*folds, {"train": train, "val": val})
    candidates = torch.cat([train, val]).unique()
    owner = torch.bucketize(candidates, offsets, right=True) - 1
    whose = torch.bucketize(val, offsets, right=True) - 1
    first = torch.full((len(offsets) - 1,), torch.iinfo(torch.int64).max)
    first.scatter_reduce_(0, whose, val + signature.lead, "amin")
    last = torch.zeros(len(offsets) - 1, dtype=torch.int64)
    last.scatter_reduce_(0, whose, val + signature.lead + signature.steps_out, "amax")
    length = last - first
    begin, end = candidates + signature.lead, candidates + signature.lead + signature.steps_out
    folds = []
    for back in range(count - 1, 0, -1):
        block = first[owner] - back * length[owner]
        known = length[owner] > 0
        fold = {
            "train": candidates[known & (end <= block - purge)],
            "val": candidates[known & (begin >= block) & (end <= block + length[owner])],
        }
        for name, windows in fold.items():
            if not len(windows):
                raise UserError(
                    f"tune.folds = {count}: fold {count - back} has no {name} windows; each fold "
                    "validates on a block of rows before the last one's, so there must be that "
                    "many blocks of training rows; reduce tune.folds",
                    setting="tune.folds",
                )
        folds.append(fold)
    return (*folds, {"train": train, "val": val})


def _rotate_series(
    starts: dict[str, Tensor], owners: list[Tensor], trained: Tensor, size: int, count: int
) -> list[dict[str, Tensor]]:
    """Return the folds before the split itself: each validates on its share of the training
    series, at least `size` of them where there are enough, spread evenly over the set, and trains
    on all others that are not tested."""
    size = min(max(size, len(trained) // count), max(len(trained) // (count - 1), 1))
    stride = max(len(trained) // size, 1)
    if len(trained) < count:
        raise UserError(
            f"tune.folds = {count}: the training set has {len(trained)} series, and each fold "
            "validates on series of its own; reduce tune.folds",
            setting="tune.folds",
        )
    folds = []
    for number in range(count - 1):
        group = trained[number::stride][:size]
        is_held = torch.isin(owners[0], group)
        rest = torch.cat([starts["train"][~is_held], starts["val"]]).sort().values
        folds.append({"train": rest, "val": starts["train"][is_held]})
    return folds


def select_known_rows(
    training: Flags, starts: Tensor, index: SeriesIndex, signature: Signature
) -> Flags:
    """Return the rows that a fold may be scaled by: in each series, the `training` rows up to the
    last target row of the fold's training windows."""
    first = starts.numpy()
    owner = np.searchsorted(index.offsets, first, side="right") - 1
    ends = np.zeros(len(index.series_names), dtype=np.int64)
    np.maximum.at(ends, owner, first + signature.lead + signature.steps_out)
    return training & (np.arange(index.num_rows) < np.repeat(ends, np.diff(index.offsets)))
