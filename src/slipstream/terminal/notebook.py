"""What a notebook shows: progress, as one output that grows by lines and ends with a live one, and
a small loss curve as inline SVG."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.events import Epoch
from slipstream.terminal.console import render
from slipstream.text import escape_controls

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH, HEIGHT, MARGIN = 360, 120, 18
TRAINING, VALIDATION = "#9ca3af", "#2563eb"


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


def draw_losses(history: Sequence[Epoch]) -> str:
    """Draw training and validation losses over epochs, one line a model; empty without losses."""
    losses = [loss for one in history for loss in (one.train_loss, one.val_loss)]
    values = [loss for loss in losses if _is_drawn(loss)]
    if len(history) < 2 or not values:
        return ""
    low, high = math.log(min(values)), math.log(max(values))
    last = max(one.epoch for one in history)
    first = min(one.epoch for one in history)

    def place(epoch: float, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (epoch - first) / ((last - first) or 1.0)
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (math.log(loss) - low) / ((high - low) or 1.0)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for lane in sorted({one.lane or 0 for one in history}):
        mine = [one for one in history if (one.lane or 0) == lane]
        for name, colour in (("train_loss", TRAINING), ("val_loss", VALIDATION)):
            pairs = [(one.epoch, getattr(one, name)) for one in mine]
            points = " ".join(place(*pair) for pair in pairs if _is_drawn(pair[1]))
            lines.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
    best = min((one.val_loss for one in history if _is_drawn(one.val_loss)), default=math.nan)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="loss curve">{"".join(lines)}'
        f'<text x="{MARGIN}" y="12" font-size="11" fill="{TRAINING}">training loss</text>'
        f'<text x="{MARGIN + 84}" y="12" font-size="11" fill="{VALIDATION}">validation, best '
        f"{best:.4g}</text>"
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 4}" font-size="11" fill="{TRAINING}" '
        f'text-anchor="end">epoch {last:g}</text></svg>'
    )


def _is_drawn(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss) and loss > 0
