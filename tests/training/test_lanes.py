"""Runs of several models: repeats, folds, ensembles; each lane is what it would be alone."""

from __future__ import annotations

import io
import json
import re
import signal
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import slipstream
from slipstream import Interrupted, UserError, runs
from slipstream.config import Split
from slipstream.data import dataset as datasets
from slipstream.engine import loop, planning
from slipstream.engine.context import RunContext
from slipstream.engine.lanes import OUT_OF_TIME
from slipstream.engine.planning import make_plan
from slipstream.reporting.terminal import progress
from slipstream.reporting.terminal.progress import TrainingDisplay
from slipstream.tools.bench.cases import get_preset
from slipstream.training import fitting, train
from slipstream.training.run import train_run
from tests.cli.test_cli import invoke, sets
from tests.conftest import assert_interval_scores, close, merged, slow, small_config, waves
from tests.engine.steps import make_task
from tests.limits import CrowdedDevice, FaultyDevice, allocate_lanes, run_out_of_memory
from tests.logs import as_lines, read_lines

SMALL = {"model": {"kind": "mlp"}, "train": {"epochs": 4, "lr": 0.01}}
FOLDS = {"data": {"split": {"walk_forward": 3, "purge": 2}}}


def configured(out, **sections):
    return small_config(out, **merged(SMALL, sections))


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    config = configured(tmp_path_factory.mktemp("repeats"), train={"repeats": 3}, seed=5)
    return config, slipstream.train(config, waves(600))


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Three folds from two seeds each."""
    config = configured(tmp_path_factory.mktemp("walk"), train={"repeats": 2}, **FOLDS)
    return config, slipstream.train(config, waves(600))


def same_figures(found, wanted, *, rel=1e-4):
    assert found.keys() == wanted.keys()
    close([found[name] for name in found], [wanted[name] for name in found], rel=rel)


def test_a_repeat_has_the_figures_of_its_seed_alone(repeated, tmp_path):
    _, result = repeated
    assert [lane["seed"] for lane in result.summary["lanes"]] == [5, 6, 7]
    for lane in result.summary["lanes"]:
        alone = slipstream.train(configured(tmp_path, seed=lane["seed"]), waves(600))
        for which in ("val", "test"):
            same_figures(lane["metrics"][which], alone.metrics[which])
            same_figures(lane["scaled"][which], alone.summary["scaled"][which])
        for name in ("steps", "epochs", "best_epoch", "stopped"):
            assert lane[name] == alone.summary[name], name
        if lane["best"]:
            same_figures(result.metrics["train"], alone.metrics["train"])
            assert result.baselines == alone.baselines
            own, other = (
                load_file(run / "model" / "weights.safetensors") for run in (result.run, alone.run)
            )
            assert own.keys() == other.keys()
            for name, value in other.items():
                close(own[name], value, rel=2e-3)


def test_recurrent_repeats_too(tmp_path):
    model = {"kind": "lstm", "hidden": [6, 5], "layers": 2, "dropout": 0.3}
    config = configured(tmp_path, model=model, train={"repeats": 2, "epochs": 2})
    found = slipstream.train(config, waves()).summary["lanes"]
    for lane in found:
        one = configured(tmp_path, model=model, train={"epochs": 2}, seed=lane["seed"])
        same_figures(lane["metrics"]["test"], slipstream.train(one, waves()).metrics["test"])


@pytest.mark.slow
def test_repeats_of_one_order_are_those_runs_alone(tmp_path):
    asked = {"epochs": 2, "order_seed": 9}
    result = slipstream.train(configured(tmp_path, train=asked | {"repeats": 3}), waves())
    for lane in result.summary["lanes"]:
        one = configured(tmp_path, train=asked, seed=lane["seed"])
        same_figures(lane["metrics"]["test"], slipstream.train(one, waves()).metrics["test"])
    other = configured(tmp_path, train=asked | {"order_seed": 8})
    found = slipstream.train(other, waves()).metrics["test"]
    assert found != result.summary["lanes"][0]["metrics"]["test"]


def test_the_best_by_validation_loss_is_the_model(repeated):
    _, result = repeated
    found = result.summary["lanes"]
    best = min(found, key=lambda lane: lane["val_loss"])
    assert [lane["best"] for lane in found] == [lane is best for lane in found]
    assert result.metrics["test"] == best["metrics"]["test"]
    for name in ("steps", "epochs", "best_epoch", "stopped"):
        assert result.summary[name] == best[name]


def test_the_summary_has_all_that_a_solo_run_has_and_more(repeated, tmp_path):
    _, result = repeated
    alone = slipstream.train(configured(tmp_path), waves(600))
    assert set(result.summary) - set(alone.summary) == {
        *("lanes", "spread", "scaled_spread", "folds", "ensemble", "uses", "pack"),
        *("coverage", "width", "crps"),
    }
    assert set(result.summary) >= set(alone.summary)
    errors = [lane["metrics"]["test"]["mae"] for lane in result.summary["lanes"]]
    scaled = [lane["scaled"]["test"]["mse"] for lane in result.summary["lanes"]]
    spread = result.summary["scaled_spread"]["mse"]
    assert spread["mean"] == pytest.approx(np.mean(scaled))
    assert spread["sd"] == pytest.approx(np.std(scaled, ddof=1))
    assert result.summary["spread"]["mae"] == pytest.approx(
        {
            "mean": np.mean(errors),
            "sd": np.std(errors, ddof=1),
            "min": min(errors),
            "max": max(errors),
            "n": len(errors),
        }
    )
    assert result.summary["folds"] is None
    pack_told = result.summary["pack"]
    assert (pack_told["lanes"], pack_told["places"], pack_told["mode"]) == (3, 3, "together")
    written = json.loads((result.run / "metrics.json").read_text())
    assert written["lanes"] == result.summary["lanes"]
    assert set(written["detail"]) == {"train", "val", "test"}


def test_the_folder_holds_no_pickle_and_every_lane(repeated):
    _, result = repeated
    for path in result.run.rglob("*"):
        if path.is_file():
            assert path.suffix in (".toml", ".json", ".jsonl", ".safetensors", ".parquet")
    weights = load_file(result.run / "lanes" / "weights.safetensors")
    model = load_file(result.run / "model" / "weights.safetensors")
    assert {name.split("/")[0] for name in weights} == {"0", "1", "2"}
    best = [lane["best"] for lane in result.summary["lanes"]].index(True)
    for name, value in model.items():
        assert torch.equal(weights[f"{best}/{name}"], value)


def test_predictions_are_the_models_with_its_intervals(repeated):
    _, result = repeated
    table = pyarrow.parquet.read_table(result.run / "predictions.parquet").to_pandas()
    assert len(table) == 4 * result.summary["windows"]["test"]
    errors = [(table[f"{name}_predicted"] - table[name]).abs().mean() for name in "abc"]
    assert np.mean(errors) == pytest.approx(result.metrics["test"]["mae"], rel=1e-4)
    assert_interval_scores(result.summary, result.run / "predictions.parquet", "abc")
    assert (table["a_lo95"] <= table["a_lo80"]).all()


def test_the_ensemble_is_the_mean_of_all_lanes(repeated):
    _, result = repeated
    test_rows = waves(600).slice(600 - 120 - 16)
    single, mean = (
        slipstream.evaluate(result.run, test_rows, ensemble=which) for which in (False, True)
    )
    for found, wanted in (
        (single["metrics"], result.metrics["test"]),
        (mean["metrics"], result.summary["ensemble"]["metrics"]["test"]),
    ):
        # new data have no training rows: their MASE is relative to their own seasonal differences
        known = found | {"mase": wanted["mase"]}
        same_figures(known, wanted, rel=1e-6)
        assert found["mase"] == pytest.approx(wanted["mase"], rel=0.1)
    for found, wanted in ((single, result.summary), (mean, result.summary["ensemble"])):
        assert found["coverage"] == pytest.approx(wanted["coverage"], abs=1e-3)
        assert found["width"] == pytest.approx(wanted["width"], rel=1e-5)
        assert found["crps"] == pytest.approx(wanted["crps"], rel=1e-5)
    assert (single["model"], mean["model"]) == ("the best of 3 models", "the mean of 3 models")


def test_by_default_predicts_what_was_better_on_the_validation_set(repeated):
    _, result = repeated
    summary = result.summary
    better = summary["ensemble"]["scaled"]["val"]["mse"] < summary["scaled"]["val"]["mse"]
    assert summary["uses"] == ("ensemble" if better else "model")
    default = slipstream.predict(result.run, waves(100))
    chosen = slipstream.predict(result.run, waves(100), ensemble=better)
    assert default.equals(chosen)
    assert not default.equals(slipstream.predict(result.run, waves(100), ensemble=not better))
    told = default.schema.metadata[b"model"].decode()
    assert told == ("the mean of 3 models" if better else "the best of 3 models")
    columns = default.column_names
    assert [name for name in columns if name.startswith("b_")] == [
        *("b_predicted", "b_lo80", "b_hi80", "b_lo95", "b_hi95"),
    ]
    assert "b" not in columns


def test_a_run_of_one_model_has_no_ensemble(tmp_path):
    run = slipstream.train(configured(tmp_path), waves()).run
    for verb in (slipstream.predict, slipstream.evaluate):
        with pytest.raises(UserError, match=r"one model, not an ensemble; .* train.repeats"):
            verb(run, waves(), ensemble=True)
    assert "a_lo80" not in slipstream.predict(run, waves(), ensemble=False).column_names
    found = slipstream.evaluate(run, waves())
    assert found["coverage"] is found["width"] is found["crps"] is None


def test_every_test_window_is_scored_once_by_its_own_fold(walked):
    config, result = walked
    dataset = datasets.load_dataset(config, waves(600))
    table = pyarrow.parquet.read_table(result.run / "predictions.parquet").to_pandas()
    first = table.query("step == 1")
    assert not first.duplicated(["series", "row"]).any()
    lead = dataset.signature.lead
    for number, fold in enumerate(dataset.folds, start=1):
        mine = set(first[first["fold"] == number]["row"])
        assert mine == {int(start) + lead for start in fold.starts["test"]}
        learnt = torch.cat([fold.starts["train"], fold.starts["val"]]) + lead
        assert int(learnt.max()) + dataset.signature.steps_out - 1 < min(mine)
    assert result.summary["windows"]["test"] == len(first)
    errors = [(table[f"{name}_predicted"] - table[name]).abs().mean() for name in "abc"]
    assert np.mean(errors) == pytest.approx(result.metrics["test"]["mae"], rel=1e-4)


def train_windows(config, dataset):
    """Train one model on windows that are loaded already; return its summary."""
    plan, fingerprint = make_plan(config, data_bytes=0), dataset.compute_fingerprint()
    files = {"config.toml": runs.format_config(config)}
    with runs.create_locked(config.name, out=config.out, files=files) as run:
        context = RunContext(run, config, dataset, plan, content=fingerprint)
        return train_run(context).summary


def test_a_fold_has_the_figures_of_its_windows_trained_alone(walked, tmp_path):
    config, result = walked
    dataset = datasets.load_dataset(config, waves(600))
    single = config.model_copy(
        update={
            "out": str(tmp_path),
            "data": config.data.model_copy(update={"split": Split(train=0.7, val=0.1, test=0.2)}),
            "train": config.train.model_copy(update={"repeats": 1}),
        }
    )
    for number, fold in enumerate(dataset.folds, start=1):
        alone = dataset.select_fold(fold)
        for lane in [lane for lane in result.summary["lanes"] if lane["fold"] == number]:
            found = train_windows(single.model_copy(update={"seed": lane["seed"]}), alone)
            for which in ("val", "test"):
                same_figures(lane["metrics"][which], found["metrics"][which])
        told = result.summary["folds"][number - 1]
        for name in ("repeat", "ridge"):
            assert told["baselines"][name]["metrics"] == found["baselines"][name]["metrics"]


def test_folds_are_pooled_and_told(walked):
    _, result = walked
    summary = result.summary
    folds, found = summary["folds"], summary["lanes"]
    assert [(lane["fold"], lane["seed"]) for lane in found] == [
        (fold, seed) for fold in (1, 2, 3) for seed in (0, 1)
    ]
    assert [lane["label"] for lane in found[::2]] == [fold["label"] for fold in folds]
    for which in ("train", "val", "test"):
        counts = [fold["windows"][which] for fold in folds]
        assert summary["windows"][which] == sum(counts)
        errors = [fold["metrics"][which]["mae"] for fold in folds]
        pooled = np.average(errors, weights=counts)
        assert summary["metrics"][which]["mae"] == pytest.approx(pooled)
        for name in ("repeat", "ridge"):
            errors = [fold["baselines"][name]["metrics"][which]["mae"] for fold in folds]
            pooled = np.average(errors, weights=counts)
            assert summary["baselines"][name]["metrics"][which]["mae"] == pytest.approx(pooled)
    for fold in folds:
        mine = [lane for lane in found if lane["fold"] == fold["fold"]]
        (best,) = [lane for lane in mine if lane["best"]]
        assert best["val_loss"] == min(lane["val_loss"] for lane in mine)
        assert fold["metrics"]["test"] == best["metrics"]["test"]


def test_the_last_folds_best_is_what_is_deployed(walked):
    _, result = walked
    weights = load_file(result.run / "lanes" / "weights.safetensors")
    model = load_file(result.run / "model" / "weights.safetensors")
    best = max(lane["lane"] for lane in result.summary["lanes"] if lane["best"])
    assert best >= 4
    for name, value in model.items():
        assert torch.equal(weights[f"{best}/{name}"], value)
    ahead = slipstream.predict(result.run, waves(100), ensemble=False)
    assert ahead.schema.metadata[b"model"] == b"the best of 2 models of the last fold"


def test_evaluate_scores_every_fold_by_its_own_model(tmp_path):
    waves(600).to_pandas().to_csv(tmp_path / "table.csv", index=False)
    data = FOLDS["data"] | {"path": str(tmp_path / "table.csv")}
    config = configured(tmp_path, data=data, train={"repeats": 2, "epochs": 2})
    result = slipstream.train(config)
    for which in ("val", "test"):
        found = slipstream.evaluate(result.run, on=which, ensemble=False)
        same_figures(found["metrics"], result.metrics[which], rel=1e-6)
        assert found["windows"] == result.summary["windows"][which]
        found = slipstream.evaluate(result.run, on=which, ensemble=True)
        same_figures(found["metrics"], result.summary["ensemble"]["metrics"][which], rel=1e-6)
        assert found["model"] == "the mean of 2 models, fold by fold"


def test_folds_of_one_model_each_have_intervals_but_no_ensemble(tmp_path):
    result = slipstream.train(configured(tmp_path, **FOLDS), waves(600))
    assert result.summary["spread"] is result.summary["ensemble"] is None
    assert_interval_scores(result.summary, result.run / "predictions.parquet", "abc")
    for fold in result.summary["folds"]:
        assert set(fold["coverage"]) == set(fold["width"]) == {"80", "95"}
        assert fold["crps"] > 0
    with pytest.raises(UserError, match=r"one model to a fold, no ensemble; .* train.repeats"):
        slipstream.predict(result.run, waves(), ensemble=True)
    assert "a_hi95" in slipstream.predict(result.run, waves()).column_names


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"horizon": 0, "targets": ["c"]}},
        {"data": {"channels": "independent"}},
        {"train": {"loss": "quantile"}},
        {"train": {"accumulate": 2, "batch": 20}},
    ],
    ids=["estimate", "independent", "quantile", "accumulated"],
)
def test_every_kind_of_job_repeats(tmp_path, sections):
    config = configured(tmp_path, **merged({"train": {"repeats": 2, "epochs": 2}}, sections))
    result = slipstream.train(config, waves())
    best = next(lane for lane in result.summary["lanes"] if lane["best"])
    alone = slipstream.train(
        configured(tmp_path, **merged({"train": {"epochs": 2}, "seed": best["seed"]}, sections)),
        waves(),
    )
    same_figures(result.metrics["test"], alone.metrics["test"])
    slipstream.predict(result.run, waves(), ensemble=True)
    slipstream.report(result.run)


def test_lanes_that_do_not_fit_at_once_follow_each_other(tmp_path, monkeypatch, repeated):
    monkeypatch.setattr(planning, "MAX_LANES", 2)
    config = configured(tmp_path, train={"repeats": 3}, seed=5)
    summary = slipstream.train(config, waves(600)).summary
    assert summary["pack"]["places"] == 2
    for lane, wanted in zip(summary["lanes"], repeated[1].summary["lanes"], strict=True):
        same_figures(lane["metrics"]["test"], wanted["metrics"]["test"])


def test_where_memory_runs_out_fewer_train_at_a_time(tmp_path, repeated):
    config = configured(tmp_path, train={"repeats": 3}, seed=5)
    with allocate_lanes(holds=1) as device:
        result = slipstream.train(config, waves(600))
    assert device.num_failures == 2  # of 3 lanes, then of 2
    assert result.summary["pack"]["places"] == 1
    told = [e for e in read_lines(runs.open_run(result.run)) if e["event"] == "recovery"]
    assert told[-1]["remedy"] == "1 lane at a time, from the start"
    for lane, wanted in zip(result.summary["lanes"], repeated[1].summary["lanes"], strict=True):
        same_figures(lane["metrics"]["test"], wanted["metrics"]["test"])


@pytest.mark.parametrize(("holds", "recoveries"), [(2, 1), slow(1, 2)])
@pytest.mark.parametrize("resumed", [False, True], ids=["begun", "resumed"])
def test_lanes_that_no_longer_fit_go_on_later_from_where_they_were(
    tmp_path, repeated, holds, recoveries, resumed
):
    """13 steps an epoch; memory runs out in the third of four."""
    config = configured(tmp_path, train={"repeats": 3}, seed=5, engine={"log_every": 7})
    if resumed:
        with pytest.raises(Interrupted):
            train(config, waves(600), watch=as_lines(stopping_at(3)))
    with CrowdedDevice(holds=holds, since=10 if resumed else 31) as device:
        if resumed:
            resumed_run = runs.open_run(runs.find_last(config.out)).folder
            result = slipstream.train(data=waves(600), resume=resumed_run)
        else:
            result = slipstream.train(config, waves(600))
    assert device.num_failures == recoveries
    events = list(read_lines(runs.open_run(result.run)))
    told = [event["remedy"] for event in events if event["event"] == "recovery"]
    lanes = "1 lane" if holds == 1 else f"{holds} lanes"
    assert told[-1] == f"{lanes} at a time, from step {29 if resumed else 30}"
    together, in_all = (9, 32) if resumed else (30, 52)  # steps on this device
    packs = 2 if holds == 2 else 3  # that train the rest, one after the other
    assert device.num_steps == together + packs * (in_all - together)  # no step is taken twice
    for lane, wanted in zip(result.summary["lanes"], repeated[1].summary["lanes"], strict=True):
        assert lane["steps"] == wanted["steps"]
        assert lane["best_epoch"] == wanted["best_epoch"]
        same_figures(lane["metrics"]["test"], wanted["metrics"]["test"])
        seen = [e["epoch"] for e in events if e["event"] == "epoch" and e["lane"] == lane["lane"]]
        assert seen == [1, 2, 3, 4]


def test_mode_and_places_are_measured_where_that_pays(tmp_path, monkeypatch, repeated):
    monkeypatch.setattr(planning, "SHARE_OF_RUN", 1e9)  # a short run is worth measuring
    monkeypatch.setattr(planning, "MEASURE_LIMIT_S", 0.6)
    config = configured(tmp_path, train={"repeats": 3}, seed=5, engine={"plan": "measure"})
    result = slipstream.train(config, waves(600))
    found = result.summary["pack"]
    assert found["why"] == "measured"
    assert {told["places"] for told in found["evidence"]} >= {1}
    assert found["mode"] in ("together", "branches")
    assert json.loads((result.run / "plan.json").read_text())["pack"]["mode"] == found["mode"]
    for lane, wanted in zip(result.summary["lanes"], repeated[1].summary["lanes"], strict=True):
        same_figures(lane["metrics"]["test"], wanted["metrics"]["test"])


def test_a_terminal_shows_who_leads_and_who_is_at_work(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)  # it may all take less
    with TrainingDisplay(quiet=False) as watching:
        watching.console = Console(
            file=io.StringIO(), force_terminal=True, width=200, highlight=False, no_color=True
        )
        config = configured(tmp_path, train={"repeats": 3})
        train(config, waves(), watch=watching.show)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", watching.console.file.getvalue())
    assert "lanes: 3 seeds = 3 models, all at once, as one program (a rule of thumb)" in shown
    assert re.search(r"validation .*[\d.]+ \(seed [0-2]\); \d lanes active, \d", shown)
    assert re.search(r"3 of 3 lanes done .* best validation loss [\d.]+ \(seed [0-2]\)", shown)


def stopping_at(log, number=signal.SIGINT):
    """A signal when the pack's losses are read for so many times."""
    seen = []

    def watch(event):
        if event["event"] == "log":
            seen.append(event)
            if len(seen) == log:
                signal.raise_signal(number)

    return watch


DURABLE = {
    "data": {"gap_tolerance": float("inf")},
    "engine": {"log_every": 4, "checkpoint_minutes": 1e-9},
}


def ended(run):
    kept = ("event", "lane", "epoch", "step", "losses", "train_loss", "val_loss", "stopped")
    log = [
        {key: event[key] for key in kept if key in event}
        for event in read_lines(run)
        if event["event"] in ("log", "epoch", "lane")
    ]
    figures = runs.read_json(run.folder / "metrics.json")
    names = ("metrics", "lanes", "spread", "ensemble", "coverage", "uses", "folds", "detail")
    weights = load_file(run.folder / "lanes" / "weights.safetensors")
    return (
        log,
        {name: figures[name] for name in names},
        {name: value.numpy().tobytes() for name, value in weights.items()},
    )


@pytest.mark.parametrize("places", [slow(64), 2])
@pytest.mark.parametrize("logs", [(7,), slow((1, 11))])
def test_a_stopped_run_goes_on_to_the_same_end(tmp_path, monkeypatch, places, logs):
    monkeypatch.setattr(planning, "MAX_LANES", places)
    sections = merged(merged(FOLDS, DURABLE), {"train": {"repeats": 2}})
    whole = slipstream.train(configured(tmp_path / "whole", **sections), waves(400)).run
    wanted = ended(runs.open_run(whole))
    for log in logs:
        number = signal.SIGTERM if log == 7 else signal.SIGINT
        config = configured(tmp_path / f"at{log}", **sections)
        told = r"of 6 lanes done; .*; resume with: slipstream train --resume"
        with pytest.raises(Interrupted, match=told) as caught:
            train(config, waves(400), watch=as_lines(stopping_at(log, number)))
        assert caught.value.signal_number == number
        run = runs.open_run(runs.find_last(config.out))
        assert not (run.folder / "metrics.json").exists()
        with pytest.raises(Interrupted):
            train(data=waves(400), resume=run.folder, watch=as_lines(stopping_at(2)))
        slipstream.train(data=waves(400), resume=run.folder, overrides=("engine.monitor=false",))
        for mine, theirs in zip(ended(run), wanted, strict=True):
            assert mine == theirs


@pytest.mark.parametrize("step", [slow(2), 7])
def test_a_stop_between_two_lines_of_the_log_leaves_the_same_log(tmp_path, step):
    sections = merged(DURABLE, {"train": {"repeats": 3}, "engine": {"log_every": 4}})
    whole = slipstream.train(configured(tmp_path / "whole", **sections), waves(400)).run
    wanted = ended(runs.open_run(whole))
    calls = []

    def stop(name, _):
        calls.append(name == "gather")  # once in each step
        if name == "gather" and sum(calls) == step:
            signal.raise_signal(signal.SIGTERM)

    config = configured(tmp_path / "stopped", **sections)
    with FaultyDevice(stop), pytest.raises(Interrupted):
        slipstream.train(config, waves(400))
    run = runs.open_run(runs.find_last(config.out))
    slipstream.train(data=waves(400), resume=run.folder)
    for mine, theirs in zip(ended(run), wanted, strict=True):
        assert mine == theirs


@pytest.mark.parametrize(
    ("logs", "validate_every"), [slow(5, 1), (8, 2), slow(1, 1), slow(1, 2), slow(5, 2), slow(8, 1)]
)
def test_a_run_out_of_time_goes_on_where_it_was_cut(tmp_path, monkeypatch, logs, validate_every):
    """The folds' epochs differ in length, so that lanes are cut in all kinds of places. A cosine
    would follow the time."""
    settings = {"repeats": 2, "validate_every": validate_every, "schedule": "step"}
    sections = merged(merged(FOLDS, DURABLE), {"train": settings})
    whole = slipstream.train(configured(tmp_path / "whole", **sections), waves(400)).run
    wanted = ended(runs.open_run(whole))
    limited = merged(sections, {"train": {"minutes": (logs - 0.5) / 60}})
    with monkeypatch.context() as patch:
        now = [0.0]
        patch.setattr(loop.time, "perf_counter", lambda: now[0])

        def watch(event):
            now[0] += event["event"] == "log"  # a second for each look at the losses

        result = train(configured(tmp_path / "cut", **limited), waves(400), watch=as_lines(watch))
    run = runs.open_run(result.run)
    told = result.summary["lanes"]
    assert len(told) == 6
    assert all(lane["stopped"] == OUT_OF_TIME and lane["metrics"] for lane in told)
    assert any(lane["epochs"] % 1 for lane in told)
    slipstream.train(data=waves(400), resume=run.folder, overrides=("train.minutes=60",))
    for mine, theirs in zip(ended(run), wanted, strict=True):
        assert mine == theirs
    with pytest.raises(UserError, match="is finished"):
        slipstream.train(data=waves(400), resume=run.folder, overrides=("train.minutes=90",))


def test_a_run_that_breaks_off_anywhere_goes_on(tmp_path):
    sections = merged(DURABLE, {"train": {"repeats": 3}})
    whole = slipstream.train(configured(tmp_path / "whole", **sections), waves(400)).run
    wanted = ended(runs.open_run(whole))

    def broken(event):
        if event["event"] == "scoring" and event["what"] == "the baselines":
            raise RuntimeError("broken")

    config = configured(tmp_path / "broken", **sections)
    with pytest.raises(RuntimeError, match="broken"):
        train(config, waves(400), watch=as_lines(broken))
    run = runs.open_run(runs.find_last(config.out))
    assert (run.folder / "crash.txt").exists()
    assert "a_predicted" in slipstream.predict(run.folder, waves(400)).column_names
    slipstream.train(data=waves(400), resume=run.folder)
    for mine, theirs in zip(ended(run), wanted, strict=True):
        assert mine == theirs


def test_what_cannot_be_resumed_is_refused(repeated, tmp_path):
    _, result = repeated
    with pytest.raises(UserError, match=r"is finished, .* raise train.epochs, or train.patience"):
        slipstream.train(data=waves(600), resume=result.run)
    for change in ("train.repeats=2", "train.repeats=1", "train.lr=0.1"):
        name = change.split("=")[0]
        with pytest.raises(UserError, match=rf"other settings .* \({name}\); start a new run$"):
            slipstream.train(data=waves(600), resume=result.run, overrides=(change,), force=True)
    alone = slipstream.train(configured(tmp_path), waves()).run
    with pytest.raises(UserError, match=r"\(train.repeats\); start a new run$"):
        slipstream.train(data=waves(), resume=alone, overrides=("train.repeats=4",), force=True)


ONE_BY_ONE = {
    "host": ({"engine": {"home": "host", "device": "cuda"}}, "(host: requested"),
    "loader": ({"engine": {"home": "loader", "workers": 0}}, "(loader: requested"),
    "classic": ({"engine": get_preset("classic", on_gpu=False)}, "series that are not on the"),
    "sync": ({"engine": {"sync": True}}, "engine.sync"),
    "cache": ({"augment": {"jitter": 0.1, "cache": 2}}, "augment.cache"),
    "stream": ({"engine": {"home": "stream", "workers": 0, "buffer_rows": 300}}, "(stream:"),
    "buffers": (
        {"model": {"kind": "tests.models.nets:Normed"}},
        "more than weights (core.inner.norm",
    ),
}


ONE_BY_ONE_MARKS = dict.fromkeys(ONE_BY_ONE, pytest.mark.slow) | {
    "host": pytest.mark.gpu,
    "buffers": (),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=ONE_BY_ONE_MARKS[case]) for case in ONE_BY_ONE],
)
def test_what_cannot_share_a_program_trains_one_model_after_another(tmp_path, monkeypatch, case):
    """Each is the model that its seed gives alone, to the bit, also where the run was stopped."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    sections, why = ONE_BY_ONE[case]
    path = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(waves(600), path, row_group_size=100)
    sections = merged(sections, {"data": {"path": str(path)}, "train": {"epochs": 2}})
    sections = merged({"engine": {"log_every": 4, "checkpoint_minutes": 1e-9}}, sections)
    repeats = merged(sections, {"train": {"repeats": 3}})
    result = slipstream.train(configured(tmp_path / "many", **repeats))
    found = result.summary["pack"]
    assert (found["mode"], found["places"]) == ("one at a time", 1)
    assert why in found["why"]
    weights = load_file(result.run / "lanes" / "weights.safetensors")
    for lane in result.summary["lanes"]:
        one = configured(tmp_path / "one", seed=lane["seed"], **sections)
        alone = slipstream.train(one)
        assert lane["metrics"]["test"] == alone.metrics["test"]
        for name, value in load_file(alone.run / "model" / "weights.safetensors").items():
            assert torch.equal(weights[f"{lane['lane']}/{name}"], value)
    wanted = ended(runs.open_run(result.run))
    for log in (2, 7):
        config = configured(tmp_path / f"cut{log}", **repeats)
        with pytest.raises(Interrupted, match="of 3 lanes done"):
            train(config, watch=as_lines(stopping_at(log)))
        run = runs.open_run(runs.find_last(config.out))
        slipstream.train(resume=run.folder)
        for mine, theirs in zip(ended(run), wanted, strict=True):
            if case == "host" and isinstance(mine, dict):  # a GPU adds up a series in any order
                mine.pop("detail", None)
                theirs.pop("detail", None)
            assert mine == theirs


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"home": "host"}, "(host: too large)"), ({"micro_batch": 7}, "7 windows at a time")],
    ids=["host", "passes"],
)
def test_what_lanes_cannot_share_is_planned_one_at_a_time(tmp_path, changes, reason):
    """Only the plan: a CPU has no host source, and memory that holds a whole batch."""
    config = configured(tmp_path, train={"repeats": 2})
    dataset = datasets.load_dataset(config, waves(600))
    plan = make_plan(config, data_bytes=0)
    plan = replace(plan, reasons=plan.reasons | {"home": "too large"}, **changes)
    planned = fitting.plan_lanes(replace(make_task(config, dataset, plan), plan=plan))
    assert len(planned.lanes) == 2
    assert (planned.packing.mode, planned.packing.num_lanes) == ("one at a time", 1)
    assert reason in planned.packing.reason


@pytest.mark.slow
def test_folds_train_one_after_another_too(tmp_path, walked):
    config = configured(
        tmp_path,
        train={"repeats": 2},
        **merged(FOLDS, {"engine": {"home": "loader", "workers": 0}}),
    )
    result = slipstream.train(config, waves(600))
    assert result.summary["pack"]["mode"] == "one at a time"
    for lane, wanted in zip(result.summary["lanes"], walked[1].summary["lanes"], strict=True):
        assert lane["steps"] == wanted["steps"]
        same_figures(lane["metrics"]["test"], wanted["metrics"]["test"])


def test_memory_that_runs_out_in_a_validation_halves_the_lanes(tmp_path, repeated):
    def refuse(name, result):
        # three lanes at once: [lanes, windows, units]; the trees of a baseline have other shapes
        is_validation = name == "bmm" and not torch.is_grad_enabled() and len(result) == 3
        return run_out_of_memory() if is_validation else None

    config = configured(tmp_path, train={"repeats": 3}, seed=5)
    with FaultyDevice(refuse) as device:
        result = slipstream.train(config, waves(600))
    assert device.num_failures == 1
    assert result.summary["pack"]["places"] == 2
    for lane, wanted in zip(result.summary["lanes"], repeated[1].summary["lanes"], strict=True):
        assert (lane["steps"], lane["best_epoch"]) == (wanted["steps"], wanted["best_epoch"])
        same_figures(lane["metrics"]["test"], wanted["metrics"]["test"])


@pytest.mark.parametrize(
    "engine", [{}, slow({"home": "loader", "workers": 0})], ids=["pack", "one by one"]
)
def test_more_epochs_than_before(tmp_path, engine):
    """Lanes that have done all their epochs go on with more, as if there had been no end."""
    constant = {"repeats": 3, "schedule": "constant", "patience": "off"}
    longer = configured(tmp_path / "a", train=constant | {"epochs": 5}, engine=engine)
    wanted = slipstream.train(longer, waves(400))
    shorter = configured(tmp_path / "b", train=constant | {"epochs": 2}, engine=engine)
    run = slipstream.train(shorter, waves(400)).run
    with pytest.raises(UserError, match="is finished, with all lanes done"):
        slipstream.train(data=waves(400), resume=run)
    result = slipstream.train(data=waves(400), resume=run, overrides=("train.epochs=5",))
    for mine, theirs in zip(
        ended(runs.open_run(run)), ended(runs.open_run(wanted.run)), strict=True
    ):
        if not isinstance(mine, list):  # the log has the ends of the shorter run
            assert mine == theirs
    assert [lane["epochs"] for lane in result.summary["lanes"]] == [5, 5, 5]


@pytest.mark.slow
def test_more_patience_than_before(tmp_path):
    """Only the lanes that had run out of it go on."""
    impatient = {"repeats": 3, "epochs": 9, "schedule": "constant", "min_delta": 0.02}
    wanted = slipstream.train(
        configured(tmp_path / "a", train=impatient | {"patience": 3}), waves(400)
    )
    short = slipstream.train(
        configured(tmp_path / "b", train=impatient | {"patience": 1}), waves(400)
    )
    assert any("no improvement" in lane["stopped"] for lane in short.summary["lanes"])
    result = slipstream.train(data=waves(400), resume=short.run, overrides=("train.patience=3",))
    for lane, other in zip(result.summary["lanes"], wanted.summary["lanes"], strict=True):
        assert lane["metrics"] == other["metrics"]
        assert lane["stopped"] == other["stopped"]
    before, after = ([lane["epochs"] for lane in one.summary["lanes"]] for one in (short, result))
    assert sum(after) > sum(before)


def test_seeds_that_would_run_over_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"seed = \d+ is too large: train.repeats = 2"):
        configured(tmp_path, train={"repeats": 2}, seed=2**63 - 1)


def test_batch_auto_is_found_before_lanes_are_made(tmp_path):
    config = configured(tmp_path, train={"repeats": 2, "batch": "auto", "epochs": 1})
    result = slipstream.train(config, waves())
    batch = slipstream.config.load(result.run / "config.toml").train.batch
    assert isinstance(batch, int)
    assert result.summary["lanes"][0]["steps"] == -(-result.summary["windows"]["train"] // batch)


def test_a_lane_without_a_model_is_told_of_and_left_out(tmp_path):
    model = {"kind": "tests.models.nets:Fragile", "options": {"share": 0.5}}
    result = slipstream.train(configured(tmp_path, model=model, train={"repeats": 4}), waves())
    lost = [lane["seed"] for lane in result.summary["lanes"] if lane["metrics"] is None]
    assert 0 < len(lost) < 3
    for seed in lost:
        note = f"seed {seed} has no model: the loss is no longer finite"
        assert any(text.startswith(note) for text in result.summary["notes"])
    evaluated = slipstream.evaluate(result.run, waves(), ensemble=True)
    assert evaluated["model"] == f"the mean of {4 - len(lost)} models"
    slipstream.report(result.run)


def test_training_that_finds_nothing_says_what_to_change(tmp_path):
    model = {"kind": "tests.models.nets:Fragile", "options": {"share": 1.0}}
    config = configured(tmp_path, model=model, train={"repeats": 2}, **FOLDS)
    with pytest.raises(
        UserError, match=r"no validation loss of fold 1 was finite.* lower train.lr"
    ):
        slipstream.train(config, waves(600))


def test_intervals_cover_what_they_promise(tmp_path):
    """Noise is all that is left to predict; windows do not overlap, so errors are exchangeable."""
    draw = np.random.default_rng(0)
    table = pa.table({"time": np.arange(30000), "a": draw.standard_normal(30000) * 3 + 7})
    config = configured(
        tmp_path,
        data={
            "context": 2,
            "horizon": 2,
            "stride": 4,
            "split": {"train": 0.2, "val": 0.4, "test": 0.4},
        },
        train={"repeats": 2, "epochs": 1, "batch": 256},
    )
    summary = slipstream.train(config, table).summary
    for found in (summary, summary["ensemble"]):
        assert found["coverage"]["80"] == pytest.approx(0.80, abs=0.025)
        assert found["coverage"]["95"] == pytest.approx(0.95, abs=0.015)
        # of normal errors: the ends lie 1.28 and 1.96 deviations to either side
        assert found["width"] == pytest.approx({"80": 2 * 1.2816 * 3, "95": 2 * 1.96 * 3}, rel=0.05)
        assert found["crps"] == pytest.approx(0.5006 * 3 / 7.0, rel=0.05)


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"horizon": 0, "targets": ["c"]}},
        {"model": {"output_range": [9.8, 10.3]}, "data": {"targets": ["a"]}},
        {"train": {"loss": "quantile"}},
        {"predict": {"filter": {"kind": "ema", "rows": 3}}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_intervals_are_scored_as_they_are_written(tmp_path, sections):
    config = configured(tmp_path, **merged(sections, {"train": {"repeats": 2, "epochs": 1}}))
    result = slipstream.train(config, waves(400))
    targets = sections.get("data", {}).get("targets", ["a", "b", "c"])
    assert_interval_scores(result.summary, result.run / "predictions.parquet", targets)


@pytest.fixture
def job(tmp_path):
    waves().to_pandas().to_csv(tmp_path / "table.csv", index=False)
    config = tmp_path / "job.toml"
    config.write_text(f'out = "{tmp_path}/runs"\n[data]\npath = "table.csv"\n')
    return config


def test_the_command_line_shows_lanes(job, tmp_path):
    found = invoke("train", job, *sets("train.repeats=3", "data.split.walk_forward=2"))
    assert found.exit_code == 0, found.output
    assert "lanes: 2 folds x 3 seeds = 6 models, all at once, as one program" in found.stderr
    assert "lane 6 of 6 done: fold" in found.stderr
    assert "6 of 6 lanes done (all epochs done: 6)" in found.stderr
    for part in (
        "ensemble",
        "3 seeds: test MAE",
        "2 folds: test MAE",
        "coverage: ",
        "mean width",
        "CRPS",
        "MASE",
        "sMAPE",
        "WAPE",
        "single model",
    ):
        assert part in found.stdout
    run = runs.find_last(str(tmp_path / "runs"))
    assert "From fold to fold" in (run / "report.html").read_text()
    out = tmp_path / "ahead.csv"
    told = json.loads(
        invoke(
            "predict", run, job.parent / "table.csv", "--ensemble", "--json", "--out", out
        ).stdout
    )
    assert told["model"] == "the mean of 3 models of the last fold"
    assert "a_lo80" in told["columns"]
    told = json.loads(invoke("evaluate", run, "--single", "--json").stdout)
    assert told["model"] == "the best of 3 models, fold by fold"
    evaluated = invoke("evaluate", run).stdout
    for part in ("coverage: ", "mean width", "CRPS", "MASE", "sMAPE", "WAPE"):
        assert part in evaluated
    page = (run / "report.html").read_text()
    for part in ("mean width", "CRPS", "MASE", "sMAPE", "WAPE"):
        assert part in page


def test_json_of_lanes_is_one_object(job):
    found = invoke("train", job, "--json", *sets("train.repeats=2"))
    assert found.exit_code == 0, found.output
    summary = json.loads(found.stdout)
    assert [lane["seed"] for lane in summary["lanes"]] == [0, 1]
    assert summary["spread"]["rmse"]["sd"] >= 0
