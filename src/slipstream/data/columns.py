"""Conversion of cells to numbers, times and codes. Each column is parsed once, from all of its
values."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.base.errors import LeaveOut, Setting, Text, UserError
from slipstream.base.text import find_nearest, format_count
from slipstream.data.layout import NULLS, is_number
from slipstream.data.table import MIXED, ColumnReader, DataTable, MemoryReader, release_memory

NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?([iI]nf|[iI]nfinity|INF)$"
WITH_COMMA = (
    r"^[+-]?(?:\d+,\d*|,\d+)(?:[eE][+-]?\d+)?$"
    r"|^[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?$|^[+-]?\d{1,3}(?:\.\d{3})+,\d*$"
)
"""Numbers in which a comma, point or space is either the decimal mark or separates thousands"""
_SPACES = " '\u2019\u00a0\u202f"
THOUSANDS = (
    rf"^[+-]?\d{{1,3}}(?:[{_SPACES}]\d{{3}})+(?:[.,]\d*)?$"
    r"|^[+-]?\d{1,3}(?:,\d{3}){2,}(?:\.\d*)?$|^[+-]?\d{1,3}(?:\.\d{3}){2,}(?:,\d*)?$"
    r"|^[+-]?\d{1,3}(?:,\d{3})+\.\d*$|^[+-]?\d{1,3}(?:\.\d{3})+,\d*$"
)
"""Numbers that certainly have separators between thousands: 1 234,5 and 1,234.5"""
LOOKS = f"{NUMBER}|{WITH_COMMA}|{THOUSANDS}"
_EXPONENT = r"[eE][+-]?\d+"
CERTAIN = (
    rf"^[+-]?(?:\d*MARK(?:\d{{1,2}}|\d{{4,}})(?:{_EXPONENT})?"
    rf"|(?:0\d*|\d{{4,}})?MARK\d+(?:{_EXPONENT})?|\d*MARK\d+{_EXPONENT})$"
)
"""Numbers in which MARK cannot separate thousands: 1,5 and 0,123 but not 1,199"""
POINT = CERTAIN.replace("MARK", r"\.")
HEAD_ROWS = 1000
"""These first rows are tried alone: they show most text columns and decimal commas at once"""


def find_mark(table: pa.Table) -> str | None:
    """Return "," if a number of a file has a decimal comma, MIXED if other numbers have a decimal
    point, else None.

    With MIXED, nothing tells which of the two marks is the slip.
    """
    if not _is_certain(table, ",", CERTAIN.replace("MARK", ",")):
        return None
    return MIXED if has_points(table) else ","


def has_points(table: pa.Table) -> bool:
    """Return whether any number of a file has a decimal point."""
    return _is_certain(table, ".", POINT)


def has_byte(cells: pa.ChunkedArray, marks: str) -> bool:
    """Look for a character among the bytes of all cells (60 MB: 0.1 s; cell by cell 1.8 s)."""
    texts = (np.frombuffer(chunk.buffers()[2] or b"", dtype=np.uint8) for chunk in cells.chunks)
    return any((text == ord(mark)).any() for text in texts for mark in marks)


def normalize_decimals(text: pa.ChunkedArray, mark: str | None) -> pa.ChunkedArray:
    """Return a column whose numbers have a decimal point; text with any other mark is no number
    afterwards."""
    if mark != ",":
        return text
    swapped = pc.replace_substring(text, ".", "'")
    return pc.replace_substring(swapped, ",", ".")


def explain_mark(cell: str, mark: str | None, with_point: str | None = None) -> Text | None:
    """Explain why a number's comma or point is not accepted; None if the cell is no number at all.

    `with_point` names a number of the same file that has a decimal point.
    """
    if re.match(THOUSANDS, cell):
        return (
            "has thousands separators; write numbers without them, as in 1234.5 (data.decimal only "
            "names the decimal mark)"
        )
    if mark == "," and re.match(NUMBER, cell):
        return (
            "has a point, but the comma is the decimal mark here; write numbers without "
            "thousands separators, or set " + Setting({"data.decimal": "."})
        )
    if not re.match(WITH_COMMA, cell):
        return None
    if mark == MIXED:
        example = f", as {with_point}" if with_point else ""
        return (
            f"has a comma, but other numbers of the file have a decimal point{example}; write "
            "all numbers with one decimal mark, or set "
            + Setting({"data.decimal": ","})
            + " if the points are none"
        )
    if mark == ".":
        return (
            'has a comma, but data.decimal = "."; write numbers without thousands '
            "separators, or " + "set " + Setting({"data.decimal": ","})
        )
    return (
        "may have a decimal comma or thousands separators; write numbers without "
        "thousands separators, or set " + Setting({"data.decimal": ","})
    )


def _is_certain(table: pa.Table, mark: str, certain: str) -> bool:
    """Return whether a number certainly has this decimal mark; the first rows are searched
    first."""
    head = [column.slice(0, HEAD_ROWS) for column in table.columns]
    for cells in [*head, *(table.columns if table.num_rows > HEAD_ROWS else ())]:
        if has_byte(cells, mark):
            text = pc.utf8_trim_whitespace(cells)
            if pc.any(pc.match_substring_regex(text, certain)).as_py():
                return True
    return False


NAIVE, ZONED = pa.timestamp("us"), pa.timestamp("us", "UTC")
COMPOSITE = {"%T": "%H:%M:%S", "%R": "%H:%M", "%F": "%Y-%m-%d", "%D": "%m/%d/%y"}
PATTERNS = {"%Y": r"\d{4}", "%j": r"\d{1,3}", "%%": "%", "%z": r"(?:Z|[+-]\d{2}:?\d{2})"}
PATTERNS |= dict.fromkeys(("%d", "%m", "%y", "%H", "%I", "%M", "%S", "%e"), r"\s?\d{1,2}")
PATTERNS |= dict.fromkeys(("%b", "%B", "%h", "%a", "%A", "%p"), r"\pL+\.?")
"""What a directive matches, where a fraction follows or precedes it"""
DATES = (
    *("%Y/%m/%d", "%Y.%m.%d", "%Y%m%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%b %d %Y", "%b %d, %Y", "%d %b %Y", "%d-%b-%Y"),
    *("%d/%b/%Y", "%d-%b-%y", "%b-%d-%Y", "%B %d, %Y", "%d %B %Y"),
)
MONTHS = (
    *("%Y-%m", "%Y/%m", "%m/%Y", "%b %Y", "%b-%Y", "%b-%y", "%B %Y", "%Y %b", "%Y-%b"),
    *("%Y Q%q", "%Y-Q%q", "Q%q %Y", "Q%q-%Y"),
)
"""Times without a day; %q, the number of a quarter, is ours"""
DIGITS = ("%Y%m%d", "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S")
"""Formats of digits alone, by their number: 8, 10, 12 and 14"""
BASIC = ("%Y%m%dT%H%M%S", "%Y%m%dT%H%M", "%Y%m%dT%H%M%SZ", "%d/%b/%Y:%H:%M:%S")
"""ISO 8601 without separators, and the logs of web servers"""
FRACTIONS = (" %H:%M:%S.%f", "T%H:%M:%S.%f", " %H:%M:%S,%f")
ELAPSED = (
    r"(?:(?P<days>\d+) ?d(?:ays?)? )?"
    r"(?P<hours>\d+):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d(?:\.\d+)?)"
)
"""Times since a start, as cyclers write them"""
CLOCKS = (
    "",
    " %H:%M:%S",
    " %H:%M",
    "T%H:%M:%S",
    " %I:%M %p",
    " %I:%M:%S %p",
    " %H.%M.%S",
    " %H.%M",
)


ELAPSED_NUMBER = re.compile(r"\s*[+-]?\d*[.,]?\d*(?:[eE][+-]?\d+)?\s*")
ISO = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?)?$"


def parse_elapsed(
    text: pa.ChunkedArray,
) -> tuple[pa.ChunkedArray, None] | tuple[int, str] | None:
    """Parse times since a start, 25:19:08.386 or 1d 01:19:08, as seconds. None if the first cell is
    no such time; if a later cell is none, its position and an explanation."""
    if not len(text) or not re.fullmatch(ELAPSED, str(text[0])):
        return None
    parts = pc.extract_regex(text, pattern=f"^{ELAPSED}$")
    if parts.null_count:
        bad = pc.index(pc.is_null(parts), True).as_py()
        return bad, f'is not a time since a start, as "{text[0]}" in the first row is; correct it'
    seconds = pa.scalar(0.0)
    for name, size in {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}.items():
        field = pc.struct_field(parts, name)
        number = pc.if_else(pc.equal(field, ""), "0", field).cast(pa.float64())
        seconds = pc.add(seconds, pc.multiply(number, size))
    return seconds, None


def parse_times(
    text: pa.ChunkedArray, time_format: str | None, setting: str = "data.time_format"
) -> tuple[pa.ChunkedArray, None] | tuple[int, str]:
    """Parse text as times, or return the position of the first cell that is no time and an
    explanation; `setting` is the setting that holds the format."""
    if time_format is None:
        for kind in (NAIVE, ZONED):
            if (times := _cast(text, kind)) is not None:
                return times, None
        return _explain_iso(text, setting)
    parsed = _parse_format(text, time_format)
    bad = pc.index(pc.is_null(parsed), True).as_py()
    if bad < 0:
        return parsed, None
    wrong = f'does not match {setting} = "{time_format}"'
    if "%" not in time_format:
        return bad, f"{wrong}, which has no directives such as %d; {_suggest_format(text, setting)}"
    return bad, wrong


def _parse_format(text: pa.ChunkedArray, time_format: str) -> pa.ChunkedArray:
    """Parse times of a format, with null where a cell has another one."""
    if "Q%q" in time_format:  # Arrow's parser does not know quarters: they become months
        has_quarter = pc.match_substring_regex(text, r"Q[1-4]\b")
        text = pc.if_else(has_quarter, text, pa.scalar(None, pa.string()))
        for quarter in range(1, 5):
            month = f"{3 * quarter - 2:02}"
            text = pc.replace_substring_regex(text, rf"Q{quarter}\b", month)
        time_format = time_format.replace("Q%q", "%m")
    if "%f" in time_format:
        return _parse_fractions(text, time_format)
    return pc.strptime(text, format=time_format, unit="us", error_is_null=True)


def _parse_fractions(text: pa.ChunkedArray, time_format: str) -> pa.ChunkedArray:
    """Parse times with fractions of a second, %f, of up to nine digits; Arrow's parser does not
    know %f."""
    for short, long in COMPOSITE.items():
        time_format = time_format.replace(short, long)
    before, _, after = time_format.partition("%f")
    pattern = (
        f"^(?P<before>{_to_pattern(before)})(?P<digits>\\d{{1,9}})(?P<after>{_to_pattern(after)})$"
    )
    parts = pc.extract_regex(text, pattern=pattern)
    # a separator keeps the digits on both sides apart
    pieces = [pc.struct_field(parts, name) for name in ("before", "after")]
    whole = pc.binary_join_element_wise(*pieces, "|")
    times = pc.strptime(whole, format=f"{before}|{after}", unit="us", error_is_null=True)
    digits = pc.utf8_slice_codeunits(
        pc.utf8_rpad(pc.struct_field(parts, "digits"), 6, "0"), start=0, stop=6
    )
    return pc.add(times.cast(pa.int64()), digits.cast(pa.int64())).cast(times.type)


def _to_pattern(time_format: str) -> str:
    """Return a regular expression that roughly matches the texts of a time format."""
    parts = re.split(r"(%.|\s+)", time_format)
    return "".join(
        PATTERNS.get(part, ".+?")
        if part.startswith("%")
        else r"\s+"
        if part.isspace()
        else re.escape(part)
        for part in parts
    )


def _explain_iso(text: pa.ChunkedArray, setting: str) -> tuple[int, str]:
    """Return the position of the first cell that is no ISO 8601 time like the cells before it, and
    an explanation."""
    bad, kind = max((_find_failure(text, kind), str(kind)) for kind in (NAIVE, ZONED))
    for other_kind in (NAIVE, ZONED):
        if bad and _cast(text.slice(bad, 1), other_kind) is not None:
            has, had = ("has a", "none") if kind == str(NAIVE) else ("has no", "one")
            return bad, (
                f'{has} time zone, but "{str(text[0])[:40]}" in the first row has {had}; write all '
                "times with a zone, or all of them without"
            )
    return bad, f"is not an ISO 8601 time; {_suggest_format(text, setting)}"


def find_formats(text: pa.ChunkedArray) -> list[str | None]:
    """List the time formats that fit every cell: None for ISO 8601, else the common ones; two where
    day and month may be swapped."""
    if _cast(text, NAIVE) is not None or _cast(text, ZONED) is not None:
        return [None]
    return [*_list_fitting(text)]


def _list_fitting(text: pa.ChunkedArray) -> list[str]:
    """List the common formats that every cell has."""
    first = str(text[0]) if len(text) else ""
    if not any(map(str.isdigit, first)):  # no time; trying 200 formats on each text takes long
        return []
    if ELAPSED_NUMBER.fullmatch(first):
        formats: Iterable[str] = (
            digits for digits in DIGITS if _count_digits(digits) == len(first)
        )
    else:
        separated = (f"{date}{clock}" for date in DATES for clock in CLOCKS)
        formats = (*MONTHS, *separated, *BASIC)
        formats = (*formats, *(f"{date}{clock}" for date in DATES for clock in FRACTIONS))
    return [
        candidate
        for candidate in formats
        if _fits(text.slice(0, 1), candidate) and _fits(text, candidate)
    ]


def _count_digits(time_format: str) -> int:
    return 2 + 2 * time_format.count("%")  # a year has four


def parse_known_times(text: pa.ChunkedArray, time_format: str | None) -> pa.ChunkedArray:
    """Parse text as times, with null where a cell is no time."""
    if time_format is None:
        for kind in (NAIVE, ZONED):
            if (times := _cast(text, kind)) is not None:
                return times
        looks = pc.match_substring_regex(text, ISO)
        times = _cast(pc.if_else(looks, text, pa.scalar(None, pa.string())), NAIVE)
        return pa.chunked_array([pa.nulls(len(text), NAIVE)]) if times is None else times
    return _parse_format(text, time_format)


def _suggest_format(text: pa.ChunkedArray, setting: str) -> str:
    """Suggest the common time formats that fit every cell, as a value for the setting."""
    fitting = _list_fitting(text)
    if not fitting:
        return f'set {setting}, as in "%d.%m.%Y %H:%M:%S.%f"'
    return f"set {setting} = " + " or ".join(f'"{time_format}"' for time_format in fitting)


def _fits(text: pa.ChunkedArray, time_format: str) -> bool:
    times, wrong = parse_times(text, time_format)
    return wrong is None and pc.min(pc.year(times)).as_py() > 999  # %Y reads 20 as the year 20


def _find_failure(text: pa.ChunkedArray, kind: pa.DataType) -> int:
    """Return the position of the first cell that cannot be read as this type; the caller knows that
    there is one."""
    reads, fails = 0, len(text)
    while fails - reads > 1:  # the first `reads` cells do, the first `fails` do not
        middle = (reads + fails) // 2
        if _cast(text.slice(reads, middle - reads), kind) is None:
            fails = middle
        else:
            reads = middle
    return fails - 1


def _cast(text: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        return None


LARGEST = 1e30
"""Beyond it, squares leave the range of float32."""
HOUR_US = 3_600_000_000
PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
FIRST_SECOND, PAST_SECOND = -62_135_596_800, 253_402_300_800
"""The years 1 to 9999, in seconds from 1970 on"""


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
    """Refuse a name that no column has, and suggest the closest column."""
    if name not in table.column_set:
        nearest = find_nearest(name, table.column_names)
        known = f"it has {', '.join(table.column_names[:20])}"
        hint = f'did you mean "{nearest}"?' if nearest else known
        raise UserError(f'{table.name}: has no column "{name}" ({setting}); {hint}')


def read_column(table: DataTable, name: str, setting: str) -> pa.ChunkedArray:
    """Read a column with its own type; categories become their values, durations seconds."""
    require_column(table, name, setting)
    values = table.read_column(name)
    if len(values) != table.num_rows:
        raise UserError(
            f'{table.name}: column "{name}" ({setting}) has {len(values):,} of the '
            f"{table.num_rows:,} rows of the file, which is damaged; write it again"
        )
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
        problem = f"holds {values.type}, not numbers"
        raise UserError(f'{table.name}: column "{name}" ({setting}) {problem}')
    result = np.asarray(values.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    if values.type != pa.float64() or table.row_groups:
        del values
        release_memory()
    if max(np.fmax.reduce(result, initial=0.0), -np.fmin.reduce(result, initial=0.0)) > LARGEST:
        wild = np.flatnonzero(np.abs(result) > LARGEST)
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
    alike = pc.match_substring_regex(text, LOOKS)
    return bool(known == 0 or 2 * pc.sum(alike).as_py() >= known)


def read_codes(
    table: DataTable, name: str, setting: str
) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Read a column as codes and the text of each, numbered as they first appear."""
    require_column(table, name, setting)
    if is_encoded(table.reader.get_type(name)):
        return _read_encoded(table, name, setting)
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


def is_encoded(kind: pa.DataType) -> bool:
    """Return whether a column holds text as numbers of a list of texts."""
    return bool(pa.types.is_dictionary(kind) and is_text(kind.value_type))


def _read_encoded(
    table: DataTable, name: str, setting: str
) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Read text that is encoded already, of which only the list of texts is looked at."""
    encoded = table.read_column(name).unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0)
    texts = encoded.dictionary.to_pylist()
    indices = encoded.indices
    is_missing = pa.array([text is None for text in texts], pa.bool_())
    if indices.null_count or pc.any(is_missing).as_py():
        missing = pc.fill_null(is_missing.take(indices), True)
        if pc.any(missing).as_py():
            row = pc.index(missing, True).as_py()
            raise UserError(f"{table.locate_cell(row, name)}: is empty ({setting})")
    codes = indices.to_numpy()
    # number the texts as they first appear, and those that are equal as one
    steps = np.diff(codes, prepend=np.int32(-1))
    if ((steps == 0) | (steps == 1)).all():
        if len(set(texts)) == len(texts) == codes[-1] + 1:
            return codes.astype(np.int64), texts
        used = np.arange(codes[-1] + 1 if len(codes) else 0)
    else:
        used, first = np.unique(codes, return_index=True)
        used = used[np.argsort(first)]
    numbers: dict[str, int] = {}
    places = np.zeros(len(texts), dtype=np.int64)
    places[used] = [numbers.setdefault(texts[code], len(numbers)) for code in used.tolist()]
    return places[codes], list(numbers)


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
    elif _is_numeric(kind) and time_format is None:
        return _read_number_times(table, name, setting)
    elif _is_numeric(kind):  # 20240131 as a number
        values = _parse_times(table, name, to_plain_text(values), time_format, "data.time_format")
    elif not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise UserError(f'{table.name}: column "{name}" ({setting}) holds {kind}, not times')
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise UserError(f"{table.locate_cell(row, name)}: the time is missing")
    return _read_microseconds(table, name, values)


def _read_microseconds(
    table: DataTable, name: str, values: pa.ChunkedArray
) -> npt.NDArray[np.int64]:
    """Return dates and timestamps in microseconds; refuse those outside of the years 1 to 9999,
    which overflow here or elsewhere."""
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
    """Return trimmed text, with null where a cell is empty or means "missing"."""
    return _drop_texts(pc.utf8_trim_whitespace(values.cast(pa.string())), NULLS)


def _drop_texts(values: pa.ChunkedArray, na: Collection[str]) -> pa.ChunkedArray:
    """Return text with null in place of the texts `na`, which are compared without surrounding
    spaces."""
    if not na:
        return values
    is_missing = pc.is_in(pc.utf8_trim_whitespace(values), value_set=pa.array(na))
    return pc.if_else(is_missing, pa.scalar(None, pa.string()), values)


def _to_numbers(table: DataTable, values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Parse text as numbers, null where a value is missing; None if a cell is not a number."""
    numbers = None if table.decimal == "," else _cast(values, pa.float64())
    if numbers is not None:
        return numbers
    text = normalize_decimals(clean_text(values), table.decimal)
    numbers = _cast(text, pa.float64())
    if numbers is None and pc.any(pc.starts_with(text, "+")).as_py():
        return _cast(pc.replace_substring_regex(text, r"^\+", ""), pa.float64())
    return numbers


def _parse_numbers(table: DataTable, name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    numbers = _to_numbers(table, values)
    if numbers is not None:
        return numbers
    text = normalize_decimals(clean_text(values), table.decimal)
    row = pc.index(pc.match_substring_regex(text, NUMBER), False).as_py()
    cell = values[row].as_py().strip()
    point = table.find_cell(row, POINT) if table.decimal == MIXED else None
    wrong = explain_mark(cell, table.decimal, point) or "is not a number; correct it"
    raise UserError(
        f'{table.locate_cell(row, name)}: "{cell[:40]}" '
        + wrong
        + ", or "
        + LeaveOut("leave the column out of data.inputs", name, "data.inputs")
    )


def _parse_times(
    table: DataTable, name: str, values: pa.ChunkedArray, time_format: str | None, setting: str
) -> pa.ChunkedArray:
    text = pc.utf8_trim_whitespace(values.cast(pa.string()))
    elapsed = parse_elapsed(text) if time_format is None else None
    parsed, wrong = elapsed or parse_times(text, time_format, setting)
    if wrong is None:
        return parsed
    raise UserError(f'{table.locate_cell(parsed, name)}: "{str(text[parsed])[:40]}" {wrong}')


Marks = Sequence[str | int | float]


def mark_missing(table: DataTable, na: Marks) -> DataTable:
    """Return a table without the values that mean "missing"."""
    if not na:
        return table
    reader = _MarkedReader(table.reader, tuple(list_texts(na)), list_numbers(na))
    if isinstance(table.reader, MemoryReader):  # so that columns are never held twice
        for name in table.column_names:
            table.reader.columns[name] = reader.read(name, 0, table.num_rows)
        return table
    return replace(table, reader=reader)


def list_texts(na: Marks) -> list[str]:
    """List the texts that mean "missing"; a number stands for its usual spellings."""
    texts = {str(mark).strip() for mark in na}
    for number in list_numbers(na):
        texts |= {str(number), f"{number:g}", f"{number:.0f}" if number.is_integer() else ""}
    return sorted(texts - {""})


def list_numbers(na: Marks) -> tuple[float, ...]:
    """List the numbers that mean "missing", including texts that read as numbers."""
    return tuple(float(mark) for mark in na if is_number(str(mark)))


@dataclass(frozen=True)
class _MarkedReader:
    """Reads columns with null in place of the values that mean "missing"."""

    reader: ColumnReader
    texts: tuple[str, ...]
    numbers: tuple[float, ...]

    def get_type(self, name: str) -> pa.DataType:
        return self.reader.get_type(name)

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        values = self.reader.read(name, begin, end)
        kind = values.type
        if pa.types.is_dictionary(kind) and is_text(kind.value_type):
            values, kind = values.cast(kind.value_type), kind.value_type
        if is_text(kind):
            marks = pa.array(self.texts, pa.string())
            marked = pc.is_in(pc.utf8_trim_whitespace(values.cast(pa.string())), value_set=marks)
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            marks = pa.array(self.numbers, pa.float64())
            marked = pc.is_in(values.cast(pa.float64(), safe=False), value_set=marks)
        else:
            return values
        return pc.if_else(marked, pa.scalar(None, kind), values)


def join_times(table: DataTable, columns: Sequence[str]) -> DataTable:
    """Return a table with one more column: the times that several columns (a date, a time of day)
    give together."""
    joined = " ".join(columns)
    if len(columns) < 2 or joined in table.column_set:
        return table
    for name in columns:
        require_column(table, name, "data.time")
    names = (*table.column_names, joined)
    reader = _JoiningReader(table, tuple(columns), joined)
    if isinstance(table.reader, MemoryReader):
        table.reader.columns[joined] = reader.read(joined, 0, table.num_rows)
        return replace(table, column_names=names)
    return replace(table, reader=reader, column_names=names)


@dataclass(frozen=True)
class _JoiningReader:
    """Reads a table's columns, and one more column that joins several of them as times."""

    table: DataTable
    columns: tuple[str, ...]
    joined: str

    def get_type(self, name: str) -> pa.DataType:
        if name != self.joined:
            return self.table.reader.get_type(name)
        first = self.table.reader.get_type(self.columns[0])
        return pa.timestamp("us") if is_date_type(first) else pa.string()

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        if name != self.joined:
            return self.table.reader.read(name, begin, end)
        parts = [self.table.reader.read(column, begin, end) for column in self.columns]
        try:
            return join_columns(parts)
        except NoClockError as error:
            raise UserError(
                f'{self.table.name}: "{self.columns[0]}" holds dates, but '
                f'"{self.columns[error.number]}" (data.time) holds {parts[error.number].type}, not '
                "times of day or hours; make both of them text"
            ) from None


class NoClockError(ValueError):
    """A column beside dates holds no times of day."""

    def __init__(self, number: int) -> None:
        super().__init__(f"column {number} holds no times of day")
        self.number = number


def join_columns(parts: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return the times of several columns: dates plus times of day or hours, or else text joined
    by blanks."""
    if not is_date_type(parts[0].type):
        return pc.binary_join_element_wise(*map(to_plain_text, parts), " ")
    total = parts[0].cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    for number, part in enumerate(parts[1:], start=1):
        total = pc.add(total, _read_clock(number, part))
    return total.cast(pa.timestamp("us"))


def _read_clock(number: int, part: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return microseconds since midnight; spreadsheets write times of day as dates, too."""
    kind = part.type
    if pa.types.is_duration(kind):
        return part.cast(pa.duration("us"), safe=False).cast(pa.int64())
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        return part.cast(pa.time64("us"), safe=False).cast(pa.int64())
    if pa.types.is_integer(kind):
        return pc.multiply(part.cast(pa.int64()), HOUR_US)
    raise NoClockError(number)


def is_date_type(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def to_plain_text(part: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values as text, whole numbers without a fraction."""
    if pa.types.is_floating(part.type):
        with contextlib.suppress(pa.ArrowInvalid):  # it has fractions
            part = part.cast(pa.int64())
    return pc.utf8_trim_whitespace(part.cast(pa.string()))
