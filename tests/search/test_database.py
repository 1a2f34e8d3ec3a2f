"""Databases that cannot be opened are told by what to do, never with a password."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

import slipstream
from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.cli.commands import app
from slipstream.search import database
from tests.base.test_passwords import LEAKY, SECRET
from tests.search.searches import make_config


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("study.db", "is not the URL of a database; use journal:FILE, sqlite:///"),
        ("oracle9://h/d", "the driver for oracle9 is not installed; use sqlite"),
        (
            "sqlite:////nowhere/at/all/study.db",
            r"cannot open the database \(unable to open database file",
        ),
    ],
)
def test_what_is_no_database_is_refused_before_a_folder_is_made(url, told, tmp_path):
    with pytest.raises(UserError, match=told):
        slipstream.tune(make_config(tmp_path), storage=url)
    assert not (tmp_path / "runs").exists()


def test_a_missing_driver_is_told_by_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(UserError, match=r"pip install 'slipstream\[postgres\]'") as error:
        database.open_storage("postgresql://me:secret@localhost/study")
    assert "secret" not in str(error.value)
    assert "me:***@localhost" in str(error.value)


def test_a_file_that_is_no_database_is_told(tmp_path):
    (tmp_path / "study.db").write_text("notes\n" * 400)
    with pytest.raises(UserError, match=r"cannot open the database \(file is not a database"):
        database.open_storage(f"sqlite:///{tmp_path}/study.db")


def test_braces_in_a_path_are_part_of_it(tmp_path):
    folder = tmp_path / "{a}"
    folder.mkdir()
    database.open_storage(database.make_run_database_url(folder)).engine.dispose()
    assert (folder / "study.db").exists()


@pytest.mark.slow
def test_a_search_in_a_database_goes_on_with_it_alone(tmp_path):
    url = f"sqlite:///{tmp_path}/several.db"
    found = slipstream.tune(make_config(tmp_path, trials=2), storage=url)
    assert found.summary["trials"]["finished"] == 2
    with pytest.raises(UserError, match=r"its study is in sqlite:.*several\.db; with"):
        slipstream.tune(resume=found.run)
    joined = slipstream.tune(make_config(tmp_path, trials=3), storage=url)
    assert joined.run != found.run
    assert joined.summary["trials"]["finished"] == 3
    assert [trial.number for trial in joined.study.trials] == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_database_in_memory_is_refused_before_anything_trains(tmp_path, workers):
    with pytest.raises(UserError, match="is a database in memory"):
        slipstream.tune(make_config(tmp_path), storage="sqlite:///", workers=workers)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_database_may_be_named_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_STORAGE", "sqlite:///several.db")
    found = slipstream.tune(make_config(tmp_path, trials=2))
    assert (tmp_path / "several.db").exists()
    assert not (found.run / "study.log").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("SLIPSTREAM_STORAGE", f"sqlite:///{tmp_path}/several.db")
    monkeypatch.chdir(tmp_path / "elsewhere")
    more = slipstream.tune(resume=found.run, overrides=("tune.trials=3",))
    assert more.summary["trials"]["finished"] == 3
    monkeypatch.delenv("SLIPSTREAM_STORAGE")
    with pytest.raises(
        UserError,
        match=r"SLIPSTREAM_STORAGE, or resume with: slipstream.tune\(resume=.*, storage=URL\)",
    ):
        slipstream.tune(resume=found.run)


def test_a_search_with_a_journal_does_not_begin_anew_elsewhere(tmp_path, monkeypatch):
    found = slipstream.tune(make_config(tmp_path, trials=2))
    with pytest.raises(UserError, match=r"study\.log, not in sqlite.* leave out storage"):
        slipstream.tune(resume=found.run, storage=f"sqlite:///{tmp_path}/other.db")
    monkeypatch.setenv("SLIPSTREAM_STORAGE", f"sqlite:///{tmp_path}/other.db")
    assert slipstream.tune(resume=found.run).summary["trials"]["finished"] == 2
    assert not (tmp_path / "other.db").exists()


def test_a_password_in_the_command_is_warned_of_and_not_repeated(tmp_path):
    (tmp_path / "job.toml").write_text(configs.to_toml(make_config(tmp_path)))
    url = f"sqlite:///{tmp_path}/study.db?password=s3cret"
    command = ["tune", str(tmp_path / "job.toml"), "--storage", url, "--json"]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 2
    assert "see in the process list; set the URL in SLIPSTREAM_STORAGE" in answer.stderr
    assert "cannot open the database" in json.loads(answer.stdout)["error"]
    assert "s3cret" not in answer.output + answer.stderr


def test_a_damaged_database_of_a_run_is_named_before_the_search_goes_on(tmp_path):
    database.open_storage(database.make_run_database_url(tmp_path)).engine.dispose()
    database.check_integrity(tmp_path)
    path = tmp_path / "study.db"
    content = path.read_bytes()
    for bad in (content[: len(content) // 2], content[:8192] + b"\0" * 4096 + content[12288:]):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"study\.db: is damaged \(.*restore it from a backup"):
            database.check_integrity(tmp_path)


@pytest.mark.parametrize("url", LEAKY)
def test_no_message_about_a_database_shows_a_secret(url):
    with pytest.raises(UserError) as error:
        database.open_storage(url).engine.dispose()
    assert SECRET not in str(error.value)
    assert error.value.__cause__ is None


@pytest.mark.parametrize("url", ["postgresql://bob:pw@h:abc/db", "postgresql://h:5x/db"])
def test_a_port_that_is_no_number_is_a_mistake_of_the_user(url):
    with pytest.raises(UserError, match="with a numeric PORT"):
        database.parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///file::memory:?cache=shared&uri=true",
        "sqlite:///file:x?mode=memory&uri=true",
    ],
)
def test_a_database_in_memory_is_refused(url):
    with pytest.raises(UserError, match=r"in memory.*name a file: sqlite:///FILE"):
        database.refuse_in_memory(url)


def test_a_relative_database_is_the_same_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = database.make_absolute("sqlite:///study.db")
    assert database.parse_url(found).database == str(tmp_path / "study.db")
    assert database.make_absolute(found) == found
    elsewhere = "postgresql://bob@h/db"
    assert database.make_absolute(elsewhere) == elsewhere


def test_the_password_of_the_environment_goes_to_workers_that_do_not_share_it(monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "p@ss")
    assert database.parse_url(database.add_password("postgresql://bob@h/db")).password == "p@ss"
    for url in ("postgresql://bob:own@h/db", "postgresql://h/db?password=own", "sqlite:///a.db"):
        assert database.add_password(url) == url
