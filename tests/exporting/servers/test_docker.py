"""An export folder is a run that a container serves without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

import slipstream
from slipstream.exporting.servers.docker import PACKAGES, choose_packages, pin_packages
from slipstream.portable.model import load_portable
from slipstream.run_names import find_run
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
