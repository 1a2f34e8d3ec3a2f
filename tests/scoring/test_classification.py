"""Class metrics on cases that can be checked by hand, and against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from slipstream.scoring import classification
from slipstream.scoring.classification import ClassCounts

NAMES = ("a", "b", "c")


def draw(num=200, steps=1, size=3, seed=0):
    """Logits that know a little, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(size, (num, steps), generator=generator)
    logits = torch.randn(num, steps, size, generator=generator)
    logits += 1.5 * torch.nn.functional.one_hot(labels, size)
    return logits, labels


def count(logits, labels, *, names=("s",), series=None, parts=3):
    """The counts of these answers, added in some parts."""
    num, steps, size = logits.shape
    counts = ClassCounts.zeros(
        NAMES[:size], steps=steps, series=names, num_windows=num, device=torch.device("cpu")
    )
    series = torch.zeros(num, dtype=torch.int64) if series is None else series
    rows = torch.arange(num)
    for some in rows.chunk(parts):
        counts.add(logits[some], labels[some], rows[some], series[some])
    return counts


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
    labels = torch.tensor([0, 0, 0, 1, 1, 2])[:, None]
    found = count(likely.log()[:, None], labels).compute()
    assert found["confusion"] == [[2, 1, 0], [0, 1, 1], [0, 0, 1]]
    overall = found["overall"]
    assert list(overall) == list(classification.NAMES)
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
    logits, labels = draw(300, size=size)
    logits = (4 * logits).round() / 4
    counts = count(logits, labels)
    found, log_probs = counts.compute(), counts.join_answers().log_probs
    by_class = [area(log_probs[:, 0, c], (labels[:, 0] == c).numpy()) for c in range(size)]
    assert [found["per_class"][n]["auc"] for n in NAMES[:size]] == pytest.approx(by_class)
    wanted = by_class[1] if size == 2 else np.mean(by_class)
    assert found["overall"]["auc"] == pytest.approx(wanted)


def test_a_class_that_is_not_there():
    logits, labels = draw()
    labels = labels.clamp(max=1)
    found = count(logits, labels).compute()
    assert math.isnan(found["overall"]["auc"])
    recall = [found["per_class"][name]["recall"] for name in "ab"]
    assert found["overall"]["balanced_accuracy"] == pytest.approx(np.mean(recall))
    assert found["per_class"]["c"]["recall"] == 0.0


def test_parts_and_folds_add_up():
    logits, labels = draw(100, steps=4)
    split = {"names": ("one", "two")}
    series = torch.arange(100) // 60
    whole = count(logits, labels, series=series, parts=1, **split)
    halves = [
        count(logits[part], labels[part], series=series[part], **split)
        for part in (slice(0, 37), slice(37, 100))
    ]
    together, alone = (one.compute() for one in (halves[0].merge(halves[1:]), whole))
    assert together["confusion"] == alone["confusion"]
    for name, value in alone["overall"].items():
        assert together["overall"][name] == pytest.approx(value)
    by_step = [count(logits[:, h : h + 1], labels[:, h : h + 1]).compute() for h in range(4)]
    for h, row in enumerate(alone["per_step"]):
        assert row == pytest.approx({key: by_step[h]["overall"][key] for key in row})
    first = count(logits[:60], labels[:60]).compute()["overall"]
    assert alone["per_series"]["one"] == pytest.approx(
        {key: first[key] for key in alone["per_series"]["one"]}
    )


def test_of_very_many_only_some_are_retained(monkeypatch):
    logits, labels = draw(300)
    everything = count(logits, labels).compute()
    monkeypatch.setattr(classification, "MAX_RETAINED", 300)
    counts = count(logits, labels)
    assert counts.stride == 3
    assert len(counts.join_answers().starts) == 102  # of three parts, each its third
    some = counts.compute()
    assert some["confusion"] == everything["confusion"]
    for name in ("accuracy", "balanced_accuracy", "f1_macro", "log_loss"):
        assert some["overall"][name] == everything["overall"][name]
