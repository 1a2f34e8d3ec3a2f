"""Progress and results of benchmarks and profiles."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from rich import box

from slipstream.terminal import console as consoles
from slipstream.terminal.console import TextTable, print_text
from slipstream.text import format_number

NARROW = 110
OPTIONAL = {"peak memory"}
"""Columns that a narrow terminal leaves out"""
SPREAD = re.compile(r" \([^)]* to [^)]*\)")

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class ProgressMeter:
    """Shows the progress of a measurement on stderr: a bar on a terminal, else a line per case."""

    def __init__(self, quiet: bool) -> None:
        self.console = consoles.create_progress_console(quiet)
        self.bar: Progress | None = None
        self.last_case = ""

    def __enter__(self) -> ProgressMeter:
        if self.console.is_terminal and not self.console.quiet:
            from rich import progress

            self.bar = progress.Progress(
                progress.BarColumn(),
                consoles.create_text_column("{task.percentage:3.0f} % of the time"),
                consoles.create_text_column("{task.description}"),
                console=self.console,
                auto_refresh=False,  # a drawing thread would disturb the measurement
                transient=True,
            )
            self.bar.add_task("", total=1.0)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, what: str, share: float) -> None:
        if self.bar:
            self.bar.update(self.bar.tasks[0].id, completed=share, description=what)
            self.bar.refresh()
            return
        case = what.partition(":")[0]
        if case != self.last_case:
            self.last_case = case
            self.say(f"measuring {case} ...")

    def say(self, text: str) -> None:
        print_text(self.console, text, "dim")


def print_bench(result: dict[str, Any], console: Console) -> None:
    """Print the tables of a measurement as in summary.md."""
    narrow = console.width < NARROW
    for table in result["tables"]:
        output = TextTable(title=table["title"], box=box.SIMPLE_HEAD, padding=0)
        headings = table["headings"]
        columns = [i for i, name in enumerate(headings) if not (narrow and name in OPTIONAL)]
        for place in columns:
            justify: Literal["left", "right"] = "right" if place else "left"
            output.add_column(f" {headings[place]}", justify=justify, no_wrap=place == 0)
        missing = []
        for row in table["cells"]:
            if row[2:] and not any(row[2:]):
                missing.append(f"{row[0]}: {row[1]}")
                continue
            cells = [SPREAD.sub("", cell) if narrow else cell for cell in row]
            output.add_row(*(f" {cells[place]}" for place in columns))
        console.print(output)
        for line in missing:
            print_text(console, line, "dim")
        if table["note"]:
            print_text(console, table["note"], "dim")
        print_text(console)
    print_text(console, result["headline"], "bold")
    for note in result["notes"]:
        print_text(console, f"note: {note}")
    print_text(console, f"{result['seconds']:.0f} s; results: {result['folder']}")
    if result["picture"]:
        print_text(console, f"picture: {result['picture']}")


def print_profile(result: dict[str, Any], console: Console) -> None:
    """Print the verdict, the parts of a step and the costliest operations."""
    for number, sentence in enumerate(result["sentences"]):
        print_text(console, sentence, "bold" if number == 0 else None)
    print_text(console)
    parts = TextTable("part", "ms", "share", title="one step")
    for part in result["parts"]:
        parts.add_row(part["part"], format_number(part["ms"], figures=3), f"{part['share']:.0%}")
    console.print(parts)
    costly = TextTable(title="costliest operations")
    for heading in ("operation", "where", "calls a step", "ms a step"):
        costly.add_column(heading, justify="right" if "step" in heading else "left", no_wrap=True)
    for one in sorted(result["operations"], key=lambda row: -row["ms"])[:10]:
        costly.add_row(
            one["name"][:60],
            one["place"],
            format_number(one["calls"], figures=3),
            format_number(one["ms"], figures=3),
        )
    console.print(costly)
    machine = result["machine"]
    if "power_w" in machine:
        clock, heat = machine.get("clock_mhz", 0), machine.get("temperature_c", 0)
        print_text(console, f"GPU at {clock:.0f} MHz, {machine['power_w']:.0f} W, {heat:.0f} °C")
    print_text(console, f"trace, operations, timeline: {result['folder']}")
