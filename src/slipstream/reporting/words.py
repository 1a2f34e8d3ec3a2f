"""A run's figures in words, for the report and the terminal alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from slipstream.reporting.shown import shown

WORTH_TELLING = 0.01
"""Share of the time from which on a GPU that was held back is told of"""


def verdict(summary: dict[str, Any]) -> str:
    """One sentence: does the model beat what costs seconds?"""
    if summary.get("classes"):
        return _class_verdict(summary)
    model = summary["scaled"]["test"]
    beside = {
        name: found["scaled"]["test"] for name, found in summary["baselines"].items() if found
    }
    kind = summary["judged_by"]
    closest = min(beside, key=lambda name: beside[name][kind] or math.inf)
    told = f"{kind.upper()} {number(model[kind])} against {number(beside[closest][kind])}"
    if not summary["beaten_by"]:
        return (
            f"The model beats every baseline on the test set; the closest is {closest}: {told}, "
            "scaled."
        )
    return (
        f"The model loses to {' and '.join(summary['beaten_by'])} on the test set: {told}, scaled. "
        f"As it stands, {closest} is the better choice."
    )


LOWER_IS_BETTER = {"log_loss": True, "balanced_accuracy": False}
IN_WORDS = {"log_loss": "log-loss", "balanced_accuracy": "balanced accuracy"}


def _class_verdict(summary: dict[str, Any]) -> str:
    """Against the majority class first: if nothing beats it, there is nothing to be seen."""
    against = summary["against_majority"]
    surer, truer = (beats(summary, "model", key) for key in LOWER_IS_BETTER)
    others = [
        f"{name} does by its {' and '.join(IN_WORDS[key] for key in won)}"
        for name in against
        if name != "model" and (won := [k for k in LOWER_IS_BETTER if beats(summary, name, k)])
    ]
    if surer and truer:
        said = "The model beats the majority class"
    elif surer:
        said = "The model's probabilities beat those of the majority class, its choices do not"
    elif truer:
        said = "The model chooses better than the majority class, its probabilities are no better"
    elif others:
        said = f"The model does not beat the majority class ({', '.join(others)})"
    elif not summary["intervals"]["enough"]:
        said = "Too few windows to tell whether the model beats the majority class"
    else:
        said = "Nothing here beats the majority class"
    told = ", ".join(_gap(summary, key) for key in LOWER_IS_BETTER)
    return f"{said}: {told}.{_beside_logistic(summary)}"


def beats(summary: dict[str, Any], name: str, key: str) -> bool:
    """Whether the difference to the majority class is on the right side, its interval with it."""
    one, sign = summary["against_majority"][name][key], -1 if LOWER_IS_BETTER[key] else 1
    bounds = one["interval"] or [one["difference"]]
    return summary["intervals"]["enough"] and all(sign * value > 0 for value in bounds)


def _gap(summary: dict[str, Any], key: str) -> str:
    model, majority = (
        one["metrics"]["test"][key] for one in (summary, summary["baselines"]["majority"])
    )
    found = summary["against_majority"]["model"][key]
    told = f"{IN_WORDS[key]} {model:.3f} against {majority:.3f}"
    if not found["interval"]:
        return told
    low, high = (f"{bound:+.3f}" for bound in found["interval"])
    return f"{told} (difference {found['difference']:+.3f}, 95 % interval {low} to {high})"


def _beside_logistic(summary: dict[str, Any]) -> str:
    loss = summary["baselines"]["logistic"]["metrics"]["test"]["log_loss"]
    if "logistic" in summary["beaten_by"]:
        return f" It loses to logistic, whose log-loss is {loss:.3f}."
    return f" It beats logistic, whose log-loss is {loss:.3f}."


def lost(summary: dict[str, Any]) -> bool:
    """Whether the verdict is no good news."""
    if not summary.get("classes"):
        return bool(summary["beaten_by"])
    return bool(summary["beaten_by"]) or not all(
        beats(summary, "model", key) for key in LOWER_IS_BETTER
    )


def number(value: float | None, decimals: int = 8) -> str:
    """Four figures and at most so many decimals."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, decimals)}f}"


def seconds(value: float) -> str:
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def energy(summary: dict[str, Any]) -> str:
    """The GPU's, of the whole run; empty where none told it."""
    found = summary.get("monitor") or {}
    if found.get("energy_wh") is None:
        return ""
    watt_hours = found["energy_wh"]
    told = f"{watt_hours:.3g} Wh" if watt_hours < 999.5 else f"{watt_hours / 1e3:.3g} kWh"
    resumed = found["seconds"] > summary["seconds"]
    return told + (" since the run began" if resumed else "")


def usage(summary: dict[str, Any]) -> Iterator[str]:
    """How busy the machine was, and what held its GPU back; nothing where nobody looked."""
    found = summary.get("monitor")
    if not found:
        return
    gpu = []
    if found["gpu_utilisation_mean"] is not None:
        gpu.append(f"GPU {found['gpu_utilisation_mean']:.0f} % busy")
    if found["power_mean_w"] is not None:
        gpu.append(f"{found['power_mean_w']:.0f} W")
    if found["gpu_memory_peak_bytes"] is not None:
        gpu.append(f"{found['gpu_memory_peak_bytes'] / 1e9:.1f} GB of its memory in use")
    if found["temperature_max_c"] is not None:
        gpu.append(f"up to {found['temperature_max_c']:.0f} °C")
    cores = f"{found['cpu_percent_mean'] / 100:.1f} CPU cores busy"
    host = f"{cores}, {found['rss_peak_bytes'] / 1e9:.1f} GB of memory at most"
    yield "; ".join(filter(None, (", ".join(gpu), host)))
    for reason, share in found["throttled"].items():
        if share >= WORTH_TELLING:
            yield f"the GPU was held back for {100 * share:.0f} % of the time: {reason}"


def foresight(summary: dict[str, Any]) -> str:
    """How long training was expected to take, and what it took; empty where nobody knew."""
    found = summary.get("estimate") or {}
    told = []
    if found.get("before_s") is not None:
        how = " by a guess" if found["before_is"] == "guessed" else ""
        told.append(f"expected {seconds(found['before_s'])}{how}")
    if found.get("after_ten_steps_s") is not None:
        told.append(f"after ten steps {seconds(found['after_ten_steps_s'])}")
    if not told:
        return ""
    steps, planned = summary["steps"], found["planned_steps"]
    ran = f" for {steps:,} of {planned:,} steps" if planned and steps < planned else ""
    return f"{', '.join(told)}; training took {seconds(found['took_s'])}{ran}"


def covered(coverage: dict[str, float]) -> str:
    """How many of the truths lay within the intervals."""
    told = [f"{100 * share:.1f} % within those of {level} %" for level, share in coverage.items()]
    return f"intervals: {', '.join(told)}"


def lanes_told(summary: dict[str, Any]) -> Iterator[str]:
    """What several models gave beyond what one gives; nothing where there is one."""
    if "lanes" not in summary:
        return
    spread, folds, together = summary["spread"], summary["folds"], summary["ensemble"]
    headline = shown(summary).headline
    name = headline.heading
    if spread:
        found = spread[headline.key]
        yield (
            f"{_seeds(summary)} seeds: test {name} {number(found['mean'])} ± "
            f"{number(found['sd'])} ({number(found['min'])} to {number(found['max'])})"
        )
    if folds:
        told = ", ".join(number(headline.of(fold)) for fold in folds)
        yield f"{len(folds)} folds: test {name} {told}; the model is the last fold's"
    if together:
        single, mean = (headline.of(one) for one in (summary, together))
        better = summary["uses"] == "ensemble"
        chosen = "so predict takes it" if better else "so predict takes the single model"
        side = "lower" if better else "not lower"
        yield (
            f"their mean: test {name} {number(mean)} instead of {number(single)}; its validation "
            f"error is {side}, {chosen} unless told otherwise"
        )
    coverage = (together if summary["uses"] == "ensemble" else summary)["coverage"]
    if coverage:
        yield covered(coverage)


def _seeds(summary: dict[str, Any]) -> int:
    return len({lane["seed"] for lane in summary["lanes"]})
