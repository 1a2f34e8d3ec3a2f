"""What the terminal shows of measurements: how far they are, their tables, their verdicts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

NARROW = 110
WIDE = {"peak memory"}
"""Columns that a narrow terminal has no room for"""
SPREAD = re.compile(r" \([^)]* to [^)]*\)")

if TYPE_CHECKING:
    from rich.progress import Progress


class Meter:
    """How far a measurement is, on stderr: a bar on a terminal, else a line per case."""

    def __init__(self, quiet: bool) -> None:
        self.console = Console(stderr=True, highlight=False, quiet=quiet, soft_wrap=True)
        self.bar: Progress | None = None
        self.last = ""

    def __enter__(self) -> Meter:
        if self.console.is_terminal and not self.console.quiet:
            from rich import progress

            self.bar = progress.Progress(
                progress.BarColumn(),
                progress.TextColumn("{task.percentage:3.0f} % of the time"),
                progress.TextColumn("{task.description}"),
                console=self.console,
                auto_refresh=False,  # a thread that draws would be measured too
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
        if case != self.last:
            self.last = case
            self.say(f"measuring {case} ...")

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)


def show_bench(found: dict[str, Any], console: Console) -> None:
    """The tables of a measurement, as summary.md has them."""
    narrow = console.width < NARROW
    for table in found["tables"]:
        shown = Table(title=table["title"], title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        kept = [i for i, name in enumerate(table["headings"]) if not (narrow and name in WIDE)]
        for place in kept:
            justify: Literal["left", "right"] = "left" if place == 0 else "right"
            shown.add_column(f" {table['headings'][place]}", justify=justify, no_wrap=place == 0)
        missing = []
        for row in table["cells"]:
            if row[2:] and not any(row[2:]):
                missing.append(f"{row[0]}: {row[1]}")
                continue
            cells = [SPREAD.sub("", cell) if narrow else cell for cell in row]
            shown.add_row(*(f" {cells[place]}" for place in kept))
        console.print(shown)
        for line in missing:
            console.print(line, style="dim", markup=False)
        if table["note"]:
            console.print(table["note"], style="dim", markup=False)
        console.print()
    console.print(found["headline"], style="bold", markup=False)
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print(f"{found['seconds']:.0f} s; results: {found['folder']}", markup=False)
    if found["picture"]:
        console.print(f"picture: {found['picture']}", markup=False)


def show_profile(found: dict[str, Any], console: Console) -> None:
    """The verdict in words, then where the time goes, then the costliest operations."""
    for number, sentence in enumerate(found["sentences"]):
        console.print(sentence, style="bold" if number == 0 else None, markup=False)
    console.print()
    parts = Table(title="one step", title_justify="left")
    for heading in ("part", "ms", "share"):
        parts.add_column(heading, justify="left" if heading == "part" else "right")
    for part in found["parts"]:
        parts.add_row(part["part"], f"{part['ms']:.3g}", f"{part['share']:.0%}")
    console.print(parts)
    costly = Table(title="the costliest operations", title_justify="left")
    for heading in ("operation", "where", "calls a step", "ms a step"):
        costly.add_column(heading, justify="right" if "step" in heading else "left", no_wrap=True)
    for one in sorted(found["operations"], key=lambda row: -row["ms"])[:10]:
        costly.add_row(one["name"][:60], one["place"], f"{one['calls']:.3g}", f"{one['ms']:.3g}")
    console.print(costly)
    machine = found["machine"]
    if "power_w" in machine:
        console.print(
            f"GPU at {machine.get('clock_mhz', 0):.0f} MHz, {machine['power_w']:.0f} W, "
            f"{machine.get('temperature_c', 0):.0f} °C"
        )
    console.print(f"trace, operations, timeline: {found['folder']}", markup=False)
