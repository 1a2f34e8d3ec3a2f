"""Labels as class numbers: a column of integers or text, read as if it held numbers.

A class's number is its place among the names in order: integers by size, text by the alphabet.
Where there is no label, the number is UNKNOWN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.data import columns as typed
from slipstream.data.io.table import ColumnReader, DataTable
from slipstream.errors import UserError

Ints = npt.NDArray[np.int64]

LABEL = "label"
"""The column of a table of labels, and then the target's name"""
UNKNOWN = -1
NO_LABEL = [text for text in typed.NULLS if text.lower() != "none"]
"""Cells that hold no label; "none" may well be a class"""
WHOLE = r"^(?:\+?(\d+)|(-\d+))(?:\.0*)?$"
MOST_CLASSES = 1000
STRETCH = 1 << 20


def encode_labels(
    sources: Sequence[DataTable], name: str, setting: str, classes: tuple[str, ...] = ()
) -> tuple[list[DataTable], tuple[str, ...]]:
    """The sources with a column of labels as class numbers, and the classes' names; `classes` are
    those of a trained model, which are all there may be."""
    classes = classes or sort_classes(
        text for source in sources for text in _found(source, name, setting)
    )
    return [
        replace(source, reader=_Coded(source.reader, source, name, setting, classes))
        for source in sources
    ], classes


@dataclass(frozen=True)
class _Coded:
    """A source's columns, one of them as class numbers."""

    columns: ColumnReader
    source: DataTable
    name: str
    setting: str
    classes: tuple[str, ...]

    def kind(self, name: str) -> pa.DataType:
        return pa.float64() if name == self.name else self.columns.kind(name)

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        if name != self.name:
            return self.columns.read(name, begin, end)
        stretch = replace(self.source, first_row=begin, num_rows=end - begin)
        codes, texts = read_labels(stretch, name, self.setting)
        numbers = number_labels(codes, texts, self.classes, stretch, name)
        return pa.chunked_array([numbers.astype(np.float64)])


def _found(source: DataTable, name: str, setting: str) -> set[str]:
    """The labels of one source, read a stretch at a time."""
    found: set[str] = set()
    for begin in range(0, source.num_rows, STRETCH):
        stretch = source.slice_rows(begin, min(begin + STRETCH, source.num_rows))
        found |= set(read_labels(stretch, name, setting)[1])
        if len(found) > MOST_CLASSES:
            raise UserError(
                f'{source.name}: column "{name}" ({setting}) holds more than {MOST_CLASSES:,} '
                'different labels; is it a number to predict (data.task = "regress")?'
            )
    return found


def read_labels(source: DataTable, name: str, setting: str) -> tuple[Ints, list[str]]:
    """A column of labels as codes, UNKNOWN where there is none, and the text of each code."""
    values = typed.read_column(source, name, setting)
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        text = values.cast(pa.string())
    elif pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        text = pa.chunked_array([_whole(source, name, setting, values)])
    elif typed.is_text(kind):
        text = _cleaned(values)
    else:
        raise UserError(
            f'{source.name}: column "{name}" ({setting}) holds {kind}; labels are integers or text'
        )
    encoded = text.combine_chunks().dictionary_encode()
    codes = encoded.indices.fill_null(UNKNOWN).to_numpy(zero_copy_only=False)
    return np.asarray(codes, dtype=np.int64), encoded.dictionary.to_pylist()


def _whole(source: DataTable, name: str, setting: str, values: pa.ChunkedArray) -> pa.Array:
    """Numbers without a fraction as text, all digits; what is not a number is no label."""
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
                f"{source.locate_cell(row, name)}: is {number:g}; labels ({setting}) are integers "
                "or "
                'text, numbers with a fraction are for data.task = "regress"'
            )
    return pa.array(texts, pa.string()).take(encoded.indices)


def _cleaned(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Trimmed text, null where there is no label; 1, +1 and 1.0 are one label."""
    text = pc.utf8_trim_whitespace(values.cast(pa.string()))
    absent = pc.is_in(text, value_set=pa.array(NO_LABEL))
    text = pc.if_else(absent, pa.scalar(None, pa.string()), text)
    return pc.replace_substring_regex(text, pattern=WHOLE, replacement=r"\1\2")


def sort_classes(texts: Iterable[str]) -> tuple[str, ...]:
    """The classes' names: integers by size, text by the alphabet."""
    found = set(texts)
    try:
        return tuple(sorted(found, key=lambda text: (int(text), text)))
    except ValueError:
        return tuple(sorted(found))


def number_labels(
    codes: Ints, texts: list[str], classes: tuple[str, ...], source: DataTable, name: str
) -> Ints:
    """Class numbers from codes; refuses a label that is no class."""
    place = {text: number for number, text in enumerate(classes)}
    for code, text in enumerate(texts):
        if text not in place:
            row = int(np.flatnonzero(codes == code)[0])
            listed = ", ".join(classes[:20])
            raise UserError(
                f'{source.locate_cell(row, name)}: "{text}" is no class of the model, which knows '
                f"{listed}; correct it, or leave it empty"
            )
    numbers = np.array([*(place[text] for text in texts), UNKNOWN], dtype=np.int64)
    return numbers[codes]


def refuse_too_few(classes: tuple[str, ...], what: str) -> None:
    if len(classes) < 2:
        held = f'one label, "{classes[0]}"' if classes else "no label"
        raise UserError(f"{what} holds {held}; to classify, there must be two or more")
