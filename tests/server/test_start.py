"""What a server imports before it answers: each of these modules would make its start longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from tests.conftest import HUNG_S, small_config, waves

UNUSED = {
    *("torch", "pandas.core", "scipy", "rich", "psutil", "numpy.random", "pyarrow.parquet"),
    *("slipstream.cli.commands", "slipstream.engine", "slipstream.scoring", "slipstream.app"),
    *("slipstream.data.simulated.cell", "slipstream.models.forecaster", "slipstream.training"),
    *("slipstream.reporting.page", "slipstream.reporting.runs"),
    *("slipstream.reporting.terminal.progress", "slipstream.reporting.terminal.results"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(tmp_path_factory.mktemp("runs"), train={"epochs": 1})
    return slipstream.train(config, waves(400), quiet=True).run


def list_imports(run: Path, folder: Path) -> set[str]:
    """The modules that a server has imported by the time that it answers."""
    command = [sys.executable, "-X", "importtime", "-m", "slipstream", "serve", str(run)]
    with (folder / "imports").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--port", "0", "--quiet"], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://")
    finally:
        process.terminate()
        process.wait(HUNG_S)
        process.stdout.close()
    lines = (folder / "imports").read_text().splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


@pytest.mark.slow
def test_a_server_imports_nothing_that_it_does_not_use(run, tmp_path):
    modules = list_imports(run, tmp_path)
    assert {"onnxruntime", "slipstream.server.app"} < modules
    assert UNUSED & modules == set()


@pytest.mark.slow
def test_a_server_of_an_export_does_not_import_onnx(run, tmp_path):
    slipstream.export(run, to="onnx", out=tmp_path / "model", data=waves(60), quiet=True)
    modules = list_imports(tmp_path / "model", tmp_path)
    assert "onnxruntime" in modules
    assert {"onnx", *UNUSED} & modules == set()
