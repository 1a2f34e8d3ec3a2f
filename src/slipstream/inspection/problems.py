"""What is suspicious about files and columns, in words, each with the setting that helps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slipstream.checksums import group_by_content
from slipstream.data.io import files
from slipstream.inspection.profiles import (
    EMPTY,
    NUMBER,
    TEXT,
    TIME,
    ColumnProfile,
    looks_like_number,
)
from slipstream.inspection.proposal import INFINITE, Proposal
from slipstream.object_storage import parse_path
from slipstream.text import format_count, format_number

MOST_NAMED = 3


class Remark(NamedTuple):
    """Something that the user should know."""

    column: str | None
    """None where it is about files, or about several columns"""
    message: str
    kind: str = ""
    """What it is, in a word: missing, gaps, constant ...; "" for a note that no setting answers"""
    values: tuple[str | int | float, ...] = ()
    """Values that seem to mean "missing\""""


def list_problems(proposal: Proposal, path: str) -> list[Remark]:
    """List what is suspicious, files first."""
    return [
        *_check_files(proposal, path),
        *_check_time(proposal),
        *(one for column in proposal.survey.columns.values() for one in _check(column, proposal)),
    ]


def _check_files(proposal: Proposal, path: str) -> Iterator[Remark]:
    survey = proposal.survey
    for file in survey.files:
        yield from (Remark(None, f"{file.name}: {note}") for note in file.notes)
        missing = [name for name in survey.columns if name not in file.columns]
        if missing:
            more = f" and {len(missing) - MOST_NAMED} more" * (len(missing) > MOST_NAMED)
            listed = ", ".join(missing[:MOST_NAMED])
            yield Remark(
                None,
                f"{file.name}: lacks {listed}{more}, which other files have; files of one job have "
                "the same columns",
            )
    if len(survey.files) > 1:
        paths = {file: file.name for file in files.expand_path(parse_path(path))[1]}
        for alike in group_by_content(paths):
            first, *others = (paths[file] for file in alike)
            names = ", ".join(others)
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
        what = "the same value in the first 70 % of the rows, which train: not an input"
        yield "constant", what
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
        texts = ", ".join(f'"{text}"' for text, _ in column.texts.most_common(MOST_NAMED))
        marks = column.find_marks()
        count = format_count(column.num_texts, "cell")
        are = "is no number" if column.num_texts == 1 else "are no numbers"
        fix = f"; if {'it means' if column.num_texts == 1 else 'they mean'} missing, set data.na"
        if not marks:
            fix = ""
        if any(map(looks_like_number, column.texts)):
            fix = ": write all numbers with one decimal mark and no separators between thousands"
        yield "no numbers", f"{count} {are} ({texts}){fix}", *marks
