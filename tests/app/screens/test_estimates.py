"""How long a job takes and how much memory, before it starts."""

from __future__ import annotations

import pytest

import slipstream
from slipstream import config as configs
from slipstream import runs
from slipstream.app.screens.estimates import estimate_job
from slipstream.app.workspace import Workspace
from tests.conftest import KINDS, waves

SETTINGS = {
    "data.path": "waves.csv",
    "data.time": "time",
    "data.context": "16",
    "data.horizon": "4",
    "model.kind": "mlp",
    "model.hidden": "8",
    "train.epochs": "2",
    "train.batch": "32",
    "engine.device": "cpu",
}


def write_table(folder):
    waves(400).to_pandas().to_csv(folder / "waves.csv", index=False)


def make_config(folder, **values):
    settings = {**SETTINGS, "data.path": str(folder / "waves.csv"), "out": str(folder / "runs")}
    return configs.load({}, [f"{key}={value}" for key, value in (settings | values).items()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("app").resolve()
    write_table(folder)
    result = slipstream.train(make_config(folder), quiet=True)
    return folder, runs.read_metrics(result.run)


@pytest.mark.parametrize("kind", KINDS)
def test_without_earlier_runs_it_is_a_guess(tmp_path, kind):
    config = make_config(tmp_path, **{"model.kind": kind})
    answer = estimate_job(Workspace(tmp_path, warm=False), config, 400, 3)
    assert "guess" in answer["basis"]
    for low, high in (answer["seconds"], answer["bytes"]):
        assert 0 < low < high


def test_an_earlier_run_of_the_machine_makes_it_precise(trained):
    folder, summary = trained
    workspace = Workspace(folder, warm=False)
    answer = estimate_job(workspace, make_config(folder), 400, 3)
    assert answer["parameters"] == summary["parameters"]
    assert answer["steps"] == summary["steps"]
    assert answer["windows"] == summary["windows"]["train"]
    assert "one earlier run" in answer["basis"]
    longer = estimate_job(workspace, make_config(folder, **{"train.epochs": 200}), 400, 3)
    assert longer["steps"] == 100 * answer["steps"]
    assert longer["seconds"][1] > answer["seconds"][1]
    limited = {"train.epochs": 100_000, "train.minutes": 1}
    assert estimate_job(workspace, make_config(folder, **limited), 400, 3)["seconds"][1] < 600


def test_the_rows_of_data_that_were_trained_on_are_known(trained):
    folder, summary = trained
    answer = estimate_job(Workspace(folder, warm=False), make_config(folder), 0, 3)
    assert answer["windows"] == summary["windows"]["train"]


def test_what_cannot_be_estimated_says_so(tmp_path):
    workspace = Workspace(tmp_path, warm=False)
    unread = estimate_job(workspace, make_config(tmp_path), 0, 0)
    own = estimate_job(workspace, make_config(tmp_path, **{"model.kind": "nets:Net"}), 10, 1)
    assert "not read yet" in unread["basis"]
    assert "your own" in own["basis"]


def test_the_page_asks_for_it(site):
    write_table(site.workspace.folder)
    body = {"settings": SETTINGS, "rows": 400, "numbers": 3}
    assert site.post("/api/estimate", body).json["seconds"]
    wrong = {"settings": SETTINGS | {"train.lr": "-1"}, "rows": 400, "numbers": 3}
    assert site.post("/api/estimate", wrong).json == {}
    assert site.post("/api/estimate", body | {"rows": "many"}).status == 400
