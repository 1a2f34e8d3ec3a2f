"""Text as times: ISO 8601, or the format that `data.time_format` gives."""

import re
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

NAIVE, ZONED = pa.timestamp("us"), pa.timestamp("us", "UTC")
COMPOSITE = {"%T": "%H:%M:%S", "%R": "%H:%M", "%F": "%Y-%m-%d", "%D": "%m/%d/%y"}
PATTERNS = {"%Y": r"\d{4}", "%j": r"\d{1,3}", "%%": "%", "%z": r"(?:Z|[+-]\d{2}:?\d{2})"}
PATTERNS |= dict.fromkeys(("%d", "%m", "%y", "%H", "%I", "%M", "%S", "%e"), r"\s?\d{1,2}")
PATTERNS |= dict.fromkeys(("%b", "%B", "%h", "%a", "%A", "%p"), r"\pL+\.?")
"""What a directive matches, where a fraction follows or precedes it"""
DATES = (
    *("%Y/%m/%d", "%Y.%m.%d", "%Y%m%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%b %d %Y", "%b %d, %Y", "%d %b %Y", "%d-%b-%Y"),
)
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


NUMBER = re.compile(r"\s*[+-]?\d*[.,]?\d*(?:[eE][+-]?\d+)?\s*")
ISO = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?)?$"


def parse_elapsed(
    text: pa.ChunkedArray,
) -> tuple[pa.ChunkedArray, None] | tuple[int, str] | None:
    """Parse times since a start, 25:19:08.386 or 1d 01:19:08, as seconds; None if the first cell is
    none. Where another one is none, return it and what is wrong with it."""
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
    """Parse text as times; or return the first cell that is none, and what is wrong with it.
    `setting` is what the format is called."""
    if time_format is None:
        for kind in (NAIVE, ZONED):
            if (times := _cast(text, kind)) is not None:
                return times, None
        return _explain_iso(text, setting)
    parsed = _parse_fractions(text, time_format) if "%f" in time_format else None
    if parsed is None:
        parsed = pc.strptime(text, format=time_format, unit="us", error_is_null=True)
    bad = pc.index(pc.is_null(parsed), True).as_py()
    if bad < 0:
        return parsed, None
    wrong = f'does not match {setting} = "{time_format}"'
    if "%" not in time_format:
        return bad, f"{wrong}, which has no directives such as %d; {_suggest_format(text, setting)}"
    return bad, wrong


def _parse_fractions(text: pa.ChunkedArray, time_format: str) -> pa.ChunkedArray:
    """Parse times with fractions of a second, %f, of up to nine digits; Arrow's parser has none."""
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
    """Return a regular expression of the texts that a format describes, roughly."""
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
    """Find the first cell that does not read as those before it, and say what is wrong with it."""
    bad, kind = max((_find_failure(text, kind), str(kind)) for kind in (NAIVE, ZONED))
    for other in (NAIVE, ZONED):
        if bad and _cast(text.slice(bad, 1), other) is not None:
            has, had = ("has a", "none") if kind == str(NAIVE) else ("has no", "one")
            return bad, (
                f'{has} time zone, but "{str(text[0])[:40]}" in the first row has {had}; write all '
                "times with a zone, or all of them without"
            )
    return bad, f"is not an ISO 8601 time; {_suggest_format(text, setting)}"


def find_formats(text: pa.ChunkedArray) -> list[str | None]:
    """List the formats that every cell has: None for ISO 8601, else the common ones that fit; two
    where day and month may be swapped."""
    if _cast(text, NAIVE) is not None or _cast(text, ZONED) is not None:
        return [None]
    return [*_list_fitting(text)]


def _list_fitting(text: pa.ChunkedArray) -> list[str]:
    first = str(text[0]) if len(text) else ""
    if NUMBER.fullmatch(first):  # 20240131 at most, and 120 formats of 1,000 columns take long
        formats: Iterable[str] = ("%Y%m%d",)
    else:
        formats = (f"{date}{clock}" for date in DATES for clock in CLOCKS)
    return [one for one in formats if _fits(text.slice(0, 1), one) and _fits(text, one)]


def parse_known_times(text: pa.ChunkedArray, time_format: str | None) -> pa.ChunkedArray:
    """Parse text as times, null where a cell is none."""
    if time_format is None:
        for kind in (NAIVE, ZONED):
            if (times := _cast(text, kind)) is not None:
                return times
        looks = pc.match_substring_regex(text, ISO)
        times = _cast(pc.if_else(looks, text, pa.scalar(None, pa.string())), NAIVE)
        return pa.chunked_array([pa.nulls(len(text), NAIVE)]) if times is None else times
    if "%f" in time_format:
        return _parse_fractions(text, time_format)
    return pc.strptime(text, format=time_format, unit="us", error_is_null=True)


def _suggest_format(text: pa.ChunkedArray, setting: str) -> str:
    """Say which of the common formats every cell has."""
    fitting = _list_fitting(text)
    if not fitting:
        return f'set {setting}, as in "%d.%m.%Y %H:%M:%S.%f"'
    return f"set {setting} = " + " or ".join(f'"{one}"' for one in fitting)


def _fits(text: pa.ChunkedArray, time_format: str) -> bool:
    times, wrong = parse_times(text, time_format)
    return wrong is None and pc.min(pc.year(times)).as_py() > 999  # %Y reads 20 as the year 20


def _find_failure(text: pa.ChunkedArray, kind: pa.DataType) -> int:
    """Find the first cell that does not read as this type; there is one."""
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
