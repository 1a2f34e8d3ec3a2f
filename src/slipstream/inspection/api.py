"""Looks at files and returns what was found, as plain data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream.config import Config
from slipstream.data.io.options import ReadOptions
from slipstream.errors import UserError
from slipstream.inspection.problems import Remark, list_problems
from slipstream.inspection.profiles import NUMBER, TEXT, TIME, ColumnProfile
from slipstream.inspection.proposal import Proposal, describe_series
from slipstream.inspection.reading import EVERY_SHEET, open_tables
from slipstream.inspection.survey import Survey, survey_tables
from slipstream.object_storage import is_url
from slipstream.reporting.formatting import find_unit
from slipstream.reporting.inspection import Course

SPARK_WIDTH = 32
READING = ("encoding", "decimal", "skip_rows", "sheet", "variable")
"""Settings of `[data]` that say how files are read"""


@dataclass(frozen=True)
class Findings:
    """What files hold, what is suspicious, and a config to begin with."""

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
            "columns": [self._describe(one) for one in self.survey.columns.values()],
            "problems": [
                one._asdict() | {"values": configs.to_json_values(one.values)}
                for one in self.problems
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
                one.trace.stride,
                one.trace.low[: one.trace.num_places],
                one.trace.high[: one.trace.num_places],
                one.trace.compute_means(),
            )
            for name, one in self.survey.columns.items()
            if one.kind == NUMBER
        }

    def format_config(self, file: Path) -> str:
        """Format the config for a file in which paths are relative to its folder."""
        path = Path(self.path)
        if not is_url(self.path) and not path.is_absolute() and path.exists():
            relative = os.path.relpath(path.resolve(), file.resolve().parent)
            return self.proposal.to_toml(Path(relative).as_posix())
        return self.proposal.to_toml()


def parse_options(overrides: Sequence[str]) -> tuple[ReadOptions, dict[str, Any]]:
    """Return how files are read by settings such as `data.decimal=,`, and those settings."""
    config = configs.load({}, overrides)
    for name in configs.list_differences(Config(), config):
        if name.removeprefix("data.") not in READING:
            known = ", ".join(f"data.{one}" for one in READING)
            raise UserError(f"{name} does not change how files are read; inspect takes {known}")
    values = config.data.model_dump(mode="json", include=set(READING))
    settings = {name: value for name, value in values.items() if value is not None}
    options = ReadOptions.from_data(config.data)
    return options if options.sheets else options._replace(sheets=EVERY_SHEET.sheets), settings


def inspect_path(path: str, overrides: Sequence[str] = ()) -> Findings:
    """Read a file, a folder or a pattern once, and look at it; `overrides` say how it is read."""
    options, settings = parse_options(overrides)
    survey = survey_tables(open_tables(path, options), path)
    proposal = Proposal(survey, path, settings)
    return Findings(path, survey, proposal, list_problems(proposal, path))
