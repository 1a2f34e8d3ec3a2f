"""A config to begin with, from what the rows tell; it trains as it is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tomli_w

from slipstream.inspection.profiles import BOOLEAN, NUMBER, ColumnProfile
from slipstream.inspection.survey import SeriesColumns, Survey
from slipstream.inspection.times import SortedTimes
from slipstream.object_storage import parse_path
from slipstream.text import format_count

CONTEXT, HORIZON = 96, 24
EPOCHS = 20
MOST_INPUTS = 60
"""Inputs that are listed by name; of more, those that are left out are listed"""
MOST_MISSING = 0.5
"""Share of missing values from which on a column is no input"""
TARGETS = re.compile(r"^(target|label|y|soc|soh|ot|close|price|load|demand|power|pm2\.?5)$", re.I)
SHORT = 0.3
"""Length of the shortest series, as a share of the mean, below which short ones are dropped"""
MANY_GAPS = 5
INFINITE = [math.inf, -math.inf]
MODEL_REASONS = {"normalize": "forecast the difference from the last row"}
SETS = ("train", "val", "test")


class Proposal:
    """Settings with the reason for each that needs one."""

    def __init__(self, survey: Survey, path: str, settings: Mapping[str, Any]) -> None:
        self.survey, self.path = survey, path
        self.series = survey.find_series_columns()
        self.reasons: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        """Lines of the config that stand there as comments, by the setting, with the reason"""
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
        """Choose what means "missing", beside empty cells."""
        codes = {code.value for one in self.survey.columns.values() for code in one.find_codes()}
        marks = {mark for one in self.survey.columns.values() for mark in one.find_marks()}
        values = [int(one) if one.is_integer() else one for one in sorted(codes)] + sorted(marks)
        if any(one.num_infinite for one in self.survey.columns.values()):
            values += INFINITE
        if values:
            self.data["na"] = values
            self.reasons["na"] = "seem to mean missing"

    def _choose_rows(self) -> None:
        """Choose how rows are ordered and told apart."""
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
            self.left_out = {_format_line(*one): "" for one in settings.items()}
            self.left_out[next(iter(self.left_out))] = f"left out: {self.why_no_time}"
            return
        self.data |= settings
        if self.num_disordered:
            self.data["unsorted"] = "sort"
            rows = format_count(self.num_disordered, "row")
            self.reasons["unsorted"] = f"{rows} earlier than the row above"

    def _sort_times(self) -> SortedTimes:
        """Return the step and the gaps of the time, within each series and in its order."""
        order, series = self.survey.order, self.series
        starts: Sequence[int] = order.file_starts if series is None else series.starts
        times = order.sort(starts) if starts else None
        return times or SortedTimes(order.step, order.gaps, order.repeated * (series is None))

    @property
    def num_disordered(self) -> int:
        """Rows whose time is not after that of the row above, within a series."""
        order = self.survey.order
        return order.backward + order.repeated if self.series is None else self.series.disorder

    @property
    def why_no_time(self) -> str:
        """Why the config leaves the time out, although there is one; "" where it does not."""
        order = self.survey.order
        if order.unreadable:
            return f"{format_count(order.unreadable, 'cell')} of it cannot be read as a time"
        if self.num_disordered and self.order.repeated:
            return f"{format_count(self.order.repeated, 'row')} with the time of another row"
        return ""

    def _choose_columns(self) -> None:
        columns = self.survey.columns
        inputs = [name for name, one in columns.items() if self._is_input(one)]
        if not inputs:
            return
        target = next((name for name in inputs if TARGETS.match(name)), inputs[-1])
        if len(inputs) <= MOST_INPUTS:
            self.data["inputs"] = inputs
        else:
            numeric = (NUMBER, BOOLEAN)
            used = {*inputs, *self.roles}
            left = [n for n, one in columns.items() if n not in used and one.kind in numeric]
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
        return column.num_missing <= MOST_MISSING * column.num_rows

    def find_copied(self, column: ColumnProfile) -> str | None:
        """The name of an earlier column with the same values, if there is one."""
        first = self._firsts.get(column.digest.digest()) if column.moments.count else None
        return first if first != column.name else None

    @cached_property
    def _firsts(self) -> dict[bytes, str]:
        """The first column of each content."""
        firsts: dict[bytes, str] = {}
        for name, one in self.survey.columns.items():
            if one.moments.count:
                firsts.setdefault(one.digest.digest(), name)
        return firsts

    def _choose_split(self) -> None:
        """Choose windows that fit into the series, and the sets."""
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
        """Format the config as TOML, each choice with its reason; `path` replaces that of the
        data."""
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
                    lines += [f"# {one}" + f"  # {why}" * bool(why) for one, why in left_out]
        return "\n".join(lines) + "\n"


def _format_line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(_format_line(key, one) for key, one in value.items())
        return f"{name} = {{ {inner} }}"
    if isinstance(value, list):
        return f"{name} = [{', '.join(_format_value(one) for one in value)}]"
    return f"{name} = {_format_value(value)}"


def _format_value(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def describe_series(series: SeriesColumns | None, survey: Survey) -> str:
    """Say how many series there are, and what tells them apart."""
    if series is not None:
        return f"{series.num_series:,} series, by {', '.join(series.names)}"
    count = len(survey.files)
    return "one series" if count == 1 else f"{count:,} series, one per file"
