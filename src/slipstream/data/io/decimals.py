"""Decimal marks: a comma is one where that is certain or where `data.decimal` says so."""

import re

import pyarrow as pa
import pyarrow.compute as pc

from slipstream.data.io.csv import has_byte
from slipstream.data.io.options import MIXED

NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?([iI]nf|[iI]nfinity|INF)$"
WITH_COMMA = (
    r"^[+-]?(?:\d+,\d*|,\d+)(?:[eE][+-]?\d+)?$"
    r"|^[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?$|^[+-]?\d{1,3}(?:\.\d{3})+,\d*$"
)
"""Numbers with a decimal comma or separated thousands, whichever it may be"""
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


def find_mark(table: pa.Table) -> str | None:
    """Return a comma if some number of a file has it as its decimal mark; None if none has.

    MIXED where other numbers have a point: which of the two is a slip, nobody can tell.
    """
    if not _is_certain(table, ",", CERTAIN.replace("MARK", ",")):
        return None
    return MIXED if has_points(table) else ","


def has_points(table: pa.Table) -> bool:
    """Return whether some number of a file has a decimal point."""
    return _is_certain(table, ".", POINT)


def normalize_decimals(text: pa.ChunkedArray, mark: str | None) -> pa.ChunkedArray:
    """Give a column's numbers a decimal point; with another mark, text is no number afterwards."""
    if mark != ",":
        return text
    swapped = pc.replace_substring(text, ".", "'")
    return pc.replace_substring(swapped, ",", ".")


def explain_mark(cell: str, mark: str | None, with_point: str | None = None) -> str | None:
    """Say what is wrong with a number's comma or point; None if it is no number at all.

    `with_point` names a number of the same file that has a decimal point.
    """
    if re.match(THOUSANDS, cell):
        return (
            "has thousands separators; write numbers without them, as in 1234.5 (data.decimal only "
            "names the decimal mark)"
        )
    if mark == "," and re.match(NUMBER, cell):
        return (
            "has a point, but the comma is the decimal mark here; write numbers without thousands "
            'separators, or set data.decimal = "."'
        )
    if not re.match(WITH_COMMA, cell):
        return None
    if mark == MIXED:
        other = f", as {with_point}" if with_point else ""
        return (
            f"has a comma, but other numbers of the file have a decimal point{other}; write all "
            'numbers with one decimal mark, or set data.decimal = "," if the points are none'
        )
    if mark == ".":
        return (
            'has a comma, but data.decimal = "."; write numbers without thousands separators, or '
            'set data.decimal = ","'
        )
    return (
        "may have a decimal comma or thousands separators; write numbers without thousands "
        'separators, or set data.decimal = ","'
    )


def _is_certain(table: pa.Table, mark: str, certain: str) -> bool:
    """Look for a number with this decimal mark, in the first rows first."""
    head = [column.slice(0, HEAD_ROWS) for column in table.columns]
    for cells in [*head, *(table.columns if table.num_rows > HEAD_ROWS else ())]:
        if has_byte(cells, mark):
            text = pc.utf8_trim_whitespace(cells)
            if pc.any(pc.match_substring_regex(text, certain)).as_py():
                return True
    return False
