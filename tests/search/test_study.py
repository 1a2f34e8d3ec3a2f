from __future__ import annotations

import os
import pickle
import warnings

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from slipstream.config import Range, Tune
from slipstream.search import retraining
from slipstream.search import storage as search_storage
from slipstream.search import study as search_study
from slipstream.search.storage import OUT_OF_TIME
from slipstream.search.study import make_sampler
from tests.conftest import small_config
from tests.search.searches import make_trial


@pytest.mark.parametrize("kind", ["tpe", "random", "cmaes"])
def test_workers_of_the_largest_seed_have_samplers_too(kind):
    space = {"train.lr": Range(low=1e-3, high=1e-2)}
    tune = Tune(seed=2**32 - 1, sampler=kind, space=space)
    assert make_sampler(tune, space, seed_offset=3) is not None


def test_the_largest_seed_leaves_seeds_to_train_the_best_again_from():
    assert retraining.get_first_seed(small_config(seed=7)) == 1007
    base = small_config(seed=2**63 - 1)
    first = retraining.get_first_seed(base)
    assert 0 <= first < first + base.tune.retrain_seeds <= 2**63


class Opens:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


SPACE = {name: FloatDistribution(-5, 5) for name in "xy"}


def cmaes_study(sampler, num_trials, **attrs):
    """A study of a bowl whose trials, asked for one after another, have these attributes too."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler)
    for _ in range(num_trials):
        trial = study.ask(SPACE)
        for name, value in attrs.items():
            study._storage.set_trial_system_attr(trial._trial_id, f"cma:{name}:0", value)
        study.tell(trial, (trial.params["x"] - 2) ** 2 + (trial.params["y"] + 1) ** 2)
    return study


def cmaes_sampler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return make_sampler(Tune(seed=0, sampler="cmaes"), {})


def test_a_study_of_cma_es_runs_no_code_that_somebody_put_into_it(tmp_path):
    made = tmp_path / "made"
    study = cmaes_study(cmaes_sampler(), 3, optimizer=pickle.dumps(Opens(made)).hex())
    study.ask(SPACE)
    assert not made.exists()


@pytest.mark.slow
def test_cma_es_keeps_no_state_but_its_trials_and_finds_the_bowls_bottom():
    study = cmaes_study(cmaes_sampler(), 90)
    trials = study.get_trials()
    assert not any("optimizer" in key for trial in trials for key in trial.system_attrs)
    assert study.best_value < 0.05
    states = []
    for sampler in (study.sampler, cmaes_sampler()):  # as after a resume
        study.sampler = sampler
        study.ask(SPACE)
        states.append(sampler._restore_optimizer(trials))
    assert states[0].generation == states[1].generation > 5
    assert states[0].mean.tolist() == states[1].mean.tolist()


def test_trials_that_were_cut_off_rank_behind_complete_ones_whatever_their_loss():
    trials = [
        make_trial(0, TrialState.PRUNED, stopped=OUT_OF_TIME, lowest=0.1),
        make_trial(1, TrialState.COMPLETE, 0.5, stopped="all epochs done"),
        make_trial(2, TrialState.PRUNED, stopped="pruned"),
        make_trial(3, TrialState.PRUNED, stopped=f"all epochs done; {OUT_OF_TIME}", lowest=0.05),
        make_trial(4, TrialState.COMPLETE, 0.4, stopped="all epochs done"),
        make_trial(5, TrialState.PRUNED, stopped=OUT_OF_TIME),  # before its first validation
        make_trial(6, TrialState.FAIL, stopped="no finite loss"),
    ]
    assert [trial.number for trial in search_study.rank_trials(trials)] == [4, 1, 3, 0]
    states = [search_study.describe_trial(trial)["state"] for trial in trials]
    assert states == [
        *("cut off", "finished", "pruned", "cut off", "finished", "cut off", "failed")
    ]
    assert search_study.describe_trial(trials[3])["value"] == 0.05


def test_the_disk_stores_results_and_new_trials_at_once_but_not_every_value(tmp_path, monkeypatch):
    space = {
        "train.lr": {"low": 1e-3, "high": 1e-2},
        "train.weight_decay": {"low": 0.0, "high": 0.1},
    }
    config = small_config(tmp_path, tune={"space": space})
    flushes, flush = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (flushes.append(file), flush(file)))
    opened = search_study.open_study(config, tmp_path, None, "s")
    assert len(flushes) == 1
    trial = opened.ask()
    assert len(flushes) == 2
    for step in range(5):
        opened.report(trial, 0.5, step)
    assert len(flushes) == 2
    opened.tell(trial, TrialState.COMPLETE, 0.5, {})
    assert len(flushes) == 3
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / search_storage.JOURNAL))
    storage = optuna.storages.JournalStorage(backend)
    (read,) = optuna.load_study(study_name="s", storage=storage).trials
    assert read.params == trial.params
    assert len(read.intermediate_values) == 5
