"""Compares the test errors of the chosen settings with those of the config without a search."""

from __future__ import annotations

import math
from typing import Any

from slipstream.scoring.summary import get_error, get_error_over_seeds

LEVEL = 0.95
"""Of the confidence interval"""


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
        "level": LEVEL,
        "verdict": {
            (False, False): "both failed",
            (True, False): "default failed",
            (False, True): "chosen failed",
            (True, True): "too few seeds",
        }[chosen in with_model, default in with_model],
    }


def compare_test_errors(chosen: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return how much lower the chosen settings' test error is, with Welch's interval."""
    from scipy import stats  # its import takes a second, and workers do not need it

    metric = chosen["judged_by"]
    a, b = (get_error_over_seeds(test, metric) for test in (default, chosen))
    assert a is not None
    assert b is not None
    variances = [one["sd"] ** 2 / one["n"] for one in (a, b)]
    gain, error = a["mean"] - b["mean"], math.sqrt(sum(variances))
    freedom = sum(variances) ** 2 / max(
        sum(v**2 / (one["n"] - 1) for v, one in zip(variances, (a, b), strict=True)), 1e-300
    )
    half = float(stats.t.ppf((1 + LEVEL) / 2, max(freedom, 1.0))) * error if error else 0.0
    low, high = gain - half, gain + half
    return {
        "metric": metric,
        "scaled": bool(chosen.get("scaled_spread")),
        "default": a,
        "chosen": b,
        "gain": gain,
        "gain_percent": 100 * gain / a["mean"] if a["mean"] else None,
        "low": low,
        "high": high,
        "level": LEVEL,
        "verdict": "better" if low > 0 else "worse" if high < 0 else "no difference shown",
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
    one_seed = {"mean": value, "sd": None, "min": value, "max": value, "n": 1}
    return get_error_over_seeds(test, metric) or one_seed
