"""A study that workers share: how many trials count, who owns them, and who may join."""

from __future__ import annotations

import math
import os
import time

import optuna
import pytest
from optuna.trial import TrialState

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.events import Fallback
from slipstream.runs import Run
from slipstream.search import database, sharing
from slipstream.search import storage as shared
from slipstream.search.packs import DatasetCache, TrialRun
from slipstream.search.sharing import StudyMembership
from slipstream.search.storage import SharedJournalStorage
from slipstream.search.study import open_study
from slipstream.search.trials import OptunaSearch
from tests.conftest import slow
from tests.search.searches import make_config


@pytest.fixture(params=[slow("database"), "journal"], autouse=True)
def storage(request, tmp_path, monkeypatch):
    """The same for every storage."""
    url = database.make_run_database_url(tmp_path)
    monkeypatch.setenv(
        "STORAGE", url if request.param == "database" else f"journal:{tmp_path}/several.log"
    )


def make_search(config, folder, name):
    """Make the search of one of several workers, in this process."""
    run = Run(folder / name)
    run.folder.mkdir(exist_ok=True)
    url = os.environ["STORAGE"]
    study = open_study(config, folder, url, "several", heartbeat=(1, 1000))
    membership = StudyMembership(study, sharing.read_worker_id(run))
    return OptunaSearch(config, study, run, DatasetCache(config), membership=membership)


def age_heartbeats(search, seconds=3600):
    """Make the last heartbeat of every trial older by an hour, or so many seconds."""
    if isinstance(search.membership.storage, SharedJournalStorage):
        for path in search.membership.storage.heartbeats.iterdir():
            earlier = path.stat().st_mtime - seconds
            os.utime(path, (earlier, earlier))
        return
    with search.membership.storage._backend.engine.begin() as connection:
        connection.exec_driver_sql(
            f"UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, '-{seconds} seconds')"
        )


def has_fresh_heartbeats(storage):
    if isinstance(storage, SharedJournalStorage):
        beats = [path.stat().st_mtime for path in storage.heartbeats.glob("[0-9]*")]
        return min(beats) > time.time() - 50
    query = "SELECT min(heartbeat) > datetime('now', '-50 seconds') FROM trial_heartbeats"
    with storage._backend.engine.connect() as connection:
        return connection.exec_driver_sql(query).scalar()


def finish(search, one, loss=1.0):
    trial = search.running.pop(one.number)
    search._tell(trial, TrialState.COMPLETE, loss, one.summarize())


def test_workers_together_start_the_requested_number_of_trials(tmp_path):
    config = make_config(tmp_path, trials=5)
    one, other = (make_search(config, tmp_path, name) for name in "ab")
    found = []
    while pair := [got for got in (one.ask(), other.ask()) if got is not None]:
        found += [got.number for got in pair]
    assert found == [0, 1, 2, 3, 4]


def test_a_trial_too_many_is_surplus_and_not_counted(tmp_path):
    config = make_config(tmp_path, trials=2)
    one, other = (make_search(config, tmp_path, name) for name in "ab")
    assert one.ask().number == 0
    assert one.ask().number == 1
    late = other.study.ask()  # it looked before the other one asked
    trials = other.study.get_trials()
    assert sharing.exceeds_limit(late, trials, 2)
    assert not sharing.exceeds_limit(late, trials, 3)
    other.study.tell(late, TrialState.FAIL, None, {"stopped": sharing.SURPLUS})
    trials = one.study.get_trials()
    assert len(trials) == 3
    assert sharing.count_started(trials) == 2
    assert [trial.number for trial in sharing.select_counted(trials)] == [0, 1]
    more = configs.load(config, ["tune.trials=3"])
    assert make_search(more, tmp_path, "c").ask().number == 3


def test_trials_of_a_worker_without_heartbeat_are_retried_once(tmp_path):
    config = make_config(tmp_path, trials=2)
    gone = make_search(config, tmp_path, "gone")
    first, second = gone.ask(), gone.ask()
    finish(gone, first)
    age_heartbeats(gone)
    other = make_search(config, tmp_path, "other")
    again = other.ask()
    assert again.number == 2
    assert again.config.train.lr == second.config.train.lr
    assert other.ask() is None
    assert not other.membership.others_are_busy()
    trials = other.study.get_trials()
    assert [trial.number for trial in sharing.select_counted(trials)] == [0, 2]
    assert trials[1].state == TrialState.FAIL
    age_heartbeats(other)  # the second worker falls silent, too
    third = make_search(config, tmp_path, "third")
    assert third.ask() is None
    assert not third.membership.others_are_busy()
    trials = third.study.get_trials()
    assert [(trial.number, trial.state) for trial in sharing.select_counted(trials)] == [
        (0, TrialState.COMPLETE),
        (2, TrialState.FAIL),
    ]


def read_fallbacks(search):
    events = [event for event in runs.read_events(search.run) if isinstance(event, Fallback)]
    return [f"{event.what}: {event.why}" for event in events]


def test_a_worker_says_which_trials_of_others_are_silent_and_when_they_are_retried(tmp_path):
    config = make_config(tmp_path, trials=2)
    gone, other = (make_search(config, tmp_path, name) for name in ("gone", "other"))
    gone.ask()
    age_heartbeats(gone, 600)
    assert other.ask().number == 1
    for _ in range(2):  # but says so once
        other.membership._checked_at = -math.inf
        assert other.ask() is None
    late = f"trial 0 may be lost: {sharing.SILENT} 3 s; retried in about 997 s if it is gone"
    assert read_fallbacks(other) == [late]
    age_heartbeats(gone, 600)
    other.membership._checked_at = -math.inf
    assert other.ask().number == 2
    assert read_fallbacks(other) == [late, f"training trial 0 again: {sharing.SILENT} 1000 s"]


def test_a_slow_worker_does_not_disturb_the_retry_of_its_trial(tmp_path):
    config = make_config(tmp_path, trials=1)
    slow = make_search(config, tmp_path, "slow")
    was = slow.ask()
    age_heartbeats(slow)
    other = make_search(config, tmp_path, "other")
    again = other.ask()
    assert (
        slow.report(was, 1, 0.5) == "reassigned to another worker, because this one had sent "
        "no heartbeat for too long"
    )
    assert was.is_final
    assert not slow.running
    finish(other, again, 0.25)
    trials = sharing.select_counted(other.study.get_trials())
    assert [(trial.number, trial.value) for trial in trials] == [(1, 0.25)]


def test_a_result_that_comes_too_late_is_not_counted(tmp_path):
    config = make_config(tmp_path, trials=1)
    slow = make_search(config, tmp_path, "slow")
    was = slow.ask()
    age_heartbeats(slow)
    make_search(config, tmp_path, "other").ask()
    finish(slow, was, 0.125)
    assert [type(event) for event in runs.read_events(slow.run)] == [Fallback]
    assert slow.study.get_trials()[0].state == TrialState.FAIL


def test_a_trial_whose_worker_died_before_its_first_heartbeat_is_retried(tmp_path):
    config = make_config(tmp_path, trials=1)
    gone = make_search(config, tmp_path, "gone")
    gone.study.ask()  # and killed there
    other = make_search(config, tmp_path, "other")
    assert other.ask() is None
    assert other.membership.others_are_busy()
    age_heartbeats(other)
    other.membership._checked_at = -math.inf
    assert other.ask().number == 1


def test_heartbeats_keep_trials_from_other_workers(tmp_path):
    config = make_config(tmp_path, trials=1)
    one = make_search(config, tmp_path, "one")
    one.ask()
    age_heartbeats(one)
    with one.membership.send_heartbeats(one.running):
        while not has_fresh_heartbeats(one.membership.storage):
            time.sleep(0.01)
    other = make_search(config, tmp_path, "other")
    assert other.ask() is None
    assert other.membership.others_are_busy()


def test_a_worker_resumes_only_its_own_trials(tmp_path):
    config = make_config(tmp_path, trials=4)
    one, other = (make_search(config, tmp_path, name) for name in "ab")
    mine = [one.ask().number, one.ask().number]
    other.ask()
    back = make_search(config, tmp_path, "a")
    back.resume_interrupted()
    assert [candidate.number for candidate in back.interrupted] == mine
    assert isinstance(back.interrupted[0], TrialRun)


def test_another_search_of_the_same_name_is_refused(tmp_path):
    config = make_config(tmp_path)
    study = optuna.create_study(storage=shared.open_storage(os.environ["STORAGE"]))
    sharing.join_study(study, config, "a")
    sharing.join_study(study, configs.load(config, ["tune.trials=9", "engine.threads=3"]), "a")
    with pytest.raises(UserError, match=r"differs in model\.hidden, the data; set another name"):
        sharing.join_study(study, configs.load(config, ["model.hidden=16"]), "b")


def test_a_grid_is_searched_to_its_end_by_two_workers(tmp_path):
    space = {"train.lr": [1e-3, 2e-3, 3e-3]}
    config = make_config(tmp_path, trials=3, sampler="grid", space=space)
    one, other = (make_search(config, tmp_path, name) for name in "ab")
    found = []
    for search in (one, other, one):
        candidate = search.ask()
        found.append(candidate.config.train.lr)
        finish(search, candidate)
    assert sorted(found) == [1e-3, 2e-3, 3e-3]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"i": 1}', '{"id": "x"}'])
def test_a_worker_with_an_unreadable_id_gets_another(tmp_path, damage):
    run = Run(tmp_path)
    was = sharing.read_worker_id(run)
    assert sharing.read_worker_id(run) == was
    (tmp_path / "worker.json").write_text(damage)
    found = sharing.read_worker_id(run)
    assert found != was
    assert sharing.read_worker_id(run) == found
