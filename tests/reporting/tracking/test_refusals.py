"""What cannot be followed is refused: no such tracker, a wrong place, a password."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import slipstream
from slipstream.base.errors import UserError
from slipstream.reporting.tracking.follower import follow
from slipstream.reporting.tracking.mlflow import take_password
from slipstream.runs import watching
from tests.conftest import small_config, waves
from tests.reporting.tracking.reading import read_scalars


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("runs"))
    return Path(slipstream.train(config, waves(), quiet=True).run)


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / trained.name))


@pytest.mark.parametrize("address", ["http://me:s3cret@host:5000", "https://:s3cret@host/a"])
def test_a_password_in_a_config_is_refused_and_not_shown(tmp_path, address):
    with pytest.raises(UserError, match=r"follow.out: holds a password") as caught:
        slipstream.train(small_config(tmp_path), overrides={"follow.out": address}, quiet=True)
    assert "s3cret" not in str(caught.value)


def test_a_password_in_an_address_goes_to_mlflows_variables(monkeypatch):
    for name in ("USERNAME", "PASSWORD"):
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "")
    assert take_password("http://me:s%2Fcret@host:5000/a") == "http://host:5000/a"
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "me"
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "s/cret"
    assert take_password("http://host:5000") == "http://host:5000"
    with pytest.raises(UserError, match="%2F") as caught:
        take_password("http://me:s/cret@host:5000")
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("to", "out", "message"),
    [
        ("excel", None, 'to="excel": is none of'),
        ("mlflow", None, "which server|mlflow is missing"),
        ("mlflow", "host:5000", "as http://HOST:PORT|mlflow is missing"),
        ("mlflow", "http://[host@", "is not an address"),
        ("tensorboard", "s3://bucket/board", "out is an address; tensorboard takes a folder"),
        ("wandb", "https://host", "out is an address; wandb takes a folder"),
    ],
)
def test_what_cannot_be_followed_is_refused(run, tmp_path, monkeypatch, to, out, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=message):
        slipstream.follow(run, to, out=out)
    assert [one.name for one in tmp_path.iterdir()] == [run.name]


def test_points_of_another_run_of_the_same_name_are_not_mixed_with_its_own(run, tmp_path):
    board = tmp_path / "board"
    other = Path(shutil.copytree(run, tmp_path / "other" / run.name))
    follow(run, "tensorboard", out=str(board))
    before = sorted(read_scalars(board / run.name))
    with pytest.raises(UserError, match="has points already"):
        follow(other, "tensorboard", out=str(board))
    assert sorted(read_scalars(board / run.name)) == before


def test_a_config_with_an_address_in_the_place_of_a_folder_is_refused(tmp_path):
    follow_ = {"follow.to": "tensorboard", "follow.out": "https://host/board"}
    with pytest.raises(UserError, match=r"follow\.out: is an address; tensorboard takes a folder"):
        slipstream.train(small_config(tmp_path), overrides=follow_, quiet=True)


def test_a_run_whose_tracker_is_not_installed_says_so_and_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(watching.EXTRAS, "wandb", "not_installed")
    told = []
    config = small_config(tmp_path / "runs", follow={"to": "wandb"})
    slipstream.train(config, waves(), on_event=told.append, quiet=True)
    (what,) = [one.what for one in told if isinstance(one, slipstream.events.Trouble)]
    assert "not_installed is missing" in what
    assert "pip install 'slipstream[wandb]'" in what
