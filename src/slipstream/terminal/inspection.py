"""Shows what files hold: columns with a small plot each, problems, and a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.reporting.formatting import format_number, format_step
from slipstream.terminal.console import TextTable, print_text
from slipstream.text import format_count

if TYPE_CHECKING:
    from rich.console import Console

MAX_FILES, MAX_COLUMNS, MAX_PROBLEMS = 8, 60, 30
MEGABYTE = 1e6


def print_inspection(result: dict[str, Any], console: Console) -> None:
    """Print files, columns, problems and the config."""
    rows, columns = result["rows"], len(result["columns"])
    head = f"{format_count(rows, 'row')}, {format_count(columns, 'column')}, {result['series']}"
    print_text(console, f"{result['path']}: {head}", "bold")
    _print_files(result["files"], console)
    if result["time"]:
        print_text(console, describe_time(result["time"]), "dim")
    _print_columns(result["columns"], console)
    problems = result["problems"]
    if problems:
        print_text(console)
        print_text(console, format_count(len(problems), "remark"), "bold")
    for one in problems[:MAX_PROBLEMS]:
        where = f"{one['column']}: " if one["column"] else ""
        print_text(console, f"- {where}{one['message']}")
    if len(problems) > MAX_PROBLEMS:
        print_text(console, f"- {len(problems) - MAX_PROBLEMS} more: --json or --html")
    print_text(console)
    if "written" in result:
        print_text(console, f"wrote {result['written']}; train with: {result['command']}", "bold")
    else:
        print_text(console, "a config to begin with (--write job.toml)", "bold")
        print_text(console, result["toml"].rstrip("\n"))
    if "page" in result:
        print_text(console, f"page: {result['page']}")


def _print_files(files: list[dict[str, Any]], console: Console) -> None:
    for file in files[:MAX_FILES]:
        size = f"{file['bytes'] / MEGABYTE:,.1f} MB, " if file["bytes"] else ""
        rows = format_count(file["rows"], "row")
        print_text(console, f"{file['name']}: {file['format']}, {size}{rows}", "dim")
    if len(files) > MAX_FILES:
        print_text(console, format_count(len(files) - MAX_FILES, "more file"), "dim")


def _print_columns(columns: list[dict[str, Any]], console: Console) -> None:
    table = TextTable(box=None, pad_edge=False)
    table.add_column("column", no_wrap=True)
    table.add_column("type", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("range", no_wrap=True)
    table.add_column("missing", justify="right", no_wrap=True)
    table.add_column("course", no_wrap=True)
    for one in columns[:MAX_COLUMNS]:
        share = f"{format_number(100 * one['missing'])} %" if one["missing"] else ""
        cells = one["name"], one["type"], one["unit"], one["role"], describe_range(one), share
        table.add_row(*cells, one.get("course", ""))
    print_text(console)
    console.print(table)
    if len(columns) > MAX_COLUMNS:
        more = format_count(len(columns) - MAX_COLUMNS, "more column")
        print_text(console, f"{more}: --json or --html")


def describe_time(time: dict[str, Any]) -> str:
    """Describe the time of the rows: from, to, step and gaps."""
    names = ", ".join(time["time_columns"])
    is_date = isinstance(time["first"], str)
    step = time["step"]
    every = "" if step is None else f", every {format_step(step, is_date)}"
    gaps = format_count(time["gaps"], "gap") if time["gaps"] else "no gaps"
    first, last = (one if is_date else f"{one:.6g}" for one in (time["first"], time["last"]))
    return f"time: {names}, {first} to {last}{every}, {gaps}"


def describe_range(column: dict[str, Any]) -> str:
    """Describe the values of a column in few characters."""
    if "first" in column and column["type"] == "time":
        return f"{str(column['first'])[:10]} to {str(column['last'])[:10]}"
    if "low" in column:
        return f"{column['low']:.5g} to {column['high']:.5g}"
    if column.get("distinct") is not None:
        return format_count(column["distinct"], "text")
    return "many texts" if column["type"] == "text" else ""
