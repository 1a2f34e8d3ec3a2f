"""What `follow` shows: the number of points as they are sent, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slipstream.terminal.console import create_progress_console, print_text
from slipstream.text import escape_to_line, format_count

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def show_points(is_quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """Return a function that shows the number of points on stderr."""
    if is_quiet:
        yield None
        return
    with create_progress_console(is_quiet).status("reading the log") as status:
        yield lambda points: status.update(f"{format_count(points, 'point')} sent")


def print_followed(result: dict[str, Any], console: Console) -> None:
    points = format_count(result["points"], "point")
    print_text(console, f"{points} sent to {escape_to_line(result['where'])}")
    if not result["finished"]:
        print_text(
            console, "the run has stopped before its end; follow it again once it is resumed"
        )
