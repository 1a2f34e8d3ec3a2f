"""Data files as people have them: each is odd in its own way."""

from __future__ import annotations

import gzip
import math
import zipfile
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.workbooks import write_workbook

ROWS = 300
START = datetime(2024, 1, 1)


def write_csv(path: Path, times: list[str], form: str = "{},{:.4f},{:.3f}") -> None:
    lines = [form.format(t, math.sin(i / 4), math.cos(i / 9)) for i, t in enumerate(times)]
    path.write_text("\n".join(["time,load,wind", *lines]) + "\n", encoding="utf-8")


def list_hours(form: str = "%Y-%m-%d %H:%M", hours: int = 1) -> list[str]:
    return [(START + timedelta(hours=hours * row)).strftime(form) for row in range(ROWS)]


def write_weekdays(path: Path) -> None:
    days = [START + timedelta(days=row * 7 // 5) for row in range(ROWS)]
    write_csv(path, [day.strftime("%Y-%m-%d") for day in days])


def write_days_backwards(path: Path) -> None:
    hours = list_hours("%d.%m.%Y %H:%M")[:288]
    write_csv(path, [hours[24 * day + hour] for day in reversed(range(12)) for hour in range(24)])


def write_repeated(path: Path) -> None:
    hours = list_hours()
    write_csv(path, [*hours[:100], hours[99], *hours[101:]])


def write_unreadable(path: Path) -> None:
    hours = list_hours()
    write_csv(path, [*hours[:100], "soon", *hours[101:]])


def write_german(path: Path) -> None:
    lines = [f"{t};{i / 7:.2f};{i % 9}".replace(".", ",") for i, t in enumerate(range(ROWS))]
    head = ["Messung vom 1. Mai", "Gerät 7", "Zeit;Spannung;Kanal", "s;V;-"]
    path.write_text("\n".join([*head, *lines]) + "\n", encoding="cp1252")


def write_texts(path: Path) -> None:
    lines = [f"{'abc'[row % 3]},{'xyz'[row % 2]}" for row in range(ROWS)]
    path.write_text("\n".join(["one,two", *lines]) + "\n")


def write_short(path: Path) -> None:
    path.write_text("load\n1\n2\n4\n")


def write_head(path: Path) -> None:
    path.write_text("time,load\n")


def write_empty(path: Path) -> None:
    path.write_text("")


def write_ragged(path: Path) -> None:
    path.write_text("a,b\n1,2\n3,4,5\n")


def write_names(path: Path) -> None:
    names = ["inf", '"<b>nan</b>"', "Größe [m²]", '"a,b"', "data.path", "'x'"]
    lines = [",".join(f"{math.sin(row / (3 + i)):.4f}" for i in range(6)) for row in range(ROWS)]
    path.write_text("\n".join([",".join(names), *lines]) + "\n", encoding="utf-8")


def write_codes(path: Path) -> None:
    lines = [
        f"{t},{-999 if row % 17 == 3 else round(math.sin(row / 4), 4)},"
        f"{'n/a' if row % 9 == 1 else row}"
        for row, t in enumerate(list_hours())
    ]
    path.write_text("\n".join(["time,load,wind", *lines]) + "\n")


def write_infinite(path: Path) -> None:
    load = np.sin(np.arange(ROWS) / 5)
    load[[7, 8, 9]] = [np.inf, -np.inf, np.nan]
    times = pa.array([START + timedelta(hours=row) for row in range(ROWS)], pa.timestamp("ns"))
    columns = {"at": times, "load": load, "on": load > 0, "site": ["a", None, "b"] * (ROWS // 3)}
    pq.write_table(pa.table(columns), path)


def write_series(path: Path) -> None:
    rows = [(cell, row) for cell in range(5) for row in range(80)]
    lines = [f"cell-{cell},{row},{math.sin(row / (3 + cell)):.4f}" for cell, row in rows]
    path.write_text("\n".join(["cell,time,load", *lines]) + "\n")


def write_sheets(path: Path) -> None:
    rows = [[START + timedelta(hours=row), math.sin(row / 4)] for row in range(120)]
    sheet = [["time", "load"], *rows]
    write_workbook(path, {"one": sheet, "two": sheet})


def write_packed(path: Path) -> None:
    plain = path.with_name("plain-of-gz")
    write_csv(plain, list_hours())
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def write_zipped(path: Path) -> None:
    plain = path.with_name("plain-of-zip")
    write_csv(plain, list_hours())
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(plain, "inner.csv")
    plain.unlink()


def write_wide(path: Path) -> None:
    columns = {f"c{i}": np.sin(np.arange(ROWS) / (2 + i)) for i in range(150)}
    pq.write_table(pa.table(columns), path)


ODDITIES: dict[str, Callable[[Path], None]] = {
    "weekdays.csv": write_weekdays,
    "days backwards.csv": write_days_backwards,
    "repeated.csv": write_repeated,
    "unreadable.csv": write_unreadable,
    "german.csv": write_german,
    "texts.csv": write_texts,
    "short.csv": write_short,
    "head.csv": write_head,
    "empty.csv": write_empty,
    "ragged.csv": write_ragged,
    "names.csv": write_names,
    "codes.csv": write_codes,
    "infinite.parquet": write_infinite,
    "series.csv": write_series,
    "sheets.xlsx": write_sheets,
    "packed.csv.gz": write_packed,
    "zipped.zip": write_zipped,
    "wide.parquet": write_wide,
}
"""Files by name, with what writes them"""
UNUSABLE = {
    "texts.csv": "",
    "short.csv": "",
    "head.csv": "has no rows",
    "empty.csv": "is empty",
    "ragged.csv": "line 3",
}
"""Those that cannot be trained on as they are, and what is said about reading them"""


def write_oddities(folder: Path) -> None:
    for name, write in ODDITIES.items():
        write(folder / name)
