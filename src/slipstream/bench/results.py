"""Results as files: every repeat with its hardware and settings, a table to read, a table to load.

A row is one way to do one case, with its repeats in one unit; whatever else belongs to it comes
along. So any two result folders of one kind can be compared.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import machine as hardware
from slipstream import runs

ProgressCallback = Callable[[str, float], None]
"""Told what is going on and the share that is done"""


@dataclass(frozen=True)
class ResultRow:
    case: str
    way: str
    unit: str
    repeats: list[float] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why there are no repeats: it failed, or was left out"""

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"case": self.case, "way": self.way, "unit": self.unit}
        if self.repeats:
            found |= {"median": self.median, "low": min(self.repeats), "high": max(self.repeats)}
        if self.problem:
            found["problem"] = self.problem
        return found | self.more | {"repeats": self.repeats}


class ResultTable(NamedTuple):
    """For people: what summary.md and the terminal show."""

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
    """Time that is not to be exceeded."""

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
    """Everything that one command of the bench found."""

    kind: str
    headline: str
    rows: list[ResultRow]
    tables: list[ResultTable]
    settings: dict[str, Any]
    seconds: float
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        device = hardware.choose_device(self.settings.get("device", "auto"))
        return {
            "kind": self.kind,
            "headline": self.headline,
            "hardware": hardware.describe(device),
            "settings": self.settings,
            "seconds": self.seconds,
            "notes": self.notes,
            "rows": [row.to_dict() for row in self.rows],
        }


def write_result(outcome: BenchResult, folder: Path) -> dict[str, Any]:
    """results.json, results.csv and summary.md; what --json prints comes back."""
    folder.mkdir(parents=True, exist_ok=True)
    found = outcome.to_dict()
    runs.write_json(folder / "results.json", found)
    _write_csv(found["rows"], folder / "results.csv")
    runs.write_text(folder / "summary.md", write_markdown(outcome, found["hardware"]))
    return found | {"folder": str(folder)}


def write_markdown(outcome: BenchResult, machine: dict[str, Any]) -> str:
    lines = [f"# {outcome.headline}", "", f"On {describe_hardware(machine)}.", ""]
    lines += [f"- {note}" for note in outcome.notes]
    if outcome.notes:
        lines.append("")
    return "\n".join(lines) + "\n" + "\n".join(table.to_markdown() for table in outcome.tables)


def describe_hardware(machine: dict[str, Any]) -> str:
    """The machine in a line."""
    place = f"{machine['cores']} cores of {machine['cpu']}"
    if "gpu" in machine:
        place = f"{machine['gpu']} (CUDA {machine['cuda']}, cuDNN {machine['cudnn']}), {place}"
    return f"{place}, torch {machine['torch']}, Python {machine['python']}"


def _write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One line per repeat, with everything about its row that is a single value."""
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
    """The median, and from where to where the repeats lie."""
    low, high = min(row.repeats), max(row.repeats)
    return f"{row.median:.{digits}g} ({low:.{digits}g} to {high:.{digits}g})"


def format_percent(share: float) -> str:
    """A change with its sign, two decimals."""
    return f"{100 * share:+.2f} %".replace("-0.00", "0.00").replace("+0.00", "0.00")


def format_ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"
