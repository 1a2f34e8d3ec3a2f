"""Consoles and tables of rich that print text as text.

The names of columns, files and classes may look like rich's markup ("flow [/min]", ":warning:") or
contain control characters. Consoles are therefore created without markup and emoji codes, and cells
and lines are escaped and passed as `Text`, which rich does not interpret.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.base.text import escape_controls, escape_to_line
from slipstream.reporting.terminal.streams import SafeStream

if TYPE_CHECKING:
    from rich.progress import TextColumn

FILE_WIDTH = 120
"""Columns of a file or a pipe"""


def create_result_console() -> Console:
    """Create a console on stdout."""
    return _console(sys.stdout, width=None if sys.stdout.isatty() else FILE_WIDTH)


def create_progress_console(quiet: bool) -> Console:
    """Create a console on stderr; when stderr can no longer be written, output is dropped."""
    return _console(cast(TextIO, SafeStream(sys.stderr)), quiet=quiet)


def _console(file: TextIO, *, width: int | None = None, quiet: bool = False) -> Console:
    return Console(
        file=file,
        force_jupyter=False,
        width=width,
        quiet=quiet,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
    )


def render(content: RenderableType) -> str:
    """Render something as plain text."""
    console = _console(io.StringIO(), width=FILE_WIDTH)
    with console.capture() as capture:
        console.print(content)
    return capture.get()


def to_text(text: str, style: str = "") -> Text:
    """Make a cell that shows the text as it is, on one line."""
    return Text(escape_to_line(text), style=style)


def print_text(console: Console, text: str = "", style: str | None = None) -> None:
    """Print lines of text as they are."""
    console.print(Text(escape_controls(text)), style=style)


class TextTable(Table):
    """A table that shows text as it is; columns after the first of `headings` hold numbers."""

    def __init__(self, *headings: str, title: str | None = None, **options: Any) -> None:
        text = None if title is None else to_text(title, "table.title")
        super().__init__(title=text, title_justify="left", **options)
        for place, heading in enumerate(headings):
            self.add_column(heading, justify="right" if place else "left")

    def add_column(self, header: RenderableType = "", *arguments: Any, **options: Any) -> None:
        super().add_column(_as_text(header), *arguments, **options)

    def add_row(self, *renderables: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_as_text, renderables), **options)


def _as_text(cell: RenderableType | None) -> RenderableType:
    return to_text(cell or "") if cell is None or isinstance(cell, str) else cell


def create_text_column(template: str) -> TextColumn:
    """Create a column of a progress bar from the fields of its task."""
    from rich.progress import Task, TextColumn

    class PlainColumn(TextColumn):
        def render(self, task: Task) -> Text:
            return to_text(self.text_format.format(task=task))

    return PlainColumn(template, markup=False)
