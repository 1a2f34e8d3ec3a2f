"""What a terminal shows of a probe."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show_probe(found: dict[str, Any], console: Console) -> None:
    from slipstream.reporting import probe_headings, probe_rows, seconds

    windows = found["windows"]
    table = Table(
        title=f"{found['name']}: test set, {windows['test']:,} windows; {windows['train']:,} "
        f"training windows, {len(found['seeds'])} seeds",
        title_justify="left",
    )
    table.add_column("")
    for heading in probe_headings(found):
        table.add_column(heading, justify="right")
    for row in probe_rows(found):
        style = "bold" if row["name"] == "fine-tuned" else None
        table.add_row(row["name"], *row["cells"], style=style)
    console.print(table)
    console.print(found["verdict"])
    spent = found["encoder"]["seconds"]
    console.print(f"{seconds(found['seconds'])} in all, {seconds(spent)} of it to pre-train")
    console.print(f"run: {found['run']}\nreport: {found['report']}", markup=False)
