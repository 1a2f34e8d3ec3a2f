"""Weights of an ensemble's members: never negative, adding up to one, the best there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slipstream.inference.mixture import fit_to_classes, fit_weights

GRID = [
    np.array([a, b, 10 - a - b]) / 10
    for a, b in itertools.product(range(11), range(11))
    if a + b <= 10
]
"""Weights of three members, a tenth apart"""


def draw_errors(seed):
    draw = np.random.default_rng(seed)
    mix, sizes = draw.normal(size=(3, 3)), draw.uniform(0.2, 2, size=(3, 1))
    return sizes * (mix @ draw.standard_t(3, size=(3, 500))) + draw.normal(size=(3, 1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("metric", ["mse", "mae"])
def test_no_other_weights_have_a_lower_error(seed, metric):
    errors = draw_errors(seed)

    def compute_error(weights):
        mean = weights @ errors
        return np.abs(mean).mean() if metric == "mae" else np.square(mean).mean()

    weights = fit_weights(errors, metric)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    assert compute_error(weights) <= min(map(compute_error, GRID)) * (1 + 1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_weights_have_a_lower_log_loss(seed):
    likely = np.random.default_rng(seed).beta([[2], [1], [3]], [[1], [1], [4]], size=(3, 500))

    def compute_loss(weights):
        return -np.log(weights @ likely).mean()

    weights = fit_to_classes(likely)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    assert compute_loss(weights) <= min(map(compute_loss, GRID)) * (1 + 1e-4)


def test_independent_errors_count_by_their_precision():
    errors = np.array([[1.0, -1.0, 1.0, -1.0], [2.0, 2.0, -2.0, -2.0]])
    np.testing.assert_allclose(fit_weights(errors, "mse"), [0.8, 0.2], rtol=1e-6)


def test_copies_of_a_model_share_its_weight():
    errors = np.random.default_rng(0).normal(size=500)
    np.testing.assert_allclose(fit_weights(np.stack([errors, errors]), "mse"), 0.5, atol=1e-3)


def test_a_member_that_only_adds_error_has_no_weight():
    good = np.random.default_rng(0).normal(size=500)
    assert fit_weights(np.stack([good, 3 * good]), "mse").tolist() == [1.0, 0.0]


def test_a_classifier_that_only_adds_error_has_no_weight():
    good = np.random.default_rng(0).uniform(0.3, 0.9, size=500)
    assert fit_to_classes(np.stack([0.9 * good, good, 0.5 * good])).tolist() == [0.0, 1.0, 0.0]


def test_members_without_error_count_the_same():
    assert fit_weights(np.zeros((2, 10)), "mae").tolist() == [0.5, 0.5]
