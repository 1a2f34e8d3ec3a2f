"""Two result folders: what moved beyond the spread of its repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.bench.results import BenchResult, ResultRow, ResultTable, format_ratio
from slipstream.errors import UserError


def compare(old: Path, new: Path) -> BenchResult:
    """Every row that both have; it moved if no repeat of one lies among the other's."""
    before, after = (_read(folder) for folder in (old, new))
    if before["kind"] != after["kind"]:
        raise UserError(
            f"{old} holds a {before['kind']} and {new} a {after['kind']}; compare two of one kind"
        )
    mine = {(row["case"], row["way"], row["unit"]): row for row in before["rows"]}
    rows, moved, gone = [], [], set(mine)
    for row in after["rows"]:
        key = (row["case"], row["way"], row["unit"])
        other = mine.get(key)
        gone.discard(key)
        if other is None or not (other["repeats"] and row["repeats"]):
            continue
        found = _compared(other, row)
        rows.append(found)
        if found.more["moved"]:
            moved.append(found)
    if not rows:
        raise UserError(f"{old} and {new} have no case and way in common")
    return BenchResult(
        kind="comparison",
        headline=f"{len(moved)} of {len(rows)} figures moved beyond their spread",
        rows=rows,
        tables=[_table(rows)],
        settings={"old": str(old), "new": str(new), "kind": before["kind"]},
        seconds=0.0,
        notes=_notes(before, after, gone),
    )


def _read(folder: Path) -> Any:
    found = runs.read_json(folder / "results.json")
    if not isinstance(found, dict) or not {"kind", "rows", "hardware"} <= set(found):
        raise UserError(f"{folder}: holds no results of slipstream bench")
    for row in found["rows"]:
        if not isinstance(row, dict) or not {"case", "way", "unit", "repeats"} <= set(row):
            raise UserError(f"{folder / 'results.json'}: is damaged; measure again")
    return found


def _compared(old: dict[str, Any], new: dict[str, Any]) -> ResultRow:
    apart = min(new["repeats"]) > max(old["repeats"]) or max(new["repeats"]) < min(old["repeats"])
    more = {
        "old": old["median"],
        "old_repeats": old["repeats"],
        "ratio": new["median"] / old["median"],
        "moved": apart,
    }
    return ResultRow(new["case"], new["way"], new["unit"], new["repeats"], more)


def _table(rows: list[ResultRow]) -> ResultTable:
    cells = []
    for row in sorted(rows, key=lambda row: (not row.more["moved"], row.case)):
        old = row.more["old_repeats"]
        change = row.more["ratio"]
        said = "within the spread"
        if row.more["moved"]:
            said = "higher" if change > 1 else "lower"
        cells.append(
            [
                row.case,
                row.way,
                f"{row.more['old']:.4g} ({min(old):.4g} to {max(old):.4g})",
                f"{row.median:.4g} ({min(row.repeats):.4g} to {max(row.repeats):.4g})",
                format_ratio(change),
                said,
            ]
        )
    unit = rows[0].unit if len({row.unit for row in rows}) == 1 else "see results.json"
    return ResultTable(
        "old and new", ["case", "way", f"old, {unit}", "new", "new / old", ""], cells
    )


def _notes(before: Any, after: Any, gone: set[Any]) -> list[str]:
    notes = [
        f"{key}: {before['hardware'].get(key)} before, {after['hardware'].get(key)} now"
        for key in ("gpu", "cpu", "cores", "torch", "cudnn")
        if before["hardware"].get(key) != after["hardware"].get(key)
    ]
    if gone:
        notes.append(f"{len(gone)} of the old rows have no counterpart")
    return notes
