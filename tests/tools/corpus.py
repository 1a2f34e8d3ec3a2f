"""Awkward tables as people have them, each with the settings that a careful person would write.

`inspect` agrees with a case where it proposes these settings and asks nothing. A case may say that
a person has to be asked (`asks`): then settings are not compared, but the question has to be there.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START = datetime(2023, 1, 1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)

Table = dict[str, list[Any]]


@dataclass(frozen=True)
class Case:
    """A table on disk, and what is right for it."""

    name: str
    write: Callable[[Path], Path]
    data: dict[str, Any]
    """Settings of `[data]` that are right; None where a setting must not be there"""
    step: float | None = None
    """The usual step of the time: in seconds for dates"""
    gaps: int | None = None
    asks: str | None = None
    """The question that only a person can answer"""
    inputs: set[str] | None = None
    """Columns that are inputs, where that matters"""
    not_inputs: set[str] = field(default_factory=set)


CASES: list[Case] = []


def case(
    name: str,
    data: dict[str, Any],
    *,
    step: float | None = None,
    gaps: int | None = None,
    asks: str | None = None,
    inputs: set[str] | None = None,
    not_inputs: set[str] | None = None,
) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    """Add a function that writes a table to the corpus."""

    def add(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
        CASES.append(Case(name, write, data, step, gaps, asks, inputs, not_inputs or set()))
        return write

    return add


def times(count: int, step: timedelta = HOUR, start: datetime = START) -> list[datetime]:
    return [start + i * step for i in range(count)]


def texts(stamps: list[datetime], time_format: str) -> list[str]:
    return [stamp.strftime(time_format) for stamp in stamps]


def waves(count: int, seed: int = 0, *, season: int = 24, level: float = 100.0) -> list[float]:
    """Return a load: a season, a slow drift and noise."""
    noise = np.random.default_rng(seed).normal(size=count)
    rows = np.arange(count)
    values = level * (1 + 0.3 * np.sin(2 * np.pi * rows / season) + 0.02 * noise + 1e-4 * rows)
    return [round(float(value), 3) for value in values]


def write_csv(
    path: Path,
    table: Table,
    *,
    delimiter: str = ",",
    above: str = "",
    below_names: str = "",
    names: bool = True,
    encoding: str = "utf-8",
    decimal: str = ".",
) -> Path:
    """Write a table as text, one line per row."""

    def to_cell(value: Any) -> str:
        text = "" if value is None else str(value)
        return text.replace(".", decimal) if isinstance(value, float) else text

    rows = zip(*table.values(), strict=True)
    lines = [delimiter.join(map(to_cell, row)) for row in rows]
    header = delimiter.join(table) + "\n" if names else ""
    path.write_text(above + header + below_names + "\n".join(lines) + "\n", encoding=encoding)
    return path


def load_table(stamps: list[Any], name: str = "time", seed: int = 0) -> Table:
    """Return a time, two inputs and a load."""
    count = len(stamps)
    return {
        name: stamps,
        "temperature": waves(count, seed + 1, level=15.0),
        "wind": waves(count, seed + 2, season=31, level=6.0),
        "load": waves(count, seed),
    }


def add_format_case(time_format: str, name: str, step: timedelta = HOUR, **expected: Any) -> None:
    """Add an hourly load whose times are written in a format."""

    @case(
        f"times as {name}",
        {"time": "when", "time_format": time_format, "targets": ["load"], "unsorted": None},
        step=step.total_seconds(),
        gaps=0,
        **expected,
    )
    def write(folder: Path) -> Path:
        stamps = texts(times(900, step), time_format)
        return write_csv(folder / "load.csv", load_table(stamps, "when"))


# formats of times

for time_format, format_name in {
    "%d.%m.%Y %H:%M": "German dates",
    "%m/%d/%Y %H:%M": "American dates",
    "%d/%m/%Y %H:%M:%S": "British dates with seconds",
    "%m/%d/%Y %I:%M %p": "a clock of twelve hours",
    "%d-%b-%Y %H:%M": "names of months",
    "%Y/%m/%d %H:%M:%S": "slashes, year first",
    "%Y.%m.%d %H:%M": "points, year first",
    "%d.%m.%y %H:%M": "two digits of the year",
    "%b %d %Y %H:%M": "names of months, American",
    "%Y%m%d %H:%M": "digits of the date",
    "%Y%m%d%H": "digits to the hour",
    "%Y%m%d%H%M": "digits to the minute",
    "%Y%m%dT%H%M%S": "basic ISO",
    "%d/%b/%Y:%H:%M:%S": "a web server's log",
}.items():
    add_format_case(time_format, format_name)
add_format_case("%d.%m.%Y %H:%M:%S.%f", "fractions of a second", timedelta(milliseconds=100))


@case("ISO 8601", {"time": "date", "time_format": None, "targets": ["load"]}, step=3600, gaps=0)
def write_iso(folder: Path) -> Path:
    return write_csv(folder / "a.csv", load_table(texts(times(900), "%Y-%m-%d %H:%M:%S"), "date"))


@case("ISO 8601 with a zone", {"time": "ts", "time_format": None, "unsorted": None}, step=900)
def write_zone(folder: Path) -> Path:
    stamps = texts(times(900, timedelta(minutes=15)), "%Y-%m-%dT%H:%M:%SZ")
    return write_csv(folder / "a.csv", load_table(stamps, "ts"))


@case("seconds since 1970", {"time": "timestamp", "unsorted": None}, step=60, gaps=0)
def write_epoch(folder: Path) -> Path:
    stamps = [1_700_000_000 + 60 * i for i in range(900)]
    return write_csv(folder / "a.csv", load_table(stamps, "timestamp"))


@case("milliseconds since 1970", {"time": "Timestamp (ms)"}, step=500, gaps=0)
def write_milliseconds(folder: Path) -> Path:
    stamps = [1_700_000_000_000 + 500 * i for i in range(900)]
    return write_csv(folder / "a.csv", load_table(stamps, "Timestamp (ms)"))


@case("times since a start", {"time": "Test Time"}, step=1, gaps=0)
def write_elapsed(folder: Path) -> Path:
    stamps = [f"{i // 3600:02d}:{i // 60 % 60:02d}:{i % 60:02d}.000" for i in range(900)]
    return write_csv(folder / "a.csv", load_table(stamps, "Test Time"))


@case("days of a spreadsheet", {"time": "Date", "unsorted": None}, gaps=0)
def write_serial(folder: Path) -> Path:
    return write_csv(folder / "a.csv", load_table([45000 + i for i in range(900)], "Date"))


@case("months, month first", {"time": "date", "time_format": "%m/%d/%Y"}, gaps=0)
def write_months(folder: Path) -> Path:
    stamps = [datetime(1990 + i // 12, i % 12 + 1, 1) for i in range(240)]
    return write_csv(folder / "a.csv", load_table(texts(stamps, "%m/%d/%Y"), "date"))


@case("months, day first", {"time": "date", "time_format": "%d/%m/%Y"}, gaps=0)
def write_months_by_day(folder: Path) -> Path:
    stamps = [datetime(1990 + i // 12, i % 12 + 1, 1) for i in range(240)]
    return write_csv(folder / "a.csv", load_table(texts(stamps, "%d/%m/%Y"), "date"))


@case("year and month in one cell", {"time": "Month", "time_format": "%Y-%m"}, gaps=0)
def write_year_month(folder: Path) -> Path:
    stamps = [datetime(1990 + i // 12, i % 12 + 1, 1) for i in range(240)]
    return write_csv(folder / "a.csv", load_table(texts(stamps, "%Y-%m"), "Month"))


@case("the first hours of two days, day or month first", {}, asks="date format")
def write_swapped(folder: Path) -> Path:
    stamps = texts(times(20, timedelta(minutes=1), datetime(2023, 3, 4)), "%m/%d/%Y %H:%M")
    stamps += texts(times(20, timedelta(minutes=1), datetime(2023, 7, 9)), "%m/%d/%Y %H:%M")
    return write_csv(folder / "a.csv", load_table(stamps))


# times over several columns


@case(
    "date and time apart",
    {"time": ["Date", "Time"], "time_format": "%d/%m/%Y %H.%M.%S", "targets": ["load"]},
    step=3600,
    gaps=0,
)
def write_date_time(folder: Path) -> Path:
    stamps = times(900)
    table: Table = {"Date": texts(stamps, "%d/%m/%Y"), "Time": texts(stamps, "%H.%M.%S")}
    return write_csv(folder / "a.csv", _join(table))


def _join(table: Table, seed: int = 0) -> Table:
    """Add inputs and a load to columns of times."""
    loads = load_table(next(iter(table.values())), "time", seed)
    del loads["time"]
    return table | loads


BARS = ["<OPEN>", "<HIGH>", "<LOW>", "<CLOSE>"]


def make_bars(count: int) -> Table:
    closes = np.array(waves(count, season=400, level=1.1))
    opens = np.concatenate([closes[:1], closes[:-1]])
    high, low = np.maximum(opens, closes) + 0.001, np.minimum(opens, closes) - 0.001
    columns = zip(BARS, (opens, high, low, closes), strict=True)
    return {name: [round(float(value), 5) for value in values] for name, values in columns}


@case(
    "bars with a date and a time",
    {
        "time": ["<DATE>", "<TIME>"],
        "time_format": "%Y.%m.%d %H:%M:%S",
        "targets": ["<CLOSE>"],
        "id": None,
    },
    step=900,
    gaps=0,
)
def write_bars(folder: Path) -> Path:
    stamps = times(1200, timedelta(minutes=15))
    table: Table = {"<DATE>": texts(stamps, "%Y.%m.%d"), "<TIME>": texts(stamps, "%H:%M:%S")}
    table |= make_bars(1200)
    table["<TICKVOL>"] = [100 + i * 37 % 90 for i in range(1200)]
    table["<VOL>"] = [0] * 1200
    table["<SPREAD>"] = [2 + i * 7 % 3 for i in range(1200)]
    return write_csv(folder / "bars.csv", table, delimiter="\t")


@case(
    "bars whose date and time are digits",
    {
        "time": ["<DATE>", "<TIME>"],
        "time_format": "%Y%m%d %H%M%S",
        "targets": ["<CLOSE>"],
        "id": None,
    },
    step=3600,
)
def write_digit_bars(folder: Path) -> Path:
    stamps = times(1200)
    table: Table = {"<TICKER>": ["EURUSD"] * 1200, "<PER>": [60] * 1200}
    table |= {"<DATE>": texts(stamps, "%Y%m%d"), "<TIME>": texts(stamps, "%H%M%S")}
    table |= make_bars(1200)
    return write_csv(folder / "bars.txt", table)


@case(
    "a date and an hour",
    {
        "time": ["dteday", "hr"],
        "time_format": "%Y-%m-%d %H",
        "targets": ["cnt"],
        "id": None,
        "unsorted": None,
    },
    step=3600,
    gaps=3,
    not_inputs={"instant", "hr"},
)
def write_bikes(folder: Path) -> Path:
    missing = {50, 51, 300, 700, 701, 702}
    stamps = [stamp for i, stamp in enumerate(times(1500)) if i not in missing]
    count = len(stamps)
    table: Table = {
        "instant": list(range(1, count + 1)),
        "dteday": texts(stamps, "%Y-%m-%d"),
        "season": [stamp.month % 12 // 3 + 1 for stamp in stamps],
        "yr": [stamp.year - 2023 for stamp in stamps],
        "mnth": [stamp.month for stamp in stamps],
        "hr": [stamp.hour for stamp in stamps],
        "temp": waves(count, 1, level=0.5),
        "cnt": [round(value) for value in waves(count)],
    }
    return write_csv(folder / "hour.csv", table)


@case(
    "year, month, day and hour",
    {"time": ["year", "month", "day", "hour"], "time_format": "%Y %m %d %H", "id": None},
    step=3600,
    gaps=0,
    not_inputs={"No"},
)
def write_parts(folder: Path) -> Path:
    stamps = times(900)
    table: Table = {"No": list(range(1, 901))}
    table |= {name: [getattr(stamp, name) for stamp in stamps] for name in ("year", "month", "day")}
    table["hour"] = [stamp.hour for stamp in stamps]
    return write_csv(folder / "a.csv", _join(table))


@case(
    "years of several countries",
    {"time": "year", "time_format": None, "id": "country", "targets": ["income"]},
    step=5,
    gaps=0,
    inputs={"people"},
)
def write_countries(folder: Path) -> Path:
    countries = [f"country {letter}" for letter in "abcdefghijklmnopqrst"]
    years = list(range(1950, 2015, 5))
    count = len(countries) * len(years)
    table: Table = {
        "country": [country for country in countries for _ in years],
        "year": years * len(countries),
        "people": waves(count, 1),
        "income": waves(count, 2, level=5.0),
    }
    return write_csv(folder / "a.csv", table)


@case(
    "comments above spaces, a month and a minute of one name",
    {"time": ["YY", "MM", "DD", "hh", "mm"], "time_format": "%Y %m %d %H %M", "id": None},
    step=600,
    gaps=0,
    inputs={"WSPD"},
)
def write_buoy(folder: Path) -> Path:
    values = zip(
        times(900, timedelta(minutes=10)), waves(900, level=8), waves(900, 1, level=18), strict=True
    )
    names = "#YY  MM DD hh mm  WSPD  ATMP\n#yr  mo dy hr mn  m/s  degC\n"
    lines = [f"{stamp:%Y %m %d %H %M}  {wind:5.1f} {air:5.1f}\n" for stamp, wind, air in values]
    path = folder / "a.txt"
    path.write_text(names + "".join(lines))
    return path


@case(
    "numbered names in a comment above spaces",
    {"time": ["Date", "Time"], "time_format": "%d/%m/%Y %H:%M", "id": None},
    step=900,
    gaps=0,
    inputs={"Comedor"},
)
def write_numbered(folder: Path) -> Path:
    values = zip(
        times(900, timedelta(minutes=15)),
        waves(900, level=20),
        waves(900, 1, level=200),
        strict=True,
    )
    lines = [f"{stamp:%d/%m/%Y %H:%M} {air:.4f} {gas:.3f} \n" for stamp, air, gas in values]
    path = folder / "a.data"
    path.write_text("# 1:Date 2:Time 3:Comedor 4:CO2\n" + "".join(lines))
    return path


@case(
    "year, month and day",
    {"time": ["Year", "Month", "Day"], "time_format": "%Y %m %d", "id": None},
    step=86400,
    gaps=0,
)
def write_days(folder: Path) -> Path:
    stamps = times(900, DAY)
    names = ("Year", "Month", "Day")
    table: Table = {name: [getattr(stamp, name.lower()) for stamp in stamps] for name in names}
    return write_csv(folder / "a.csv", _join(table))


@case(
    "two clocks, the finer one a number",
    {"time": "Time", "time_format": None, "id": None, "targets": ["soc"]},
    step=0.1,
    gaps=0,
    inputs={"Voltage", "Current"},
)
def write_two_clocks(folder: Path) -> Path:
    stamps = times(3000, timedelta(milliseconds=100))
    table: Table = {
        "TimeStamp": texts(stamps, "%m/%d/%Y %I:%M:%S %p"),
        "Voltage": waves(3000, 1, level=3.7),
        "Current": waves(3000, 2, level=-1.0, season=77),
        "Time": [round(0.1 * i, 1) for i in range(3000)],
        "soc": waves(3000, season=2500, level=0.5),
    }
    return write_csv(folder / "cell.csv", table)


@case(
    "the time of a test and of its steps",
    {"time": "Test_Time(s)", "id": None},
    step=1,
    not_inputs={"Data_Point"},
)
def write_steps(folder: Path) -> Path:
    table: Table = {
        "Data_Point": list(range(1, 1201)),
        "Test_Time(s)": [float(i) for i in range(1200)],
        "Step_Time(s)": [float(i % 300) for i in range(1200)],
        "Step_Index": [i // 300 + 1 for i in range(1200)],
        "Cycle_Index": [i // 600 + 1 for i in range(1200)],
        "Current(A)": waves(1200, 1, level=1.0),
        "Voltage(V)": waves(1200, level=3.6),
    }
    return write_csv(folder / "arbin.csv", table)


# orders


@case(
    "newest first",
    {"time": "Date", "unsorted": "sort", "duplicates": None, "targets": ["Close"]},
    step=86400,
    gaps=0,
)
def write_newest_first(folder: Path) -> Path:
    stamps = texts(times(900, DAY)[::-1], "%Y-%m-%d")
    table: Table = {"Date": stamps, "Open": waves(900, 1), "Close": waves(900)}
    return write_csv(folder / "a.csv", table | {"Volume": waves(900, 3, level=1e6)})


@case(
    "days in descending order, hours in ascending order, an hour repeated in autumn",
    {"time": "Datetime", "time_format": None, "unsorted": "sort", "duplicates": "mean", "id": None},
    step=3600,
    gaps=4,
)
def write_descending_days(folder: Path) -> Path:
    days = []
    for number in range(120):
        stamps = times(24, HOUR, START + number * DAY)
        if number in (20, 90):
            stamps.insert(2, stamps[2])  # the hour that the clock goes back
        if number in (5, 30, 60, 100):
            del stamps[2]
        days.append(stamps)
    stamps = [stamp for day in days[::-1] for stamp in day]
    table: Table = {"Datetime": texts(stamps, "%Y-%m-%d %H:%M:%S")}
    return write_csv(folder / "PJM.csv", table | {"PJM_MW": waves(len(stamps), level=3e4)})


@case("rows in any order", {"time": "date", "unsorted": "sort", "id": None}, step=3600, gaps=0)
def write_shuffled(folder: Path) -> Path:
    table = load_table(texts(times(900), "%Y-%m-%d %H:%M:%S"), "date")
    order = np.random.default_rng(0).permutation(900)
    shuffled = {name: [values[i] for i in order] for name, values in table.items()}
    return write_csv(folder / "a.csv", shuffled)


@case(
    "the same rows twice",
    {"time": "date", "unsorted": None, "duplicates": "first", "id": None},
    step=3600,
    gaps=0,
)
def write_repeated_rows(folder: Path) -> Path:
    table = load_table(texts(times(900), "%Y-%m-%d %H:%M:%S"), "date")
    order = sorted([*range(900), 10, 11, 500])
    return write_csv(folder / "a.csv", {n: [v[i] for i in order] for n, v in table.items()})


@case("a gap of two days", {"time": "date", "gap_tolerance": None}, step=3600, gaps=1)
def write_gap(folder: Path) -> Path:
    stamps = [*times(500), *times(500, HOUR, START + 22 * DAY)]
    return write_csv(folder / "a.csv", load_table(texts(stamps, "%Y-%m-%d %H:%M:%S"), "date"))


@case("working days", {"time": "Date", "targets": ["Close"], "unsorted": None}, step=86400)
def write_working_days(folder: Path) -> Path:
    stamps = [stamp for stamp in times(1400, DAY) if stamp.weekday() < 5]
    count = len(stamps)
    table: Table = {"Date": texts(stamps, "%Y-%m-%d"), "Open": waves(count, 1)}
    table |= {"Close": waves(count), "Adj Close": waves(count, 4)}
    return write_csv(folder / "sp.csv", table | {"Volume": waves(count, 3, level=1e6)})


# several series


def make_panel(num_series: int = 5, count: int = 200, names: list[Any] | None = None) -> Table:
    names = names or [f"store {chr(65 + i)}" for i in range(num_series)]
    stamps = texts(times(count, DAY), "%Y-%m-%d")
    return {
        "store": [name for name in names for _ in range(count)],
        "date": stamps * num_series,
        "price": waves(count * num_series, 1, level=3.0),
        "sales": waves(count * num_series),
    }


@case("a long table, series after series", {"time": "date", "id": "store"}, step=86400, gaps=0)
def write_panel(folder: Path) -> Path:
    return write_csv(folder / "a.csv", make_panel())


@case("a long table whose id is a number", {"time": "date", "id": "store"}, step=86400, gaps=0)
def write_number_panel(folder: Path) -> Path:
    return write_csv(folder / "a.csv", make_panel(names=[11, 3, 7, 20, 5]))


@case("a long table, time after time", {"time": "date", "id": "store"}, gaps=0)
def write_mixed_panel(folder: Path) -> Path:
    table = make_panel()
    order = [series * 200 + row for row in range(200) for series in range(5)]
    return write_csv(folder / "a.csv", {n: [v[i] for i in order] for n, v in table.items()})


@case("a long table of numbers, time after time", {"time": "date", "id": "store"}, gaps=0)
def write_mixed_number_panel(folder: Path) -> Path:
    table = make_panel(names=[11, 3, 7, 20, 5])
    order = [series * 200 + row for row in range(200) for series in range(5)]
    return write_csv(folder / "a.csv", {n: [v[i] for i in order] for n, v in table.items()})


@case("two columns tell series apart", {"time": "date", "id": ["store", "item"]}, gaps=0)
def write_two_ids(folder: Path) -> Path:
    table = make_panel(6)
    table = {
        "store": [f"S{row // 200 // 2}" for row in range(1200)],
        "item": [f"I{row // 200 % 2}" for row in range(1200)],
    } | {name: values for name, values in table.items() if name != "store"}
    return write_csv(folder / "a.csv", table)


@case("cycles whose time starts again", {"time": "time_s", "id": "cycle"}, step=1)
def write_cycles(folder: Path) -> Path:
    table: Table = {
        "cycle": [i // 300 + 1 for i in range(1500)],
        "time_s": [float(i % 300) for i in range(1500)],
        "current": waves(1500, 1, level=2.0),
        "voltage": waves(1500, level=3.6),
    }
    return write_csv(folder / "a.csv", table)


@case("a folder with a file per series", {"time": "t", "id": None}, step=1)
def write_folder(folder: Path) -> Path:
    for number in range(4):
        write_csv(folder / f"cell{number}.csv", load_table(list(range(300)), "t", number))
    return folder


@case("a folder with an empty file", {"time": "t", "id": None}, step=1)
def write_empty_file(folder: Path) -> Path:
    write_folder(folder)
    (folder / "cell9.csv").write_text("")
    return folder


@case("a folder with a file of names alone", {"time": "t", "id": None}, step=1)
def write_header_only(folder: Path) -> Path:
    write_folder(folder)
    (folder / "cell9.csv").write_text("t,temperature,wind,load\n")
    return folder


@case("folders for the sets", {"time": "t", "split": {"folders": True}}, step=1)
def write_sets(folder: Path) -> Path:
    for number, name in enumerate(("train", "val", "test")):
        (folder / name).mkdir()
        write_csv(folder / name / "a.csv", load_table(list(range(300)), "t", number))
    return folder


# layouts


@case("a series per row", {"layout": "wide", "values": "V2:", "id": "V1", "time": None})
def write_wide(folder: Path) -> Path:
    rows = [[f"H{i + 1}", *waves(300 + 20 * (i % 4), i)] for i in range(30)]
    width = max(map(len, rows))
    lines = [",".join(f'"V{i + 1}"' for i in range(width))]
    lines += [",".join(map(str, [*row, *[""] * (width - len(row))])) for row in rows]
    path = folder / "hourly.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@case(
    "a labelled series per row, without names",
    {"layout": "wide", "task": "classify", "time": None, "context": "all"},
)
def write_labelled_rows(folder: Path) -> Path:
    rows = [[i % 3 + 1, *waves(80, i, season=10 + 7 * (i % 3), level=1.0)] for i in range(60)]
    path = folder / "shapes_TRAIN.tsv"
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return path


@case("a class archive", {"layout": "wide", "task": "classify", "time": None, "context": "all"})
def write_archive(folder: Path) -> Path:
    lines = ["@problemName Shapes", "@timeStamps false", "@univariate true"]
    lines += ["@equalLength true", "@seriesLength 40", "@classLabel true 1 2", "@data"]
    for number in range(40):
        values = ",".join(map(str, waves(40, number, season=8 + 8 * (number % 2), level=1.0)))
        lines.append(f"{values}:{number % 2 + 1}")
    path = folder / "Shapes_TRAIN.ts"
    path.write_text("\n".join(lines) + "\n")
    return path


@case("lines above the names", {"time": "time", "targets": ["load"]}, step=3600)
def write_preamble(folder: Path) -> Path:
    above = "Logger 3.1\nSerial,4711\nStarted,2023-01-01\n\n"
    stamps = texts(times(900), "%Y-%m-%d %H:%M")
    return write_csv(folder / "a.csv", load_table(stamps), above=above)


@case("a line of NUL bytes above the names", {"time": "time", "targets": ["load"]}, step=3600)
def write_nul_line(folder: Path) -> Path:
    above = "Cycler 5\n" + "\0" * 3000 + "\nChannel: 3\n"
    stamps = texts(times(900), "%Y-%m-%d %H:%M")
    return write_csv(folder / "a.csv", load_table(stamps), above=above)


@case("units below the names", {"time": "time", "targets": ["load"]}, step=3600)
def write_units(folder: Path) -> Path:
    stamps = texts(times(900), "%Y-%m-%d %H:%M")
    return write_csv(folder / "a.csv", load_table(stamps), below_names="[-],[degC],[m/s],[kW]\n")


@case("semicolons and decimal commas", {"time": "time", "targets": ["load"]}, step=3600)
def write_commas(folder: Path) -> Path:
    stamps = texts(times(900), "%d.%m.%Y %H:%M")
    return write_csv(folder / "a.csv", load_table(stamps), delimiter=";", decimal=",")


@case("an encoding of Windows", {"time": "Zeit", "encoding": "cp1252"}, step=3600)
def write_windows(folder: Path) -> Path:
    table = load_table(texts(times(900), "%d.%m.%Y %H:%M"), "Zeit")
    table = {name.replace("temperature", "Temperatur °C"): v for name, v in table.items()}
    return write_csv(folder / "a.csv", table, delimiter=";", encoding="cp1252")


@case("UTF-16", {"time": "time", "encoding": "utf-16"}, step=3600)
def write_utf16(folder: Path) -> Path:
    stamps = texts(times(900), "%Y-%m-%d %H:%M")
    return write_csv(folder / "a.csv", load_table(stamps), delimiter="\t", encoding="utf-16")


@case("a byte order mark", {"time": "time", "encoding": None}, step=3600)
def write_mark(folder: Path) -> Path:
    stamps = texts(times(900), "%Y-%m-%d %H:%M")
    return write_csv(folder / "a.csv", load_table(stamps), encoding="utf-8-sig")


@case("gzip", {"time": "time", "targets": ["load"]}, step=3600)
def write_gzip(folder: Path) -> Path:
    plain = write_csv(folder / "b", load_table(texts(times(900), "%Y-%m-%d %H:%M")))
    path = folder / "a.csv.gz"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return path


@case("Parquet with timestamps", {"time": "time", "targets": ["load"]}, step=3600)
def write_parquet(folder: Path) -> Path:
    pq.write_table(pa.table(load_table(times(900))), folder / "a.parquet")
    return folder / "a.parquet"


@case("Parquet with dates and a column of hours", {"time": ["day", "hour"], "id": None}, step=3600)
def write_dates_hours(folder: Path) -> Path:
    stamps = times(960)
    days: list[date] = [stamp.date() for stamp in stamps]
    table = _join({"day": days, "hour": [stamp.hour for stamp in stamps]})
    pq.write_table(pa.table(table), folder / "a.parquet")
    return folder / "a.parquet"


# columns


@case(
    "an index, a constant, a copy and a text",
    {"time": "time", "targets": ["load"]},
    inputs={"temperature", "wind"},
)
def write_clutter(folder: Path) -> Path:
    table: Table = {"": list(range(900))}
    table |= load_table(texts(times(900), "%Y-%m-%d %H:%M"))
    load = table.pop("load")
    table |= {"site": ["north"] * 900, "version": [3] * 900, "wind_2": table["wind"]}
    table |= {"sky": [("clear", "cloudy", "rain")[i * 7 % 3] for i in range(900)], "load": load}
    return write_csv(folder / "a.csv", table)


@case("codes for missing values", {"time": "time", "na": [-200]}, step=3600)
def write_codes(folder: Path) -> Path:
    table = load_table(texts(times(900), "%Y-%m-%d %H:%M"))
    table["wind"] = [-200 if i % 40 == 7 else value for i, value in enumerate(table["wind"])]
    return write_csv(folder / "a.csv", table)


@case("texts for missing values", {"time": "time", "na": ["no data"]}, step=3600)
def write_marks(folder: Path) -> Path:
    table = load_table(texts(times(900), "%Y-%m-%d %H:%M"))
    table["wind"] = ["no data" if i % 40 == 7 else value for i, value in enumerate(table["wind"])]
    return write_csv(folder / "a.csv", table)


@case("labels of every row", {"time": "t", "task": "classify", "targets": ["activity"]})
def write_activity(folder: Path) -> Path:
    table: Table = {"t": list(range(900))}
    table |= {f"acc_{axis}": waves(900, i, season=9 + i) for i, axis in enumerate("xyz")}
    table["activity"] = [("sit", "walk", "run")[i // 50 % 3] for i in range(900)]
    return write_csv(folder / "a.csv", table)


@case("charge", {"time": "time_s", "targets": ["soc"]}, step=1, inputs={"voltage", "current"})
def write_charge(folder: Path) -> Path:
    table: Table = {"time_s": list(range(900)), "soc": waves(900, season=800, level=0.5)}
    return write_csv(
        folder / "a.csv",
        table | {"voltage": waves(900, 1, level=3.7), "current": waves(900, 2, level=-1.0)},
    )


@case("no time at all", {"time": None, "id": None, "targets": ["load"]})
def write_no_time(folder: Path) -> Path:
    table = load_table(list(range(900)))
    del table["time"]
    return write_csv(folder / "a.csv", table)


@case("a time of which cells are broken", {}, asks="time")
def write_broken_times(folder: Path) -> Path:
    stamps = texts(times(900), "%Y-%m-%d %H:%M")
    stamps[100], stamps[333] = "??", "later"
    return write_csv(folder / "a.csv", load_table(stamps))


@case("times at random", {"time": "time", "gap_tolerance": float("inf"), "unsorted": None})
def write_random_times(folder: Path) -> Path:
    seconds = np.cumsum(np.random.default_rng(0).exponential(30.0, 900) + 1).round()
    stamps = texts(
        [START + timedelta(seconds=float(each)) for each in seconds], "%Y-%m-%d %H:%M:%S"
    )
    return write_csv(folder / "a.csv", load_table(stamps))
