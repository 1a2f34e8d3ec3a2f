"""A run without torch: what is read is what training saved, and bad runs are refused alike."""

from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest

import slipstream
from slipstream import UserError
from slipstream.inference.portable import load_portable
from slipstream.inference.trained import load_trained
from tests.conftest import merged, small_config, waves

QUICK = {"model": {"kind": "mlp"}, "train": {"epochs": 1, "lr": 0.01}, "data": {"targets": ["a"]}}


def train(folder, **sections):
    return slipstream.train(small_config(folder, **merged(QUICK, sections)), waves(300))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train(tmp_path_factory.mktemp("single")).run


@pytest.fixture(scope="module")
def repeats(tmp_path_factory):
    return train(tmp_path_factory.mktemp("repeats"), train={"repeats": 2}).run


@pytest.fixture(scope="module")
def joined(single, repeats, tmp_path_factory):
    out = tmp_path_factory.mktemp("joined")
    return slipstream.ensemble([single, repeats], waves(300), out=out).run


def load_both(run, **options):
    options = {"ensemble": None} | options
    return load_portable(run, **options), load_trained(
        run, overrides=(), allow_code=False, **options
    )


@pytest.mark.parametrize("which", ["single", "repeats", "joined"])
def test_it_holds_what_the_torch_model_holds(which, request):
    portable, trained = load_both(request.getfixturevalue(which))
    assert portable.description == trained.describe(on_folds=False)
    assert portable.reference == trained.reference
    assert len(portable.members) == len(trained.members)
    for member, other in zip(portable.members, trained.members, strict=True):
        assert member.name == other.name
        assert member.first.signature == other.trained.signature
        assert member.first.scaler == other.trained.scaler
        for model, torch_model in zip(member.models, other.trained.models, strict=True):
            state = torch_model.state_dict()
            assert model.weights.keys() == state.keys()
            for name, weight in model.weights.items():
                assert weight.dtype == np.float32
                np.testing.assert_array_equal(weight, state[name].numpy())


@pytest.mark.parametrize("which", ["repeats", "joined"])
def test_weights_and_intervals_are_those_of_predictions(which, request):
    run = request.getfixturevalue(which)
    portable = load_portable(run)
    assert sum(portable.weights) == pytest.approx(1)
    table = slipstream.predict(run, waves(40)).to_pandas()
    reach = (table["a_hi80"] - table["a_lo80"]) / 2
    assert portable.half_widths["80"][:, 0] == pytest.approx(reach.to_numpy(), rel=1e-5)


def test_the_best_member_alone_has_all_of_the_weight(joined):
    portable, trained = load_both(joined, ensemble=False)
    assert portable.description == trained.describe(on_folds=False)
    assert sorted(portable.weights) == [0.0, 1.0]
    assert portable.weights[trained.mixtures[-1].best] == 1.0


def test_hashes_are_those_of_the_files(joined):
    portable = load_portable(joined)
    assert {"ensemble.json", "members/1/model/weights.safetensors"} <= portable.hashes.keys()
    for name, value in portable.hashes.items():
        assert hashlib.sha256((joined / name).read_bytes()).hexdigest() == value


def describe_refusal(load):
    with pytest.raises(UserError) as error:
        load()
    return str(error.value)


def damage_weights(run):
    path = run / "model" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")


BAD_RUNS = {
    "damaged weights": damage_weights,
    "no model": lambda run: shutil.rmtree(run / "model"),
    "no manifest": lambda run: (run / "model" / "manifest.json").unlink(),
    "edited config": lambda run: (run / "config.toml").write_text('name = "other"\n'),
    "no run": lambda run: (run / "config.toml").unlink(),
}


@pytest.mark.parametrize("what", BAD_RUNS)
def test_a_bad_run_is_refused_in_the_words_of_predict(what, single, tmp_path):
    run = shutil.copytree(single, tmp_path / "run")
    BAD_RUNS[what](run)
    refusal = describe_refusal(lambda: load_portable(run))
    assert refusal == describe_refusal(
        lambda: load_trained(run, overrides=(), ensemble=None, allow_code=False)
    )


def test_one_model_is_no_ensemble(single):
    assert "not an ensemble" in describe_refusal(lambda: load_portable(single, ensemble=True))
