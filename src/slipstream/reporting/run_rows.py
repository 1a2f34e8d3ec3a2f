"""One run as a row: what it is, where it stands, and how good it is, from its small files."""

from __future__ import annotations

import json
import math
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.run_names import SEARCHES, find_foreign_entry, find_kind, get_start_time
from slipstream.base.statistics import HIGHER_IS_BETTER, Difference, Spread
from slipstream.base.storage import parse_path
from slipstream.base.text import format_epoch
from slipstream.runs.summary import (
    SCALED,
    BaselineScores,
    ComparedScores,
    ProbeSummary,
    RunSummary,
    Scores,
    SearchSummary,
    Section,
    Summary,
    list_interval_scores,
    read_metric,
)


class RowScores(NamedTuple):
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


def read_scores(kind: str, summary: Summary, metric: str | None) -> RowScores:
    """Read a metric of what the run predicts with; by default MAE, or log-loss for classes. A run
    that is untested has none."""
    if "untested" in summary:
        return RowScores(metric or "")
    result = find_result(kind, summary)
    if metric is None:
        metric = choose_metric(kind, summary)
    test, val = (read_metric(result, subset, metric) for subset in ("test", "val"))
    if test is None:  # of intervals there are scores on the test set alone
        test = list_interval_scores(result).get(metric)
    errors = {
        name: value
        for name, baseline in (result.get("baselines") or {}).items()
        if baseline
        and (value := read_metric(baseline, "val" if test is None else "test", metric)) is not None
    }
    best = min(errors, key=lambda name: rank(errors[name], metric), default=None)
    scores = RowScores(metric, test, val, best, errors[best] if best else None)
    gap = _find_difference(result, metric, best)
    if gap is None:
        return scores
    is_error = metric not in HIGHER_IS_BETTER
    bounds = gap.get("relative_interval") if is_error else gap.get("interval")
    if not bounds:
        return scores
    return scores._replace(verdict=gap["verdict"], interval=(bounds[0], bounds[1]))


def _find_difference(
    result: ComparedScores, metric: str, baseline: str | None
) -> Difference | None:
    """Return how a metric differs from a baseline's, with its interval; None where that is not
    known, as of version 0.1 and of metrics that are not compared window by window."""
    comparison = result.get("against_baselines")
    by_metric = comparison.get("differences") or {} if comparison else {}
    return by_metric.get(metric, {}).get(baseline or "")


def choose_metric(kind: str, summary: Summary) -> str:
    """Return the metric that describes a run in a table; of classes, what it is judged by."""
    if kind == "probe":
        probe = cast(ProbeSummary, summary)
        return f"{SCALED if probe['scaled'] else ''}{probe['judged_by']}"
    result = find_result(kind, summary)
    if "log_loss" not in _list_metrics(result):
        return "mae"
    return str(result.get("judged_by") or cast(RunSummary, summary).get("judged_by") or "log_loss")


def _list_metrics(result: Scores) -> set[str]:
    return {name for metrics in (result.get("metrics") or {}).values() for name in metrics}


def find_result(kind: str, summary: Summary) -> ComparedScores:
    """Return the part of a summary with the metrics of what the run predicts with.

    For a search that is the retrained best config, for a probe the fine-tuned model, for a run
    with repeats the single model or the ensemble, whichever `predict` uses.
    """
    if kind in SEARCHES:
        tests = cast(SearchSummary, summary)["test"]
        return tests.get("best") or {}
    if kind == "probe":
        return _convert_probe(cast(ProbeSummary, summary))
    summary = cast(RunSummary, summary)
    ensemble = summary.get("ensemble")
    if ensemble and summary.get("uses") == "ensemble":
        return {"baselines": summary["baselines"], **ensemble}
    return summary


def _convert_probe(summary: ProbeSummary) -> ComparedScores:
    """Arrange a probe's metrics as those of a training run."""
    section: Section = "scaled" if summary["scaled"] else "metrics"
    metrics = summary["ways"]["fine-tuned"]["metrics"]
    baselines: dict[str, BaselineScores] = {name: {} for name in summary["baselines"]}
    for name, values in summary["baselines"].items():
        baselines[name][section] = {"test": values}
    result: ComparedScores = {"baselines": baselines}
    result[section] = {"test": {name: spread["mean"] for name, spread in metrics.items()}}
    return result


def read_spread(result: ComparedScores, metric: str) -> Spread | None:
    """Return how a test metric varies over the repeats; None without repeats."""
    try:
        spreads = result["scaled_spread" if metric.startswith(SCALED) else "spread"] or {}
        spread = spreads[metric.removeprefix(SCALED)]
        return spread if spread["sd"] is not None and spread["n"] > 1 else None
    except (LookupError, TypeError):  # also where version 0.1 wrote none
        return None


COVERAGE = "coverage_"
"""Start of the name of an interval's coverage, before its level"""


def rank(value: float | None, metric: str) -> float:
    """Return a number that is lower the better the value is; last where there is none."""
    if value is None:
        return math.inf
    if metric in HIGHER_IS_BETTER:
        return -value
    if metric.startswith(COVERAGE):  # an interval of 80 % is to cover 80 %
        return abs(value - float(metric.removeprefix(COVERAGE)) / 100)
    return abs(value) if metric.endswith("bias") else value


RUNNING, STOPPED, FINISHED, DAMAGED = "running", "stopped", "finished", "damaged"
STATES = (RUNNING, STOPPED, FINISHED, DAMAGED)
LOG_START = b'{"event": "'
STAMP = re.compile(r"-(\d{8}T\d{6})Z(-\d+)?$")
"""The end of a run folder's name: when it was created"""
SUMMARIES = {"probe": "summary.json"}
"""Where the summary is not in metrics.json"""
LISTED = {
    *("path", "targets", "labels", "horizon", "kind"),
    *("objective", "epochs", "repeats", "init_from"),
    *("prepare", "step", "columns", "into", "name", "value"),
}
"""Settings of [data], its steps, [model] and [train] that a row shows, or that pruning needs"""
LOG_END = 16384
"""Bytes at the end of a log in which the last epoch is looked for"""
MAX_NAMES = 2
"""Files or targets that a row names one by one"""
DAMAGE_ERRORS = (AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class RunRow:
    """One run in the table of `list_runs`; it can be passed wherever a run is named.

    Attributes:
        run: The run folder.
        name: The name of the folder.
        kind: train, pretrain, search, auto, probe or ensemble.
        state: running, stopped (it can be resumed), finished or damaged.
        at: When the run was created (UTC).
        age_s: The seconds since then.
        model: The kind of model; of an ensemble, those of its members.
        data: The files, the targets and the horizon: `ETTh1.csv: OT +24`.
        metric: The metric of the next values; `scaled_mse` is in standardised units.
        test: The error on the test set of the model that `predict` uses.
        val: The error on the validation set; a pre-training run has no other.
        baseline: The best baseline.
        baseline_error: Its error on the same set.
        against_baseline: The error relative to that of the best baseline: -0.2 is 20 % lower. For
            metrics such as R², where higher is better, the difference.
        against_low: The lower end of its 95 % interval; None where there is none.
        against_high: The upper end.
        verdict: better, worse, or no difference shown: where the interval contains 0.
        repeats: The number of seeds.
        epochs: The number of epochs trained so far.
        seconds: The duration of the run, from its first start.
        note: What is wrong with a damaged run; who writes to a running one, and how far it is.

    Example:
        for row in slipstream.list_runs():
            print(row.name, row.state, row.test)
        slipstream.predict(slipstream.best_run(), "new.csv")
    """

    run: Path
    name: str
    kind: str
    state: str
    at: datetime
    age_s: float
    model: str | None = None
    data: str | None = None
    metric: str | None = None
    test: float | None = None
    val: float | None = None
    baseline: str | None = None
    baseline_error: float | None = None
    against_baseline: float | None = None
    against_low: float | None = None
    against_high: float | None = None
    verdict: str | None = None
    repeats: int = 1
    epochs: float | None = None
    seconds: float | None = None
    note: str = ""

    def __fspath__(self) -> str:
        return str(self.run)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON has it: paths and times as text."""
        return asdict(self) | {"run": str(parse_path(self.run)), "at": self.at.isoformat()}


@dataclass(frozen=True)
class RunFiles:
    """The content of the small files of a run."""

    folder: Path
    kind: str
    config: Mapping[str, Any]
    summary: Summary | None
    writers: Sequence[Mapping[str, Any]]
    """The processes that write to it"""
    has_checksum: bool
    """Whether the config has one: version 0.1 wrote none, nor a manifest"""
    damage: str = ""

    @property
    def state(self) -> str:
        if self.writers:
            return RUNNING
        if self.damage:
            return DAMAGED
        is_complete = self.summary is not None and not self.summary.get("pending")
        return FINISHED if is_complete and not self._was_reopened() else STOPPED

    def _was_reopened(self) -> bool:
        """Whether a finished run was resumed and has not finished since: its manifest is gone."""
        return self.has_checksum and not (self.folder / "manifest.json").exists()


def looks_like_run(folder: Path) -> bool:
    """Whether a folder is a run, or what is left of one, and not one that only has a config.toml
    too: what this takes for a run can be removed."""
    try:
        if (folder / "encoder.toml").is_file() and (folder / "labels.toml").is_file():
            return True
        if (folder / "events.jsonl").is_file():
            with (folder / "events.jsonl").open("rb") as log:
                if log.read(len(LOG_START)) == LOG_START:
                    return True
        text = (folder / "config.toml").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return False
    return runs.is_intact(text) is not None


def read_files(folder: Path, *, only_listed: bool = False) -> RunFiles:
    """Read the small files of a run; a damaged one is described, not raised.

    With `only_listed`, of the config only the settings that a row shows.
    """
    if (foreign := find_foreign_entry(folder, depth=0)) is not None:
        damage = f"{foreign.name} is no file of a run but leads elsewhere; it is not read"
        return RunFiles(folder, "train", {}, None, (), has_checksum=False, damage=damage)
    kind, writers = find_kind(folder), runs.find_writers(folder)
    config: Mapping[str, Any] = {}
    summary: Summary | None = None
    damage, intact = "", None
    names = ("encoder.toml", "labels.toml") if kind == "probe" else ("config.toml",)
    try:
        text = (folder / names[-1]).read_text(encoding="utf-8")
        intact = runs.is_intact(text)
        if intact is False:
            damage = f"{names[-1]} was changed since it was written"
        config = tomllib.loads(_select_listed(text) if only_listed and intact else text)
    except FileNotFoundError:
        damage = f"{names[-1]} is missing"
    except (OSError, ValueError, RecursionError) as error:
        damage = f"{names[-1]} cannot be read ({error})"
    name = SUMMARIES.get(kind, "metrics.json")
    try:
        if (folder / name).exists():
            runs.verify_files(folder, *names)
            summary = runs.read_metrics(folder, name=name)
            read_scores(kind, summary, None)
            if kind in ("train", "pretrain") and not (folder / "model").is_dir():
                damage = damage or "model/ is missing"
    except UserError as error:
        damage = damage or str(error).replace(f"{folder}/", "")
    except DAMAGE_ERRORS as error:
        damage, summary = damage or f"{name} lacks metrics ({type(error).__name__}: {error})", None
    return RunFiles(folder, kind, config, summary, writers, intact is not None, damage)


def _select_listed(text: str) -> str:
    """Return the lines of a config with the settings that a row shows, since parsing all of them
    takes most of the time of a list. The config is as `to_toml` wrote it, one setting a line,
    except for lists, whose further lines begin with a space or a bracket."""
    lines, selected = [], False
    for line in text.split("\n"):
        if line.startswith("["):
            selected = True
        elif not line.startswith((" ", "]")):
            selected = line.partition(" = ")[0] in LISTED
        if selected:
            lines.append(line)
    return "\n".join(lines)


def read_row(folder: Path, metric: str | None = None) -> RunRow:
    """Describe a run in one row, with the metric that is named or the usual one."""
    return make_row(read_files(folder), metric)


def make_row(files: RunFiles, metric: str | None = None) -> RunRow:
    """Make the row of a run from its files."""
    created = get_creation_time(files.folder)
    summary: Summary = files.summary or {}
    scores = read_scores(files.kind, summary, metric) if summary else RowScores(metric or "")
    epochs = _parse_number(cast(RunSummary, summary).get("epochs"))
    if files.state in (RUNNING, STOPPED):
        epochs = read_epoch(files.folder)
    return RunRow(
        run=files.folder,
        name=files.folder.name,
        kind=files.kind,
        state=files.state,
        at=created,
        age_s=max(time.time() - created.timestamp(), 0.0),
        model=_describe_model(files),
        data=describe_data(files.config),
        metric=scores.metric or None,
        test=scores.test,
        val=scores.val,
        baseline=scores.baseline,
        baseline_error=scores.baseline_error,
        against_baseline=scores.against_baseline,
        against_low=scores.interval[0] if scores.interval else None,
        against_high=scores.interval[1] if scores.interval else None,
        verdict=scores.verdict,
        repeats=int(_parse_number(_get(files.config, "train", "repeats")) or 1),
        epochs=epochs,
        seconds=_parse_number(summary.get("seconds")),
        note=_describe_state(files, epochs),
    )


def _describe_model(files: RunFiles) -> str | None:
    """Return the kind of model; of an ensemble, the kinds of its members; of `slipstream auto`,
    what it answers with."""
    if files.kind == "auto":
        return _describe_answer(cast(SearchSummary, files.summary or {}))
    members = cast(RunSummary, files.summary or {}).get("members")
    if files.kind == "ensemble" and members:
        return " + ".join(dict.fromkeys(str(member["kind"]) for member in members))
    kind = _get(files.config, "model", "kind")
    return None if kind is None else str(kind)


def _describe_answer(summary: SearchSummary) -> str | None:
    """Return the kind of the one model, or the number of models in the ensemble; None before the
    end."""
    try:
        members = cast(RunSummary, summary).get("members") or ()
        models = [member for member in members if member["weight"] > 0]
        if len(models) > 1:
            return f"ensemble of {len(models)}"
        kinds = [str(row["kind"]) for row in summary.get("leaderboard") or () if row["weight"] > 0]
        return kinds[0] if kinds else None
    except DAMAGE_ERRORS:
        return None


def _describe_state(files: RunFiles, epochs: float | None) -> str:
    """Say what is wrong with a damaged run, and how far an unfinished one has come."""
    planned = _get(files.config, "train", "epochs")
    reached = "" if epochs is None else f"epoch {format_epoch(epochs)} of {planned}"
    match files.state:
        case "running":
            return ", ".join(filter(None, (_describe_writers(files), reached)))
        case "stopped":
            shares = runs.count_shares(files.folder)
            done = f"{shares.done} of {shares.of} shares done" if shares else ""
            return ", ".join(filter(None, (f"after {reached}" if reached else "", done)))
        case _:
            return files.damage or cast(RunSummary, files.summary or {}).get("untested", "")


def _describe_writers(files: RunFiles) -> str:
    if len(files.writers) > 1:
        return f"{len(files.writers)} processes train shares of it"
    (writer,) = files.writers
    return f"process {writer['pid']} on {writer['host']}"


def read_epoch(folder: Path) -> float | None:
    """Return the epoch that a run has reached: what it has logged, or the slowest of its shares."""
    epoch = read_last_epoch(folder)
    if epoch is not None:
        return epoch
    reached = map(read_last_epoch, runs.list_worker_folders(folder))
    return min((epoch for epoch in reached if epoch is not None), default=None)


def read_last_epoch(folder: Path) -> float | None:
    """Return the epoch of the last validation or line of losses in the log of a folder."""
    try:
        with (folder / "events.jsonl").open("rb") as log:
            log.seek(max(log.seek(0, 2) - LOG_END, 0))
            lines = log.read().split(b"\n")
        for line in reversed(lines):
            if line.startswith((b'{"event": "epoch"', b'{"event": "log"')) and b'"epoch":' in line:
                return float(json.loads(line)["epoch"])
    except (OSError, *DAMAGE_ERRORS):
        pass
    return None


def get_creation_time(folder: Path) -> datetime:
    """Return when a run was created, from its name, or else from its files."""
    if match := STAMP.search(folder.name):
        try:
            return datetime.strptime(match[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
        except ValueError:
            pass
    try:
        seconds = get_start_time(folder) or folder.stat().st_mtime
    except OSError:  # it was removed meanwhile
        seconds = time.time()
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=0)


def describe_data(config: Mapping[str, Any]) -> str | None:
    """Describe the data of a config, the targets and the horizon: `ETTh1.csv: OT +24`."""
    data = config.get("data")
    if not isinstance(data, dict):
        return None
    paths = data.get("path") or []
    paths = [paths] if isinstance(paths, str) else paths
    files = _join([Path(str(path)).name for path in paths], "files") or "a table in memory"
    if _get(config, "train", "objective") == "masked":
        return files
    targets = "labels" if data.get("labels") else _join(data.get("targets") or [], "targets")
    horizon = data.get("horizon") or 0
    # errors on changed values are others', so that such runs are grouped apart
    words = dict.fromkeys(changed.change for changed in runs.list_changed_targets(data))
    changed = f" ({', '.join(words)})" if words else ""
    return f"{files}: {targets or 'every column'}{changed}" + (f" +{horizon}" if horizon else "")


def _join(names: list[Any], unit: str) -> str:
    if len(names) > MAX_NAMES:
        return f"{len(names)} {unit}"
    return " and ".join(map(str, names))


def _parse_number(value: Any) -> float | None:
    """Return a number as it is; None for what a damaged file may have in its place."""
    return value if isinstance(value, int | float) else None


def _get(config: Mapping[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None
