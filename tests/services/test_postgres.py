"""Workers on a real PostgreSQL."""

from __future__ import annotations

import psutil
import pytest

import slipstream
from slipstream import tuning
from slipstream.errors import UserError
from slipstream.tuning.storage import database
from tests.tuning.searches import check_that_trials_of_a_killed_worker_are_retried, make_config

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


def test_the_password_comes_from_the_environment_and_is_in_no_list_and_no_file(
    postgres, tmp_path, monkeypatch
):
    config = make_config(tmp_path, trials=2).model_copy(update={"name": "quiet"})
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    commands = []

    def look(event):
        if event["event"] == "worker" and event["what"] == "started":
            commands.append(" ".join(psutil.Process(event["pid"]).cmdline()))

    url = postgres.replace(":s3cret@", "@")
    found = tuning.tune(config, storage=url, workers=2, watch=look)
    assert found.summary["trials"]["finished"] == 2
    assert len(commands) == 2
    assert "s3cret" not in "".join(commands)
    files = [path for path in found.run.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
