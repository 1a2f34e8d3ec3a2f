"""An export folder is a run that a container serves without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import httpx
import pyarrow.parquet
import pytest

import slipstream
from slipstream import UserError
from slipstream.base.run_names import find_run
from slipstream.exporting.standalone import PACKAGES, choose_packages, pin_packages
from slipstream.inference.portable import load_portable
from slipstream.server.api import read_graph
from tests.conftest import HUNG_S, close
from tests.exporting.small_runs import compare_predictions, train_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    slipstream.export(train_run(folder, "lstm"), to="onnx", out=folder / "out")
    return folder / "out"


def test_an_onnx_export_predicts_as_the_run_does(exported, folder):
    run, data = train_run(folder, "lstm"), folder / "lstm.parquet"
    compare_predictions(slipstream.predict(exported, data), slipstream.predict(run, data))


def test_the_container_has_all_pinned_packages_but_not_torch(exported):
    lines = (exported / "requirements.txt").read_text().splitlines()
    names = {line.partition("==")[0] for line in lines}
    assert all("==" in line for line in lines)
    assert names >= {"onnxruntime", "pyarrow", "starlette", "uvicorn", "h11", "pydantic-core"}
    assert not names & {"torch", "matplotlib", "optuna", "scipy", "onnx"}
    text = (exported / "Dockerfile").read_text()
    assert f"slipstream=={slipstream.__version__}" in text
    assert 'CMD ["slipstream", "serve", "/model", "--host", "0.0.0.0"' in text


SERVE = """
import sys
blocked = set(sys.argv[1].split(","))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not in requirements.txt", name=name)

sys.meta_path.insert(0, Blocker())
sys.argv = ["slipstream", "serve", sys.argv[2], "--port", "0"]
from slipstream.cli import main
main()
"""


@pytest.mark.slow
def test_the_export_is_served_with_the_pinned_packages_alone(exported, folder):
    lines = (exported / "requirements.txt").read_text().splitlines()
    allowed = {"slipstream", *(line.partition("==")[0] for line in lines)}
    blocked = [
        name
        for name, packages in metadata.packages_distributions().items()
        if not {one.lower().replace("_", "-") for one in packages} & allowed
    ]
    assert "torch" in blocked
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, ",".join(blocked), str(exported)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        table = pyarrow.parquet.read_table(folder / "lstm.parquet").slice(0, 20)
        answer = httpx.post(f"{url}/predict", json=table.to_pylist(), timeout=HUNG_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert answer.status_code == 200, answer.text
    wanted = slipstream.predict(exported, table)["c_predicted"].to_pylist()
    close([one["c_predicted"] for one in answer.json()["predictions"]], wanted)


def test_a_damaged_graph_is_refused(exported, tmp_path):
    copy = shutil.copytree(exported, tmp_path / "copy")
    assert read_graph(load_portable(copy)) == (exported / "model.onnx").read_bytes()
    with (copy / "model.onnx").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="is damaged"):
        read_graph(load_portable(copy))


def test_what_filters_import_is_there_where_the_run_has_one(exported):
    without = load_portable(exported)
    filtered = load_portable(
        exported, overrides=["predict.filter.kind=ema", "predict.filter.rows=3"]
    )
    assert choose_packages(without) == PACKAGES
    assert "scipy" in choose_packages(filtered)


def test_a_package_that_is_not_installed_has_no_version():
    assert pin_packages(("no-such-package-anywhere",)) == ["no-such-package-anywhere"]


def test_an_export_beside_the_runs_is_not_the_last_run(folder):
    run = train_run(folder, "lstm")
    slipstream.export(run, to="onnx", out=run.parent / "export")
    assert find_run(run.parent / "last") == run
    assert find_run(run.parent / "export") == run.parent / "export"
