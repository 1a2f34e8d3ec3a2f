"""The look: contrast of the colours in both themes, and what every page has in its HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import resources
from urllib.parse import quote

import pytest

from slipstream.app.app import ROUTES
from tests.app.conftest import Site, write_run
from tests.app.searches import write_search

STATIC = resources.files("slipstream.app").joinpath("static")
TEXT = ("ink", "muted", "blue", "orange", "green", "red")
"""Colours of texts"""
GROUNDS = ("card", "ground", "hover")
TINTS = {"own": ("ink", "blue"), "good": ("ink",), "warn": ("ink",), "bad": ("ink", "red")}
"""Grounds with a meaning, and the texts on them"""
LINES = tuple(f"c{number}" for number in range(1, 9))
NO_PAGES = ("/api/", "/static/", "/events", "/report/", "/download/")


def read_tokens(theme: str) -> dict[str, tuple[float, ...]]:
    """Return the colours of a theme, each as red, green and blue from 0 to 1."""
    text = STATIC.joinpath("app.css").read_text("utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", text, flags=re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", light))
    if theme == "dark":
        found |= dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", dark))
    return {
        name: tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4))
        for name, value in found.items()
    }


def compute_contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the contrast ratio of WCAG 2."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_a_contrast_of_four_and_a_half(theme):
    tokens = read_tokens(theme)
    pairs = [(text, ground) for ground in GROUNDS for text in TEXT]
    pairs += [(text, ground) for ground, texts in TINTS.items() for text in texts]
    pairs += [("on-blue", "blue"), ("ground", "ink")]
    ratios = {pair: compute_contrast(tokens[pair[0]], tokens[pair[1]]) for pair in pairs}
    assert {pair: round(ratio, 2) for pair, ratio in ratios.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_borders_and_focus_have_a_contrast_of_three(theme):
    tokens = read_tokens(theme)
    ratios = {name: compute_contrast(tokens[name], tokens["card"]) for name in LINES}
    ratios |= {name: compute_contrast(tokens[name], tokens["card"]) for name in ("edge", "focus")}
    assert {name: round(ratio, 2) for name, ratio in ratios.items() if ratio < 3} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_line_differs_in_brightness_from_the_one_with_a_similar_dash(theme):
    tokens = read_tokens(theme)
    for one, other in zip(LINES[:4], LINES[4:], strict=True):
        assert compute_contrast(tokens[one], tokens[other]) > 1.2, (one, other)


def test_stylesheets_use_the_tokens_for_colours():
    for file in STATIC.iterdir():
        if file.name.endswith(".css") and "uPlot" not in file.name:
            rules = re.sub(r":root \{.*?\}", "", file.read_text("utf-8"), flags=re.DOTALL)
            rules = rules.replace("#000", "")  # of masks and shadows
            assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;,) ])", rules) == [], file.name


class Audit(HTMLParser):
    """Collects what a page's HTML lacks."""

    CONTROLS = ("input", "select", "textarea", "button", "meter", "progress")

    def __init__(self) -> None:
        super().__init__()
        self.controls: list[dict[str, str]] = []
        self.labels: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self._open: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs} | {"tag": tag, "text": ""}
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag in self.CONTROLS and values.get("type") != "hidden":
            values["around"] = next(
                (one.get("at", "") for name, one in reversed(self._open) if name == "label"), ""
            )
            self.controls.append(values)
        if tag == "img":
            assert "alt" in values
        for name in ("style", "onclick"):
            assert name not in values, f"inline {name}: {values}"
        if tag == "label":
            values["at"] = str(len(self.labels))
            self.labels[values.get("for") or f"around {values['at']}"] = ""
        if tag not in ("input", "img", "meta", "link", "br", "hr"):
            self._open.append((tag, values))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag, values in self._open:
            values["text"] += data.strip()
            if tag == "label":
                key = values.get("for") or f"around {values['at']}"
                self.labels[key] += data.strip()
            if tag in ("title", "h1"):
                self.texts[tag] = values["text"]

    def list_unlabelled(self) -> list[dict[str, str]]:
        return [
            one
            for one in self.controls
            if not (
                one.get("aria-label")
                or one.get("aria-labelledby")
                or self.labels.get(one.get("id", "-"))
                or (one["around"] and self.labels.get(f"around {one['around']}"))
                or (one["tag"] == "button" and one["text"])
            )
        ]


def list_pages(run: str) -> list[str]:
    """Return the path of every page that needs no more than a run."""
    paths = [path for method, path, _ in ROUTES if method == "GET"]
    pages = [path.replace("{run:run}", quote(run)) for path in paths]
    return [path for path in pages if "{" not in path and not path.startswith(NO_PAGES)]


def test_every_page_has_a_title_a_heading_a_skip_link_and_labels(site: Site):
    write_run(site.workspace.folder / "runs", "job-1")
    write_run(site.workspace.folder / "runs", "job-2")
    write_search(site.workspace.folder / "runs", "job-3")
    pages = [*list_pages("runs/job-1"), "/compare?run=runs/job-1&run=runs/job-2", "/new?start=demo"]
    for path in dict.fromkeys([*pages, "/search/runs/job-3", "/search/new?start=demo"]):
        answer = site.get(path)
        if answer.status == 303:  # the page of a run of another kind
            continue
        audit = Audit()
        audit.feed(answer.text)
        assert audit.texts["title"].endswith("· Slipstream"), path
        assert audit.texts["h1"], path
        assert (audit.counts["h1"], audit.counts["main"], audit.counts["title"]) == (1, 1, 1), path
        assert 'class="skip" href="#main"' in answer.text, path
        assert audit.list_unlabelled() == [], path
