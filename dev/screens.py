"""Take pictures of every screen of the app: 1,400 and 400 pixels wide, light and dark.

    python dev/screens.py PICTURES [--project FOLDER] [--only NAME ...] [--readme]

The first time it trains two short runs and a small search (CPU, about a minute) in the project's
folder, which is PICTURES/project unless named; later it uses those. `--readme` also takes the two
pictures of README.md, docs/images/ui-result.png and docs/images/ui-compare.png. Needs Playwright
and Debian's Chromium.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Browser, sync_playwright

CHROMIUM = "/usr/bin/chromium"
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SIZES = {"wide": (1400, 900), "phone": (400, 800)}
THEMES = ("light", "dark")
SETTLE_MS = 1500
"""For requests and charts, after a page has loaded"""
SHORT = ("--set", "train.epochs=6", "--set", "engine.device=cpu", "--quiet")
JOBS = {
    "demo": ("train", *SHORT),
    "gru": ("train", *SHORT, "--set", "name=gru", "--set", "model.kind=gru", "--set", "seed=1"),
    "search": (
        *("tune", "--quiet", "--set", "engine.device=cpu", "--set", "train.epochs=3"),
        *("--set", "tune.trials=4", "--set", "tune.retrain=1"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--project", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    project = (options.project or options.pictures / "project").resolve()
    prepare_project(project)
    options.pictures.mkdir(parents=True, exist_ok=True)
    screens = {
        name: path
        for name, path in list_screens(project).items()
        if not options.only or name in options.only
    }
    with run_app(project) as url, open_browser() as browser:
        take_pictures(browser, url, screens, options.pictures)
        if options.readme:
            take_readme(browser, url, list_screens(project))


def prepare_project(project: Path) -> None:
    """Write a small data file, and train what is missing."""
    project.mkdir(parents=True, exist_ok=True)
    rows = [
        f"2024-01-{1 + hour // 24:02d} {hour % 24:02d}:00,"
        f"{math.sin(hour / 4):.4f},{math.cos(hour / 9):.4f}"
        for hour in range(600)
    ]
    (project / "load.csv").write_text("\n".join(["time,load,wind", *rows]) + "\n", encoding="utf-8")
    for name, command in JOBS.items():
        if not find_runs(project, name):
            subprocess.run([sys.executable, "-m", "slipstream", *command], cwd=project, check=True)


def find_runs(project: Path, name: str) -> list[str]:
    return sorted(str(path.relative_to(project)) for path in (project / "runs").glob(f"{name}-*Z*"))


def list_screens(project: Path) -> dict[str, str]:
    """Return the path of every screen; a screen that does not exist is left out later."""
    demo, gru, search = (quote(find_runs(project, name)[0]) for name in JOBS)
    return {
        "home": "/",
        "data": "/data",
        "prepare": "/prepare",
        "new": "/new?start=demo",
        "run": f"/run/{demo}",
        "result": f"/result/{demo}",
        "compare": f"/compare?run={demo}&run={gru}",
        "search-new": "/search",
        "search-run": f"/run/{search}",
        "pretrain": "/pretrain",
        "what-if": "/what-if",
        "missing": "/run/no-such-run",
    }


@contextmanager
def run_app(project: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "slipstream", "ui", str(project)]
    process = subprocess.Popen(
        [*command, "--no-browser", "--no-warm-worker"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


@contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def take_pictures(browser: Browser, url: str, screens: dict[str, str], to: Path) -> None:
    for theme in THEMES:
        for size, (width, height) in SIZES.items():
            page = open_page(browser, url, theme, (width, height))
            for name, path in screens.items():
                if show(page, url, path) or name == "missing":
                    page.screenshot(path=to / f"{name}-{size}-{theme}.png", full_page=True)
                    wide = page.evaluate("document.documentElement.scrollWidth")
                    print(f"{name}-{size}-{theme}.png" + (f" IS {wide} WIDE" * (wide > width)))
            page.context.close()


def open_page(browser: Browser, url: str, theme: Any, size: tuple[int, int]) -> Any:
    """Return a tab that has the app's cookie."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=theme, device_scale_factor=1
    )
    page = context.new_page()
    page.on("pageerror", lambda error: print("SCRIPT ERROR", page.url, error))
    page.goto(url)
    return page


def show(page: Any, url: str, path: str) -> bool:
    """Open a screen; False where there is none."""
    answer = page.goto(url.partition("/?")[0] + path)
    page.wait_for_timeout(SETTLE_MS)
    return bool(answer and answer.ok)


def take_readme(browser: Browser, url: str, screens: dict[str, str]) -> None:
    """Take the two pictures of README.md: a result and a comparison, light."""
    IMAGES.mkdir(exist_ok=True)
    page = open_page(browser, url, "light", (1280, 1120))
    for name in ("result", "compare"):
        show(page, url, screens[name])
        page.screenshot(path=IMAGES / f"ui-{name}.png")
        print(IMAGES / f"ui-{name}.png")
    page.context.close()


if __name__ == "__main__":
    main()
