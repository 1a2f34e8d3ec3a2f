"""The table of runs: listed, described, compared and removed."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.run_names import KINDS, OUT, SEARCHES, find_run, suggest_resume
from slipstream.base.statistics import HIGHER_IS_BETTER, NO_DIFFERENCE, Spread
from slipstream.base.storage import parse_path, refuse_url
from slipstream.base.text import format_count, format_html_table, format_number, format_table
from slipstream.reporting import wording
from slipstream.reporting.run_rows import (
    DAMAGE_ERRORS,
    DAMAGED,
    FINISHED,
    RUNNING,
    STATES,
    STOPPED,
    RunFiles,
    RunRow,
    find_result,
    looks_like_run,
    make_row,
    rank,
    read_files,
    read_row,
    read_spread,
)
from slipstream.reporting.wording import (
    describe_step,
    format_metric,
    format_seconds,
    format_value,
    is_ranked,
)
from slipstream.runs import flatten_settings, studies
from slipstream.runs import lock as locks
from slipstream.runs.folder import UNPUBLISHED
from slipstream.runs.summary import (
    SCALED,
    ComparedScores,
    ProbeSummary,
    RunSummary,
    Scores,
    SearchSummary,
    list_interval_scores,
    read_metric,
)

if TYPE_CHECKING:
    from slipstream.reporting.pairing import PairedResult

SORT_KEYS: dict[str, Callable[[RunRow], Any]] = {
    "age": lambda row: row.age_s,
    "name": lambda row: row.name,
    "kind": lambda row: (row.kind, row.model or ""),
    "data": lambda row: row.data or "",
    "test": lambda row: rank(row.test, row.metric or ""),
    "baseline": lambda row: rank(row.against_baseline, row.metric or ""),
    "state": lambda row: STATES.index(row.state),
    "seconds": lambda row: rank(row.seconds, ""),
}
AGES = ((86400 * 2, 86400, "d"), (3600 * 2, 3600, "h"), (120, 60, "min"), (0, 1, "s"))
"""From how many seconds on a unit is used, its seconds and its name"""


class RunTable(list[RunRow]):
    """The rows of `list_runs`, which print as a table."""

    def to_pandas(self) -> Any:
        """Return the rows as a pandas.DataFrame."""
        rows = [asdict(row) | {"run": row.to_dict()["run"]} for row in self]
        return to_frame({field.name: [row[field.name] for row in rows] for field in fields(RunRow)})

    def __repr__(self) -> str:
        return format_table(format_count(len(self), "run"), *tabulate(self))

    def _repr_html_(self) -> str:
        return format_html_table(format_count(len(self), "run"), *tabulate(self))


def to_frame(columns: Mapping[str, list[Any]]) -> Any:
    """Return columns as a pandas.DataFrame."""
    import pyarrow as pa

    return pa.table(dict(columns)).to_pandas()


def list_runs(
    out: str | PathLike[str] = OUT,
    *,
    kind: str | None = None,
    state: str | None = None,
    name: str | None = None,
    data: str | None = None,
    metric: str | None = None,
    sort: str = "age",
    reverse: bool = False,
) -> RunTable:
    """List the runs of a folder, with their state and their test error.

    Only small files are read, and torch is not loaded. Damaged runs are listed with what is wrong.

    Args:
        out: The folder that holds the runs, or the URL of one that `copy_run` has copied runs to.
        kind: Only runs of this kind: train, pretrain, search, probe or ensemble.
        state: Only runs in this state: running, stopped, finished or damaged.
        name: Only runs whose names contain this text, or match it as a pattern such as `job-*`.
        data: Only runs whose data contain this text: a file's name or a target's.
        metric: The metric to show, such as mae, rmse, r2, scaled_mse, balanced_accuracy or
            interval_crps. By default mae, or log_loss for classes.
        sort: age (newest first), name, kind, data, test, baseline (the error relative to the best
            baseline), state or seconds.
        reverse: Sort the other way round.

    Returns:
        A list of `RunRow`, with `to_pandas()`; it prints as a table.

    Raises:
        UserError: There is no such folder, kind, state or order.

    Example:
        slipstream.list_runs(state="finished", sort="test").to_pandas()
    """
    _check_choice("kind", kind, KINDS)
    _check_choice("state", state, STATES)
    _check_choice("sort", sort, SORT_KEYS)
    place = parse_path(out)
    if isinstance(place, Path):
        rows = [make_row(files, metric) for files in iter_files(out)]
    else:
        from slipstream.reporting.copies import list_copies

        rows = list_copies(place, metric)
    if metric and rows and not any(row.test is not None or row.val is not None for row in rows):
        known = _suggest_metrics(out) if isinstance(place, Path) else ""
        raise UserError(f'no run in {out} has the metric "{metric}"{known}')
    selected = [
        row
        for row in rows
        if kind in (None, row.kind)
        and state in (None, row.state)
        and _matches(name, row.name)
        and _matches(data, row.data or "")
    ]
    return RunTable(sorted(selected, key=SORT_KEYS[sort], reverse=reverse))


def best_run(
    out: str | PathLike[str] = OUT,
    *,
    metric: str | None = None,
    kind: str | None = None,
    name: str | None = None,
    data: str | None = None,
) -> RunRow:
    """Find the finished run with the best test error.

    Errors on different data cannot be compared, so the runs have to be on the same data and
    predict the same.

    Args:
        out: The folder that holds the runs.
        metric: The metric to compare by, as for `list_runs`.
        kind: Only runs of this kind.
        name: Only runs whose names contain this text, or match it as a pattern.
        data: Only runs whose data contain this text.

    Returns:
        The `RunRow` of the best run.

    Raises:
        UserError: No finished run has the metric, or the runs are on different data.

    Example:
        best = slipstream.best_run(metric="rmse", data="ETTh1.csv")
        slipstream.predict(best, "new.csv")
    """
    rows = list_runs(out, kind=kind, state=FINISHED, name=name, data=data, metric=metric)
    rows = RunTable(row for row in rows if row.test is not None)
    if not rows:
        raise UserError(f"{out}: holds no finished run with a test error that fits")
    groups = group_comparable(rows)
    if len(groups) > 1:
        counts = "\n".join(
            f"  {task or 'unknown data'}: {len(members)}" for task, members in groups
        )
        raise UserError(
            f"{out}: the runs are on different data, so their errors cannot be compared; filter "
            f"them by data:\n{counts}"
        )
    return min(rows, key=lambda row: rank(row.test, row.metric or ""))


def group_comparable(rows: Iterable[RunRow]) -> list[tuple[str, list[RunRow]]]:
    """Group runs whose errors can be compared: of the same data and metric."""
    groups: dict[tuple[str, str | None], list[RunRow]] = {}
    for row in rows:
        groups.setdefault((row.data or "", row.metric), []).append(row)
    return [(task, members) for (task, _), members in groups.items()]


def iter_files(out: str | PathLike[str]) -> Iterable[RunFiles]:
    """Yield what the small files of each run in a folder hold; a run may vanish meanwhile."""
    place = Path(out)
    if not place.is_dir():
        if str(out) == OUT:
            return  # nothing was trained here yet
        raise UserError(f"{out}: there is no such folder")
    try:
        folders = sorted(place.iterdir())
    except OSError as error:
        raise UserError(f"{out}: cannot be read ({error.strerror})") from None
    for folder in folders:
        if folder.name[0] != "." and folder.is_dir() and looks_like_run(folder):
            files = read_files(folder, only_listed=True)
            if folder.is_dir():
                yield files


def find_listed(name: str | PathLike[str], out: str | PathLike[str] = OUT) -> Path:
    """Return the folder of a run that `list_runs` lists, damaged ones included."""
    name = Path(name)  # also of a result
    for folder in (Path(name), Path(out) / name):
        if looks_like_run(folder):
            return folder
    folder = find_run(name, out=out, with_links=True)
    if not looks_like_run(folder):
        raise UserError(f"{folder}: is not a run folder")
    return folder


def find_row(
    name: str | PathLike[str], out: str | PathLike[str] = OUT, metric: str | None = None
) -> RunRow:
    """Return the row of one run."""
    return read_row(find_listed(name, out), metric)


def _matches(pattern: str | None, text: str) -> bool:
    return pattern is None or pattern in text or fnmatchcase(text, pattern)


def _check_choice(option: str, value: str | None, choices: Iterable[str]) -> None:
    if value is not None and value not in choices:
        raise UserError(f'{option} is "{value}"; choose one of {", ".join(choices)}')


def _suggest_metrics(out: str | PathLike[str]) -> str:
    """Name the metrics that the runs have."""
    names: dict[str, None] = {}
    for files in iter_files(out):
        result: Scores = find_result(files.kind, files.summary) if files.summary else {}
        for found, prefix in ((result.get("metrics"), ""), (result.get("scaled"), SCALED)):
            for metrics in (found or {}).values():
                names |= dict.fromkeys(prefix + name for name in metrics)
        names |= dict.fromkeys(list_interval_scores(cast(ComparedScores, result)))
    return f"; choose one of {', '.join(names)}" if names else ""


def tabulate(rows: Sequence[RunRow]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of a table of runs."""
    metrics = {row.metric for row in rows if row.metric}
    same = format_metric(next(iter(metrics))) if len(metrics) == 1 else ""
    headings = ["name", "age", "kind", "data", f"test {same}".strip(), "vs. baseline", "state"]
    return headings, [
        [
            row.name,
            format_age(row.age_s),
            " ".join(filter(None, (row.kind, row.model))),
            row.data or "–",
            _format_error(row, with_metric=not same),
            format_against(row),
            row.state,
        ]
        for row in rows
    ]


def _format_error(row: RunRow, *, with_metric: bool) -> str:
    value, where = (row.test, "") if row.test is not None else (row.val, " (val)")
    if value is None or row.metric is None:
        return "–"
    name = f" {format_metric(row.metric)}" if with_metric else ""
    return f"{format_number(value)}{name}{where}"


def format_against(row: RunRow) -> str:
    """Format the comparison with the best baseline: `-20 %, ridge`, or `-1 % (not shown), ridge`
    where the interval of the difference contains 0."""
    if row.against_baseline is None:
        return "–"
    value = f"{100 * row.against_baseline:+.0f} %"
    if row.metric in HIGHER_IS_BETTER:
        value = f"{row.against_baseline:+.3g}"
    doubt = " (not shown)" if row.verdict == NO_DIFFERENCE else ""
    return f"{value}{doubt}, {row.baseline}"


def format_age(seconds: float) -> str:
    """Format how long ago something was, in one unit."""
    for min_s, unit, name in AGES:
        if seconds >= min_s:
            return f"{seconds // unit:.0f} {name}"
    return format_seconds(seconds)


REGRESSION = (
    *("mae", "rmse", "r2", "mase", "smape", "wape", "max_error", "scaled_mse", "scaled_mae"),
    *("pinball", "crps", "coverage", "width"),  # of quantiles
)
CLASSIFICATION = ("log_loss", "balanced_accuracy", "accuracy", "f1_macro", "auc")
WHERE = {"name", "out"}
"""Settings that say where a run is, not what it does"""
PAGE = "comparison.html"

COLUMNS = (
    *("run", "metric", "test", "mean", "low", "high", "n"),
    *("difference", "difference_low", "difference_high", "verdict"),
)
"""Of the table of metrics"""

Settings = dict[str, Any]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several runs side by side; it prints as a table of metrics.

    Attributes:
        runs: The `RunRow` of each run.
        settings: The settings that differ, each a dict with `setting` and a value by run name.
        metrics: One dict per run and metric: `run`, `metric`, `test`, the `mean`, `low` and `high`
            of the 95 % interval over `n` repeats, and `difference`, `difference_low`,
            `difference_high` and `verdict` against the first run where both have repeats. Of
            intervals: `interval_crps`, and by level such as `coverage_80` and `width_80`.
        notes: What to keep in mind, such as runs on different data.
        paired: One dict per run and metric, over the predicted rows that the runs share: `value`
            with `low` and `high`, and `difference`, `difference_low`, `difference_high` and
            `verdict` against the first run. The intervals are of 95 %, over resampled windows.

    Example:
        comparison = slipstream.compare_runs("lstm", "mlp")
        comparison.settings
        comparison.write_html("comparison.html")
    """

    runs: RunTable
    settings: list[Settings]
    metrics: list[dict[str, Any]]
    notes: list[str]
    paired: list[dict[str, Any]] = field(default_factory=list)
    incomparable: list[str] = field(default_factory=list)
    """Runs whose errors are not those of the first one's task: of other data, targets or rows"""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        from slipstream.config import to_json_values  # pydantic takes a while

        rows = [row.to_dict() for row in self.runs]
        return {
            "runs": rows,
            "settings": to_json_values(self.settings),
            "metrics": self.metrics,
            "notes": self.notes,
            "paired": self.paired,
            "incomparable": self.incomparable,
        }

    def to_pandas(self) -> Any:
        """Return the metrics as a pandas.DataFrame, one row per run and metric."""
        return to_frame({key: [row.get(key) for row in self.metrics] for key in COLUMNS})

    def write_html(self, path: str | PathLike[str] = PAGE) -> Path:
        """Write a self-contained page with the tables and the loss curves; return its path."""
        from slipstream.reporting.page import write_comparison

        folders = {row.name: row.run for row in self.runs}
        tables = {
            "metrics": tabulate_metrics(self),
            "differences": tabulate_differences(self),
            "paired": tabulate_paired(self),
            "settings": tabulate_settings(self),
        }
        return write_comparison(Path(path), folders, tables, self.notes)

    def __repr__(self) -> str:
        return format_table(self._title(), *tabulate_metrics(self))

    def _repr_html_(self) -> str:
        settings = format_html_table("Settings that differ", *tabulate_settings(self))
        return format_html_table(self._title(), *tabulate_metrics(self)) + settings

    def _title(self) -> str:
        return f"{len(self.runs)} runs, test set"


def compare_runs(*names: str | PathLike[str], out: str | PathLike[str] = OUT) -> Comparison:
    """Compare runs: the settings that differ, and the test metrics.

    Runs with repeats (`train.repeats`) have 95 % intervals over their seeds. Welch's interval of
    the difference from the first run says whether a difference is more than seed noise. Runs that
    were tested on the same rows are also compared window by window (`paired`).

    Args:
        names: Two or more runs: folders, beginnings of names, `last`, or results of `train`.
        out: The folder in which names are looked up.

    Returns:
        A `Comparison`.

    Raises:
        UserError: There is no such run, or fewer than two were named.

    Example:
        print(slipstream.compare_runs("lstm", "mlp", "last"))
    """
    folders = list(dict.fromkeys(find_listed(name, out) for name in names))
    if len(folders) < 2:
        raise UserError("name at least two runs to compare")
    files = [read_files(folder) for folder in folders]
    rows = RunTable(make_row(run) for run in files)
    labels = _label_runs(rows)
    configs = (_read_settings(run) for run in files)
    settings = list_differences(dict(zip(labels, configs, strict=True)))
    paired = _pair_runs(dict(zip(labels, files, strict=True)))
    notes = [*_list_notes(rows), *paired.notes]
    other_data = [
        label for label, row in zip(labels, rows, strict=True) if row.data != rows[0].data
    ]
    incomparable = list(dict.fromkeys([*other_data, *paired.incomparable]))
    metrics = list(_iter_metrics(labels, files, incomparable))
    return Comparison(rows, settings, metrics, notes, paired.rows, incomparable)


def _pair_runs(files: Mapping[str, RunFiles]) -> PairedResult:
    from slipstream.reporting.pairing import pair_runs  # imports pyarrow

    finished = {label: run for label, run in files.items() if run.state == FINISHED}
    contexts = [run.config.get("data", {}).get("context") for run in finished.values()]
    context = max((rows for rows in contexts if isinstance(rows, int)), default=1)
    return pair_runs({label: run.folder for label, run in finished.items()}, context=context)


def _read_settings(files: RunFiles) -> Mapping[str, Any]:
    """Return the settings of what a run predicts with: of a search, those that it chose, of an
    ensemble, its data and members."""
    if files.kind == "ensemble":
        summary = cast(RunSummary, files.summary or {})
        members = [member["name"] for member in summary.get("members", [])]
        return {"data": files.config.get("data", {}), "members": members}
    chosen = files.folder / "retrained" / "best"
    if files.kind in SEARCHES and chosen.exists() and (inner := read_files(chosen)).config:
        return _read_settings(inner)
    return {name: value for name, value in files.config.items() if name != "tune"}


def _label_runs(rows: Sequence[RunRow]) -> list[str]:
    """Return the names of the runs; their paths where two have the same name."""
    names = [row.name for row in rows]
    return names if len(set(names)) == len(names) else [str(row.run) for row in rows]


def list_differences(configs: Mapping[str, Mapping[str, Any]]) -> list[Settings]:
    """List the settings that differ; None where a run does not have one."""
    flat = {name: flatten_settings(config) for name, config in configs.items()}
    rows = []
    for setting in sorted({key for settings in flat.values() for key in settings}):
        values = {name: settings.get(setting) for name, settings in flat.items()}
        first = next(iter(values.values()))
        if setting not in WHERE and any(value != first for value in values.values()):
            rows.append({"setting": setting, **values})
    return rows


def _iter_metrics(
    labels: Sequence[str], files: Sequence[RunFiles], incomparable: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield one row per run and metric; errors of another task have no difference from the
    first."""
    first: dict[str, Spread] = {}
    for label, run in zip(labels, files, strict=True):
        if run.summary is None:
            continue
        result = find_result(run.kind, run.summary)
        spreads = cast(RunSummary, run.summary) if run.kind not in SEARCHES else result
        for metric, test in _read_test(result).items():
            row: dict[str, Any] = {"run": label, "metric": metric, "test": test}
            if spread := read_spread(spreads, metric):
                is_judged = label not in incomparable and is_ranked(metric)
                base = first.get(metric) if is_judged else None
                row |= _describe_spread(spread, metric, base)
                if label == labels[0]:
                    first[metric] = spread
            yield row


def _read_test(result: ComparedScores) -> dict[str, float]:
    """Return the test metrics by name: those of the task, and the scores of the intervals by level
    where there are intervals around a prediction."""
    found = {name: read_metric(result, "test", name) for name in (*REGRESSION, *CLASSIFICATION)}
    known = {name: value for name, value in found.items() if value is not None}
    return known | list_interval_scores(result)


def _describe_spread(spread: Spread, metric: str, first: Spread | None) -> dict[str, Any]:
    """Return the interval of the mean over seeds, and of the difference from the first run."""
    from slipstream.base import statistics

    interval = statistics.compute_spread_interval(spread)
    result: dict[str, Any] = {
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "n": spread["n"],
    }
    if first is not None:
        difference = statistics.compute_welch_interval(spread, first)
        result |= {
            "difference": difference.mean,
            "difference_low": difference.low,
            "difference_high": difference.high,
            "verdict": difference.judge(higher_is_better=metric in HIGHER_IS_BETTER),
        }
    return result


def _list_notes(rows: Sequence[RunRow]) -> Iterator[str]:
    if len({row.data for row in rows}) > 1:
        yield "the runs are on different data, so their errors cannot be compared"
    for row in rows:
        if row.state != FINISHED:
            yield f"{row.name} is {row.state}" + (f": {row.note}" if row.note else "")


def tabulate_settings(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of the settings that differ."""
    labels = _label_runs(comparison.runs)
    return ["setting", *labels], [
        [row["setting"], *(format_setting(row[label]) for label in labels)]
        for row in comparison.settings
    ]


def format_setting(value: Any) -> str:
    """Format the value of a setting; lists without brackets, steps of `data.prepare` in words."""
    if isinstance(value, list):
        return ", ".join(map(format_setting, value))
    if isinstance(value, Mapping):
        return describe_step(value) if "step" in value else str(dict(value))
    return "–" if value is None else format_value(value)


def tabulate_metrics(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of the metrics, one column per run."""
    labels = _label_runs(comparison.runs)
    by_metric: dict[str, dict[str, dict[str, Any]]] = {}
    for row in comparison.metrics:
        by_metric.setdefault(row["metric"], {})[row["run"]] = row
    return ["test", *labels], [
        [format_metric(metric), *(_format_metric_cell(by_run.get(label)) for label in labels)]
        for metric, by_run in by_metric.items()
    ]


def tabulate_paired(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of the errors on the rows that the runs share."""
    return ["run", "metric", "value", "difference from the first run", ""], [
        [
            row["run"],
            format_metric(row["metric"]),
            format_bounds(row, "value", ""),
            format_bounds(row, "difference", "difference_"),
            row.get("verdict", ""),
        ]
        for row in comparison.paired
    ]


def format_bounds(row: Mapping[str, Any], name: str, prefix: str) -> str:
    """Format a value with its interval, as far as there are any."""
    if row.get(name) is None:
        return "–"
    if f"{prefix}low" not in row:
        return format_number(row[name])
    bounds = " to ".join(format_number(row[f"{prefix}{end}"]) for end in ("low", "high"))
    return f"{format_number(row[name])} ({bounds})"


def _format_metric_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    return format_bounds(row, "mean" if "mean" in row else "test", "")


def tabulate_differences(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of the differences from the first run over repeats."""
    rows = [row for row in comparison.metrics if "verdict" in row]
    return ["run", "metric", "difference", ""], [
        [
            row["run"],
            format_metric(row["metric"]),
            format_bounds(row, "difference", "difference_"),
            row["verdict"],
        ]
        for row in rows
    ]


KEEP_BEST = 5


def remove_runs(*names: str | PathLike[str], out: str | PathLike[str] = OUT) -> RunTable:
    """Remove runs with all their files.

    If a process writes to one of them, none is removed.

    Args:
        names: The runs: folders, beginnings of names, `last`, or results of `train`.
        out: The folder in which names are looked up.

    Returns:
        The rows of the runs that were removed.

    Raises:
        UserError: There is no such run, or a process writes to it.

    Example:
        slipstream.remove_runs("job-20260131T120000Z", "runs/old-20260101T000000Z")
    """
    paths = (find_listed(name, out) for name in names)
    folders = list(dict.fromkeys(path.parent.resolve() / path.name for path in paths))
    for folder in folders:
        _refuse_locked(folder)
        _refuse_protected(folder)
    rows = RunTable(read_row(folder) for folder in folders)
    for folder in folders:
        _remove(folder)
    return rows


def prune_runs(
    out: str | PathLike[str] = OUT,
    *,
    keep_best: int = KEEP_BEST,
    metric: str | None = None,
    unfinished: bool = False,
    dry_run: bool = False,
) -> RunTable:
    """Remove all but the best finished runs of each data set.

    Runs that a process writes to stay, as do runs that another one needs: the encoder of
    `train.init_from`.

    Args:
        out: The folder that holds the runs.
        keep_best: How many runs to keep of those whose errors can be compared: of the same kind,
            data and targets.
        metric: The metric to compare by, as for `list_runs`.
        unfinished: Also remove stopped and damaged runs.
        dry_run: Remove nothing; return what would be removed.

    Returns:
        The rows of the runs that were removed.

    Raises:
        UserError: There is no such folder, or a run cannot be removed.

    Example:
        slipstream.prune_runs(keep_best=5, dry_run=True)
    """
    refuse_url(out, "runs are removed on this machine only", "remove copies with the tools for")
    if keep_best < 0:
        raise UserError(f"keep_best is {keep_best}; expected 0 or more")
    rows = list_runs(out, metric=metric)
    finished = [row for row in rows if row.state == FINISHED]
    removed = set[Path]()
    for kinds in (("train", *SEARCHES, "ensemble"), ("pretrain",), ("probe",)):
        for _, group in group_comparable(row for row in finished if row.kind in kinds):
            removed |= {row.run for row in sorted(group, key=_rank)[keep_best:]}
    if unfinished:
        removed |= {row.run for row in rows if row.state in (STOPPED, DAMAGED)}
    needed = _find_needed([row for row in rows if row.run not in removed])
    pruned = RunTable(row for row in rows if row.run in removed and row.run.resolve() not in needed)
    if dry_run or not pruned:
        return pruned
    return remove_runs(*(row.run for row in pruned))


def _rank(row: RunRow) -> float:
    return rank(row.val if row.test is None else row.test, row.metric or "")


def _find_needed(rows: Sequence[RunRow]) -> set[Path]:
    """Return the runs that these were trained from."""
    needed = set()
    for row in rows:
        train = read_files(row.run, only_listed=True).config.get("train")
        if isinstance(train, dict) and train.get("init_from"):
            needed.add(Path(str(train["init_from"])).resolve())
    return needed


def measure_size(folder: Path) -> int:
    """Return the bytes of all files of a run."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _refuse_locked(folder: Path) -> None:
    """Raise an error if a process writes to a run, or to one inside of it, as a probe has."""
    for inside in (folder, *_find_locked_folders(folder)):
        if holder := runs.find_holder(inside):
            raise UserError(
                f"{inside}: process {holder['pid']} on {holder['host']} is writing to this run; "
                "nothing was removed"
            )


def _find_locked_folders(folder: Path) -> Iterator[Path]:
    for name in (locks.NAME, locks.WITHOUT_FLOCK):
        yield from (path.parent for path in folder.rglob(name))


def _remove(folder: Path) -> None:
    """Hide the folder, holding its lock, then remove it: a kill in between leaves no half run, and
    the next run that is created beside it removes the rest."""
    try:
        if folder.is_symlink():
            folder.unlink()
            return
        with locks.hold_lock(folder) as lock:
            hidden = folder.with_name(f".{folder.name}.{os.getpid()}.removed{UNPUBLISHED}")
            lock.folder = folder.rename(hidden)
            for path in hidden.iterdir():
                if path.name != locks.NAME:  # which goes last: without it, nothing removes the rest
                    runs.remove(path)
            shutil.rmtree(hidden)
    except OSError as error:
        raise UserError(f"{folder}: cannot be removed ({error.strerror or error})") from None


def _refuse_protected(folder: Path) -> None:
    """Raise an error, before anything is removed, if a folder's content may not be changed."""
    for path, _, _ in () if folder.is_symlink() else os.walk(folder):  # which follows no links
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"{path}: is protected against writing; nothing was removed")


RESUME_PROBE = (
    "slipstream pretrain {run}/encoder.toml --probe {run}/labels.toml --seeds {repeats} "
    "--resume {run}"
)
SUGGESTED = {
    "pretrain": "slipstream train CONFIG --set train.init_from={run}",
    "probe": "slipstream predict {run}/fine-tuned DATA",
}
"""The command that uses a finished run, where that is not predict"""


def show_run(name: str | PathLike[str], *, out: str | PathLike[str] = OUT) -> dict[str, Any]:
    """Describe one run: what it is, how good it is, and what to do next.

    Args:
        name: The run: its folder, the beginning of its name, `last`, or the result of `train`.
        out: The folder in which the name is looked up.

    Returns:
        A dict with the fields of `RunRow`, `settings` that differ from the defaults, the `summary`
        that the run ended with (None if it has not ended), its `verdict` as a sentence and the
        `outcome` in a word (better, worse, or no difference shown), where the `time` went, the path
        of its `report`, and `next`: the command that uses, resumes or removes the run.

    Raises:
        UserError: There is no such run.

    Example:
        slipstream.show_run("last")["settings"]
    """
    files = read_files(find_listed(name, out))
    report = files.folder / "report.html"
    summary = files.summary and {k: v for k, v in files.summary.items() if k != "detail"}
    return {
        **make_row(files).to_dict(),
        "settings": _list_settings(files),
        "summary": summary,
        **_judge(files),
        "time": _describe_time(files),
        "report": str(report) if report.exists() else None,
        "next": suggest_command(files),
    }


def _list_settings(files: RunFiles) -> dict[str, Any]:
    """Return the settings that differ from the defaults, by their dotted names; of an ensemble,
    those of the data, since each member has a model of its own; of `slipstream auto`, without those
    of its search, which it has set itself."""
    from slipstream import config as configs

    defaults = tomllib.loads(configs.to_toml(configs.Config()))
    rows = list_differences({"run": files.config, "default": defaults})
    settings = {row["setting"]: row["run"] for row in rows if row["run"] is not None}
    if files.kind == "ensemble":
        return {name: value for name, value in settings.items() if name.startswith("data.")}
    if files.kind == "auto":
        return {name: value for name, value in settings.items() if not name.startswith("tune.")}
    return settings


def _judge(files: RunFiles) -> dict[str, str | None]:
    """Return the verdict on a finished run, as a sentence and in a word."""
    nothing: dict[str, str | None] = {"verdict": None, "outcome": None}
    if files.summary is None or files.state != FINISHED:
        return nothing
    try:
        if files.kind == "probe":
            probe = cast(ProbeSummary, files.summary)
            return {"verdict": str(probe["verdict"]), "outcome": str(probe["helped"])}
        if files.kind in SEARCHES:
            search = cast(SearchSummary, files.summary)
            sentence = wording.describe_search_verdict(search)
            return {"verdict": sentence, "outcome": wording.judge_search(search)}
        summary = cast(RunSummary, files.summary)
        if "untested" in summary:
            return nothing
        return {"verdict": wording.describe_verdict(summary), "outcome": wording.judge(summary)}
    except DAMAGE_ERRORS:  # version 0.1 wrote no checksum that would have shown the damage
        return nothing


def _describe_time(files: RunFiles) -> str | None:
    """Say where the time of a finished run went."""
    summary = files.summary or {}
    try:
        parts = wording.describe_time(summary)
        return f"{format_seconds(wording.get_total_s(summary))}: {parts}" if parts else None
    except DAMAGE_ERRORS:
        return None


def suggest_command(files: RunFiles) -> str | None:
    """Return the command that makes sense next for a run in its state."""
    run = files.folder
    if files.state == RUNNING:
        return None
    if files.state == DAMAGED:
        return f"slipstream runs remove {run}"
    if files.state == FINISHED:
        return SUGGESTED.get(files.kind, f"slipstream predict {run} DATA").format(run=run)
    if files.kind == "probe" and not (run / "encoder").exists():
        return None  # of an encoder that was named on the command line
    if files.kind in SEARCHES:
        return str(studies.suggest_resume(run, studies.read_storage(run)))
    if files.kind == "probe":
        return RESUME_PROBE.format(run=run, repeats=make_row(files).repeats)
    return None if files.kind == "ensemble" else str(suggest_resume(run))
