"""`slipstream auto --refit`: what trains on all rows, and how the untested model is marked."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream import UserError, runs
from slipstream import config as configs
from slipstream.data.dataset import load_dataset
from slipstream.events import Epoch
from slipstream.runs import Run
from slipstream.scoring.baselines import fit_baselines
from slipstream.search.budget import MARGIN
from slipstream.search.candidates import REFIT_COST, AutoCosts, FoldBaselines
from slipstream.search.packs import DatasetCache, PackScheduler
from slipstream.search.refit import (
    NO_LIMIT,
    AnswerMember,
    MemberRefit,
    RefitLimit,
    adapt_config,
    fit_baseline,
)
from tests.search.test_auto import make_settings, make_table


def make_member(tmp_path, *, epochs=3.0, data=None, **train):
    settings = make_settings(tmp_path, split={"rows": [60, 20, 20]}, **(data or {}))
    settings["data"] |= {"context": 8, "horizon": 2}
    settings["model"] = {
        "kind": "gru",
        "hidden": 8,
        "layers": 1,
        "dropout": 0.0,
        "normalize": "last",
    }
    settings["train"] = {"batch": 16, "epochs": 3, "lr": 0.01, **train}
    return AnswerMember(1, "trial 0", configs.load(settings), 1.0, epochs)


def train_whole(member, table, folder, is_late=lambda: False):
    """Train a network on all rows; return its weights, what failed and its epochs."""
    folder.mkdir()
    seen = []
    run = Run(folder, lambda event: seen.append(event) if isinstance(event, Epoch) else None)
    source = MemberRefit([member], is_late)
    datasets = DatasetCache(member.config, table, whole=True)
    PackScheduler(run, datasets, source, parallel=1).train()
    return source.weights.get(1), source.problems, [event.epoch for event in seen]


def test_a_network_trains_as_on_a_split_with_all_rows_in_train(tmp_path):
    member, table = make_member(tmp_path), make_table(140)
    weights, problems, _ = train_whole(member, table.slice(0, 100), tmp_path / "packs")
    assert not problems
    whole = {"data.split": {"rows": [100, 20, 20]}}
    plain = configs.replace_settings(adapt_config(member), whole)
    trained = slipstream.train(plain, table, quiet=True)
    expected = load_file(trained.run / "model" / "weights.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor.cpu(), expected[name], rtol=1e-4, atol=1e-5)


def test_it_trains_as_many_epochs_as_were_best(tmp_path):
    table = make_table(100)
    for number, (epochs, expected) in enumerate(((1.6, 2), (0.2, 1), (3.0, 3))):
        member = make_member(tmp_path, epochs=epochs, patience=1)
        weights, _, seen = train_whole(member, table, tmp_path / f"packs{number}")
        assert weights
        assert seen == [expected]  # one validation, at its end


def test_a_schedule_that_follows_validation_losses_is_replaced(tmp_path):
    kept = adapt_config(make_member(tmp_path, epochs=2.0))
    assert (kept.train.schedule, kept.train.epochs) == ("cosine", 3)
    changed = adapt_config(make_member(tmp_path, epochs=2.0, schedule="plateau"))
    assert (changed.train.schedule, changed.train.epochs) == ("cosine", 2)


def test_without_time_a_network_stays_as_it_was_tested(tmp_path):
    member = make_member(tmp_path)
    weights, _, _ = train_whole(member, make_table(100), tmp_path / "packs", lambda: True)
    assert weights is None


def test_the_time_goes_to_the_heaviest_networks_that_fit(tmp_path):
    first = make_member(tmp_path)
    many = [
        first._replace(number=number, weight=weight, epochs=epochs)
        for number, weight, epochs in ((1, 0.2, 5.0), (2, 0.5, 100.0), (3, 0.3, 4.0))
    ]
    limit = RefitLimit(1.0, lambda: 20.0)
    assert [member.number for member in limit.select(many, 1.5)] == [3, 1]
    assert [member.number for member in NO_LIMIT.select(many, 1.5)] == [2, 3, 1]
    assert not RefitLimit(1.0, lambda: -1.0).select(many, 1.5)


def test_all_rows_of_the_sets_train_and_others_do_not(tmp_path):
    config = make_member(tmp_path).config
    table = make_table(130)  # the split leaves 30 rows out
    dataset, split = load_dataset(config, table, whole=True), load_dataset(config, table)
    assert dataset.num_windows == {"train": 100 - 8 - 2 + 1, "val": 19, "test": 0}
    assert split.num_windows["train"] < dataset.num_windows["train"]
    used = table["load"].to_numpy()[:100]
    assert dataset.scaler.shift["load"] == pytest.approx(used.mean())
    assert dataset.scaler.size["load"] == pytest.approx(used.std(), rel=1e-2)
    assert split.scaler.shift["load"] != pytest.approx(used.mean())


def test_steps_are_fitted_on_all_rows(tmp_path):
    values = make_table(100)["load"].to_numpy().copy()
    values[90] = 50.0  # a test row
    table = make_table(100).set_column(1, "load", pa.array(values))
    steps = [{"step": "outliers", "columns": ["load"], "method": "quantile"}]
    config = make_member(tmp_path, data={"prepare": steps}).config
    whole, split = (load_dataset(config, table, whole=flag) for flag in (True, False))
    assert whole.limits.keys() == split.limits.keys()
    assert whole.limits != split.limits


def test_a_series_split_trains_on_every_series(tmp_path):
    draw = np.random.default_rng(3)
    names = np.repeat([f"s{number}" for number in range(6)], 30)
    table = pa.table({"id": names, "load": draw.standard_normal(180)})
    split = {"by": "id", "val": ["s1"], "test": ["s4", "s5"]}
    settings = make_settings(tmp_path, id="id", split=split, context=8, horizon=2)
    del settings["data"]["time"]
    dataset = load_dataset(configs.load(settings), table, whole=True)
    assert dataset.num_windows["train"] == 6 * (30 - 8 - 2 + 1)


def test_a_baseline_keeps_validation_rows_for_its_penalty(tmp_path):
    config = make_member(tmp_path).config
    data = DatasetCache(config, make_table(100), whole=True).get(config)
    fitted = fit_baseline("ridge", config, data)
    (starts,) = data.folds
    rest = starts["train"][~torch.isin(starts["train"], starts["val"])]
    assert len(rest) == len(starts["train"]) - len(starts["val"])
    fold = FoldBaselines(config, data, 0, {"train": rest, "val": starts["val"]})
    expected = fit_baselines(fold.dataset, fold.load_chunks, without=("gbm", "seasonal", "repeat"))
    torch.testing.assert_close(fitted.state["weights"], expected["ridge"].state["weights"])


def test_the_end_takes_longer_with_it():
    names = ["trial 0", "gbm"]
    plain, refits = (AutoCosts(100, refits=flag, fit_s={"gbm": 3.0}) for flag in (False, True))
    assert plain.estimate_refit(names, 2.0) == 0
    assert refits.estimate_refit(names, 2.0) == pytest.approx(REFIT_COST * MARGIN * 5.0)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refit")
    return slipstream.auto(make_settings(folder), make_table(), minutes=0.3, quiet=True)


@pytest.fixture(scope="module")
def refitted(study, tmp_path_factory):
    """The same search with the refit added afterwards."""
    folder = tmp_path_factory.mktemp("added") / study.run.name
    shutil.copytree(study.run, folder)
    return slipstream.auto(resume=folder, data=make_table(), refit=True, quiet=True)


def read_files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_it_is_added_to_a_finished_search(study, refitted):
    assert study.refit is None
    assert refitted.refit == refitted.run / "retrained" / "refit"
    found = refitted.summary["refit"]
    assert (found["state"], found["models"]) == ("done", found["of"])
    assert found["windows"] > study.summary["windows"]["train"]
    assert refitted.verdict == study.verdict
    assert json.loads((refitted.run / "auto.json").read_text())["refit"]
    tested = [study.run / "retrained" / "best", refitted.run / "retrained" / "best"]
    first, second = (
        {path.relative_to(folder): content for path, content in read_files(folder).items()}
        for folder in tested
    )
    assert first == second  # the tested answer stays


def test_it_is_done_once(refitted):
    before = read_files(refitted.refit)
    again = slipstream.auto(resume=refitted.run, data=make_table(), refit=True, quiet=True)
    assert again.summary["refit"] == refitted.summary["refit"]
    assert read_files(refitted.refit) == before


def test_the_model_for_use_has_no_test_figures(refitted):
    summary = runs.read_metrics(refitted.refit)
    expected = f"{refitted.run.name}/retrained/best"
    text = f"untested: trained on all rows, its expected error is that of {expected}"
    assert summary["untested"] == text
    assert not {"metrics", "scaled", "baselines", "coverage"} & set(summary)
    for call in (slipstream.evaluate, slipstream.report, slipstream.Result.open):
        with pytest.raises(UserError, match=text):
            call(refitted.refit)
    with pytest.raises(UserError, match=text):
        slipstream.ensemble([refitted.refit, refitted.run / "retrained" / "best"], make_table())
    (row,) = [row for row in slipstream.list_runs(refitted.refit.parent) if row.name == "refit"]
    assert (row.test, row.note) == (None, text)
    scores = slipstream.evaluate(refitted.refit, make_table(300))
    assert text in scores["notes"]


def test_it_predicts_with_the_intervals_of_the_tested_answer(refitted):
    table = make_table(300)
    tested, untested = (slipstream.predict(run, table) for run in (refitted.run, refitted.refit))
    assert b"untested" in untested.schema.metadata[b"model"]
    assert b"untested" not in tested.schema.metadata[b"model"]
    widths = [
        found["load_hi80"].to_numpy() - found["load_lo80"].to_numpy()
        for found in (tested, untested)
    ]
    np.testing.assert_allclose(*widths, rtol=1e-5)
    predicted = [found["load_predicted"].to_numpy() for found in (tested, untested)]
    assert not np.allclose(*predicted, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["estimate", "classes", "quantiles", "series", "small"])
def test_every_task_has_one(task, tmp_path):
    table, options, settings = make_table(), {}, make_settings(tmp_path)
    match task:
        case "estimate":
            settings["data"] |= {"horizon": 0, "inputs": ["temp"]}
        case "classes":
            label = np.where(table["load"].to_numpy() > 0, "high", "low")
            table = table.append_column("state", pa.array(label))
            more = {"task": "classify", "targets": ["state"], "horizon": 0}
            settings["data"] |= {**more, "inputs": ["load", "temp"]}
        case "quantiles":
            settings["train"] = {"loss": "quantile", "quantiles": [0.1, 0.5, 0.9]}
        case "series":
            parts = [
                make_table(200).append_column("id", pa.array([f"s{i}"] * 200)) for i in range(6)
            ]
            table = pa.concat_tables(parts)
            split = {"by": "id", "val": ["s1"], "test": ["s4"]}
            settings["data"] |= {"id": "id", "split": split}
        case "small":
            options = {"prefer": "small"}
    tested = slipstream.auto(settings, table, minutes=0.3, quiet=True, **options)
    study = slipstream.auto(resume=tested.run, data=table, refit=True, quiet=True)
    found = study.summary["refit"]
    assert (found["state"], found["models"]) == ("done", found["of"])
    predicted = slipstream.predict(study.refit, table.slice(0, 200))
    numbers = predicted.select(predicted.column_names[4:]).to_pandas().select_dtypes("number")
    assert np.isfinite(numbers.to_numpy()).all()
    assert predicted.num_rows


@pytest.mark.slow
def test_ctrl_c_leaves_the_tested_answer_and_resume_trains_on_all_rows(tmp_path):
    path = tmp_path / "load.parquet"
    pq.write_table(make_table(4000), path)
    words = ["auto", str(path), "--targets", "load", "--minutes", "0.5", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", *words, "--refit"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "on all rows" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    (folder,) = tmp_path.glob("load-*")
    summary = runs.read_metrics(folder)
    assert not summary["interrupted"]
    assert (folder / "retrained" / "best" / "metrics.json").exists()
    if process.returncode == 0:  # it was done before the signal came
        pytest.skip("the training on all rows was faster than the signal")
    assert process.returncode == 130
    assert summary["refit"]["state"] == "interrupted"
    study = slipstream.auto(resume=folder, quiet=True)
    assert study.summary["refit"]["state"] == "done"
    assert study.verdict == summary["verdict"]
