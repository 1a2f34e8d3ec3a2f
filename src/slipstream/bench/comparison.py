"""Compares two result folders: which figures moved beyond the spread of their repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.bench.results import BenchResult, ResultRow, ResultTable, format_ratio
from slipstream.errors import UserError


def compare(old: Path, new: Path) -> BenchResult:
    """Compare every row that both have; it moved if the ranges of the repeats do not overlap."""
    before, after = (_read(folder) for folder in (old, new))
    if before["kind"] != after["kind"]:
        raise UserError(
            f"{old} holds a {before['kind']} and {new} a {after['kind']}; compare two of one kind"
        )
    old_rows = {(row["case"], row["way"], row["unit"]): row for row in before["rows"]}
    rows, missing = [], set(old_rows)
    for row in after["rows"]:
        key = (row["case"], row["way"], row["unit"])
        other = old_rows.get(key)
        missing.discard(key)
        if other is None or not (other["repeats"] and row["repeats"]):
            continue
        rows.append(_compare_rows(other, row))
    if not rows:
        raise UserError(f"{old} and {new} have no case and variant in common")
    num_moved = sum(row.extra["moved"] for row in rows)
    return BenchResult(
        kind="comparison",
        headline=f"{num_moved} of {len(rows)} figures moved beyond their spread",
        rows=rows,
        tables=[_build_table(rows)],
        settings={"old": str(old), "new": str(new), "kind": before["kind"]},
        seconds=0.0,
        notes=_list_notes(before, after, missing),
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
    extra = {
        "old": old["median"],
        "old_repeats": old["repeats"],
        "ratio": new["median"] / old["median"],
        "moved": apart,
    }
    return ResultRow(new["case"], new["way"], new["unit"], new["repeats"], extra)


def _build_table(rows: list[ResultRow]) -> ResultTable:
    cells = []
    for row in sorted(rows, key=lambda row: (not row.extra["moved"], row.case)):
        old = row.extra["old_repeats"]
        change = row.extra["ratio"]
        verdict = "within the spread"
        if row.extra["moved"]:
            verdict = "higher" if change > 1 else "lower"
        cells.append(
            [
                row.case,
                row.variant,
                f"{row.extra['old']:.4g} ({min(old):.4g} to {max(old):.4g})",
                f"{row.median:.4g} ({min(row.repeats):.4g} to {max(row.repeats):.4g})",
                format_ratio(change),
                verdict,
            ]
        )
    unit = rows[0].unit if len({row.unit for row in rows}) == 1 else "see results.json"
    return ResultTable(
        "old and new", ["case", "variant", f"old, {unit}", "new", "new / old", ""], cells
    )


def _list_notes(before: Any, after: Any, missing: set[Any]) -> list[str]:
    notes = [
        f"{key}: {before['hardware'].get(key)} before, {after['hardware'].get(key)} now"
        for key in ("gpu", "cpu", "cores", "torch", "cudnn")
        if before["hardware"].get(key) != after["hardware"].get(key)
    ]
    if missing:
        notes.append(f"{len(missing)} of the old rows have no counterpart")
    return notes
