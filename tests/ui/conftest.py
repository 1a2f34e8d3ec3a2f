"""The app as a user has it: the command, a browser, and workers that train."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.app.jobs import OPEN, JobStore

CHROMIUM = next(
    (path for path in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(path).exists()),
    None,
)
WAIT_MS = 180_000
"""Beyond this something hangs; how long it takes is not tested"""


class App:
    """`slipstream ui` on a folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "slipstream", "ui", str(self.folder), "--no-browser"]
        self.process = subprocess.Popen(
            [*command, *self.options], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.root = self.url.partition("/?")[0]

    def kill(self, number: int = signal.SIGKILL) -> int:
        os.kill(self.process.pid, number)
        code = self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        return code

    def end(self) -> None:
        """Stop the server and every job and worker of its folder."""
        if self.process.returncode is None:
            self.kill(signal.SIGTERM)
        store = JobStore(self.folder)
        for job in store.list_recent():
            store.cancel(job.id)
            if job.state in OPEN and job.pid:
                os.kill(job.pid, signal.SIGTERM)
        while any(job.state in OPEN for job in store.list_recent()):
            time.sleep(0.05)

    def find_run(self) -> Path:
        (run,) = (self.folder / "runs").glob("*-*Z")
        return run

    def read_metrics(self, run: Path) -> dict[str, Any]:
        return json.loads((run / "metrics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("Chromium is missing; install it: apt install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing; install it: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab whose scripts must not fail."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        f"2024-01-{1 + hour // 24:02d} {hour % 24:02d}:00,"
        f"{math.sin(hour / 4):.4f},{math.cos(hour / 9):.4f}"
        for hour in range(600)
    ]
    (tmp_path / "load.csv").write_text("\n".join(["time,load,wind", *rows]) + "\n")
    return tmp_path


@pytest.fixture
def app(folder: Path) -> Iterator[App]:
    app = App(folder)
    yield app
    app.end()


def fill(page: Any, values: dict[str, str]) -> None:
    """Fill in settings of a form, also those that are folded away."""
    for setting, value in values.items():
        control = page.locator(f"#set-{setting.replace('.', '-')}")
        if not control.is_visible():
            page.locator("details.advanced", has=control).locator("summary").click()
        if control.evaluate("node => node.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
