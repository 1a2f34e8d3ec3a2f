"""MATLAB files: version 4 to 7.2 by `mat_files`; 7.3, tables and datetimes through mat-io."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.data.io.csv import summarize_error
from slipstream.data.io.formats.mat_files import DamagedError, find_byte_order, read_mat_file
from slipstream.data.io.formats.mat_values import (
    MatColumns,
    describe,
    find_variable,
    get_fields,
    is_table,
    list_content,
    select_columns,
    to_arrow,
    to_columns,
)
from slipstream.data.io.options import ReadOptions
from slipstream.data.io.table import DataTable, wrap_table
from slipstream.errors import UserError

HDF5 = b"\x89HDF\r\n\x1a\n"
USER_BLOCK = 512
"""Bytes before the HDF5 data of version 7.3"""
INSTALL = 'pip install "slipstream[matlab]"'
MOST_NAMES = 5


def read_matlab(path: Path, name: str, head: bytes, options: ReadOptions) -> DataTable | None:
    """Read a variable's fields as columns: the one that is named, or the only one there is.

    None where the file needs mat-io, which `read_objects` uses, in a process of its own.
    """
    version = _find_version(path, head)
    if version == "7.3":
        _require_matio(path, "is a MATLAB 7.3 file, which is HDF5")
        return None
    try:
        read = read_mat_file(path, version)
    except DamagedError as error:
        raise _explain(path, error) from None
    except MemoryError:
        raise _explain(path, DamagedError("it needs more memory than there is")) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if read.has_objects:
        _require_matio(path, "holds tables, datetimes or other objects of MATLAB")
        return None
    return _make_table(path, name, version, read.values, options)


def read_objects(path: Path, name: str, options: ReadOptions) -> list[DataTable]:
    """Read a file of version 7.3, or one with tables and other objects, as one table.

    Called in a process of its own (`isolated`): a damaged file can end it.
    """
    with path.open("rb") as file:
        version = _find_version(path, file.read(USER_BLOCK + len(HDF5)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about options of pandas, formats of durations
        import matio

        try:
            values = matio.load_from_mat(str(path), add_table_attrs=True)
        except Exception as error:  # what a damaged file raises has no type of its own
            raise _explain(path, error) from None
    named = {key: value for key, value in values.items() if not key.startswith("__")}
    return [_make_table(path, name, version, named, options)]


def _require_matio(path: Path, what: str) -> None:
    if find_spec("matio") is None:
        raise UserError(f"{path}: {what}; to read it: {INSTALL}")


def _make_table(
    path: Path, name: str, version: str, values: dict[str, Any], options: ReadOptions
) -> DataTable:
    variable, read = _choose(path, values, options.variable)
    notes = [f"left out: {', '.join(read.left_out[:MOST_NAMES])}"] if read.left_out else []
    if len(read.left_out) > MOST_NAMES:
        notes[0] += f" and {len(read.left_out) - MOST_NAMES} more"
    if read.scalars:
        listed = ", ".join(read.scalars[:MOST_NAMES])
        more = f" and {len(read.scalars) - MOST_NAMES} more" * (len(read.scalars) > MOST_NAMES)
        notes.append(
            f"one value for all rows, no input unless data.inputs names it: {listed}{more}"
        )
    details = [f"MATLAB {version}", *([f"variable {variable}"] if variable else [])]
    return wrap_table(
        to_arrow(read.columns),
        name,
        path=path,
        format=", ".join(details),
        units=read.units,
        scalars=read.scalars,
        notes=tuple(notes),
    )


def _find_version(path: Path, head: bytes) -> str:
    """Return the version of the format; other files are refused."""
    if head[USER_BLOCK:].startswith(HDF5):
        return "7.3"
    if head.startswith(HDF5):
        raise UserError(
            f"{path}: is an HDF5 file, but none of MATLAB's; save it in MATLAB, or export it as "
            "CSV or Parquet"
        )
    if find_byte_order(head) is not None or head.startswith(b"MATLAB 5"):
        return "5"
    if head[:4] == b"PK\x03\x04" or b"\0" not in head:
        what = "a ZIP or Excel file" if head.startswith(b"PK") else "a text file"
        ending = ".zip or .xlsx" if head.startswith(b"PK") else ".csv"
        raise UserError(f"{path}: is {what}, not a MATLAB file; rename it to {ending}")
    return "4"


def _explain(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path}: cannot be read as a MATLAB file: {summarize_error(error)}; save it again in "
        "MATLAB, or export it as CSV or Parquet"
    )


def _choose(path: Path, values: dict[str, Any], variable: str | None) -> tuple[str, MatColumns]:
    """Return the name and the columns of a variable; without a name, of the file's vectors."""
    content = f"it holds {list_content(values)}" if values else "it holds no variable"
    if variable is not None:
        try:
            value = find_variable(values, variable)
        except KeyError:
            raise UserError(f'{path}: has no "{variable}" (data.variable); {content}') from None
        read = to_columns(value, variable.rpartition(".")[2])
        if read is None:
            fields = get_fields(value)
            inside = f"it holds {list_content(fields)}" if fields else f"it is {describe(value)}"
            raise UserError(
                f'{path}: "{variable}" (data.variable) has no columns, which are vectors of equal '
                f"length; {inside}"
            )
        return variable, read
    tables = {
        name: read
        for name, value in values.items()
        if (is_table(value) or getattr(getattr(value, "dtype", None), "names", None))
        and (read := to_columns(value)) is not None
    }
    if len(tables) == 1:
        ((name, read),) = tables.items()
        others = [f"{n} ({describe(v)})" for n, v in values.items() if n != name]
        return name, read._replace(left_out=(*read.left_out, *others))
    vectors = {name: value for name, value in values.items() if name not in tables}
    read = _read_vectors(vectors) if not tables else None
    if read is None:
        raise UserError(
            f"{path}: set data.variable to what holds the columns, as in "
            f'"{next(iter(tables or values), "meas")}"; {content}'
        )
    return "", read


def _read_vectors(values: dict[str, Any]) -> MatColumns | None:
    """Return the columns of a file without a struct; nothing if it has structs without columns."""
    if any(get_fields(value) is not None for value in values.values()) or not values:
        return None
    return select_columns(values)
