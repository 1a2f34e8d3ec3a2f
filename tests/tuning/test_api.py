"""A search: what is tried, how trials share packs, what is counted, and that nothing is lost."""

from __future__ import annotations

import io
import json
import math
import signal

import numpy as np
import optuna
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

import slipstream
from slipstream import Interrupted, UserError, machine, runs
from slipstream import config as configs
from slipstream.config import Range
from slipstream.data import dataset as datasets
from slipstream.data import folds
from slipstream.engine import checkpoint
from slipstream.engine.lanes import pack as packs_of_lanes
from slipstream.engine.single import seed_generators
from slipstream.terminal import print_search
from slipstream.tuning import comparison, retraining
from slipstream.tuning import space as spaces
from slipstream.tuning.api import count_parallel_trials
from slipstream.tuning.packing import grouping
from slipstream.tuning.packing import pack as trial_packs
from slipstream.tuning.packing.trial import TrialRun
from slipstream.tuning.study import NOTES
from tests.conftest import KINDS, close, slow, waves

SPACE = {
    "train.lr": {"low": 1e-3, "high": 3e-2, "log": True},
    "model.hidden": [4, 8],
    "train.batch": [16, 32],
}


def job(tmp_path, table=None, **changed):
    """A search that takes a second or two."""
    path = tmp_path / "waves.parquet"
    if not path.exists():
        pq.write_table(table if table is not None else waves(400), path)
    settings = {
        "name": "s",
        "out": str(tmp_path / "runs"),
        "data": {"path": str(path), "context": 8, "horizon": 2},
        "model": {"hidden": 8, "layers": 1, "dropout": 0.0},
        "train": {"epochs": 3, "batch": 32, "lr": 0.01},
        "engine": {"device": "cpu", "monitor": False, "plan": "off", "threads": 1},
        "tune": {"trials": 6, "retrain": 0, "pruner": "none", "space": SPACE},
    }
    for section, values in changed.items():
        settings[section] = settings[section] | values
    return settings


def found_by(settings, **how):
    seen = []
    study = slipstream.tune(settings, watch=seen.append, **how)
    return study, seen


def trials_of(study):
    return study.study.get_trials(deepcopy=False)


# what is tried


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
def test_how_many_are_under_way(tmp_path, trials, asked, device, workers, wanted):
    settings = job(tmp_path, tune={"trials": trials, "parallel": asked})
    assert count_parallel_trials(configs.load(settings), device, workers) == wanted


def test_every_kind_of_entry():
    config = configs.load(
        {
            "tune": {
                "space": {
                    "train.lr": {"low": 1e-4, "high": 1e-2, "log": True},
                    "model.hidden.0": {"low": 64, "high": 250, "step": 16},
                    "model.dropout": {"low": 0.0, "high": 0.5, "step": 0.25},
                    "model.kind": ["lstm", "gru"],
                    "data.context": [24, 48],
                    "model.hidden": [[8, 4], [16, 8]],
                }
            }
        }
    )
    found = spaces.make_distributions(spaces.make_space(config))
    assert found["train.lr"].log
    assert (found["model.hidden.0"].high, found["model.hidden.0"].step) == (240, 16)
    assert found["model.dropout"].step == 0.25
    assert found["model.kind"].choices == ("lstm", "gru")
    one = spaces.apply_params(
        config,
        config.tune.space,
        {"model.hidden": "[8, 4]", "model.kind": "gru", "train.lr": 0.005, "data.context": 48},
    )
    assert one.model.sizes == (8, 4)
    assert (one.model.kind, one.train.lr, one.data.context) == ("gru", 0.005, 48)


def test_the_usual_space_is_one_that_every_kind_of_model_takes():
    for kind in KINDS:
        config = configs.load({"model": {"kind": kind}})
        space = spaces.make_space(config)
        for name, entry in space.items():
            for value in (entry.low, entry.high) if isinstance(entry, Range) else entry:
                assert configs.replace_settings(config, {name: value})


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"train.lrr": [1, 2]}, 'did you mean "train.lr"'),
        ({"data.horizon": [1, 2]}, "changes the horizon"),
        ({"data.scale": ["standard", "none"]}, "units of the score"),
        ({"seed": [1, 2]}, "chance"),
        ({"engine.precision": ["fp32", "bf16"]}, "does not change the model"),
        ({"train.loss": ["mse", "mae"]}, "tune.metric"),
        ({"train.lr": [0.1, -1]}, "greater than 0"),
        ({"train.batch": [32, "auto"]}, "list numbers"),
        ({"model.hidden.5": [4, 8]}, "counted from 0"),
    ],
)
def test_a_wrong_space_is_named_before_a_folder_is_made(tmp_path, space, told):
    with pytest.raises(UserError, match=told):
        slipstream.tune(job(tmp_path, tune={"space": space}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("base", "space"),
    [
        ({"kind": "transformer", "hidden": 8}, {"model.hidden": [6, 8], "model.heads": [2, 4]}),
        ({"kind": "mlp"}, {"model.kind": ["mlp", "gru"], "model.bidirectional": [True, False]}),
        ({"patch": 2}, {"data.context": [8, 9], "model.patch": [2, 3]}),
        ({}, {"train.lr": [0.01, 0.1], "train.lr_min": [0.0, 0.05]}),
        ({"bidirectional": True}, {"model.kind": ["lstm", "mlp"]}),
    ],
)
def test_settings_that_do_not_go_together_are_no_fault_of_the_space(tmp_path, base, space):
    config = configs.load(job(tmp_path, model=base, tune={"space": space}))
    assert list(spaces.make_space(config)) == list(space)


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"train.lr": [0.1, -1]}, r'"train\.lr": train\.lr is -1'),
        ({"train.quantiles": [[0.5, 0.1], [0.1, 0.5]]}, "must rise"),
        ({"model.hidden.0": [0, 4]}, r'"model\.hidden\.0": model\.hidden is'),
        ({"data.context": [8, 9]}, r"not a multiple of model\.patch = 2"),
        ({"model.options.width": [4, 8]}, "class of your own"),
    ],
)
def test_a_value_that_no_other_choice_makes_fit_is_one(tmp_path, space, told):
    """Whatever else is searched."""
    kinds = {"model.kind": ["lstm", "gru"]}
    settings = job(tmp_path, model={"patch": 2}, tune={"space": kinds | space})
    with pytest.raises(UserError, match=told):
        spaces.make_space(configs.load(settings))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("train", "repeats", 3), ("train", "minutes", 1.0), ("train", "batch", "auto")],
)
def test_what_does_not_go_with_a_search(tmp_path, section, key, value):
    settings = job(tmp_path, tune={"space": {"train.lr": [0.1, 0.01]}})
    settings[section] = settings[section] | {key: value}
    with pytest.raises(UserError, match=f"{section}.{key}"):
        slipstream.tune(settings)


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "gp", "cmaes"])
def test_every_sampler(tmp_path, sampler):
    settings = job(tmp_path, train={"epochs": 1}, tune={"sampler": sampler, "trials": 4})
    if sampler == "grid":
        settings["tune"]["space"] = {"model.hidden": [4, 8], "train.batch": [16, 32]}
    study, _ = found_by(settings)
    tried = [tuple(trial.params.values()) for trial in trials_of(study)]
    assert len(set(tried)) == 4
    assert study.summary["trials"] == {"finished": 4, "pruned": 0, "failed": 0}


def test_a_grid_needs_finitely_many_values(tmp_path):
    with pytest.raises(UserError, match=r'"train\.lr"'):
        slipstream.tune(job(tmp_path, tune={"sampler": "grid"}))


# how trials are trained


def test_a_trial_scores_what_it_would_score_alone(tmp_path):
    """Whatever pack it was in: other widths, batches, neighbours, places taken over."""
    settings = job(tmp_path, tune={"trials": 6, "parallel": 3})
    study, seen = found_by(settings)
    base = configs.load(settings)
    assert study.summary["trials"]["finished"] == 6
    assert sum(event["event"] == "pack" for event in seen) < 6
    for trial in trials_of(study):
        config = spaces.apply_params(base, base.tune.space, trial.params)
        alone = slipstream.train(configs.replace_settings(config, {"out": str(tmp_path / "alone")}))
        losses = [
            e["val_loss"] for e in runs.read_events(runs.Run(alone.run)) if e["event"] == "epoch"
        ]
        close(list(trial.intermediate_values.values()), losses, rel=1e-4)
        close(trial.value, min(losses), rel=1e-4)


def test_kinds_and_contexts_make_packs_of_their_own(tmp_path):
    space = {"model.kind": ["lstm", "mlp"], "data.context": [8, 12], "train.lr": [0.01, 0.003]}
    study, seen = found_by(job(tmp_path, tune={"space": space, "sampler": "grid", "trials": 8}))
    assert study.summary["trials"]["finished"] == 8
    for event in (event for event in seen if event["event"] == "pack"):
        chosen = [trials_of(study)[number].params for number in event["trials"]]
        assert len({(one["model.kind"], one["data.context"]) for one in chosen}) == 1


def test_impossible_settings_fail_by_name_and_the_search_goes_on(tmp_path):
    space = {"model.kind": ["transformer", "mlp"], "model.hidden": [6, 8], "train.lr": [0.01, 0.02]}
    study, _ = found_by(job(tmp_path, tune={"space": space, "sampler": "grid", "trials": 8}))
    failed = [t for t in trials_of(study) if t.state == optuna.trial.TrialState.FAIL]
    assert {(t.params["model.kind"], t.params["model.hidden"]) for t in failed} == {
        ("transformer", 6)
    }
    assert "does not divide" in failed[0].user_attrs[NOTES]["stopped"]
    assert study.summary["trials"] == {"finished": 6, "pruned": 0, "failed": 2}


def test_an_odd_pair_of_drawn_settings_is_a_failed_trial(tmp_path):
    space = {"data.context": [8, 9], "model.patch": [2, 3]}
    tune = {"space": space, "sampler": "grid", "trials": 4}
    study, _ = found_by(job(tmp_path, model={"patch": 2}, train={"epochs": 1}, tune=tune))
    ended = {(t.params["data.context"], t.params["model.patch"]): t for t in trials_of(study)}
    assert study.summary["trials"] == {"finished": 2, "pruned": 0, "failed": 2}
    assert "not a multiple" in ended[9, 2].user_attrs[NOTES]["stopped"]


def test_a_loss_that_is_not_finite_fails_alone(tmp_path):
    space = {"train.lr": [0.01, 1e18]}
    settings = job(tmp_path, train={"clip": "off", "optimizer": "sgd"})
    settings["tune"] |= {"space": space, "sampler": "grid", "trials": 2}
    study, _ = found_by(settings)
    by_rate = {t.params["train.lr"]: t for t in trials_of(study)}
    assert by_rate[0.01].state == optuna.trial.TrialState.COMPLETE
    assert by_rate[1e18].state == optuna.trial.TrialState.FAIL
    assert "finite" in by_rate[1e18].user_attrs[NOTES]["stopped"]


def test_memory_that_runs_out_halves_the_lanes(tmp_path, monkeypatch):
    sizes = []

    def short(places, *given):
        sizes.append(places)
        if places > 2:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return packs_of_lanes.Pack(places, *given)

    monkeypatch.setattr(trial_packs, "Pack", short)
    space = {"train.lr": {"low": 0.001, "high": 0.01}}
    study, seen = found_by(job(tmp_path, tune={"space": space, "trials": 5}))
    assert sizes == [5, 3, 2]
    assert study.summary["trials"]["finished"] == 5
    assert any(event["event"] == "recovery" for event in seen)


def stopping_in_epoch(number):
    sent = []

    def watch(event):
        if event["event"] == "epoch" and event["epoch"] == number and not sent:
            sent.append(number)
            signal.raise_signal(signal.SIGINT)

    return watch


@pytest.mark.parametrize("resumed", [False, True], ids=["begun", "resumed"])
def test_memory_that_runs_out_late_costs_no_step(tmp_path, monkeypatch, resumed):
    engine = {"checkpoint_minutes": 1e-9, "async_checkpoints": False, "log_every": 3}
    settings = job(
        tmp_path,
        train={"epochs": 6},
        engine=job(tmp_path)["engine"] | engine,
        tune={"space": {"train.lr": {"low": 0.001, "high": 0.01}}, "trials": 5, "parallel": 5},
    )
    whole, _ = found_by(settings | {"out": str(tmp_path / "whole")})
    if resumed:
        with pytest.raises(Interrupted):
            slipstream.tune(settings, watch=stopping_in_epoch(3))
    advance, calls, lane_steps = packs_of_lanes.Pack._advance, [], []

    def crowded(made):
        calls.append(len(made.lanes))
        if len(calls) >= (1 if resumed else 35) and len(made.lanes) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        lane_steps.append(int(made.buffers["active"].sum()))
        advance(made)

    monkeypatch.setattr(packs_of_lanes.Pack, "_advance", crowded)
    if resumed:
        (folder,) = (tmp_path / "runs").iterdir()
        study, seen = found_by(None, resume=folder)
    else:
        study, seen = found_by(settings)
    told = [event["remedy"] for event in seen if event["event"] == "recovery"]
    assert [remedy.split(",")[0] for remedy in told] == ["3 lanes at a time", "2 lanes at a time"]
    assert len({remedy.split("from")[1] for remedy in told}) == 1
    if not resumed:
        assert sum(lane_steps) == sum(
            trial.user_attrs[NOTES]["steps"] for trial in trials_of(study)
        )
    same_results(study, whole)


@pytest.mark.parametrize("pruner", ["median", "hyperband", "halving"])
def test_hopeless_trials_are_pruned(tmp_path, pruner):
    """A learning rate next to nothing learns nothing, which shows after an epoch."""
    space = {"train.lr": [1e-7, 2e-7, 0.01, 0.02, 0.03]}
    tune = {"pruner": pruner, "trials": 16, "parallel": 2, "startup_trials": 2, "warmup_epochs": 0}
    settings = job(tmp_path, train={"epochs": 4}, tune=tune | {"space": space, "sampler": "random"})
    study, _ = found_by(settings)
    pruned = [t for t in trials_of(study) if t.state == optuna.trial.TrialState.PRUNED]
    assert pruned
    assert study.summary["trials"]["pruned"] == len(pruned)
    assert study.summary["best"]["params"]["train.lr"] >= 0.01
    for trial in pruned:
        assert trial.user_attrs[NOTES]["epochs"] == len(trial.intermediate_values)
    if pruner == "median":
        assert {t.params["train.lr"] for t in pruned} <= {1e-7, 2e-7, 0.01, 0.02, 0.03}
        assert any(t.params["train.lr"] < 1e-6 for t in pruned)


def test_the_time_that_a_search_may_take(tmp_path):
    tune = {"trials": 500, "minutes": 0.05, "parallel": 4}
    study, _ = found_by(job(tmp_path, train={"epochs": 40}, tune=tune))
    counts = study.summary["trials"]
    assert 0 < sum(counts.values()) < 500


def test_classes_are_searched_too(tmp_path):
    """With weights that come from the training windows, and dropped in by every trial."""
    table = waves(400)
    first = np.asarray(table.column(1))
    up = first > np.median(first)
    table = table.append_column("up", pa.array(np.where(up, "yes", "no")))
    inputs = table.column_names[1:-1]
    data = {"task": "classify", "targets": ["up"], "horizon": 0, "inputs": inputs}
    measured = {"plan": "cached", "threads": "auto"}
    settings = job(tmp_path, table, data=data, train={"class_weights": "balanced"}, engine=measured)
    settings["tune"] |= {"retrain": 1, "retrain_seeds": 2, "trials": 3}
    study, _ = found_by(settings)
    assert study.summary["trials"]["finished"] == 3
    assert study.summary["test"]["best"]["metrics"]["test"]["accuracy"] > 0.8
    assert study.summary["comparison"]["metric"] == "log_loss"
    page = slipstream.report(study.run).read_text(encoding="utf-8")
    figures = page.split("On the test set")[1].split("</table>")[0]
    assert "<th>log-loss</th><th>balanced accuracy</th>" in figures
    assert "majority" in figures
    assert "test log-loss against the defaults" in page
    out = io.StringIO()
    print_search(study.summary | {"report": "report.html"}, Console(file=out, width=200))
    assert "log-loss" in out.getvalue().split("test set")[1]


# folds


def test_folds_walk_back_from_the_validation_block():
    config = configs.load({"data": {"context": 8, "horizon": 2}})
    dataset = datasets.load_dataset(config, waves(400))
    starts, signature = dataset.memory.starts, dataset.signature
    offsets = torch.from_numpy(dataset.index.offsets)
    found = folds.find_search_folds(starts, 3, offsets=offsets, signature=signature, purge=0)
    assert torch.equal(found[-1]["train"], starts["train"])
    assert torch.equal(found[-1]["val"], starts["val"])
    first_test = int(starts["test"].min()) + signature.lead
    sizes = [len(fold["val"]) for fold in found]
    assert max(sizes) - min(sizes) <= 1
    for fold in found:
        last_of_training = int(fold["train"].max()) + signature.lead + signature.steps_out
        assert last_of_training <= int(fold["val"].min()) + signature.lead
        assert int(fold["val"].max()) + signature.lead + signature.steps_out <= first_test
    before = [int(fold["val"].min()) for fold in found]
    assert before == sorted(before)


def test_a_trial_is_scored_by_its_folds(tmp_path):
    settings = job(tmp_path, tune={"folds": 3, "trials": 4})
    study, seen = found_by(settings)
    epochs = [event for event in seen if event["event"] == "epoch"]
    for trial in trials_of(study):
        for step, value in trial.intermediate_values.items():
            mine = [
                event["val_loss"]
                for event in epochs
                if event["trial"] == trial.number and event["epoch"] == step + 1
            ]
            assert len(mine) == 3
            close(value, float(np.mean(mine)), rel=1e-6)


def test_all_folds_of_a_pruned_trial_end(tmp_path):
    space = {"train.lr": [1e-7, 0.01, 0.02]}
    tune = {"pruner": "median", "folds": 3, "trials": 12, "space": space, "sampler": "random"}
    tune |= {"startup_trials": 1, "warmup_epochs": 0, "parallel": 2}
    study, seen = found_by(job(tmp_path, train={"epochs": 4}, tune=tune))
    pruned = [t.number for t in trials_of(study) if t.state == optuna.trial.TrialState.PRUNED]
    assert pruned
    ends = [event for event in seen if event["event"] == "lane" and event["trial"] in pruned]
    assert len(ends) == 3 * len(pruned)
    for number in pruned:
        mine = [end for end in ends if end["trial"] == number]
        assert {end["stopped"] for end in mine} <= {"pruned", "all epochs done"}
        moments = [end["at_s"] for end in mine if end["stopped"] == "pruned"]
        others = [event for event in seen if event["event"] == "epoch" and event["trial"] == number]
        assert max(event["at_s"] for event in others) <= max(moments)


def test_the_wilcoxon_pruner_compares_folds(tmp_path):
    space = {"train.lr": [1e-7, 0.01, 0.02]}
    tune = {"pruner": "wilcoxon", "folds": 4, "trials": 6, "space": space, "sampler": "grid"}
    tune |= {"retrain": 1, "retrain_seeds": 2}
    study, _ = found_by(job(tmp_path, tune=tune))
    for trial in trials_of(study):
        if trial.state == optuna.trial.TrialState.COMPLETE:
            assert sorted(trial.intermediate_values) == [0, 1, 2, 3]
    again = study.summary["retrained"]
    assert [len(one["losses"]) for one in again] == [2, 2]  # by seeds, no longer by folds
    assert all(math.isfinite(loss) for one in again for loss in one["losses"])


def test_too_many_folds_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"tune\.folds = 9"):
        slipstream.tune(job(tmp_path, tune={"folds": 9}))


# the test set, retraining


def test_the_test_set_is_out_of_reach_before_the_retraining(tmp_path):
    """Other test rows, same search: to the bit."""
    table = waves(400)
    other = table.to_pandas()
    other.iloc[-80:, 1:] = 1e6
    first, _ = found_by(job(tmp_path, table))
    (tmp_path / "b").mkdir()
    second, _ = found_by(job(tmp_path / "b", pa.Table.from_pandas(other, preserve_index=False)))
    assert [t.intermediate_values for t in trials_of(first)] == [
        t.intermediate_values for t in trials_of(second)
    ]


def test_the_best_are_trained_again_and_told_beside_the_default(tmp_path):
    settings = job(tmp_path, tune={"retrain": 2, "retrain_seeds": 2, "trials": 4})
    study, _ = found_by(settings)
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


def test_how_much_better_it_is_given_the_seeds():
    def told(mean, sd, n=3):
        return {"judged_by": "mse", "spread": {"mse": {"mean": mean, "sd": sd, "n": n}}}

    clear = comparison.compare_test_errors(told(1.0, 0.1), told(2.0, 0.1))
    assert clear["verdict"] == "better"
    assert clear["gain"] == 1.0
    # Welch by hand: standard error 0.1 * sqrt(2 / 3), 4 degrees of freedom
    assert clear["low"] == pytest.approx(1 - 2.7764 * 0.1 * math.sqrt(2 / 3), abs=1e-4)
    assert (
        comparison.compare_test_errors(told(1.0, 1.0), told(2.0, 1.0))["verdict"]
        == "no difference shown"
    )
    assert comparison.compare_test_errors(told(3.0, 0.1), told(2.0, 0.1))["verdict"] == "worse"


def test_no_target_counts_for_its_unit_in_the_verdict():
    """A column in mA beside one in V: what is better in standardised units is better."""

    def told(scaled, physical):
        spreads = {"spread": physical, "scaled_spread": scaled}
        over = {key: {"mse": {"mean": mean, "sd": 0.01, "n": 3}} for key, mean in spreads.items()}
        return {"judged_by": "mse"} | over

    found = comparison.compare_test_errors(told(0.5, 4e6), told(1.0, 1e6))
    assert found["verdict"] == "better"
    assert found["gain"] == 0.5


# groups


def candidate(number, **settings):
    base = configs.load({"model": {"hidden": 64, "layers": 1}, "train": {"batch": 128}})
    return TrialRun(number, configs.replace_settings(base, settings))


def test_shapes_share_what_lanes_may_differ_in():
    one, other, wider, deeper = (
        candidate(0, **{"train.lr": 0.1}),
        candidate(1, **{"seed": 5, "train.weight_decay": 0.1, "model.hidden": 60}),
        candidate(2, **{"model.hidden": 100}),
        candidate(3, **{"model.layers": 2}),
    )
    shapes = [grouping.get_pack_shape(c.config, "cuda") for c in (one, other, wider, deeper)]
    assert shapes[0] == shapes[1]
    assert shapes[2].covers(shapes[0])
    assert not shapes[0].covers(shapes[2])
    assert shapes[3].program != shapes[0].program


def test_few_of_a_shape_join_others_where_a_step_costs_more_than_padding():
    waiting = [candidate(i, **{"model.hidden": 128}) for i in range(12)]
    waiting += [candidate(20, **{"model.hidden": 96}), candidate(21, **{"model.hidden": 48})]
    assert len(grouping.group_trials(waiting, "cuda", 100_000)) == 1
    alone = grouping.group_trials(waiting, "cpu", 100_000)
    assert len(alone) == 3


def test_every_candidate_is_in_one_group():
    draw = np.random.default_rng(0)
    waiting = [
        candidate(
            i,
            **{
                "model.hidden": int(draw.choice([16, 40, 64, 120, 200])),
                "train.batch": int(draw.choice([64, 128, 256])),
                "data.context": int(draw.choice([24, 48])),
            },
        )
        for i in range(60)
    ]
    for device in ("cuda", "cpu"):
        found = grouping.group_trials(waiting, device, 50_000)
        assert sorted(one.number for group in found for one in group.trials) == list(range(60))
        for group in found:
            for one in group.trials:
                assert group.shape.covers(grouping.get_pack_shape(one.config, device))


# nothing is lost


def test_a_stopped_search_goes_on_to_the_same_end(tmp_path):
    settings = job(tmp_path, train={"epochs": 6}, tune={"trials": 6, "parallel": 6})
    whole, _ = found_by(settings | {"out": str(tmp_path / "whole")})

    stopped_at = []

    def stop_once(event):
        if event["event"] == "epoch" and event["epoch"] == 3 and not stopped_at:
            stopped_at.append(event["trial"])
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        slipstream.tune(settings, watch=stop_once)
    assert "slipstream tune --resume" in str(stopped.value)
    (folder,) = (tmp_path / "runs").iterdir()
    study, _ = found_by(None, resume=folder)
    same_results(study, whole)


def test_a_search_stopped_between_the_folds_of_trials_knows_how_the_first_ended(tmp_path):
    """Folds with fewer windows end earlier, and are not trained again."""
    space = {"train.lr": {"low": 1e-3, "high": 3e-2}}
    settings = job(tmp_path, tune={"folds": 3, "trials": 4, "parallel": 4, "space": space})
    whole, _ = found_by(settings | {"out": str(tmp_path / "whole")})
    ended = []

    def stop_once(event):
        if event["event"] == "lane":
            ended.append((event["trial"], event["fold"]))
        if event["event"] == "lane" and len(ended) == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        slipstream.tune(settings, watch=stop_once)
    (folder,) = (tmp_path / "runs").iterdir()
    (newest,) = folder.glob("packs/*")
    saved, _ = checkpoint.read_newest(runs.Run(newest))
    outcomes = saved.metadata["search"]["fold_results"]
    assert {(int(n), int(fold)) for n, told in outcomes.items() for fold in told} == set(ended)
    study, seen = found_by(None, resume=folder)
    for one, other in zip(trials_of(study), trials_of(whole), strict=True):
        assert (one.params, one.state) == (other.params, other.state)
        close(one.value, other.value, rel=1e-6)
        assert one.intermediate_values.keys() == other.intermediate_values.keys()
    later = [(event["trial"], event["fold"]) for event in seen if event["event"] == "lane"]
    assert sorted(ended + later) == [(trial, fold) for trial in range(4) for fold in range(3)]


def same_results(study, whole):
    assert len(trials_of(study)) == len(trials_of(whole))
    for one, other in zip(trials_of(study), trials_of(whole), strict=True):
        assert one.params == other.params
        assert one.state == other.state
        assert one.value == pytest.approx(other.value, rel=1e-6)
        assert one.intermediate_values.keys() == other.intermediate_values.keys()
    assert study.summary["best"] == whole.summary["best"] | {
        "value": pytest.approx(whole.summary["best"]["value"], rel=1e-6)
    }


def test_other_settings_are_refused_on_the_way_on(tmp_path):
    settings = job(tmp_path, train={"epochs": 1}, tune={"trials": 2})
    study, _ = found_by(settings)
    with pytest.raises(UserError, match=r"train\.lr"):
        slipstream.tune(None, resume=study.run, overrides=("train.lr=0.5",))
    more, _ = found_by(None, resume=study.run, overrides=("tune.trials=4",))
    assert len(trials_of(more)) == 4


def test_the_study_opens_in_optuna(tmp_path):
    study, _ = found_by(job(tmp_path, train={"epochs": 1}, tune={"trials": 3}))
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(study.run / "study.log"))
    )
    names = optuna.study.get_all_study_names(storage)
    again = optuna.load_study(study_name=names[0], storage=storage)
    assert again.best_value == study.summary["best"]["value"]
    assert len(again.trials) == 3


@pytest.mark.parametrize("trials", [16, slow(40)])
def test_memory_does_not_grow_with_trials(tmp_path, trials):
    """Nothing of an ended trial stays: no weights, no lanes, no candidates."""
    kept = []

    def look(event):
        if event["event"] == "trial":
            import gc

            gc.collect()
            types = [type(o) for o in gc.get_objects()]
            kept.append((types.count(TrialRun), types.count(torch.Tensor)))

    settings = job(tmp_path, train={"epochs": 1}, tune={"trials": trials, "parallel": 4})
    settings["tune"]["space"] = {"train.lr": {"low": 1e-3, "high": 1e-2}}
    slipstream.tune(settings, watch=look)
    early, late = kept[4:8], kept[-8:-4]
    assert max(count for count, _ in late) <= max(count for count, _ in early)
    assert max(count for _, count in late) <= max(count for _, count in early) + 8


# settings that fail


DIVERGING = {"lr": 1e18, "clip": "off", "optimizer": "sgd", "epochs": 2}


def shown_of(study):
    """What the screen and the report say."""
    out = io.StringIO()
    console = Console(file=out, width=400, highlight=False)
    print_search(study.summary | {"report": "report.html"}, console)
    page = slipstream.report(study.run).read_text(encoding="utf-8")
    return out.getvalue(), page


def test_a_default_that_never_reaches_a_finite_loss_is_a_finding(tmp_path):
    tune = {"space": {"train.lr": [0.01, 0.02]}, "trials": 2, "sampler": "grid"}
    tune |= {"retrain": 1, "retrain_seeds": 2}
    study, _ = found_by(job(tmp_path, train=DIVERGING, tune=tune))
    summary = json.loads((study.run / "metrics.json").read_text())
    assert summary["trials"]["finished"] == 2
    told = "the config without a search did not reach a finite loss from any of 2 seeds"
    assert summary["findings"] == [told]
    assert summary["comparison"]["verdict"] == "default failed"
    assert summary["comparison"]["chosen"]["n"] == 2
    assert summary["test"]["default"]["failed"]
    assert configs.load(study.run / "best.toml").train.lr in (0.01, 0.02)
    for text in shown_of(study):
        assert told in text
        assert "Only the chosen settings reached a finite loss" in text
    assert len(slipstream.predict(study.run, tmp_path / "waves.parquet")) > 0
    again, _ = found_by(None, resume=study.run)
    assert again.summary["comparison"] == study.summary["comparison"]


def fragile(tmp_path, *, default, tried, seeds=2):
    """A search whose models start with infinite weights: of the default from the first so many of
    the seeds that it is trained again from, of every trial likewise; none of the search itself."""
    device = torch.device("cpu")

    def draw(seed):
        with seed_generators(seed, device):
            return float(torch.rand(()))

    for seed in range(500):
        again = [draw(seed + retraining.SEED_OFFSET + i) for i in range(seeds)]
        if max(again) < draw(seed):
            break
    shares = [0.0, *(sorted(again))]
    between = [(a + b) / 2 for a, b in zip(shares, [*shares[1:], draw(seed)], strict=True)]
    between[0] = 0.0
    space = {"model.options.share": [between[tried]], "train.lr": [0.01, 0.02]}
    tune = {"trials": 2, "sampler": "grid", "retrain": 1, "retrain_seeds": seeds, "space": space}
    settings = job(tmp_path, train={"epochs": 2}, tune=tune)
    options = {"share": between[default]}
    settings["model"] = {"kind": "tests.models.nets:Fragile", "options": options}
    return settings | {"seed": seed}


@pytest.mark.parametrize(
    ("default", "tried", "verdict", "told"),
    [
        (
            1,
            0,
            "too few seeds",
            "the config without a search did not reach a finite loss from 1 of",
        ),
        slow(0, 1, "too few seeds", "did not reach a finite loss from 1 of 2 seeds"),
        (0, 2, "chosen failed", "did not reach a finite loss from any of 2 seeds"),
        slow(
            2, 2, "both failed", "the config without a search did not reach a finite loss from any"
        ),
        (2, 1, "default failed", "did not reach a finite loss from 1 of 2 seeds"),
    ],
)
def test_seeds_without_a_finite_loss_are_told(tmp_path, default, tried, verdict, told):
    study, _ = found_by(fragile(tmp_path, default=default, tried=tried))
    summary = json.loads((study.run / "metrics.json").read_text())
    assert summary["comparison"]["verdict"] == verdict
    assert summary["comparison"]["gain"] is None
    assert any(told in text for text in summary["findings"])
    for text in shown_of(study):
        for finding in summary["findings"]:
            assert finding in text
    assert bool(summary["test"]["best"]["failed"]) == (tried == 2)
    assert len(slipstream.predict(study.run, tmp_path / "waves.parquet")) > 0
    again, _ = found_by(None, resume=study.run)
    assert again.summary["findings"] == summary["findings"]


def test_fewer_seeds_are_compared_where_two_are_left(tmp_path):
    study, _ = found_by(fragile(tmp_path, default=1, tried=0, seeds=3))
    found = study.summary["comparison"]
    assert (found["default"]["n"], found["chosen"]["n"]) == (2, 3)
    assert found["verdict"] in ("better", "worse", "no difference shown")
    for text in shown_of(study):
        assert "2 and 3 seeds" in text


def test_of_the_best_the_one_with_fewer_failed_seeds_is_chosen():
    config = configs.load({})
    losses = {0: [0.1, math.inf], 1: [math.inf, math.inf], 2: [0.9, 0.8], 3: [0.2, math.nan]}
    again = [retraining.RetrainedConfig(trial, config, found) for trial, found in losses.items()]
    assert [one.trial for one in sorted(again, key=lambda one: one.rank)] == [2, 0, 3, 1]


def test_a_search_whose_trials_all_fail_leaves_them_on_record(tmp_path):
    tune = {"space": {"train.lr": [1e18, 1e19]}, "trials": 2, "sampler": "grid", "retrain": 1}
    with pytest.raises(UserError, match=r"no trial finished .*trials\.json .*correct tune\.space"):
        slipstream.tune(job(tmp_path, train=DIVERGING, tune=tune))
    folder = runs.find_last(str(tmp_path / "runs"))
    assert [one["state"] for one in runs.read_json(folder / "trials.json")] == ["failed"] * 2
    with pytest.raises(UserError, match="no trial finished"):
        slipstream.tune(resume=folder)


@pytest.mark.parametrize(
    ("moment", "pending"),
    [(["retrained"], "retrained"), slow(["start", "epoch"], "test runs")],
    ids=["retrained", "tested"],
)
def test_a_search_writes_its_results_before_it_retrains_the_best(tmp_path, moment, pending):
    settings = job(tmp_path, tune={"retrain": 1, "retrain_seeds": 2, "trials": 3})
    left = list(moment)

    def stop(event):
        if left and event["event"] == left[0]:
            left.pop(0)
            if not left:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        slipstream.tune(settings, watch=stop)
    folder = runs.find_last(str(tmp_path / "runs"))
    assert pending in runs.read_json(folder / "metrics.json")["pending"]
    assert len(runs.read_json(folder / "trials.json")) == 3
    assert configs.load(folder / "best.toml").train.lr
    assert "The search is not complete" in slipstream.report(folder).read_text()
    result, _ = found_by(None, resume=folder)
    assert result.summary["pending"] is None
    assert result.summary["comparison"]
