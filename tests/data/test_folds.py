"""Walk-forward folds: nothing of the future, every test window once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.config import Data, Signature, Split
from slipstream.data import dataset as datasets
from slipstream.data import folds, splits, windows
from slipstream.data.series import SeriesIndex
from slipstream.data.splits import SETS, TEST, TRAIN, UNUSED, SplitAssignment
from tests.conftest import small_config, small_dataset, waves


@st.composite
def walks(draw, **fixed):
    """Some series with gaps, and settings that walk over them."""
    lengths = draw(st.lists(st.integers(40, 120), min_size=1, max_size=4))
    offsets = np.cumsum([0, *lengths])
    gaps = draw(st.sets(st.integers(1, int(offsets[-1]) - 1), max_size=4))
    layout = SeriesIndex(
        series_names=tuple(map(str, range(len(lengths)))),
        offsets=offsets,
        breaks=np.array(sorted({*offsets[:-1].tolist(), *gaps})),
        group_begins=np.zeros(1, dtype=np.int64),
        group_codes=np.zeros(1, dtype=np.int64),
        group_names=("",),
        step=None,
        has_dates=False,
    )
    settings = {
        "walk_forward": draw(st.integers(1, 5)),
        "val": draw(st.integers(2, 5)) / 20,
        "test": draw(st.integers(3, 9)) / 20,
        "purge": draw(st.integers(0, 3)),
        "embargo": draw(st.integers(0, 6)),
        "window": draw(st.sampled_from(["expanding", "rolling"])),
    } | fixed
    horizon = draw(st.integers(0, 4))
    data = Data(
        context=draw(st.integers(1, 6)),
        horizon=horizon,
        stride=draw(st.integers(1, 3)),
        targets=("y",),
        inputs=("x",),
        split=settings,
    )
    return layout, data, signature_of(data)


def signature_of(data):
    return Signature(
        inputs=data.inputs,
        targets=data.targets,
        static=(),
        shared=0,
        context=data.context,
        horizon=data.horizon,
        channels="together",
        quantiles=(),
        step=None,
    )


def found(walk):
    layout, data, signature = walk
    try:
        every, _ = splits.find_fold_windows(layout, None, data, signature)
        return [folds.Fold.from_windows(fold) for fold in every]
    except UserError:  # a fold without a window
        assume(False)


def blocks(layout, split):
    """First row and length of every series' test blocks, [series], by fold; in whole numbers."""
    lengths = np.diff(layout.offsets)
    size = lengths * round(20 * split.test) // (20 * split.walk_forward)
    left = split.walk_forward - np.arange(split.walk_forward)
    return layout.offsets[1:] - left[:, None] * size, size


def targets_of(starts, signature):
    return starts[:, None] + signature.lead + np.arange(signature.steps_out)


@given(walks())
def test_in_every_series_of_a_fold_the_sets_follow_each_other_at_a_distance(walk):
    layout, data, signature = walk
    for fold in found(walk):
        rows = {name: targets_of(fold.starts[name].numpy(), signature).ravel() for name in SETS}
        for begin, end in zip(layout.offsets[:-1], layout.offsets[1:], strict=True):
            mine = [some[(some >= begin) & (some < end)] for some in (rows[name] for name in SETS)]
            for i, j in ((0, 1), (1, 2), (0, 2)):
                if len(mine[i]) and len(mine[j]):
                    between = mine[j].min() - mine[i].max() - 1
                    assert between >= data.split.purge


@given(walks())
def test_every_test_window_of_the_tail_is_in_one_fold(walk):
    layout, data, signature = walk
    firsts, size = blocks(layout, data.split)
    begins = np.union1d(layout.offsets[:-1], firsts[0][size > 0])
    sets = np.where(np.isin(begins, firsts[0][size > 0]), TEST, UNUSED).astype(np.int8)
    tail = splits.find_ranges(
        layout.breaks,
        SplitAssignment(begins, sets, layout.num_rows),
        set_index=TEST,
        lead=signature.lead,
        steps_out=signature.steps_out,
        stride=data.stride,
    ).list_starts()
    split = found(walk)
    together = np.concatenate([fold.starts["test"].numpy() for fold in split])
    assert sorted(together.tolist()) == tail.tolist()
    for index, fold in enumerate(split):
        first = fold.starts["test"].numpy() + signature.lead
        owner = np.searchsorted(layout.offsets, first, side="right") - 1
        assert (first >= firsts[index][owner]).all()
        assert (first < (firsts[index] + size)[owner]).all()


@given(walks())
def test_no_window_of_a_fold_crosses_a_gap_or_a_series_end(walk):
    layout, _, signature = walk
    for fold in found(walk):
        for starts in fold.starts.values():
            ends = starts.numpy() + signature.lead + signature.steps_out
            held = np.searchsorted(layout.breaks, [starts.numpy(), ends - 1], side="right")
            assert (held[0] == held[1]).all()
            assert (ends <= layout.num_rows).all()


@given(walks())
def test_blocks_are_equally_long_and_end_with_the_series(walk):
    layout, data, _ = walk
    firsts, size = blocks(layout, data.split)
    tail = np.zeros(layout.num_rows, dtype=int)
    for index, runs in enumerate(splits.assign_walk_forward(layout, data.split)):
        tested = runs.mask(TEST, 0, layout.num_rows)
        tail += tested
        wanted = np.zeros_like(tested)
        for first, rows in zip(firsts[index], size, strict=True):
            wanted[first : first + rows] = True
        assert (tested == wanted).all()
    assert tail.max() == 1
    assert (tail[layout.offsets[1:] - 1][size > 0] == 1).all()


def test_a_share_that_floats_a_little_low_still_has_its_rows():
    split = {"walk_forward": 1, "test": 0.29, "val": 0.1}  # 0.29 * 100 is less than 29
    dataset = small_dataset(small_config(data={"split": split}), waves(100))
    assert dataset.folds[0].label == "time 71 to 99"


@given(walks(window="expanding"))
def test_expanding_folds_hold_all_earlier_rows_but_the_embargo(walk):
    layout, data, _ = walk
    firsts, size = blocks(layout, data.split)
    row, before = np.arange(layout.num_rows), np.zeros(layout.num_rows, dtype=bool)
    owner = np.searchsorted(layout.offsets, row, side="right") - 1
    validates = np.round(np.diff(layout.offsets) * data.split.val).astype(int)
    for index, runs in enumerate(splits.assign_walk_forward(layout, data.split)):
        train = runs.mask(TRAIN, 0, layout.num_rows)
        embargoed = np.zeros_like(train)
        for earlier in firsts[:index]:
            end = (earlier + size)[owner]
            embargoed |= (row >= end) & (row < end + data.split.embargo)
        until = firsts[index] - 2 * data.split.purge - validates
        assert (train == ((row < until[owner]) & ~embargoed)).all()
        assert train[before].all()
        before = train


@given(walks(window="rolling", embargo=0))
def test_rolling_folds_train_on_as_many_rows_as_the_first_and_forget_the_rest(walk):
    layout, data, _ = walk
    lengths = []
    for fold, runs in zip(found(walk), splits.assign_walk_forward(layout, data.split), strict=True):
        train = runs.mask(TRAIN, 0, layout.num_rows)
        lengths.append(np.add.reduceat(train, layout.offsets[:-1], dtype=int).tolist())
        for start in fold.starts["train"].tolist():
            assert train[start]
    assert all(some == lengths[0] for some in lengths)


@given(walks(window="rolling", embargo=0, purge=1))
def test_without_gaps_rolling_folds_have_as_many_training_windows(walk):
    layout, data, signature = walk
    layout = replace(layout, breaks=layout.offsets[:-1])
    assert len({fold.num_windows["train"] for fold in found((layout, data, signature))}) == 1


@given(walks(embargo=0, purge=0, window="expanding"), st.data())
def test_a_fold_has_the_windows_of_the_split_by_rows(walk, draw):
    layout, data, signature = walk
    rows = int(layout.offsets[1])
    breaks = layout.breaks[layout.breaks < rows]
    layout = replace(layout, series_names=("0",), offsets=layout.offsets[:2], breaks=breaks)
    split = found((layout, data, signature))
    index = draw.draw(st.integers(0, len(split) - 1))
    firsts, size = blocks(layout, data.split)
    validates = round(rows * data.split.val)
    counts = int(firsts[index][0]) - validates, validates, int(size[0])
    by_rows = data.model_copy(update={"split": Split(rows=counts)})
    alike = windows_by_rows(layout, by_rows, signature)
    for name in ("train", "val"):
        assert split[index].starts[name].tolist() == alike[name]
    if data.stride == 1:  # else the windows go on in the stride of all blocks
        last = len(alike["test"])
        assert split[index].starts["test"].tolist()[:last] == alike["test"]


def windows_by_rows(layout, data, signature):
    try:
        ranges = splits.find_windows(layout, data, signature)[1]
    except UserError:  # a block shorter than the horizon has windows in a walk alone
        assume(False)
    return {name: some.list_starts().tolist() for name, some in ranges.items()}


def series_table(rows=300):
    """Two series of unlike length with a gap in one of them."""
    table = waves(rows).to_pydict()
    table["id"] = [0] * (rows - 120) + [1] * 120
    table["time"] = [t + 7 * (t > 90) for t in table["time"]]
    return table


WALK = {"walk_forward": 3, "purge": 2, "embargo": 3}
SHAPES = {
    "expanding": {"split": WALK},
    "rolling": {"split": WALK | {"window": "rolling"}},
    "independent": {"split": WALK, "channels": "independent"},
    "estimate": {"split": WALK, "horizon": 0, "targets": ["c"], "inputs": ["a", "b"]},
    "stride": {"split": WALK, "stride": 3},
    "minmax": {"split": WALK, "scale": "minmax"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_of_the_future_reaches_scaler_training_and_validation(shape):
    settings = {"id": "id", "inputs": ["a", "b", "c"], "context": 8}
    config = small_config(data=settings | SHAPES[shape])
    table = series_table()
    dataset = small_dataset(config, table)
    split = config.data.split
    walk = splits.assign_walk_forward(dataset.index, split)
    for index, fold in enumerate(dataset.folds):
        future = np.zeros(300, dtype=bool)
        for begin, end in ((0, 180), (180, 300)):
            tested = walk[index].mask(TEST, begin, end)
            future[begin + int(tested.argmax()) : end] = True
        changed = {name: np.array(values) for name, values in table.items()}
        for name in "abc":
            changed[name] = np.where(future, 1e6 * np.sin(changed[name] * 99), changed[name])
        other = small_dataset(config, changed)
        assert other.scaler == dataset.scaler
        for name in ("train", "val"):
            assert torch.equal(other.folds[index].starts[name], fold.starts[name])
            batch, again = (
                windows.gather(some.memory.series, fold.starts[name]) for some in (dataset, other)
            )
            assert torch.equal(again.inputs, batch.inputs)
            assert torch.equal(again.targets, batch.targets)
        batch, again = (
            windows.gather(some.memory.series, fold.starts["test"]) for some in (dataset, other)
        )
        assert not torch.equal(again.targets, batch.targets)


def test_the_scaler_knows_the_first_folds_training_rows():
    config = small_config(data={"split": {"walk_forward": 4, "val": 0.1, "test": 0.4, "purge": 5}})
    dataset = small_dataset(config)
    column = waves()["a"].to_numpy()[: 400 - 160 - 40 - 10]
    assert dataset.scaler.shift["a"] == pytest.approx(column.mean(), rel=1e-6)
    assert dataset.scaler.deviation["a"] == pytest.approx(column.std(), rel=1e-6)
    assert (
        "walk-forward in 4 folds: columns are scaled by the first fold's 190 training rows, which "
        "every fold may know" in dataset.notes
    )


def test_six_folds_need_no_more_words():
    dataset = small_dataset(small_config(data={"split": {"walk_forward": 6}}))
    # 400 rows: blocks of 13, 40 rows to validate, windows of 16 + 4 rows
    assert [fold.num_windows["test"] for fold in dataset.folds] == [13] * 5 + [10]
    assert [fold.num_windows["val"] for fold in dataset.folds] == [37] * 6
    assert [fold.num_windows["train"] for fold in dataset.folds] == [263 + 13 * i for i in range(6)]


def test_code_that_knows_no_folds_sees_the_last_one():
    dataset = small_dataset(small_config(data={"split": {"walk_forward": 3}}))
    assert dataset.memory.starts == dataset.folds[-1].starts
    assert dataset.num_windows == dataset.folds[-1].num_windows
    assert small_dataset().folds == ()


def test_a_fold_alone_is_an_ordinary_dataset():
    dataset = small_dataset(small_config(data={"split": {"walk_forward": 3}}))
    scored = []
    for fold in dataset.folds:
        alone = dataset.select_fold(fold)
        assert alone.folds == ()
        assert alone.num_windows == fold.num_windows
        assert alone.memory.series is dataset.memory.series
        scored += [piece.starts for piece in alone.iter_chunks("test", None, rows=0)]
    # all blocks together are the last 78 rows, and a window has 4 target rows
    assert torch.cat(scored).tolist() == list(range(400 - 78 - 16, 400 - 4 - 16 + 1))


def test_one_fold_is_the_split_by_shares():
    one = small_dataset(small_config(data={"split": {"walk_forward": 1}}))
    shares = small_dataset()
    for name in SETS:
        assert torch.equal(one.memory.starts[name], shares.memory.starts[name])
    assert one.scaler == shares.scaler


def test_the_fingerprint_covers_every_fold():
    dataset = small_dataset(small_config(data={"split": {"walk_forward": 3}}))
    first = dataset.folds[0]
    fewer = replace(first, starts=first.starts | {"train": first.starts["train"][:-1]})
    moved = replace(first, starts=first.starts | {"train": first.starts["train"] + 1})
    prints = {
        dataset.compute_fingerprint(),
        replace(dataset, folds=(fewer, *dataset.folds[1:])).compute_fingerprint(),
        replace(dataset, folds=(moved, *dataset.folds[1:])).compute_fingerprint(),
        dataset.select_fold(dataset.folds[-1]).compute_fingerprint(),
    }
    assert len(prints) == 4
    again = small_dataset(small_config(data={"split": {"walk_forward": 3}}))
    assert again.compute_fingerprint() == dataset.compute_fingerprint()


@pytest.mark.parametrize(
    ("unit", "label"),
    [
        ("D", "2020-11-16 to 2020-12-25"),
        ("h", "2020-01-14 08:00 to 2020-01-15 23:00"),
        ("s", "2020-01-01 00:05:20 to 2020-01-01 00:05:59"),
        ("ms", "2020-01-01 00:00:00.320000 to 2020-01-01 00:00:00.359000"),
    ],
)
def test_a_fold_is_named_by_the_time_of_its_test_block(unit, label):
    time = np.datetime64("2020-01-01", unit) + np.arange(400)
    table = waves().set_column(0, "time", pa.array(time.astype("datetime64[us]")))
    config = small_config(data={"split": {"walk_forward": 2}})
    assert small_dataset(config, table).folds[0].label == label


def test_a_fold_without_dates_is_named_by_numbers_or_rows():
    split = {"walk_forward": 2}
    timed = small_dataset(small_config(data={"split": split})).folds
    assert [fold.label for fold in timed] == ["time 320 to 359", "time 360 to 399"]
    settings = {"split": split, "time": None, "ignore": ["time", "id"]}
    rows = small_dataset(small_config(data=settings)).folds
    assert [fold.label for fold in rows] == ["rows 320 to 359", "rows 360 to 399"]
    several = small_dataset(small_config(data=settings | {"id": "id"}), series_table()).folds
    assert [fold.label for fold in several] == ["block 1 of 2", "block 2 of 2"]


def dated(starts):
    """Series of 200 days from each of these dates on."""
    time = np.concatenate([np.datetime64(start) + np.arange(200) for start in starts])
    table = waves(200 * len(starts)).to_pydict()
    table["id"] = np.repeat(np.arange(len(starts)), 200).tolist()
    return table | {"time": pa.array(time.astype("datetime64[us]"))}


def test_a_note_says_where_one_series_learns_from_another_ones_future():
    config = small_config(data={"split": {"walk_forward": 2}, "id": "id"})
    together = small_dataset(config, dated(["2020-01-01", "2020-01-01"]))
    assert not any("do not end together" in note for note in together.notes)
    apart = small_dataset(config, dated(["2020-01-01", "2020-03-01"]))
    said = "fold 1 learns from rows up to 2020-08-07, and is tested from 2020-06-09 on"
    assert any(said in note for note in apart.notes)


@pytest.mark.parametrize("kind", [int, float])
def test_the_note_is_there_for_plain_numbers_too(kind):
    config = small_config(data={"split": {"walk_forward": 2}, "id": "id"})
    table = dated(["2020-01-01", "2020-01-01"])
    for shift, wanted in ((0, False), (60, True)):
        time = np.concatenate([np.arange(200), np.arange(200) + shift]).astype(kind)
        found = small_dataset(config, table | {"time": time})
        said = "fold 1 learns from rows up to time 219, and is tested from 160 on"
        assert any(said in note for note in found.notes) == wanted


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (
            {"walk_forward": 30},
            r"walk_forward leaves fold 30 of 30 no test window: it has 2 rows, and a window needs "
            r"4 target rows there and 16 context rows in one piece; raise data.split.test or lower "
            r"data.split.walk_forward, or shorten data.context or data.horizon",
        ),
        (
            {"walk_forward": 2, "val": 0.005},
            r"leaves fold 1 of 2 no val window: it has 2 rows.*; raise data.split.val, or",
        ),
        (
            {"walk_forward": 2, "val": 0.5, "test": 0.46},
            r"leaves fold 1 of 2 no train window: it has 16 rows.*; "
            r"lower data.split.val or data.split.test, or shorten",
        ),
        (
            {"walk_forward": 2, "purge": 150},
            r"fold 1 of 2 no train window: it has 0 rows.*; "
            r"lower data.split.val or data.split.test or data.split.purge, or",
        ),
    ],
)
def test_a_fold_without_a_window_is_named_with_the_fix(split, said):
    with pytest.raises(UserError, match=said):
        small_dataset(small_config(data={"split": split}))


def test_streamed_data_do_not_walk(tmp_path):
    pa.parquet.write_table(waves(), tmp_path / "t.parquet")
    config = small_config(
        data={"path": str(tmp_path / "t.parquet"), "split": {"walk_forward": 2}},
        engine={"home": "stream"},
    )
    with pytest.raises(
        UserError, match=r"data.split.walk_forward does not work .* engine.home = \"host\""
    ):
        datasets.load_dataset(config)
