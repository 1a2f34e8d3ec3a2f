"""The scores of a finished run, whatever kind it is, from its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from slipstream.reporting.formatting import SCALED
from slipstream.stats import HIGHER_IS_BETTER


class Scores(NamedTuple):
    """One metric of a run, and of the best baseline on the same set: the test set, if scored."""

    metric: str
    test: float | None = None
    val: float | None = None
    baseline: str | None = None
    baseline_error: float | None = None
    verdict: str | None = None
    """Against the best baseline; None where there is no interval of the difference"""
    interval: tuple[float, float] | None = None
    """Of `against_baseline`"""

    @property
    def against_baseline(self) -> float | None:
        """The run relative to the best baseline: -0.2 is an error 20 % lower. Of a metric that is
        better when higher, the difference."""
        error = self.val if self.test is None else self.test
        if error is None or self.baseline_error is None:
            return None
        if self.metric in HIGHER_IS_BETTER:
            return error - self.baseline_error
        return error / self.baseline_error - 1 if self.baseline_error else None


def read_scores(kind: str, summary: Mapping[str, Any], metric: str | None) -> Scores:
    """Read a metric of what the run predicts with; by default MAE, or log-loss for classes."""
    result = find_result(kind, summary)
    if metric is None:
        metric = choose_metric(kind, summary)
    test, val = (read_metric(result, which, metric) for which in ("test", "val"))
    errors = {
        name: value
        for name, one in (result.get("baselines") or {}).items()
        if one
        and (value := read_metric(one, "val" if test is None else "test", metric)) is not None
    }
    best = min(errors, key=lambda name: rank(errors[name], metric), default=None)
    scores = Scores(metric, test, val, best, errors[best] if best else None)
    gap = _find_difference(result, metric, best)
    bounds = gap.get("interval" if metric in HIGHER_IS_BETTER else "relative_interval")
    if not bounds:
        return scores
    return scores._replace(verdict=gap["verdict"], interval=(bounds[0], bounds[1]))


def _find_difference(
    result: Mapping[str, Any], metric: str, baseline: str | None
) -> Mapping[str, Any]:
    """Return how a metric differs from a baseline's, with its interval; empty where that is not
    known, as of version 0.1 and of metrics that are not compared window by window."""
    by_metric = (result.get("against_baselines") or {}).get("differences") or {}
    gap: Mapping[str, Any] = by_metric.get(metric, {}).get(baseline, {})
    return gap


def choose_metric(kind: str, summary: Mapping[str, Any]) -> str:
    """Return the metric that describes a run in a table; of classes, what it is judged by."""
    if kind == "probe":
        return f"{SCALED if summary['scaled'] else ''}{summary['judged_by']}"
    result = find_result(kind, summary)
    if "log_loss" not in _list_metrics(result):
        return "mae"
    return str(result.get("judged_by") or summary.get("judged_by") or "log_loss")


def _list_metrics(result: Mapping[str, Any]) -> set[str]:
    return {name for one in (result.get("metrics") or {}).values() for name in one}


def find_result(kind: str, summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a summary with the metrics of what the run predicts with.

    For a search that is the retrained best config, for a probe the fine-tuned model, for a run
    with repeats the single model or the ensemble, whichever `predict` uses.
    """
    if kind == "search":
        best: Mapping[str, Any] = summary["test"].get("best") or {}
        return best
    if kind == "probe":
        return _convert_probe(summary)
    if summary.get("uses") == "ensemble" and summary.get("ensemble"):
        return {"baselines": summary["baselines"], **summary["ensemble"]}
    return summary


def _convert_probe(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Arrange a probe's metrics as those of a training run."""
    section = "scaled" if summary["scaled"] else "metrics"
    metrics = summary["ways"]["fine-tuned"]["metrics"]
    test = {name: one["mean"] for name, one in metrics.items()}
    baselines = {name: {section: {"test": values}} for name, values in summary["baselines"].items()}
    return {section: {"test": test}, "baselines": baselines}


def read_metric(result: Mapping[str, Any], which: str, metric: str) -> float | None:
    """Return a metric of one set; None where the run has no such metric."""
    section = "scaled" if metric.startswith(SCALED) else "metrics"
    value = ((result.get(section) or {}).get(which) or {}).get(metric.removeprefix(SCALED))
    return None if value is None else float(value)


def read_spread(result: Mapping[str, Any], metric: str) -> Mapping[str, Any] | None:
    """Return how a test metric varies over the repeats; None without repeats."""
    section = "scaled_spread" if metric.startswith(SCALED) else "spread"
    try:
        spread: Mapping[str, Any] = result[section][metric.removeprefix(SCALED)]
        return spread if spread["sd"] is not None and spread["n"] > 1 else None
    except (LookupError, TypeError):  # also where version 0.1 wrote none
        return None


def rank(value: float | None, metric: str) -> float:
    """Return a number that is lower the better the value is; last where there is none."""
    if value is None:
        return math.inf
    if metric in HIGHER_IS_BETTER:
        return -value
    return abs(value) if metric.endswith("bias") else value
