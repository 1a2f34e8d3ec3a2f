"""A pre-trained encoder beside the rest: classes, lanes of them, a search."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream import UserError, runs
from slipstream import config as configs
from slipstream.engine.optim import is_encoder_weight
from slipstream.search import packs
from tests.conftest import close, merged
from tests.labelled import class_config, states
from tests.logs import read_lines

BARS = {
    "data": {
        "path": "simulated:bars",
        "time": "bar",
        "id": "instrument",
        "where": {"instrument": ["instrument-01", "instrument-02"]},
        "task": "classify",
        "targets": ["regime"],
        "context": 16,
        "stride": 16,
    },
    "model": {"hidden": 8, "layers": 1, "dropout": 0.0},
    "train": {"epochs": 2, "batch": 64, "lr": 0.01, "class_weights": "balanced"},
    "engine": {"device": "cpu", "threads": 1, "plan": "off", "monitor": False},
}
INPUTS = ("open", "high", "low", "close", "volume")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """From the very config that classifies."""
    return slipstream.pretrain(merged(BARS, {"out": str(tmp_path_factory.mktemp("encoders"))}))


def tuned(out, pretrained, **sections):
    """The same job, from the encoder, whose shape it leaves to it."""
    asked = merged({key: BARS[key] for key in BARS if key != "model"}, sections)
    asked["train"] = asked["train"] | {"init_from": str(pretrained.run), "freeze_epochs": 1}
    return asked | {"out": str(out)}


def test_labels_mean_nothing_to_an_encoder(pretrained):
    config = configs.load(pretrained.run / "config.toml")
    assert (config.train.loss, config.train.class_weights) == ("mse", "none")
    assert config.data.task == "classify"  # so that the label is no input there either
    signature = json.loads((pretrained.run / "model" / "signature.json").read_text())
    assert (signature["inputs"], signature["targets"]) == (list(INPUTS), [])
    assert signature["classes"] == []
    assert set(pretrained.summary["baselines"]) == {"mean", "repeat", "interpolate"}


def test_what_pretraining_sets_by_itself_is_noted(pretrained, tmp_path):
    (note,) = [one for one in pretrained.summary["notes"] if "pre-trains with" in one]
    assert "model.bidirectional = true and model.layer_norm = true" in note
    asked = merged(BARS, {"out": str(tmp_path), "train": {"epochs": 1}})
    for kind in ("transformer", "gru"):
        model = {"kind": kind, "heads": 2}
        model |= {"bidirectional": False, "layer_norm": False} if kind == "gru" else {}
        result = slipstream.pretrain(merged(asked, {"model": model}), quiet=True)
        assert not [one for one in result.summary["notes"] if "pre-trains with" in one]


@pytest.mark.parametrize(("freeze_epochs", "is_noted"), [(10, True), (2, True), (1, False)])
def test_an_encoder_that_never_thaws_is_noted(tmp_path, pretrained, freeze_epochs, is_noted):
    asked = tuned(tmp_path, pretrained)
    asked["train"] |= {"freeze_epochs": freeze_epochs}
    notes = slipstream.train(asked, quiet=True).summary["notes"]
    found = [one for one in notes if "the encoder stays frozen to the end" in one]
    assert bool(found) == is_noted
    assert all(f"train.freeze_epochs = {freeze_epochs} leaves none" in one for one in found)


def test_an_encoder_whose_turn_did_not_come_is_noted(tmp_path, pretrained):
    asked = tuned(tmp_path, pretrained)
    asked["train"] |= {"epochs": 20, "freeze_epochs": 9, "minutes": 1e-6}
    summary = slipstream.train(asked, quiet=True).summary
    (note,) = [one for one in summary["notes"] if "the encoder stayed frozen" in one]
    assert "training ended in epoch 1, and train.freeze_epochs is 9" in note


def test_only_an_encoder_is_a_start(tmp_path, pretrained):
    trained = slipstream.train(tuned(tmp_path, pretrained), quiet=True)
    asked = tuned(tmp_path, trained)
    with pytest.raises(UserError, match=r"is a run of slipstream\.train; name a run of"):
        slipstream.train(asked)
    (trained.run / "trials.json").write_text("[]")
    with pytest.raises(UserError, match=r"is a search; name a run of slipstream\.pretrain"):
        slipstream.train(asked)


@pytest.mark.parametrize("split", [{"stratified": True}, {"walk_forward": 2}])
def test_splits_of_classes_are_no_hindrance(tmp_path, split):
    shares = {"train": 0.7, "val": 0.1, "test": 0.2} if "stratified" in split else {}
    asked = merged(BARS, {"out": str(tmp_path), "data": {"split": split | shares}})
    asked["train"] = {"epochs": 1, "loss": "focal", "label_smoothing": 0.1}
    assert slipstream.pretrain(asked).summary["windows"]["test"] == 0


@pytest.mark.slow
def test_a_classifier_starts_from_an_encoder_alone_and_in_lanes(tmp_path, pretrained):
    alone = [
        slipstream.train(tuned(tmp_path / str(seed), pretrained) | {"seed": seed})
        for seed in range(2)
    ]
    many = slipstream.train(tuned(tmp_path / "many", pretrained, train={"repeats": 2}))
    for seed, one in enumerate(alone):
        lane = many.summary["lanes"][seed]["metrics"]["test"]
        for name in ("log_loss", "balanced_accuracy"):
            close(lane[name], one.metrics["test"][name], rel=1e-4)
    assert many.summary["init_from"]["matched"] == alone[0].summary["init_from"]["matched"]
    config = configs.load(alone[0].run / "config.toml")
    assert config.model.layer_norm  # the encoder's own
    scalers = [
        json.loads((run / "model" / "scaler.json").read_text())
        for run in (pretrained.run, alone[0].run, many.run)
    ]
    for name in INPUTS:
        assert len({(one["shift"][name], one["size"][name]) for one in scalers}) == 1
    for one in scalers[1:]:
        assert (one["shift"]["regime"], one["size"]["regime"]) == (0.0, 1.0)
    found = slipstream.evaluate(alone[0].run)
    close(found["metrics"]["log_loss"], alone[0].metrics["test"]["log_loss"])


def test_what_stays_frozen_is_the_encoders_own(tmp_path, pretrained):
    asked = tuned(tmp_path, pretrained, train={"epochs": 1, "repeats": 2})
    run = slipstream.train(asked).run
    theirs, mine = (load_file(f / "model" / "weights.safetensors") for f in (pretrained.run, run))
    kept = [name for name in mine if is_encoder_weight(name)]
    assert kept
    assert all(torch.equal(mine[name], theirs[name]) for name in kept)


@pytest.mark.slow
def test_a_search_starts_from_the_encoder(tmp_path, pretrained):
    space = {"train.lr": [0.003, 0.01], "train.encoder_lr": [0.1, 0.5]}
    tune = {"trials": 4, "retrain": 0, "pruner": "none", "sampler": "grid", "space": space}
    asked = tuned(tmp_path, pretrained, tune=tune)
    study = slipstream.tune(asked)
    assert study.summary["trials"]["finished"] == 4
    best = configs.load(study.run / "best.toml")
    assert best.model == configs.load(pretrained.run / "config.toml").model
    again = slipstream.train(best)
    events = read_lines(runs.open_run(again.run))
    losses = [event["val_loss"] for event in events if event["event"] == "epoch"]
    close(study.summary["best"]["value"], min(losses), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("model.hidden", [4, 8], "the encoder of train.init_from determines"),
        ("model.hidden.0", [4, 8], "the encoder of train.init_from determines"),
        ("train.init_from", ["a", "b"], "how the data are scaled"),
        ("pretrain.ratio", [0.1, 0.2], "does not change the model"),
    ],
)
def test_a_search_refuses_by_name_what_the_encoder_settles(
    tmp_path, pretrained, name, values, said
):
    with pytest.raises(UserError, match=said):
        slipstream.tune(tuned(tmp_path, pretrained, tune={"space": {name: values}}))


def test_the_usual_search_leaves_the_encoders_width_alone(tmp_path, pretrained):
    asked = tuned(tmp_path, pretrained, tune={"trials": 2, "retrain": 0})
    found = slipstream.tune(asked).summary
    assert "train.lr" in found["space"]
    assert "model.hidden" not in found["space"]


def test_widths_under_a_layer_norm_have_packs_of_their_own(tmp_path):
    space = {"model.hidden": [5, 8], "augment.jitter": [0.0, 0.1]}
    config = class_config(
        tmp_path,
        model={"kind": "gru", "layer_norm": True},
        train={"epochs": 1},
        tune={"trials": 4, "retrain": 0, "pruner": "none", "sampler": "grid", "space": space},
    )
    found = slipstream.tune(config, states(400)).summary
    assert found["trials"]["finished"] == 4
    assert found["packs"] == 4
    shapes = [
        packs.get_pack_shape(configs.replace_settings(config, {"model.hidden": width}), "cuda")
        for width in (5, 8, (8,))
    ]
    assert [shape.widths for shape in shapes] == [(5,), (8,), (8,)]
    assert shapes[0].program != shapes[1].program == shapes[2].program
