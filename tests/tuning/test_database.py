"""Databases that cannot be opened are told by what to do, never with a password."""

from __future__ import annotations

import sys

import pytest

import slipstream
from slipstream.errors import UserError
from slipstream.tuning import database
from tests.tuning.several import job


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("study.db", "is not the URL of a database; give sqlite:///FILE"),
        ("oracle9://h/d", "no driver for oracle9 is here; give sqlite"),
        ("sqlite:////nowhere/at/all/study.db", r"cannot be opened \(unable to open database file"),
    ],
)
def test_what_is_no_database_is_refused_before_a_folder_is_made(url, told, tmp_path):
    with pytest.raises(UserError, match=told):
        slipstream.tune(job(tmp_path), storage=url)
    assert not (tmp_path / "runs").exists()


def test_a_missing_driver_is_told_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(UserError, match=r"pip install 'slipstream\[postgres\]'") as error:
        database.open_storage("postgresql://me:secret@localhost/study")
    assert "secret" not in str(error.value)
    assert "me:***@localhost" in str(error.value)


def test_a_password_is_hidden_wherever_an_address_has_it():
    told = database.safe("postgresql://localhost/study?user=me&password=secret&sslmode=require")
    assert "secret" not in told
    assert "sslmode=require" in told


def test_a_file_that_is_no_database_is_told(tmp_path):
    (tmp_path / "study.db").write_text("notes\n" * 400)
    with pytest.raises(UserError, match=r"cannot be opened \(file is not a database"):
        database.open_storage(f"sqlite:///{tmp_path}/study.db")


def test_braces_in_a_path_are_part_of_it(tmp_path):
    folder = tmp_path / "{a}"
    folder.mkdir()
    database.open_storage(database.own_database(folder)).engine.dispose()
    assert (folder / "study.db").exists()


def test_a_search_in_a_database_goes_on_with_it_alone(tmp_path):
    url = f"sqlite:///{tmp_path}/several.db"
    found = slipstream.tune(job(tmp_path, trials=2), storage=url)
    assert found.summary["trials"]["finished"] == 2
    with pytest.raises(UserError, match=r"its study is in sqlite:.*several\.db; give that again"):
        slipstream.tune(resume=found.run)
    joined = slipstream.tune(job(tmp_path, trials=3), storage=url)
    assert joined.run != found.run
    assert joined.summary["trials"]["finished"] == 3
    assert [trial.number for trial in joined.study.trials] == [0, 1, 2]
