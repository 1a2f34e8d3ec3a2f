"""The example notebook: what it holds, and that it runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MAX_BYTES = 200_000
DEV: dict[str, Any] = runpy.run_path(str(ROOT / "dev" / "notebook.py"))


def list_outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def test_the_notebook_is_stored_with_what_it_shows():
    notebook = DEV["nbformat"].read(DEV["NOTEBOOK"], as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [one for one in list_outputs(notebook) if one.get("name") == "stderr"]
    assert any("<svg" in one.get("data", {}).get("text/html", "") for one in list_outputs(notebook))
    text = DEV["NOTEBOOK"].read_text(encoding="utf-8")
    assert len(text) < MAX_BYTES
    assert not re.search(r"/(tmp|home|root|Users|work)/", text)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(tmp_path):
    outputs = list_outputs(DEV["execute"](tmp_path))
    assert not [one for one in outputs if one.output_type == "error" or one.get("name") == "stderr"]
    texts = [one.get("data", {}).get("text/plain", "") for one in outputs]
    assert any("windows: 6,044 training" in text for text in texts)  # the progress
    assert any(text.startswith("Result of demand") for text in texts)
