"""Pages that are made from something else are up to date, and links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["settings", "benchmarks", "api", "events"])
def test_a_page_that_is_made_is_up_to_date(name):
    made = runpy.run_path(str(ROOT / "dev" / f"{name}.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def find_missing(name: str) -> bool:
    """Whether `engine/loop` or `scoring/predict.build_table` names no module, folder or symbol."""
    path, _, symbol = name.removesuffix(".py").rstrip("/").partition(".")
    module = ROOT / "src" / "slipstream" / f"{path}.py"
    if not symbol:
        return not (module.exists() or module.with_suffix("").is_dir())
    words = re.findall(r"\w+", module.read_text(encoding="utf-8")) if module.exists() else []
    return not set(symbol.split(".")) <= set(words)


def test_the_architecture_names_modules_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([a-z_]+/[\w/.]*)`", text)) - {"tests/test_layers.py"}
    names = {name for name in names if not name.startswith("tests/")}
    assert len(names) > 50
    assert not [name for name in sorted(names) if find_missing(name)]


def list_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_to_a_heading(page):
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    targets = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links]
    missing = [
        f"{target.name}#{anchor}"
        for target, anchor in targets
        if target.suffix == ".md" and target.exists() and anchor not in list_anchors(target)
    ]
    assert not missing
