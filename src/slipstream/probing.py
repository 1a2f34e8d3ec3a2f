"""Does pre-training help? One job trained from scratch, on the frozen encoder, and fine-tuned.

The three have the same windows, architecture and seeds, so that each seed's figures are compared
with those of the same seed. The intervals tell what other seeds would give, with this encoder and
these labels; other labels would be another question.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import runs, training
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.reporting import beats_majority, describe_probe, probe_headings, probe_rows
from slipstream.runs import Event
from slipstream.text import format_html_table, format_table

LEVEL = 0.95
SCRATCH, FROZEN, TUNED = WAYS = ("scratch", "frozen", "fine-tuned")
WHAT = {
    SCRATCH: "the encoder's architecture, without its weights",
    FROZEN: "the encoder as it is, only the head is trained",
    TUNED: "the encoder is trained too, after train.freeze_epochs",
}
HIGHER_IS_BETTER = {"balanced_accuracy"}
BETTER, WORSE, NEITHER = "better", "worse", "no difference shown"
SUMMARY = "summary.json"
Source = Config | str | Path | Mapping[str, Any]
Watch = Callable[[Event], None]


@dataclass(frozen=True, repr=False)
class Probe:
    """The result of `probe`; it prints as its verdict and a table of metrics.

    Attributes:
        run: The folder that holds the four runs.
        summary: The object that `slipstream pretrain --probe --json` prints.

    Example:
        probe = slipstream.probe("bars.toml", "labels.toml")
        probe.summary["verdict"]
    """

    run: Path
    summary: dict[str, Any]

    def __repr__(self) -> str:
        return format_table(self._title, self._headings, self._rows())

    def _repr_html_(self) -> str:
        return format_html_table(self._title, self._headings, self._rows())

    @property
    def _title(self) -> str:
        return f"Probe of {self.run}: {self.summary['verdict']}"

    @property
    def _headings(self) -> list[str]:
        return ["", *probe_headings(self.summary)]

    def _rows(self) -> list[list[str]]:
        return [[row["name"], *row["cells"]] for row in probe_rows(self.summary)]


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
) -> Probe:
    """Test whether pre-training helps a task with few labels.

    Pre-trains the encoder, then trains `labels` from scratch, on the frozen encoder and fine-tuned,
    from the same seeds, and compares the test metrics with paired intervals.

    Args:
        encoder: The config to pre-train with; None with `run`.
        labels: The config of the labelled task.
        data: A table to use instead of `data.path` of both configs.
        run: The folder of an earlier pre-training run whose encoder is used.
        seeds: The number of seeds.
        overrides: Settings that override `encoder`.
        label_overrides: Settings that override `labels`.
        watch: A function that is called with every event.
        folder: The folder of an earlier probe with the same settings to continue; finished runs
            are not trained again.

    Returns:
        A `Probe` with the folder of the four runs and the summary.

    Raises:
        UserError: A setting, the data or an argument is wrong.
        Interrupted: Ctrl-C or SIGTERM stopped a run, after it saved a checkpoint.

    Example:
        print(slipstream.probe("bars.toml", "labels.toml", seeds=10))
    """
    began = time.perf_counter()
    first, asked = _asked(encoder, run, labels, seeds, overrides, label_overrides)
    place = _place({"encoder": first, "labels": asked}, folder, watch)
    with runs.lock_run(place):
        runs.remove_manifest(place)
        if run is None:
            _tell(place, "the encoder: pre-training")
            theirs = training.train_or_resume(place.folder / "encoder", first, data, watch)
        else:
            theirs = runs.read_metrics(runs.open_run(run).folder)
        settings = build_configs(labels, label_overrides, Path(theirs["run"]), seeds)
        found = {}
        for name in WAYS:
            _tell(place, f"{name}: {WHAT[name]}")
            found[name] = training.train_or_resume(place.folder / name, settings[name], data, watch)
        summary = summarize_probe(place.folder, first.name, theirs, found)
        summary["seconds"] = time.perf_counter() - began
        runs.write_metrics(place, summary, name=SUMMARY)
    return Probe(place.folder, summary)


def _asked(
    encoder: Source | None,
    run: str | Path | None,
    labels: Source,
    seeds: int,
    overrides: Iterable[str],
    label_overrides: Iterable[str],
) -> tuple[Config, Config]:
    """Both configs, so that what is wrong in the second is told before the first is trained."""
    if (encoder is None) == (run is None):
        raise UserError(
            "a probe takes a config to pre-train from, or the run of an encoder (--encoder RUN)"
        )
    if seeds < 2:
        raise UserError(f"--seeds is {seeds}; an interval takes at least 2, and 10 are usual")
    source = encoder if run is None else runs.open_run(run).folder / "config.toml"
    assert source is not None
    first = configs.load(source, (*overrides, configs.PRETRAIN_OVERRIDE))
    given = configs.load(labels, (*label_overrides, f"train.repeats={seeds}"))
    if run is not None and not (runs.open_run(run).folder / "metrics.json").is_file():
        raise UserError(f"{run}: holds no metrics.json; was the pre-training finished?")
    if given.masked:
        raise UserError("the config to probe with is of a pre-training; name one that trains")
    if given.train.init_from is not None:
        raise UserError(
            "train.init_from of the config to probe with is what the probe sets; take it out"
        )
    if given.train.freeze_epochs >= given.train.epochs:
        raise UserError(
            f"train.freeze_epochs = {given.train.freeze_epochs} leaves none of train.epochs = "
            f"{given.train.epochs} for fine-tuning; lower it in the config to probe with"
        )
    return first, given


def build_configs(
    labels: Source, overrides: Iterable[str], encoder: Path, seeds: int
) -> dict[str, Config]:
    """The same job three times; what it does not say of the model is the encoder's."""
    start = f"train.init_from={runs.to_json(str(encoder))}"
    tuned = configs.load(labels, (*overrides, f"train.repeats={seeds}", start))
    return {
        SCRATCH: configs.replace_settings(tuned, {"train.init_from": None}),
        FROZEN: configs.replace_settings(tuned, {"train.freeze_epochs": tuned.train.epochs}),
        TUNED: tuned,
    }


def _place(asked: dict[str, Config], folder: str | Path | None, watch: Watch | None) -> runs.Run:
    """A new folder with both configs in it, or an earlier probe's, which must be of the same."""
    texts = {f"{name}.toml": configs.to_toml(config) for name, config in asked.items()}
    if folder is None:
        first = asked["encoder"]
        return runs.create_run(f"{first.name}-probe", out=first.out, files=texts, watch=watch)
    found = Path(folder).resolve()
    if not (found / "labels.toml").is_file():
        raise UserError(f"{folder}: is not the folder of a probe (it holds no labels.toml)")
    for name, text in texts.items():
        path = found / name
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise UserError(
                f"{path}: the probe began with other settings; start a new one, without its folder"
            )
        runs.write_text(path, text)
    return runs.Run(found, watch)


def _tell(place: runs.Run, what: str) -> None:
    place.notify({"event": "probe", "what": what})


def summarize_probe(
    folder: Path, name: str, encoder: dict[str, Any], found: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Every way's figures by seed, their differences to those from scratch, and a verdict."""
    scratch = found[SCRATCH]
    judged_by = scratch["judged_by"]
    classes = bool(scratch.get("classes"))
    keys = [judged_by, *(["balanced_accuracy"] if classes else [])]
    by_seed = {way: {key: _by_seed(one, key) for key in keys} for way, one in found.items()}
    shared = [
        seed
        for seed in by_seed[SCRATCH][judged_by]
        if all(seed in by_seed[way][judged_by] for way in WAYS)
    ]
    if len(shared) < 2:
        raise UserError(f"{folder}: fewer than two seeds trained to an end in all three ways")
    values = {
        way: {key: [by_seed[way][key][seed] for seed in shared] for key in keys} for way in WAYS
    }
    summary: dict[str, Any] = {
        "run": str(folder),
        "name": name,
        "objective": "probe",
        "seeds": shared,
        "judged_by": judged_by,
        "scaled": not classes,
        "windows": scratch["windows"],
        "encoder": {
            "run": encoder["run"],
            "judged_by": encoder["judged_by"],
            "error": encoder["scaled"]["val"][encoder["judged_by"]],
            "beaten_by": encoder["beaten_by"],
            "seconds": encoder["seconds"],
        },
        "ways": {
            way: {
                "what": WHAT[way],
                "run": found[way]["run"],
                "metrics": {key: _spread(values[way][key]) for key in keys},
                "seconds": found[way]["seconds"],
            }
            for way in WAYS
        },
        "baselines": {
            name: {key: _of_test(one, key) for key in keys}
            for name, one in scratch["baselines"].items()
            if one
        },
        "against_scratch": {
            way: {
                key: compare(values[SCRATCH][key], values[way][key], higher=key in HIGHER_IS_BETTER)
                for key in keys
            }
            for way in (FROZEN, TUNED)
        },
        "beat_majority": [way for way in WAYS if beats_majority(found[way], "model", judged_by)]
        if classes
        else None,
        "notes": _notes(found, shared),
    }
    summary["helped"] = summary["against_scratch"][TUNED][judged_by]["verdict"]
    return summary | {"verdict": describe_probe(summary)}


def compare(scratch: Sequence[float], other: Sequence[float], *, higher: bool) -> dict[str, Any]:
    """The mean of the seeds' differences with its interval: a paired t, two-sided."""
    from scipy import stats  # takes a second

    differences = [b - a for a, b in zip(scratch, other, strict=True)]
    n = len(differences)
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(n)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * error
    low, high = mean - reach, mean + reach
    above, below = (BETTER, WORSE) if higher else (WORSE, BETTER)
    verdict = above if low > 0 else below if high < 0 else NEITHER
    return {"difference": mean, "low": low, "high": high, "level": LEVEL, "n": n} | {
        "verdict": verdict
    }


def _by_seed(summary: dict[str, Any], key: str) -> dict[int, float]:
    """Each seed's test figure; of a walk, the mean over its folds, where all of them ended."""
    found: dict[int, list[Any]] = {}
    for lane in summary["lanes"]:
        found.setdefault(lane["seed"], []).append(lane)
    return {
        seed: statistics.fmean(_of_test(lane, key) for lane in lanes)
        for seed, lanes in found.items()
        if all(lane["metrics"] for lane in lanes)
    }


def _of_test(found: dict[str, Any], key: str) -> float:
    """As models are judged: of numbers in standardised units."""
    return float((found.get("scaled") or found["metrics"])["test"][key])


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values),
        "by_seed": list(values),
    }


def _notes(found: dict[str, dict[str, Any]], shared: Sequence[int]) -> list[str]:
    """What the three runs say, once, and which seeds are missing."""
    told = dict.fromkeys(note for one in found.values() for note in one["notes"])
    asked = {lane["seed"] for lane in found[SCRATCH]["lanes"]}
    lost = sorted(asked - set(shared))
    if lost:
        seeds = ", ".join(str(seed) for seed in lost)
        told[f"left out, since not every way trained to an end from it: seed {seeds}"] = None
    return list(told)
