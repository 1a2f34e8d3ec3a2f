"""What a terminal shows of a probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.screen.console import TextTable, say
from slipstream.text import on_one_line

if TYPE_CHECKING:
    from rich.console import Console


def show_probe(found: dict[str, Any], console: Console) -> None:
    from slipstream.reporting import probe_headings, probe_rows, seconds

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
    say(console, found["verdict"])
    spent = found["encoder"]["seconds"]
    say(console, f"{seconds(found['seconds'])} in all, {seconds(spent)} of it to pre-train")
    say(console, f"run: {on_one_line(found['run'])}\nreport: {on_one_line(found['report'])}")
