"""List the runs of a folder, sorted and filtered, and pick the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

from slipstream.catalog.rows import (
    FINISHED,
    STATES,
    RunFiles,
    RunRow,
    looks_like_run,
    make_row,
    read_files,
    read_row,
)
from slipstream.catalog.scores import find_result, rank
from slipstream.errors import UserError
from slipstream.object_storage import parse_path
from slipstream.reporting.formatting import SCALED, format_metric, format_number, format_seconds
from slipstream.run_names import KINDS, OUT, find_run
from slipstream.stats import HIGHER_IS_BETTER, NO_DIFFERENCE
from slipstream.text import format_count, format_html_table, format_table

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
        metric: The metric to show, such as mae, rmse, r2, scaled_mse or balanced_accuracy. By
            default mae, or log_loss for classes.
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
        from slipstream.catalog.copies.download import (
            list_copies,  # only for runs in object storage
        )

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
        counts = "\n".join(f"  {task or 'unknown data'}: {len(some)}" for task, some in groups)
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
    return [(task, some) for (task, _), some in groups.items()]


def iter_files(out: str | PathLike[str]) -> Iterable[RunFiles]:
    """Yield what the small files of each run in a folder hold; a run may vanish meanwhile."""
    folder = Path(out)
    if not folder.is_dir():
        if str(out) == OUT:
            return  # nothing was trained here yet
        raise UserError(f"{out}: there is no such folder")
    try:
        folders = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"{out}: cannot be read ({error.strerror})") from None
    for one in folders:
        if one.name[0] != "." and one.is_dir() and looks_like_run(one):
            files = read_files(one, only_listed=True)
            if one.is_dir():
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
        result = find_result(files.kind, files.summary) if files.summary else {}
        for section, prefix in (("metrics", ""), ("scaled", SCALED)):
            for one in (result.get(section) or {}).values():
                names |= dict.fromkeys(prefix + name for name in one)
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
    for least, unit, name in AGES:
        if seconds >= least:
            return f"{seconds // unit:.0f} {name}"
    return format_seconds(seconds)
