"""Measure whether pre-training helps: train a job from scratch, on the frozen encoder, fine-tuned.

The three runs share windows, architecture and seeds, so each seed's metrics are compared with
those of the same seed. The intervals say what other seeds would give with this encoder and these
labels; other labels would be another question.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slipstream import config as configs
from slipstream import runs, training
from slipstream.base import statistics as stats
from slipstream.base.errors import (
    SAME_COMMAND,
    Interrupted,
    Option,
    ResumableError,
    UserError,
    Wording,
)
from slipstream.config import Config
from slipstream.events import Event, ProbeStep
from slipstream.reporting.wording import beats_majority, describe_probe
from slipstream.runs.summary import (
    LaneSummary,
    ProbeSummary,
    RunSummary,
    SeedDifference,
    SeedMetrics,
)
from slipstream.scoring.summary import get_metric

SCRATCH, FROZEN, TUNED = "scratch", "frozen", "fine-tuned"
STRATEGIES = {
    SCRATCH: "the encoder's architecture, without its weights",
    FROZEN: "the encoder as it is, only the head is trained",
    TUNED: "the encoder is trained too, after train.freeze_epochs",
}
SUMMARY = "summary.json"
Source = Config | str | Path | Mapping[str, Any]
Watch = Callable[[Event], None]


@dataclass(frozen=True)
class FinishedProbe:
    """A probe that is over; `slipstream.Probe` is made from it."""

    run: Path
    """The folder that holds the four runs"""
    summary: ProbeSummary
    """The object that `slipstream pretrain --probe --json` prints"""


def probe(
    encoder: Source | None,
    labels: Source,
    data: Any = None,
    *,
    run: str | Path | None = None,
    seeds: int = 10,
    overrides: tuple[str, ...] = (),
    label_overrides: tuple[str, ...] = (),
    watch: Watch | None = None,
    folder: str | Path | None = None,
) -> FinishedProbe:
    """Test whether pre-training helps; `slipstream.probe` documents the arguments."""
    started_at = time.perf_counter()
    run = None if run is None else runs.find_run(run, kinds=("pretrain",))
    if seeds < 2:
        raise UserError(
            Option("seeds") + f" is {seeds}; an interval takes at least 2, and 10 are usual"
        )
    pretrain_config = _load_encoder_config(encoder, run, overrides)
    label_config = _load_label_config(labels, (*label_overrides, f"train.repeats={seeds}"))
    if run is not None and not (runs.open_run(run).folder / "metrics.json").is_file():
        raise UserError(f"{run}: holds no metrics.json; was the pre-training finished?")
    probe_run = _open_folder({"encoder": pretrain_config, "labels": label_config}, folder, watch)
    with runs.lock_run(probe_run), _explain_resume(probe_run.folder):
        runs.remove_manifest(probe_run)
        if run is None:
            probe_run.notify(ProbeStep(what="the encoder: pre-training"))
            place = probe_run.folder / "encoder"
            pretrained = training.train_or_resume(place, pretrain_config, data, watch)
        else:
            pretrained = runs.read_metrics(runs.open_run(run).folder)
        jobs = build_configs(labels, label_overrides, Path(pretrained["run"]), seeds)
        results = {}
        for name, config in jobs.items():
            probe_run.notify(ProbeStep(what=f"{name}: {STRATEGIES[name]}"))
            results[name] = training.train_or_resume(probe_run.folder / name, config, data, watch)
        summary = summarize_probe(probe_run.folder, pretrain_config.name, pretrained, results)
        trained = [*results.values(), *([pretrained] if run is None else [])]
        # a resumed probe does not train again what had finished before
        in_runs_s = sum(result["seconds"] for result in trained)
        summary["seconds"] = max(time.perf_counter() - started_at, in_runs_s)
        summary |= cast(ProbeSummary, runs.describe_origin())
        runs.write_metrics(probe_run, summary, name=SUMMARY)
    return FinishedProbe(probe_run.folder, summary)


@contextmanager
def _explain_resume(folder: Path) -> Iterator[None]:
    """Say how to resume the probe where a message says how to resume the run that stopped."""
    try:
        yield
    except (Interrupted, ResumableError) as error:
        again = Wording(f"--resume {folder}", f'folder="{folder}"')
        error.fix = "resume the probe with " + SAME_COMMAND + " and " + again
        raise


def _load_encoder_config(
    encoder: Source | None, run: str | Path | None, overrides: Iterable[str]
) -> Config:
    if (encoder is None) == (run is None):
        raise UserError(
            "a probe takes a config to pre-train from, or the run of an encoder ("
            + Option("encoder", "RUN")
            + ")"
        )
    source = encoder if run is None else runs.open_run(run).folder / "config.toml"
    assert source is not None
    return configs.load(source, (*overrides, configs.PRETRAIN_OVERRIDE))


def _load_label_config(labels: Source, overrides: Iterable[str]) -> Config:
    """Load the job to probe with, so that its errors show before the encoder is trained."""
    config = configs.load(labels, tuple(overrides))
    if config.masked:
        raise UserError("the config to probe with is of a pre-training; name one that trains")
    if config.train.init_from is not None:
        raise UserError(
            "train.init_from is set by the probe itself; remove it from the probe's config"
        )
    if config.train.freeze_epochs >= config.train.epochs:
        raise UserError(
            f"train.freeze_epochs = {config.train.freeze_epochs} leaves none of train.epochs = "
            f"{config.train.epochs} for fine-tuning; lower it in the config to probe with"
        )
    return config


def build_configs(
    labels: Source, overrides: Iterable[str], encoder: Path, seeds: int
) -> dict[str, Config]:
    """Return the job's config for each strategy; unset settings of the model are the encoder's."""
    start = f"train.init_from={runs.to_json(str(encoder))}"
    tuned = configs.load(labels, (*overrides, f"train.repeats={seeds}", start))
    return {
        SCRATCH: configs.replace_settings(tuned, {"train.init_from": None}),
        FROZEN: configs.replace_settings(tuned, {"train.freeze_epochs": tuned.train.epochs}),
        TUNED: tuned,
    }


def _open_folder(
    jobs: Mapping[str, Config], folder: str | Path | None, watch: Watch | None
) -> runs.Run:
    """Create a folder with both configs in it, or open an earlier probe of the same configs."""
    texts = {f"{name}.toml": configs.to_toml(config) for name, config in jobs.items()}
    if folder is None:
        first = jobs["encoder"]
        return runs.create_run(f"{first.name}-probe", out=first.out, files=texts, watch=watch)
    earlier = runs.find_run(folder, out=jobs["encoder"].out, kinds=("probe",)).resolve()
    if not (earlier / "labels.toml").is_file():
        raise UserError(f"{folder}: is not the folder of a probe (it holds no labels.toml)")
    for name, text in texts.items():
        path = earlier / name
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise UserError(
                f"{path}: the probe began with other settings; start a new one, without its folder"
            )
        runs.write_text(path, text)
    return runs.Run(earlier, watch)


def summarize_probe(
    folder: Path, name: str, encoder: RunSummary, results: Mapping[str, RunSummary]
) -> ProbeSummary:
    """Return each strategy's metrics by seed, their differences from scratch, and a verdict."""
    scratch = results[SCRATCH]
    metric, classes = scratch["judged_by"], bool(scratch.get("classes"))
    keys = list(dict.fromkeys([metric, *(["balanced_accuracy"] if classes else [])]))
    by_seed = {
        strategy: {key: _group_by_seed(result, key) for key in keys}
        for strategy, result in results.items()
    }
    trained = [metrics[metric] for metrics in by_seed.values()]
    seeds = [seed for seed in by_seed[SCRATCH][metric] if all(seed in seeds for seeds in trained)]
    if len(seeds) < 2:
        raise UserError(f"{folder}: fewer than two seeds trained to an end in all three ways")
    values = {
        strategy: {key: [by_seed[strategy][key][seed] for seed in seeds] for key in keys}
        for strategy in results
    }
    against_scratch = {
        strategy: {
            key: compare_with_scratch(values[SCRATCH][key], values[strategy][key], key)
            for key in keys
        }
        for strategy in (FROZEN, TUNED)
    }
    beating = [
        strategy
        for strategy in results
        if classes and beats_majority(results[strategy], "model", metric)
    ]
    summary: ProbeSummary = {
        "run": str(folder),
        "name": name,
        "objective": "probe",
        "seeds": seeds,
        "judged_by": metric,
        "scaled": not classes,
        "windows": scratch["windows"],
        "encoder": {
            **{key: encoder[key] for key in ("run", "judged_by", "beaten_by", "seconds")},
            "error": get_metric(encoder, "val", encoder["judged_by"]),
        },
        "ways": {
            strategy: {
                "what": STRATEGIES[strategy],
                "run": result["run"],
                "metrics": {key: _summarize_seeds(values[strategy][key]) for key in keys},
                "seconds": result["seconds"],
            }
            for strategy, result in results.items()
        },
        "baselines": {
            baseline: {key: get_metric(scores, "test", key) for key in keys}
            for baseline, scores in scratch["baselines"].items()
            if scores
        },
        "against_scratch": against_scratch,
        "beat_majority": beating if classes else None,
        "notes": _collect_notes(results, seeds),
        "helped": against_scratch[TUNED][metric]["verdict"],
    }
    return summary | {"verdict": describe_probe(summary)}


def compare_with_scratch(
    scratch: Sequence[float], strategy: Sequence[float], metric: str
) -> SeedDifference:
    """Return the mean of the seeds' differences with its paired t interval, and a verdict."""
    differences = [b - a for a, b in zip(scratch, strategy, strict=True)]
    interval = stats.compute_t_interval(differences)
    return {
        "difference": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "level": stats.LEVEL,
        "n": len(differences),
        "verdict": interval.judge(higher_is_better=metric in stats.HIGHER_IS_BETTER),
    }


def _group_by_seed(summary: RunSummary, metric: str) -> dict[int, float]:
    """Return each seed's test metric; with folds, their mean, if all folds trained to an end."""
    lanes: dict[int, list[LaneSummary]] = {}
    for lane in summary["lanes"]:
        lanes.setdefault(lane["seed"], []).append(lane)
    return {
        seed: statistics.fmean(get_metric(lane, "test", metric) for lane in folds)
        for seed, folds in lanes.items()
        if all(lane["metrics"] for lane in folds)
    }


def _summarize_seeds(values: Sequence[float]) -> SeedMetrics:
    spread = stats.summarize_spread(values)
    return {"mean": spread["mean"], "sd": spread["sd"], "by_seed": list(values)}


def _collect_notes(results: Mapping[str, RunSummary], seeds: Sequence[int]) -> list[str]:
    """Return the notes of the three runs, each once, and the seeds that are missing."""
    notes = dict.fromkeys(note for result in results.values() for note in result["notes"])
    missing = sorted({lane["seed"] for lane in results[SCRATCH]["lanes"]} - set(seeds))
    if missing:
        listed = ", ".join(map(str, missing))
        notes[f"left out, since not every way trained to an end from it: seed {listed}"] = None
    return list(notes)
