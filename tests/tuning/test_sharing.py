"""The study that workers share: how many trials, whose they are, and who may join."""

from __future__ import annotations

import math

import optuna
import pytest
from optuna.trial import TrialState

from slipstream import config as configs
from slipstream import runs
from slipstream.errors import UserError
from slipstream.runs import Run
from slipstream.tuning import sharing
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.packing.trial import TrialRun
from slipstream.tuning.search import OptunaSearch
from slipstream.tuning.sharing import StudyMembership
from slipstream.tuning.storage import database
from slipstream.tuning.workers import worker
from tests.tuning.several import job


def search_of(config, folder, name):
    """One of several workers, in this process."""
    run = Run(folder / name)
    run.folder.mkdir(exist_ok=True)
    url = database.make_run_database_url(folder)
    board = worker.open_timed_study(config, folder, url, "several", beat_s=1, grace_s=1000)
    return OptunaSearch(
        config,
        board,
        run,
        DatasetCache(config),
        share=StudyMembership(board, sharing.read_worker_id(run)),
    )


def age(search):
    """As if the last sign of life of every trial were an hour old."""
    with search.share.storage._backend.engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, '-1 hour')"
        )


def finish(search, one, loss=1.0):
    trial = search.under_way.pop(one.number)
    search._tell(trial, TrialState.COMPLETE, loss, one.told())


def test_workers_together_begin_as_many_trials_as_were_asked_for(tmp_path):
    config = job(tmp_path, trials=5)
    one, other = (search_of(config, tmp_path, name) for name in "ab")
    found = []
    while pair := [got for got in (one.next(), other.next()) if got is not None]:
        found += [got.number for got in pair]
    assert found == [0, 1, 2, 3, 4]


def test_a_trial_too_many_is_surplus_and_not_counted(tmp_path):
    config = job(tmp_path, trials=2)
    one, other = (search_of(config, tmp_path, name) for name in "ab")
    assert one.next().number == 0
    assert one.next().number == 1
    late = other.board.ask()  # it looked before the other one asked
    trials = other.board.trials()
    assert sharing.exceeds_limit(late, trials, 2)
    assert not sharing.exceeds_limit(late, trials, 3)
    other.board.tell(late, TrialState.FAIL, None, {"stopped": sharing.SURPLUS})
    trials = one.board.trials()
    assert len(trials) == 3
    assert sharing.count_started(trials) == 2
    assert [trial.number for trial in sharing.select_counted(trials)] == [0, 1]
    more = configs.load(config, ["tune.trials=3"])
    assert search_of(more, tmp_path, "c").next().number == 3


def test_trials_of_a_silent_worker_come_back_once_and_keep_their_place(tmp_path):
    config = job(tmp_path, trials=2)
    gone = search_of(config, tmp_path, "gone")
    first, second = gone.next(), gone.next()
    finish(gone, first)
    age(gone)
    other = search_of(config, tmp_path, "other")
    again = other.next()
    assert again.number == 2
    assert again.config.train.lr == second.config.train.lr
    assert other.next() is None
    assert not other.share.others_busy()
    trials = other.board.trials()
    assert [trial.number for trial in sharing.select_counted(trials)] == [0, 2]
    assert trials[1].state == TrialState.FAIL
    age(other)  # the second worker falls silent, too
    third = search_of(config, tmp_path, "third")
    assert third.next() is None
    assert not third.share.others_busy()
    trials = third.board.trials()
    assert [(trial.number, trial.state) for trial in sharing.select_counted(trials)] == [
        (0, TrialState.COMPLETE),
        (2, TrialState.FAIL),
    ]


def test_a_worker_that_was_thought_gone_does_not_disturb_the_retry(tmp_path):
    config = job(tmp_path, trials=1)
    slow = search_of(config, tmp_path, "slow")
    was = slow.next()
    age(slow)
    other = search_of(config, tmp_path, "other")
    again = other.next()
    assert (
        slow.validated(was, 1, 0.5) == "given to another worker, because this one had been "
        "silent for too long"
    )
    assert was.settled
    assert not slow.under_way
    finish(other, again, 0.25)
    trials = sharing.select_counted(other.board.trials())
    assert [(trial.number, trial.value) for trial in trials] == [(1, 0.25)]


def test_a_result_that_comes_too_late_is_not_counted(tmp_path):
    config = job(tmp_path, trials=1)
    slow = search_of(config, tmp_path, "slow")
    was = slow.next()
    age(slow)
    search_of(config, tmp_path, "other").next()
    finish(slow, was, 0.125)
    assert [event["event"] for event in runs.read_events(slow.run)] == ["fallback"]
    assert slow.board.trials()[0].state == TrialState.FAIL


def test_a_trial_whose_worker_died_before_its_first_sign_of_life_comes_back(tmp_path):
    config = job(tmp_path, trials=1)
    gone = search_of(config, tmp_path, "gone")
    gone.board.ask()  # and killed there
    other = search_of(config, tmp_path, "other")
    assert other.next() is None
    assert other.share.others_busy()
    age(other)
    other.share._tidied = -math.inf
    assert other.next().number == 1


def test_signs_of_life_keep_trials_from_others(tmp_path):
    config = job(tmp_path, trials=1)
    one = search_of(config, tmp_path, "one")
    one.next()
    age(one)
    with one.share.alive(one.under_way):
        query = "SELECT min(heartbeat) > datetime('now', '-50 seconds') FROM trial_heartbeats"
        fresh = 0
        while not fresh:
            with one.share.storage._backend.engine.connect() as connection:
                fresh = connection.exec_driver_sql(query).scalar()
    other = search_of(config, tmp_path, "other")
    assert other.next() is None
    assert other.share.others_busy()


def test_a_worker_picks_up_its_own_trials_only(tmp_path):
    config = job(tmp_path, trials=4)
    one, other = (search_of(config, tmp_path, name) for name in "ab")
    mine = [one.next().number, one.next().number]
    other.next()
    back = search_of(config, tmp_path, "a")
    back.pick_up()
    assert [candidate.number for candidate in back.left] == mine
    assert isinstance(back.left[0], TrialRun)


def test_another_search_of_the_same_name_is_refused(tmp_path):
    config = job(tmp_path)
    study = optuna.create_study(
        storage=database.open_storage(database.make_run_database_url(tmp_path))
    )
    sharing.join_study(study, config, "a")
    sharing.join_study(study, configs.load(config, ["tune.trials=9", "engine.threads=3"]), "a")
    with pytest.raises(UserError, match=r"it differs in model\.hidden, the data\); give this one"):
        sharing.join_study(study, configs.load(config, ["model.hidden=16"]), "b")


def test_a_grid_is_searched_to_its_end_by_two_workers(tmp_path):
    space = {"train.lr": [1e-3, 2e-3, 3e-3]}
    config = job(tmp_path, trials=3, sampler="grid", space=space)
    one, other = (search_of(config, tmp_path, name) for name in "ab")
    found = []
    for search in (one, other, one):
        candidate = search.next()
        found.append(candidate.config.train.lr)
        finish(search, candidate)
    assert sorted(found) == [1e-3, 2e-3, 3e-3]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"i": 1}', '{"id": "x"}'])
def test_a_worker_whose_name_cannot_be_read_gets_another(tmp_path, damage):
    run = Run(tmp_path)
    was = sharing.read_worker_id(run)
    assert sharing.read_worker_id(run) == was
    (tmp_path / "worker.json").write_text(damage)
    found = sharing.read_worker_id(run)
    assert found != was
    assert sharing.read_worker_id(run) == found
