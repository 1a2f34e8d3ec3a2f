"""Tables of runs: the list, one run, a comparison, and what was removed or copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slipstream.catalog.comparison import (
    Comparison,
    format_setting,
    tabulate_differences,
    tabulate_metrics,
    tabulate_paired,
    tabulate_settings,
)
from slipstream.catalog.listing import format_against, tabulate
from slipstream.catalog.rows import RunRow
from slipstream.reporting.formatting import format_metric, format_number, format_seconds
from slipstream.terminal.console import TextTable, create_progress_console, print_text
from slipstream.text import escape_to_line, format_count, format_epoch

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"running": "green", "stopped": "yellow", "damaged": "red"}
WRAPPED = {"data", "vs. baseline"}
"""Columns that give way on a narrow terminal"""
MIN_WIDTH = 8


def print_runs(rows: Sequence[RunRow], console: Console) -> None:
    """Print one line per run."""
    headings, cells = tabulate(rows)
    table = TextTable(box=None, pad_edge=False)
    for heading in headings:
        is_number = heading == "age" or heading.startswith("test")
        options: dict[str, Any] = {"no_wrap": True}
        if heading in WRAPPED:
            options = {"min_width": MIN_WIDTH, "overflow": "fold"}
        table.add_column(heading, justify="right" if is_number else "left", **options)
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*line, style=STYLES.get(row.state))
    console.print(table)
    for row in rows:
        if row.note and row.state != "stopped":  # of which there may be many
            print_text(console, f"{escape_to_line(row.name)}: {row.state}: {row.note}")


def print_run(details: dict[str, Any], row: RunRow, console: Console) -> None:
    """Print what a run is, how good it is, the settings that were chosen, and what to do next."""
    print_text(console, f"{row.name}: {row.kind}, {row.state}", "bold")
    facts = {
        "folder": str(row.run),
        "created": f"{row.at:%Y-%m-%d %H:%M} UTC",
        "data": row.data,
        "model": row.model and f"{row.model}" + (f", {row.repeats} repeats" * (row.repeats > 1)),
        "trained": _describe_training(row),
        "time": details["time"],
        "test": _describe_error(row),
        "verdict": details["verdict"],
        "note": row.note,
        "report": details["report"],
        "next": details["next"],
    }
    table = TextTable(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact:
            table.add_row(name, fact)
    console.print(table)
    settings = TextTable(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        settings.add_column(overflow="fold")
    for name, value in details["settings"].items():
        settings.add_row(name, format_setting(value))
    if details["settings"]:
        print_text(console, "\nsettings that differ from the defaults", "bold")
        console.print(settings)


def _describe_training(row: RunRow) -> str:
    epochs = (
        "" if row.epochs is None else f"{format_epoch(row.epochs)} epoch{'s' * (row.epochs != 1)}"
    )
    seconds = "" if row.seconds is None else format_seconds(row.seconds)
    return ", ".join(filter(None, (epochs, seconds)))


def _describe_error(row: RunRow) -> str:
    value, where = (row.test, "") if row.test is not None else (row.val, " on validation")
    if value is None or row.metric is None:
        return ""
    text = f"{format_metric(row.metric)} {format_number(value)}{where}"
    if row.baseline_error is None:
        return text
    return (
        f"{text}; the best baseline has {format_number(row.baseline_error)} ({format_against(row)})"
    )


def print_comparison(comparison: Comparison, page: str, console: Console) -> None:
    """Print the metrics side by side, the settings that differ, and the path of the page."""
    tables = {
        "test set; of repeats the mean over seeds, with its 95 % interval": tabulate_metrics,
        "difference from the first run, with its 95 % interval": tabulate_differences,
        "the same predicted rows, with 95 % intervals over windows": tabulate_paired,
        "settings that differ": tabulate_settings,
    }
    for title, tabulate_part in tables.items():
        headings, rows = tabulate_part(comparison)
        if rows:
            _print_table(title, headings, rows, console)
    for note in comparison.notes:
        print_text(console, f"note: {note}")
    print_text(console, f"curves: {page}")


def _print_table(title: str, headings: list[str], rows: list[list[str]], console: Console) -> None:
    table = TextTable(title=title)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@contextmanager
def show_bytes(is_quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Return a function that shows on a terminal how many of how many bytes are copied."""
    console = create_progress_console(is_quiet)
    if is_quiet or not console.is_terminal:
        yield None
        return
    from rich import progress

    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_copy(result: dict[str, Any], console: Console) -> None:
    """Say what was copied, and how to go on."""
    copied, files = result["copied_files"], format_count(result["files"], "file")
    where = escape_to_line(result["to"])
    if not copied:
        print_text(console, f"{where}: all {files} are there already")
    else:
        size = format_size(result["copied_bytes"])
        before = result["files"] - copied
        rest = f"; {before:,} were there already" if before else ""
        print_text(console, f"{format_count(copied, 'file')} ({size}) copied to {where}{rest}")


def format_size(num_bytes: int) -> str:
    """Format a number of bytes in a unit that gives a short number."""
    size, units = float(num_bytes), ["bytes", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:,.0f} {units[0]}"
