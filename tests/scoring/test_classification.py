"""Class metrics on cases that can be checked by hand, and against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from slipstream.scoring import bootstrap, class_counts
from slipstream.scoring.bootstrap import Answers

NAMES = ("a", "b", "c")


def drawn(num=200, steps=1, size=3, seed=0):
    """Logits that know a little, and labels."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.randint(size, (num, steps), generator=generator)
    logits = torch.randn(num, steps, size, generator=generator)
    logits += 1.5 * torch.nn.functional.one_hot(number, size)
    return logits, number


def tallied(logits, number, *, series=1, owner=None, parts=3, **more):
    num, steps, size = logits.shape
    given = {"classes": size, "steps": steps, "series": series, "windows": num} | more
    tally = class_counts.start(**given, device=torch.device("cpu"))
    owner = torch.zeros(num, dtype=torch.int64) if owner is None else owner
    rows = torch.arange(num)
    for some in rows.chunk(parts):
        tally.add(logits[some], number[some], rows[some], owner[some])
    return tally


def read(tally, size=3, series=("s",)):
    return class_counts.read(tally, classes=NAMES[:size], series=series)


def area(scores, positive):
    """By ranks, as Mann and Whitney have it."""
    ranks, num = rankdata(scores), positive.sum()
    return (ranks[positive].sum() - num * (num + 1) / 2) / (num * (~positive).sum())


def test_a_case_worked_out_by_hand():
    """Labels a a a b b c; guesses a a b b c c."""
    likely = torch.tensor(
        [
            [0.7, 0.2, 0.1],
            [0.6, 0.3, 0.1],
            [0.3, 0.5, 0.2],
            [0.1, 0.8, 0.1],
            [0.2, 0.2, 0.6],
            [0.1, 0.1, 0.8],
        ]
    )
    number = torch.tensor([0, 0, 0, 1, 1, 2])[:, None]
    found = read(tallied(likely.log()[:, None], number))
    assert found["confusion"] == [[2, 1, 0], [0, 1, 1], [0, 0, 1]]
    overall = found["overall"]
    assert list(overall) == list(class_counts.NAMES)
    assert overall["accuracy"] == pytest.approx(4 / 6)
    assert overall["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    f1 = (2 * 2 / (3 + 2), 2 * 1 / (2 + 2), 2 * 1 / (1 + 2))
    assert overall["f1_macro"] == pytest.approx(sum(f1) / 3)
    losses = [-math.log(p) for p in (0.7, 0.6, 0.3, 0.8, 0.2, 0.8)]
    assert overall["log_loss"] == pytest.approx(sum(losses) / 6, rel=1e-6)
    # a: 9 of 9 pairs right; b: 0.8 beats all four, 0.2 ties with one, beats one; c: 5 of 5
    assert found["per_class"]["a"]["auc"] == pytest.approx(1.0)
    assert found["per_class"]["b"]["auc"] == pytest.approx((4 + 1.5) / 8)
    assert found["per_class"]["c"]["auc"] == pytest.approx(1.0)
    assert overall["auc"] == pytest.approx((1 + 5.5 / 8 + 1) / 3)
    assert [found["per_class"][n]["f1"] for n in NAMES] == pytest.approx(f1)
    assert [found["per_class"][n]["count"] for n in NAMES] == [3, 2, 1]
    assert found["per_class"]["b"]["precision"] == pytest.approx(0.5)
    # bins of 1/15: 0.5 (wrong), 0.6 twice (one right), 0.7 (right), 0.8 twice (both right)
    wanted = (abs(0.5 - 0) + abs(1.2 - 1) + abs(0.7 - 1) + abs(1.6 - 2)) / 6
    assert overall["ece"] == pytest.approx(wanted, rel=1e-5)
    assert sum(each["count"] for each in found["reliability"]) == 6


@pytest.mark.parametrize("size", [2, 3])
def test_areas_are_those_of_ranks_with_ties(size):
    logits, number = drawn(300, size=size)
    logits = (4 * logits).round() / 4
    tally = tallied(logits, number)
    found, likely = read(tally, size), class_counts.read_answers(tally).likely
    by_class = [area(likely[:, 0, c], (number[:, 0] == c).numpy()) for c in range(size)]
    assert [found["per_class"][n]["auc"] for n in NAMES[:size]] == pytest.approx(by_class)
    wanted = by_class[1] if size == 2 else np.mean(by_class)
    assert found["overall"]["auc"] == pytest.approx(wanted)


def test_a_class_that_is_not_there():
    logits, number = drawn()
    number = number.clamp(max=1)
    found = read(tallied(logits, number))
    assert math.isnan(found["overall"]["auc"])
    recall = [found["per_class"][name]["recall"] for name in "ab"]
    assert found["overall"]["balanced_accuracy"] == pytest.approx(np.mean(recall))
    assert found["per_class"]["c"]["recall"] == 0.0


def test_parts_and_folds_add_up():
    logits, number = drawn(100, steps=4)
    owner = torch.arange(100) // 60
    whole = tallied(logits, number, series=2, owner=owner, parts=1)
    halves = [
        tallied(logits[part], number[part], series=2, owner=owner[part])
        for part in (slice(0, 37), slice(37, 100))
    ]
    names = ("one", "two")
    together, alone = (read(t, series=names) for t in (class_counts.merged(halves), whole))
    assert together["confusion"] == alone["confusion"]
    for name, value in alone["overall"].items():
        assert together["overall"][name] == pytest.approx(value)
    by_step = [read(tallied(logits[:, h : h + 1], number[:, h : h + 1])) for h in range(4)]
    for h, row in enumerate(alone["per_step"]):
        assert row == pytest.approx({key: by_step[h]["overall"][key] for key in row})
    first = read(tallied(logits[:60], number[:60]))["overall"]
    assert alone["per_series"]["one"] == pytest.approx(
        {key: first[key] for key in alone["per_series"]["one"]}
    )


def test_of_very_many_only_some_are_kept(monkeypatch):
    logits, number = drawn(300)
    everything = read(tallied(logits, number))
    monkeypatch.setattr(class_counts, "MOST_KEPT", 300)
    tally = tallied(logits, number)
    assert tally.every == 3
    assert len(class_counts.read_answers(tally).start) == 102  # of three parts, each its third
    some = read(tally)
    assert some["confusion"] == everything["confusion"]
    for name in ("accuracy", "balanced_accuracy", "f1_macro", "log_loss"):
        assert some["overall"][name] == everything["overall"][name]


def as_answers(num=300, steps=1, size=3, stride=1, seed=0):
    logits, number = drawn(num, steps, size, seed)
    likely = torch.log_softmax(logits, dim=-1).numpy()
    return Answers(likely, number.numpy(), stride * np.arange(num), np.zeros(num, dtype=np.int64))


def taken(found, rows):
    return Answers(*(part[rows] for part in found))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_resample_has_the_figures_of_the_windows_drawn(size, steps):
    found = as_answers(60, steps, size)
    figures = bootstrap._Figures(found, areas=True)
    draws = next(bootstrap._draws(60, 4))
    assert draws.shape == (bootstrap.AT_A_TIME, 60)
    assert (draws.sum(axis=1) == 60).all()
    got = figures.of(np.repeat(draws, steps, axis=1))
    for resample in (0, 17):
        rows = np.repeat(np.arange(60), draws[resample].astype(int))
        again = taken(found, rows)
        tally = tallied(torch.from_numpy(again.likely), torch.from_numpy(again.number))
        wanted = read(tally, size)["overall"]
        for name, value in wanted.items():
            assert got[name][resample] == pytest.approx(value), name


def test_blocks_are_neighbours():
    draws = next(bootstrap._draws(100, 10))
    for counts in draws[:5]:
        rolled = np.flatnonzero(np.diff(counts, prepend=counts[-1]))
        assert len(rolled) <= 20  # ten blocks begin and end
    again = next(bootstrap._draws(100, 10))
    assert np.array_equal(draws, again)


@pytest.mark.parametrize(
    ("start", "length"),
    [
        (np.arange(500), 24),
        (np.arange(0, 500, 6), 4),
        (np.arange(0, 50_000, 100), 1),
        (np.concatenate([np.arange(200), 10_000 + np.arange(200)]), 24),
    ],
)
def test_blocks_are_as_long_as_windows_share_rows(start, length):
    assert bootstrap.block_length(start, 24) == length


def test_intervals_hold_the_figure_and_are_wider_for_neighbours():
    found = as_answers(600)
    alone = bootstrap.resampled({"model": found}, rows=1)
    assert alone.how == "1,000 resamples in blocks of 1 windows"
    low, high = alone.interval("model", "accuracy")
    accuracy = float((found.likely.argmax(-1) == found.number).mean())
    assert low < accuracy < high
    # a proportion's own error, from 600 that know nothing of each other
    wanted = 2 * 1.96 * math.sqrt(accuracy * (1 - accuracy) / 600)
    assert high - low == pytest.approx(wanted, rel=0.15)
    repeated = taken(found, np.repeat(np.arange(60), 10))._replace(start=np.arange(600))
    blocks, singles = (bootstrap.resampled({"model": repeated}, rows=n) for n in (10, 1))
    assert "blocks of 10" in blocks.how
    widths = [np.ptp(one.interval("model", "accuracy")) for one in (blocks, singles)]
    assert widths[0] > 2.5 * widths[1]


def test_pairs_are_drawn_together():
    found = as_answers(200)
    together = bootstrap.resampled({"one": found, "other": as_answers(200)}, rows=1)
    one, other = together.figures["one"], together.figures["other"]
    assert set(one) - set(other) == {"auc"}
    assert all(np.array_equal(values, one[name]) for name, values in other.items())
    assert together.interval("one", "log_loss", beyond="other") == [0.0, 0.0]


def test_no_interval_where_it_would_mean_nothing():
    few = bootstrap.resampled({"model": as_answers(100)}, rows=30)
    assert "fewer than 5" in few.how
    assert not few.enough
    many = bootstrap.resampled({"model": as_answers(20_001)}, rows=1)
    assert "more than" in many.how
    assert many.enough
    assert few.interval("model", "accuracy") is many.interval("model", "accuracy") is None
    assert bootstrap.interval(np.array([np.nan, np.nan])) is None


def test_the_most_wrong_come_first_and_not_their_neighbours():
    likely = np.log(np.full((40, 1, 2), 0.5))
    number = np.zeros((40, 1), dtype=np.int64)
    for window, p in ((5, 0.01), (6, 0.02), (20, 0.3), (30, 0.1)):
        likely[window, 0] = np.log([p, 1 - p])
    likely[likely == np.log(0.5)] = 0.0
    found = Answers(likely, number, np.arange(40), np.zeros(40))
    assert list(bootstrap.worst(found, apart=3, most=10)) == [(5, 0), (30, 0), (20, 0)]
    assert list(bootstrap.worst(found, apart=1, most=2)) == [(5, 0), (6, 0)]
