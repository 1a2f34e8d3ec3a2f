"""Results as files: every repeat with its hardware and settings, in JSON, CSV and Markdown; and the
comparison of two result folders.

A row is one variant of one case, with its repeats in one unit and further values. So any two result
folders of one kind can be compared.
"""

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import UserError

ProgressCallback = Callable[[str, float], None]
"""Receives the name of the current measurement and the share of the time that has passed"""


@dataclass(frozen=True)
class ResultRow:
    case: str
    variant: str
    unit: str
    repeats: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why there are no repeats: the variant failed, or was left out"""

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"case": self.case, "way": self.variant, "unit": self.unit}
        if self.repeats:
            row |= {"median": self.median, "low": min(self.repeats), "high": max(self.repeats)}
        if self.problem:
            row["problem"] = self.problem
        return row | self.extra | {"repeats": self.repeats}


class ResultTable(NamedTuple):
    """A table as summary.md and the terminal show it."""

    title: str
    headings: list[str]
    cells: list[list[str]]
    note: str = ""

    def to_markdown(self) -> str:
        lines = [f"## {self.title}", "", "| " + " | ".join(self.headings) + " |"]
        lines.append("|---" * len(self.headings) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.cells]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


class TimeBudget:
    """A time limit that starts when the object is created."""

    def __init__(self, minutes: float) -> None:
        self.began = time.monotonic()
        self.total_s = 60.0 * minutes

    @property
    def left_s(self) -> float:
        return self.total_s - self.spent_s

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def share(self) -> float:
        return min(self.spent_s / self.total_s, 1.0)


@dataclass(frozen=True)
class BenchResult:
    """The result of one command of the bench."""

    kind: str
    headline: str
    rows: list[ResultRow]
    tables: list[ResultTable]
    settings: dict[str, Any]
    seconds: float
    notes: list[str] = field(default_factory=list)
    hardware: dict[str, Any] | None = None
    """That of the measurements, if it is not this machine's"""

    def to_dict(self) -> dict[str, Any]:
        device = machine.choose_device(self.settings.get("device", "auto"))
        return {
            "kind": self.kind,
            "headline": self.headline,
            "hardware": self.hardware or machine.describe(device),
            "settings": self.settings,
            "seconds": self.seconds,
            "notes": self.notes,
            "rows": [row.to_dict() for row in self.rows],
        }


def write_result(result: BenchResult, folder: Path) -> dict[str, Any]:
    """Write results.json, results.csv and summary.md; return the content of --json."""
    folder.mkdir(parents=True, exist_ok=True)
    content = result.to_dict()
    runs.write_json(folder / "results.json", content)
    _write_csv(content["rows"], folder / "results.csv")
    runs.write_text(folder / "summary.md", _format_summary(result, content["hardware"]))
    return content | {"folder": str(folder)}


def _format_summary(result: BenchResult, hardware: dict[str, Any]) -> str:
    place = f"{hardware['cores']} cores of {hardware['cpu']}"
    if "gpu" in hardware:
        place = f"{hardware['gpu']} (CUDA {hardware['cuda']}, cuDNN {hardware['cudnn']}), {place}"
    on = f"{place}, torch {hardware['torch']}, Python {hardware['python']}"
    notes = [*(f"- {note}" for note in result.notes), ""] if result.notes else []
    lines = [f"# {result.headline}", "", f"On {on}.", "", *notes]
    return "\n".join(lines) + "\n" + "\n".join(table.to_markdown() for table in result.tables)


def _write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one line per repeat, with every scalar of its row."""
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if not isinstance(value, (list, dict)) and name not in ("median", "low", "high")
    )
    with runs.replace_atomically(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "repeat", "value"])
        for row in rows:
            fixed = [row.get(name, "") for name in names]
            for number, value in enumerate(row["repeats"] or [""], start=1):
                writer.writerow([*fixed, number, value])


def format_spread(row: ResultRow, digits: int = 3) -> str:
    """Format the median and the range of the repeats."""
    low, high = min(row.repeats), max(row.repeats)
    return f"{row.median:.{digits}g} ({low:.{digits}g} to {high:.{digits}g})"


def format_percent(share: float) -> str:
    """Format a change with its sign and two decimals."""
    return f"{100 * share:+.2f} %".replace("-0.00", "0.00").replace("+0.00", "0.00")


def format_ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def compare_results(old: Path, new: Path) -> BenchResult:
    """Compare the rows that both folders have; a row moved if the ranges of its repeats do not
    overlap."""
    before, after = (_read(folder) for folder in (old, new))
    if before["kind"] != after["kind"]:
        raise UserError(
            f"{old} holds a {before['kind']} and {new} a {after['kind']}; compare two of one kind"
        )
    old_rows = {(row["case"], row["way"], row["unit"]): row for row in before["rows"]}
    rows, missing = [], set(old_rows)
    for row in after["rows"]:
        key = (row["case"], row["way"], row["unit"])
        old_row = old_rows.get(key)
        missing.discard(key)
        if old_row and old_row["repeats"] and row["repeats"]:
            rows.append(_compare_rows(old_row, row))
    if not rows:
        raise UserError(f"{old} and {new} have no case and variant in common")
    num_moved = sum(row.extra["moved"] for row in rows)
    notes = [
        f"{key}: {before['hardware'].get(key)} before, {after['hardware'].get(key)} now"
        for key in ("gpu", "cpu", "cores", "torch", "cudnn")
        if before["hardware"].get(key) != after["hardware"].get(key)
    ]
    if missing:
        notes.append(f"{len(missing)} of the old rows have no counterpart")
    return BenchResult(
        kind="comparison",
        headline=f"{num_moved} of {len(rows)} figures moved beyond their spread",
        rows=rows,
        tables=[_build_table(rows)],
        settings={"old": str(old), "new": str(new), "kind": before["kind"]},
        seconds=0.0,
        notes=notes,
    )


def _read(folder: Path) -> Any:
    content = runs.read_json(folder / "results.json")
    if not isinstance(content, dict) or not {"kind", "rows", "hardware"} <= set(content):
        raise UserError(f"{folder}: holds no results of slipstream bench")
    for row in content["rows"]:
        if not isinstance(row, dict) or not {"case", "way", "unit", "repeats"} <= set(row):
            raise UserError(f"{folder / 'results.json'}: is damaged; measure again")
    return content


def _compare_rows(old: dict[str, Any], new: dict[str, Any]) -> ResultRow:
    apart = min(new["repeats"]) > max(old["repeats"]) or max(new["repeats"]) < min(old["repeats"])
    extra = {"old": old["median"], "old_repeats": old["repeats"]}
    extra |= {"ratio": new["median"] / old["median"], "moved": apart}
    return ResultRow(new["case"], new["way"], new["unit"], new["repeats"], extra)


def _build_table(rows: list[ResultRow]) -> ResultTable:
    cells = []
    for row in sorted(rows, key=lambda row: (not row.extra["moved"], row.case)):
        before, ratio = row.extra["old_repeats"], row.extra["ratio"]
        old = f"{row.extra['old']:.4g} ({min(before):.4g} to {max(before):.4g})"
        moved = "higher" if ratio > 1 else "lower"
        verdict = moved if row.extra["moved"] else "within the spread"
        cells.append(
            [row.case, row.variant, old, format_spread(row, 4), format_ratio(ratio), verdict]
        )
    unit = rows[0].unit if len({row.unit for row in rows}) == 1 else "see results.json"
    headings = ["case", "variant", f"old, {unit}", "new", "new / old", ""]
    return ResultTable("old and new", headings, cells)
