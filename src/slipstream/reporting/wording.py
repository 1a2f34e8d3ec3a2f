"""A run's results in sentences, for the report and the terminal."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, cast

from slipstream.base.errors import Command, Reader
from slipstream.base.statistics import BETTER, HIGHER_IS_BETTER, NO_DIFFERENCE, WORSE, Spread
from slipstream.base.text import format_count, format_number
from slipstream.runs.summary import (
    SCALED,
    AgainstBaselines,
    BaselineScores,
    ChosenSettings,
    ComparedScores,
    EstimateSummary,
    IntervalScores,
    LeaderboardRow,
    MemberSummary,
    Metrics,
    MonitorSummary,
    ProbeSummary,
    RunSummary,
    Scores,
    SearchComparison,
    SearchSummary,
    SearchTest,
    Section,
    SeedDifference,
    Summary,
    get_metrics,
    read_metric,
)

DAY_S = 86_400
CALENDAR = (("month", 30, 31), ("quarter", 90, 92), ("year", 365, 366))
"""Steps that differ in length, and the days that most of them have"""
UNITS = {
    **{unit: unit for unit in ("mV", "kV", "mA", "kA", "mW", "kW", "MW", "Wh", "kWh", "MWh", "Ah")},
    **{unit: unit for unit in ("mAh", "Pa", "hPa", "kPa", "bar", "Hz", "kHz", "rpm", "ms", "min")},
    **{unit: unit for unit in ("mm", "cm", "km", "kg", "EUR", "USD")},
    "percent": "%",
    "pct": "%",
    "degC": "°C",
    "degF": "°F",
}
"""Units by the last part of a column's name, as in voltage_mV"""
QUANTITIES = {"voltage": "V", "current": "A", "power": "W", "time": "s", "duration": "s"}
"""Quantities that may end in a unit of one letter, as voltage_V does"""
BRACKETS = re.compile(r"[\[(]([^\[\]()]{1,12})[\])]\s*$")
METRIC_NAMES = {
    "log_loss": "log-loss",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "f1_macro": "F1 macro",
    "r2": "R²",
    "max_error": "max error",
    "bias": "bias",
    "pinball": "pinball loss",
    "coverage": "coverage",
    "width": "width",
    "smape": "sMAPE",
    "interval_crps": "CRPS of intervals",
}
"""Where the name is not the key in capitals"""


LEVEL_METRICS = ("coverage_", "width_")
"""Start of the names of scores of the intervals of one level, as in coverage_80"""


def get_metric_name(key: str) -> str:
    if key.startswith(LEVEL_METRICS):
        name, _, level = key.partition("_")
        return f"{name}, {level} % interval"
    return METRIC_NAMES.get(key, key.upper())


def is_ranked(metric: str) -> bool:
    """Whether one end of a metric's scale is better: coverage should be close to its level, and
    width says little without it."""
    return metric not in ("coverage", "width") and not metric.startswith(LEVEL_METRICS)


def format_metric(metric: str) -> str:
    """Return the name of a metric in a sentence; scaled_mse is in standardised units."""
    scaled = "scaled " if metric.startswith(SCALED) else ""
    return f"{scaled}{get_metric_name(metric.removeprefix(SCALED))}"


def format_seconds(value: float) -> str:
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_plural(count: int, singular: str, many: str) -> str:
    return f"{count:,} {singular if count == 1 else many}"


def format_time(window: Mapping[str, Any]) -> str:
    """Format the time of a window, or its row number."""
    if window["time"] is None:
        return f"row {window['row']:,}"
    if isinstance(window["time"], str):
        day, _, hour = window["time"].partition("T")
        return day if hour == "00:00:00.000000" else f"{day} {hour[:8]}"
    return f"{window['time']:.10g}"


def format_moment(value: float, is_date: bool) -> str:
    """Format a time: a date of so many microseconds since 1970, or a plain number."""
    if not is_date:
        return f"{value:,.10g}"
    moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=value)
    text = moment.strftime("%Y-%m-%d %H:%M:%S")
    return text.removesuffix(" 00:00:00")


def format_step(seconds: float, is_date: bool) -> str:
    """Format the time between two rows: of dates as a duration, else as a plain number."""
    if not is_date:
        return f"{seconds:,.6g}"
    days = seconds / DAY_S
    for unit, shortest, longest in CALENDAR:
        if shortest <= days <= longest:
            return f"1 {unit}"
    for length, unit in ((DAY_S, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length and seconds % length == 0:
            return format_count(round(seconds / length), unit)
    return f"{seconds:,.6g} s"


def describe_step(step: Mapping[str, Any]) -> str:
    """Describe a step of `data.prepare` in one line."""
    if step["step"] == "formula":
        return f"{step['name']} = {step['value']}"
    settings = [
        f"{key} {', '.join(map(str, value)) if isinstance(value, list | tuple) else value}"
        for key, value in step.items()
        if key != "step"
    ]
    return f"{step['step']} ({', '.join(settings)})" if settings else str(step["step"])


def format_value(value: Any) -> str:
    """Format a setting's value; floats with four significant figures."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Map settings to their names without the section, where that is unambiguous."""
    last = {name: name.partition(".")[2] or name for name in names}
    count = collections.Counter(last.values())
    return {name: short if count[short] == 1 else name for name, short in last.items()}


def find_unit(name: str) -> str:
    """Return the unit that a column's name ends with, in brackets or after an underscore."""
    if match := BRACKETS.search(name):
        return match[1].strip()
    before, _, last = name.rpartition("_")
    quantity = before.rpartition("_")[2].lower()
    return UNITS.get(last, "") or (last if before and QUANTITIES.get(quantity) == last else "")


def get_unit(summary: RunSummary, column: str) -> str:
    """Return a column's unit, as its file or its name has it; empty where it is not known."""
    columns = (summary.get("data") or {}).get("columns", {})
    return columns.get(column, {}).get("unit") or find_unit(column)


def add_unit(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit and number != "–" else number


def sort_key(error: float | None) -> float:
    """Rank an error that is undefined last."""
    return math.inf if error is None else error


class MetricColumn(NamedTuple):
    """One metric in the table that compares the model with the baselines."""

    heading: str
    section: Section
    """The section of the scores"""
    key: str
    decimals: int = 8
    subset: str = "test"

    @property
    def metric(self) -> str:
        """The metric's name, as `read_metric` takes it."""
        return f"{SCALED if self.section == 'scaled' else ''}{self.key}"

    def read(self, result: Scores) -> float | None:
        """Return the metric's value on its set; None where it is undefined,
        and of a lane without a model."""
        metrics = result[self.section]
        return None if metrics is None else metrics[self.subset].get(self.key)


class ReportLayout(NamedTuple):
    """The columns and parts of a report."""

    columns: tuple[MetricColumn, ...]
    compact: tuple[MetricColumn, ...]
    """The columns that fit on a terminal"""
    headline: MetricColumn
    second: MetricColumn
    facts: tuple[tuple[MetricColumn, str], ...]
    """The metrics at the top of the report, with their captions"""
    units: str
    page: str
    """The template of the task's own part of the report"""
    subset: str = "test"
    description: str = "test set"
    """Where all metrics come from"""


def _column(heading: str, key: str, decimals: int = 8) -> MetricColumn:
    return MetricColumn(heading, "metrics", key, decimals)


_MAE, _RMSE, _R2 = _column("MAE", "mae"), _column("RMSE", "rmse"), _column("R²", "r2", 4)
_MAX, _BIAS = _column("max error", "max_error"), _column("bias", "bias")
_SCALED = MetricColumn("scaled MSE", "scaled", "mse"), MetricColumn("scaled MAE", "scaled", "mae")
RELATIVE = ("mase", "smape", "wape")
"""Errors relative to the size of a series"""
_RELATIVE = tuple(_column(get_metric_name(key), key) for key in RELATIVE)
REGRESSION = ReportLayout(
    columns=(_MAE, _RMSE, _MAX, _BIAS, _R2, *_RELATIVE, *_SCALED),
    compact=(_MAE, _RMSE, _MAX, _R2, *_SCALED),
    headline=_MAE,
    second=_RMSE,
    facts=((_MAE, "test mean absolute error"), (_R2, "test R²")),
    units="physical units",
    page="regression.html",
)
_LOG_LOSS = _column("log-loss", "log_loss", 4)
_BALANCED = _column("balanced accuracy", "balanced_accuracy", 4)
_OTHERS = {"accuracy": "accuracy", "F1 macro": "f1_macro", "AUC": "auc", "ECE": "ece"}
_CLASS_METRICS = (_LOG_LOSS, _BALANCED, *(_column(*item, 4) for item in _OTHERS.items()))
CLASSIFICATION = ReportLayout(
    columns=_CLASS_METRICS,
    compact=_CLASS_METRICS,
    headline=_LOG_LOSS,
    second=_BALANCED,
    facts=((_BALANCED, "test balanced accuracy"), (_LOG_LOSS, "test log-loss")),
    units="lower is better for log-loss and ECE",
    page="classification.html",
)
_MASKED = tuple(column._replace(subset="val") for column in REGRESSION.compact)
ENCODER = ReportLayout(
    columns=_MASKED,
    compact=_MASKED,
    headline=_MASKED[0],
    second=_MASKED[1],
    facts=((_MASKED[4], "scaled MSE of masked rows"), (_MASKED[3], "R² of masked rows")),
    units="physical units",
    page="encoder.html",
    subset="val",
    description="masked rows of the validation set",
)


def choose_layout(summary: Mapping[str, Any]) -> ReportLayout:
    """Return the layout of the task of a run, or of an evaluation of it, without columns of metrics
    that it does not have."""
    if summary.get("objective") == "masked":
        return ENCODER
    if summary.get("classes"):
        return CLASSIFICATION
    found = summary.get("metrics") or {}
    known = found.get("test", found)
    relative = tuple(column for column in _RELATIVE if column.key in list_relative(known))
    layout = REGRESSION._replace(columns=(_MAE, _RMSE, _MAX, _BIAS, _R2, *relative, *_SCALED))
    if "mase" in known:  # a forecast: its relative errors take the place of the largest one
        return layout._replace(compact=(_MAE, _RMSE, _R2, *relative, *_SCALED))
    return layout


def list_relative(metrics: Metrics) -> list[str]:
    """List the errors relative to the size of a series that some metrics have."""
    return [key for key in RELATIVE if key in metrics]


MIN_PART_S = 0.05
"""Seconds from which on a part of the time is mentioned"""
TIME_NAMES = {"startup": "start-up", "earlier": "earlier starts"}
MIN_THROTTLED = 0.01
"""Share of the time from which on throttling of the GPU is reported"""
GpuFigure = Literal[
    "gpu_utilisation_mean", "power_mean_w", "gpu_memory_peak_bytes", "temperature_max_c"
]
GPU_USAGE: tuple[tuple[GpuFigure, float, str], ...] = (
    ("gpu_utilisation_mean", 1, "GPU {:.0f} % busy"),
    ("power_mean_w", 1, "{:.0f} W"),
    ("gpu_memory_peak_bytes", 1e9, "{:.1f} GB peak GPU memory"),
    ("temperature_max_c", 1, "up to {:.0f} °C"),
)
HOST_USAGE: tuple[tuple[Literal["cpu_percent_mean", "rss_peak_bytes"], float, str], ...] = (
    ("cpu_percent_mean", 100, "{:.1f} CPU cores busy"),
    ("rss_peak_bytes", 1e9, "{:.1f} GB peak memory"),
)
ALONE = 0.999
"""The weight from which on an ensemble is one of its members"""
SCRATCH, FINE_TUNED = "scratch", "fine-tuned"
AGAINST_MAJORITY = ("log_loss", "balanced_accuracy")


def describe_verdict(summary: RunSummary) -> str:
    """State whether what a run predicts with beats the baselines, with the figures that decide it:
    the error, that of the closest baseline, and the interval of their difference."""
    predictor, result = _get_used(summary)
    comparison = find_comparison(summary)
    where = choose_layout(summary).description
    if comparison is None:  # of a version that compared without intervals
        return _describe_without_interval(summary)
    by_verdict = _group_by_verdict(comparison)
    lost, unsure, won = (by_verdict[verdict] for verdict in (WORSE, NO_DIFFERENCE, BETTER))
    closest = _find_closest(summary, comparison["metric"], lost or unsure or won)
    metric = _choose_shown(comparison, closest)
    statement = f"{predictor} beats every baseline"
    if lost:
        statement = f"{predictor} loses to {_join_names(lost)}"
    elif unsure and not comparison["differences"][metric][closest]["interval"]:
        statement = f"Too few windows to tell whether {predictor.lower()} beats the baselines"
    elif unsure:
        statement = f"{predictor} is not shown to beat {_join_names(unsure)}"
    verdict = f"{statement} on the {where}: {_describe_gap(summary, metric, closest)}"
    if not lost and unsure and won:
        verdict += f"; it beats {_join_names(won)}"
    verdict += f"; {closest} is currently the better choice." if lost else "."
    if summary.get("classes"):
        return verdict + _describe_classes(summary)
    return verdict if lost else verdict + _warn_of_r2(result, summary)


def find_comparison(summary: RunSummary) -> AgainstBaselines | None:
    """Return how what the run predicts with compares with the baselines; None where that was
    written without intervals."""
    return _get_used(summary)[1].get("against_baselines")


def _get_used(summary: RunSummary) -> tuple[str, ComparedScores]:
    """Return what the run predicts with, in words, and its metrics."""
    ensemble = summary.get("ensemble")
    if ensemble and summary.get("uses") == "ensemble":
        return "The ensemble", ensemble
    return "The ensemble" if "members" in summary else "The model", summary


def _group_by_verdict(comparison: AgainstBaselines) -> dict[str, list[str]]:
    """Return the names of the baselines by the verdict against them."""
    groups: dict[str, list[str]] = {verdict: [] for verdict in (BETTER, NO_DIFFERENCE, WORSE)}
    for name, difference in comparison["differences"][comparison["metric"]].items():
        groups[difference["verdict"]].append(name)
    return groups


def _get_baseline(summary: RunSummary, name: str) -> BaselineScores:
    """Return a baseline that was scored."""
    scores = summary["baselines"][name]
    if scores is None:
        raise LookupError(name)
    return scores


def _find_closest(summary: RunSummary, metric: str, names: Sequence[str]) -> str:
    """Return the best of some baselines by a metric."""
    subset, sign = choose_layout(summary).subset, -1 if metric in HIGHER_IS_BETTER else 1
    errors = {
        name: sign * sort_key(read_metric(_get_baseline(summary, name), subset, metric))
        for name in names
    }
    return min(errors, key=lambda name: errors[name])


def _choose_shown(comparison: AgainstBaselines, baseline: str) -> str:
    """Return the metric to show: in the data's units where that says the same of this baseline as
    the one that decides, which is the mean over targets in standardised units."""
    metric = comparison["metric"]
    plain = {"scaled_mse": "rmse", "scaled_mae": "mae"}.get(metric, metric)
    first, deciding = (comparison["differences"][key][baseline] for key in (plain, metric))
    same_sign = first["difference"] * deciding["difference"] >= 0
    return plain if first["verdict"] == deciding["verdict"] and same_sign else metric


def _describe_gap(summary: RunSummary, metric: str, baseline: str) -> str:
    """Format both values of a metric, by how much they differ and the interval of that."""
    subset = choose_layout(summary).subset
    comparison = find_comparison(summary)
    assert comparison is not None
    gap = comparison["differences"][metric][baseline]
    pair: tuple[Scores, Scores] = _get_used(summary)[1], _get_baseline(summary, baseline)
    decimals = 4 if summary.get("classes") else 8
    model, baseline_value = (
        format_number(read_metric(result, subset, metric), decimals) for result in pair
    )
    values = f"{format_metric(metric)} {model}, {baseline} {baseline_value}"
    if gap["interval"] is None:
        return values
    level = f"{100 * comparison['level']:.0f} % interval"
    if gap["relative_interval"] is None or gap["relative"] is None:
        low, high = (f"{bound:+.4f}" for bound in gap["interval"])
        return f"{values} (difference {gap['difference']:+.4f}, {level} {low} to {high})"
    low, high = (format_percent(bound) for bound in gap["relative_interval"])
    return f"{values} ({format_percent(gap['relative'])}, {level} {low} to {high})"


def format_percent(share: float) -> str:
    """Format a relative difference with its sign."""
    percent = 100 * share
    return f"{percent:+.0f} %" if abs(percent) >= 10 else f"{percent:+.1f} %"


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _describe_without_interval(summary: RunSummary) -> str:
    """State the figures of a run that an older version wrote: it has no intervals."""
    layout, metric = choose_layout(summary), summary["judged_by"]
    key = metric if summary.get("classes") else f"{SCALED}{metric}"
    names = [name for name, result in summary["baselines"].items() if result]
    closest = _find_closest(summary, key, names)
    model, baseline_value = (
        format_number(read_metric(result, layout.subset, key))
        for result in (summary, _get_baseline(summary, closest))
    )
    beaten = summary["beaten_by"]
    relation = f"a higher error than {_join_names(beaten)}" if beaten else "the lowest error"
    return (
        f"The model has {relation} on the {layout.description}: {format_metric(key)} {model}, "
        f"{closest} {baseline_value} (an older version wrote no interval of the difference)."
    )


def _warn_of_r2(result: Scores, summary: RunSummary) -> str:
    """Say that a model which no baseline beats is still worse than a constant; else nothing."""
    r2 = _read_r2(result, summary)
    if r2 is None or r2 > 0:
        return ""
    where = choose_layout(summary).description
    return (
        f" But its R² is {format_number(r2, 4)}: the constant mean of the {where} would have been "
        "closer."
    )


def _read_r2(result: Scores, summary: RunSummary) -> float | None:
    """Return the share of the variance that is explained; None where it is undefined."""
    r2 = get_metrics(result)[choose_layout(summary).subset]["r2"]
    return None if r2 is None or math.isnan(r2) else r2


def _describe_classes(summary: RunSummary) -> str:
    """Say what a model of classes is judged by where that is not the usual, and compare it with the
    majority class: if nothing beats that, the inputs carry no signal."""
    predictor = "ensemble" if summary.get("uses") == "ensemble" else "model"
    text = ""
    if summary["judged_by"] == "balanced_accuracy":
        text = (
            " It is judged by balanced accuracy, since train.class_weights shift its probabilities."
        )
    better = [key for key in AGAINST_MAJORITY if beats_majority(summary, predictor, key)]
    winners = [
        f"{name} does in {_join_names(won)}"
        for name in summary["against_majority"]
        if name not in ("model", "ensemble")
        and (
            won := [
                METRIC_NAMES[key] for key in AGAINST_MAJORITY if beats_majority(summary, name, key)
            ]
        )
    ]
    gaps = ", ".join(_describe_majority_gap(summary, predictor, key) for key in AGAINST_MAJORITY)
    if better:
        where = (
            "" if len(better) == len(AGAINST_MAJORITY) else f" in {METRIC_NAMES[better[0]]} only"
        )
        return f"{text} It beats the majority class{where}: {gaps}."
    if not summary["against_majority"][predictor]["log_loss"]["interval"]:  # too few windows
        return f"{text} Beside the majority class: {gaps}."
    nothing = f"It is not shown to beat the majority class ({', '.join(winners)})"
    return f"{text} {nothing if winners else 'Nothing here beats the majority class'}: {gaps}."


def beats_majority(summary: RunSummary, name: str, key: str) -> bool:
    """Whether a predictor is shown to beat the majority class."""
    difference, sign = summary["against_majority"][name][key], 1 if key in HIGHER_IS_BETTER else -1
    bounds = difference["interval"]
    return bool(bounds) and all(sign * bound > 0 for bound in bounds or ())


def _describe_majority_gap(summary: RunSummary, predictor: str, key: str) -> str:
    pair: tuple[Scores, Scores] = _get_used(summary)[1], _get_baseline(summary, "majority")
    model, majority = (get_metrics(result)["test"][key] for result in pair)
    gap = summary["against_majority"][predictor][key]
    values = f"{METRIC_NAMES[key]} {model:.3f} vs. {majority:.3f}"
    if not gap["interval"]:
        return values
    low, high = (f"{bound:+.3f}" for bound in gap["interval"])
    return f"{values} (difference {gap['difference']:+.3f}, 95 % interval {low} to {high})"


def judge(summary: RunSummary) -> str:
    """Return the verdict on a run in one word, which decides its colour: better than every
    baseline, worse than one of them or than a constant, or neither is shown."""
    comparison = find_comparison(summary)
    if comparison is None:
        return WORSE if summary["beaten_by"] else NO_DIFFERENCE
    if not summary.get("classes"):
        r2 = _read_r2(_get_used(summary)[1], summary)
        if r2 is not None and r2 <= 0:
            return WORSE
    return comparison["verdict"]


def judge_search(summary: SearchSummary) -> str:
    """Return the verdict on a search in one word: better than the defaults, and not shown to be
    worse than a baseline; worse than one of them; or neither is shown."""
    comparison = summary.get("comparison")
    best: SearchTest = summary["test"].get("best") or {}
    if "leaderboard" in summary:
        against = best.get("against_baselines") or {}
        return WORSE if best.get("beaten_by") else against.get("verdict", NO_DIFFERENCE)
    if comparison is None:
        return NO_DIFFERENCE
    if best.get("beaten_by") or comparison["verdict"] in (WORSE, "chosen failed", "both failed"):
        return WORSE
    return BETTER if comparison["verdict"] in (BETTER, "default failed") else NO_DIFFERENCE


def describe_quantiles(result: Mapping[str, Any]) -> str:
    """State the pinball loss and how many of the true values lie between the outermost quantiles;
    empty without quantiles. The result is that of a run, or of one set of windows."""
    levels = result.get("quantiles")
    found: Mapping[str, Any] = _get_used(cast(RunSummary, result))[1]["metrics"] or {}
    metrics: Metrics = found.get("test", found)
    if not levels or "pinball" not in metrics:
        return ""
    text = f"quantiles: pinball loss {format_number(metrics['pinball'])}"
    if (crps := metrics.get("crps")) is not None:
        text += f", CRPS {format_number(crps)}"
    if (width := metrics.get("width")) is not None:
        text += f", mean width {format_number(width)}"
    if (coverage := metrics.get("coverage")) is not None:
        low, high = levels[0], levels[-1]
        text += (
            f"; {100 * coverage:.1f} % of the true values lie between those of {low:g} "
            f"and {high:g}, which should hold {100 * (high - low):.0f} %"
        )
    return text


def get_total_s(summary: Summary) -> float:
    """Return the time from the command to the result; version 0.1 left out the start-up."""
    return float((summary.get("time") or {}).get("wall_s", summary["seconds"]))


def list_time_parts(summary: Summary) -> dict[str, float]:
    """Return the seconds of each part of the time by its name; of version 0.1, of each phase."""
    if "time" not in summary:
        return dict(cast(RunSummary, summary).get("seconds_by_phase") or {})
    sums = ("wall_s", "process_s")
    parts = {name.removesuffix("_s"): s for name, s in summary["time"].items() if name not in sums}
    return {TIME_NAMES.get(name, name): seconds for name, seconds in parts.items()}


def describe_time(summary: Summary) -> str:
    """List where the time went, without parts that took next to nothing; empty where that is not
    known."""
    parts = {name: s for name, s in list_time_parts(summary).items() if s >= MIN_PART_S}
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())


def format_energy(summary: RunSummary) -> str:
    """Format the GPU's energy over the whole run; empty where it was not measured."""
    monitor: MonitorSummary = summary.get("monitor") or {}
    watt_hours = monitor.get("energy_wh")
    if watt_hours is None:
        return ""
    energy = f"{watt_hours:.3g} Wh" if watt_hours < 999.5 else f"{watt_hours / 1e3:.3g} kWh"
    resumed = monitor["seconds"] > summary["seconds"]
    return energy + (" since the run began" if resumed else "")


def describe_usage(summary: RunSummary) -> Iterator[str]:
    """Yield repeated steps, and the machine's utilisation and throttling unless the monitor was
    off."""
    if repeated := summary.get("repeated_steps"):
        were = "step was" if repeated == 1 else "steps were"
        yield f"{repeated:,} {were} repeated at a smaller loss scale: fp16 gradients overflowed"
    monitor = summary.get("monitor")
    if not monitor:
        return
    gpu = [
        text.format(value / unit)
        for key, unit, text in GPU_USAGE
        if (value := monitor[key]) is not None
    ]
    host = [
        text.format(value / unit)
        for key, unit, text in HOST_USAGE
        if (value := monitor[key]) is not None
    ]
    yield "; ".join(filter(None, (", ".join(gpu), ", ".join(host))))
    for reason, share in monitor["throttled"].items():
        if share >= MIN_THROTTLED:
            yield f"the GPU was throttled for {100 * share:.0f} % of the time: {reason}"


def describe_estimate(summary: RunSummary) -> str:
    """Compare the estimated training time with the actual one; empty without an estimate."""
    estimate: EstimateSummary = summary.get("estimate") or {}
    before_s, after_s = estimate.get("before_s"), estimate.get("after_ten_steps_s")
    parts = []
    if before_s is not None:
        how = " (rule of thumb)" if estimate["before_is"] == "guessed" else ""
        parts.append(f"estimated {format_seconds(before_s)}{how}")
    if after_s is not None:
        parts.append(f"{format_seconds(after_s)} after ten steps")
    if not parts:
        return ""
    steps, planned = summary["steps"], estimate["planned_steps"]
    ran = f" for {steps:,} of {planned:,} steps" if planned and steps < planned else ""
    return f"{', '.join(parts)}; training took {format_seconds(estimate['took_s'])}{ran}"


MAX_SHORTFALL = 15
"""By how many percent of the cases intervals may fall short of their level without a remark"""


def describe_intervals(scores: IntervalScores, whose: str = "") -> str:
    """State how many of the true values lie within the intervals, how wide these are, and their
    CRPS, and whether they are too narrow; empty without intervals."""
    coverage, widths = scores.get("coverage") or {}, scores.get("width") or {}
    if not coverage:
        return ""
    parts = [
        f"{100 * share:.1f} % inside the {level} % interval"
        + (f" (mean width {format_number(widths[level])})" if level in widths else "")
        for level, share in coverage.items()
    ]
    crps = "" if (value := scores.get("crps")) is None else f"; CRPS {format_number(value)}"
    is_short = any(float(level) - 100 * share > MAX_SHORTFALL for level, share in coverage.items())
    remark = "; too narrow: these rows are unlike those of validation" if is_short else ""
    return f"coverage{whose and f' {whose}'}: {', '.join(parts)}{crps}{remark}"


def describe_lanes(summary: RunSummary) -> Iterator[str]:
    """Yield the spread over seeds, the folds, the ensemble and its intervals, where there are."""
    if "lanes" not in summary:
        return
    spread, folds, ensemble = summary["spread"], summary["folds"], summary["ensemble"]
    headline = choose_layout(summary).headline
    name = headline.heading
    if spread:
        found = spread[headline.key]
        figures = {key: format_number(found[key]) for key in ("mean", "sd", "min", "max")}
        seeds = len({lane["seed"] for lane in summary["lanes"]})
        ends = f"{figures['min']} to {figures['max']}"
        values = f"{figures['mean']} ± {figures['sd']} ({ends})"
        yield f"{seeds} seeds: test {name} {values}"
    if folds:
        errors = ", ".join(format_number(headline.read(fold)) for fold in folds)
        yield f"{len(folds)} folds: test {name} {errors}; the model is the last fold's"
    if ensemble:
        single, mean = (format_number(headline.read(result)) for result in (summary, ensemble))
        used = "the ensemble" if summary["uses"] == "ensemble" else "the single model"
        yield (
            f"ensemble: test {name} {mean}, single model {single}; predict uses {used}, by "
            "validation error"
        )
    whose = "of the ensemble" if summary["uses"] == "ensemble" else ""
    if line := describe_intervals(_get_used(summary)[1], whose):
        yield line


def was_trained(summary: Mapping[str, Any]) -> bool:
    """Whether the run itself trained: an ensemble did not, nor the one model of `slipstream auto`,
    which its search has trained."""
    return "best_epoch" in summary or "lanes" in summary


def list_members(summary: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List an ensemble's members by the name of their row: kind and weight, the run where several
    are of one kind; empty for other runs."""
    members = summary.get("members", ())
    kinds = [member["kind"] for member in members]
    labels = [
        member["kind"] if kinds.count(member["kind"]) == 1 else _name_member(member)
        for member in members
    ]
    names = [
        f"{label}, weight {member['weight']:.2f}"
        for label, member in zip(labels, members, strict=True)
    ]
    return list(zip(names, members, strict=True))


def _name_member(member: Mapping[str, Any]) -> str:
    """Return kind and name of a member; the name alone where it says the kind, as a baseline's."""
    kind, name = str(member["kind"]), str(member["name"])
    return name if name.startswith(kind) else f"{kind}, {name}"


def describe_members(summary: RunSummary) -> Iterator[str]:
    """Yield the members of an ensemble with their weights, and the scores of its intervals; of one
    model that an ensemble came down to, these alone."""
    if members := summary.get("members"):
        yield from _describe_weights(summary, members)
    if "lanes" not in summary and (line := describe_intervals(summary)):
        yield line


def _describe_weights(summary: RunSummary, members: Sequence[MemberSummary]) -> Iterator[str]:
    shares: dict[tuple[str, str], list[float]] = {}
    for member in members:  # of one candidate there may be models from several seeds
        shares.setdefault((member["name"], member["kind"]), []).append(float(member["weight"]))
    weights = ", ".join(
        f"{math.fsum(own):.3f} {name} ({kind}" + (f", {len(own)} seeds)" if len(own) > 1 else ")")
        for (name, kind), own in shares.items()
    )
    last = ", those of the last fold" if summary["folds"] else ""
    yield f"weights, fitted to the validation set{last}: {weights}"
    best = max(members, key=lambda member: float(member["weight"]))
    if best["weight"] > ALONE:
        yield f"{best['name']} alone is as good on the validation set as any mean with the others"


def describe_settings(params: Mapping[str, Any]) -> str:
    """Format a trial's settings in one line."""
    short = shorten_names(params)
    return ", ".join(f"{short[name]} {format_value(value)}" for name, value in params.items())


def describe_search_verdict(summary: SearchSummary, reader: Reader = "terminal") -> str:
    """State how much better the chosen settings are than the defaults, given seed noise; of
    `slipstream auto`, how good its model is."""
    if "leaderboard" in summary:
        return summary["verdict"]
    comparison, best = summary["comparison"], summary["best"]
    if comparison is None:
        lowest = (
            f"Trial {best['trial']} has the lowest validation {summary['metric']}, "
            f"{format_number(best['value'])}."
        )
        if summary.get("pending"):
            resume = Command("tune", resume=summary["run"]).render(reader)
            return f"{lowest} The search is not complete: {summary['pending']}; resume: {resume}"
        wanted = summary.get("retraining", {}).get("of_trials")
        reason = "tune.minutes left no time" if wanted else "tune.retrain = 0"
        unknown = f"It was not retrained ({reason}), so how much of this is luck is unknown"
        test: SearchTest = summary["test"].get("best") or {}
        if not test.get("metrics"):
            return f"{lowest} {unknown}, and the test set was not used."
        beaten = test.get("beaten_by")
        return f"{lowest} {unknown}." + (f" It loses to {' and '.join(beaten)}." if beaten else "")
    verdict = (_describe_failure if comparison["low"] is None else _describe_gain)(comparison)
    tested = summary["test"]["best"]
    if beaten := tested.get("beaten_by"):
        return f"{verdict} It still loses to {_join_names(beaten)}."
    against = tested.get("against_baselines")
    if against and (unsure := _group_by_verdict(against)[NO_DIFFERENCE]):
        return f"{verdict} It is not shown to beat {_join_names(unsure)}."
    return verdict


def _get_spreads(comparison: SearchComparison) -> tuple[Spread, Spread]:
    """Return the errors of the default and of the chosen settings, which both have a model."""
    default, chosen = comparison["default"], comparison["chosen"]
    if default is None or chosen is None:
        raise LookupError(comparison["verdict"])
    return default, chosen


def _describe_gain(comparison: SearchComparison) -> str:
    before, after = (spread["n"] for spread in _get_spreads(comparison))
    percent = comparison["gain_percent"]
    share = "" if percent is None else f", {-percent:+.0f} %"
    change = f"{_describe_change(comparison)}{share}"
    seeds = f"{after} seeds each" if before == after else f"{before} and {after} seeds"
    bounds = " to ".join(format_number(comparison[end]) for end in ("low", "high"))
    interval = f"{100 * comparison['level']:.0f} % interval of the gain {bounds}, {seeds}"
    return {
        "better": f"Better than the defaults: {change} ({interval}).",
        "worse": f"Worse than the defaults: {change} ({interval}). Keep the defaults.",
        "no better trial": "No trial was better than the config as given, which is chosen: "
        f"{_describe_error(comparison, format_number(_get_spreads(comparison)[1]['mean']))}.",
        "no difference shown": f"No difference shown: {change}, within seed noise ({interval}). "
        "More seeds (tune.retrain_seeds) would resolve smaller differences.",
    }[comparison["verdict"]]


def _describe_change(comparison: SearchComparison) -> str:
    means = (format_number(spread["mean"]) for spread in _get_spreads(comparison))
    return _describe_error(comparison, " → ".join(means))


def _describe_error(comparison: SearchComparison, error: str) -> str:
    scaled = ", scaled" if comparison.get("scaled") else ""
    return f"test {get_metric_name(comparison['metric'] or '')} {error}{scaled}"


def _describe_failure(comparison: SearchComparison) -> str:
    """Explain why there is no gain to report: a side has no model, or fewer than two seeds."""
    after = comparison["chosen"]
    match comparison["verdict"]:
        case "default failed":
            error = _describe_error(comparison, format_number(after and after["mean"]))
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
    default, chosen = _get_spreads(comparison)
    return (
        "Too few seeds reached a finite loss to tell a difference from chance: "
        f"{_describe_change(comparison)}, {default['n']} and {chosen['n']} seeds."
    )


BASELINE_NAMES = {
    "gbm": "gradient boosting",
    "rocket": "random convolutions",
    "logistic": "logistic regression",
}
"""Baselines in words, where their name alone says little"""
MIN_CHANGE = 0.5
"""Percent below which two errors are called the same"""


def describe_auto(result: RunSummary, targets: Sequence[str], *, by_series: bool = False) -> str:
    """State the error of a model on the test set in a sentence, beside the best baseline and the
    best of its members: in the data's units, of several targets in standard deviations, and where
    each series is scaled by itself relative to its own differences (MASE)."""
    metrics = (result["metrics"] or {})["test"]
    is_class = "log_loss" in metrics
    relative = by_series and "mase" in metrics
    several = not is_class and not relative and len(targets) > 1
    metric = "balanced_accuracy" if is_class else f"{SCALED if several else ''}mae"
    metric = "mase" if relative else metric
    choose = max if is_class else min

    def read(scores: Scores | None) -> float | None:
        return read_metric(scores, "test", metric)

    own = read(result)
    unit = "standard deviations" if several else ""
    if not is_class and not relative and len(targets) == 1:
        unit = get_unit(result, targets[0])
    unit = f" {unit}" if unit else ""
    name = "balanced accuracy" if is_class else "mean absolute error"
    name = "mean absolute scaled error" if relative else name
    text = f"{format_number(own)}{unit} {name} on the test set"
    baselines = {
        name: value
        for name, scores in (result.get("baselines") or {}).items()
        if (value := read(scores)) is not None
    }
    if baselines and own is not None:
        best = choose(baselines, key=lambda name: baselines[name])
        change = 100 * (own - baselines[best]) / max(abs(baselines[best]), 1e-300)
        side = f"{abs(change):.0f} % {'above' if change > 0 else 'below'}"
        side = side if abs(change) >= MIN_CHANGE else "as"
        text += f", {side} {BASELINE_NAMES.get(best, best)} ({format_number(baselines[best])})"
    alone = [read(member) for member in result.get("members") or () if member["weight"] > 0]
    known = [value for value in alone if value is not None]
    if len(known) > 1:
        text += f", the best single model {format_number(choose(known))}"
    return text + "."


def describe_refit(summary: SearchSummary) -> str:
    """State what the second model of `slipstream auto --refit` is, or why there is none; empty
    where it was not asked for."""
    refit = summary.get("refit")
    if refit is None:
        return ""
    why = f" ({refit['why']})" if refit["why"] else ""
    resume = Command("auto", resume=summary["run"]).render("terminal")
    if refit["state"] == "done":
        rest = refit["of"] - refit["models"]
        parts = f"; {rest} of its {refit['of']} models are as they were tested{why}" if rest else ""
        return (
            "a second model for use is in retrained/refit; untested: trained on all rows, its "
            f"expected error is that of retrained/best{parts}"
        )
    if refit["state"] == "failed":
        return f"there is no model trained on all rows{why}; train it with: {resume}"
    return f"the training on all rows was stopped; train it with: {resume}"


def get_tested_metric(result: RunSummary, ranked_by: str | None) -> str:
    """Return the metric that the answer of `slipstream auto`, its members and the baselines are
    compared by on the test set."""
    if ranked_by is not None:
        return ranked_by
    return f"{SCALED}{result['judged_by']}" if "scaled" in result else result["judged_by"]


def name_ranking(summary: SearchSummary) -> str:
    """Return the metric that the candidates of `slipstream auto` are ranked by, in words."""
    if cast(RunSummary, summary).get("quantiles"):
        return "pinball loss"
    if ranked_by := summary.get("ranked_by"):
        return format_metric(ranked_by)
    return format_metric(f"{SCALED}{summary['metric']}") if "scaled" in summary else "log-loss"


def format_costs(row: LeaderboardRow) -> list[str]:
    """Return a row's number of parameters, microseconds per prediction, and flash and RAM in C;
    empty where there are none, as in rows of older versions."""
    sizes = (row.get(name) for name in ("parameters", "predict_us", "flash_bytes", "ram_bytes"))
    return ["" if size is None else f"{size:,.0f}" for size in sizes]


def name_candidate(row: LeaderboardRow) -> str:
    """Return the name of a row of the leaderboard: a baseline's own, of a trial its kind too."""
    is_baseline = row["name"].startswith(row["kind"])
    return row["name"] if is_baseline else f"{row['kind']}, {row['name']}"


def describe_candidate(row: LeaderboardRow) -> str:
    """Return the settings of a row of the leaderboard in a few words, and why it failed."""
    failed = row["state"] == "failed" and row["stopped"]
    return f"{row['what']}: {row['stopped']}" if failed else row["what"]


def get_chosen(summary: SearchSummary) -> ChosenSettings:
    """Return the trial that best.toml comes from: chosen among the retrained, else the best."""
    chosen = next((row for row in summary["retrained"] if row["chosen"]), summary["best"])
    if chosen["trial"] is not None:
        return chosen
    return {**chosen, "trial": summary.get("given"), "params": chosen["params"] or {}}


def list_states(counts: Mapping[str, int]) -> str:
    """List the trials by state; those that were cut off only where there are any."""
    listed = [(state, count) for state, count in counts.items() if count or state != "cut off"]
    return ", ".join(f"{count} {state}" for state, count in listed)


def describe_search(summary: SearchSummary) -> Iterator[str]:
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


def describe_pruning(summary: SearchSummary, epochs: tuple[float, float]) -> str:
    """State how many trials were pruned and what that saved; `epochs` are saved and planned."""
    counts = summary["trials"]
    total, pruned, (saved, planned) = sum(counts.values()), counts["pruned"], epochs
    text = f"{pruned} of {total} trials pruned ({100 * pruned / max(total, 1):.0f} %)"
    if not planned or not pruned:
        return text
    share = f"{100 * saved / planned:.0f} %"
    return f"{text}, which saved {saved:,.0f} of {planned:,.0f} epochs ({share})"


def describe_probe(summary: ProbeSummary) -> str:
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


def build_probe_rows(summary: ProbeSummary) -> list[dict[str, Any]]:
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


def build_probe_headings(summary: ProbeSummary) -> list[str]:
    keys = summary["ways"][SCRATCH]["metrics"]
    return [cell for key in keys for cell in (name_metric(summary, key), "difference to scratch")]


def name_metric(summary: ProbeSummary, key: str) -> str:
    return METRIC_NAMES.get(key, f"scaled {key.upper()}" if summary["scaled"] else key)


def _format_interval(difference: SeedDifference) -> str:
    """Format a difference and its interval, with signs."""
    bounds = f"{difference['low']:+.4f} to {difference['high']:+.4f}"
    return f"{difference['difference']:+.4f}, {bounds}"
