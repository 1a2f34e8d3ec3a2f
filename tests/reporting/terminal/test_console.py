from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import slipstream
from slipstream.reporting.terminal.console import (
    TextTable,
    create_result_console,
    create_text_column,
    print_text,
)

SOURCE = Path(slipstream.__file__).parent
MADE_HERE = SOURCE / "reporting" / "terminal" / "console.py"
TAKES_MARKUP = {"Console", "Table", "Text", "TextColumn", "Panel", "Prompt", "print", "inspect"}
"""Names of rich that read markup, or may be made so that they do"""
ODD = "a [/min] [bold]b :warning: \\[c] \x1b[2Jd"
SHOWN = "a [/min] [bold]b :warning: \\[c] \\x1b[2Jd"


def imported_from_rich(path: Path) -> set[str]:
    """What a module takes from rich to use it, not only to annotate."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    annotating = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rich"
        for alias in node.names
        if id(node) not in annotating
    }


MENTIONED = re.compile(r"\b(from rich|rich\.|import rich|progress\.)")


def test_only_one_module_makes_what_can_read_markup():
    # all others cannot import or name what is looked for, and need not be parsed
    paths = [path for path in SOURCE.rglob("*.py") if MENTIONED.search(path.read_text("utf-8"))]
    found = {
        str(path.relative_to(SOURCE)): names
        for path in paths
        if path != MADE_HERE and (names := imported_from_rich(path) & TAKES_MARKUP)
    }
    assert not found
    attributes = {
        f"{path.relative_to(SOURCE)}: {node.value.id}.{node.attr}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("rich", "progress")
        and node.attr in TAKES_MARKUP
    }
    assert not attributes


@pytest.mark.parametrize("markup", [True, False])
def test_titles_headings_cells_and_lines_are_text_on_any_console(markup):
    console = Console(file=io.StringIO(), width=200, markup=markup, emoji=markup)
    table = TextTable(title=f"title {ODD}")
    table.add_column(f"heading {ODD}")
    table.add_row(f"cell {ODD}\nbelow")
    console.print(table)
    print_text(console, f"line {ODD}\nnext")
    said = console.file.getvalue()
    for part in (f"title {SHOWN}", f"heading {SHOWN}", f"cell {SHOWN}\\nbelow", f"line {SHOWN}\n"):
        assert part in said
    assert "\x1b" not in said


def test_a_progress_bar_shows_text():
    from rich.progress import Progress

    console = Console(file=io.StringIO(), width=120)
    with Progress(create_text_column("{task.description}"), console=console) as bar:
        bar.add_task(ODD)
    assert SHOWN in console.file.getvalue()


def test_a_console_for_people_reads_no_markup(capsys):
    console = create_result_console()
    console.print("[bold]x[/min] :warning:")
    assert capsys.readouterr().out == "[bold]x[/min] :warning:\n"
