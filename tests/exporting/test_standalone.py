"""A run reduced to what predicting needs predicts the same."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest

import slipstream
from slipstream.config import Engine
from slipstream.exporting.standalone import strip_config, write_standalone
from slipstream.inference.portable import load_portable
from tests.conftest import small_config, waves
from tests.exporting.small_runs import compare_predictions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    pyarrow.parquet.write_table(waves(240), path / "waves.parquet")
    return path


@pytest.fixture(scope="module")
def joined(folder: Path) -> Path:
    """An ensemble of two repeats and another kind with a longer context."""
    members = [
        slipstream.train(
            small_config(
                folder / "runs",
                data={"path": str(folder / "waves.parquet"), "context": context},
                model={"kind": kind},
                train={"epochs": 1, "repeats": repeats},
            )
        )
        for kind, context, repeats in (("mlp", 16, 2), ("linear", 20, 1))
    ]
    return slipstream.ensemble(members, out=folder / "joined").run


@pytest.mark.parametrize("ensemble", [None, False])
def test_an_ensemble_predicts_as_it_did_with_the_members_that_were_chosen(
    joined, folder, tmp_path, ensemble
):
    write_standalone(load_portable(joined, ensemble=ensemble), tmp_path)
    data = folder / "waves.parquet"
    wanted = slipstream.predict(joined, data, every=True, ensemble=ensemble)
    compare_predictions(slipstream.predict(tmp_path, data, every=True), wanted)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or str(folder).encode() not in path.read_bytes(), path


def test_a_config_loses_paths_and_devices():
    join = {"step": "join", "path": "/home/me/weather.csv", "time": "time", "label": "end"}
    config = small_config(
        "/home/me/runs",
        data={"path": ["/home/me/a.csv", "/home/me/b.csv"], "prepare": [join]},
    )
    stripped = strip_config(config)
    assert stripped.data.path == ("a.csv", "b.csv")
    assert stripped.data.prepare[0].path == "weather.csv"
    assert stripped.engine == Engine()
    assert "/home/me" not in stripped.model_dump_json()
    assert stripped.model == config.model
