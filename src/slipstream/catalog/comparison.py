"""Compare runs: the settings that differ, and their metrics, with intervals over repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.catalog.listing import RunTable, find_listed, to_frame
from slipstream.catalog.rows import FINISHED, RunFiles, RunRow, make_row, read_files
from slipstream.catalog.scores import (
    choose_metric,
    find_result,
    read_metric,
    read_spread,
)
from slipstream.errors import UserError
from slipstream.reporting.formatting import (
    describe_step,
    format_metric,
    format_number,
    format_value,
)
from slipstream.run_names import OUT
from slipstream.runs import flatten_settings
from slipstream.stats import HIGHER_IS_BETTER
from slipstream.text import format_html_table, format_table

if TYPE_CHECKING:
    from slipstream.catalog.pairing import PairedResult

REGRESSION = ("mae", "rmse", "r2", "max_error", "scaled_mse", "scaled_mae")
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
            `difference_high` and `verdict` against the first run where both have repeats.
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
        from slipstream.reporting.comparison import write_comparison

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
    rows = RunTable(make_row(one) for one in files)
    labels = _label_runs(rows)
    configs = (_read_settings(one) for one in files)
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
    from slipstream.catalog.pairing import pair_runs  # imports pyarrow

    finished = {label: one for label, one in files.items() if one.state == FINISHED}
    contexts = [one.config.get("data", {}).get("context") for one in finished.values()]
    context = max((one for one in contexts if isinstance(one, int)), default=1)
    return pair_runs({label: one.folder for label, one in finished.items()}, context=context)


def _read_settings(files: RunFiles) -> Mapping[str, Any]:
    """Return the settings of what a run predicts with: of a search, those that it chose, of an
    ensemble, its data and members."""
    if files.kind == "ensemble":
        members = [member["name"] for member in (files.summary or {}).get("members", [])]
        return {"data": files.config.get("data", {}), "members": members}
    chosen = files.folder / "retrained" / "best"
    config = read_files(chosen).config if files.kind == "search" and chosen.exists() else {}
    return {name: value for name, value in (config or files.config).items() if name != "tune"}


def _label_runs(rows: Sequence[RunRow]) -> list[str]:
    """Return the names of the runs; their paths where two have the same name."""
    names = [row.name for row in rows]
    return names if len(set(names)) == len(names) else [str(row.run) for row in rows]


def list_differences(configs: Mapping[str, Mapping[str, Any]]) -> list[Settings]:
    """List the settings that differ; None where a run does not have one."""
    flat = {name: flatten_settings(config) for name, config in configs.items()}
    rows = []
    for setting in sorted({key for one in flat.values() for key in one}):
        values = {name: one.get(setting) for name, one in flat.items()}
        first = next(iter(values.values()))
        if setting not in WHERE and any(value != first for value in values.values()):
            rows.append({"setting": setting, **values})
    return rows


def _iter_metrics(
    labels: Sequence[str], files: Sequence[RunFiles], incomparable: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield one row per run and metric; errors of another task have no difference from the
    first."""
    first: dict[str, Mapping[str, Any]] = {}
    for label, one in zip(labels, files, strict=True):
        if one.summary is None:
            continue
        result = find_result(one.kind, one.summary)
        spreads = one.summary if one.kind != "search" else result
        classes = choose_metric(one.kind, one.summary) == "log_loss"
        for metric in CLASSIFICATION if classes else REGRESSION:
            test = read_metric(result, "test", metric)
            if test is None:
                continue
            row: dict[str, Any] = {"run": label, "metric": metric, "test": test}
            if spread := read_spread(spreads, metric):
                base = None if label in incomparable else first.get(metric)
                row |= _describe_spread(spread, metric, base)
                if label == labels[0]:
                    first[metric] = spread
            yield row


def _describe_spread(
    spread: Mapping[str, Any], metric: str, first: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the interval of the mean over seeds, and of the difference from the first run."""
    from slipstream import stats

    interval = stats.compute_spread_interval(spread)
    result = {"mean": interval.mean, "low": interval.low, "high": interval.high, "n": spread["n"]}
    if first is not None:
        difference = stats.compute_welch_interval(spread, first)
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
