"""The comparison of the chosen settings with the defaults."""

from __future__ import annotations

import math

import pytest

from slipstream.tuning import comparison


def test_the_verdict_follows_from_welchs_interval():
    def told(mean, sd, n=3):
        return {"judged_by": "mse", "spread": {"mse": {"mean": mean, "sd": sd, "n": n}}}

    clear = comparison.compare_test_errors(told(1.0, 0.1), told(2.0, 0.1))
    assert clear["verdict"] == "better"
    assert clear["gain"] == 1.0
    # Welch by hand: standard error 0.1 * sqrt(2 / 3), 4 degrees of freedom
    assert clear["low"] == pytest.approx(1 - 2.7764 * 0.1 * math.sqrt(2 / 3), abs=1e-4)
    assert (
        comparison.compare_test_errors(told(1.0, 1.0), told(2.0, 1.0))["verdict"]
        == "no difference shown"
    )
    assert comparison.compare_test_errors(told(3.0, 0.1), told(2.0, 0.1))["verdict"] == "worse"


def test_no_target_dominates_the_verdict_by_its_unit():
    """A column in mA beside one in V: what is better in standardised units is better."""

    def told(scaled, physical):
        spreads = {"spread": physical, "scaled_spread": scaled}
        over = {key: {"mse": {"mean": mean, "sd": 0.01, "n": 3}} for key, mean in spreads.items()}
        return {"judged_by": "mse"} | over

    found = comparison.compare_test_errors(told(0.5, 4e6), told(1.0, 1e6))
    assert found["verdict"] == "better"
    assert found["gain"] == 0.5
