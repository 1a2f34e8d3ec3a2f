"""Trained models in memory."""

from __future__ import annotations

import pickle

import pytest
import torch

import slipstream
from slipstream import UserError
from tests.conftest import SMALL, close, merged, small_config, waves


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return slipstream.train(small_config(tmp_path_factory.mktemp("runs")), waves(), quiet=True)


@pytest.fixture(scope="module")
def repeats(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("repeats"), train={"repeats": 2})
    return slipstream.train(config, waves(), quiet=True)


def test_a_loaded_model_predicts_as_its_run_does(result):
    model = slipstream.load(result)
    table = waves(60)
    assert model.predict(table).equals(slipstream.predict(result, table))
    assert model.predict(table, every=True).num_rows > model.predict(table).num_rows
    assert (model.context, model.horizon, model.classes) == (16, 4, ())
    assert model.inputs == model.targets == ("a", "b", "c")


def test_the_module_and_the_scaler_give_the_prediction_in_physical_units(result):
    model = result.model(device="cpu")
    table = waves(60)
    rows = torch.tensor(table.to_pandas()[list(model.inputs)].to_numpy()[-16:])
    shift = torch.tensor([model.scaler.shift[name] for name in model.inputs])
    size = torch.tensor([model.scaler.size[name] for name in model.inputs])
    with torch.inference_mode():
        scaled = model.module(((rows - shift) / size).float()[:, None], None)
    physical = scaled[0, :, :, 0].double() * size + shift
    close(physical[:, 0], model.predict(table)["a_predicted"].to_pylist())
    assert not model.module.training
    assert model.device == torch.device("cpu")


def test_changed_weights_change_the_prediction(result):
    model = slipstream.load(result)
    before = model.predict(waves(60))
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.zero_()
    assert not model.predict(waves(60)).equals(before)
    assert slipstream.load(result).predict(waves(60)).equals(before)


def test_repeats_load_as_the_ensemble_or_as_the_best(repeats):
    mean = slipstream.load(repeats, ensemble=True)
    single = slipstream.load(repeats, ensemble=False)
    assert len(mean.members) == 2
    assert single.members == [single.module]
    assert "the mean of 2" in repr(mean)
    table = waves(60)
    assert mean.predict(table).equals(repeats.predict(table, ensemble=True))
    assert single.predict(table).equals(repeats.predict(table, ensemble=False))


def test_joined_runs_load_with_the_networks_of_all_members(result, repeats, tmp_path):
    joined = slipstream.ensemble([result, repeats], waves(), out=tmp_path, quiet=True)
    model = slipstream.load(joined)
    assert len(model.members) in (2, 3)  # of the repeats, their mean or the better one
    assert model.predict(waves(60)).equals(joined.predict(waves(60)))


def test_one_model_is_no_ensemble(result):
    with pytest.raises(UserError, match="holds one model, not an ensemble"):
        slipstream.load(result, ensemble=True)


def test_an_encoder_loads_and_says_why_it_does_not_predict(tmp_path):
    model = {"kind": "transformer", "hidden": 8, "heads": 2, "layers": 1}
    config = merged(SMALL, {"out": tmp_path, "model": model})
    encoder = slipstream.load(slipstream.pretrain(config, waves(), quiet=True))
    assert sum(weight.numel() for weight in encoder.module.parameters()) > 0
    with pytest.raises(UserError, match="a pre-trained encoder, which predicts nothing yet"):
        encoder.predict(waves())
    assert "an encoder" in repr(encoder)


def test_a_model_prints_what_it_does(result):
    first, second = repr(slipstream.load(result)).splitlines()
    assert first == f"TrainedModel of {result.run.name}: lstm, 524 parameters on cpu"
    assert second == "reads a, b, c, 16 rows; forecasts a, b, c, 4 rows"


def test_a_pickled_model_reads_its_run_again(result):
    again = pickle.loads(pickle.dumps(slipstream.load(result)))
    assert again.predict(waves(60)).equals(result.predict(waves(60)))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such run folder"):
        slipstream.load(tmp_path / "absent")
