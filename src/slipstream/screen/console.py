"""All that rich prints is made here, so that text is printed as text.

The names of columns, files and classes may look like rich's own markup ("flow [/min]", ":warning:")
or hold what a terminal obeys. Consoles are therefore made without markup and emoji codes, and cells
and lines are escaped and handed over as `Text`, which rich does not look into.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.screen.streams import Unfailing
from slipstream.text import on_one_line, printable

if TYPE_CHECKING:
    from rich.progress import TextColumn

ROOM = 120
"""Columns of a file or a pipe, which have no width of their own"""


def for_results() -> Console:
    """A console on stdout."""
    return _console(sys.stdout, width=None if sys.stdout.isatty() else ROOM)


def for_progress(quiet: bool) -> Console:
    """A console on stderr; where that takes nothing any more, work goes on without."""
    return _console(cast(TextIO, Unfailing(sys.stderr)), quiet=quiet)


def _console(file: TextIO, *, width: int | None = None, quiet: bool = False) -> Console:
    return Console(
        file=file,
        width=width,
        quiet=quiet,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
    )


def plain(text: str, style: str = "") -> Text:
    """A cell that shows the text as it is, on one line."""
    return Text(on_one_line(text), style=style)


def say(console: Console, text: str = "", style: str | None = None) -> None:
    """Print lines of text as they are."""
    console.print(Text(printable(text)), style=style)


class TextTable(Table):
    """A table whose title, headings and cells show text as it is."""

    def __init__(self, *, title: str | None = None, **options: Any) -> None:
        shown = None if title is None else plain(title, "table.title")
        super().__init__(title=shown, title_justify="left", **options)

    def add_column(self, header: RenderableType = "", *given: Any, **options: Any) -> None:
        super().add_column(_as_text(header), *given, **options)

    def add_row(self, *renderables: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_as_text, renderables), **options)


def _as_text(cell: RenderableType | None) -> RenderableType:
    return plain(cell or "") if cell is None or isinstance(cell, str) else cell


def text_column(template: str) -> TextColumn:
    """A column of a progress bar, filled with the fields of its task."""
    from rich.progress import Task, TextColumn

    class Plain(TextColumn):
        def render(self, task: Task) -> Text:
            return plain(self.text_format.format(task=task))

    return Plain(template, markup=False)
