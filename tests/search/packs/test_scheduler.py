"""Packs of trials: same results as alone, out of memory, and no memory that grows."""

from __future__ import annotations

import math
import signal

import pytest
import torch

import slipstream
from slipstream import Interrupted, runs
from slipstream import config as configs
from slipstream.config import search_space as spaces
from slipstream.search import api
from slipstream.search.packs import DatasetCache, PackScheduler, TrialRun, TrialSource
from slipstream.search.storage import NOTES
from tests.conftest import close
from tests.limits import CrowdedDevice, FaultyDevice, allocate_lanes
from tests.logs import as_lines, read_lines
from tests.search.searches import check_same_results, get_trials, make_settings, run_search


def test_a_trial_scores_what_it_would_score_alone(tmp_path):
    """Whatever pack it was in: other widths, batches, neighbours, places taken over."""
    settings = make_settings(tmp_path, tune={"trials": 6, "parallel": 3})
    study, events = run_search(settings)
    base = configs.load(settings)
    assert study.summary["trials"]["finished"] == 6
    assert sum(event["event"] == "pack" for event in events) < 6
    for trial in get_trials(study):
        config = spaces.apply_params(base, base.tune.space, trial.params)
        alone = slipstream.train(configs.replace_settings(config, {"out": str(tmp_path / "alone")}))
        losses = [e["val_loss"] for e in read_lines(runs.Run(alone.run)) if e["event"] == "epoch"]
        close(list(trial.intermediate_values.values()), losses, rel=1e-4)
        close(trial.value, min(losses), rel=1e-4)


class LimitedSource(TrialSource):
    """Trials of which the first has no time for a validation."""

    def __init__(self, *trials):
        self.trials, self.training = list(trials), None
        self.ended, self.failed, self.costs, self.setups_s = [], [], [], []

    def record_setup(self, seconds):
        self.setups_s.append(seconds)

    def ask(self):
        self.training = self.trials.pop(0) if self.trials else None
        return self.training

    def find_cut(self, costs=None):
        if costs is not None and costs.validate_s and self.training.number == 0:
            assert costs.epoch_s > costs.validate_s
            return "no time"
        return ""

    def is_worth_validating(self, train_s, validate_s):
        self.costs.append((train_s, validate_s))
        return False

    def finish(self, trial):
        self.ended.append((trial.number, trial.score))

    def fail(self, trial, reason):
        self.failed.append((trial.number, reason))


def test_a_trial_without_time_for_a_validation_leaves_it_to_the_next(tmp_path):
    settings = make_settings(tmp_path, engine={"log_every": 5}, train={"batch": 8})
    config = configs.load(settings)
    source = LimitedSource(TrialRun(0, config), TrialRun(1, config))
    run = runs.create_run("limited", out=str(tmp_path))
    PackScheduler(run, DatasetCache(config), source, parallel=1).train()
    assert source.failed == [(0, "no time")]
    ((number, score),) = source.ended
    assert number == 1
    assert math.isfinite(score)
    ((train_s, validate_s),) = source.costs
    assert train_s > 0
    assert validate_s > 0
    assert len(source.setups_s) == 2  # a pack for each trial
    assert min(source.setups_s) > 0


@pytest.mark.slow
def test_kinds_and_contexts_get_separate_packs(tmp_path):
    space = {"model.kind": ["lstm", "mlp"], "data.context": [8, 12], "train.lr": [0.01, 0.003]}
    study, events = run_search(
        make_settings(tmp_path, tune={"space": space, "sampler": "grid", "trials": 8})
    )
    assert study.summary["trials"]["finished"] == 8
    for event in (event for event in events if event["event"] == "pack"):
        chosen = [get_trials(study)[number].params for number in event["trials"]]
        assert len({(one["model.kind"], one["data.context"]) for one in chosen}) == 1


@pytest.mark.slow
def test_out_of_memory_halves_the_lanes(tmp_path):
    space = {"train.lr": {"low": 0.001, "high": 0.01}}
    with allocate_lanes(holds=2) as device:
        study, events = run_search(make_settings(tmp_path, tune={"space": space, "trials": 5}))
    assert device.num_failures == 2  # of 5 lanes, then of 3
    assert study.summary["trials"]["finished"] == 5
    assert any(event["event"] == "recovery" for event in events)


def stopping_in_epoch(number):
    sent = []

    def watch(event):
        if event["event"] == "epoch" and event["epoch"] == number and not sent:
            sent.append(number)
            signal.raise_signal(signal.SIGINT)

    return watch


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True], ids=["begun", "resumed"])
def test_out_of_memory_loses_no_step(tmp_path, resumed):
    engine = {"checkpoint_minutes": 1e-9, "async_checkpoints": False, "log_every": 3}
    settings = make_settings(
        tmp_path,
        train={"epochs": 6},
        engine=make_settings(tmp_path)["engine"] | engine,
        tune={"space": {"train.lr": {"low": 0.001, "high": 0.01}}, "trials": 5, "parallel": 5},
    )
    whole, _ = run_search(settings | {"out": str(tmp_path / "whole")})
    if resumed:
        with pytest.raises(Interrupted):
            api.tune(settings, watch=as_lines(stopping_in_epoch(3)))
    with CrowdedDevice(holds=2, since=1 if resumed else 35) as device:
        if resumed:
            (folder,) = (tmp_path / "runs").iterdir()
            study, events = run_search(None, resume=folder)
        else:
            study, events = run_search(settings)
    told = [event["remedy"] for event in events if event["event"] == "recovery"]
    assert [remedy.split(",")[0] for remedy in told] == ["3 lanes at a time", "2 lanes at a time"]
    assert len({remedy.split("from")[1] for remedy in told}) == 1
    if not resumed:  # 34 steps of five lanes, the rest by two, two and one: none is taken twice
        (steps,) = {trial.user_attrs[NOTES]["steps"] for trial in get_trials(study)}
        assert device.num_steps == 34 + 3 * (steps - 34)
    check_same_results(study, whole)


@pytest.mark.slow
@pytest.mark.parametrize("trials", [40])
def test_memory_does_not_grow_with_trials(tmp_path, trials):
    """Nothing of an ended trial stays: no weights, no lanes, no candidates."""
    kept = []

    def look(event):
        if event["event"] == "trial":
            import gc

            gc.collect()
            types = [type(o) for o in gc.get_objects()]
            kept.append((types.count(TrialRun), types.count(torch.Tensor)))

    settings = make_settings(tmp_path, train={"epochs": 1}, tune={"trials": trials, "parallel": 4})
    settings["tune"]["space"] = {"train.lr": {"low": 1e-3, "high": 1e-2}}
    api.tune(settings, watch=as_lines(look))
    early, late = kept[4:8], kept[-8:-4]
    assert max(count for count, _ in late) <= max(count for count, _ in early)
    assert max(count for _, count in late) <= max(count for _, count in early) + 8


def fail_in_step(number):
    """A device that fails in one step of a pack, counted over all packs."""
    steps = []

    def fail(name, _):
        steps.append(name == "gather")  # once in each step
        is_reached = name == "gather" and sum(steps) == number
        return RuntimeError("CUDA error: invalid argument (planted)") if is_reached else None

    return FaultyDevice(fail)


@pytest.mark.slow
def test_a_search_survives_a_pack_that_fails(tmp_path):
    """Its trials are trained again and score what they would have; the others go on."""
    space = {"model.kind": ["lstm", "mlp"], "train.lr": [0.01, 0.003]}
    tune = {"space": space, "sampler": "grid", "trials": 4, "retrain": 1, "retrain_seeds": 2}
    settings = make_settings(tmp_path, tune=tune)
    whole, _ = run_search(settings | {"out": str(tmp_path / "whole")})
    with fail_in_step(5):
        study, events = run_search(settings)
    assert study.summary["trials"] == {"finished": 4, "pruned": 0, "failed": 0}
    (recovery,) = (event for event in events if event["event"] == "recovery")
    assert recovery["what"] == "a pack failed"
    assert recovery["remedy"].startswith("training trial")
    assert "invalid argument" in recovery["why"]
    (finding,) = study.summary["findings"]
    assert finding.startswith("a pack failed (RuntimeError: CUDA error: invalid argument (planted)")
    assert "invalid argument" in (study.run / "crash.txt").read_text()
    check_same_results(study, whole)


@pytest.mark.slow
def test_trials_whose_packs_fail_twice_are_given_up(tmp_path):
    """The second failure is theirs; the trials of other packs are not affected."""

    def fail(name, _):  # lanes of an mlp multiply their weights together, those of an lstm do not
        is_training = name == "bmm" and torch.is_grad_enabled()
        return ZeroDivisionError("planted") if is_training else None

    space = {"model.kind": ["lstm", "mlp"], "train.lr": [0.01, 0.003]}
    tune = {"space": space, "sampler": "grid", "trials": 4}
    with FaultyDevice(fail):
        study, events = run_search(make_settings(tmp_path, tune=tune))
    assert study.summary["trials"] == {"finished": 2, "pruned": 0, "failed": 2}
    reasons = {t.user_attrs[NOTES]["stopped"] for t in get_trials(study) if t.value is None}
    assert reasons == {"ZeroDivisionError: planted"}
    remedies = [event["remedy"] for event in events if event["event"] == "recovery"]
    assert [remedy.split()[0] for remedy in remedies] == ["training", "giving"]


def test_trials_that_the_data_do_not_allow_fail_alone(tmp_path):
    space = {"data.context": [8, 5000], "train.lr": [0.01, 0.003]}
    tune = {"space": space, "sampler": "grid", "trials": 4}
    study, _ = run_search(make_settings(tmp_path, tune=tune))
    assert study.summary["trials"] == {"finished": 2, "pruned": 0, "failed": 2}
    reasons = {t.user_attrs[NOTES]["stopped"] for t in get_trials(study) if t.value is None}
    assert all("data.context" in reason for reason in reasons)
