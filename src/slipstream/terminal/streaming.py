"""Both ways to use a model on a stream of rows, as tables and lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.reporting import streaming
from slipstream.terminal.console import TextTable, print_text
from slipstream.text import escape_to_line, format_count

if TYPE_CHECKING:
    from rich.console import Console


def print_stream(result: dict[str, Any], console: Console) -> None:
    title = f"{result['on']}: {format_count(result['windows'], 'window')}; {result['model']}"
    for heading, (headings, rows) in (
        (title, streaming.tabulate_regimes(result)),
        ("error by rows since the start of a series", streaming.tabulate_by_row(result)),
    ):
        table = TextTable(*headings, title=heading)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in streaming.describe_stream(result):
        print_text(console, line)
    for note in result["notes"]:
        print_text(console, f"note: {note}")
    if page := result.get("page"):
        print_text(console, f"page: {escape_to_line(page)}")
