"""Labels as class numbers: a column of integers or text, read as if it held numbers.

A class's number is its place among the names in order: integers by size, text by the alphabet.
Where there is no label, the number is UNKNOWN.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.data.io.columns import is_text, read_column
from slipstream.data.io.layout import NULLS
from slipstream.data.io.table import DataTable
from slipstream.data.series import Ints
from slipstream.errors import UserError

UNKNOWN = -1
NO_LABEL = [text for text in NULLS if text.lower() != "none"]
"""Cells that hold no label; "none" may well be a class"""
WHOLE = r"^(?:\+?(\d+)|(-\d+))(?:\.0*)?$"
MOST_CLASSES = 1000
SCAN_ROWS = 1 << 20


def encode_labels(
    tables: Sequence[DataTable], name: str, setting: str, classes: tuple[str, ...] = ()
) -> tuple[list[DataTable], tuple[str, ...]]:
    """Return the tables with a column of labels as class numbers, and the classes' names.

    `classes` are those of a trained model; labels outside of them are then refused.
    """
    classes = classes or sort_classes(
        text for table in tables for text in _list_labels(table, name, setting)
    )
    readers = [_ClassReader(table, name, setting, classes) for table in tables]
    return [replace(reader.table, reader=reader) for reader in readers], classes


@dataclass(frozen=True)
class _ClassReader:
    """Reads a table's columns, one of them as class numbers."""

    table: DataTable
    name: str
    setting: str
    classes: tuple[str, ...]

    def get_type(self, name: str) -> pa.DataType:
        return pa.float64() if name == self.name else self.table.reader.get_type(name)

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        if name != self.name:
            return self.table.reader.read(name, begin, end)
        rows = replace(self.table, first_row=begin, num_rows=end - begin)
        codes, texts = read_labels(rows, name, self.setting)
        numbers = number_labels(codes, texts, self.classes, rows, name)
        return pa.chunked_array([numbers.astype(np.float64)])


def _list_labels(table: DataTable, name: str, setting: str) -> set[str]:
    """List the labels of one table, read a part at a time."""
    labels: set[str] = set()
    for begin in range(0, table.num_rows, SCAN_ROWS):
        rows = table.slice_rows(begin, min(begin + SCAN_ROWS, table.num_rows))
        labels |= set(read_labels(rows, name, setting)[1])
        if len(labels) > MOST_CLASSES:
            raise UserError(
                f'{table.name}: column "{name}" ({setting}) holds more than {MOST_CLASSES:,} '
                'different labels; is it a number to predict (data.task = "regress")?'
            )
    return labels


def read_labels(table: DataTable, name: str, setting: str) -> tuple[Ints, list[str]]:
    """Read a column of labels as codes, UNKNOWN where there is none, and the text of each code."""
    values = read_column(table, name, setting)
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        text = values.cast(pa.string())
    elif pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        text = pa.chunked_array([_format_integers(table, name, values, setting)])
    elif is_text(kind):
        text = _clean_labels(values)
    else:
        raise UserError(
            f'{table.name}: column "{name}" ({setting}) holds {kind}; labels are integers or text'
        )
    encoded = text.combine_chunks().dictionary_encode()
    codes = encoded.indices.fill_null(UNKNOWN).to_numpy(zero_copy_only=False)
    return np.asarray(codes, dtype=np.int64), encoded.dictionary.to_pylist()


def _format_integers(table: DataTable, name: str, values: Any, setting: str) -> pa.Array:
    """Return integers as text with all digits, null where there is no number."""
    encoded = values.combine_chunks().dictionary_encode()
    texts: list[str | None] = []
    for code, number in enumerate(encoded.dictionary.to_pylist()):
        if number is None or math.isnan(number):
            texts.append(None)
        elif math.isfinite(number) and number == int(number):
            texts.append(str(int(number)))
        else:
            row = pc.index(encoded.indices, code).as_py()
            raise UserError(
                f"{table.locate_cell(row, name)}: is {number:g}; labels ({setting}) are integers "
                'or text, numbers with a fraction are for data.task = "regress"'
            )
    return pa.array(texts, pa.string()).take(encoded.indices)


def _clean_labels(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Trim text, null where there is no label; 1, +1 and 1.0 are one label."""
    text = pc.utf8_trim_whitespace(values.cast(pa.string()))
    absent = pc.is_in(text, value_set=pa.array(NO_LABEL))
    text = pc.if_else(absent, pa.scalar(None, pa.string()), text)
    return pc.replace_substring_regex(text, pattern=WHOLE, replacement=r"\1\2")


def sort_classes(texts: Iterable[str]) -> tuple[str, ...]:
    """Sort the classes' names: integers by size, text by the alphabet."""
    names = set(texts)
    try:
        return tuple(sorted(names, key=lambda text: (int(text), text)))
    except ValueError:
        return tuple(sorted(names))


def number_labels(
    codes: Ints, texts: list[str], classes: tuple[str, ...], table: DataTable, name: str
) -> Ints:
    """Turn codes into class numbers; a label that is no class is refused."""
    place = {text: number for number, text in enumerate(classes)}
    for code, text in enumerate(texts):
        if text not in place:
            row = int(np.flatnonzero(codes == code)[0])
            raise UserError(
                f'{table.locate_cell(row, name)}: "{text}" is not a class of the model, which has '
                f"{', '.join(classes[:20])}; correct it, or leave it empty"
            )
    return np.array([*(place[text] for text in texts), UNKNOWN], dtype=np.int64)[codes]


def refuse_too_few(classes: tuple[str, ...], what: str) -> None:
    if len(classes) < 2:
        labels = f'one label, "{classes[0]}"' if classes else "no label"
        raise UserError(f"{what} holds {labels}; to classify, there must be two or more")
