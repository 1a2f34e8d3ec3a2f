"""Progress in a notebook: one output that grows by lines and ends with a live one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from slipstream.terminal.console import render
from slipstream.text import escape_controls

if TYPE_CHECKING:
    from rich.console import RenderableType


def is_notebook() -> bool:
    """Whether the code runs in a kernel, whose front end replaces outputs instead of a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookOutput:
    """The lines so far, and below them what changes."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._handle: Any = None

    def say(self, text: str) -> None:
        self._lines.append(escape_controls(text))
        self._show(self._lines)

    def draw(self, live: RenderableType) -> None:
        """Show something of rich's below the lines; `say` removes it."""
        self._show([*self._lines, render(live).rstrip()])

    def clear(self) -> None:
        """Remove what changes."""
        self._show(self._lines)

    def _show(self, lines: list[str]) -> None:
        from IPython.display import display

        content = {"text/plain": "\n".join(line.rstrip() for line in lines)}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
