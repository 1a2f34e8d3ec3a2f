"""`slipstream auto`: its candidates, what it chooses from them, and what becomes of the answer."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import optuna
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from optuna.trial import TrialState

import slipstream
from slipstream import UserError, runs
from slipstream import config as configs
from slipstream.config import search_space as spaces
from slipstream.data import folds
from slipstream.scoring.batch import Baseline
from slipstream.search import candidates, portfolio
from slipstream.search.auto import _add_share, _is_rival, choose, choose_in_time, plan_seeds
from slipstream.search.budget import MARGIN
from slipstream.search.candidates import (
    AutoCosts,
    BaselineCandidate,
    find_useful_context,
    lengthen,
    make_estimate,
    prepare_auto,
    shorten,
)
from slipstream.search.library import Advantage, Block, Combination, Library
from slipstream.search.portfolio import Facts
from slipstream.search.storage import NOTES
from slipstream.tools.inspection import Aim, propose_config
from slipstream.training.fitting import load_dataset
from tests.conftest import assert_interval_scores, merged
from tests.search.searches import make_trial


def make_table(num_rows=900, *, columns=("load", "temp")):
    draw = np.random.default_rng(0)
    rows = np.arange(num_rows)
    day = np.sin(2 * np.pi * rows / 24)
    values = {"load": day + 0.1 * draw.standard_normal(num_rows)}
    values["temp"] = np.cos(2 * np.pi * rows / 24) + 0.2 * draw.standard_normal(num_rows)
    start = np.datetime64("2024-01-01T00:00:00", "s")
    time_column = start + rows * np.timedelta64(3600, "s")
    return pa.table({"time": time_column, **{name: values[name] for name in columns}})


def make_settings(folder, **data):
    engine = {"device": "cpu", "monitor": False, "plan": "off"}
    section = {"targets": ["load"], "time": "time", "context": 24, "horizon": 4} | data
    return {"name": "a", "out": str(folder / "runs"), "data": section, "engine": engine}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto")
    return slipstream.auto(make_settings(folder), make_table(), minutes=0.4, quiet=True)


def test_the_answer_is_a_run_with_a_leaderboard(study):
    summary = study.summary
    assert math.isclose(sum(row["weight"] for row in summary["ensemble"]), 1.0)
    assert {row["name"] for row in summary["ensemble"]} <= {
        row["name"] for row in summary["leaderboard"]
    }
    ranked = [row["val"] for row in summary["leaderboard"] if row["val"] is not None]
    assert ranked == sorted(ranked)
    kinds = {row["kind"] for row in summary["leaderboard"]}
    assert {"ridge", "gbm", "seasonal", "repeat"} <= kinds
    assert set(summary["metrics"]) == {"train", "val", "test"}
    predicted = study.run / "retrained" / "best" / "predictions.parquet"
    assert_interval_scores(summary, predicted, ["load"])
    assert study.verdict == summary["verdict"]
    assert len(study.leaderboard) == len(summary["leaderboard"])


def test_it_is_no_worse_than_its_best_baseline(study):
    """By more than the noise of a short test set."""
    own = study.summary["scaled"]["test"]["mse"]
    found = study.summary["baselines"].values()
    assert own < 1.1 * min(one["scaled"]["test"]["mse"] for one in found if one)


def test_commands_take_its_folder(study):
    table = make_table(300)
    assert study.predict(table).num_rows == 4
    scores = slipstream.evaluate(study.run, table)
    assert all(map(math.isfinite, scores["metrics"].values()))
    assert slipstream.report(study.run).exists()
    assert runs.read_metrics(study.run)["leaderboard"]


def test_a_finished_answer_stays(study):
    before = (study.run / "metrics.json").read_bytes()
    again = slipstream.auto(resume=study.run, data=make_table(), quiet=True)
    assert again.summary["verdict"] == study.verdict
    assert (study.run / "metrics.json").read_bytes() == before


def test_a_baseline_that_takes_too_long_is_tested_but_no_candidate(tmp_path, monkeypatch):
    monkeypatch.setattr(candidates, "MAX_FITS_SHARE", 0.0)
    monkeypatch.setattr(candidates, "FREE_FIT_SHARE", 0.0)
    settings = make_settings(tmp_path)
    summary = slipstream.auto(settings, make_table(), minutes=0.2, quiet=True).summary
    rows = {row["name"]: row for row in summary["leaderboard"]}
    for name in ("ridge", "seasonal", "repeat"):
        assert rows[name]["state"] == "failed"
        assert "too much of the minutes" in rows[name]["stopped"]
        assert rows[name]["val"] is None
        # the answer is compared with one of each kind, which reads what its reference does
        (tested,) = {row["test"] for row in rows.values() if row["kind"] == name} - {None}
        assert tested == summary["baselines"][name]["scaled"]["test"]["mse"]
    assert rows["gbm"]["state"] == "baseline"
    assert not {row["name"] for row in summary["ensemble"]} & {"ridge", "seasonal", "repeat"}


def test_a_baseline_that_takes_next_to_no_time_is_a_candidate_however_late(tmp_path, monkeypatch):
    monkeypatch.setattr(candidates, "MAX_FITS_SHARE", 0.0)
    monkeypatch.setattr(candidates, "FREE_FIT_SHARE", 1.0)
    summary = slipstream.auto(
        make_settings(tmp_path), make_table(), minutes=0.1, quiet=True
    ).summary
    states = {row["name"]: row["state"] for row in summary["leaderboard"]}
    assert states["ridge"] == states["repeat"] == "baseline"


def test_the_given_config_is_among_the_candidates(tmp_path):
    config = configs.load(make_settings(tmp_path, context=20))
    search, plan, _ = prepare_auto(config, make_table(), minutes=1.0, prefer="best")
    given = portfolio.read_given(search)
    assert portfolio.is_in_space(
        {name: given[name] for name in search.tune.space}, search.tune.space
    )
    for candidate in plan.candidates:
        assert portfolio.is_in_space(
            {name: candidate[name] for name in search.tune.space}, search.tune.space
        )
    assert search.data.context == 20
    assert max(plan.facts.contexts) > 20
    assert search.tune.folds == 2


def test_neighbours_are_valid_configs(tmp_path):
    config = configs.load(make_settings(tmp_path))
    search, plan, _ = prepare_auto(config, make_table(), minutes=1.0, prefer="best")
    generator, inside = random.Random(0), []
    for candidate in plan.candidates * 3:
        changed = portfolio.change_params(candidate, plan.facts, search, generator, "best")
        values = {name: changed[name] for name in search.tune.space}
        inside.append(portfolio.is_in_space(values, search.tune.space))  # others are drawn again
        if inside[-1]:
            spaces.apply_params(search, search.tune.space, values)
    assert sum(inside) > len(inside) / 2


def test_forecasts_are_tried_from_the_targets_past_alone(tmp_path):
    config = configs.load(make_settings(tmp_path))
    search, plan, cache = prepare_auto(config, make_table(), minutes=1.0, prefer="best")
    assert search.data.inputs == ("temp", "load")
    assert plan.facts.own_inputs == ("load",)
    own = [row for row in plan.candidates if portfolio.reads_own(row, plan.facts)]
    assert 0 < len(own) < len(plan.candidates)
    values = {name: own[0][name] for name in search.tune.space}
    applied = spaces.apply_params(search, search.tune.space, values)
    assert applied.data.inputs == ("load",)
    assert cache.get(applied).dataset.signature.inputs == ("load",)
    alone, plan, _ = prepare_auto(config, make_table(columns=("load",)), minutes=1.0, prefer="best")
    assert plan.facts.own_inputs == ()
    assert "data.inputs" not in alone.tune.space


def test_columns_that_are_known_ahead_belong_to_the_own_past(tmp_path):
    config = configs.load(make_settings(tmp_path, future=["temp"]))
    _, plan, _ = prepare_auto(config, make_table(), minutes=1.0, prefer="best")
    assert plan.facts.own_inputs == ()  # there are no others


def test_a_column_that_alone_lacks_values_is_not_left_out(tmp_path):
    """The windows of all candidates are the same."""
    table = make_table()
    temp = table["temp"].to_numpy().copy()
    temp[-40] = np.nan
    table = table.set_column(table.column_names.index("temp"), "temp", [temp])
    config = configs.load(make_settings(tmp_path, missing="drop"))
    _, plan, _ = prepare_auto(config, table, minutes=1.0, prefer="best")
    assert plan.facts.own_inputs == ()


def test_a_cpu_tries_more_of_the_inputs_that_baselines_find_better(tmp_path):
    config = configs.load(make_settings(tmp_path))
    _, plan, _ = prepare_auto(config, make_table(), minutes=1.0, prefer="best")
    order = portfolio.order_candidates(plan.candidates, plan.facts, True)
    first = [portfolio.reads_own(row, plan.facts) for row in order[:6]]
    assert sum(first) == 4
    assert sorted(map(str, order)) == sorted(map(str, plan.candidates))
    assert portfolio.order_candidates(plan.candidates, plan.facts, None) == plan.candidates


@pytest.mark.parametrize(("factor", "context"), [(0.5, 96), (0.97, 0), (2.0, 0)])
def test_candidates_read_the_rows_that_a_ridge_gains_from(factor, context):
    """A season of a week explains what a day does not."""
    library = Library([Block(torch.arange(400), 1.0), Block(torch.arange(400), 2.0)], "mse")
    for number in range(2):
        errors = torch.randn(400, generator=torch.Generator().manual_seed(number))
        library.add("ridge", number, errors)
        library.add("ridge, 96 rows", number, factor**0.5 * errors)
        library.add("trial 0", number, 0.1 * errors)
    assert find_useful_context(library, 96) == context
    assert find_useful_context(library, 48) == 0  # none was fitted to as many


def test_the_most_rows_replace_all_contexts_but_the_shortest(tmp_path):
    config = configs.load(make_settings(tmp_path))
    search, plan, _ = prepare_auto(config, make_table(), minutes=1.0, prefer="best")
    shortest, longest = plan.facts.contexts[0], plan.facts.contexts[-1]
    for candidate in plan.candidates:
        assert portfolio.lengthen_context(candidate, 0, plan.facts) == candidate
        longer = portfolio.lengthen_context(candidate, longest, plan.facts)
        is_shortest = candidate["data.context"] == shortest
        assert longer["data.context"] == (shortest if is_shortest else longest)
        values = {name: longer[name] for name in search.tune.space}
        assert portfolio.is_in_space(values, search.tune.space)
        spaces.apply_params(search, search.tune.space, values)


def test_what_a_baseline_solves_is_not_trained_on_a_cpu(tmp_path):
    config = configs.load(make_settings(tmp_path, horizon=0))
    for device, trained in (("cpu", 0), ("cuda", 1)):
        search, plan, _ = prepare_auto(config, make_table(), minutes=1.0, prefer="best")
        rows = portfolio.make_candidates(search, replace(plan.facts, device=device), "best")
        assert sum(row["model.kind"] == "linear" for row in rows) == trained


def make_rivals(gain):
    """A library in which a baseline is this much worse than each of two networks, whose errors
    cancel in part, so that their mean is better."""
    library = Library([Block(torch.arange(400), 1.0), Block(torch.arange(400), 2.0)], "mse")
    for number in range(2):
        shared = torch.randn(400, generator=torch.Generator().manual_seed(number))
        wave = 0.1 * torch.cos(torch.arange(400.0))
        library.add("trial 0", number, shared + wave)
        library.add("trial 1", number, shared - wave)
        library.add("ridge", number, (1 + gain) ** 0.5 * shared)
    return library


def choose_from(library, name="ridge"):
    library.errors[name], library.losses[name] = library.errors["ridge"], library.losses["ridge"]
    trials = [make_trial(number, TrialState.COMPLETE, 1.0) for number in range(2)]
    candidate = BaselineCandidate(name, configs.Config(), Baseline("", None), 1.0, {})
    return choose(library, "best", trials, {name: candidate})


def test_a_baseline_that_an_ensemble_hardly_beats_has_half_of_its_weight():
    hedged = choose_from(make_rivals(0.005))
    assert hedged.weights["ridge"] == pytest.approx(0.5)
    assert hedged.rival == "ridge"
    assert len(hedged.weights) > 1
    clear = choose_from(make_rivals(0.3))
    assert clear.weights.get("ridge", 0.0) < 0.5
    assert clear.rival is None
    trivial = choose_from(make_rivals(0.005), "repeat").weights
    assert trivial["repeat"] == pytest.approx(0.8)


def test_members_with_next_to_no_weight_are_left_out():
    found = Combination({"trial 0": 0.95, "trial 1": 0.05}, 0.1, 0.1, 0.0)
    hedged = _add_share(found, ["repeat"], 0.8)
    assert set(hedged.weights) == {"repeat", "trial 0"}
    assert sum(hedged.weights.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("gain", "certainty", "rivals"),
    [
        (0.01, 1.5, {"ridge", "repeat"}),
        (0.045, 2.8, {"repeat"}),
        (0.01, 2.8, {"repeat"}),
        (0.045, 4.5, set()),
        (0.1, 1.0, set()),
    ],
)
def test_a_baseline_that_has_learnt_nothing_is_a_rival_for_longer(gain, certainty, rivals):
    """The best of many networks on one price series was 4.7 % better than the last value, by 2.8
    standard errors, and worse on the test set."""
    advantages = {name: Advantage(gain, certainty) for name in ("ridge", "repeat")}
    found = Combination({"trial 0": 1.0}, 0.1, 0.1, 0.0, advantages)
    assert {name for name in advantages if _is_rival(found, name)} == rivals


@pytest.mark.parametrize(("windows", "members"), [(12, 2), (400, 1)])
def test_few_windows_prefer_an_ensemble_to_the_one_model_that_was_best(windows, members):
    library = Library([Block(torch.arange(windows), 1.0), Block(torch.arange(windows), 2.0)], "mse")
    for number in range(2):
        errors = torch.randn(windows, generator=torch.Generator().manual_seed(number))
        library.add("trial 0", number, errors)
        library.add("trial 1", number, 1.05 * errors)
    trials = [make_trial(number, TrialState.COMPLETE, 1.0) for number in range(2)]
    assert len(choose(library, "best", trials, {}).weights) == members


def test_a_candidate_that_would_not_end_in_time_is_not_begun(tmp_path):
    config = configs.load(make_settings(tmp_path))
    _, plan, _ = prepare_auto(config, make_table(), minutes=1.0, prefer="best")
    given, facts = portfolio.read_given(config), plan.facts
    short, long = plan.candidates[0], {**plan.candidates[0], "train.epochs": 10_000}
    estimate_s = portfolio.estimate_training_s(short, facts)
    notes = {NOTES: {"seconds": 3 * estimate_s}}  # this machine takes three times the estimate
    ended = [optuna.trial.create_trial(value=1.0, user_attrs=notes)]
    ended[0].params = {}
    share = make_estimate(ended, short, facts, 4 * estimate_s)
    assert share(short) == pytest.approx(4 / 3)
    assert share(long) < 1
    assert make_estimate(ended, short, facts, 2 * estimate_s)(short) < 1
    assert make_estimate([], given, facts, 0.0)(long) > 1  # nothing is known yet
    assert make_estimate(ended, short, replace(facts, device="cuda"), 0.0)(long) > 1


def test_where_no_candidate_would_end_in_time_one_has_fewer_epochs():
    slow, tried, fair = (
        {"model.kind": kind, "train.epochs": epochs}
        for kind, epochs in (("transformer", 100), ("mlp", 20), ("gru", 10))
    )

    def find_share(params):
        return 6 / params["train.epochs"]

    found = shorten([slow, tried, fair], [{**tried, "train.epochs": 5}], find_share)
    assert found == {"model.kind": "gru", "train.epochs": 6}
    assert shorten([slow], [], find_share) is None
    assert shorten([fair], [fair], find_share) is None


def test_small_models_are_small(tmp_path):
    config = configs.load(make_settings(tmp_path))
    _, plan, _ = prepare_auto(config, make_table(), minutes=1.0, prefer="small")
    assert all(row["model.hidden"] <= 32 for row in plan.candidates)
    assert all(row["model.kind"] != "transformer" for row in plan.candidates)


def test_epochs_fit_into_the_time():
    facts = Facts("cpu", 10**7, (96,), 24, 5, 1, True, 0, 1.0, 2)
    row = {"model.kind": "transformer", "data.context": 96, "model.hidden": 128}
    params = portfolio.complete_params(row, configs.Config(), facts)
    assert params["train.epochs"] == 1


def test_a_faster_machine_trains_a_candidate_for_more_epochs():
    facts = Facts("cpu", 5_000, (96,), 24, 5, 1, True, 0, 1.0, 2)
    row = {"model.kind": "lstm", "data.context": 96, "model.hidden": 128}
    slow, fast = (
        portfolio.complete_params(row, configs.Config(), replace(facts, product_flops=speed))
        for speed in (5e10, 2e11)
    )
    assert 1 <= slow["train.epochs"] < fast["train.epochs"]
    assert portfolio.estimate_training_s(slow, facts) > 0


def test_candidates_with_few_updates_come_last_on_a_cpu(tmp_path):
    config = configs.load(make_settings(tmp_path))
    facts = Facts("cpu", 5_000, (24, 96, 336), 24, 3, 1, True, 0, 0.5, 2, product_flops=1e10)
    found = portfolio.make_candidates(config, facts, "best")
    updates = [portfolio.count_updates(params, facts) for params in found]
    few = [count < portfolio.MIN_UPDATES for count in updates]
    assert any(few)
    assert not all(few)
    assert few == sorted(few)


def make_series_of_different_size(tmp_path):
    draw = np.random.default_rng(1)
    parts = [
        {"id": [f"s{number}"] * 200, "load": 10.0**number * (2 + draw.standard_normal(200))}
        for number in range(6)
    ]
    parts[0]["load"] = np.tile(np.arange(4.0), 50) + 1e-3 * draw.standard_normal(200)
    table = pa.table({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    settings = make_settings(tmp_path, id="id", time=None)
    settings["data"] = {k: v for k, v in settings["data"].items() if v is not None}
    return table, settings


def test_series_of_different_size_are_scaled_each_by_itself(tmp_path):
    table, settings = make_series_of_different_size(tmp_path)
    search, _, _ = prepare_auto(configs.load(settings), table, minutes=1.0, prefer="best")
    assert (search.data.scale_by, search.tune.metric) == ("series", "mae")
    assert search.data.scale == "seasonal"
    for data, scale in (({"scale_by": "series"}, "seasonal"), ({"scale": "minmax"}, "minmax")):
        config = configs.load(merged(settings, {"data": data}))
        search, _, _ = prepare_auto(config, table, minutes=1.0, prefer="best")
        assert (search.data.scale_by, search.data.scale) == ("series", scale)


def test_series_of_different_size_are_judged_as_the_verdict_does(tmp_path, monkeypatch):
    """By errors relative to each series' own differences: one that is easy counts as much."""
    monkeypatch.setattr(candidates, "MAX_FOLDS", {"cpu": 1})
    table, settings = make_series_of_different_size(tmp_path)
    settings["data"]["period"] = 4
    study = slipstream.auto(settings, table, minutes=0.2, quiet=True)
    summary = study.summary
    assert summary["ranked_by"] == "mase"
    assert "test MASE" in slipstream.report(study.run).read_text()
    # of baselines that read several contexts, that of the answer is tested
    tested = [row for row in summary["leaderboard"] if row["test"] is not None]
    rows = {row["kind"]: row for row in tested}
    for name in ("seasonal", "ridge", "repeat"):
        known = summary["baselines"][name]["metrics"]
        # differences over the training rows depend a little on the context
        assert rows[name]["val"] == pytest.approx(known["val"]["mase"], rel=0.02)
        assert rows[name]["test"] == pytest.approx(known["test"]["mase"])
    assert "mean absolute scaled error" in summary["verdict"]


def test_of_a_walk_forward_split_the_last_block_tests(tmp_path):
    pq.write_table(make_table(), tmp_path / "t.parquet")
    split = {"walk_forward": 3, "purge": 2}
    settings = make_settings(tmp_path, path=str(tmp_path / "t.parquet"), split=split)
    config = configs.load(settings)
    search, plan, cache = prepare_auto(config, None, minutes=1.0, prefer="best")
    (fold,) = cache.get(search).dataset.folds
    walked = load_dataset(config, None)[1].folds[-1]
    assert fold.label == walked.label
    for name in ("val", "test"):
        torch.testing.assert_close(fold.starts[name], walked.starts[name])
    assert plan.facts.folds > 1
    result = slipstream.auto(settings, minutes=0.1, quiet=True)
    assert result.summary["windows"]["test"] == len(walked.starts["test"])
    assert any("the last test block" in text for text in result.summary["findings"])
    scored = slipstream.evaluate(result.run)["metrics"]["mae"]
    assert scored == pytest.approx(result.summary["metrics"]["test"]["mae"])


def test_fresh_seeds_go_to_the_heaviest_members():
    weights = {"trial 0": 0.6, "trial 1": 0.3, "ridge": 0.1}
    kinds, train_s = {0: "lstm", 1: "mlp"}, {0: 1.0, 1: 1.0}
    seeds = plan_seeds(weights, kinds, train_s, 100.0, "best")
    assert sum(seeds.values()) == 7
    assert seeds[0] > seeds[1] >= 1
    assert plan_seeds(weights, kinds, train_s, 0.5, "best") == {}
    assert plan_seeds(weights, kinds, {0: 9.0, 1: 1.0}, 3.0, "best") == {1: 1}
    assert plan_seeds(weights, {0: "linear", 1: "mlp"}, train_s, 9.0, "fast") == {1: 1}


def test_the_end_takes_what_its_candidates_took():
    costs = AutoCosts(1000)
    costs.record_errors("ridge", 1.0, 1000)
    costs.record_errors("trial 0", 2.0, 500)
    costs.train_s["trial 0"] = 30.0
    assert costs.estimate_scoring(["trial 0"]) == 5 * costs.estimate_scoring([])
    assert costs.estimate_training(["ridge"], 7.0) == 0.0
    assert costs.estimate_training(["trial 0", "trial 1"], 7.0) == pytest.approx(37 * MARGIN)
    costs.setup_s = 4.0  # what trial 0 took includes it
    assert costs.estimate_training(["trial 0", "trial 1"], 7.0) == pytest.approx(41 * MARGIN)
    costs.fixed.add("trial 1")  # the same from every seed
    assert costs.estimate_training(["trial 0", "trial 1"], 7.0) == pytest.approx(30 * MARGIN)
    # a baseline of longer windows is none that the answer is compared with
    before = costs.estimate_scoring(["trial 0"])
    costs.record_errors("ridge, 96 rows", 1.0, 1000)
    assert costs.estimate_scoring(["trial 0"]) == before
    assert costs.estimate_scoring(["ridge, 96 rows"]) == pytest.approx(2 * MARGIN)
    # metrics of a candidate, the mean and a baseline; the predictions are written once
    costs.values_s, costs.write_s = 0.5, 10.0
    assert costs.estimate_scoring(["trial 0"]) == pytest.approx(before + 11.5)


def test_few_windows_of_classes_give_much_of_the_weight_to_the_best_baselines():
    library = Library([Block(torch.arange(50), 1.0)], "classes")
    for name, wrong in (("trial 0", 1), ("rocket", 2), ("gbm", 12)):
        library.add(name, 0, torch.where(torch.arange(50) < wrong, 0.4, 0.9))
    fitted = Baseline("planted", None)
    found = {
        name: BaselineCandidate(name, configs.Config(), fitted, 0.0, {})
        for name in ("rocket", "gbm")
    }
    trials = [make_trial(0, TrialState.COMPLETE, 0.1)]
    weights = choose(library, "best", trials, found).weights
    assert weights == pytest.approx({"rocket": 0.8, "trial 0": 0.2})
    assert choose(library, "fast", trials, found).weights == {"trial 0": 1.0}
    library.add("gbm", 0, torch.where(torch.arange(50) < 47, 0.8, 0.4))  # as good as rocket
    weights = choose(library, "best", trials, found).weights
    assert weights == pytest.approx({"rocket": 0.4, "gbm": 0.4, "trial 0": 0.2})
    for name in found:  # clearly worse than the network
        library.add(name, 0, torch.where(torch.arange(50) < 25, 0.4, 0.9))
    assert choose(library, "best", trials, found).weights == {"trial 0": 1.0}


def test_a_baseline_is_taken_for_a_network_that_is_better_by_noise_alone():
    library = Library([Block(torch.arange(2000), 1.0)], "mse")
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(2000, generator=draw)
    library.add("repeat", 0, base)
    fitted = Baseline("planted", None)
    found = {"repeat": BaselineCandidate("repeat", configs.Config(), fitted, 0.0, {})}
    trials = [make_trial(0, TrialState.COMPLETE, 0.1)]

    def choose_beside(errors):
        library.add("trial 0", 0, errors)
        return choose(library, "fast", trials, found).weights

    noisy = base + 0.2 * torch.randn(2000, generator=draw)
    noisy *= 0.999 * float(base.square().mean() / noisy.square().mean()) ** 0.5
    assert choose_beside(noisy) == {"repeat": 1.0}
    assert choose_beside(0.995 * base) == {"trial 0": 1.0}  # always better, by a little
    assert choose_beside(0.9 * noisy) == {"trial 0": 1.0}


def test_what_still_improved_in_its_last_epochs_trains_for_longer():
    def lengthen_after(best_epoch, time_s, state=TrialState.COMPLETE):
        notes = {"epochs": 4.0, "best_epoch": best_epoch, "seconds": 10.0}
        trial = optuna.trial.create_trial(
            state=state,
            value=0.1 if state == TrialState.COMPLETE else None,
            params={"train.epochs": 4, "train.lr": 0.01},
            distributions={
                "train.epochs": optuna.distributions.IntDistribution(1, 100),
                "train.lr": optuna.distributions.FloatDistribution(0.001, 0.1),
            },
            user_attrs={NOTES: notes},
        )
        return lengthen(trial, time_s)

    assert lengthen_after(4.0, 100.0) == {"train.epochs": 12, "train.lr": 0.01}
    assert lengthen_after(4.0, 20.0) == {"train.epochs": 8, "train.lr": 0.01}
    assert lengthen_after(4.0, 12.0) is None
    assert lengthen_after(3.0, 100.0) is None
    assert lengthen_after(4.0, 100.0, TrialState.PRUNED) is None


def test_a_network_that_there_is_no_time_to_test_is_left_out_where_that_costs_little():
    draw = torch.Generator().manual_seed(0)
    library = Library([Block(torch.arange(2000), 1.0)], "mse")
    for name, error in (("trial 0", 1.0), ("trial 1", 1.001), ("trial 2", 1.5)):
        library.add(name, 0, error * torch.randn(2000, generator=draw).sign())
    trials = [make_trial(number, TrialState.COMPLETE, 0.1) for number in range(3)]
    seconds = {"trial 0": 60.0, "trial 1": 5.0, "trial 2": 1.0}

    def choose_for(left_s):
        def choose_from(trials):
            return choose(library, "fast", trials, {})

        def estimate(weights):
            return sum(seconds[name] for name in weights)

        return choose_in_time(choose_from, trials, estimate, left_s).weights

    assert choose_for(100.0) == {"trial 0": 1.0}
    assert choose_for(10.0) == {"trial 1": 1.0}
    assert choose_for(2.0) == {"trial 1": 1.0}  # the fastest is far worse


def test_trees_are_chosen_alone_unless_the_model_is_to_be_small():
    library = Library([Block(torch.arange(2000), 1.0)], "mse")
    for name, error in (("trial 0", 1.0), ("gbm", 0.5), ("ridge", 2.0)):
        library.add(name, 0, torch.full((2000,), error))
    found = {
        name: BaselineCandidate(
            name, configs.load({"model": model}), Baseline("planted", None), 0.0, {}
        )
        for name, model in (
            ("gbm", {"kind": "gbm", "options": {"trees": 1}}),
            ("ridge", {"kind": "linear"}),
        )
    }
    trials = [make_trial(0, TrialState.COMPLETE, 0.1)]
    assert choose(library, "fast", trials, found).weights == {"gbm": 1.0}
    assert choose(library, "small", trials, found).weights == {"trial 0": 1.0}


def test_folds_of_whole_series_hold_out_others():
    offsets = torch.arange(0, 110, 10)
    starts = {"train": torch.arange(0, 80, 10), "val": torch.tensor([80, 90])}
    signature = configs.Signature(
        inputs=("a",), targets=("b",), static=(), shared=0, context=4, horizon=0,
        channels="together", quantiles=(), step=None,
    )  # fmt: skip
    parts = folds.divide_training(starts, 3, offsets, signature, 0)
    assert len(parts) == 3
    held = [set(part["val"].tolist()) for part in parts]
    assert not held[0] & held[1]
    for part in parts[:-1]:
        assert not set(part["train"].tolist()) & set(part["val"].tolist())
        assert {80, 90} <= set(part["train"].tolist())
    assert set(parts[-1]["val"].tolist()) == {80, 90}


def test_a_raw_file_needs_a_target(tmp_path):
    path = tmp_path / "table.parquet"
    table = make_table().rename_columns(["time", "first", "second"])
    pq.write_table(table, path)
    with pytest.raises(UserError, match="which column is to be predicted"):
        propose_config(str(path), Aim())
    with pytest.raises(UserError, match='has no column "secnd"; did you mean "second"'):
        propose_config(str(path), Aim(("secnd",)))
    config, findings = propose_config(str(path), Aim(("second",), 6))
    assert (config.data.targets, config.data.horizon) == (("second",), 6)
    assert "forecasts second, 6 rows ahead" in findings.describe_choice(config)[1]
    estimate, _ = propose_config(str(path), Aim(("second",), 0))
    assert (estimate.data.horizon, estimate.data.inputs) == (0, ("first",))


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf, True, "five"])
def test_minutes_that_are_none_are_refused(minutes):
    with pytest.raises(UserError, match=r"^minutes is .*; it should be a number from 0\.01"):
        slipstream.auto(make_table(), targets="load", minutes=minutes, quiet=True)


def test_errors_on_a_table_name_no_file():
    with pytest.raises(UserError, match=r'^the table has no column "lod"; did you mean "load"'):
        slipstream.auto(make_table(), targets="lod", minutes=1, quiet=True)


def write_gestures(path):
    """Write series of two classes, a row per time, with an id and a label."""
    generator = np.random.default_rng(0)
    lines = ["id,time,x,label"]
    for case in range(60):
        kind = generator.integers(2)
        wave = np.sin(np.arange(30) * (0.2 + 0.3 * kind)) + generator.normal(0, 0.1, 30)
        lines += [f"{case},{i / 50},{x:.4f},{'ab'[kind]}" for i, x in enumerate(wave)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_a_raw_table_of_classes_needs_one_command(tmp_path):
    path = write_gestures(tmp_path / "gestures.csv")
    words = ["auto", str(path), "--minutes", "0.2", "--out", str(tmp_path / "runs"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["metrics"]["test"]["accuracy"] > 0.8
    assert "60 series, by id; time: time" in done.stderr
    assert "classifies each series by label, from the whole series of x" in done.stderr
    assert "tune.minutes" not in done.stderr
    with pytest.raises(UserError, match=r"but the search had 0\.2 and has ended"):
        slipstream.auto(resume=result["run"], minutes=0.1, quiet=True)
    with pytest.raises(UserError, match="prefer is small, but the search was started with best"):
        slipstream.auto(resume=result["run"], prefer="small", quiet=True)


@pytest.mark.slow
def test_what_only_a_person_decides_stops_the_command(tmp_path):
    path = write_gestures(tmp_path / "gestures.csv")
    out = tmp_path / "runs"
    for words, message in (
        (["nowhere.csv"], "nowhere.csv: there is no such file"),
        ([str(path), "--targets", "lable"], 'did you mean "label"'),
        ([str(path), "--targets", "x", "--horizon", "99"], "forecast at most"),
        ([str(path), "--minutes", "0"], "--minutes is 0"),
        ([str(path), "--resume", "last"], "remove"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "slipstream", "auto", *words, "--out", str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert not done.stdout
    assert not out.exists()


@pytest.mark.slow
def test_ctrl_c_ends_with_an_answer_and_resume_goes_on(tmp_path):
    path = tmp_path / "load.parquet"
    pq.write_table(make_table(), path)
    words = ["auto", str(path), "--targets", "load", "--minutes", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", *words], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if ": trial " in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    (folder,) = tmp_path.glob("load-*")
    summary = runs.read_metrics(folder)
    assert summary["interrupted"]
    assert summary["verdict"]
    study = slipstream.auto(resume=folder, minutes=1.0, quiet=True)
    assert not study.summary["interrupted"]
