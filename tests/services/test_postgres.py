"""Workers on a real PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import sqlalchemy

import slipstream
from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.search import api, database
from slipstream.search.workers import SearchTask
from slipstream.workers.child import format_task
from tests.conftest import HUNG_S
from tests.logs import as_lines
from tests.search.searches import check_that_trials_of_a_killed_worker_are_retried, make_config

pytestmark = pytest.mark.services


def test_trials_of_a_killed_worker_are_retried_once(postgres, tmp_path):
    check_that_trials_of_a_killed_worker_are_retried(
        make_config(tmp_path, trials=7, epochs=20), postgres, tmp_path
    )


def test_a_second_machine_joins_the_study_and_both_conclude(postgres, tmp_path):
    config = make_config(tmp_path, trials=4).model_copy(update={"name": "joined"})
    first = slipstream.tune(config, storage=postgres, workers=2)
    assert first.summary["trials"] == {"finished": 4, "pruned": 0, "failed": 0}
    assert "s3cret" not in (first.run / "events.jsonl").read_text()
    second = slipstream.tune(config, storage=postgres)
    assert second.run != first.run
    assert second.summary["best"] == first.summary["best"]
    assert second.summary["trials"] == first.summary["trials"]


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [("s3cret", "w3ong", "password authentication failed"), ("/postgres", "/none", "not exist")],
)
def test_what_is_wrong_with_an_address_is_told_without_the_password(postgres, was, becomes, told):
    with pytest.raises(UserError, match=told) as error:
        database.open_storage(postgres.replace(was, becomes))
    assert "slip:***@127.0.0.1" in str(error.value)
    assert "s3cret" not in str(error.value)
    assert "w3ong" not in str(error.value)


def test_nobody_at_the_address_is_told():
    with pytest.raises(UserError, match=r"cannot open the database \(.*[Cc]onnection refused"):
        database.open_storage("postgresql://slip:s3cret@127.0.0.1:1/postgres")


def split(url):
    """The URL without its password, and the line of a pgpass file that has it."""
    address = sqlalchemy.make_url(url)
    line = f"{address.host}:{address.port}:{address.database}:{address.username}:s3cret\n"
    return url.replace(":s3cret@", "@"), line


def list_files_with(secret, folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if secret in path.read_bytes()]


@pytest.mark.parametrize("place", ["PGPASSWORD", "PGPASSFILE", "HOME", "SLIPSTREAM_STORAGE"])
def test_the_password_comes_from_the_environment_and_is_in_no_list_and_no_file(
    postgres, tmp_path, monkeypatch, place
):
    config = make_config(tmp_path, trials=2).model_copy(update={"name": f"quiet-{place}"})
    url, line = split(postgres)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".pgpass").write_text(line)
    (home / ".pgpass").chmod(0o600)
    places = {
        "PGPASSWORD": "s3cret",
        "PGPASSFILE": str(home / ".pgpass"),
        "HOME": str(home),
        "SLIPSTREAM_STORAGE": postgres,
    }
    monkeypatch.setenv(place, places[place])
    commands, environments = [], []

    def look(event):
        if event["event"] == "worker" and event["what"] == "started":
            process = psutil.Process(event["pid"])
            commands.append(" ".join(process.cmdline()))
            environments.append(
                {name for name, value in process.environ().items() if "s3" in value}
            )

    storage = None if place == "SLIPSTREAM_STORAGE" else url
    found = api.tune(config, storage=storage, workers=2, watch=as_lines(look))
    assert found.summary["trials"]["finished"] == 2
    assert len(commands) == 2
    assert "s3cret" not in "".join(commands)
    given = {place} if "s3cret" in places[place] else set()
    assert set().union(*environments) <= given, "only where the user has put it"
    assert not list_files_with(b"s3cret", found.run)


def test_a_password_in_the_command_is_warned_of_and_written_nowhere(postgres, tmp_path):
    config = make_config(tmp_path, trials=2).model_copy(update={"name": "warned"})
    (tmp_path / "job.toml").write_text(configs.to_toml(config))
    address = sqlalchemy.make_url(postgres)
    url = f"postgresql://{address.host}:{address.port}/postgres?user=slip&password=s3cret"
    command = [sys.executable, "-m", "slipstream", "tune", "job.toml", "--storage", url]
    with subprocess.Popen(
        [*command, "--workers", "2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    ) as process:
        seen = {}
        while process.poll() is None:
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        seen[child.pid] = f"{child.cmdline()} {child.environ()}"
            time.sleep(0.05)
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert len(seen) >= 2
    assert b"set the URL in SLIPSTREAM_STORAGE, or the password in PGPASSWORD" in errors
    assert "s3cret" not in f"{output}{errors}{seen}"
    assert not list_files_with(b"s3cret", tmp_path)


def test_a_worker_that_crashes_writes_no_password(postgres, tmp_path):
    folder = tmp_path / "worker"
    task = SearchTask(
        folder=str(folder),
        index=0,
        config_toml=configs.to_toml(make_config(tmp_path)),
        storage_url=postgres,
        study_name=None,  # which nobody passes: a bug
        parallel="x",
    )
    command = [sys.executable, "-m", "slipstream.workers"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdin.write(format_task(task) + "\n")
        process.stdin.flush()
        assert process.wait(HUNG_S) == 1  # with stdin open: it stops where its parent is gone
        output = process.stdout.read() + process.stderr.read()
    assert "Traceback" in output
    assert "s3cret" not in output
    assert not list_files_with(b"s3cret", tmp_path)


def test_a_pgpass_file_that_others_can_read_is_not_used(postgres, tmp_path, monkeypatch):
    """As libpq has it: the server is asked without a password, and says so."""
    url, line = split(postgres)
    (tmp_path / "pgpass").write_text(line)
    (tmp_path / "pgpass").chmod(0o644)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
    with pytest.raises(UserError, match="no password supplied"):
        database.open_storage(url)
