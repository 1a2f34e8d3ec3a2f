from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.tools.bench import cases, parity
from tests.tools.bench.small import small_case


def said(before, after, margin=0.005):
    return parity.judge_difference(before, after, margin=margin).conclusion


def test_equal_results_show_no_loss():
    assert said([1.0, 1.2, 0.9], [1.0, 1.2, 0.9]) == "no loss shown"


def test_better_results_show_no_loss():
    assert said([1.0, 1.2, 0.9], [0.95, 1.13, 0.86]) == "no loss shown"


def test_a_clear_loss_is_shown():
    assert said([1.0, 1.2, 0.9], [1.05, 1.26, 0.946]) == "loss shown"


def test_seeds_that_disagree_are_noisy():
    assert said([1.0, 1.2, 0.9], [1.2, 1.0, 0.95]) == "too noisy, use more seeds"


def test_a_loss_within_the_margin_is_none():
    assert said([1.0, 2.0, 3.0], [1.001, 2.002, 3.003], margin=0.005) == "no loss shown"
    assert said([1.0, 2.0, 3.0], [1.001, 2.002, 3.003], margin=0.0005) == "loss shown"


def test_the_interval_is_students():
    """Three differences of 0, 1 and 2 %: mean 1, standard error 0.577, t(2) = 4.3027."""
    found = parity.judge_difference([1.0, 1.0, 1.0], [1.0, 1.01, 1.02], margin=0.005)
    assert found.difference == pytest.approx(0.01)
    assert found.high - found.difference == pytest.approx(0.0057735 * 4.302653, rel=1e-4)


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=9), st.floats(0.9, 1.1))
def test_the_mean_lies_in_its_interval(before, factor):
    found = parity.judge_difference(before, [value * factor for value in before], margin=0.005)
    assert found.low - 1e-12 <= found.difference <= found.high + 1e-12


@pytest.mark.slow
def test_both_ways_see_the_same_windows_and_agree():
    outcome = parity.measure_parity(
        [small_case(epochs=2)], seeds=3, minutes=5.0, margin=0.005, watch=lambda _, __: None
    )
    naive, auto = outcome.rows
    assert len(naive.repeats) == len(auto.repeats) == 3
    assert naive.extra["windows"] == auto.extra["windows"] == 2 * 605
    assert auto.repeats == pytest.approx(naive.repeats, rel=1e-4)
    assert outcome.settings["verdicts"]["small"]["said"] == "no loss shown"
    assert "no loss shown" in outcome.headline


@pytest.mark.slow
def test_no_time_at_all_is_said():
    with pytest.raises(UserError, match="give more --minutes"):
        parity.measure_parity(
            [small_case(epochs=2)], seeds=3, minutes=1e-4, margin=0.005, watch=lambda _, __: None
        )


def test_two_seeds_are_too_few():
    with pytest.raises(UserError, match="at least 3"):
        parity.measure_parity([], seeds=2, minutes=1.0, margin=0.005, watch=lambda _, __: None)


def test_an_unknown_case_is_named():
    with pytest.raises(UserError, match="no case X; the cases are A, B"):
        cases.build_standard_cases(["X"])
