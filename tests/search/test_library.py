"""The errors that `slipstream auto` keeps, and the ensemble that it selects from them."""

import math

import numpy as np
import pytest
import torch

from slipstream.search.library import Block, Library


def make_library(metric="mse", blocks=2, quantiles=()):
    parts = [Block(torch.arange(200), float(1 + number)) for number in range(blocks)]
    return Library(parts, metric, quantiles)


def draw(seed, size=200, level=0.0, noise=1.0):
    generator = torch.Generator().manual_seed(seed)
    return level + noise * torch.randn(size, generator=generator)


def test_the_newest_block_weighs_most():
    library = make_library()
    library.add("a", 0, torch.full((200,), 3.0))
    library.add("a", 1, torch.full((200,), 1.0))
    assert library.compute_loss("a") == pytest.approx((9.0 + 2 * 1.0) / 3)


def test_candidates_without_an_error_on_every_block_do_not_count():
    library = make_library()
    library.add("a", 0, draw(1))
    assert library.rank() == []
    assert library.combine() is None
    library.add("a", 1, draw(2))
    assert library.rank() == ["a"]


def test_errors_that_cancel_make_an_ensemble():
    library = make_library()
    for number in range(2):
        shared = draw(10 + number, noise=0.1)
        library.add("high", number, shared + 1.0)
        library.add("low", number, shared - 1.0)
        library.add("far", number, shared + 5.0)
    found = library.combine()
    assert found.weights == {"high": 0.5, "low": 0.5}
    assert found.is_better
    assert found.loss < 0.05 * found.single_loss
    assert found.gain > 0.9


def test_a_candidate_that_is_best_alone_stays_alone():
    library = make_library()
    for number in range(2):
        truth = draw(20 + number, noise=0.1)
        library.add("good", number, truth)
        library.add("bad", number, 3 * truth + 2.0)
    found = library.combine()
    assert found.weights == {"good": 1.0}
    assert not found.is_better


@pytest.mark.parametrize(("best", "is_taken"), [("gbm", True), ("repeat", False)])
def test_an_ensemble_that_is_as_good_is_taken_unless_nothing_learnt_is(best, is_taken):
    """Selected without a part it is no better there than one model is."""
    library = make_library()
    for number in range(2):
        shared = draw(60 + number)
        library.add(best, number, shared)
        library.add("other", number, shared + 0.05 * draw(70 + number))
    found = library.combine()
    found = found._replace(weights={best: 0.5, "other": 0.5}, gain=-0.001)
    assert found.is_better == is_taken
    assert not found._replace(gain=-0.02).is_better


def test_members_are_at_most_as_many_as_allowed():
    library = make_library(blocks=3)
    for number in range(3):
        for name in range(20):
            library.add(f"{name}", number, draw(100 * number + name))
    found = library.combine(max_members=3)
    assert len(found.weights) <= 3
    assert math.isclose(sum(found.weights.values()), 1.0)
    assert len(library.combine().weights) <= 8


def test_noise_alone_gains_nothing_over_the_luckiest_out_of_sample():
    """The mean of many models without information is better than one of them; but a copy of one
    model adds nothing."""
    library = make_library()
    for number in range(2):
        errors = draw(number)
        for name in range(6):
            library.add(f"{name}", number, errors)
    assert library.combine().gain == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("steps", "share"), [(60, 0.125), (1, 0.0)])
def test_few_separate_windows_hardly_tell_weights(steps, share):
    """Each of the best eight then has at least its share of the equal weights."""
    library = Library([Block(torch.arange(600), 1.0)], "mse", steps=steps)
    for name in range(12):
        library.add(f"{name}", 0, draw(name, 600) * (1 + 0.001 * name))
    combination = library.combine()
    equal = 30 / (30 + library.num_separate)
    assert math.isclose(sum(combination.weights.values()), 1.0)
    assert len(combination.weights) <= 8
    assert min(combination.weights.values()) >= share * equal
    assert set(library.list_members()) == set(combination.weights)


def test_an_advantage_is_measured_where_the_ensemble_was_not_selected():
    library = make_library()
    for number in range(2):
        shared = draw(40 + number)
        library.add("a", number, shared)
        library.add("same", number, shared)
        library.add("worse", number, 2 * shared)
    found = library.combine()
    assert found.advantages["same"].gain == pytest.approx(0.0, abs=1e-6)
    assert found.advantages["worse"].gain == pytest.approx(0.75, abs=1e-3)
    assert found.advantages["worse"].certainty > 3


@pytest.mark.parametrize("metric", ["mae", "quantile", "classes"])
def test_other_losses(metric):
    levels = (0.1, 0.5, 0.9) if metric == "quantile" else ()
    library = make_library(metric, quantiles=levels)
    for number in range(2):
        if metric == "classes":
            good, bad = torch.full((200,), 0.9), torch.full((200,), 0.2)
        else:
            good, bad = draw(number, noise=0.1), draw(number, level=2.0)
        if levels:
            good, bad = good[:, None].expand(-1, 3), bad[:, None].expand(-1, 3)
        library.add("good", number, good)
        library.add("bad", number, bad)
    assert library.rank() == ["good", "bad"]
    if metric == "classes":
        assert library.compute_loss("good") == pytest.approx(-math.log(0.9))
    if metric == "quantile":
        errors = library.errors["bad"][0].numpy()
        levels = np.array(levels)
        wanted = np.maximum(-levels * errors, (1 - levels) * errors).mean()
        assert library.losses["bad"][0] == pytest.approx(wanted, rel=1e-5)


def test_only_the_best_candidates_keep_their_errors():
    library = make_library(blocks=1)
    for name in range(60):
        library.add(f"{name}", 0, torch.full((10,), float(name + 1)))
    assert len(library.errors) == 48
    assert "0" in library.errors
    assert "59" not in library.errors
    assert len(library.rank()) == 60


@pytest.mark.parametrize(("trivial", "is_member"), [(1.4, False), (1.6, True)])
def test_what_learnt_less_than_nothing_is_no_member(trivial, is_member):
    """Far worse than the best and worse than repeating the last value, whatever it cancels."""
    errors = torch.tensor([1.0, -1.0]).repeat(60)
    library = Library([Block(torch.arange(120), 1.0)], "mse", steps=1)
    library.add("good", 0, errors)
    library.add("bad", 0, -(1.5**0.5) * errors)
    library.add("repeat", 0, trivial**0.5 * torch.ones(120))
    library.add("seasonal", 0, 3.0 * torch.ones(120))
    assert ("bad" in library.combine().weights) == is_member
    assert ("bad" in library.list_members()) == is_member


def test_few_separate_windows_leave_far_worse_candidates_out():
    """Errors of opposite sign cancel, which few windows may show by chance."""
    errors = torch.tensor([1.0, -1.0]).repeat(60)
    for steps, members in ((24, {"good"}), (1, {"good", "bad"})):
        library = Library([Block(torch.arange(60), 1.0)], "mse", steps=steps)
        library.add("good", 0, errors)
        library.add("bad", 0, -1.5 * errors)
        assert library.num_separate == -(-60 // steps)
        combination = library.combine()
        assert combination is not None
        assert set(combination.weights) == members
        assert set(library.list_members()) == members
