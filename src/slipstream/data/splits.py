"""The split: which rows and windows are for training, validation and test."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import UserError
from slipstream.base.text import find_nearest, format_count
from slipstream.config import WILDCARD, Data, Signature, Split
from slipstream.data.roles import normalize_value
from slipstream.data.series import Ints, SeriesIndex, Times, is_date, mark_runs
from slipstream.data.table import FILE_COLUMN

SETS = ("train", "val", "test")
TRAIN, VAL, TEST = range(len(SETS))
UNUSED = len(SETS)
NO_LIMIT = np.iinfo(np.int64).max // 2


@dataclass(frozen=True)
class SplitAssignment:
    """The set of each row, as runs of rows of one set."""

    begins: Ints
    sets: npt.NDArray[np.int8]
    """An index into SETS, or UNUSED"""
    num_rows: int

    @property
    def ends(self) -> Ints:
        return np.append(self.begins[1:], self.num_rows)

    def mask(self, set_index: int, begin: int = 0, end: int | None = None) -> npt.NDArray[np.bool_]:
        """Mark the rows of a set among those from `begin` to before `end`."""
        end = self.num_rows if end is None else end
        in_set = self.sets == set_index
        runs = np.stack([self.begins[in_set], self.ends[in_set]], axis=1)
        return mark_runs(runs, begin, end)

    def find_series(self, set_index: int, offsets: Ints) -> npt.NDArray[np.bool_]:
        """Mark the series, from one offset to before the next, that have a row in this set."""
        in_set = (self.sets == set_index) & (self.begins < self.ends)
        first = np.searchsorted(offsets, self.begins[in_set], side="right") - 1
        last = np.searchsorted(offsets, self.ends[in_set] - 1, side="right") - 1
        opened = np.bincount(first, minlength=len(offsets))
        closed = np.bincount(last + 1, minlength=len(offsets))
        return np.cumsum(opened - closed)[: len(offsets) - 1] > 0

    def count_rows(self, set_index: int) -> int:
        return int((self.ends - self.begins)[self.sets == set_index].sum())


def assign_all(index: SeriesIndex) -> SplitAssignment:
    """Assign every row to the training set, except for padding rows."""
    begins, sets = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int8)
    return _exclude_padding(index, SplitAssignment(begins, sets, index.num_rows))


def assign_used(index: SeriesIndex, data: Data) -> SplitAssignment:
    """Assign every row that a set of the split has to the training set; rows that the split leaves
    out stay unused."""
    if data.split.stratified:
        return assign_all(index)
    assigned = assign_rows(replace(index, look_ahead=0), data)  # nothing is to be purged
    sets = np.where(assigned.sets == UNUSED, UNUSED, TRAIN).astype(np.int8)
    changes = np.append(True, np.diff(sets) != 0)  # windows may cross from one set to the next
    return SplitAssignment(assigned.begins[changes], sets[changes], assigned.num_rows)


def _exclude_padding(index: SeriesIndex, assignment: SplitAssignment) -> SplitAssignment:
    """Take padding rows, at the beginning of each series, out of every set."""
    if index.padding is None:
        return assignment
    before = np.full(assignment.begins[0], UNUSED, dtype=np.int8)
    sets = np.append(before, np.repeat(assignment.sets, assignment.ends - assignment.begins))
    sets[index.mask_padding(0, index.num_rows)] = UNUSED
    return _encode_runs(index, sets)


def _purge(index: SeriesIndex, assignment: SplitAssignment) -> SplitAssignment:
    """Take rows that look ahead into the rows of another set out of their set."""
    if not index.look_ahead:
        return assignment
    borders = np.union1d(assignment.begins, index.offsets[:-1])
    sets = assignment.sets[np.searchsorted(assignment.begins, borders, side="right") - 1]
    ends = np.append(borders[1:], index.num_rows)
    last = index.offsets[np.searchsorted(index.offsets, borders, side="right")]
    begins, refined = [], []
    for run, (begin, end) in enumerate(zip(borders.tolist(), ends.tolist(), strict=True)):
        set_index = int(sets[run])
        reach = min(end + index.look_ahead, int(last[run]))
        later = range(run + 1, int(np.searchsorted(borders, reach)))
        next_run = next(
            (later_run for later_run in later if sets[later_run] not in (set_index, UNUSED)), None
        )
        begins.append(begin)
        refined.append(set_index)
        if next_run is not None and set_index != UNUSED:
            first = max(int(borders[next_run]) - index.look_ahead, begin)
            if first == begin:
                refined[-1] = UNUSED
            else:
                begins.append(first)
                refined.append(UNUSED)
    return SplitAssignment(np.array(begins), np.array(refined, dtype=np.int8), index.num_rows)


def assign_first_split(index: SeriesIndex, data: Data) -> SplitAssignment:
    """Assign each row to a set; of a walk-forward split, as in its first fold."""
    if data.split.walk_forward is not None:
        return assign_walk_forward(index, data.split)[0]
    return assign_rows(index, data)


def assign_rows(index: SeriesIndex, data: Data) -> SplitAssignment:
    """Assign each row to a set, by groups, shares or counts of rows."""
    split = data.split
    if split.by is not None or split.folders:
        by_group = _assign_values(index, data) if split.by is not None else _assign_folders(index)
        sets_of_runs = by_group[index.group_codes]
        groups = SplitAssignment(index.group_begins, sets_of_runs, index.num_rows)
        if split.by == FILE_COLUMN and _list_shares(split):
            groups = _share_series(index, groups, split)
        return _purge(index, _exclude_padding(index, groups))
    first = index.offsets[:-1] + (0 if index.padding is None else index.padding)
    last = index.offsets[1:]
    # [series, 4]: where the rows of each set begin, and then the unused ones
    counts = np.stack([np.zeros_like(first), *_count_rows(data, last - first)], axis=1)
    borders = first[:, None] + np.cumsum(counts, axis=1)
    present = borders < last[:, None]
    present[:, :UNUSED] &= borders[:, :UNUSED] < borders[:, 1:]
    sets = np.broadcast_to(np.arange(UNUSED + 1, dtype=np.int8), borders.shape)
    shares = SplitAssignment(borders[present], sets[present], index.num_rows)
    return _purge(index, _exclude_padding(index, shares))


def iter_own_rows(index: SeriesIndex) -> Iterator[tuple[int, int]]:
    """Yield the first row of each series and the row after its last, without the rows that pad
    it."""
    padding = (
        np.zeros(len(index.series_names), np.int64) if index.padding is None else index.padding
    )
    for begin, end, count in zip(index.offsets, index.offsets[1:], padding, strict=False):
        yield int(begin + count), int(end)


def assign_walk_forward(index: SeriesIndex, split: Split) -> tuple[SplitAssignment, ...]:
    """Assign each row to a set in every fold; the earliest test block comes first."""
    folds = []
    for fold in range(split.walk_forward or 0):
        sets = np.full(index.num_rows, UNUSED, dtype=np.int8)
        for start, stop in iter_own_rows(index):
            _write_fold(sets[start:stop], split, fold, max(split.purge, index.look_ahead))
        folds.append(_encode_runs(index, sets))
    return tuple(folds)


def merge_test_blocks(index: SeriesIndex, folds: Sequence[SplitAssignment]) -> SplitAssignment:
    """Return the test blocks of all folds as one test set; all other rows are unused."""
    sets = np.full(index.num_rows, UNUSED, dtype=np.int8)
    for assignment in folds:
        sets[assignment.mask(TEST)] = TEST
    return _encode_runs(index, sets)


def _write_fold(sets: npt.NDArray[np.int8], split: Split, fold: int, purge: int) -> None:
    """Write one series' sets of a fold. Rows of a set that would lie before the series' start are
    cut off."""
    num_rows, folds = len(sets), split.walk_forward or 1
    assert isinstance(split.val, float)
    assert isinstance(split.test, float)
    block = int(num_rows * split.test / folds + 1e-9)  # 0.29 * 100 is a little less than 29
    ahead = purge + round(num_rows * split.val) + purge  # between training and the test block
    blocks = num_rows - folds * block + block * np.arange(folds)
    test = int(blocks[fold])
    train_end = max(test - ahead, 0)
    longest = max(int(blocks[0]) - ahead, 0) if split.window == "rolling" else train_end
    sets[train_end - longest : train_end] = TRAIN
    for before in blocks[:fold] + block:
        sets[before : before + split.embargo] = UNUSED
    sets[max(test - ahead + purge, 0) : max(test - purge, 0)] = VAL
    sets[test : test + block] = TEST


def _encode_runs(index: SeriesIndex, sets: npt.NDArray[np.int8]) -> SplitAssignment:
    changes = np.flatnonzero(np.diff(sets, prepend=np.int8(-1)))
    begins = np.union1d(changes, index.offsets[:-1])
    return SplitAssignment(begins, sets[begins], index.num_rows)


def _assign_folders(index: SeriesIndex) -> npt.NDArray[np.int8]:
    for name in index.group_names:
        if name not in SETS:
            problem = f'"{name}" is neither train/, val/ nor test/ below data.path'
            raise UserError(f"data.split.folders: {problem}", setting="data.split.folders")
    return np.array([SETS.index(name) for name in index.group_names], dtype=np.int8)


def _count_rows(data: Data, num_rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Return how many rows of each series are for training, validation and test."""
    split = data.split
    if split.rows is not None:
        first, second, third = (np.full_like(num_rows, count) for count in split.rows)
        return first, second, third
    train, val, test = split.train, split.val, split.test
    assert isinstance(train, float)
    assert isinstance(val, float)
    test = test if isinstance(test, float) else 0.0
    # borders are rounded, not lengths, so that shares which add up to 1 use every row
    first, second, third = (
        np.round(num_rows * share).astype(np.int64)
        for share in (train, train + val, train + val + test)
    )
    return first, second - first, third - second


def _assign_values(index: SeriesIndex, data: Data) -> npt.NDArray[np.int8]:
    """Return the set of each group, by the values that `data.split` lists."""
    split, known = data.split, set(index.group_names)
    listed: dict[str, int] = {}
    by_pattern: dict[str, int] = {}
    for set_index, name in enumerate(SETS):
        values = getattr(split, name)
        for value in values if isinstance(values, tuple) else ():
            text = normalize_value(value)
            matches = [text] if text in known else fnmatch.filter(index.group_names, text)
            # a value that is listed itself belongs there, whatever pattern matches it
            chosen = listed if text in known else by_pattern
            for match in matches:
                if chosen.setdefault(match, set_index) != set_index:
                    raise UserError(
                        f'data.split: "{match}" is in both {SETS[chosen[match]]} and {name}',
                        setting="data.split",
                    )
            if not matches:
                _refuse_value(index, split, name, str(value))
    default = UNUSED if isinstance(split.train, tuple) else TRAIN
    listed = by_pattern | listed
    sets = np.array([listed.get(name, default) for name in index.group_names], dtype=np.int8)
    if _list_shares(split) and split.by != FILE_COLUMN:
        free = np.array([name not in listed for name in index.group_names])
        strata = index.strata if len(sets) == len(index.series_names) else None
        _draw_shares(sets, free, split, strata)
    return sets


def _refuse_value(index: SeriesIndex, split: Split, name: str, value: str) -> None:
    """Refuse a value of the split that no row has, and name those that there are."""
    nearest = find_nearest(value, index.group_names)
    hint = f'did you mean "{nearest}"? It' if nearest else "it"
    missing = "no value that matches it" if WILDCARD.search(value) else "no such value"
    more = f" and {len(index.group_names) - 20:,} more" if len(index.group_names) > 20 else ""
    raise UserError(
        f'data.split.{name} lists "{value}", but "{split.by}" has {missing}; '
        f"{hint} has {', '.join(index.group_names[:20])}{more}"
    )


def _list_shares(split: Split) -> dict[int, float]:
    """Return the sets that are given as fractions of values or of series."""
    shares = {set_index: getattr(split, name) for set_index, name in enumerate(SETS)}
    return {number: share for number, share in shares.items() if isinstance(share, float)}


def _share_series(index: SeriesIndex, groups: SplitAssignment, split: Split) -> SplitAssignment:
    """Return an assignment in which shares of the training series are for the other sets."""
    begins = _merge_sorted(groups.begins, index.offsets[:-1])
    sets = groups.sets[np.searchsorted(groups.begins, begins, side="right") - 1]
    owners = np.searchsorted(index.offsets, begins, side="right") - 1
    by_series = np.full(len(index.series_names), TRAIN, dtype=np.int8)
    free = np.bincount(owners[sets != TRAIN], minlength=len(by_series)) == 0
    _draw_shares(by_series, free, split, index.strata)
    sets = np.where(free[owners], by_series[owners], sets).astype(np.int8)
    return SplitAssignment(begins, sets, groups.num_rows)


def _draw_shares(
    sets: npt.NDArray[np.int8], free: npt.NDArray[np.bool_], split: Split, strata: Ints | None
) -> None:
    """Assign shares of the free entries to sets, in place; those of each class, if there are
    `strata`.

    Of as many consecutive entries as a share stands for, one is drawn, so that a set covers the
    whole order, in which files are often sorted. The draw is the same every time.
    """
    generator = np.random.default_rng(0)
    shares = _list_shares(split)
    classes = np.zeros(len(sets), dtype=np.int64) if strata is None else strata
    for number in np.unique(classes[free]):
        entries = np.flatnonzero(free & (classes == number))
        total, remaining = len(entries), entries
        for set_index, share in sorted(shares.items(), reverse=True):  # test, val, train
            if set_index == TRAIN:
                continue
            count = min(round(share * total), len(remaining))
            edges = np.linspace(0, len(remaining), count + 1)
            drawn = np.floor(generator.uniform(edges[:-1], edges[1:])).astype(np.int64)
            sets[remaining[drawn]] = set_index
            remaining = np.delete(remaining, drawn)
        if TRAIN in shares:
            kept = min(round(shares[TRAIN] * total), len(remaining))
            sets[remaining[kept:]] = UNUSED


@dataclass(frozen=True)
class WindowRanges:
    """First rows of windows, as runs: `first`, `first + stride` and so on, `count` of them."""

    first: Ints
    count: Ints
    stride: int

    def __len__(self) -> int:
        return int(self.count.sum())

    def list_starts(self) -> Ints:
        """Return the first row of every window."""
        if len(self.first) == 1:
            begin, count = int(self.first[0]), int(self.count[0])
            return np.arange(begin, begin + count * self.stride, self.stride)
        before = np.cumsum(self.count) - self.count
        within = np.arange(len(self)) - np.repeat(before, self.count)
        return np.repeat(self.first, self.count) + within * self.stride

    def restrict(self, begin: int | Ints, end: int | Ints) -> WindowRanges:
        """Return the windows that start from `begin` to before `end`; both may be arrays with one
        bound per run."""
        skipped = np.maximum(-(-(begin - self.first) // self.stride), 0)
        first = self.first + skipped * self.stride
        most = np.maximum(-(-(end - first) // self.stride), 0)
        count = np.clip(np.minimum(self.count - skipped, most), 0, None)
        present = count > 0
        return WindowRanges(first[present], count[present], self.stride)

    def exclude(self, unknown: Ints, signature: Signature) -> WindowRanges:
        """Return the windows that predict none of the rows in the runs of `unknown`, [runs, 2]."""
        if not len(unknown):
            return self
        # between two runs, windows may start from `low` to before `high`
        low = np.append(0, unknown[:, 1] - signature.lead)
        high = np.append(unknown[:, 0] - signature.lead - signature.steps_out + 1, NO_LIMIT)
        last = self.first + (self.count - 1) * self.stride
        begin = np.searchsorted(high, self.first, side="right")
        pieces = np.maximum(np.searchsorted(low, last, side="right") - begin, 0)
        owner = np.repeat(np.arange(len(self.first)), pieces)
        free = np.repeat(begin - np.cumsum(pieces) + pieces, pieces) + np.arange(len(owner))
        whole = WindowRanges(self.first[owner], self.count[owner], self.stride)
        return whole.restrict(low[free], high[free])


def _merge_sorted(first: Ints, second: Ints) -> Ints:
    """Return the values of two arrays that are in order, each once, in order.

    A hundred times as fast as `np.union1d`, which hashes, where each has a million values.
    """
    joined = np.sort(np.concatenate([first, second]), kind="stable")
    return joined[np.append(True, np.diff(joined) > 0)] if len(joined) else joined


def find_ranges(
    breaks: Ints,
    assignment: SplitAssignment,
    *,
    set_index: int,
    lead: int,
    steps_out: int,
    stride: int,
) -> WindowRanges:
    """Find the windows whose target rows all lie in the set `set_index`.

    No window holds a break after its first row, so none crosses a series' end or a gap.
    """
    borders = _merge_sorted(breaks, assignment.begins)
    ends = np.append(borders[1:], assignment.num_rows)
    runs = np.searchsorted(assignment.begins, borders, side="right") - 1
    in_set = assignment.sets[runs] == set_index
    borders, ends = borders[in_set], ends[in_set]
    segments = breaks[np.searchsorted(breaks, borders, side="right") - 1]
    first = np.maximum(borders, segments + lead) - lead
    count = np.maximum((ends - steps_out - lead - first) // stride + 1, 0)
    present = count > 0
    return WindowRanges(first[present], count[present], stride)


def find_set_windows(
    breaks: Ints, assignment: SplitAssignment, set_index: int, data: Data, signature: Signature
) -> WindowRanges:
    """Find a model's windows in one set, at the configured stride."""
    lead, rows = signature.lead, signature.steps_out
    return find_ranges(
        breaks, assignment, set_index=set_index, lead=lead, steps_out=rows, stride=data.stride
    )


def find_windows(
    index: SeriesIndex, data: Data, signature: Signature
) -> tuple[SplitAssignment, dict[str, WindowRanges]]:
    """Assign the rows to sets and find the windows of each, with or without a target; a set without
    windows is refused.

    Pre-training has no test windows, so that rows for later tests stay unseen.
    """
    assignment = assign_first_split(index, data)
    ranges = {
        name: find_set_windows(index.breaks, assignment, set_index, data, signature)
        for set_index, name in enumerate(SETS)
    }
    if signature.masked:
        ranges["test"] = ranges["test"].restrict(0, 0)
    for set_index, (name, windows) in enumerate(ranges.items()):
        if not (len(windows) or (signature.masked and name == "test")):
            raise UserError(explain_empty_set(name, index, assignment.count_rows(set_index), data))
    return assignment, ranges


MAX_LOST = 0.05
"""The share of windows that gaps may cost without a note"""


def describe_gaps(index: SeriesIndex, data: Data, signature: Signature) -> list[str]:
    """Note how many windows gaps in time cost, where they are many."""
    window = signature.lead + signature.steps_out

    def count(begins: Ints) -> int:
        lengths = np.diff(np.append(begins, index.num_rows))
        return int(np.maximum(lengths - window + 1, 0).sum())

    possible, left = count(index.offsets[:-1]), count(np.union1d(index.breaks, index.offsets[:-1]))
    if not data.time_columns or possible - left <= MAX_LOST * possible:
        return []
    return [
        f"gaps in time leave {left:,} of {possible:,} windows: none crosses a gap; a resample step "
        f"(data.prepare) would keep {possible:,}, and data.gap_tolerance says what a gap is"
    ]


def exclude_unknown(
    ranges: dict[str, WindowRanges], index: SeriesIndex, signature: Signature
) -> tuple[dict[str, WindowRanges], dict[str, int]]:
    """Return the windows whose targets are known, and the number that each set loses; a set that
    loses all is refused."""
    known = {name: windows.exclude(index.unknown, signature) for name, windows in ranges.items()}
    for name, windows in known.items():
        refuse_unknown(name, len(ranges[name]), len(windows), signature)
    return known, {name: len(ranges[name]) - len(windows) for name, windows in known.items()}


def refuse_unknown(
    name: str, num_windows: int, known: int, signature: Signature, *, fold: str = ""
) -> None:
    """Refuse a set, or a fold's set, that has windows, none of them with a target."""
    if known or not num_windows:
        return
    where = f" of fold {fold}" if fold else ""
    if signature.classes:
        raise UserError(
            f"no {name} window{where} has a label: its {num_windows:,} windows end at rows "
            "without one; label more rows, or choose another data.split"
        )
    if signature.masked:
        raise UserError(
            f"no {name} window{where} is known: a value is missing in each of its {num_windows:,} "
            "windows, and those that were filled in cannot be learnt from; shorten data.context, "
            "or leave columns with many missing values out of data.inputs"
        )
    raise UserError(
        f"no {name} window{where} has a target: each of its {num_windows:,} windows lacks a "
        f"value of {', '.join(signature.targets[:10])} in a row to predict; shorten data.horizon, "
        "name fewer data.targets, or choose another data.split"
    )


def explain_empty_set(
    name: str, index: SeriesIndex, rows: int, data: Data, *, fold: str = ""
) -> str:
    """Explain why a set, or a fold's set, has no window, and which settings would give it some."""
    gaps = len(index.breaks) - len(index.series_names)
    leaves = f"data.split.walk_forward leaves fold {fold}" if fold else "data.split leaves"
    message = (
        f"{leaves} no {name} window: it has {format_count(rows, 'row')}, and a window needs "
        f"{format_count(max(data.horizon, 1), 'target row')} there and {data.context} context rows "
        "in one piece"
    )
    if gaps:
        message += (
            f"; {gaps:,} gaps in time break the series up (raise data.gap_tolerance, or set it "
            "to inf to take rows as they follow)"
        )
    remedy = _suggest_settings(name, data.split) if fold else "give it more rows"
    return f"{message}; {remedy}, or shorten data.context or data.horizon"


def _suggest_settings(name: str, split: Split) -> str:
    """Name the settings that give the folds' sets of this name more rows."""
    if name == "test":
        return "raise data.split.test or lower data.split.walk_forward"
    if name == "val":
        return "raise data.split.val"
    costs = [
        "val",
        "test",
        *(setting for setting in ("purge", "embargo") if getattr(split, setting)),
    ]
    return f"lower data.split.{' or data.split.'.join(costs)}"


@dataclass(frozen=True)
class FoldWindows:
    """The windows of a split, or of one fold. Does not need torch."""

    label: str
    """The first and last time, or row of the series, of the fold's test block"""
    assignment: SplitAssignment | None
    """The sets of the rows; None where a split assigns windows rather than rows (stratified)"""
    starts: dict[str, Ints]
    """First rows of the windows, by set"""
    left_out: dict[str, int]
    """Number of windows without a target, by set"""


def find_fold_windows(
    index: SeriesIndex, time: Times | None, data: Data, signature: Signature
) -> tuple[list[FoldWindows], list[str]]:
    """Return all folds, the earliest test block first, and notes; a set without windows is
    refused."""
    walk = assign_walk_forward(index, data.split)
    blocks = merge_test_blocks(index, walk)

    def find(breaks: Ints, assignment: SplitAssignment, set_index: int) -> WindowRanges:
        return find_set_windows(breaks, assignment, set_index, data, signature)

    every_test = find(index.breaks, blocks, TEST)
    folds = []
    for fold, assignment in enumerate(walk, start=1):
        # series break also where training begins: rows before a rolling fold are no context
        begins = assignment.begins[assignment.sets == TRAIN]
        owners = np.searchsorted(index.offsets, begins, side="right")
        breaks = np.union1d(index.breaks, begins[np.diff(owners, prepend=0) > 0])
        ranges = {
            "train": find(breaks, assignment, TRAIN),
            "val": find(index.breaks, assignment, VAL),
            "test": every_test,
        }
        in_test = assignment.mask(TEST)
        number = f"{fold} of {len(walk)}"
        label = _describe_block(index, time, assignment, data) or f"block {number}"
        starts, left_out = {}, {}
        for set_index, (name, windows) in enumerate(ranges.items()):
            candidates = windows.list_starts()
            known = windows.exclude(index.unknown, signature).list_starts()
            if name == "test":
                candidates, known = (
                    rows[in_test[rows + signature.lead]] for rows in (candidates, known)
                )
            if not len(candidates):
                rows = assignment.count_rows(set_index)
                raise UserError(explain_empty_set(name, index, rows, data, fold=number))
            refuse_unknown(name, len(candidates), len(known), signature, fold=label)
            starts[name], left_out[name] = known, len(candidates) - len(known)
        folds.append(FoldWindows(label, assignment, starts, left_out))
    notes = []
    if len(walk) > 1:
        notes.append(
            f"walk-forward in {len(walk)} folds: columns are scaled by the first fold's "
            f"{walk[0].count_rows(TRAIN):,} training rows, which every fold may know"
        )
    if time is not None:
        notes += _describe_overlap(time, walk, data)
    return folds, notes


def _describe_block(
    index: SeriesIndex, time: Times | None, assignment: SplitAssignment, data: Data
) -> str:
    """Name the test block's first and last time; without times, its rows if all series agree."""
    in_test = assignment.sets == TEST
    first, last = assignment.begins[in_test], assignment.ends[in_test] - 1
    if time is None:
        begins = index.offsets[np.searchsorted(index.offsets, first, side="right") - 1]
        spans = set(zip((first - begins).tolist(), (last - begins).tolist(), strict=True))
        return "rows {} to {}".format(*spans.pop()) if len(spans) == 1 else ""
    return " to ".join(_format_times(data, time[first].min(), time[last].max()))


def _format_times(data: Data, *times: Any) -> list[str]:
    """Format dates, to the day, minute or second where nothing finer is needed, or numbers."""
    if not is_date(np.asarray(times)):
        first, *following = (f"{time:.15g}" for time in times)
        return [f"{data.time_column} {first}", *following]
    dates = np.array(times, dtype="datetime64[us]")
    rounded = (dates.astype(f"datetime64[{unit}]") for unit in ("D", "m", "s"))
    shortest = next((candidate for candidate in rounded if (candidate == dates).all()), dates)
    return [str(date).replace("T", " ") for date in shortest]


def _describe_overlap(time: Times, walk: tuple[SplitAssignment, ...], data: Data) -> list[str]:
    """Note where one series' training is later than another's test."""
    for fold, assignment in enumerate(walk, start=1):
        learnt = (assignment.sets == TRAIN) | (assignment.sets == VAL)
        latest = time[assignment.ends[learnt] - 1].max()
        earliest = time[assignment.begins[assignment.sets == TEST]].min()
        if latest >= earliest:
            until, since = _format_times(data, latest, earliest)
            return [
                f"walk-forward cuts each series in itself, and they do not end together: fold "
                f"{fold} learns from rows up to {until}, and is tested from {since} on"
            ]
    return []
