"""Text tables: where names, units and values are, records and the lines that they stand in.

CSV files and workbooks have the same layouts, and errors name lines of a file long after it was
read, so this lies below the readers of formats.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from slipstream.base.errors import NoNamesError, Setting, UserError
from slipstream.base.text import format_count

Rows = Sequence[Sequence[str]]
Record = tuple[int, int, list[str]]
"""First line, last line and cells"""

TAIL_ROWS = 10
"""The number of last rows in the sample whose usual width is taken as the table's width"""
NULLS = ["", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NAN", "-nan"]
NULLS += ["null", "NULL", "None", "none"]
"""Cells that mean "missing", whatever the settings say"""
UNNAMED = "column_"
"""The name given to a column without one: this, followed by its position"""
_SYMBOL = (
    r"(?:[numµμkMGTcdh]?(?:V|A|W|Wh|Ah|VA|var|s|sec|Hz|m|g|Pa|bar|J|N|Nm|K|C|F|S|Ω|[Oo]hm|rad|l|L|mol)"
    r"|%|°C?|°F|deg[CF]?|min|h|d|t|psi|dB|rpm|ppm|ppb|EUR|USD|counts?|[vw]ol%)(?:\^?-?\d)?"
)
UNIT = re.compile(rf"-+|[\[(].+[\])]|{_SYMBOL}(?:\s?[/*·]?\s?{_SYMBOL})*")
"""A dash for "no unit", text in brackets, or symbols as in mA, m^3/h and Wh"""
LONGEST_UNIT = 20
"""A longer text below a name is no unit"""
COMMENTS = ("#", "%")
"""The marks of comments above values"""
DATE = re.compile(r"\d{1,4}[-/.:]\d{1,2}(?:[-/.: T]|$)")
"""How a date or time of day begins"""
MAX_NAMED = 5


class Layout(NamedTuple):
    """Where the names, the units and the first row of values are; rows count from 0."""

    names: list[str]
    """Empty where a column has none"""
    first_name_row: int
    first_value_row: int
    units: dict[str, str]


def is_number(cell: str, *, comma: bool = False) -> bool:
    """Return whether a cell is a number; with `comma`, also one with a decimal comma."""
    try:
        float(cell.replace(",", ".") if comma else cell)
    except ValueError:
        return False
    return True


def find_layout(rows: Rows, *, search: bool = True) -> Layout | None:
    """Find the names, and a row of units below them; None where all rows are blank.

    Without `search`, or where no row looks like names above numbers, the first row has the names.
    """
    filled = [i for i, row in enumerate(rows) if _has_text(row)]
    if not filled:
        return None
    header_row = filled[0]
    if search:
        names_row = find_names(rows)
        merged = _find_merged(rows, filled) if names_row is None else None
        if merged is not None:
            return merged
        header_row = header_row if names_row is None else names_row
    return _finish(rows, _strip(rows[header_row]), header_row, header_row + 1)


def find_wide_layout(rows: Rows) -> Layout | None:
    """Find the names of a table with a series per row; None where all rows are blank.

    Where the first row has values itself, the names are empty. Names may be numbers, as years are,
    if they go up in equal steps.
    """
    filled = [i for i, row in enumerate(rows) if _has_text(row)]
    if not filled:
        return None
    first = filled[0]
    names_row = find_names(rows)
    if names_row is None and is_values(_strip(rows[first])):
        return Layout([""] * max(len(row) for row in rows), first, first, {})
    names_row = first if names_row is None else names_row
    width = max(len(row) for row in rows[names_row:])
    names = _strip(rows[names_row])
    return Layout([*names, *[""] * (width - len(names))], names_row, names_row + 1, {})


def is_values(cells: Sequence[str]) -> bool:
    """Return whether a row is a series: half of its cells or more are numbers, and not such that
    go up in equal steps."""
    known = [cell for cell in cells if cell not in (*NULLS, "?")]
    numbers = [float(cell.replace(",", ".")) for cell in known if is_number(cell, comma=True)]
    if not numbers or 2 * len(numbers) < len(known):
        return False
    steps = {round(after - before, 9) for before, after in pairwise(numbers)}
    is_count = len(steps) == 1 and min(steps) > 0 and all(x.is_integer() for x in numbers)
    return not is_count


def are_values(names: Sequence[str], below: Rows) -> bool:
    """Return whether what should name the columns are values: numbers, and beside these only dates
    and texts that stand below as well."""
    numbers = [is_number(name) for name in names if name]
    texts = [i for i, name in enumerate(names) if name and not is_number(name)]
    return any(numbers) and all(
        DATE.match(names[i]) or names[i] in {row[i].strip() for row in below if i < len(row)}
        for i in texts
    )


def explain_no_names(where: str, text: str, values: Sequence[str]) -> UserError:
    """Return the error for a row of values where names should be, which begins with this text."""
    has_text = not all(map(is_number, values))  # numbers alone may be names, as years are
    kind = NoNamesError if has_text or is_values(values) else UserError
    return kind(
        f'{where} should name the columns, but reads "{text}"; if the file has no names, set '
        + Setting({"data.names": "none"})
        + " or list them there; where every row is a series, set "
        + Setting({"data.layout": "wide"}),
        setting="data.layout",
    )


def name_columns(path: Path, rows: Rows, names: Literal["none"] | Sequence[str]) -> Layout | None:
    """Return the layout of rows without a row of names, below comments; None where all are
    blank."""
    filled = (i for i, row in enumerate(rows) if _has_text(row))
    first = next((i for i in filled if not rows[i][0].startswith(COMMENTS)), None)
    if first is None:
        return None
    count = max(map(len, rows[first:]))
    if names == "none":
        return Layout([f"V{number}" for number in range(1, count + 1)], first, first, {})
    if len(names) != count:
        raise UserError(
            file=path,
            setting="data.names",
            found=format_count(len(names), "name"),
            accepted=format_count(count, "name") + ", one for each column",
        )
    return Layout(list(names), first, first, {})


def add_row_names(layout: Layout, rows: Rows, delimiter: str) -> Layout:
    """Return the layout with a column without a name in front where each row of values has a cell
    more than there are names: R writes tables so. With commas that cell has to be text: a decimal
    comma makes a cell more as well."""
    below = [row for row in rows[layout.first_value_row :] if _has_text(row)]
    widths = {len(row) for row in below}
    has_names = layout.first_value_row > layout.first_name_row
    if not has_names or widths != {len(layout.names) + 1} or not any(row[-1] for row in below):
        return layout
    if delimiter == "," and any(is_number(row[0], comma=True) for row in below):
        return layout
    return layout._replace(names=["", *layout.names])


def find_names(rows: Rows) -> int | None:
    """Find the first row of names right above numbers, or above units and numbers.

    Rows above it must be lines of text; None where there is no such row.
    """
    filled = [i for i, row in enumerate(rows) if _has_text(row)]
    width = _find_width(rows)
    apart: int | None = None
    for order, row_number in enumerate(filled):
        below = [rows[i] for i in filled[order + 1 : order + 1 + TAIL_ROWS]]
        names = _trim(rows[row_number])
        used = {i for row in below for i, cell in enumerate(row) if cell.strip()}
        unnamed = any(i >= len(names) or not names[i] for i in used)
        if unnamed or len(names) > width or not _starts_values(below[:2]):
            continue
        if _has_number(names) or (order and _has_doubles(names)):
            continue
        near = _list_near(rows, filled[:order], row_number)
        above = [rows[i] for i in filled[:order]]
        if not all(_is_text_line(row, width) for row in near) or any(map(_is_all_numbers, above)):
            return apart
        if filled[order + 1] > row_number + 1 and apart is None:
            apart = row_number  # a blank row below: names, unless better ones follow
            continue
        return row_number if apart is None or not is_units(names) else apart
    return apart


def describe_layout(
    lines_above: int, units: Mapping[str, str], skip_rows: int | None, line_word: str
) -> list[str]:
    """Note the lines, or rows, that were recognised above the names, and the units below them."""
    notes = []
    if lines_above and skip_rows is None:
        lines = f"{line_word} 1 is" if lines_above == 1 else f"{line_word}s 1 to {lines_above} are"
        notes.append(f"{lines} above the names (data.skip_rows = {lines_above})")
    if units:
        listed = ", ".join(f"{name} [{unit}]" for name, unit in islice(units.items(), MAX_NAMED))
        more = f" and {len(units) - MAX_NAMED} more" * (len(units) > MAX_NAMED)
        notes.append(f"a row of units is below the names: {listed}{more}")
    return notes


def describe_dropped(num_columns: int, num_rows: int) -> list[str]:
    """Note the empty columns and rows that were left out."""
    notes = [f"{format_count(num_columns, 'empty column')} left out"] if num_columns else []
    if num_rows:
        notes.append(f"{format_count(num_rows, 'empty row')} at the end left out")
    return notes


def _find_width(rows: Rows) -> int:
    """Return how many cells the last rows usually have."""
    widths = Counter(len(row) for row in [row for row in rows if _has_text(row)][-TAIL_ROWS:])
    return widths.most_common(1)[0][0] if widths else 0


def _strip(row: Sequence[str]) -> list[str]:
    return [cell.strip() for cell in row]


def _trim(row: Sequence[str]) -> list[str]:
    """Return the cells without the empty ones at the end."""
    cells = _strip(row)
    while cells and not cells[-1]:
        cells.pop()
    return cells


def _has_text(row: Sequence[str]) -> bool:
    return any(cell.strip() for cell in row)


def _has_number(row: Sequence[str]) -> bool:
    return any(is_number(cell, comma=True) for cell in row if cell.strip() not in NULLS)


def _has_doubles(cells: list[str]) -> bool:
    names = list(filter(None, cells))
    return len(set(names)) < len(names)


def _starts_values(below: Rows) -> bool:
    """Return whether numbers follow, at once or after one row without numbers."""
    return any(_has_number(row) for row in below)


def _is_text_line(row: Sequence[str], width: int) -> bool:
    """Return whether a row above the names holds neither values nor names: it has another width or
    is mostly empty. A table of a single column gives no such evidence."""
    cells = _trim(row)
    if _is_all_numbers(row):
        return False
    return len(row) != width or 2 * sum(map(bool, cells)) <= width


def is_units(names: Sequence[str]) -> bool:
    """Return whether half of the cells or more are known units."""
    return 2 * sum(bool(UNIT.fullmatch(name)) for name in names) >= len(names)


def _is_all_numbers(row: Sequence[str]) -> bool:
    return all(is_number(cell, comma=True) for cell in _trim(row) if cell)


def _list_near(rows: Rows, filled: Sequence[int], names_row: int) -> list[Sequence[str]]:
    """List the rows above the names that no blank row separates from them, and the first row; what
    is between is a title, however many cells it has."""
    blank = [i for i in range(names_row) if not _has_text(rows[i])]
    return [rows[i] for i in filled if i == filled[0] or not blank or i > blank[-1]]


def _find_merged(rows: Rows, filled: list[int]) -> Layout | None:
    """Find names over two rows, as written by merged cells: a group above, and names below it."""
    width = _find_width(rows)
    for above, below in pairwise(filled):
        under = [rows[i] for i in filled if i > below][:2]
        first, second = (
            [*_strip(row), *[""] * width][:width] for row in (rows[above], rows[below])
        )
        if _has_number(first) or _has_number(second) or not _starts_values(under):
            continue
        if below > above + 1:  # a blank row separates a title from the names
            continue
        groups = _fill_groups(first, second)
        names = [" ".join(filter(None, pair)) for pair in zip(groups, second, strict=True)]
        has_group = any(name and not cell for cell, name in zip(first, second, strict=True))
        if has_group and all(names) and len(set(names)) == width > 1:
            lines = [rows[i] for i in filled if i < above]
            if all(_is_text_line(row, width) for row in lines):
                return _finish(rows, names, above, below + 1)
    return None


def _fill_groups(first: list[str], second: list[str]) -> list[str]:
    """Repeat a group's name over the empty cells to its right that have a name below."""
    groups, last = [], ""
    for group, name in zip(first, second, strict=True):
        last = group or (last if name else "")
        groups.append(last)
    return groups


def _finish(rows: Rows, names: list[str], names_row: int, first: int) -> Layout:
    """Return the layout with its units; names are added or dropped to match the values where only
    empty cells differ."""
    units = _find_units(names, [row for row in rows[first:] if _has_text(row)][:2])
    if units is not None:
        first = next(i for i in range(first, len(rows)) if _has_text(rows[i])) + 1
    values = next((row for row in rows[first:] if row), None)
    if values is not None and len(values) < len(names) and not any(names[len(values) :]):
        names = names[: len(values)]
    elif values is not None and len(values) > len(names) and not _has_text(values[len(names) :]):
        names = [*names, *[""] * (len(values) - len(names))]
    return Layout(names, names_row, first, units or {})


def _find_units(names: list[str], below: Rows) -> dict[str, str] | None:
    """Return the units in the first of two rows, for the columns with a number in the second row.

    None where the first row is a row of values. Half of the columns must have a known unit.
    """
    if len(below) < 2 or _has_number(below[0]):
        return None
    triples = list(zip(names, _strip(below[0]), _strip(below[1]), strict=False))
    units = {name: unit for name, unit, value in triples if is_number(value, comma=True)}
    not_numbers = [(unit, value) for _, unit, value in triples if not is_number(value, comma=True)]
    if any(_has_digit(unit) and _has_digit(value) for unit, value in not_numbers):
        return None  # a date above a date
    known = sum(bool(UNIT.fullmatch(unit)) for unit in units.values())
    if 2 * known < len(units) or not all(map(_may_be_unit, units.values())):
        return None
    plain = {name: unit.strip("[]()- ") for name, unit in units.items()}
    # a row of dashes alone has no values: they mean "missing"
    return {name: unit for name, unit in plain.items() if name and unit} or None


def _has_digit(cell: str) -> bool:
    return any(char.isdigit() for char in cell)


def _may_be_unit(cell: str) -> bool:
    return not cell or (cell not in NULLS and len(cell) <= LONGEST_UNIT)


def iter_records(path: Path, delimiter: str) -> Iterator[Record]:
    """Yield each record with its first and last line. This is slow, so it is used for the header
    and for errors only."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        first = 1
        try:
            for cells in reader:
                yield first, reader.line_num, cells
                first = reader.line_num + 1
        except csv.Error as error:
            if "field limit" in str(error):
                raise UserError(
                    f"{path}, line {first}: a cell has more than {csv.field_size_limit():,} "
                    "characters; is there a quote that never closes?"
                ) from None
            raise UserError(f"{path}, line {first}: cannot be read as CSV: {error}") from None


def find_line(path: Path, delimiter: str, columns: int, header_lines: int, row: int) -> int | None:
    """Return the line in which a row below the header begins."""
    rows = iter_records(path, delimiter)
    lines = (first for first, _, cells in rows if first > header_lines and (cells or columns == 1))
    return next(itertools.islice(lines, row, None), None)
