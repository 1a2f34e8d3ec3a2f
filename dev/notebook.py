"""Run examples/notebook.ipynb and store what it shows.

python dev/notebook.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
VERSION = 4


def execute(folder: str | Path) -> NotebookNode:
    """Return the notebook as it runs in a folder; the first error of a cell is raised."""
    notebook = nbformat.read(NOTEBOOK, as_version=VERSION)
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=1200, resources=resources, record_timing=False)
    client.execute()
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(execute(folder), NOTEBOOK)
    print(f"wrote {NOTEBOOK}")
