"""Workbooks of Excel and others, through fastexcel: numbers with all their digits, dates, texts."""

import logging
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.base.errors import EmptyFileError, UserError
from slipstream.base.text import find_nearest
from slipstream.data.columns import list_texts
from slipstream.data.formats.isolated import read_isolated
from slipstream.data.formats.reader import InputFile, ReadOptions, TableReader
from slipstream.data.layout import (
    NULLS,
    UNNAMED,
    Layout,
    are_values,
    describe_dropped,
    describe_layout,
    explain_no_names,
    find_layout,
    find_wide_layout,
    is_number,
    name_columns,
)
from slipstream.data.table import DataTable, summarize_error, wrap_table

HEAD_ROWS = 100
"""The number of rows that are searched for the row of names"""
OLD_FORMAT = b"\xd0\xcf\x11\xe0"
ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
"""The name that a workbook with a password contains instead of its sheets"""
INSTALL = 'pip install "slipstream[excel]"'


class ExcelReader(TableReader):
    """Reads the sheets of a workbook, in a process of its own."""

    def read(self, file: InputFile, options: ReadOptions) -> list[DataTable]:
        refuse_other_files(file.local_path, file.head)
        return read_isolated(read_excel, file, options, kind="a workbook")


def read_excel(path: Path, name: str, options: ReadOptions) -> list[DataTable]:
    """Read the sheets that the options name, or the only one with rows, each as a table.

    Called in a process of its own (`isolated`): a damaged workbook can end it.
    """
    workbook = _open(path)
    sheets, empty = _select_sheets(path, workbook, options.sheets)
    tables = []
    for number, sheet in enumerate(sheets):
        part = sheet if len(sheets) > 1 else ""
        try:
            tables.append(_read_sheet(path, name, workbook, sheet, part, options))
        except EmptyFileError:
            if sheet in options.sheets or (number == len(sheets) - 1 and not tables):
                raise
            empty.append(sheet)  # a pattern chose it: a title page, for one
    if empty:
        note = f"left out, without rows: {', '.join(empty)}"
        (file,) = tables[0].files
        tables[0] = replace(tables[0], files=(file._replace(notes=(note, *file.notes)),))
    return tables


def refuse_other_files(path: Path, head: bytes) -> None:
    """Refuse a file that is not a readable workbook, judged by its first bytes."""
    if head.startswith(OLD_FORMAT) and path.suffix.lower() != ".xls":
        if ENCRYPTED in path.read_bytes():
            raise UserError(f"{path}: is protected by a password; save it without one")
        raise UserError(f"{path}: is a workbook of the old format; rename it to .xls")
    if b"\0" not in head and not head.startswith(b"PK"):
        raise UserError(f"{path}: is a text file, not a workbook; rename it to .csv")
    if find_spec("fastexcel") is None:
        raise UserError(f"{path}: is an Excel workbook; to read it: {INSTALL}")


def _open(path: Path) -> Any:
    import fastexcel

    try:
        return fastexcel.read_excel(str(path))
    except fastexcel.FastExcelError as error:
        if "password" in str(error).lower():
            raise UserError(f"{path}: is protected by a password; save it without one") from None
        raise UserError(
            f"{path}: cannot be read as a workbook: {summarize_error(error)}; save it again, or "
            "export it as CSV"
        ) from None


def _select_sheets(
    path: Path, workbook: Any, wanted: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Return the sheets to read, and those that a pattern leaves out as they have no rows.

    Hidden sheets are read by their names only.
    """
    names: list[str] = workbook.sheet_names
    listed = ", ".join(f'"{name}"' for name in names)
    chosen = []
    for pattern in wanted:
        matches = [name for name in names if name == pattern]
        matches = matches or [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            nearest = find_nearest(pattern, names)
            hint = f'did you mean "{nearest}"?' if nearest else f"it has {listed}"
            raise UserError(f'{path}: has no sheet "{pattern}" (data.sheet); {hint}')
        chosen += [name for name in matches if name not in chosen]
    if chosen == list(wanted) and chosen:
        return chosen, []
    if len(names) == 1:  # each look at a sheet reads all of it
        return names, []
    open_sheets = {name: _load(path, workbook, name, n_rows=1) for name in chosen or names}
    visible = [name for name, sheet in open_sheets.items() if sheet.visible == "visible"]
    filled = [name for name in visible if open_sheets[name].total_height]
    if not filled:
        raise UserError(f"{path}: every sheet is empty ({listed})")
    if not chosen and len(filled) > 1:
        listed = ", ".join(f'"{name}"' for name in filled)
        raise UserError(
            f"{path}: has several sheets ({listed}); set data.sheet to one of them, or to "
            '"*" to read each as a series'
        )
    return filled, [name for name in visible if name not in filled] if chosen else []


def _load(path: Path, workbook: Any, sheet: str, **settings: Any) -> Any:
    import fastexcel

    log = logging.getLogger("fastexcel")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of columns without values
    try:
        return workbook.load_sheet(sheet, header_row=None, **{"skip_rows": 0} | settings)
    except fastexcel.FastExcelError as error:
        raise UserError(
            f'{path}: sheet "{sheet}" cannot be read: {summarize_error(error)}'
        ) from None
    finally:
        log.setLevel(level)


def _read_sheet(
    path: Path,
    name: str,
    workbook: Any,
    sheet: str,
    part: str,
    options: ReadOptions,
) -> DataTable:
    layout = _find_layout(path, workbook, sheet, options)
    settings: dict[str, Any] = {"skip_rows": layout.first_value_row, "schema_sample_rows": None}
    loaded = _load(path, workbook, sheet, **settings)
    if not loaded.height:
        raise EmptyFileError(f'{path}: sheet "{sheet}" has no rows below the names')
    columns = loaded.to_arrow().columns
    mixed = [i for i, cells in enumerate(columns) if _has_numbers(cells)]
    if mixed:
        again = _load(path, workbook, sheet, **settings, dtypes=dict.fromkeys(mixed, "float"))
        numbers = again.to_arrow().columns
        missing = [*NULLS, *list_texts(options.na)]
        for i in mixed:
            columns[i] = _merge(columns[i], numbers[i], missing)
    names = [*layout.names, *[""] * len(columns)][: len(columns)]
    table, dropped = _drop_empty(columns, names)
    lines_above = layout.first_name_row
    return wrap_table(
        table,
        f"{name}/{part}" if part else name,
        path=path,
        part=part,
        format=f"Excel, sheet {sheet}",
        header_lines=layout.first_value_row,
        units=layout.units,
        notes=(
            *describe_layout(lines_above, layout.units, options.skip_rows, "row"),
            *dropped,
        ),
    )


def _find_layout(path: Path, workbook: Any, sheet: str, options: ReadOptions) -> Layout:
    skip = options.skip_rows or 0
    head = _load(path, workbook, sheet, skip_rows=skip, n_rows=HEAD_ROWS, dtypes="string")
    cells = [column.to_pylist() for column in head.to_arrow().columns] if head.height else []
    rows = [[cell or "" for cell in row] for row in zip(*cells, strict=True)]
    if options.names is not None:
        layout = name_columns(path, rows, options.names)
    elif options.is_wide:
        layout = find_wide_layout(rows)
    else:
        layout = find_layout(rows, search=options.skip_rows is None)
    if layout is None:
        below = f" below row {skip} (data.skip_rows)" if skip else ""
        raise UserError(f'{path}: sheet "{sheet}" is empty{below}')
    filled = [name for name in layout.names if name]
    is_named = options.names is None and not options.is_wide
    if is_named and are_values(layout.names, rows[layout.first_value_row :]):
        where = f'{path}: row {skip + layout.first_name_row + 1} of sheet "{sheet}"'
        raise explain_no_names(where, ", ".join(layout.names)[:60], filled)
    return layout._replace(
        first_name_row=layout.first_name_row + skip, first_value_row=layout.first_value_row + skip
    )


def _has_numbers(cells: pa.Array) -> bool:
    """Return whether a column of text has a cell that is a number. Such a column is read again as
    numbers, because text does not have all digits."""
    return pa.types.is_string(cells.type) and any(
        is_number(text) for text in pc.unique(cells).to_pylist() if text is not None
    )


def _merge(texts: pa.Array, numbers: pa.Array, missing: list[str]) -> pa.Array:
    """Return a column as numbers if every text in it means "missing"; otherwise return it
    unchanged."""
    trimmed = pc.utf8_trim_whitespace(texts)
    means_missing = pc.is_in(trimmed, value_set=pa.array(missing))
    lost = pc.and_(pc.is_null(numbers), pc.and_(pc.is_valid(texts), pc.invert(means_missing)))
    return texts if pc.any(lost).as_py() else numbers


def _drop_empty(columns: list[pa.Array], names: list[str]) -> tuple[pa.Table, list[str]]:
    """Return the columns by name, without empty rows at the end and unnamed empty columns."""
    filled = [
        np.flatnonzero(pc.is_valid(cells).to_numpy(zero_copy_only=False)) for cells in columns
    ]
    num_rows = max((int(rows[-1]) + 1 for rows in filled if len(rows)), default=0)
    retained = {
        name or f"{UNNAMED}{i}": cells.slice(0, num_rows)
        for i, (name, cells, rows) in enumerate(zip(names, columns, filled, strict=True), start=1)
        if name or len(rows)
    }
    table = pa.Table.from_arrays(list(retained.values()), list(retained))
    return table, describe_dropped(len(columns) - len(retained), len(columns[0]) - num_rows)
