"""The files of the archives of time series classification: `.ts` and `.arff`, a case per row.

A case is a row of the table: `value` has the list of its values, or `dim_1`, `dim_2` ... where a
case has several series, and `label` its class; `target` is a number to predict instead. Lists may
differ in length. `data/melting` makes such a table long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

from slipstream.base.errors import UserError
from slipstream.base.text import format_count
from slipstream.config import VALUE_COLUMN
from slipstream.data.formats.reader import InputFile, ReadOptions, TableReader
from slipstream.data.table import DataTable, summarize_error, wrap_table

DIMENSION = "dim_"
LABEL, TARGET = "label", "target"
TS, ARFF = "series archive (.ts)", "series archive (.arff)"
NULLS = ["", "?", "NaN", "nan", "NAN", "NA"]
RELATIONAL = re.compile(r"""\s*(['"])(?P<series>.*)\1\s*,(?P<label>.*)""")


class TsReader(TableReader):
    """Reads `.ts` files: tags that begin with @, then a case per line."""

    def read(self, file: InputFile, options: ReadOptions) -> list[DataTable]:
        lines = _read_lines(file, options)
        tags, begin = _read_tags(file, lines)
        if _is_true(tags.get("timestamps")):
            raise UserError(
                f"{file.name}: has pairs of a time and a value (@timeStamps true), which are not "
                "read; write the values alone, or save it as a long CSV"
            )
        label = LABEL if _is_true(tags.get("classlabel")) else None
        label = TARGET if _is_true(tags.get("targetlabel")) else label
        cases, dimensions = _split_cases(file, lines, begin, has_label=label is not None)
        columns = _parse_dimensions(file, cases.lines, dimensions)
        if label is not None:
            columns[label] = _read_labels(file, cases, label)
        return [wrap_table(pa.table(columns), file.name, path=file.path, format=TS)]


class ArffReader(TableReader):
    """Reads `.arff` files: numeric attributes side by side, or one attribute of several series."""

    def read(self, file: InputFile, options: ReadOptions) -> list[DataTable]:
        lines = _read_lines(file, options)
        attributes, begin = _read_attributes(file, lines)
        rows = [
            (number, line)
            for number, line in enumerate(lines[begin:], start=begin + 1)
            if line.strip() and not line.startswith("%")
        ]
        if not rows:
            raise UserError(f"{file.name}: has no cases below @data")
        if rows[0][1].lstrip().startswith("{"):
            raise UserError(
                f"{file.name}, line {rows[0][0]}: has a sparse case, in braces, which is not read; "
                "save it with all values"
            )
        if any(kind == "relational" for kind in attributes.values()):
            columns = _read_relational(file, rows)
        else:
            columns = _read_attribute_values(file, rows, attributes)
        return [wrap_table(pa.table(columns), file.name, path=file.path, format=ARFF)]


class _Cases(NamedTuple):
    lines: list[int]
    """The line of each case"""
    labels: list[str]


def _read_lines(file: InputFile, options: ReadOptions) -> list[str]:
    encoding = options.encoding or "utf-8-sig"
    try:
        text = file.local_path.read_text(encoding=encoding)
    except UnicodeDecodeError:
        raise UserError(
            f'{file.name}: is not UTF-8 text; set data.encoding, as in "cp1252"'
        ) from None
    return text.split("\n")


def _read_tags(file: InputFile, lines: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return the tags of a file and the number of lines up to @data."""
    tags: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text[0] in "#%":
            continue
        if not text.startswith("@"):
            raise UserError(
                f'{file.name}, line {number}: reads "{text[:60]}", but @data is expected before '
                "the first case"
            )
        name, _, value = text[1:].partition(" ")
        if name.lower() == "data":
            return tags, number
        tags[name.lower()] = value.strip()
    raise UserError(f"{file.name}: has no line @data, below which cases stand")


def _is_true(value: str | None) -> bool:
    return value is not None and value.lower().split(" ")[0] == "true"


def _split_cases(
    file: InputFile, lines: Sequence[str], begin: int, *, has_label: bool
) -> tuple[_Cases, list[list[str]]]:
    """Return the labels, and the text of the series of each dimension, case after case."""
    cases = _Cases([], [])
    dimensions: list[list[str]] = []
    for number, line in enumerate(lines[begin:], start=begin + 1):
        text = line.strip()
        if not text or text[0] in "#%":
            continue
        series = text.split(":")
        cases.lines.append(number)
        if has_label:
            cases.labels.append(series.pop().strip())
        if not dimensions:
            dimensions = [[] for _ in series]
        if len(series) != len(dimensions):
            raise UserError(
                f"{file.name}, line {number}: has {format_count(len(series), 'dimension')}, but "
                f"the first case has {len(dimensions)}"
            )
        for dimension, values in zip(dimensions, series, strict=True):
            dimension.append(values)
    if not dimensions:
        raise UserError(f"{file.name}: has no cases below @data")
    return cases, dimensions


def _parse_dimensions(
    file: InputFile, lines: Sequence[int], dimensions: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the values of each dimension as a column of lists."""
    names = [f"{DIMENSION}{i}" for i in range(1, len(dimensions) + 1)]
    names = names if len(names) > 1 else [VALUE_COLUMN]
    return {
        name: _parse_lists(file, lines, texts)
        for name, texts in zip(names, dimensions, strict=True)
    }


def _parse_lists(file: InputFile, lines: Sequence[int], texts: Sequence[str]) -> pa.Array:
    """Parse numbers between commas, all cases at a time."""
    counts = [text.count(",") + 1 if text.strip() else 0 for text in texts]
    filled = [text for text, count in zip(texts, counts, strict=True) if count]
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    if not filled:
        return pa.array([[] for _ in texts], pa.large_list(pa.float64()))
    values = _parse_numbers(",".join(filled).replace(" ", ""))
    if values is None:
        for line, text in zip(lines, texts, strict=True):
            wrong = next((cell for cell in text.split(",") if not _is_number(cell)), None)
            if text.strip() and wrong is not None:
                raise UserError(
                    f'{file.name}, line {line}: "{wrong.strip()[:40]}" is not a number; correct '
                    'it, or write "?" where a value is missing'
                )
    assert values is not None
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _parse_numbers(text: str) -> pa.Array | None:
    """Parse numbers between commas, null where one is missing; None if a cell is no number."""
    cells = text.replace(",", "\n").encode()
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(cells),
            pa.csv.ReadOptions(column_names=["value"]),
            pa.csv.ParseOptions(ignore_empty_lines=False, delimiter="\t"),
            pa.csv.ConvertOptions(column_types={"value": pa.float64()}, null_values=NULLS),
        )
    except pa.ArrowException:
        return None
    values = table.column(0).combine_chunks()
    return values if len(values) == cells.count(b"\n") + 1 else _append_null(values)


def _append_null(values: pa.Array) -> pa.Array:
    """Return the values with the empty cell at the end, which a line break alone stands for."""
    return pa.concat_arrays([values, pa.nulls(1, pa.float64())])


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell.strip() in NULLS
    return True


def _read_labels(file: InputFile, cases: _Cases, label: str) -> pa.Array:
    if label == LABEL:
        texts = pa.array(cases.labels)
        return pa.compute.if_else(pa.compute.equal(texts, "?"), pa.scalar(None, pa.string()), texts)
    numbers = _parse_numbers(",".join(cases.labels))
    if numbers is None:
        wrong = next(i for i, text in enumerate(cases.labels) if not _is_number(text))
        raise UserError(
            f'{file.name}, line {cases.lines[wrong]}: the target "{cases.labels[wrong][:40]}" is '
            "not a number (@targetLabel true)"
        )
    return numbers


def _read_attributes(file: InputFile, lines: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return the kind of each attribute, numeric, nominal or relational, and the number of lines up
    to @data."""
    attributes: dict[str, str] = {}
    is_inside = False
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        word = text.lower().split(None, 1)[0] if text else ""
        if word == "@data":
            if not attributes:
                raise UserError(f"{file.name}: has no @attribute above @data")
            return attributes, number
        if word == "@end":
            is_inside = False
        elif word == "@attribute" and not is_inside:
            match = re.match(r"""@attribute\s+('[^']*'|"[^"]*"|\S+)\s+(.+)""", text, re.IGNORECASE)
            if match is None:
                raise UserError(f'{file.name}, line {number}: "{text[:60]}" is no attribute')
            name, kind = match[1].strip("'\""), match[2].strip().lower()
            kind = kind.split()[0] if not kind.startswith("{") else "nominal"
            kind = "numeric" if kind in ("numeric", "real", "integer") else kind
            attributes[name] = kind
            is_inside = kind == "relational"
    raise UserError(f"{file.name}: has no line @data, below which cases stand")


def _read_attribute_values(
    file: InputFile, rows: Sequence[tuple[int, str]], attributes: dict[str, str]
) -> dict[str, Any]:
    """Return the numeric attributes as one list per case, the last other one as its label."""
    body = "\n".join(line.rstrip("\r") for _, line in rows).encode()
    is_value = {name: kind == "numeric" for name, kind in attributes.items()}
    kinds = {name: pa.float64() if is_value[name] else pa.string() for name in attributes}
    quote = "'" if b"'" in body else '"'
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(body),
            pa.csv.ReadOptions(column_names=list(attributes)),
            pa.csv.ParseOptions(quote_char=quote),
            pa.csv.ConvertOptions(column_types=kinds, null_values=NULLS, strings_can_be_null=True),
        )
    except pa.ArrowException as error:
        raise UserError(f"{file.name}: cannot be read as ARFF: {summarize_error(error)}") from None
    names = [name for name in attributes if is_value[name]]
    others = [name for name in attributes if not is_value[name]]
    if not names:
        raise UserError(f"{file.name}: has no numeric attribute")
    matrix = np.stack([table.column(name).to_numpy() for name in names], axis=1)
    offsets = np.arange(len(matrix) + 1, dtype=np.int64) * len(names)
    columns: dict[str, Any] = {
        VALUE_COLUMN: pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(matrix.ravel()))
    }
    for name in others:
        columns[LABEL if name == others[-1] else name] = table.column(name)
    return columns


def _read_relational(file: InputFile, rows: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Return cases of several series, which stand in quotes with \\n between them."""
    cases = _Cases([], [])
    dimensions: list[list[str]] = []
    for number, line in rows:
        match = RELATIONAL.match(line)
        if match is None:
            raise UserError(
                f'{file.name}, line {number}: reads "{line[:60]}", but series in quotes and a '
                "label are expected"
            )
        series = re.split(r"\\n|\n", match["series"])
        dimensions = dimensions or [[] for _ in series]
        if len(series) != len(dimensions):
            raise UserError(
                f"{file.name}, line {number}: has {format_count(len(series), 'dimension')}, but "
                f"the first case has {len(dimensions)}"
            )
        cases.lines.append(number)
        cases.labels.append(match["label"].strip().strip("'\""))
        for dimension, values in zip(dimensions, series, strict=True):
            dimension.append(values)
    columns = _parse_dimensions(file, cases.lines, dimensions)
    return columns | {LABEL: _read_labels(file, cases, LABEL)}
