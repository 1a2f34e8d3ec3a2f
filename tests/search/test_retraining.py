"""Retraining from other seeds: which settings are chosen, and every seed counts once."""

from __future__ import annotations

import json
import math
import shutil
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from optuna.trial import TrialState

from slipstream import Interrupted, runs, training
from slipstream import config as configs
from slipstream.search import api, retraining
from slipstream.search.budget import RetrainingPlan
from slipstream.search.packs import NOT_STARTED
from slipstream.search.retraining import DEFAULT, Retraining
from slipstream.search.storage import OUT_OF_TIME
from slipstream.search.study import open_study
from slipstream.search.summary import describe_limits
from tests.conftest import slow, small_config, waves
from tests.logs import as_lines, read_lines
from tests.search.searches import (
    check_same_results,
    get_trials,
    make_settings,
    make_trial,
    run_search,
)


@pytest.mark.slow
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


def count(events, name):
    return sum(event["event"] == name for event in events)


def check_that_nothing_is_trained_twice(events, *, num_by_tests=0):
    """Compare the lanes that were trained to their end; the test runs' own have no trial."""
    ends = [event for event in events if event["event"] == "lane"]
    trials = [e.get("trial") for e in ends if e["stopped"] != retraining.NOT_CHOSEN]
    assert trials.count(None) == num_by_tests
    by_search = [trial for trial in trials if trial is not None]
    assert len(by_search) == len(set(by_search))


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search that retrained two of its trials, and its events; its data file is gone since the
    first event."""
    folder = tmp_path_factory.mktemp("searched")
    table, events = waves(400), []
    settings = make_settings(folder, table, tune={"retrain": 2, "retrain_seeds": 2, "trials": 4})
    settings["model"] |= {"dropout": 0.1}

    def watch(event):
        events.append(event)
        (folder / "waves.parquet").unlink(missing_ok=True)

    return api.tune(settings, watch=as_lines(watch)), events, table


def test_nothing_is_trained_twice_and_the_data_are_loaded_once(searched):
    study, events, _ = searched
    check_that_nothing_is_trained_twice(events)
    assert [len(one["losses"]) for one in study.summary["retrained"]] == [2, 2, 2]
    assert all((study.run / "retrained" / name).is_dir() for name in ("best", "default"))
    assert not (study.run / "retraining").exists()
    assert not list((study.run / "packs").glob("*"))


@pytest.fixture(scope="module")
def alone(searched, tmp_path_factory):
    """The config of the test run, trained as a run of its own."""
    study, _, table = searched
    config = configs.load(study.run / "retrained" / "best" / "config.toml")
    out = {"out": str(tmp_path_factory.mktemp("alone"))}
    return training.train(configs.replace_settings(config, out), table)


def test_the_retrained_best_is_the_run_that_training_it_alone_gives(searched, alone):
    study, _, _ = searched
    folder = study.run / "retrained" / "best"
    mine, theirs = runs.read_metrics(folder), runs.read_metrics(alone.run)
    assert {path.name for path in alone.run.iterdir()} <= {path.name for path in folder.iterdir()}
    assert theirs.keys() <= mine.keys()
    for section in ("metrics", "scaled"):
        for which, expected in theirs[section].items():
            for name, value in expected.items():
                assert mine[section][which][name] == pytest.approx(value, rel=1e-4, abs=1e-6)
    for one, other in zip(mine["lanes"], theirs["lanes"], strict=True):
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-5)
        names = ("lane", "seed", "best", "best_epoch", "epochs", "steps", "stopped")
        assert {name: one[name] for name in names} == {name: other[name] for name in names}
    assert mine["baselines"] == theirs["baselines"]
    tables = [pq.read_table(run / "predictions.parquet") for run in (folder, alone.run)]
    assert tables[0].schema == tables[1].schema
    for name, values in tables[1].to_pydict().items():
        if not isinstance(values[0], str):  # the name of the file, or of the table
            assert tables[0][name].to_pylist() == pytest.approx(values, rel=1e-3, abs=1e-4)


def test_the_log_of_the_retrained_best_is_that_of_its_lanes(searched, alone):
    study, _, _ = searched
    epochs = []
    for folder in (study.run / "retrained" / "best", alone.run):
        every = read_lines(runs.Run(folder))
        some = [event for event in every if event["event"] == "epoch"]
        by_lane = sorted(some, key=lambda event: (event["lane"], event["epoch"]))
        epochs.append([(e["lane"], e["epoch"], e["step"], e["best"]) for e in by_lane])
    assert epochs[0] == epochs[1]
    for name in ("start", "log", "lane", "trained", "scoring", "end"):
        assert count(read_lines(runs.Run(study.run / "retrained" / "best")), name), name


def test_the_retrained_best_can_be_trained_further(searched, alone):
    study, _, table = searched
    more = {"data": table, "overrides": ("train.epochs=5",)}
    folder = shutil.copytree(study.run / "retrained" / "best", alone.run.parent / "further")
    mine, theirs = (training.train(resume=run, **more).summary for run in (folder, alone.run))
    for one, other in zip(mine["lanes"], theirs["lanes"], strict=True):
        assert one["epochs"] == other["epochs"] == 5
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)


def is_retrained(events):
    """Whether the search is over, and a trial and the default are trained from two seeds."""
    names = [event["event"] for event in events]
    again = [event["trial"] for event in events if event["event"] == "retrained"]
    counts = {trial: again.count(trial) for trial in again}
    return "searched" in names and counts.get(DEFAULT) == 2 and list(counts.values()) == [2, 2]


@pytest.mark.parametrize("moment", ["retrained", slow("scoring")])
def test_a_search_that_is_killed_after_the_retraining_trains_nothing_again(tmp_path, moment):
    settings = make_settings(tmp_path, tune={"retrain": 1, "retrain_seeds": 2, "trials": 2})
    events = []

    def kill(event):
        events.append(event)
        if event["event"] == moment and is_retrained(events):
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Interrupted)):
        api.tune(settings, watch=as_lines(kill))
    folder = runs.find_last(str(tmp_path / "runs"))
    study, later = run_search(None, resume=folder)
    assert not count(later, "lane")
    assert not count(later, "epoch")
    assert study.summary["comparison"]
    losses = {one["what"]: sorted(one["losses"]) for one in study.summary["retrained"]}
    lanes = runs.read_metrics(folder / "retrained" / "default")["lanes"]
    assert losses["default"] == sorted(lane["val_loss"] for lane in lanes)


@pytest.mark.slow
def test_a_damaged_lane_is_trained_again_by_the_test_run(tmp_path):
    settings = make_settings(tmp_path, tune={"retrain": 1, "retrain_seeds": 2, "trials": 2})
    events = []

    def kill(event):
        events.append(event)
        if is_retrained(events):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.tune(settings, watch=as_lines(kill))
    folder = runs.find_last(str(tmp_path / "runs"))
    (folder / "retraining" / "default-1001" / "rows.safetensors").write_bytes(b"")
    study, later = run_search(None, resume=folder)
    chosen = [result["what"] for result in study.summary["retrained"] if result["chosen"]]
    assert count(later, "lane") == (2 if chosen == ["default"] else 1)  # once for each test run
    losses = {one["what"]: sorted(one["losses"]) for one in study.summary["retrained"]}
    lanes = runs.read_metrics(folder / "retrained" / "default")["lanes"]
    assert losses["default"] == pytest.approx(sorted(lane["val_loss"] for lane in lanes))


@pytest.mark.slow
def test_the_test_runs_of_a_walk_forward_split_train_only_the_later_folds(tmp_path):
    settings = make_settings(tmp_path, tune={"retrain": 1, "retrain_seeds": 2, "trials": 2})
    settings["data"]["split"] = {"walk_forward": 2}
    study, events = run_search(settings)
    test = runs.read_metrics(study.run / "retrained" / "best")
    assert len(test["folds"]) > 1
    check_that_nothing_is_trained_twice(events, num_by_tests=2 * 2 * (len(test["folds"]) - 1))
    config = configs.load(study.run / "retrained" / "best" / "config.toml")
    alone = training.train(configs.replace_settings(config, {"out": str(tmp_path / "alone")}))
    for one, other in zip(test["lanes"], alone.summary["lanes"], strict=True):
        assert (one["fold"], one["seed"]) == (other["fold"], other["seed"])
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-5)


ALIKE = {"train.lr": {"low": 1e-3, "high": 3e-2, "log": True}}


def is_filler(event):
    """Whether a model of the retraining is validated."""
    return event["event"] == "epoch" and event["trial"] < 0


@pytest.mark.slow
def test_the_end_of_a_search_trains_the_default_and_the_best_in_its_empty_places(tmp_path):
    tune = {"retrain": 1, "retrain_seeds": 2, "trials": 5, "parallel": 4, "space": ALIKE}
    settings = make_settings(tmp_path, train={"epochs": 6}, tune=tune)
    whole, events = run_search(settings | {"out": str(tmp_path / "whole")})
    names = [event["event"] for event in events]
    early = events[: names.index("searched")]
    assert sum(map(is_filler, early)) > 0
    assert names.count("retrained") >= 4
    stopped = []

    def stop_once(event):
        if is_filler(event) and not stopped:
            stopped.append(event)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        api.tune(settings, watch=as_lines(stop_once))
    study, _ = run_search(None, resume=runs.find_last(str(tmp_path / "runs")))
    check_same_results(study, whole)
    for one, other in zip(study.summary["retrained"], whole.summary["retrained"], strict=True):
        assert one["what"] == other["what"]
        assert sorted(one["losses"]) == pytest.approx(sorted(other["losses"]), rel=1e-5)


def test_a_candidate_that_others_overtake_is_dropped(tmp_path):
    config = small_config(tmp_path, tune={"retrain": 1, "retrain_seeds": 2, "space": ALIKE})
    run = runs.create_run("t", out=str(tmp_path))
    study = open_study(config, run.folder, None, "search")
    for value in (0.5, 0.4):
        study.tell(study.ask(), TrialState.COMPLETE, value, {})
    first, second = study.get_trials()
    again = Retraining(run, config, study)
    again.set_candidates([first])
    default = [again.ask(), again.ask()]
    one = again.fill_place(lambda _: True)
    assert [trial.config.train.lr for trial in default] == [config.train.lr] * 2
    assert one.config.train.lr == first.params["train.lr"]
    again.set_candidates([second])
    assert one.stop_reason == retraining.NOT_CHOSEN
    again.finish(one)
    others = [again.ask(), again.ask()]
    assert [trial.config.train.lr for trial in others] == [second.params["train.lr"]] * 2
    assert again.ask() is None
    again.fail(others[0], "planted")
    assert [result.trial for result in again.rank()] == [1, DEFAULT]
    later = Retraining(run, config, study)
    later.set_candidates([second])
    assert later.results[1].losses == [math.inf]
    assert {trial.number for trial in (*default, one, *others)} >= set(later.pending)
    assert later.reopen(0).is_final


def test_the_trial_with_fewer_failed_seeds_is_chosen():
    config = configs.load({})
    losses = {0: [0.1, math.inf], 1: [math.inf, math.inf], 2: [0.9, 0.8], 3: [0.2, math.nan]}
    again = [retraining.RetrainedConfig(trial, config, found) for trial, found in losses.items()]
    assert [one.trial for one in sorted(again, key=lambda one: one.rank)] == [2, 0, 3, 1]


def test_a_seed_with_a_known_result_is_not_counted_again(tmp_path):
    """Its pack may resume from a checkpoint before its end."""
    run = runs.create_run("t", out=str(tmp_path))
    first = Retraining(run, small_config())
    one = first.ask()
    first.fail(one, "planted")
    assert first.reopen(one.number).is_final
    assert not first.ask().is_final
    later = Retraining(run, small_config())
    assert later.reopen(one.number).is_final
    assert len(later.results[DEFAULT].losses) == 1


@pytest.mark.slow
def test_a_search_with_time_for_one_trial_retrains_it_once(tmp_path):
    tune = {"trials": 2, "minutes": 30, "retrain": 1, "retrain_seeds": 2}
    study, events = run_search(make_settings(tmp_path, tune=tune))
    trial, default = study.summary["retrained"]
    check_that_nothing_is_trained_twice(events)
    (chosen,) = (result for result in (trial, default) if result["chosen"])
    assert chosen["mean"] == min(trial["mean"], default["mean"])
    for result, name in ((chosen, "best"), (default, "default")):
        lanes = runs.read_metrics(study.run / "retrained" / name)["lanes"]
        assert sorted(result["losses"]) == sorted(lane["val_loss"] for lane in lanes)
        assert len(result["losses"]) == 2
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
    again = Retraining(run, small_config())
    again.is_late = lambda _: bool(late)
    first = again.ask()
    assert again.report(first, 1, 0.5) == ""
    late.append(True)
    assert again.report(first, 2, 0.4) == OUT_OF_TIME
    assert again.ask() is None
    again.fail(first, NOT_STARTED)  # which is no result
    assert not again.results[DEFAULT].losses
