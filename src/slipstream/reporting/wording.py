"""A run's figures in words, for the report and the terminal alike."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slipstream.reporting.layouts import choose_layout

WORTH_TELLING = 0.01
"""Share of the time from which on a GPU that was held back is told of"""


def describe_verdict(summary: dict[str, Any]) -> str:
    """One sentence: does the model beat what costs seconds?"""
    if summary.get("classes"):
        return _class_verdict(summary)
    told_of = choose_layout(summary)
    which, what = told_of.which, f"the {told_of.what}"
    model = summary["scaled"][which]
    beside = {name: found["scaled"][which] for name, found in summary["baselines"].items() if found}
    kind = summary["judged_by"]
    closest = min(beside, key=lambda name: sort_key(beside[name][kind]))
    errors = [format_number(one[kind]) for one in (model, beside[closest])]
    told = f"{kind.upper()} {errors[0]} against {errors[1]}"
    if not summary["beaten_by"]:
        return (
            f"The model beats every baseline on {what}; the closest is {closest}: {told}, scaled."
        )
    return (
        f"The model loses to {' and '.join(summary['beaten_by'])} on {what}: {told}, scaled. "
        f"As it stands, {closest} is the better choice."
    )


LOWER_IS_BETTER = {"log_loss": True, "balanced_accuracy": False}
METRIC_NAMES = {"log_loss": "log-loss", "balanced_accuracy": "balanced accuracy"}


def _class_verdict(summary: dict[str, Any]) -> str:
    """Against the majority class first: if nothing beats it, there is nothing to be seen."""
    against = summary["against_majority"]
    surer, truer = (beats_majority(summary, "model", key) for key in LOWER_IS_BETTER)
    others = [
        f"{name} does by its {' and '.join(METRIC_NAMES[key] for key in won)}"
        for name in against
        if name != "model"
        and (won := [k for k in LOWER_IS_BETTER if beats_majority(summary, name, k)])
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


def beats_majority(summary: dict[str, Any], name: str, key: str) -> bool:
    """Whether the difference to the majority class is on the right side, its interval with it."""
    one, sign = summary["against_majority"][name][key], -1 if LOWER_IS_BETTER[key] else 1
    bounds = one["interval"] or [one["difference"]]
    return summary["intervals"]["enough"] and all(sign * value > 0 for value in bounds)


def _gap(summary: dict[str, Any], key: str) -> str:
    model, majority = (
        one["metrics"]["test"][key] for one in (summary, summary["baselines"]["majority"])
    )
    found = summary["against_majority"]["model"][key]
    told = f"{METRIC_NAMES[key]} {model:.3f} against {majority:.3f}"
    if not found["interval"]:
        return told
    low, high = (f"{bound:+.3f}" for bound in found["interval"])
    return f"{told} (difference {found['difference']:+.3f}, 95 % interval {low} to {high})"


def _beside_logistic(summary: dict[str, Any]) -> str:
    loss = summary["baselines"]["logistic"]["metrics"]["test"]["log_loss"]
    if "logistic" in summary["beaten_by"]:
        return f" It loses to logistic, whose log-loss is {loss:.3f}."
    return f" It beats logistic, whose log-loss is {loss:.3f}."


def is_beaten(summary: dict[str, Any]) -> bool:
    """Whether the verdict is no good news."""
    if not summary.get("classes"):
        return bool(summary["beaten_by"])
    return bool(summary["beaten_by"]) or not all(
        beats_majority(summary, "model", key) for key in LOWER_IS_BETTER
    )


def sort_key(error: float | None) -> float:
    """To rank by: what means nothing comes last."""
    return math.inf if error is None else error


def get_metric_name(key: str) -> str:
    return METRIC_NAMES.get(key, key.upper())


def format_number(value: float | None, decimals: int = 8, *, figures: int = 4) -> str:
    """So many figures and at most so many decimals."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, figures - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, decimals)}f}"


def format_seconds(value: float) -> str:
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_energy(summary: dict[str, Any]) -> str:
    """The GPU's, of the whole run; empty where none told it."""
    found = summary.get("monitor") or {}
    if found.get("energy_wh") is None:
        return ""
    watt_hours = found["energy_wh"]
    told = f"{watt_hours:.3g} Wh" if watt_hours < 999.5 else f"{watt_hours / 1e3:.3g} kWh"
    resumed = found["seconds"] > summary["seconds"]
    return told + (" since the run began" if resumed else "")


def describe_usage(summary: dict[str, Any]) -> Iterator[str]:
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


def describe_estimate(summary: dict[str, Any]) -> str:
    """How long training was expected to take, and what it took; empty where nobody knew."""
    found = summary.get("estimate") or {}
    told = []
    if found.get("before_s") is not None:
        how = " by a guess" if found["before_is"] == "guessed" else ""
        told.append(f"expected {format_seconds(found['before_s'])}{how}")
    if found.get("after_ten_steps_s") is not None:
        told.append(f"after ten steps {format_seconds(found['after_ten_steps_s'])}")
    if not told:
        return ""
    steps, planned = summary["steps"], found["planned_steps"]
    ran = f" for {steps:,} of {planned:,} steps" if planned and steps < planned else ""
    return f"{', '.join(told)}; training took {format_seconds(found['took_s'])}{ran}"


def describe_coverage(coverage: dict[str, float]) -> str:
    """How many of the truths lay within the intervals."""
    told = [f"{100 * share:.1f} % within those of {level} %" for level, share in coverage.items()]
    return f"intervals: {', '.join(told)}"


def describe_lanes(summary: dict[str, Any]) -> Iterator[str]:
    """What several models gave beyond what one gives; nothing where there is one."""
    if "lanes" not in summary:
        return
    spread, folds, together = summary["spread"], summary["folds"], summary["ensemble"]
    headline = choose_layout(summary).headline
    name = headline.heading
    if spread:
        found = spread[headline.key]
        yield (
            f"{_seeds(summary)} seeds: test {name} {format_number(found['mean'])} ± "
            f"{format_number(found['sd'])} ({format_number(found['min'])} to "
            f"{format_number(found['max'])})"
        )
    if folds:
        told = ", ".join(format_number(headline.of(fold)) for fold in folds)
        yield f"{len(folds)} folds: test {name} {told}; the model is the last fold's"
    if together:
        single, mean = (headline.of(one) for one in (summary, together))
        better = summary["uses"] == "ensemble"
        chosen = "so predict takes it" if better else "so predict takes the single model"
        side = "lower" if better else "not lower"
        yield (
            f"their mean: test {name} {format_number(mean)} instead of {format_number(single)}; "
            "its validation "
            f"error is {side}, {chosen} unless told otherwise"
        )
    coverage = (together if summary["uses"] == "ensemble" else summary)["coverage"]
    if coverage:
        yield describe_coverage(coverage)


def _seeds(summary: dict[str, Any]) -> int:
    return len({lane["seed"] for lane in summary["lanes"]})


def format_value(value: Any) -> str:
    """A setting's value, with four figures where it has more."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Settings without their section, where no two are then alike."""
    last = {name: name.partition(".")[2] or name for name in names}
    count = collections.Counter(last.values())
    return {name: short if count[short] == 1 else name for name, short in last.items()}


def describe_settings(params: Mapping[str, Any]) -> str:
    """A trial's settings in one line."""
    short = shorten_names(params)
    return ", ".join(f"{short[name]} {format_value(value)}" for name, value in params.items())


def describe_search_verdict(summary: Mapping[str, Any]) -> str:
    """One sentence or two: how much better than the defaults, given what the seed alone does?"""
    found, best = summary["comparison"], summary["best"]
    if found is None:
        lowest = (
            f"Trial {best['trial']} has the lowest validation {summary['metric']}, "
            f"{format_number(best['value'])}."
        )
        if summary.get("pending"):
            resume = f"slipstream tune --resume {summary['run']}"
            return (
                f"{lowest} The search is not concluded: {summary['pending']}; go on with: {resume}"
            )
        return (
            f"{lowest} It was not trained again (tune.retrain = 0): how much of it "
            "is luck is not known, and nobody has looked at the test set."
        )
    told = _incomparable(found) if found["low"] is None else _compared(found)
    beaten = summary["test"]["best"].get("beaten_by")
    return told + (f" Still, it loses to {' and '.join(beaten)}." if beaten else "")


def _compared(found: Mapping[str, Any]) -> str:
    before, after = found["default"], found["chosen"]
    percent = found["gain_percent"]
    share = "" if percent is None else f", {-percent:+.0f} %"
    means = f"{format_number(before['mean'])} → {format_number(after['mean'])}"
    change = f"test {get_metric_name(found['metric'])} {means}{_scaled(found)}"
    seeds = f"{after['n']} seeds each"
    if before["n"] != after["n"]:
        seeds = f"{before['n']} and {after['n']} seeds"
    interval = (
        f"{100 * found['level']:.0f} % interval of the gain {format_number(found['low'])} to "
        f"{format_number(found['high'])}, {seeds}"
    )
    return {
        "better": f"Better than the defaults: {change}{share} ({interval}).",
        "worse": f"Worse than the defaults: {change}{share} ({interval}). Keep the defaults.",
        "no difference shown": f"No difference shown: {change}{share}, which the seeds alone may "
        f"do ({interval}). More seeds (tune.retrain_seeds) would tell finer.",
    }[found["verdict"]]


def _scaled(found: Mapping[str, Any]) -> str:
    return ", scaled" if found.get("scaled") else ""


def _incomparable(found: Mapping[str, Any]) -> str:
    """Where there is no gain to tell: one of the two has no model, or not two seeds."""
    before, after = found["default"], found["chosen"]
    match found["verdict"]:
        case "default failed":
            mean = f"{format_number(after['mean'])}{_scaled(found)}"
            error = f"test {get_metric_name(found['metric'])} {mean}"
            return (
                f"Only the chosen settings reached a finite loss ({error}); the defaults did not."
            )
        case "chosen failed":
            return (
                "The chosen settings did not reach a finite loss from other seeds. Keep the "
                "defaults, or search settings that are less extreme (tune.space)."
            )
        case "both failed":
            return (
                "Neither the chosen settings nor the defaults reached a finite loss from other "
                "seeds; lower train.lr, or set train.clip."
            )
    means = f"{format_number(before['mean'])} → {format_number(after['mean'])}"
    return (
        f"Too few seeds reached a finite loss to tell a difference from chance: test "
        f"{get_metric_name(found['metric'])} {means}{_scaled(found)}, {before['n']} and "
        f"{after['n']} "
        "seeds."
    )


def get_chosen(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """The trial whose settings best.toml has: chosen from those trained again, else the best."""
    again = [one for one in summary["retrained"] if one["chosen"]]
    found: Mapping[str, Any] = again[0] if again else summary["best"]
    return found


def describe_search(summary: Mapping[str, Any]) -> Iterator[str]:
    """What a search took, and what its best score was worth."""
    counts, packs = summary["trials"], summary["packs"]
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    yield (
        f"{sum(counts.values())} trials in {format_seconds(summary['search_s'])}: {told}; "
        f"{summary['trials_per_hour']:,.0f} an hour, in {packs} pack{'' if packs == 1 else 's'}; "
        f"Optuna took {100 * summary['optuna_share']:.1f} % of the time"
    )
    best, lowest = get_chosen(summary), summary["best"]
    if "losses" in best:
        yield (
            f"chosen: {best['what']}, validation {summary['metric']} "
            f"{format_number(best['mean'])} ± "
            f"{format_number(best['sd'])} over {len(best['losses'])} seeds that the search had "
            "not used"
        )
    if best["trial"] != lowest["trial"]:
        told = f"trial {lowest['trial']} had the lowest score ({format_number(lowest['value'])})"
        yield f"in the search, {told}; over other seeds, {best['what']} has the lower mean"
    yield from summary.get("findings", ())


def describe_pruning(summary: Mapping[str, Any], epochs: tuple[float, float]) -> str:
    """How many trials were ended early, and what that saved; `epochs` trained and planned."""
    counts = summary["trials"]
    total, pruned, (trained, planned) = sum(counts.values()), counts["pruned"], epochs
    told = f"{pruned} of {total} trials pruned ({100 * pruned / max(total, 1):.0f} %)"
    saved = max(planned - trained, 0.0)
    return (
        f"{told}; {trained:,.0f} of {planned:,.0f} epochs trained, {100 * saved / planned:.0f} % "
        "saved by pruning and early stopping"
        if planned
        else told
    )
