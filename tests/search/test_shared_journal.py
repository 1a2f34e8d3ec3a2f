"""A journal that several processes write to, and are killed at."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from typer.testing import CliRunner

import slipstream
from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.cli.commands import app
from slipstream.search import sharing
from slipstream.search import storage as shared
from tests.conftest import HUNG_S
from tests.search.searches import check_that_trials_of_a_killed_worker_are_retried, make_config

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")
WRITER = """
    import sys, warnings, optuna
    from slipstream.search import storage as shared
    url, count = sys.argv[1], int(sys.argv[2])
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    storage, sampler = shared.open_storage(url), optuna.samplers.RandomSampler()
    study = optuna.create_study(
        study_name="s", storage=storage, sampler=sampler, load_if_exists=True
    )
    for _ in range(count):
        trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
        trial.set_user_attr("notes", "n" * 9000)  # several pages, which a kill may separate
        study.tell(trial, trial.params["x"])
        print(trial.number, trial.params["x"], flush=True)  # acknowledged
"""


@pytest.fixture
def url(tmp_path):
    return f"journal:{tmp_path}/study.log"


def start_writer(url: str, count: int, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), url, str(count)]
    with output.open("ab") as stdout:
        return subprocess.Popen(command, stdout=stdout)


def load_trials(url: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="s", storage=shared.open_storage(url)).trials


def read_acknowledged(*outputs: Path) -> dict[int, float]:
    lines = [line for one in outputs for line in one.read_bytes().split(b"\n")[:-1]]
    numbers = Counter(int(line.split()[0]) for line in lines)
    assert max(numbers.values()) == 1, "a trial went to two processes"
    return {int(line.split()[0]): float(line.split()[1]) for line in lines}


@pytest.mark.slow
def test_two_writers_lose_nothing_when_one_is_killed(url, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    with start_writer(url, 30, one) as lasting, start_writer(url, 10_000, other) as killed:
        while other.read_bytes().count(b"\n") <= 5:
            assert killed.poll() is None
            time.sleep(0.01)
        time.sleep(random.random() / 20)
        killed.kill()
        killed.wait()
        assert lasting.wait(HUNG_S) == 0
    known = read_acknowledged(one, other)
    trials = load_trials(url)
    assert {number: trials[number].value for number in known} == known
    assert len(trials) - len(known) <= 1, "one trial was under way"
    assert not (tmp_path / "study.log.lock").exists() or len(trials) > len(known)
    optuna.load_study(study_name="s", storage=shared.open_storage(url)).set_user_attr("after", 1)
    stock = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    assert len(stock.get_all_trials(0)) == len(trials)
    assert stock.get_study_user_attrs(0) == {"after": 1}


def make_study(url: str) -> optuna.Study:
    study = optuna.create_study(study_name="s", storage=shared.open_storage(url))
    study.enqueue_trial({"x": 0.5})
    study.tell(study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}), 0.25)
    return study


def test_a_line_that_a_kill_cut_off_is_ignored_and_then_removed(url, tmp_path):
    study, path = make_study(url), tmp_path / "study.log"
    content = path.read_bytes()
    other = optuna.load_study(study_name="s", storage=shared.open_storage(url))
    last = content.splitlines(keepends=True)[-1]
    for length in (1, 20, len(last) - 1):
        with path.open("ab") as file:
            file.write(last[:length])
        assert len(other.trials) == len(study.trials)
        study.set_user_attr("length", length)
        assert other.user_attrs == {"length": length}
        assert last[:length] + b"{" not in path.read_bytes()
    assert path.read_bytes().startswith(content)
    assert [json.loads(line) for line in path.read_bytes().splitlines()]


def test_what_a_full_disk_cut_off_is_removed_at_once(url, tmp_path):
    resource = pytest.importorskip("resource", reason="this system limits no file sizes")
    study, path = make_study(url), tmp_path / "study.log"
    content = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 30, hard))
    try:
        with pytest.raises(StorageInternalError, match=r"No space left|File too large"):
            study.set_user_attr("key", "value" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == content
    study.set_user_attr("key", "value")
    assert not (tmp_path / "study.log.lock").exists()


def test_a_damaged_line_is_named_instead_of_trials_being_confused(url, tmp_path):
    make_study(url)
    path = tmp_path / "study.log"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"0.5", b"0.6") + b"".join(lines[2:]))
    content = path.read_bytes()
    with pytest.raises(UserError, match=r"study\.log: line 2 is damaged; restore the file"):
        shared.open_storage(url)
    assert path.read_bytes() == content


def test_a_journal_that_was_removed_is_not_begun_anew(url, tmp_path):
    study = make_study(url)
    (tmp_path / "study.log").unlink()
    with pytest.raises(StorageInternalError, match="No such file"):
        study.ask()
    (tmp_path / "study.log").write_bytes(b"")
    with pytest.raises(StorageInternalError, match="has become shorter; was it replaced"):
        study.set_user_attr("a", 1)


def test_the_lock_of_a_killed_process_is_taken_over(url, tmp_path):
    study = make_study(url)
    (tmp_path / "study.log.lock").touch()
    study._storage._backend.lock.grace_period = 0.1
    study.set_user_attr("after", 1)
    assert study.user_attrs == {"after": 1}
    assert not (tmp_path / "study.log.lock").exists()


def test_the_lock_of_an_earlier_version_is_removed(url, tmp_path):
    make_study(url)
    (tmp_path / "study.log.lock").symlink_to("machine:1:1:1")
    optuna.load_study(study_name="s", storage=shared.open_storage(url)).set_user_attr("after", 1)
    assert not (tmp_path / "study.log.lock").is_symlink()


def test_a_writer_that_was_suspended_loses_neither_its_line_nor_its_study(url):
    """Others have taken its lock for that of a dead process, and released it."""
    study = make_study(url)
    journal = study._storage._backend
    release = journal.lock.release

    def release_twice() -> None:
        release()
        release()

    journal.lock.release = release_twice
    study.set_user_attr("after", 1)
    assert study.user_attrs == {"after": 1}


def test_a_search_is_shared_by_a_journal_and_resumed_without_naming_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = slipstream.tune(make_config(tmp_path, trials=2), storage="journal:several.log")
    assert first.summary["trials"]["finished"] == 2
    assert not (first.run / "study.log").exists()
    second = slipstream.tune(
        make_config(tmp_path, trials=3), storage=f"journal://{tmp_path}/several.log"
    )
    assert second.run != first.run
    assert [trial.number for trial in second.study.trials] == [0, 1, 2]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    more = slipstream.tune(resume=first.run, overrides=("tune.trials=4",))
    assert more.summary["trials"]["finished"] == 4
    (tmp_path / "several.log").unlink()
    with pytest.raises(UserError, match=r"several\.log, which does not exist here; if it was"):
        slipstream.tune(resume=first.run, overrides=("tune.trials=5",))


@pytest.mark.slow
def test_a_resumed_search_stays_with_its_study_whatever_the_environment_names(
    tmp_path, monkeypatch
):
    config = make_config(tmp_path, trials=2)
    found = slipstream.tune(config, storage=f"journal:{tmp_path}/several.log")
    monkeypatch.setenv("SLIPSTREAM_STORAGE", f"journal:{tmp_path}/another.log")
    more = slipstream.tune(resume=found.run, overrides=("tune.trials=3",))
    assert more.summary["trials"]["finished"] == 3
    assert not (tmp_path / "another.log").exists()
    in_database = slipstream.tune(config, storage=f"sqlite:///{tmp_path}/several.db")
    with pytest.raises(UserError, match=r"is in sqlite:.*several\.db, and not in .*another\.log"):
        slipstream.tune(resume=in_database.run, overrides=("tune.trials=3",))


def test_what_is_no_place_for_a_journal_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "job.toml").write_text(configs.to_toml(make_config(tmp_path)))
    (tmp_path / "text").write_text("a,b\n1,2\n3,4")
    (tmp_path / "empty run").mkdir()
    (tmp_path / "empty run" / "events.jsonl").touch()
    before = sorted(tmp_path.rglob("*"))
    for name, why in {
        "": "names no file; use journal:/shared/study.log",
        "//host/study.log": "names no file",
        f"{tmp_path}": "is a folder; name a file in it",
        f"{tmp_path}/none/study.log": f"the folder {tmp_path}/none does not exist; create it",
        f"{tmp_path}/text": "is not a journal of a study; name another file",
        f"{tmp_path}/empty run/study.log": "which writes to it alone; name another file",
        "/proc/study.log": "cannot be written (No such file or directory)",
    }.items():
        command = ["tune", str(tmp_path / "job.toml"), "--storage", f"journal:{name}", "--json"]
        answer = CliRunner().invoke(app, command)
        assert answer.exit_code == 2, name
        assert why in json.loads(answer.stdout)["error"]
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "text").read_text() == "a,b\n1,2\n3,4"


def test_links_to_one_journal_share_its_lock(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert shared.make_absolute(f"journal:{tmp_path}/link/a.log") == (
        f"journal:{tmp_path}/real/a.log"
    )


def test_heartbeats_of_finished_trials_are_forgotten(url, tmp_path):
    storage = shared.open_storage(url)
    study = optuna.create_study(study_name="s", storage=storage)
    trials = [study.ask(), study.ask()]
    for trial in trials:
        storage.record_heartbeat(trial._trial_id)
    study.tell(trials[0], 1.0)
    assert storage._get_stale_trial_ids(study._study_id) == []
    heartbeats = tmp_path / "study.log.heartbeats"
    assert sorted(one.name for one in heartbeats.iterdir()) == ["1", "clock"]


@pytest.mark.slow
def test_two_workers_share_a_journal(tmp_path, url):
    found = slipstream.tune(make_config(tmp_path, trials=4), storage=url, workers=2)
    assert found.summary["trials"] == {"finished": 4, "pruned": 0, "failed": 0}
    storage = shared.open_storage(url)
    trials = sharing.select_counted(storage.get_all_trials(0))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}


@pytest.mark.slow
def test_trials_of_a_killed_worker_are_retried_once(tmp_path, url):
    check_that_trials_of_a_killed_worker_are_retried(
        make_config(tmp_path, trials=7, epochs=20), url, tmp_path
    )
