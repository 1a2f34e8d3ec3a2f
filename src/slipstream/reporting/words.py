"""A run's figures in words, for the report and the terminal alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

WORTH_TELLING = 0.01
"""Share of the time from which on a GPU that was held back is told of"""


def verdict(summary: dict[str, Any]) -> str:
    """One sentence: does the model beat what costs seconds?"""
    masked = summary.get("objective") == "masked"
    which, what = ("val", "the masked rows") if masked else ("test", "the test set")
    model = summary["scaled"][which]
    beside = {name: found["scaled"][which] for name, found in summary["baselines"].items() if found}
    kind = summary["judged_by"]
    closest = min(beside, key=lambda name: beside[name][kind] or math.inf)
    told = f"{kind.upper()} {number(model[kind])} against {number(beside[closest][kind])}"
    if not summary["beaten_by"]:
        return (
            f"The model beats every baseline on {what}; the closest is {closest}: {told}, scaled."
        )
    return (
        f"The model loses to {' and '.join(summary['beaten_by'])} on {what}: {told}, scaled. "
        f"As it stands, {closest} is the better choice."
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
    if spread:
        mae = spread["mae"]
        yield (
            f"{_seeds(summary)} seeds: test MAE {number(mae['mean'])} ± {number(mae['sd'])} "
            f"({number(mae['min'])} to {number(mae['max'])})"
        )
    if folds:
        errors = [fold["metrics"]["test"]["mae"] for fold in folds]
        told = ", ".join(number(error) for error in errors)
        yield f"{len(folds)} folds: test MAE {told}; the model is the last fold's"
    if together:
        single, mean = (one["metrics"]["test"]["mae"] for one in (summary, together))
        better = summary["uses"] == "ensemble"
        chosen = "so predict takes it" if better else "so predict takes the single model"
        side = "lower" if better else "not lower"
        yield (
            f"their mean: test MAE {number(mean)} instead of {number(single)}; its validation "
            f"error is {side}, {chosen} unless told otherwise"
        )
    yield covered((together if summary["uses"] == "ensemble" else summary)["coverage"])


def _seeds(summary: dict[str, Any]) -> int:
    return len({lane["seed"] for lane in summary["lanes"]})
