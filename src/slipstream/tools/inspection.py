"""Inspect files without a config: describe the columns, list problems, propose a first config."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from slipstream import config as configs
from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.base.storage import group_by_content, is_url, parse_path
from slipstream.base.text import format_count, format_number
from slipstream.config import SIMULATED, Config, Data
from slipstream.data import files
from slipstream.data.columns import is_text
from slipstream.data.formats.reader import Batch, OpenTable, ReadOptions, open_table
from slipstream.reporting.page import Course
from slipstream.reporting.wording import find_unit
from slipstream.tools.columns import (
    BOOLEAN,
    EMPTY,
    NUMBER,
    TEXT,
    TIME,
    ColumnProfile,
    SortedTimes,
    TimeOrder,
    TimeSource,
    find_time,
    looks_like_number,
)

EVERY_SHEET = ReadOptions(sheets=("*",))


def open_tables(path: str, options: ReadOptions = EVERY_SHEET) -> Iterator[OpenTable]:
    """Open every table of a file, a folder or a pattern, one after the other."""
    if path.startswith(SIMULATED):
        for table in files.read_tables(Data(path=path), None):
            yield open_table(table)
        return
    folder, paths = files.expand_path(parse_path(path))
    for file in files.open_files(folder, paths, options):
        yield from file.inspect()


INTERLEAVED = 0.3
"""Share of rows with the time of the row above, from which on series are taken to alternate"""


MAX_KEYS = 8
"""Candidates for a series id; up to three of them are combined"""


class FileFacts(NamedTuple):
    """The name, format, size, columns and notes of a file."""

    name: str
    format: str
    num_bytes: int | None
    num_rows: int
    columns: tuple[str, ...]
    notes: tuple[str, ...]


class SeriesColumns(NamedTuple):
    """The columns that identify a series, and the series that they give."""

    names: tuple[str, ...]
    num_series: int
    shortest: int
    """Rows of the shortest series"""
    disorder: int
    """Rows whose time is not later than the row above in the same series"""
    is_mixed: bool = False
    """Whether rows of different series alternate"""
    starts: tuple[int, ...] = ()
    """The first row of each series; empty where series alternate"""


@dataclass
class Survey:
    """Statistics of all rows of all files."""

    files: list[FileFacts] = field(default_factory=list)
    columns: dict[str, ColumnProfile] = field(default_factory=dict)
    time: TimeSource | None = None
    order: TimeOrder = field(default_factory=TimeOrder)
    scalars: set[str] = field(default_factory=set)
    has_sheets: bool = False
    """Whether a workbook has several sheets, each of which is a series"""
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(machine.count_available_cores())
    )

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    def add(self, table: OpenTable) -> None:
        """Read all rows of a table."""
        num_rows = 0
        self.order.start_file()
        for name in table.columns:
            profile = self.columns.setdefault(name, ColumnProfile(name))
            profile.unit = profile.unit or table.units.get(name, "")
        for number, batch in enumerate(table.batches):
            if self.time is None and not self.files and not number:
                self.time = find_time(batch, table.decimal)
            self._add_batch(table, batch, is_first=not number)
            num_rows += len(next(iter(batch.values()))) if batch else 0
        self.scalars |= set(table.scalars)
        self.has_sheets |= bool(table.sheet)
        facts = table.name, table.format, table.num_bytes, num_rows, table.columns, table.notes
        self.files.append(FileFacts(*facts))

    def _add_batch(self, table: OpenTable, batch: Batch, *, is_first: bool) -> None:
        if self.time is not None and set(self.time.columns) <= batch.keys():
            self.order.add(self.time.read(batch, table.decimal))

        def add(name: str) -> None:
            values, profile = batch[name], self.columns[name]
            profile.add(values, table.decimal)
            if is_text(values.type) or profile.kind == NUMBER:
                profile.runs.add(values, is_first=is_first)

        for _ in self.threads.map(add, batch):  # Arrow and numpy release Python's lock
            pass

    def find_series_columns(self) -> SeriesColumns | None:
        """Find the columns that identify a series: their values change where the time starts
        again, or alternate where times repeat."""
        order, used = self.order, self.time.columns if self.time else ()
        if self.time is None or not order.disorder:
            return None
        whole = order.sort(order.file_starts)
        if whole is not None and not whole.repeated and 2 * whole.gaps < len(order.disorder):
            return None  # one series, whose rows are not sorted
        if order.repeated >= INTERLEAVED * order.num_rows:
            return self._find_mixed()
        names = [
            name
            for name, profile in self.columns.items()
            if profile.runs.is_open and len(profile.runs.positions) > len(self.files)
            if name not in used and name not in self.scalars
        ]
        names = sorted(names, key=lambda name: len(self.columns[name].runs.positions))[:MAX_KEYS]
        combined = (
            self._combine(key_names)
            for count in (1, 2, 3)
            for key_names in combinations(names, count)
        )
        fitting = [
            candidate
            for candidate in combined
            if candidate and 2 * candidate.disorder < len(order.disorder)
        ]
        return min(
            fitting, key=lambda candidate: (candidate.disorder, len(candidate.names)), default=None
        )

    def _combine(self, names: tuple[str, ...]) -> SeriesColumns | None:
        """Return the series by the values of these columns; None where a series has rows in
        several parts of the table."""
        runs = [self.columns[name].runs for name in names]
        starts = sorted({row for column_runs in runs for row in column_runs.positions})
        keys = {tuple(column_runs.find_value(row) for column_runs in runs) for row in starts}
        if len(keys) < len(starts):
            return None
        ends = [*starts[1:], self.num_rows]
        shortest = min(end - start for start, end in zip(starts, ends, strict=True))
        disorder = len(set(self.order.disorder) - set(starts))
        return SeriesColumns(names, len(starts), shortest, disorder, starts=tuple(starts))

    def _find_mixed(self) -> SeriesColumns | None:
        """Find a column of series ids that alternate: each time occurs once with every id."""
        num_times = self.order.num_rows - self.order.repeated
        for name, profile in self.columns.items():
            count = profile.num_distinct or 0
            distance = abs(count * num_times - profile.num_rows)
            if profile.kind == TEXT and count > 1 and distance <= 0.05 * profile.num_rows:
                return SeriesColumns((name,), count, profile.num_rows // count, 0, is_mixed=True)
        return None


def survey_tables(tables: Iterable[OpenTable], path: str) -> Survey:
    """Read all rows of all tables once and return their statistics."""
    survey = Survey()
    with survey.threads:
        for table in tables:
            survey.add(table)
    if not survey.num_rows:
        raise UserError(f"{parse_path(path)}: has no rows")
    return survey


CONTEXT, HORIZON = 96, 24
EPOCHS = 20
MAX_INPUTS = 60
"""Inputs up to which `data.inputs` lists them; above, `data.ignore` lists the other columns"""
MAX_MISSING = 0.5
"""Share of missing values from which on a column is no input"""
TARGETS = re.compile(r"^(target|label|y|soc|soh|ot|close|price|load|demand|power|pm2\.?5)$", re.I)
SHORT = 0.3
"""Length of the shortest series, as a share of the mean, below which short ones are dropped"""
MANY_GAPS = 5
"""Gaps up to which windows never cross them; where gaps are the rule, rows count as consecutive"""
INFINITE = [math.inf, -math.inf]
MODEL_REASONS = {"normalize": "forecast the difference from the last row"}
SETS = ("train", "val", "test")


class Proposal:
    """A config to begin with, and the reason for each setting that needs one."""

    def __init__(self, survey: Survey, path: str, settings: Mapping[str, Any]) -> None:
        self.survey, self.path = survey, path
        self.series = survey.find_series_columns()
        self.reasons: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        """Lines that the config has as comments, with the reason"""
        self.order = self._sort_times()
        self.roles: dict[str, str] = {}
        self.data: dict[str, Any] = {"path": path, **settings}
        if survey.has_sheets and "sheet" not in settings:
            self.data["sheet"] = "*"
            self.reasons["sheet"] = "every sheet is a series"
        self._choose_marks()
        self._choose_rows()
        self._choose_columns()
        self._choose_split()

    @property
    def config(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "model": {"kind": "lstm", "hidden": 64, "layers": 1, "normalize": "last"},
            "train": {"epochs": EPOCHS},
        }

    def _choose_marks(self) -> None:
        """Choose the values that mean "missing" (data.na), beside empty cells."""
        codes = {
            code.value for profile in self.survey.columns.values() for code in profile.find_codes()
        }
        marks = {mark for profile in self.survey.columns.values() for mark in profile.find_marks()}
        values = [int(code) if code.is_integer() else code for code in sorted(codes)] + sorted(
            marks
        )
        if any(profile.num_infinite for profile in self.survey.columns.values()):
            values += INFINITE
        if values:
            self.data["na"] = values
            self.reasons["na"] = "seem to mean missing"

    def _choose_rows(self) -> None:
        """Choose the columns of time and series id, and whether rows are sorted."""
        survey, series = self.survey, self.series
        if series is not None:
            names = series.names
            self.data["id"] = names[0] if len(names) == 1 else list(names)
            self.roles |= dict.fromkeys(names, "id")
            self.reasons["id"] = f"{series.num_series:,} series"
        if survey.time is None:
            return
        for name in survey.time.columns:
            self.roles[name] = "time"
        columns = survey.time.columns
        settings: dict[str, Any] = {"time": columns[0] if len(columns) == 1 else list(columns)}
        if survey.time.format is not None:
            settings["time_format"] = survey.time.format
        if self.why_no_time:
            self.left_out = {_format_line(*setting): "" for setting in settings.items()}
            self.left_out[next(iter(self.left_out))] = f"left out: {self.why_no_time}"
            return
        self.data |= settings
        if self.num_disordered:
            self.data["unsorted"] = "sort"
            rows = format_count(self.num_disordered, "row")
            self.reasons["unsorted"] = f"{rows} earlier than the row above"

    def _sort_times(self) -> SortedTimes:
        """Return the step and the gaps within each series, its rows sorted by time."""
        order, series = self.survey.order, self.series
        starts: Sequence[int] = order.file_starts if series is None else series.starts
        times = order.sort(starts) if starts else None
        return times or SortedTimes(order.step, order.gaps, order.repeated * (series is None))

    @property
    def num_disordered(self) -> int:
        """The number of rows whose time is not later than the row above in the same series."""
        order = self.survey.order
        return order.backward + order.repeated if self.series is None else self.series.disorder

    @property
    def why_no_time(self) -> str:
        """The reason why the config leaves out the column of times; "" where it has it."""
        order = self.survey.order
        if order.unreadable:
            return f"{format_count(order.unreadable, 'cell')} of it cannot be read as a time"
        if self.num_disordered and self.order.repeated:
            return f"{format_count(self.order.repeated, 'row')} with the time of another row"
        return ""

    def _choose_columns(self) -> None:
        columns = self.survey.columns
        inputs = [name for name, profile in columns.items() if self._is_input(profile)]
        if not inputs:
            return
        target = next((name for name in inputs if TARGETS.match(name)), inputs[-1])
        if len(inputs) <= MAX_INPUTS:
            self.data["inputs"] = inputs
        else:
            numeric = (NUMBER, BOOLEAN)
            used = {*inputs, *self.roles}
            left = [
                n for n, profile in columns.items() if n not in used and profile.kind in numeric
            ]
            self.data["ignore"] = left
        self.data["targets"] = [target]
        self.reasons["targets"] = "the column to predict; name another one"
        self.roles |= dict.fromkeys(inputs, "input") | {target: "target"}
        if any(columns[name].num_missing or columns[name].num_texts for name in inputs) or (
            "na" in self.data
        ):
            self.data["missing"] = "forward"
            self.reasons["missing"] = "repeat the last known value"

    def _is_input(self, column: ColumnProfile) -> bool:
        if column.kind not in (NUMBER, BOOLEAN) or column.name in self.roles:
            return False
        if column.is_constant or column.is_constant_in_training or column.is_counter:
            return False
        if column.name in self.survey.scalars or self.find_copied(column) is not None:
            return False
        if column.num_texts and not column.find_marks():
            return False
        return column.num_missing <= MAX_MISSING * column.num_rows

    def find_copied(self, column: ColumnProfile) -> str | None:
        """Return the name of an earlier column with the same values; None without one."""
        first = self._firsts.get(column.digest.digest()) if column.moments.count else None
        return first if first != column.name else None

    @cached_property
    def _firsts(self) -> dict[bytes, str]:
        """The first column with each content, by the content's hash."""
        firsts: dict[bytes, str] = {}
        for name, profile in self.survey.columns.items():
            if profile.moments.count:
                firsts.setdefault(profile.digest.digest(), name)
        return firsts

    def _choose_split(self) -> None:
        """Choose a context and a horizon that fit into the series, and the split."""
        survey, series = self.survey, self.series
        lengths = [file.num_rows for file in survey.files]
        shortest, count = min(lengths), len(lengths)
        if series is not None:
            shortest, count = series.shortest, series.num_series
        mean = survey.num_rows / count
        if shortest < SHORT * mean and shortest < 4 * (CONTEXT + HORIZON):
            self.data["short"] = "drop"
            self.reasons["short"] = f"the shortest series has {shortest:,} rows"
            shortest = int(SHORT * mean)
        # the shortest series still has several windows in each of its three sets
        self.data["context"] = max(min(CONTEXT, shortest // 5), 1)
        self.data["horizon"] = max(min(HORIZON, shortest // 40), 1)
        self.reasons["context"] = "rows that the model sees"
        self.reasons["horizon"] = "rows to forecast; 0 estimates the target at the last row"
        gaps, window = self.order.gaps, self.data["context"] + self.data["horizon"]
        if "time" in self.data and gaps > max(count, MANY_GAPS, survey.num_rows / (8 * window)):
            self.data["gap_tolerance"] = math.inf
            self.reasons["gap_tolerance"] = f"{gaps:,} steps are longer; rows count as consecutive"
        self.data["split"] = {"train": 0.7, "val": 0.1, "test": 0.2}
        path = parse_path(self.path)
        if path.is_dir() and all((path / name).is_dir() for name in SETS):
            self.data["split"] = {"folders": True}

    def to_toml(self, path: str | None = None) -> str:
        """Format the config as TOML, each choice with its reason; `path` replaces `data.path`."""
        reasons, left_out = self.reasons | MODEL_REASONS, self.left_out.items()
        lines = ["# Written by slipstream inspect: a config to begin with."]
        for section, settings in self.config.items():
            lines += ["", f"[{section}]"]
            for name, value in settings.items():
                if path is not None and (section, name) == ("data", "path"):
                    value = path
                reason = reasons.get(name, "")
                lines.append(_format_line(name, value) + (f"  # {reason}" if reason else ""))
                if (section, name) == ("data", "path"):
                    lines += [f"# {line}" + f"  # {why}" * bool(why) for line, why in left_out]
        return "\n".join(lines) + "\n"


def _format_line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(_format_line(key, item) for key, item in value.items())
        return f"{name} = {{ {inner} }}"
    if isinstance(value, list):
        return f"{name} = [{', '.join(_format_value(item) for item in value)}]"
    return f"{name} = {_format_value(value)}"


def _format_value(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def describe_series(series: SeriesColumns | None, survey: Survey) -> str:
    """Say how many series there are, and by which columns or files."""
    if series is not None:
        return f"{series.num_series:,} series, by {', '.join(series.names)}"
    count = len(survey.files)
    return "one series" if count == 1 else f"{count:,} series, one per file"


MAX_NAMED = 3


class Remark(NamedTuple):
    """A note or a problem that the user should know about."""

    column: str | None
    """None for a remark about files, or about several columns"""
    message: str
    kind: str = ""
    """The problem in a word: missing, gaps, constant ...; "" for a note without a setting"""
    values: tuple[str | int | float, ...] = ()
    """Values that seem to mean "missing\""""


def list_problems(proposal: Proposal, path: str) -> list[Remark]:
    """List the problems of files, then of the time, then of each column."""
    return [
        *_check_files(proposal, path),
        *_check_time(proposal),
        *(
            remark
            for column in proposal.survey.columns.values()
            for remark in _check(column, proposal)
        ),
    ]


def _check_files(proposal: Proposal, path: str) -> Iterator[Remark]:
    survey = proposal.survey
    for file in survey.files:
        yield from (Remark(None, f"{file.name}: {note}") for note in file.notes)
        missing = [name for name in survey.columns if name not in file.columns]
        if missing:
            more = f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED)
            listed = ", ".join(missing[:MAX_NAMED])
            yield Remark(
                None,
                f"{file.name}: lacks {listed}{more}, which other files have; files of one job have "
                "the same columns",
            )
    if len(survey.files) > 1:
        paths = {file: file.name for file in files.expand_path(parse_path(path))[1]}
        for alike in group_by_content(paths):
            first, *copies = (paths[file] for file in alike)
            names = ", ".join(copies)
            yield Remark(None, f"{names}: the same content as {first}; remove the copies")


def _check_time(proposal: Proposal) -> Iterator[Remark]:
    survey, series = proposal.survey, proposal.series
    order, source = proposal.order, survey.time
    if source is None:
        yield Remark(
            None, "no column of times was found; rows are taken in the order of the file", "no time"
        )
        return
    name = " and ".join(source.columns)
    where = "" if series is None else " within a series"
    left_out = "data.time is left out, and rows are taken in the order of the file"
    if survey.order.unreadable:
        count = format_count(survey.order.unreadable, "cell")
        message = f"{count} cannot be read as a time, so that {left_out}; correct them"
        yield Remark(name, message, "unreadable")
    elif proposal.num_disordered and order.repeated:
        rows = format_count(order.repeated, "row")
        yield Remark(
            name,
            f"{rows} with the time of another row{where}, so that {left_out}; remove duplicates, "
            "or name the column that tells series apart (data.id)",
            "repeated",
        )
    elif proposal.num_disordered:
        rows = format_count(proposal.num_disordered, "row")
        yield Remark(
            name,
            f'{rows} earlier than the row above{where}; sort them by time (data.unsorted = "sort")',
            "disorder",
        )
    if source.other_format is not None:
        yield Remark(
            name,
            f'day and month may be swapped: read as data.time_format = "{source.format}"; '
            f'"{source.other_format}" fits as well',
            "swapped",
            (source.other_format,),
        )
    if order.gaps:
        step = f"the usual step of {order.step:.6g}" + (" s" if source.is_date else "")
        count = format_count(order.gaps, "gap")
        yield Remark(name, f"{count}: more than 1.5 times {step}", "gaps")


def _check(column: ColumnProfile, proposal: Proposal) -> Iterator[Remark]:
    for kind, message, *values in _describe(column, proposal):
        yield Remark(column.name, message, kind, tuple(values))


def _describe(
    column: ColumnProfile, proposal: Proposal
) -> Iterator[tuple[str, str, *tuple[str | int | float, ...]]]:
    """Yield the kind of each problem, the message, and the values that seem to mean "missing"."""
    if column.kind == EMPTY:
        yield "empty", "holds no value"
    if column.kind == EMPTY or column.name in proposal.survey.scalars:  # a note says so
        return
    role = proposal.roles.get(column.name, "")
    if column.num_missing:
        share = format_number(100 * column.num_missing / column.num_rows, figures=2)
        yield "missing", f"{share} % of the values are missing (data.missing)"
    if column.kind == TEXT and not role and not column.is_constant:
        count = "many" if column.num_distinct is None else f"{column.num_distinct:,}"
        yield "text", f"text, {count} different values: not an input"
    if column.is_constant:
        yield "constant", "the same value in every row: not an input"
    elif column.is_constant_in_training and column.kind != TIME:
        message = "the same value in the first 70 % of the rows, which train: not an input"
        yield "constant", message
    if column.is_counter and role != "time":
        yield "counter", "counts the rows: not an input"
    copied = proposal.find_copied(column)
    if copied is not None and not column.is_constant:
        yield "copy", f'the same values as "{copied}": not an input'
    for code in column.find_codes():
        share = format_number(100 * code.share, figures=2)
        message = (
            f"{share} % of the values are {code.value:.6g}, all others {code.low:.6g} to "
            f"{code.high:.6g}; it seems to mean missing (data.na)"
        )
        yield "code", message, int(code.value) if code.value.is_integer() else code.value
    if column.num_infinite:
        count = format_count(column.num_infinite, "infinite value")
        yield "infinite", f"{count}, which no model can read (data.na)", *INFINITE
    if column.kind == NUMBER and column.num_texts and role != "time":
        texts = ", ".join(f'"{text}"' for text, _ in column.texts.most_common(MAX_NAMED))
        marks = column.find_marks()
        count = format_count(column.num_texts, "cell")
        are = "is no number" if column.num_texts == 1 else "are no numbers"
        fix = f"; if {'it means' if column.num_texts == 1 else 'they mean'} missing, set data.na"
        if not marks:
            fix = ""
        if any(map(looks_like_number, column.texts)):
            fix = ": write all numbers with one decimal mark and no separators between thousands"
        yield "no numbers", f"{count} {are} ({texts}){fix}", *marks


SPARK_WIDTH = 32
READING = ("encoding", "decimal", "skip_rows", "sheet", "variable")
"""Settings of `[data]` that say how files are read"""


@dataclass(frozen=True)
class Findings:
    """The result of inspecting files: statistics, problems, and a config to begin with."""

    path: str
    survey: Survey
    proposal: Proposal
    problems: list[Remark]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the courses of the columns, ready for JSON."""
        return {
            "path": self.path,
            "rows": self.survey.num_rows,
            "series": describe_series(self.proposal.series, self.survey),
            "time": None if self.survey.time is None else self._describe_time(),
            "files": [
                {
                    "name": file.name,
                    "format": file.format,
                    "bytes": file.num_bytes,
                    "rows": file.num_rows,
                    "columns": len(file.columns),
                    "notes": list(file.notes),
                }
                for file in self.survey.files
            ],
            "columns": [self._describe(profile) for profile in self.survey.columns.values()],
            "problems": [
                remark._asdict() | {"values": configs.to_json_values(remark.values)}
                for remark in self.problems
            ],
            "config": configs.to_json_values(self.proposal.config),
            "toml": self.proposal.to_toml(),
        }

    def _describe(self, column: ColumnProfile) -> dict[str, Any]:
        moments, source = column.moments, self.survey.time
        is_time = source is not None and source.is_date and column.name in source.columns
        kind = TIME if is_time and column.kind == TEXT else column.kind
        facts: dict[str, Any] = {
            "name": column.name,
            "type": kind,
            "unit": column.unit or find_unit(column.name),
            "role": self.proposal.roles.get(column.name, "ignored"),
            "missing": column.num_missing / max(column.num_rows, 1),
            "constant": column.is_constant,
        }
        if kind == TEXT:
            facts["distinct"] = column.num_distinct
        elif moments.count:
            facts |= {"low": moments.low, "high": moments.high}
            facts |= {"mean": moments.mean, "deviation": moments.deviation}
        if source is not None and source.columns == (column.name,):
            facts |= self._describe_time()
        if kind == NUMBER:
            facts["course"] = column.trace.draw(SPARK_WIDTH)
        return facts

    def _describe_time(self) -> dict[str, Any]:
        order, source = self.survey.order, self.survey.time
        assert source is not None
        ends: list[Any] = [order.low, order.high]
        if source.is_date and order.num_rows > order.unreadable:
            ends = [datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M:%S") for end in ends]
        return {
            "time_columns": list(source.columns),
            "time_format": source.format,
            "first": ends[0],
            "last": ends[1],
            "step": self.proposal.order.step,
            "gaps": self.proposal.order.gaps,
        }

    def list_courses(self) -> dict[str, Course]:
        """Return the course of every column of numbers, by name."""
        return {
            name: Course(
                profile.trace.stride,
                profile.trace.low[: profile.trace.num_bins],
                profile.trace.high[: profile.trace.num_bins],
                profile.trace.compute_means(),
            )
            for name, profile in self.survey.columns.items()
            if profile.kind == NUMBER
        }

    def format_config(self, file: Path) -> str:
        """Format the config for a file in which paths are relative to its folder."""
        path = Path(self.path)
        if not is_url(self.path) and not path.is_absolute() and path.exists():
            relative = os.path.relpath(path.resolve(), file.resolve().parent)
            return self.proposal.to_toml(Path(relative).as_posix())
        return self.proposal.to_toml()


def parse_options(overrides: Sequence[str]) -> tuple[ReadOptions, dict[str, Any]]:
    """Parse settings such as `data.decimal=,` into options for the reader; return both."""
    config = configs.load({}, overrides)
    for name in configs.list_differences(Config(), config):
        if name.removeprefix("data.") not in READING:
            known = ", ".join(f"data.{setting}" for setting in READING)
            raise UserError(f"{name} does not change how files are read; inspect takes {known}")
    values = config.data.model_dump(mode="json", include=set(READING))
    settings = {name: value for name, value in values.items() if value is not None}
    options = ReadOptions.from_data(config.data)
    return options if options.sheets else options._replace(sheets=EVERY_SHEET.sheets), settings


def inspect_path(path: str, overrides: Sequence[str] = ()) -> Findings:
    """Inspect a file, a folder or a pattern; `overrides` are settings of the reader."""
    options, settings = parse_options(overrides)
    survey = survey_tables(open_tables(path, options), path)
    proposal = Proposal(survey, path, settings)
    return Findings(path, survey, proposal, list_problems(proposal, path))
