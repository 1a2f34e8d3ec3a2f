"""What a run that beats no baseline shows about itself, and the command that tries other settings.

Nothing here promises a gain: a rule of thumb that helped on one table did harm on the next. Changes
of settings are named only where short trainings have measured them, which is done on request.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Command, UserError
from slipstream.base.statistics import BETTER, NO_DIFFERENCE, Difference
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.engine.lanes import OUT_OF_TIME
from slipstream.engine.planning import TrainingWorkload
from slipstream.runs.summary import SCALED, RunSummary, read_metric
from slipstream.scoring.predict import accumulate, get_task_metrics, make_predictor, predict_batches

MIN_TRIAL_S, MAX_TRIAL_S = 6.0, 60.0
TRIAL_SHARE = 0.1
"""The training time of each trial, in parts of that of the run"""
MAX_CHANGES = 2
VALIDATIONS = 3
"""Validations of a trial, of which the lowest error counts, as with early stopping"""
MAX_WINDOWS, MAX_BATCH = 300, 32
"""Validation windows of a trial, and sequences of one step: small steps, so that there are many"""
MIN_TOKENS = 48
"""Rows of the context from which on patches are tried"""
PATCHES = (16, 12, 8)
EARLY = 0.15
"""Share of the epochs within which a best epoch is early"""
AUTO_MINUTES = 5
AS_CONFIGURED, EARLIER = "as configured", "earlier"


def advise(config: Config, result: RunSummary) -> dict[str, Any] | None:
    """Return what the training of a run shows, and a command that tries other models and settings;
    None for a run that beats every baseline, and a constant."""
    r2 = read_metric(result, "test", "r2")
    is_shown = result["against_baselines"]["verdict"] == BETTER
    if is_shown and (r2 is None or r2 > 0 or math.isnan(r2)):
        return None
    observations = list(_observe(config, result))
    command = _format_auto(config, Path(result["run"]))
    tries = "tries other models, contexts and losses, measured on the validation set"
    return {
        "observations": observations,
        "command": command,
        "lines": [*observations, f"{command} {tries}"],
    }


def _observe(config: Config, result: RunSummary) -> Iterator[str]:
    """Yield what the losses of a training show, with the command that goes on from there."""
    train, best, epochs = config.train, result["best_epoch"], result["epochs"]
    if result["stopped"] == OUT_OF_TIME and train.minutes is not None:
        more = _format_resume(config, result, f"train.minutes={2 * train.minutes:g}")
        yield f"train.minutes ended the training after {epochs:.3g} epochs; to go on: {more}"
    elif best >= epochs:
        more = _format_resume(config, result, f"train.epochs={2 * math.ceil(epochs)}")
        last = f"the last epoch ({epochs:.3g})"
        yield f"the validation loss was lowest after {last}; to go on: {more}"
    elif best <= EARLY * epochs:
        yield (
            f"the validation loss was lowest after {best:.3g} of {epochs:.3g} epochs: what the "
            "later ones learned did not carry over to the validation windows"
        )


def _format_resume(config: Config, result: RunSummary, change: str) -> str:
    if config.data.path is None:
        return f'slipstream.train(resume="{result["run"]}", data=TABLE, overrides="{change}")'
    return Command("train", resume=result["run"], set=change).render("terminal")


def _format_auto(config: Config, folder: Path) -> str:
    """Return the command that searches from a run's config."""
    if config.data.path is None:
        return f'slipstream.auto("{folder / "config.toml"}", TABLE, minutes={AUTO_MINUTES})'
    command = Command("auto", folder / "config.toml", minutes=AUTO_MINUTES)
    return command.render("terminal")


def list_changes(config: Config, dataset: Dataset) -> list[dict[str, Any]]:
    """Return changes of settings to measure, each by its dotted names; none that the config has, or
    that an encoder to start from fixes."""
    possible = [*_change_shape(config, dataset), *_change_context(config, dataset)]
    possible += _change_patch(config)
    fixed = set(configs.list_fixed_settings(config))
    return [
        changes for changes in possible if _is_valid(config, changes) and not fixed & set(changes)
    ]


def _change_shape(config: Config, dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield changes that make a forecast relative to what is known of its own channel."""
    signature = dataset.signature
    if not signature.horizon or signature.classes or not signature.shared:
        return
    if config.model.normalize == "none":
        yield {"model.normalize": "last"}
    if (
        signature.channels == "together"
        and signature.shared == len(signature.targets) > 1
        and not signature.static
    ):
        yield {"data.channels": "independent"}


def _change_context(config: Config, dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield a longer context, at least two seasons, if every series is long enough for it."""
    context, patch = config.data.context, config.model.patch
    longer = max(2 * context, 2 * (dataset.period or 0))
    longer = -(-longer // patch) * patch
    offsets = dataset.index.offsets
    if 4 * (longer + config.data.horizon) <= int((offsets[1:] - offsets[:-1]).min()):
        yield {"data.context": longer}


def _change_patch(config: Config) -> Iterator[dict[str, Any]]:
    context = config.data.context
    if config.model.spec.is_sequential and config.model.patch == 1 and context >= MIN_TOKENS:
        patch = next((rows for rows in PATCHES if context % rows == 0), None)
        if patch is not None:
            yield {"model.patch": patch}


def _is_valid(config: Config, changes: Mapping[str, Any]) -> bool:
    try:
        configs.replace_settings(config, changes)
    except UserError:
        return False
    return True


def advise_run(folder: Path, config: Config, tell: Callable[[str], None]) -> RunSummary:
    """Measure changes of a finished run's settings, and add them to its metrics; return the
    summary."""
    metrics = runs.read_metrics(folder)
    before = dict(metrics.get("advice") or {})
    train_s = (metrics.get("time") or {}).get("training_s", 0.0)
    seconds = min(max(MIN_TRIAL_S, TRIAL_SHARE * train_s), MAX_TRIAL_S)
    measured = measure_changes(config, seconds=seconds, tell=tell)
    advice = {"observations": [], "command": _format_auto(config, folder)} | before | measured
    if not measured["best"]:
        measured["lines"].append(f"to try more: {advice['command']}")
    advice["lines"] = [*advice["observations"], *measured["lines"]]
    notes = [note for note in metrics["notes"] if note not in before.get("lines", ())]
    metrics = runs.update_metrics(folder, advice=advice, notes=[*notes, *advice["lines"]])
    metrics.pop("detail", None)
    return metrics


class Trial(NamedTuple):
    """A short training."""

    error: float
    """The lowest validation error, in the data's units"""
    scaled_error: float
    """In standardised units; of classes the error itself"""
    steps: int
    sums: Any
    """The validation errors window by window"""
    dataset: Dataset


def measure_changes(
    config: Config,
    data: Any = None,
    *,
    seconds: float = MIN_TRIAL_S,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train for a few seconds as configured and with each of the first changes, from the same seed,
    and compare the errors on the same validation windows.

    The second change is tried together with the first, if that one helped, and is then compared
    with it.
    """
    dataset = datasets.load_dataset(config, data)
    can_try = dataset.memory is not None and not config.masked
    changes = list_changes(config, dataset)[:MAX_CHANGES] if can_try else []
    trials: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    if changes:
        first = lowest = _run_trial(config, {}, data, seconds, tell)
        trials.append(_summarize_trial(first, {}))
    for change in changes:
        settings = best | change
        trial = _run_trial(config, settings, data, seconds, tell)
        difference = _compare_trials(trial, lowest)
        verdict = difference["verdict"] if difference else NO_DIFFERENCE
        trials.append(_summarize_trial(trial, settings, _compare_trials(trial, first), verdict))
        if verdict == BETTER:
            best, lowest = settings, trial
    summary = {
        "trials": trials,
        "best": best,
        "seconds": seconds,
        "metric": get_task_metrics(dataset).HEADLINE,
        "targets": len(dataset.signature.targets),
    }
    return summary | {"lines": list(_describe_trials(summary))}


def _run_trial(
    config: Config,
    settings: Mapping[str, Any],
    data: Any,
    seconds: float,
    tell: Callable[[str], None],
) -> Trial:
    tell(f"training for {seconds:.0f} s: {describe_settings(settings)} ...")
    return _train_briefly(configs.replace_settings(config, settings), data, seconds)


def _summarize_trial(
    trial: Trial,
    settings: Mapping[str, Any],
    difference: Difference | None = None,
    verdict: str | None = None,
) -> dict[str, Any]:
    """Return the summary of a trial: its difference from the config as it is, and the verdict
    against the best trial before it."""
    return {
        "settings": dict(settings),
        "error": trial.error,
        "scaled_error": trial.scaled_error,
        "steps": trial.steps,
        "change": difference and difference["relative"],
        "interval": difference and difference["relative_interval"],
        "verdict": verdict,
    }


def _compare_trials(trial: Trial, earlier: Trial) -> Difference | None:
    """Compare a trial with an earlier one by the rule of all comparisons; None where a longer
    context leaves other validation windows."""
    if not torch.equal(_list_predicted(trial.dataset), _list_predicted(earlier.dataset)):
        return None
    metrics, context = get_task_metrics(trial.dataset), trial.dataset.signature.context
    paired = metrics.compare_with(trial.sums, {EARLIER: earlier.sums}, context=context)
    scaled = f"{SCALED}{metrics.HEADLINE}"
    key = scaled if scaled in paired.differences else metrics.HEADLINE
    return paired.differences[key][EARLIER]


def _list_predicted(dataset: Dataset) -> Tensor:
    """Return the first predicted row of each validation window."""
    assert dataset.memory is not None
    return dataset.memory.starts["val"] + dataset.signature.lead


def _describe_trials(advice: Mapping[str, Any]) -> Iterator[str]:
    """Yield the measured differences, and the settings to take over."""
    if not advice["trials"]:
        yield "there is no change of settings to measure by a short training"
        return
    metric = advice["metric"].replace("_", "-")
    metric = metric.upper() if metric == "mae" else metric
    over = ", scaled" if advice["targets"] > 1 else ""
    seconds, helped = f"{advice['seconds']:.0f} s of training each", False
    yield f"validation {metric} after {seconds}, from the same seed:"
    for trial in advice["trials"]:
        text = f"  {describe_settings(trial['settings'])}: {trial['error']:.4g}"
        if trial["change"] is not None:
            text += f" ({100 * trial['change']:+.0f} %{over}{_format_interval(trial)})"
        if trial["settings"] and trial["verdict"] != BETTER:
            text += f": {trial['verdict']}" + (" by the second change" if helped else "")
        helped = helped or trial["verdict"] == BETTER
        yield text
    best = " ".join(f"--set {name}={value}" for name, value in advice["best"].items())
    yield f"train with what helped: {best}" if best else "none is shown to help in so short a time"


def _format_interval(trial: Mapping[str, Any]) -> str:
    if trial["interval"] is None:
        return ""
    low, high = (f"{100 * bound:+.0f} %" for bound in trial["interval"])
    return f", 95 % interval {low} to {high}"


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Format settings in one line; without any, the config is as it is."""
    listed = (f"{name} = {_format(value)}" for name, value in settings.items())
    return ", ".join(listed) or AS_CONFIGURED


def _format(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:.3g}"


def _train_briefly(config: Config, data: Any, seconds: float) -> Trial:
    """Train for some seconds; return the lowest validation error and the steps taken."""
    dataset = datasets.load_dataset(config, data)
    dataset = _thin_out(dataset.select_fold(dataset.folds[-1]) if dataset.folds else dataset)
    settings = _simplify(config, dataset.signature.sequences_per_window)
    workload = TrainingWorkload(settings, dataset)
    scores: list[tuple[float, float, Any]] = []
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
    error, scaled_error, sums = min(scores, key=lambda score: score[1])
    return Trial(error, scaled_error, workload.steps_done, sums, dataset)


def _simplify(config: Config, sequences_per_window: int) -> Config:
    """Return settings with which a few seconds are enough: nothing is measured, steps are small,
    and a CPU trains in one thread."""
    batch = max(MAX_BATCH // sequences_per_window, 4)
    batch = batch if config.train.batch == "auto" else min(config.train.batch, batch)
    settings: dict[str, Any] = {"engine.plan": "off", "train.repeats": 1, "train.batch": batch}
    settings["engine.data_parallel"] = 1
    if config.engine.threads == "auto":
        settings["engine.threads"] = 1
    return configs.replace_settings(config, settings)


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
def _validate(workload: TrainingWorkload, dataset: Dataset) -> tuple[float, float, Any]:
    """Return the validation error in the data's units and in standardised ones, and its sums."""
    context = workload.context
    context.model.eval()
    chunks = dataset.iter_chunks("val", context.series, rows=0)
    predict = make_predictor(context.model, workload.plan, dataset.signature, dataset.scaler)
    sums = accumulate(predict_batches(predict, chunks), dataset)
    context.model.train()
    scores = sums.compute()
    headline = get_task_metrics(dataset).HEADLINE
    error = float(scores["overall"][headline])
    return error, float(scores.get("scaled", {}).get(headline, error)), sums
