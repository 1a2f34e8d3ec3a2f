"""Compares the test errors of the chosen settings with those of the config without a search."""

from __future__ import annotations

import math
from typing import Any

from slipstream import stats
from slipstream.scoring.summary import get_error, get_error_over_seeds


def compare_tests(tested: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare the test runs "best" and "default".

    The gain is None where one of them has no model or fewer than two seeds; the verdict then says
    so. Errors of numbers are in standardised units, so that no target dominates by its unit.
    """
    chosen, default = tested["best"], tested["default"]
    if _has_spread(chosen) and _has_spread(default):
        return compare_test_errors(chosen, default)
    with_model = [test for test in (chosen, default) if not test.get("failed")]
    metric = with_model[0]["judged_by"] if with_model else None
    return {
        "metric": metric,
        "scaled": any("scaled" in test for test in with_model),
        "default": _summarize_error(default, metric),
        "chosen": _summarize_error(chosen, metric),
        **dict.fromkeys(("gain", "gain_percent", "low", "high")),
        "level": stats.LEVEL,
        "verdict": {
            (False, False): "both failed",
            (True, False): "default failed",
            (False, True): "chosen failed",
            (True, True): "too few seeds",
        }[chosen in with_model, default in with_model],
    }


def compare_test_errors(chosen: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return how much lower the chosen settings' test error is, with Welch's interval."""
    metric = chosen["judged_by"]
    before, after = (get_error_over_seeds(test, metric) for test in (default, chosen))
    assert before is not None
    assert after is not None
    gain = stats.compute_welch_interval(before, after)
    return {
        "metric": metric,
        "scaled": bool(chosen.get("scaled_spread")),
        "default": before,
        "chosen": after,
        "gain": gain.mean,
        "gain_percent": 100 * gain.mean / before["mean"] if before["mean"] else None,
        "low": gain.low,
        "high": gain.high,
        "level": stats.LEVEL,
        "verdict": gain.judge(higher_is_better=True),
    }


def _has_spread(test: dict[str, Any]) -> bool:
    """Whether at least two seeds have a finite error."""
    if test.get("failed"):
        return False
    spread = get_error_over_seeds(test, test["judged_by"])
    if spread is None:
        return False
    return all(spread[key] is not None and math.isfinite(spread[key]) for key in ("mean", "sd"))


def _summarize_error(test: dict[str, Any], metric: str | None) -> dict[str, Any] | None:
    """Return the mean and deviation over the seeds, or the single value of one seed."""
    if test.get("failed") or metric is None:
        return None
    value = get_error(test, "test", metric)
    return get_error_over_seeds(test, metric) or stats.summarize_spread([value])
