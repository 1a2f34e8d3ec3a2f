"""`slipstream.tune`: what it refuses, and that an interrupted search resumes to the same end."""

from __future__ import annotations

import signal

import optuna
import pytest

import slipstream
from slipstream import Interrupted, UserError, runs
from slipstream import config as configs
from slipstream.base import machine
from slipstream.engine import checkpoint
from slipstream.search import api
from slipstream.search.api import count_parallel_trials
from tests.conftest import close
from tests.logs import as_lines
from tests.search.searches import check_same_results, get_trials, make_settings, run_search


@pytest.mark.parametrize(
    ("trials", "asked", "device", "workers", "wanted"),
    [
        (64, "auto", "cuda", 1, 32),
        (64, "auto", "cuda", 3, 11),
        (400, "auto", "cuda", 1, 64),
        (4, "auto", "cuda", 1, 8),
        (400, "auto", "cpu", 1, max(8, machine.count_available_cores())),
        (64, 20, "cpu", 1, 20),
        (64, 20, "cpu", 3, 7),
    ],
)
def test_the_number_of_parallel_trials(tmp_path, trials, asked, device, workers, wanted):
    settings = make_settings(tmp_path, tune={"trials": trials, "parallel": asked})
    assert count_parallel_trials(configs.load(settings), device, workers) == wanted


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("train", "repeats", 3), ("train", "minutes", 1.0)],
)
def test_settings_that_a_search_does_not_support_are_refused(tmp_path, section, key, value):
    settings = make_settings(tmp_path, tune={"space": {"train.lr": [0.1, 0.01]}})
    settings[section] = settings[section] | {key: value}
    with pytest.raises(UserError, match=f"{section}.{key}"):
        slipstream.tune(settings)


def test_an_interrupted_search_resumes_to_the_same_end(tmp_path):
    settings = make_settings(tmp_path, train={"epochs": 6}, tune={"trials": 6, "parallel": 6})
    whole, _ = run_search(settings | {"out": str(tmp_path / "whole")})

    stopped_at = []

    def stop_once(event):
        if event["event"] == "epoch" and event["epoch"] == 3 and not stopped_at:
            stopped_at.append(event["trial"])
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        api.tune(settings, watch=as_lines(stop_once))
    assert "slipstream tune --resume" in str(stopped.value)
    (folder,) = (tmp_path / "runs").iterdir()
    study, _ = run_search(None, resume=folder)
    check_same_results(study, whole)


def test_a_search_with_a_folder_begins_there_and_resumes(tmp_path):
    settings = make_settings(tmp_path, tune={"trials": 3, "parallel": 3, "retrain": 0})
    folder = tmp_path / "job"

    def stop(event):
        if event["event"] == "epoch":
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        api.tune(settings, watch=as_lines(stop), folder=folder)
    study = slipstream.tune(settings, folder=folder)
    assert study.run == folder
    assert study.summary["trials"]["finished"] == 3
    again = slipstream.tune(settings, folder=folder)
    assert again.summary["best"] == study.summary["best"]


@pytest.mark.slow
def test_a_search_interrupted_between_folds_keeps_the_finished_ones(tmp_path):
    """Folds with fewer windows end earlier, and are not trained again."""
    space = {"train.lr": {"low": 1e-3, "high": 3e-2}}
    settings = make_settings(
        tmp_path, tune={"folds": 3, "trials": 4, "parallel": 4, "space": space}
    )
    whole, _ = run_search(settings | {"out": str(tmp_path / "whole")})
    ended = []

    def stop_once(event):
        if event["event"] == "lane":
            ended.append((event["trial"], event["fold"]))
        if event["event"] == "lane" and len(ended) == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        api.tune(settings, watch=as_lines(stop_once))
    (folder,) = (tmp_path / "runs").iterdir()
    (newest,) = folder.glob("packs/*")
    saved, _ = checkpoint.read_newest(runs.Run(newest))
    outcomes = saved.metadata["search"]["fold_results"]
    assert {(int(n), int(fold)) for n, told in outcomes.items() for fold in told} == set(ended)
    study, events = run_search(None, resume=folder)
    for one, other in zip(get_trials(study), get_trials(whole), strict=True):
        assert (one.params, one.state) == (other.params, other.state)
        close(one.value, other.value, rel=1e-6)
        assert one.intermediate_values.keys() == other.intermediate_values.keys()
    later = [(event["trial"], event["fold"]) for event in events if event["event"] == "lane"]
    assert sorted(ended + later) == [(trial, fold) for trial in range(4) for fold in range(3)]


def test_changed_settings_are_refused_on_resume(tmp_path):
    settings = make_settings(tmp_path, train={"epochs": 1}, tune={"trials": 2})
    study, _ = run_search(settings)
    with pytest.raises(UserError, match=r"train\.lr"):
        slipstream.tune(None, resume=study.run, overrides=("train.lr=0.5",))
    more, _ = run_search(None, resume=study.run, overrides=("tune.trials=4",))
    assert len(get_trials(more)) == 4


def test_the_study_opens_in_optuna(tmp_path):
    study, _ = run_search(make_settings(tmp_path, train={"epochs": 1}, tune={"trials": 3}))
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(study.run / "study.log"))
    )
    names = optuna.study.get_all_study_names(storage)
    again = optuna.load_study(study_name=names[0], storage=storage)
    assert again.best_value == study.summary["best"]["value"]
    assert len(again.trials) == 3
