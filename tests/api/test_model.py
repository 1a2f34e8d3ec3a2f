"""Trained models in memory."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch

import slipstream
from slipstream import UserError
from tests.conftest import SMALL, close, merged, small_config, waves
from tests.labelled import CLASSIFY, states


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


CALLED = {
    "forecast": {},
    "estimate": {"data": {"horizon": 0, "inputs": ["a", "b"], "targets": ["c"]}},
    "quantiles": {"train": {"loss": "quantile"}, "model": {"kind": "tcn"}},
    "channels": {"data": {"channels": "independent"}, "model": {"kind": "transformer"}},
    "normalized": {"model": {"kind": "mlp", "normalize": "window"}},
    "repeats": {"train": {"repeats": 2}},
    "limited": {"model": {"output_range": [19.0, 21.0]}},
    "carried": {"train": {"state": "carried", "batch": 4}},
    "known ahead": {
        "data": {"future": ["a"], "static": ["k"], "id": "id", "targets": ["c"]},
        "model": {"kind": "gru"},
    },
    "own class": {"model": {"kind": "tests.models.nets:Mixer"}},
    "classes": CLASSIFY,
}


def make_table(name: str) -> pa.Table:
    if name == "classes":
        return states(300)
    table = waves(160)
    if name == "known ahead":
        number = np.repeat([0, 1], 80)
        table = table.append_column("id", pa.array(number))
        table = table.append_column("k", pa.array(0.5 + number))
    return table


@pytest.mark.filterwarnings("ignore:left out windows of which the rows to predict lack")
@pytest.mark.parametrize("name", CALLED)
def test_a_call_predicts_windows_in_physical_units(tmp_path, name):
    table = make_table(name)
    config = small_config(tmp_path, **merged(CALLED[name], {"train": {"epochs": 1}}))
    model = slipstream.train(config, table, quiet=True).model(device="cpu", allow_code=True)
    rows = np.stack([table[one].to_numpy() for one in model.inputs], axis=1)[: model.context + 4]
    starts = [0] if name == "carried" else [0, 1, 3]
    batch = np.stack([rows[start : start + model.context] for start in starts])
    more = {}
    if name == "known ahead":
        more["static"] = np.full((3, 1), 0.5)
        ends = [start + model.context for start in starts]
        more["future"] = np.stack([table["a"].to_numpy()[one : one + 4, None] for one in ends])
    got = model(batch, **more)
    wanted = model.predict(table.slice(0, 80) if more else table, every=True).to_pandas()
    first = model.context if model.horizon else model.context - 1
    for place, start in enumerate(starts):
        at = wanted[wanted["row"] - wanted.get("step", 1) + 1 == first + start]
        if model.classes:
            expected = at[[f"p_{one}" for one in model.classes]].to_numpy()
        else:
            ends = ("q10", "q50", "q90") if name == "quantiles" else ("predicted",)
            columns = [[f"{target}_{end}" for end in ends] for target in model.targets]
            expected = np.stack([at[one].to_numpy() for one in columns], axis=1)
            expected = expected if name == "quantiles" else expected[..., 0]
        close(got[place], expected.copy())
    tensors = {key: torch.as_tensor(value) for key, value in more.items()}
    by_tensor = model(torch.as_tensor(batch), **tensors)
    assert by_tensor.requires_grad
    close(by_tensor.detach(), got)


def test_a_call_has_the_gradients_of_a_module_and_its_weights(result):
    model = result.model(device="cpu")
    rows = torch.full((2, 16, 3), 20.0, requires_grad=True)
    model(rows).sum().backward()
    assert rows.grad is not None
    assert rows.grad.abs().sum() > 0
    with torch.no_grad():
        assert not model(rows).requires_grad
        before = model(rows)
        for weight in model.module.parameters():
            weight.zero_()
        assert not torch.equal(model(rows), before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([np.zeros((2, 15, 3))], r"rows is 2 x 15 x 3; pass windows x 16 rows x 3 inputs, .*a, b"),
        ([np.zeros((16, 3))], "rows is 16 x 3; pass windows x 16 rows"),
        ([np.zeros((1, 16, 3)), np.zeros((1, 1))], "static is for columns of data.static, of wh"),
    ],
)
def test_a_batch_of_another_shape_is_refused_by_name(result, arguments, said):
    with pytest.raises(UserError, match=said):
        result.model()(*arguments)


def test_the_module_takes_windows_alone(result):
    module = result.model(device="cpu").module
    rows = torch.zeros(16, 2, 3)
    assert torch.equal(module(rows), module(rows, None))


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
