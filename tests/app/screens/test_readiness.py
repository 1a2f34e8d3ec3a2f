"""Ready means ready: forms are compared with the data by the code of training."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream import config as configs
from slipstream.app.screens import prepare_rows
from slipstream.app.screens.prepare_rows import check_data
from slipstream.base.errors import UserError
from slipstream.data.dataset import load_dataset
from tests.app.conftest import start_site


def write_table(path, rows=400):
    lines = [f"{row},{math.sin(row / 5):.4f},{'ab'[row % 2]},{row // 50}" for row in range(rows)]
    path.write_text("time,load,site,cell\n" + "\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def ready_site(tmp_path_factory):
    """One site, whose reader process all tests here share."""
    folder = tmp_path_factory.mktemp("ready")
    write_table(folder / "load.csv")
    site, stop = start_site(folder)
    yield site
    stop()


FORM = {"data.path": "load.csv", "data.time": "time", "data.inputs": '["load"]'}
FORM |= {"data.targets": '["load"]', "data.context": "16", "data.horizon": "2"}


def test_a_form_that_fits_has_the_windows_of_training(ready_site):
    answer = ready_site.post("/api/ready", {"settings": FORM}).json
    config = configs.load(
        {
            "data": {
                "path": str(ready_site.workspace.folder / "load.csv"),
                "time": "time",
                "inputs": ["load"],
                "targets": ["load"],
                "context": 16,
                "horizon": 2,
            }
        }
    )
    assert answer["problems"] == {}
    assert answer["windows"] == load_dataset(config).num_windows
    assert (answer["rows"], answer["sample_rows"], answer["unchecked"]) == (400, None, "")


@pytest.mark.parametrize("api", ["/api/ready", "/api/search/ready", "/api/pretrain/ready"])
@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("data.inputs", '["load", "site"]', '"a" is not a number'),
        ("data.context", "900", 'series "load.csv" has 400 rows of the'),
        ("data.context", "300", "leaves no"),
        ("data.time", "site", "site"),
        ("data.inputs", '["load", "gone"]', "gone"),
    ],
)
def test_what_training_would_refuse_is_told_before(ready_site, api, setting, value, told):
    form = FORM | {setting: value}
    if "pretrain" in api:
        form = {
            key: one for key, one in form.items() if key not in ("data.targets", "data.horizon")
        }
    answer = ready_site.post(api, {"settings": form}).json
    assert told in " ".join(answer["problems"].values()), answer


def test_a_setting_that_a_message_names_is_a_button(ready_site):
    (ready_site.workspace.folder / "back.csv").write_text(
        "time,load\n" + "".join(f"{400 - row},{row % 7}\n" for row in range(400))
    )
    form = FORM | {"data.path": "back.csv"}
    answer = ready_site.post("/api/ready", {"settings": form}).json
    assert {"title": "Set data.unsorted = sort", "set": {"data.unsorted": "sort"}} in answer[
        "fixes"
    ]
    again = ready_site.post("/api/ready", {"settings": form | answer["fixes"][0]["set"]}).json
    assert again["problems"] == {}
    draft = {"settings": form, "steps": []}
    told = ready_site.post("/api/prepare/ready", {"draft": draft}).json
    assert "earlier than" in told["error"]
    assert told["fixes"][0]["title"] == "Set data.unsorted = sort"


def test_a_column_of_text_is_left_out_by_a_button(ready_site):
    form = FORM | {"data.inputs": '["load", "site"]'}
    (fix,) = ready_site.post("/api/ready", {"settings": form}).json["fixes"]
    assert fix == {"title": "Leave site out of data.inputs", "set": {"data.inputs": '["load"]'}}


def make_config(path, **data):
    roles = {"time": "time", "inputs": ["load"], "targets": ["load"], "context": 8, "horizon": 2}
    return configs.load({"data": {"path": path} | roles | data})


def check(config):
    return check_data(config, lambda _: None)


@pytest.fixture
def sampled(monkeypatch):
    """Files count as large, and a few rows are a sample."""
    monkeypatch.setattr(prepare_rows, "MAX_BYTES", 100)
    monkeypatch.setattr(prepare_rows, "SAMPLE_ROWS", 60)


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("data", [{}, {"id": "cell"}, {"split": {"walk_forward": 2}}])
def test_a_large_file_has_the_exact_windows_from_a_sample(tmp_path, form, data):
    path = write_table(tmp_path / "load.csv")
    if form == "parquet":
        rows = np.arange(400)
        columns = {"time": rows, "load": np.sin(rows / 5), "cell": rows // 50}
        path = str(tmp_path / "load.parquet")
        pq.write_table(pa.table(columns), path)
    config = make_config(path, **data)
    answer = check(config)
    dataset = load_dataset(config)
    folds = [fold.num_windows for fold in dataset.folds] or [dataset.num_windows]
    expected = {name: sum(fold[name] for fold in folds) for name in ("train", "val", "test")}
    assert answer["windows"] == expected
    assert (answer["rows"], answer["sample_rows"], answer["unchecked"]) == (400, 60, "")


@pytest.mark.usefixtures("sampled")
def test_a_large_file_is_refused_as_training_would(tmp_path):
    path = write_table(tmp_path / "load.csv")
    for data, told in (
        ({"inputs": ["load", "site"]}, '"a" is not a number'),
        ({"context": 900}, 'series "load.csv" has 400 rows of the 902 needed'),
        ({"context": 300}, "leaves no"),
        ({"id": "cell", "context": 60}, "has 50 rows of the 62 needed"),
    ):
        config = make_config(path, **data)
        with pytest.raises(UserError, match=told) as sample:
            check(config)
        with pytest.raises(UserError) as whole:
            load_dataset(config)
        assert str(sample.value).split(";")[0] == str(whole.value).split(";")[0]


@pytest.mark.usefixtures("sampled")
def test_what_a_sample_cannot_tell_is_said(tmp_path):
    path = write_table(tmp_path / "load.csv")
    answer = check(make_config(path, where={"site": "a"}))
    assert answer["windows"] is None
    assert "data.where selects rows: windows were not counted" in answer["unchecked"]
    classes = make_config(path, task="classify", targets=["site"], horizon=0)
    assert check(classes)["unchecked"] == ""
