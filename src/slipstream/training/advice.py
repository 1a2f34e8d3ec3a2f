"""Suggest settings that often help and are not set, and measure each by a short training."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream import config as configs
from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.base.statistics import BETTER
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.engine.planning import TrainingWorkload
from slipstream.runs.summary import RunSummary, get_metrics
from slipstream.scoring.predict import accumulate, get_task_metrics, make_predictor, predict_batches

TRIAL_S = 6.0
"""Training time of each trial"""
NUM_TRIED = 2
OFTEN = "what often helps and is not set"
VALIDATIONS = 3
"""Validations of a trial, of which the lowest error counts, as with early stopping"""
MAX_WINDOWS, MAX_BATCH = 300, 32
"""Validation windows of a trial, and sequences of one step: small steps, so that there are many"""
SMALL_WIDTH = 32
"""Width of the one layer that a trial on a CPU has"""
MIN_TOKENS = 48
"""Rows of the context from which on patches pay"""
PATCHES = (16, 12, 8)
EARLY = 0.15
"""Share of the epochs within which a best epoch is early: the rate may be too high"""


@dataclass(frozen=True)
class Suggestion:
    """Settings to change together, and why that may help."""

    settings: dict[str, Any]
    why: str


def _format(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:.3g}"


def suggest(config: Config, dataset: Dataset, result: RunSummary | None = None) -> list[Suggestion]:
    """Return what often helps and is not set, the most promising first.

    `result` is the summary of a run with this config, if there is one.
    """
    possible = [*_suggest_shape(config, dataset), *_suggest_context(config, dataset)]
    possible += _suggest_patch(config)
    rate = Suggestion({"train.lr": config.train.lr / 3}, "smaller steps settle in better minima")
    best, epochs = (result or {}).get("best_epoch"), (result or {}).get("epochs")
    is_early = bool(best and epochs and best <= EARLY * epochs)
    possible.insert(0 if is_early else len(possible), rate)
    fixed = configs.list_fixed_settings(config)
    return [
        suggestion
        for suggestion in possible
        if _is_valid(config, suggestion) and not set(suggestion.settings) & set(fixed)
    ]


def _suggest_shape(config: Config, dataset: Dataset) -> Iterator[Suggestion]:
    """Suggest what makes a forecast relative to what is known of its own channel."""
    signature = dataset.signature
    if not signature.horizon or signature.classes or not signature.shared:
        return
    if config.model.normalize == "none":
        yield Suggestion(
            {"model.normalize": "last"}, "the model forecasts changes, not levels that drift"
        )
    if (
        signature.channels == "together"
        and signature.shared == len(signature.targets) > 1
        and not signature.static
    ):
        yield Suggestion(
            {"data.channels": "independent"},
            f"one model learns from all {len(signature.targets)} targets, each by itself",
        )


def _suggest_context(config: Config, dataset: Dataset) -> Iterator[Suggestion]:
    """Suggest a longer context, at least two seasons, if every series is long enough for it."""
    context, patch = config.data.context, config.model.patch
    longer = max(2 * context, 2 * (dataset.period or 0))
    longer = -(-longer // patch) * patch
    offsets = dataset.index.offsets
    if 4 * (longer + config.data.horizon) <= int((offsets[1:] - offsets[:-1]).min()):
        yield Suggestion({"data.context": longer}, "the model sees more of the past")


def _suggest_patch(config: Config) -> Iterator[Suggestion]:
    context = config.data.context
    if config.model.spec.is_sequential and config.model.patch == 1 and context >= MIN_TOKENS:
        patch = next((rows for rows in PATCHES if context % rows == 0), None)
        if patch is not None:
            yield Suggestion(
                {"model.patch": patch},
                f"{patch} times fewer time steps: faster, and less to forget",
            )


def _is_valid(config: Config, suggestion: Suggestion) -> bool:
    try:
        configs.replace_settings(config, suggestion.settings)
    except UserError:
        return False
    return True


def summarize_suggestions(
    config: Config, dataset: Dataset, result: RunSummary
) -> dict[str, Any] | None:
    """Return what often helps and is not set, for a run that is not shown to beat every baseline,
    or that a constant beats; else None."""
    r2 = get_metrics(result)["test"].get("r2")
    is_shown = result["against_baselines"]["verdict"] == BETTER
    if is_shown and (r2 is None or r2 > 0 or math.isnan(r2)):
        return None
    suggestions = suggest(config, dataset, result)
    if not suggestions:
        return None
    listed = "; ".join(describe_settings(suggestion.settings) for suggestion in suggestions)
    line = f"{OFTEN}: {listed}; slipstream train JOB --advise measures the first two"
    return {
        "suggestions": [asdict(suggestion) for suggestion in suggestions],
        "trials": [],
        "lines": [line],
    }


def advise_run(folder: Path, config: Config, tell: Callable[[str], None]) -> RunSummary:
    """Measure what may help a finished run, and add it to its metrics; return the summary."""
    metrics = runs.read_metrics(folder)
    advice = measure_suggestions(config, result=metrics, tell=tell)
    notes = [note for note in metrics["notes"] if not note.startswith(OFTEN)]
    metrics = runs.update_metrics(folder, advice=advice, notes=[*notes, *advice["lines"]])
    metrics.pop("detail", None)
    return metrics


def measure_suggestions(
    config: Config,
    data: Any = None,
    *,
    result: RunSummary | None = None,
    seconds: float = TRIAL_S,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train for a few seconds as configured and with each of the most promising suggestions, and
    compare the validation errors.

    The second suggestion is tried together with the first, if that one helped.
    """
    dataset = datasets.load_dataset(config, data)
    suggestions = suggest(config, dataset, result)
    trials: list[dict[str, Any]] = []
    changes: dict[str, Any] = {}
    can_try = dataset.memory is not None and not config.masked
    for suggestion in (None, *suggestions[:NUM_TRIED]) if suggestions and can_try else ():
        settings = changes | (suggestion.settings if suggestion else {})
        tell(f"training for {seconds:.0f} s: {describe_settings(settings)} ...")
        trial = _train_briefly(configs.replace_settings(config, settings), data, seconds)
        first = trials[0]["scaled_error"] if trials else trial["scaled_error"]
        if all(trial["scaled_error"] < earlier["scaled_error"] for earlier in trials):
            changes = settings
        trials.append({"settings": settings, **trial, "change": trial["scaled_error"] / first - 1})
    summary = {
        "suggestions": [asdict(suggestion) for suggestion in suggestions],
        "trials": trials,
        "best": changes,
        "seconds": seconds,
        "metric": get_task_metrics(dataset).HEADLINE,
        "small_model": _is_shrunk(config),
        "targets": len(dataset.signature.targets),
    }
    return summary | {"lines": list(_describe_trials(summary))}


def _describe_trials(advice: Mapping[str, Any]) -> Iterator[str]:
    """Yield the measured differences, and the settings to take over."""
    if not advice["trials"]:
        yield "nothing that often helps is left to try"
        return
    metric = advice["metric"].replace("_", "-")
    metric = metric.upper() if metric == "mae" else metric
    small = ", of a small model of this kind" if advice["small_model"] else ""
    over = ", scaled" if advice["targets"] > 1 else ""
    yield f"validation {metric} after {advice['seconds']:.0f} s of training each{small}:"
    for trial in advice["trials"]:
        change = f" ({100 * trial['change']:+.0f} %{over})" if trial["settings"] else ""
        yield f"  {describe_settings(trial['settings'])}: {trial['error']:.4g}{change}"
    best = " ".join(f"--set {name}={value}" for name, value in advice["best"].items())
    yield f"train with what helped: {best}" if best else "neither helped in so short a time"


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Format settings in one line; without any, the config is as it is."""
    listed = (f"{name} = {_format(value)}" for name, value in settings.items())
    return ", ".join(listed) or "as configured"


def _train_briefly(config: Config, data: Any, seconds: float) -> dict[str, Any]:
    """Train for some seconds; return the lowest validation error and the steps taken."""
    dataset = datasets.load_dataset(config, data)
    dataset = _thin_out(dataset.select_fold(dataset.folds[-1]) if dataset.folds else dataset)
    settings = _simplify(config, dataset.signature.sequences_per_window)
    workload = TrainingWorkload(settings, dataset)
    scores: list[dict[str, float]] = []
    try:
        with workload.settings():
            for _ in range(VALIDATIONS):
                end = time.perf_counter() + seconds / VALIDATIONS
                while time.perf_counter() < end and not _is_over(workload):
                    workload.time_steps(1)
                workload.finish()
                scores.append(_validate(workload, dataset))
    finally:
        workload.close()
    best = min(scores, key=lambda score: score["scaled_error"])
    return best | {"steps": workload.steps_done}


def _simplify(config: Config, sequences_per_window: int) -> Config:
    """Return settings with which a few seconds are enough: nothing is measured, steps are small,
    and a CPU trains a small model of the same kind in one thread."""
    batch = max(MAX_BATCH // sequences_per_window, 4)
    batch = batch if config.train.batch == "auto" else min(config.train.batch, batch)
    settings: dict[str, Any] = {"engine.plan": "off", "train.repeats": 1, "train.batch": batch}
    settings["engine.data_parallel"] = 1
    if config.engine.threads == "auto":
        settings["engine.threads"] = 1
    if _is_shrunk(config):
        settings |= {"model.hidden": SMALL_WIDTH, "model.layers": 1}
    return configs.replace_settings(config, settings)


def _is_shrunk(config: Config) -> bool:
    """Whether a trial takes a smaller model: a sequence model on a CPU, unless its encoder is
    fixed."""
    model, on_cpu = config.model, machine.choose_device(config.engine.device).type == "cpu"
    divisor = model.spec.width_divisor
    divides = divisor is None or SMALL_WIDTH % getattr(model, divisor) == 0
    is_large = max(model.sizes) > SMALL_WIDTH or model.layers > 1
    fits = model.spec.is_sequential and divides and config.train.init_from is None
    return on_cpu and is_large and fits


def _is_over(workload: TrainingWorkload) -> bool:
    return workload.steps_done >= workload.num_steps * workload.config.train.epochs


def _thin_out(dataset: Dataset) -> Dataset:
    """Return the data set with fewer validation windows, evenly spread, and no test windows."""
    assert dataset.memory is not None
    starts = dataset.memory.starts
    val = starts["val"][:: max(-(-len(starts["val"]) // MAX_WINDOWS), 1)].contiguous()
    chosen = {"train": starts["train"], "val": val, "test": val[:0]}
    return replace(
        dataset,
        num_windows={name: len(starts) for name, starts in chosen.items()},
        memory=replace(dataset.memory, starts=chosen),
    )


@torch.inference_mode()
def _validate(workload: TrainingWorkload, dataset: Dataset) -> dict[str, float]:
    """Return the validation error in the data's units and in standardised ones."""
    context = workload.context
    context.model.eval()
    chunks = dataset.iter_chunks("val", context.series, rows=0)
    predict = make_predictor(context.model, workload.plan, dataset.signature, dataset.scaler)
    sums = accumulate(predict_batches(predict, chunks), dataset)
    context.model.train()
    scores = sums.compute()
    headline = get_task_metrics(dataset).HEADLINE
    error = float(scores["overall"][headline])
    return {"error": error, "scaled_error": float(scores.get("scaled", {}).get(headline, error))}
