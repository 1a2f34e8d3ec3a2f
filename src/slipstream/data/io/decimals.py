"""Decimal marks: a comma is one where that is certain or where `data.decimal` says so."""

import re

import pyarrow as pa
import pyarrow.compute as pc

from slipstream.data.io.csv import has_byte

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
HEAD_ROWS = 1000


def find_mark(table: pa.Table) -> str | None:
    """Return a comma if some number of a file has it as its decimal mark and none has a point."""
    has_comma = _is_certain(table, ",", ",") and not _is_certain(table, ".", r"\.")
    return "," if has_comma else None


def normalize_decimals(
    text: pa.ChunkedArray, mark: str | None, delimiter: str | None
) -> pa.ChunkedArray:
    """Give a column's numbers a decimal point; with another mark, text is no number afterwards.

    If the mark is not known, the column itself may show it, in a file that commas do not delimit.
    """
    if mark == ",":
        swapped = pc.replace_substring(text, ".", "'")
        return pc.replace_substring(swapped, ",", ".")
    if mark or delimiter in (None, ",") or not pc.any(pc.match_substring(text, ",")).as_py():
        return text
    certain = pc.any(pc.match_substring_regex(text, CERTAIN.replace("MARK", ","))).as_py()
    if certain and not pc.any(pc.match_substring(text, ".")).as_py():
        return pc.replace_substring(text, ",", ".")
    return text


def explain_mark(cell: str, mark: str | None) -> str | None:
    """Say what is wrong with a number's comma or point; None if it is no number at all."""
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
    if mark == ".":
        return (
            'has a comma, but data.decimal = "."; write numbers without thousands separators, or '
            'set data.decimal = ","'
        )
    return (
        "may have a decimal comma or thousands separators; write numbers without thousands "
        'separators, or set data.decimal = ","'
    )


def _is_certain(table: pa.Table, mark: str, pattern: str) -> bool:
    """Look for a number with this decimal mark, in the first rows first."""
    certain = CERTAIN.replace("MARK", pattern)
    head = [column.slice(0, HEAD_ROWS) for column in table.columns]
    for cells in [*head, *(table.columns if table.num_rows > HEAD_ROWS else ())]:
        if has_byte(cells, mark):
            text = pc.utf8_trim_whitespace(cells)
            if pc.any(pc.match_substring_regex(text, certain)).as_py():
                return True
    return False
