"""Retraining from other seeds: which settings are chosen, and every seed counts once."""

from __future__ import annotations

import json
import math

import pyarrow as pa
import pytest
from optuna.trial import TrialState

from slipstream import config as configs
from slipstream import runs
from slipstream.tuning import retraining
from slipstream.tuning.budget import RetrainingPlan
from slipstream.tuning.packing.trial import NOT_STARTED
from slipstream.tuning.retraining import DEFAULT, Retraining
from slipstream.tuning.storage.journal import OUT_OF_TIME
from slipstream.tuning.summary import describe_limits
from tests.conftest import small_config, waves
from tests.tuning.searches import get_trials, make_settings, make_trial, run_search


def test_the_test_set_is_not_read_before_the_retraining(tmp_path):
    """Other test rows, same search: to the bit."""
    table = waves(400)
    other = table.to_pandas()
    other.iloc[-80:, 1:] = 1e6
    first, _ = run_search(make_settings(tmp_path, table))
    (tmp_path / "b").mkdir()
    second, _ = run_search(
        make_settings(tmp_path / "b", pa.Table.from_pandas(other, preserve_index=False))
    )
    assert [t.intermediate_values for t in get_trials(first)] == [
        t.intermediate_values for t in get_trials(second)
    ]


def test_the_best_are_retrained_and_compared_with_the_default(tmp_path):
    settings = make_settings(tmp_path, tune={"retrain": 2, "retrain_seeds": 2, "trials": 4})
    study, _ = run_search(settings)
    summary = json.loads((study.run / "metrics.json").read_text())
    assert [one["what"] for one in summary["retrained"]][-1] == "default"
    assert len(summary["retrained"]) == 3
    assert all(len(one["losses"]) == 2 for one in summary["retrained"])
    chosen = summary["retrained"][0]
    assert chosen["mean"] == min(one["mean"] for one in summary["retrained"][:-1])
    for name in ("best", "default"):
        run = study.run / "retrained" / name
        done = json.loads((run / "metrics.json").read_text())
        assert done["metrics"] == summary["test"][name]["metrics"]
        assert len(done["lanes"]) == 2
    assert configs.load(study.run / "best.toml").model.sizes == study.best.model.sizes
    assert summary["comparison"]["verdict"] in ("better", "worse", "no difference shown")
    assert summary["comparison"]["scaled"]
    for name, whose in (("best", "chosen"), ("default", "default")):
        done = json.loads((study.run / "retrained" / name / "metrics.json").read_text())
        errors = [lane["scaled"]["test"][done["judged_by"]] for lane in done["lanes"]]
        assert summary["comparison"][whose]["mean"] == pytest.approx(sum(errors) / len(errors))


def test_the_trial_with_fewer_failed_seeds_is_chosen():
    config = configs.load({})
    losses = {0: [0.1, math.inf], 1: [math.inf, math.inf], 2: [0.9, 0.8], 3: [0.2, math.nan]}
    again = [retraining.RetrainedConfig(trial, config, found) for trial, found in losses.items()]
    assert [one.trial for one in sorted(again, key=lambda one: one.rank)] == [2, 0, 3, 1]


def test_a_seed_with_a_known_result_is_not_counted_again(tmp_path):
    """Its pack may resume from a checkpoint before its end."""
    run = runs.create_run("t", out=str(tmp_path))
    entries = [(DEFAULT, small_config())]
    first = Retraining(run, small_config(), entries)
    one = first.ask()
    first.fail(one, "planted")
    assert first.reopen(one.number).is_final
    assert not first.ask().is_final
    later = Retraining(run, small_config(), entries)
    assert later.reopen(one.number).is_final
    assert len(later.results[DEFAULT].losses) == 1


def test_a_search_with_time_for_one_trial_takes_its_losses_from_the_test_runs(tmp_path):
    tune = {"trials": 2, "minutes": 30, "retrain": 1, "retrain_seeds": 2}
    study, events = run_search(make_settings(tmp_path, tune=tune))
    chosen, default = study.summary["retrained"]
    assert not [event for event in events if event["event"] == "retrained"]
    for result, name in ((chosen, "best"), (default, "default")):
        lanes = runs.read_metrics(study.run / "retrained" / name)["lanes"]
        assert result["losses"] == [lane["val_loss"] for lane in lanes]
        assert len(result["losses"]) == 2
    assert (chosen["trial"], chosen["chosen"]) == (study.summary["best"]["trial"], True)
    assert runs.load_config(runs.open_run(study.run / "retrained" / "best")).train.minutes < 30
    assert study.best.train.minutes is None


def test_a_retraining_that_was_cut_off_ranks_behind_complete_ones():
    config = configs.load({})
    complete = retraining.RetrainedConfig(0, config, [0.5, 0.4], ["all epochs done"] * 2)
    cut_off = retraining.RetrainedConfig(1, config, [0.1, 0.1], ["all epochs done", OUT_OF_TIME])
    missing = retraining.RetrainedConfig(2, config, [])
    ranked = sorted([missing, cut_off, complete], key=lambda one: one.rank)
    assert [one.trial for one in ranked] == [0, 1, 2]
    limits = describe_limits(
        small_config(tune={"minutes": 1, "retrain": 3}),
        [make_trial(number, TrialState.COMPLETE, 0.5) for number in range(3)],
        [*ranked, retraining.RetrainedConfig(DEFAULT, config, [])],
        {},
        RetrainingPlan(3, 3),
    )
    assert list(limits) == ["tune.minutes cut off the retraining of trial 1, trial 2, the default"]


def test_a_late_retraining_starts_nothing_and_ends_what_trains(tmp_path):
    late = []
    run = runs.create_run("t", out=str(tmp_path))
    again = Retraining(run, small_config(), [(DEFAULT, small_config())], lambda: bool(late))
    first = again.ask()
    assert again.report(first, 1, 0.5) == ""
    late.append(True)
    assert again.report(first, 2, 0.4) == OUT_OF_TIME
    assert again.ask() is None
    again.fail(first, NOT_STARTED)  # which is no result
    assert not again.results[DEFAULT].losses
