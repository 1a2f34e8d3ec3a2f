"""Columns as numbers, times or codes of text.

A CSV file comes as text. A column's type follows from all of its values, so that it never changes
half-way down. Errors name the file, the line and the column.
"""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.data.io import decimals, times
from slipstream.data.io.layout import NULLS
from slipstream.data.io.options import MIXED
from slipstream.data.io.table import DataTable, MemoryReader, release_memory
from slipstream.errors import UserError
from slipstream.text import find_nearest, format_count

LARGEST = 1e30
"""Beyond it, squares leave the range of float32."""
PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
FIRST_SECOND, PAST_SECOND = -62_135_596_800, 253_402_300_800
"""The years 1 to 9999, in seconds from 1970 on"""
HEAD_ROWS = 1000


def parse_text(
    table: DataTable, *, keep_text: Collection[str | None], na: Collection[str] = ()
) -> None:
    """Replace the text of a CSV table by float64, in place, in columns that hold only numbers.

    `keep_text` names columns that are compared as text, where 007 is not 7, or read as times. `na`
    are texts that mean "missing", beside the usual ones.
    Text and numbers of all columns are never in memory together.
    """
    reader = table.reader
    if not isinstance(reader, MemoryReader) or not all(file.delimiter for file in table.files):
        return
    for name in table.column_names:
        values = reader.columns[name]
        if name in keep_text or name == table.file_column:
            continue
        if _to_numbers(table, _drop_texts(values.slice(0, HEAD_ROWS), na)) is None:
            continue
        if (numbers := _to_numbers(table, _drop_texts(values, na))) is not None:
            filled = numbers.fill_null(np.nan).combine_chunks()
            reader.columns[name] = pa.chunked_array([filled])
    release_memory()


def require_column(table: DataTable, name: str, setting: str) -> None:
    """Refuse a column that is missing, and suggest the name that may have been meant."""
    if name not in table.column_set:
        nearest = find_nearest(name, table.column_names)
        known = f"it has {', '.join(table.column_names[:20])}"
        hint = f'did you mean "{nearest}"?' if nearest else known
        raise UserError(f'{table.name}: has no column "{name}" ({setting}); {hint}')


def read_column(table: DataTable, name: str, setting: str) -> pa.ChunkedArray:
    """Read a column with its own type; categories become their values, durations seconds."""
    require_column(table, name, setting)
    values = table.read_column(name)
    if pa.types.is_dictionary(values.type):
        try:
            values = values.cast(values.type.value_type)
        except pa.ArrowException:
            raise UserError(
                f'{table.name}: column "{name}" ({setting}) holds {values.type}; convert it to '
                "numbers or text"
            ) from None
    if pa.types.is_duration(values.type):
        per_second = PER_SECOND[values.type.unit]
        values = pc.divide(values.cast(pa.int64()).cast(pa.float64(), safe=False), per_second)
    if is_text(values.type) and table.delimiter is None:  # a CSV's text was checked when read
        try:
            values.validate(full=True)
        except pa.ArrowInvalid as error:
            raise UserError(f'{table.name}: column "{name}" ({setting}): {error}') from None
    return values


def read_numbers(table: DataTable, name: str, setting: str) -> npt.NDArray[np.float64]:
    """Read a column as float64, NaN where a value is missing; text and infinities are refused."""
    values = read_column(table, name, setting)
    if is_text(values.type):
        values = _parse_numbers(table, name, values)
    elif not _is_numeric(values.type):
        what = f"holds {values.type}, not numbers"
        raise UserError(f'{table.name}: column "{name}" ({setting}) {what}')
    result = np.asarray(values.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    if values.type != pa.float64() or table.row_groups:
        del values
        release_memory()
    wild = np.flatnonzero(np.abs(result) > LARGEST)
    if len(wild):
        value = "infinite" if np.isinf(result[wild[0]]) else result[wild[0]]
        raise UserError(
            f"{table.locate_cell(int(wild[0]), name)}: is {value} "
            f"({format_count(len(wild), 'such value')}); correct it, or leave it empty and set "
            "data.missing"
        )
    return result


def is_numeric(table: DataTable, name: str) -> bool:
    """Return True for numbers, and for text of which half or more reads as numbers."""
    kind = table.reader.get_type(name)
    if not (is_text(kind) or pa.types.is_dictionary(kind)):
        return _is_numeric(kind)
    values = read_column(table, name, "data.inputs")
    if not is_text(values.type):
        return _is_numeric(values.type)
    if _cast(values, pa.float64()) is not None:
        return True
    text = clean_text(values)
    known = len(text) - text.null_count
    alike = pc.match_substring_regex(text, decimals.LOOKS)
    return bool(known == 0 or 2 * pc.sum(alike).as_py() >= known)


def read_codes(
    table: DataTable, name: str, setting: str
) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Read a column as codes and the text of each, numbered as they first appear."""
    values = read_column(table, name, setting)
    kind = values.type
    dated = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    if not (is_text(kind) or _is_numeric(kind) or dated):
        raise UserError(
            f'{table.name}: column "{name}" ({setting}) holds {kind}; it should be text, '
            "numbers, true or false, or times: convert the column"
        )
    missing = pc.is_null(values, nan_is_null=True)
    if pc.any(missing).as_py():
        row = pc.index(missing, True).as_py()
        raise UserError(f"{table.locate_cell(row, name)}: is empty ({setting})")
    if pa.types.is_floating(kind):
        encoded = values.combine_chunks().dictionary_encode()
        floats = encoded.dictionary.cast(pa.float64()).to_pylist()
        plain = encoded.dictionary.cast(pa.string()).to_pylist()
        # whole numbers with all of their digits
        texts = [str(int(x)) if x.is_integer() else s for x, s in zip(floats, plain, strict=True)]
    else:
        encoded = values.cast(pa.string()).combine_chunks().dictionary_encode()
        texts = encoded.dictionary.to_pylist()
    numbers: dict[str, int] = {}
    codes = [numbers.setdefault(text, len(numbers)) for text in texts]  # -0 and 0 are one
    return np.array(codes, dtype=np.int64)[encoded.indices.to_numpy()], list(numbers)


def read_times(
    table: DataTable, name: str, time_format: str | None, setting: str = "data.time"
) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Read times: microseconds (int64) for dates and timestamps, float64 for plain numbers, and
    for times since a start (25:19:08) in seconds."""
    values = read_column(table, name, setting)
    kind = values.type
    if is_text(kind):
        if time_format is None and is_numeric(table, name):
            return _read_number_times(table, name, setting)
        format_setting = "time_format" if setting == "time" else "data.time_format"  # of a join
        values = _parse_times(table, name, values, time_format, format_setting)
        if pa.types.is_floating(values.type):
            return np.asarray(values.to_numpy(), dtype=np.float64)
    elif _is_numeric(kind):
        return _read_number_times(table, name, setting)
    elif not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise UserError(f'{table.name}: column "{name}" ({setting}) holds {kind}, not times')
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise UserError(f"{table.locate_cell(row, name)}: the time is missing")
    return _read_microseconds(table, name, values)


def _read_microseconds(
    table: DataTable, name: str, values: pa.ChunkedArray
) -> npt.NDArray[np.int64]:
    """Return dates and timestamps in microseconds; those outside of the years 1 to 9999, which
    overflow here or elsewhere, are refused."""
    if pa.types.is_date(values.type):
        values = values.cast(pa.timestamp("s" if values.type == pa.date32() else "ms"))
    counts = np.asarray(values.cast(pa.int64()).to_numpy(), dtype=np.int64)
    seconds = counts / PER_SECOND[values.type.unit]
    wild = np.flatnonzero((seconds < FIRST_SECOND) | (seconds >= PAST_SECOND))
    if len(wild):
        cell = table.locate_cell(int(wild[0]), name)
        raise UserError(f"{cell}: the time is not within the years 1 to 9999; correct it")
    scale = 1e6 / PER_SECOND[values.type.unit]
    return counts * int(scale) if scale >= 1 else counts // int(1 / scale)


def _read_number_times(table: DataTable, name: str, setting: str) -> npt.NDArray[np.float64]:
    values = read_numbers(table, name, setting)
    unknown = np.flatnonzero(np.isnan(values))
    if len(unknown):
        raise UserError(f"{table.locate_cell(int(unknown[0]), name)}: the time is missing")
    return values


def is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _is_numeric(kind: pa.DataType) -> bool:
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return bool(numeric or pa.types.is_duration(kind) or kind in (pa.bool_(), pa.null()))


def clean_text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Trim text; null where it is missing."""
    return _drop_texts(pc.utf8_trim_whitespace(values.cast(pa.string())), NULLS)


def _drop_texts(values: pa.ChunkedArray, na: Collection[str]) -> pa.ChunkedArray:
    """Return text with nulls in place of some; they are compared without spaces around them."""
    if not na:
        return values
    is_missing = pc.is_in(pc.utf8_trim_whitespace(values), value_set=pa.array(na))
    return pc.if_else(is_missing, pa.scalar(None, pa.string()), values)


def _cast(text: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return None


def _to_numbers(table: DataTable, values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Parse text as numbers, null where a value is missing; None if a cell is not a number."""
    numbers = None if table.decimal == "," else _cast(values, pa.float64())
    if numbers is not None:
        return numbers
    text = decimals.normalize_decimals(clean_text(values), table.decimal)
    numbers = _cast(text, pa.float64())
    if numbers is None and pc.any(pc.starts_with(text, "+")).as_py():
        return _cast(pc.replace_substring_regex(text, r"^\+", ""), pa.float64())
    return numbers


def _parse_numbers(table: DataTable, name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    numbers = _to_numbers(table, values)
    if numbers is not None:
        return numbers
    text = decimals.normalize_decimals(clean_text(values), table.decimal)
    row = pc.index(pc.match_substring_regex(text, decimals.NUMBER), False).as_py()
    cell = values[row].as_py().strip()
    point = table.find_cell(row, decimals.POINT) if table.decimal == MIXED else None
    wrong = decimals.explain_mark(cell, table.decimal, point) or "is not a number; correct it"
    raise UserError(
        f'{table.locate_cell(row, name)}: "{cell[:40]}" {wrong}, or leave the column out of '
        "data.inputs"
    )


def _parse_times(
    table: DataTable, name: str, values: pa.ChunkedArray, time_format: str | None, setting: str
) -> pa.ChunkedArray:
    text = pc.utf8_trim_whitespace(values.cast(pa.string()))
    elapsed = times.parse_elapsed(text) if time_format is None else None
    parsed, wrong = elapsed or times.parse_times(text, time_format, setting)
    if wrong is None:
        return parsed
    raise UserError(f'{table.locate_cell(parsed, name)}: "{str(text[parsed])[:40]}" {wrong}')
