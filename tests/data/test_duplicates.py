"""A file that is read twice, under one name or two, is noted."""

from __future__ import annotations

import shutil

import pyarrow.parquet
import pytest

from slipstream import config as configs
from slipstream.data import dataset as datasets
from slipstream.inference import trained as new_data
from tests.conftest import waves


def load(path, *, engine=None, **data):
    paths = [str(each) for each in path] if isinstance(path, list) else str(path)
    settings = {"path": paths, "time": "time", "context": 8, "horizon": 2} | data
    return datasets.load_dataset(configs.load({"data": settings, "engine": engine or {}}))


@pytest.fixture
def folders(tmp_path):
    for seed, name in enumerate(("train", "val", "test")):
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(waves(80, seed=seed), tmp_path / name / "x.parquet")
    return tmp_path


@pytest.mark.parametrize("engine", [{}, {"home": "stream"}], ids=["memory", "stream"])
def test_the_same_file_in_two_sets_is_noted(folders, engine):
    found = load(folders, split={"folders": True}, engine=engine)
    assert found.notes == ()
    shutil.copy(folders / "train/x.parquet", folders / "test/other.parquet")
    found = load(folders, split={"folders": True}, engine=engine)
    assert found.notes == (
        '"train/x.parquet" has the same content as "test/other.parquet", so its rows are used '
        "twice",
    )


def test_files_of_one_size_and_different_content_are_not_noted(tmp_path):
    for name, value in (("x", 1), ("y", 2)):
        rows = "".join(f"{i:06},{(i * 7) % 11}\n" for i in range(20_000))
        (tmp_path / f"{name}.csv").write_text(
            f"time,a\n{rows}".replace("010000,7", f"010000,{value}")
        )
    assert load(tmp_path).notes == ()
    shutil.copy(tmp_path / "x.csv", tmp_path / "y.csv")
    assert len(load(tmp_path).notes) == 1


def test_a_path_that_is_named_twice_is_noted(folders):
    path = folders / "train/x.parquet"
    for paths in ([path, path], [path, folders / "val/../train/x.parquet"]):
        assert load(paths).notes == (
            '"x.parquet" is read twice: data.path names it more than once',
        )
    assert "read twice" in load([folders, path]).notes[0]


def test_copies_of_one_long_table_are_noted(folders):
    for name in ("val", "test"):
        shutil.copy(folders / "train/x.parquet", folders / name)
    assert len(load(folders, id="file").notes) == 2


def test_new_data_are_looked_at_too(folders):
    trained = load(folders, split={"folders": True})
    config = configs.load({"data": {"time": "time", "context": 8, "horizon": 2}})
    shutil.copy(folders / "train/x.parquet", folders / "test/x.parquet")
    for targets in (True, False):
        found = new_data.load_new_data(
            config, trained.signature, trained.scaler, folders, targets=targets
        )
        assert any("has the same content as" in note for note in found.notes)
