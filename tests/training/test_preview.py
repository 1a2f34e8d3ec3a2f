"""The predictions that a run shows while it trains."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream import runs
from slipstream.data.windows import WindowChunk
from slipstream.engine.plan import Plan
from slipstream.runs import watching
from slipstream.scoring import ensemble, predict
from slipstream.training import preview
from tests.conftest import small_config, small_dataset, waves
from tests.labelled import NAMES, class_config, states
from tests.logs import read_lines


def train(config, table, *, watched=True):
    def look(event):
        if watched and isinstance(event, slipstream.events.Start):
            runs.mark_watched(Path(event.run))

    return slipstream.train(config, table, on_event=look, quiet=True).run


def read(run):
    return json.loads((run / runs.PREVIEW).read_text())


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same run, watched and not."""
    config = small_config(tmp_path_factory.mktemp("runs"), train={"epochs": 1})
    return [train(config, waves(), watched=watched) for watched in (True, False)]


def test_only_a_watched_run_shows_predictions(pair):
    watched, unwatched = pair
    assert (watched / runs.PREVIEW).exists()
    assert not (unwatched / runs.PREVIEW).exists()


def test_a_watched_run_has_the_numbers_of_an_unwatched_one(pair):
    one, two = (runs.read_metrics(run) for run in pair)
    assert one["metrics"] == two["metrics"]
    one, two = (load_file(run / "model" / "weights.safetensors") for run in pair)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_it_shows_the_validation_rows_and_what_the_model_says_of_them(pair):
    run, _ = pair
    values, table = read(run), waves()
    assert (values["epoch"], values["lane"], values["time"]) == (1.0, 0, "time")
    assert values["targets"] == list("abc")
    (series,) = values["series"]
    rows = np.array(series["at"], dtype=int)
    assert len(set(rows)) == len(rows)
    for name, actual in zip("abc", series["actual"], strict=True):
        np.testing.assert_allclose(actual, table[name].to_numpy()[rows], rtol=1e-6)
    config = runs.load_config(runs.Run(run))
    dataset = small_dataset(config, table)
    plan = Plan.from_dict(runs.read_json(run / "plan.json"))
    weights = load_file(run / "model" / "weights.safetensors")
    predictor = ensemble.build_predictor(weights, config, dataset, plan)
    starts = torch.from_numpy(rows[:: config.data.horizon] - config.data.context)
    memory = dataset.memory
    chunk = WindowChunk(memory.series, starts, 0, torch.arange(1), memory.time)
    (batch,) = predict.predict_batches(predictor, [chunk])
    expected = predict.build_table(batch, dataset)
    for name, predicted in zip("abc", series["predicted"], strict=True):
        np.testing.assert_allclose(predicted, expected[f"{name}_predicted"].to_numpy(), rtol=1e-6)


def test_the_log_says_how_losses_become_errors_in_the_unit_of_a_single_target(tmp_path):
    data = {"targets": ["a"], "inputs": ["a", "b"]}
    run = train(small_config(tmp_path, data=data, train={"epochs": 1}), waves())
    events = list(read_lines(runs.Run(run)))
    (scale,) = (event["scale"] for event in events if event["event"] == "start")
    (loss,) = (event["val_loss"] for event in events if event["event"] == "epoch")
    assert (scale["target"], scale["train"], scale["val"]) == ("a", "mse", "mse")
    rmse = runs.read_metrics(run)["metrics"]["val"]["rmse"]
    assert scale["size"] * loss**0.5 == pytest.approx(rmse, rel=1e-5)


def test_of_several_models_the_first_is_shown(tmp_path):
    config = small_config(tmp_path, train={"repeats": 2, "epochs": 1})
    values = read(train(config, waves()))
    assert values["lane"] == 0
    assert len(values["series"][0]["predicted"][0]) == len(values["series"][0]["at"])


def test_of_classes_the_probability_of_the_true_one_is_shown(tmp_path):
    values = read(train(class_config(tmp_path, train={"epochs": 1}), states(300)))
    assert values["classes"] == list(NAMES)
    odds = np.array(values["series"][0]["predicted"][0])
    assert ((odds > 0) & (odds < 1)).all()


def test_the_outer_quantiles_are_shown(tmp_path):
    quantiles = {"loss": "quantile", "quantiles": [0.1, 0.5, 0.9], "epochs": 1}
    (series,) = read(train(small_config(tmp_path, train=quantiles), waves()))["series"]
    assert len(series["low"][0]) == len(series["high"][0]) == len(series["at"])


def test_a_failing_preview_does_not_end_the_training(tmp_path):
    def look(event):
        if isinstance(event, slipstream.events.Start):
            folder = Path(event.run)
            (folder / watching.WATCHED).touch()
            (folder / runs.PREVIEW).mkdir()
            (folder / runs.PREVIEW / "file").touch()
        troubles.extend([event] if isinstance(event, slipstream.events.Trouble) else [])

    troubles = []
    slipstream.train(small_config(tmp_path), waves(), on_event=look, quiet=True)
    assert "no predictions are shown" in troubles[0].what


def test_windows_do_not_overlap_and_come_from_series_all_over():
    index = small_dataset().index
    offsets = np.arange(0, 11_000, 1_000)
    index = type(index)(**(vars(index) | {"offsets": offsets}))
    starts = np.arange(0, 10_000, 3)
    chosen = preview.choose_windows(starts, index, 5)
    owners = chosen // 1_000
    assert sorted(set(owners)) == [0, 4, 9]
    for owner in set(owners):
        mine = chosen[owners == owner]
        assert (np.diff(mine) >= 5).all()
        assert len(mine) <= preview.MAX_ROWS // 5
