"""What a terminal shows of a probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.terminal.console import TextTable, print_text
from slipstream.text import escape_to_line

if TYPE_CHECKING:
    from rich.console import Console


def print_probe(found: dict[str, Any], console: Console) -> None:
    from slipstream.reporting import format_seconds, probe_headings, probe_rows

    windows = found["windows"]
    table = TextTable(
        title=f"{found['name']}: test set, {windows['test']:,} windows; {windows['train']:,} "
        f"training windows, {len(found['seeds'])} seeds",
    )
    table.add_column("")
    for heading in probe_headings(found):
        table.add_column(heading, justify="right")
    for row in probe_rows(found):
        style = "bold" if row["name"] == "fine-tuned" else None
        table.add_row(row["name"], *row["cells"], style=style)
    console.print(table)
    print_text(console, found["verdict"])
    spent = found["encoder"]["seconds"]
    print_text(
        console,
        f"{format_seconds(found['seconds'])} in all, {format_seconds(spent)} of it to pre-train",
    )
    print_text(
        console, f"run: {escape_to_line(found['run'])}\nreport: {escape_to_line(found['report'])}"
    )
