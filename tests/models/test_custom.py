"""A network of the user's own trains like ours: alone, as lanes, in a search."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import slipstream
from slipstream import UserError, runs
from tests.conftest import close, waves
from tests.logs import read_lines
from tests.models.nets import Deciding, Dropping, Mixer, Normed, Remembering

WHERE = "tests.models.nets"
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def job(tmp_path, **changed):
    path = tmp_path / "waves.parquet"
    if not path.exists():
        pq.write_table(waves(300), path)
    settings = {
        "name": "own",
        "out": str(tmp_path / "runs"),
        "data": {"path": str(path), "context": 8, "horizon": 2},
        "train": {"epochs": 3, "batch": 32, "lr": 0.01},
        "engine": {"device": "cpu", "monitor": False},
    }
    for section, values in changed.items():
        settings[section] = settings.get(section, {}) | values
    return settings


def losses(run):
    return [e["val_loss"] for e in read_lines(runs.Run(run)) if e["event"] == "epoch"]


def test_it_trains_and_predicts(tmp_path):
    found = slipstream.train(job(tmp_path, model={"options": {"width": 12}}), model=Mixer)
    assert losses(found.run)[-1] < losses(found.run)[0]
    assert 'kind = "tests.models.nets:Mixer"' in (found.run / "config.toml").read_text()
    table = slipstream.predict(found.run, waves(300))
    assert table.num_rows == 2  # one forecast of two rows
    again = slipstream.evaluate(found.run)
    close(again["metrics"]["mae"], found.metrics["test"]["mae"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("kind", "mode"), [(Mixer, "together"), (Remembering, "branches")])
def test_lanes_are_the_model_alone(tmp_path, kind, mode, device):
    engine = {"device": device, "precision": "fp32"}
    together = slipstream.train(job(tmp_path, train={"repeats": 3}, engine=engine), model=kind)
    assert together.summary["pack"]["mode"] == mode
    for lane in together.summary["lanes"]:
        settings = job(tmp_path, engine=engine) | {"seed": lane["seed"]}
        alone = slipstream.train(settings, model=kind)
        close(lane["val_loss"], min(losses(alone.run)), rel=1e-5)


@pytest.mark.parametrize("kind", [Dropping, Deciding])
def test_what_vmap_refuses_trains_as_branches_and_says_so(tmp_path, kind):
    found = slipstream.train(job(tmp_path, train={"repeats": 2}), model=kind)
    assert found.summary["pack"]["mode"] == "branches"
    assert "vmap" in found.summary["pack"]["why"]
    assert len(found.summary["lanes"]) == 2


@pytest.mark.slow
def test_models_with_running_means_train_one_at_a_time(tmp_path):
    alone = slipstream.train(job(tmp_path), model=Normed)
    assert slipstream.evaluate(alone.run)["windows"] > 0
    several = slipstream.train(job(tmp_path, train={"repeats": 2}), model=Normed)
    assert several.summary["pack"]["places"] == 1
    assert "running_mean" in several.summary["pack"]["why"]
    assert len(several.summary["lanes"]) == 2
    close(several.summary["lanes"][0]["val_loss"], min(losses(alone.run)))


def test_a_search_over_its_options(tmp_path):
    tune = {
        "trials": 4,
        "retrain": 0,
        "sampler": "grid",
        "space": {"model.options.width": [4, 8], "train.lr": [0.01, 0.003]},
    }
    found = slipstream.tune(job(tmp_path, tune=tune), model=Mixer)
    assert found.summary["trials"]["finished"] == 4
    assert found.best.model.options["width"] in (4, 8)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (f"{WHERE}:TooMany", r"it has to give \[2, 8\]"),
        (f"{WHERE}:Nameless", "cannot be made with context"),
        (f"{WHERE}:Missing", "has no Missing"),
        ("no_such_module:Net", "No module named"),
        (f"{WHERE}:torch", r"is not a torch\.nn\.Module"),
    ],
)
def test_a_class_that_does_not_fit_is_named(tmp_path, kind, told):
    with pytest.raises(UserError, match=told):
        slipstream.train(job(tmp_path, model={"kind": kind}))


def test_a_module_that_breaks_says_where(tmp_path, monkeypatch):
    (tmp_path / "broken_nets.py").write_text("import torch\ntorch.no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AttributeError, match="no_such_thing"):
        slipstream.train(job(tmp_path, model={"kind": "broken_nets:Net"}))


def test_a_class_inside_a_function_is_refused(tmp_path):
    class Inner(nn.Module):
        pass

    with pytest.raises(UserError, match="top of a module"):
        slipstream.train(job(tmp_path), model=Inner)


def test_options_of_other_networks_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.options"):
        slipstream.train(job(tmp_path, model={"kind": "lstm", "options": {"width": 3}}))


def test_what_it_draws_is_fixed_by_the_seed_and_leaves_the_caller_alone(tmp_path):
    before = torch.get_rng_state()
    first = slipstream.train(job(tmp_path), model=Dropping)
    assert torch.equal(torch.get_rng_state(), before)
    assert losses(slipstream.train(job(tmp_path), model=Dropping).run) == losses(first.run)
    other = slipstream.train(job(tmp_path) | {"seed": 1}, model=Dropping)
    assert losses(other.run) != losses(first.run)
