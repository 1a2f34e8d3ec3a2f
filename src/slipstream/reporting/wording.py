"""A run's results in sentences, for the report and the terminal."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.reporting.formatting import (
    METRIC_NAMES,
    choose_layout,
    format_number,
    format_seconds,
    format_value,
    get_metric_name,
    shorten_names,
    sort_key,
)
from slipstream.text import format_count

MIN_PART_S = 0.05
"""Seconds from which on a part of the time is mentioned"""
TIME_NAMES = {"startup": "start-up", "earlier": "earlier starts"}
MIN_THROTTLED = 0.01
"""Share of the time from which on throttling of the GPU is reported"""
GPU_USAGE = (
    ("gpu_utilisation_mean", 1, "GPU {:.0f} % busy"),
    ("power_mean_w", 1, "{:.0f} W"),
    ("gpu_memory_peak_bytes", 1e9, "{:.1f} GB peak GPU memory"),
    ("temperature_max_c", 1, "up to {:.0f} °C"),
)
ALONE = 0.999
"""The weight from which on an ensemble is one of its members"""
SCRATCH, FINE_TUNED = "scratch", "fine-tuned"
LOWER_IS_BETTER = {"log_loss": True, "balanced_accuracy": False}


def describe_verdict(summary: dict[str, Any]) -> str:
    """State whether the model beats the baselines, in the data's units first."""
    if summary.get("classes"):
        return _describe_class_verdict(summary)
    layout, metric = choose_layout(summary), summary["judged_by"]
    baselines = {name: result for name, result in summary["baselines"].items() if result}

    def read(result: Mapping[str, Any]) -> float | None:
        error: float | None = result["scaled"][layout.subset][metric]
        return error

    closest = min(baselines, key=lambda name: sort_key(read(baselines[name])))
    pair = summary, baselines[closest]
    key = "rmse" if metric == "mse" else metric
    errors = [format_number(one["metrics"][layout.subset][key]) for one in pair]
    scaled = " vs. ".join(format_number(read(one)) for one in pair)
    beaten = summary["beaten_by"]
    relation = f"loses to {' and '.join(beaten)}" if beaten else "beats every baseline"
    verdict = (
        f"The model {relation} on the {layout.description}: {key.upper()} {errors[0]}, {closest} "
        f"{errors[1]} (scaled {metric.upper()} {scaled})."
    )
    if beaten:
        return f"{verdict} {closest} is currently the better choice."
    return verdict + _warn_of_r2(summary)


def _warn_of_r2(summary: dict[str, Any]) -> str:
    """Say that a model which beats the baselines is still worse than a constant; else nothing."""
    r2 = _read_r2(summary)
    if r2 is None or r2 > 0:
        return ""
    where = choose_layout(summary).description
    return (
        f" But its R² is {format_number(r2, 4)}: the constant mean of the {where} would have been "
        "closer."
    )


def _read_r2(summary: dict[str, Any]) -> float | None:
    """Return the share of the variance that the model explains; None where it is undefined."""
    r2: float | None = summary["metrics"][choose_layout(summary).subset]["r2"]
    return None if r2 is None or math.isnan(r2) else r2


def _describe_class_verdict(summary: dict[str, Any]) -> str:
    """Compare with the majority class first: if nothing beats it, the inputs carry no signal."""
    better = [name for key, name in METRIC_NAMES.items() if beats_majority(summary, "model", key)]
    others = [
        f"{name} does in {' and '.join(METRIC_NAMES[key] for key in won)}"
        for name in summary["against_majority"]
        if name != "model"
        and (won := [key for key in LOWER_IS_BETTER if beats_majority(summary, name, key)])
    ]
    if better:
        verdict = "The model beats the majority class"
        for other in METRIC_NAMES.values():
            verdict += f" in {better[0]} but not in {other}" if other not in better else ""
    elif others:
        verdict = f"The model does not beat the majority class ({', '.join(others)})"
    elif not summary["intervals"]["enough"]:
        verdict = "Too few windows to tell whether the model beats the majority class"
    else:
        verdict = "Nothing here beats the majority class"
    gaps = ", ".join(_describe_gap(summary, key) for key in LOWER_IS_BETTER)
    loss = summary["baselines"]["logistic"]["metrics"]["test"]["log_loss"]
    relation = "loses to" if "logistic" in summary["beaten_by"] else "beats"
    return f"{verdict}: {gaps}. It {relation} logistic, whose log-loss is {loss:.3f}."


def beats_majority(summary: dict[str, Any], name: str, key: str) -> bool:
    """Whether the difference to the majority class, and its whole interval, is an improvement."""
    one, sign = summary["against_majority"][name][key], -1 if LOWER_IS_BETTER[key] else 1
    bounds = one["interval"] or [one["difference"]]
    return summary["intervals"]["enough"] and all(sign * value > 0 for value in bounds)


def _describe_gap(summary: dict[str, Any], key: str) -> str:
    pair = summary, summary["baselines"]["majority"]
    model, majority = (one["metrics"]["test"][key] for one in pair)
    gap = summary["against_majority"]["model"][key]
    values = f"{METRIC_NAMES[key]} {model:.3f} vs. {majority:.3f}"
    if not gap["interval"]:
        return values
    low, high = (f"{bound:+.3f}" for bound in gap["interval"])
    return f"{values} (difference {gap['difference']:+.3f}, 95 % interval {low} to {high})"


def is_beaten(summary: dict[str, Any]) -> bool:
    """Whether a baseline or a constant beats the model, or it does not clearly beat the majority
    class."""
    if summary["beaten_by"]:
        return True
    if not summary.get("classes"):
        r2 = _read_r2(summary)
        return r2 is not None and r2 <= 0
    return not all(beats_majority(summary, "model", key) for key in LOWER_IS_BETTER)


def get_total_s(summary: Mapping[str, Any]) -> float:
    """Return the time from the command to the result; version 0.1 left out the start-up."""
    return float((summary.get("time") or {}).get("wall_s", summary["seconds"]))


def list_time_parts(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each part of the time by its name; of version 0.1, of each phase."""
    if "time" not in summary:
        return dict(summary.get("seconds_by_phase") or {})
    sums = ("wall_s", "process_s")
    parts = {name.removesuffix("_s"): s for name, s in summary["time"].items() if name not in sums}
    return {TIME_NAMES.get(name, name): seconds for name, seconds in parts.items()}


def describe_time(summary: Mapping[str, Any]) -> str:
    """List where the time went, without parts that took next to nothing; empty where that is not
    known."""
    parts = {name: s for name, s in list_time_parts(summary).items() if s >= MIN_PART_S}
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())


def format_energy(summary: dict[str, Any]) -> str:
    """Format the GPU's energy over the whole run; empty where it was not measured."""
    monitor = summary.get("monitor") or {}
    if monitor.get("energy_wh") is None:
        return ""
    watt_hours = monitor["energy_wh"]
    energy = f"{watt_hours:.3g} Wh" if watt_hours < 999.5 else f"{watt_hours / 1e3:.3g} kWh"
    resumed = monitor["seconds"] > summary["seconds"]
    return energy + (" since the run began" if resumed else "")


def describe_usage(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the machine's utilisation and throttling; nothing where the monitor was off."""
    monitor = summary.get("monitor")
    if not monitor:
        return
    gpu = [
        text.format(monitor[key] / unit)
        for key, unit, text in GPU_USAGE
        if monitor[key] is not None
    ]
    cores = f"{monitor['cpu_percent_mean'] / 100:.1f} CPU cores busy"
    host = f"{cores}, {monitor['rss_peak_bytes'] / 1e9:.1f} GB peak memory"
    yield "; ".join(filter(None, (", ".join(gpu), host)))
    for reason, share in monitor["throttled"].items():
        if share >= MIN_THROTTLED:
            yield f"the GPU was throttled for {100 * share:.0f} % of the time: {reason}"


def describe_estimate(summary: dict[str, Any]) -> str:
    """Compare the estimated training time with the actual one; empty without an estimate."""
    estimate = summary.get("estimate") or {}
    parts = []
    if estimate.get("before_s") is not None:
        how = " (rule of thumb)" if estimate["before_is"] == "guessed" else ""
        parts.append(f"estimated {format_seconds(estimate['before_s'])}{how}")
    if estimate.get("after_ten_steps_s") is not None:
        parts.append(f"{format_seconds(estimate['after_ten_steps_s'])} after ten steps")
    if not parts:
        return ""
    steps, planned = summary["steps"], estimate["planned_steps"]
    ran = f" for {steps:,} of {planned:,} steps" if planned and steps < planned else ""
    return f"{', '.join(parts)}; training took {format_seconds(estimate['took_s'])}{ran}"


def describe_coverage(coverage: dict[str, float], whose: str = "") -> str:
    """State how many of the true values lie within the intervals."""
    parts = (
        f"{100 * part:.1f} % inside the {level} % interval" for level, part in coverage.items()
    )
    return f"coverage{whose and f' {whose}'}: {', '.join(parts)}"


def describe_lanes(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the spread over seeds, the folds, the ensemble and its coverage, where there are."""
    if "lanes" not in summary:
        return
    spread, folds, ensemble = summary["spread"], summary["folds"], summary["ensemble"]
    headline = choose_layout(summary).headline
    name = headline.heading
    if spread:
        one = {key: format_number(value) for key, value in spread[headline.key].items()}
        seeds = len({lane["seed"] for lane in summary["lanes"]})
        values = f"{one['mean']} ± {one['sd']} ({one['min']} to {one['max']})"
        yield f"{seeds} seeds: test {name} {values}"
    if folds:
        errors = ", ".join(format_number(headline.read(fold)) for fold in folds)
        yield f"{len(folds)} folds: test {name} {errors}; the model is the last fold's"
    if ensemble:
        single, mean = (format_number(headline.read(one)) for one in (summary, ensemble))
        used = "the ensemble" if summary["uses"] == "ensemble" else "the single model"
        yield (
            f"ensemble: test {name} {mean}, single model {single}; predict uses {used}, by "
            "validation error"
        )
    is_ensemble = summary["uses"] == "ensemble"
    coverage = (ensemble if is_ensemble else summary)["coverage"]
    if coverage:
        yield describe_coverage(coverage, "of the ensemble" if is_ensemble else "")


def list_members(summary: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """List an ensemble's members by the name of their row: kind and weight, the run where several
    are of one kind; empty for other runs."""
    members = summary.get("members", ())
    kinds = [one["kind"] for one in members]
    labels = [
        one["kind"] if kinds.count(one["kind"]) == 1 else f"{one['kind']}, {one['name']}"
        for one in members
    ]
    names = [
        f"{label}, weight {one['weight']:.2f}" for label, one in zip(labels, members, strict=True)
    ]
    return list(zip(names, members, strict=True))


def describe_members(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the members of an ensemble with their weights, and the coverage of its intervals."""
    members = summary.get("members")
    if not members:
        return
    weights = ", ".join(f"{one['weight']:.3f} {one['name']} ({one['kind']})" for one in members)
    last = ", those of the last fold" if summary["folds"] else ""
    yield f"weights, fitted to the validation set{last}: {weights}"
    best = max(members, key=lambda one: float(one["weight"]))
    if best["weight"] > ALONE:
        yield f"{best['name']} alone is as good on the validation set as any mean with the others"
    if summary["coverage"]:
        yield describe_coverage(summary["coverage"])


def describe_settings(params: Mapping[str, Any]) -> str:
    """Format a trial's settings in one line."""
    short = shorten_names(params)
    return ", ".join(f"{short[name]} {format_value(value)}" for name, value in params.items())


def describe_search_verdict(summary: Mapping[str, Any]) -> str:
    """State how much better the chosen settings are than the defaults, given seed noise."""
    comparison, best = summary["comparison"], summary["best"]
    if comparison is None:
        lowest = (
            f"Trial {best['trial']} has the lowest validation {summary['metric']}, "
            f"{format_number(best['value'])}."
        )
        if summary.get("pending"):
            resume = f"slipstream tune --resume {summary['run']}"
            return f"{lowest} The search is not complete: {summary['pending']}; resume: {resume}"
        wanted = summary.get("retraining", {}).get("of_trials")
        reason = "tune.minutes left no time" if wanted else "tune.retrain = 0"
        return (
            f"{lowest} It was not retrained ({reason}), so how much of this is luck is "
            "unknown, and the test set was not used."
        )
    verdict = (_describe_failure if comparison["low"] is None else _describe_gain)(comparison)
    beaten = summary["test"]["best"].get("beaten_by")
    return verdict + (f" It still loses to {' and '.join(beaten)}." if beaten else "")


def _describe_gain(comparison: Mapping[str, Any]) -> str:
    before, after = (comparison[name]["n"] for name in ("default", "chosen"))
    percent = comparison["gain_percent"]
    share = "" if percent is None else f", {-percent:+.0f} %"
    change = f"{_describe_change(comparison)}{share}"
    seeds = f"{after} seeds each" if before == after else f"{before} and {after} seeds"
    bounds = " to ".join(format_number(comparison[end]) for end in ("low", "high"))
    interval = f"{100 * comparison['level']:.0f} % interval of the gain {bounds}, {seeds}"
    return {
        "better": f"Better than the defaults: {change} ({interval}).",
        "worse": f"Worse than the defaults: {change} ({interval}). Keep the defaults.",
        "no difference shown": f"No difference shown: {change}, within seed noise ({interval}). "
        "More seeds (tune.retrain_seeds) would resolve smaller differences.",
    }[comparison["verdict"]]


def _describe_change(comparison: Mapping[str, Any]) -> str:
    means = (format_number(comparison[name]["mean"]) for name in ("default", "chosen"))
    return _describe_error(comparison, " → ".join(means))


def _describe_error(comparison: Mapping[str, Any], error: str) -> str:
    scaled = ", scaled" if comparison.get("scaled") else ""
    return f"test {get_metric_name(comparison['metric'])} {error}{scaled}"


def _describe_failure(comparison: Mapping[str, Any]) -> str:
    """Explain why there is no gain to report: a side has no model, or fewer than two seeds."""
    before, after = comparison["default"], comparison["chosen"]
    match comparison["verdict"]:
        case "default failed":
            error = _describe_error(comparison, format_number(after["mean"]))
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
    return (
        "Too few seeds reached a finite loss to tell a difference from chance: "
        f"{_describe_change(comparison)}, {before['n']} and {after['n']} seeds."
    )


def get_chosen(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the trial that best.toml comes from: chosen among the retrained, else the best."""
    chosen: Iterator[Mapping[str, Any]] = (one for one in summary["retrained"] if one["chosen"])
    return next(chosen, summary["best"])


def list_states(counts: Mapping[str, int]) -> str:
    """List the trials by state; those that were cut off only where there are any."""
    listed = [(state, count) for state, count in counts.items() if count or state != "cut off"]
    return ", ".join(f"{count} {state}" for state, count in listed)


def describe_search(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cost of a search, and how its best score held up on other seeds."""
    counts, packs = summary["trials"], summary["packs"]
    states = list_states(counts)
    yield (
        f"{format_count(sum(counts.values()), 'trial')} in {format_seconds(summary['search_s'])}: "
        f"{states}; "
        f"{summary['trials_per_hour']:,.0f} trials per hour in {packs} "
        f"pack{'' if packs == 1 else 's'}; Optuna took {100 * summary['optuna_share']:.1f} % of "
        "the time"
    )
    best, lowest = get_chosen(summary), summary["best"]
    if "losses" in best:
        yield (
            f"chosen: {best['what']}, validation {summary['metric']} "
            f"{format_number(best['mean'])} ± {format_number(best['sd'])} over "
            f"{len(best['losses'])} new seeds"
        )
    if best["trial"] != lowest["trial"]:
        score = f"trial {lowest['trial']} had the lowest score ({format_number(lowest['value'])})"
        yield f"in the search, {score}; over new seeds, {best['what']} has the lower mean"
    yield from summary.get("findings", ())


def describe_pruning(summary: Mapping[str, Any], epochs: tuple[float, float]) -> str:
    """State how many trials were pruned and what that saved; `epochs` are saved and planned."""
    counts = summary["trials"]
    total, pruned, (saved, planned) = sum(counts.values()), counts["pruned"], epochs
    text = f"{pruned} of {total} trials pruned ({100 * pruned / max(total, 1):.0f} %)"
    if not planned or not pruned:
        return text
    share = f"{100 * saved / planned:.0f} %"
    return f"{text}, which saved {saved:,.0f} of {planned:,.0f} epochs ({share})"


def describe_probe(summary: dict[str, Any]) -> str:
    """State whether fine-tuning and the frozen encoder beat training from scratch."""
    key, n = summary["judged_by"], len(summary["seeds"])
    tuned, frozen = (summary["against_scratch"][way][key] for way in (FINE_TUNED, "frozen"))
    verdict = {
        "better": "Pre-training helped",
        "worse": "Pre-training did harm",
        "no difference shown": "Pre-training is not shown to help",
    }[tuned["verdict"]]
    after, before = (
        format_number(summary["ways"][name]["metrics"][key]["mean"], 4)
        for name in (FINE_TUNED, SCRATCH)
    )
    # differences between models that carry no signal say little
    warning = " But none of the three is shown to beat the majority class on this test set."
    if summary["beat_majority"] is None or summary["beat_majority"]:
        warning = ""
    relation = {
        "better": "also beats training from scratch",
        "worse": "is worse than training from scratch",
        "no difference shown": "shows no difference to training from scratch",
    }[frozen["verdict"]]
    return (
        f"{verdict}: the test {name_metric(summary, key)} is {after} fine-tuned and "
        f"{before} from scratch, {_format_interval(tuned)} (95 % over {n} seeds). The "
        f"frozen encoder {relation} ({_format_interval(frozen)}).{warning}"
    )


def build_probe_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Build the table's rows: the three runs, then the baselines; two cells for every metric."""
    keys = list(summary["ways"][SCRATCH]["metrics"])
    rows = []
    for name, way in summary["ways"].items():
        cells = []
        for key in keys:
            spread = way["metrics"][key]
            cells += [f"{format_number(spread['mean'], 4)} ± {format_number(spread['sd'], 4)}", "–"]
            if gap := summary["against_scratch"].get(name):
                cells[-1] = f"{_format_interval(gap[key])}: {gap[key]['verdict']}"
        rows.append({"name": name, "what": way["what"], "cells": cells})
    for name, metrics in summary["baselines"].items():
        cells = [cell for key in keys for cell in (format_number(metrics[key], 4), "–")]
        rows.append({"name": name, "what": "a baseline", "cells": cells})
    return rows


def build_probe_headings(summary: dict[str, Any]) -> list[str]:
    keys = summary["ways"][SCRATCH]["metrics"]
    return [cell for key in keys for cell in (name_metric(summary, key), "difference to scratch")]


def name_metric(summary: dict[str, Any], key: str) -> str:
    return METRIC_NAMES.get(key, f"scaled {key.upper()}" if summary["scaled"] else key)


def _format_interval(difference: dict[str, Any]) -> str:
    """Format a difference and its interval, with signs."""
    bounds = f"{difference['low']:+.4f} to {difference['high']:+.4f}"
    return f"{difference['difference']:+.4f}, {bounds}"
