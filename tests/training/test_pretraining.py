"""From windows without labels to an encoder, and from the encoder to a model."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream import Interrupted, UserError, runs, training
from slipstream import config as configs
from slipstream.config import Augment
from slipstream.config.train import KINDS
from slipstream.data import dataset as datasets
from slipstream.data import windows
from slipstream.engine import checkpoint, optim
from slipstream.models import noise
from slipstream.models.forecaster import build
from slipstream.models.noise import SequenceLayout, augment
from slipstream.training import encoder
from tests.conftest import SMALL, close, merged, slow, waves
from tests.logs import as_lines, read_lines
from tests.training.test_resume import ended, same, stopping_at

ENCODER = {"data": {"context": 24}, "model": {"hidden": 12, "layers": 2}}
PRETRAIN = merged(
    ENCODER,
    {
        "train": {"epochs": 6, "patience": "auto", "lr": 0.01, "batch": 64},
        "pretrain": {"ratio": 0.3},
    },
)
TUNE = {"train": {"epochs": 4, "freeze_epochs": 2, "lr": 0.01}, "data": {"horizon": 2}}


def settings(out, *parts):
    found = {**SMALL, "out": str(out)}
    for part in parts:
        found = merged(found, part)
    found["data"] = {key: value for key, value in found["data"].items() if key != "horizon"} | {
        key: part["data"][key] for part in parts for key in part.get("data", {})
    }
    return found


@pytest.fixture(scope="module")
def table():
    return waves(700)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, table):
    out = tmp_path_factory.mktemp("encoders")
    return slipstream.pretrain(settings(out, PRETRAIN), table)


def tuned(out, pretrained, *parts):
    """A config that says nothing of what the encoder settles."""
    found = settings(out, TUNE, {"train": {"init_from": str(pretrained.run)}}, *parts)
    found.pop("model")
    for name in ("context", "channels"):
        found["data"].pop(name, None)
    return found | {"model": parts[-1]["model"]} if parts and "model" in parts[-1] else found


def weights_of(run, name="weights"):
    return load_file(run / "model" / f"{name}.safetensors")


def test_an_encoder_fills_in_better_than_what_needs_no_learning(pretrained):
    summary = pretrained.summary
    assert summary["beaten_by"] == []
    assert set(summary["baselines"]) == {"mean", "repeat", "interpolate"}
    assert summary["windows"]["test"] == 0
    close(summary["scaled"]["val"]["mse"], _best_loss(pretrained.run), rel=0.05)
    assert summary["latent"]["units"] == 24
    assert len(summary["latent"]["std"]) == 24
    found = json.loads((pretrained.run / "metrics.json").read_text())
    assert found["detail"]["model"]["per_column"].keys() == {"a", "b", "c"}
    rows = sum(one["rows"] for one in found["detail"]["model"]["by_distance"])
    assert rows == summary["windows"]["val"] * 7  # one patch of each window


def _best_loss(run):
    """Over standardised columns, the loss is the scaled error."""
    events = read_lines(runs.open_run(run))
    return min(event["val_loss"] for event in events if event["event"] == "epoch")


def test_what_is_kept_is_an_encoder(pretrained):
    files = {path.name for path in (pretrained.run / "model").iterdir()}
    kept = {"weights.safetensors", "signature.json", "scaler.json", "origin.json", "manifest.json"}
    assert files == kept
    names = weights_of(pretrained.run)
    assert names["token"].shape == (3,)
    assert "core.layers.1.weight_hh_l0_reverse" in names
    assert "core.norms.1.weight" in names
    with pytest.raises(UserError, match="holds a pre-trained encoder"):
        slipstream.predict(pretrained.run, waves(100))


def test_its_defaults_are_in_its_config(pretrained):
    config = configs.load(pretrained.run / "config.toml")
    assert (config.train.lr_min, config.train.patience, config.train.min_delta) == (1e-5, 5, 1e-3)
    assert (config.data.split.train, config.data.split.val, config.data.split.test) == (
        *(0.9, 0.1),
        None,
    )
    assert config.model.bidirectional
    assert config.model.layer_norm
    plain = configs.load({"train": {"objective": "masked"}})
    assert (plain.train.batch, plain.train.epochs, plain.train.clip) == (512, 50, 1.0)
    mine = configs.load(
        {"train": {"objective": "masked", "batch": 7}, "model": {"bidirectional": False}}
    )
    assert (mine.train.batch, mine.model.bidirectional, mine.model.layer_norm) == (7, False, True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": {"kind": "mlp"}}, "no sequence encoder to pre-train"),
        ({"model": {"kind": "tests.models.nets:Mixer"}}, "has no encoder to pre-train"),
        ({"data": {"context": 12}}, "less than the 14 rows"),
        ({"train": {"loss": "quantile"}}, "does not work in pre-training; use"),
        ({"train": {"repeats": 2}}, "which trains one encoder"),
        ({"pretrain": {"ratio": 1.0}}, "pretrain.ratio"),
    ],
)
def test_what_cannot_be_pretrained_is_refused_by_name(wrong, said):
    with pytest.raises(UserError, match=said):
        slipstream.pretrain(wrong, waves(100))


def test_the_report_shows_filled_in_windows(pretrained):
    page = slipstream.report(pretrained.run).read_text(encoding="utf-8")
    assert page.count("<svg") >= 9
    assert "Error by distance to the nearest visible row" in page
    shown = pa.parquet.read_table(pretrained.run / "reconstructions.parquet")
    assert shown.num_rows == 6 * 24
    assert sum(shown.column("a_masked").to_pylist()) == 6 * 7


def test_a_column_may_be_called_as_if_it_were_filled_in(tmp_path):
    table = waves(400, columns=2).rename_columns(["time", "a", "orders_filled"])
    found = slipstream.pretrain(settings(tmp_path, PRETRAIN, {"train": {"epochs": 1}}), table)
    page = slipstream.report(found.run).read_text(encoding="utf-8")
    assert page.count("orders_filled · ") == 3


def test_inputs_called_like_the_places_of_rows_are_left_out_of_the_examples(tmp_path):
    table = waves(400).rename_columns(["time", "a", "row", "series"])
    found = slipstream.pretrain(settings(tmp_path, PRETRAIN, {"train": {"epochs": 1}}), table)
    shown = pa.parquet.read_table(found.run / "reconstructions.parquet")
    assert shown.column_names == ["window", "series", "row", "a", "a_filled", "a_masked"]
    assert shown.column("row").to_pylist()[1] == shown.column("row").to_pylist()[0] + 1
    assert slipstream.report(found.run).exists()


def test_rows_set_aside_for_the_test_are_never_read(tmp_path, table):
    split = {"data": {"split": {"train": 0.7, "val": 0.1, "test": 0.2}}}
    found = []
    for which in range(2):
        rows = table.to_pydict()
        for name in "abc" if which else "":
            rows[name] = rows[name][:560] + [1e4 * value for value in rows[name][560:]]
        asked = settings(tmp_path, PRETRAIN, split, {"train": {"epochs": 1}})
        run = slipstream.pretrain(asked, pa.table(rows)).run
        scaler = (run / "model" / "scaler.json").read_bytes()
        found.append((scaler, {k: v.tolist() for k, v in weights_of(run).items()}))
    assert found[0] == found[1]


def test_a_walks_later_folds_are_never_read(table):
    split = {"data": {"split": {"walk_forward": 3}}}
    config = configs.load(settings("x", PRETRAIN, split, {"train": {"objective": "masked"}}))
    starts = datasets.load_dataset(config, table).memory.starts
    assert int(starts["val"].max()) + 24 <= 700 - 140 + 2
    assert len(starts["test"]) == 0


def test_the_future_changes_nothing_of_a_past_window(table):
    """Of windows that end before the rows that change: values, scaler, mask and augmentation."""
    split = {"split": {"train": 0.5, "val": 0.2, "test": 0.3}}
    rows = table.to_pydict()
    draw = np.random.default_rng(1).permutation(210)
    for name in "abc":
        rows[name] = rows[name][:490] + [rows[name][490 + i] for i in draw]
    seen = []
    for given in (table, pa.table(rows)):
        for objective in ("masked", "predict"):
            asked = settings("x", ENCODER, {"data": split | {"horizon": 2}})
            config = configs.load(merged(asked, {"train": {"objective": objective}}))
            dataset = datasets.load_dataset(config, given)
            starts = torch.cat([dataset.memory.starts[name] for name in ("train", "val")])
            batch = windows.gather(dataset.memory.series, starts)
            mask = noise.mask_windows(config.pretrain, batch.inputs, None)
            layout, shares = SequenceLayout(dataset.signature.model_shared), torch.ones(len(starts))
            how = Augment(**dict.fromkeys(KINDS, 0.3))
            changed = augment(
                how, torch.tensor(1), batch.inputs, batch.targets, layout=layout, shares=shares
            )
            found = (starts, batch.inputs, batch.targets, mask, changed.inputs, changed.targets)
            seen.append((asdict(dataset.scaler), *found))
    for one, two in ((0, 2), (1, 3)):
        assert seen[one][0] == seen[two][0]
        for mine, theirs in zip(seen[one][1:], seen[two][1:], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        {},
        pytest.param({"device": "cuda", "precision": "fp32"}, marks=pytest.mark.gpu),
        pytest.param(
            {"device": "cuda", "precision": "fp16", "rnn": "slipstream"}, marks=pytest.mark.gpu
        ),
    ],
    ids=["cpu", "gpu", "gpu, our kernels"],
)
def test_pretraining_is_resumed_to_the_same_encoder(tmp_path, table, engine):
    engine = {"log_every": 4, "checkpoint_minutes": 1e-9} | engine
    often = {"engine": engine, "train": {"epochs": 2}}
    whole = slipstream.pretrain(settings(tmp_path / "a", PRETRAIN, often), table)
    wanted = ended(runs.open_run(whole.run))
    asked = settings(tmp_path / "b", PRETRAIN, often)
    with pytest.raises(Interrupted):
        training.train(asked, table, pretrain=True, watch=as_lines(stopping_at(13)))
    run = runs.open_run(runs.find_last(str(tmp_path / "b")))
    slipstream.pretrain(data=table, resume=run.folder)
    exact = 2 if "device" in engine else None  # sums of a GPU's figures come in any order
    same(ended(run)[:exact], wanted[:exact])


def test_only_a_pretraining_run_is_gone_on_with(tmp_path, table):
    run = slipstream.train(settings(tmp_path, {"train": {"epochs": 1}}), table).run
    with pytest.raises(UserError, match="is not a pre-training run"):
        slipstream.pretrain(resume=run)
    with pytest.raises(UserError, match=r"name a run of slipstream\.pretrain"):
        slipstream.train(settings(tmp_path, {"train": {"init_from": str(run)}}), table)


def flipped(path):
    """The file's contents with one bit changed in each, a bit of every byte."""
    whole = path.read_bytes()
    for place in range(len(whole)):
        yield place, whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :]


def test_an_encoder_is_verified_before_anything_of_it_is_parsed(tmp_path, pretrained):
    run = tmp_path / "copy"
    shutil.copytree(pretrained.run, run)
    asked = tuned(tmp_path, pretrained) | {"train": {"init_from": str(run)}}
    assert configs.load(asked).data.inputs == ("a", "b", "c")
    for name in ("signature.json", "manifest.json"):
        path = run / "model" / name
        whole = path.read_bytes()
        for _, damaged in flipped(path):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=rf"{run}/model/"):
                configs.load(asked)
        path.write_bytes(whole)


@pytest.mark.slow
def test_a_damaged_config_of_an_encoder_is_no_fault_of_ours(tmp_path, pretrained):
    run = tmp_path / "copy"
    shutil.copytree(pretrained.run, run)
    asked = tuned(tmp_path, pretrained) | {"train": {"init_from": str(run)}}
    path = run / "config.toml"
    whole = path.read_bytes()
    for place, damaged in flipped(path):
        if place % 3 == 0:
            path.write_bytes(damaged)
            with suppress(UserError):
                configs.load(asked)
    for text in ("", "data = 1\nmodel = 2\n", "[data]\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"copy/config\.toml: has no"):
            configs.load(asked)
    path.write_bytes(whole)
    assert configs.load(asked).model.sizes == (12, 12)


def kept_by_epoch(asked, table):
    """The weights at the end of every epoch, with the run."""
    found = []

    def watch(event):
        if event["event"] == "checkpoint":
            folder = run_of().checkpoints
            newest = folder / f"step-{checkpoint.list_steps(run_of())[-1]}"
            (file,) = newest.glob("*.safetensors")
            rows = load_file(file)
            prefix = "live.model."
            weights = {n.partition(prefix)[2]: row for n, row in rows.items() if prefix in n}
            if file.name == "lanes.safetensors":  # its first axis is the lane's place
                weights = {name: row[0] for name, row in weights.items()}
            found.append((event["step"], weights))

    def run_of():
        return runs.open_run(runs.find_last(asked["out"]))

    engine = {"async_checkpoints": False, "checkpoint_minutes": 1e-9}
    asked = merged(asked, {"engine": engine})
    return training.train(asked, table, watch=as_lines(watch)), dict(found)


@pytest.mark.slow
def test_an_encoder_is_frozen_then_trained(tmp_path, pretrained, table):
    result, kept = kept_by_epoch(tuned(tmp_path, pretrained), table)
    begins = weights_of(pretrained.run)
    per_epoch = result.summary["steps"] // 4
    frozen, thawed = kept[2 * per_epoch], kept[result.summary["steps"]]
    for name, weight in begins.items():
        if optim.is_encoder_weight(name):
            assert torch.equal(frozen[name], weight), name
            assert not torch.equal(thawed[name], weight), name
    assert not torch.equal(frozen["core.head.linear.weight"], thawed["core.head.linear.weight"])
    told = result.summary["init_from"]
    assert told["matched"] == sorted(name for name in begins if optim.is_encoder_weight(name))
    assert told["new"] == ["core.head.linear.weight", "core.head.linear.bias"]
    assert "token" in told["unused"]
    events = [event["event"] for event in read_lines(runs.open_run(result.run))]
    assert events.count("thaw") == events.count("init") == 1
    assert any(
        "10 weights" in note or "weights matched" in note for note in result.summary["notes"]
    )


def test_the_encoders_scaler_is_used_and_not_fitted_again(tmp_path, pretrained):
    other = waves(700, seed=5).to_pydict()
    other["a"] = [3 * value - 7 for value in other["a"]]
    other["label"] = [float(i % 17) for i in range(700)]
    target = {"data": {"horizon": 0, "targets": ["label"]}}
    run = slipstream.train(tuned(tmp_path, pretrained, target), pa.table(other)).run
    mine, theirs = (
        json.loads((folder / "model" / "scaler.json").read_text())
        for folder in (run, pretrained.run)
    )
    for name in "abc":
        assert mine["shift"][name] == theirs["shift"][name]
        assert mine["size"][name] == theirs["size"][name]
    assert mine["shift"]["label"] == pytest.approx(np.mean(other["label"][:490]), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [slow(1.0), 0.5])
def test_lanes_are_tuned_as_each_would_be_alone(tmp_path, pretrained, decay):
    table = waves(350)
    asked = tuned(tmp_path, pretrained, {"train": {"layer_decay": decay}})
    many = slipstream.train(merged(asked, {"train": {"repeats": 2}}), table).summary
    for seed in range(2):
        alone = slipstream.train(asked | {"seed": seed}, table).summary
        close(many["lanes"][seed]["metrics"]["test"]["mae"], alone["metrics"]["test"]["mae"])
        close(many["lanes"][seed]["val_loss"], _best_loss(alone["run"]))
    assert many["lanes"][0]["val_loss"] != many["lanes"][1]["val_loss"]
    assert many["init_from"]["matched"]


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, slow(2)])
def test_a_stop_before_or_after_the_thaw_changes_nothing(tmp_path, pretrained, repeats):
    table = waves(300)
    often = {"engine": {"log_every": 4, "checkpoint_minutes": 1e-9}, "train": {"repeats": repeats}}
    whole = slipstream.train(tuned(tmp_path / "w", pretrained, often), table)
    steps = whole.summary["steps"]
    for step in (3, steps - 3) if repeats == 1 else (steps // 2 + 2,):
        asked = tuned(tmp_path / f"at{step}", pretrained, often)
        with pytest.raises(Interrupted):
            training.train(asked, table, watch=as_lines(_stop(step, repeats)))
        run = runs.find_last(asked["out"])
        result = slipstream.train(data=table, resume=run)
        assert result.metrics == whole.metrics
        for name, weight in weights_of(whole.run).items():
            assert torch.equal(weight, weights_of(result.run)[name]), (step, name)


def _stop(step, repeats):
    """Lanes tell of their steps by the log."""
    if repeats == 1:
        return stopping_at(step)

    def watch(event):
        if event["event"] == "log" and event["step"] >= step:
            signal.raise_signal(signal.SIGINT)

    return watch


def test_columns_in_another_order_are_the_same_encoder(tmp_path, pretrained, table):
    asked = configs.load(tuned(tmp_path, pretrained, {"data": {"targets": ["a"]}}))
    found = encoder.load_encoder(asked)
    dataset = datasets.load_dataset(asked, table, known=found.scaler)
    assert dataset.signature.inputs == ("b", "c", "a")
    torch.manual_seed(0)
    model = build(asked.model, dataset.signature)
    taken = encoder.match_weights(found, asked, dataset.signature, model)
    assert taken.summarize()["columns_reordered"]
    model.load_state_dict(taken.weights, strict=False)
    masked = build(found.config.model, found.signature)
    masked.load_state_dict(found.weights)
    batch = windows.gather(dataset.memory.series, dataset.memory.starts["train"][:5])
    with torch.no_grad():
        mine = model.eval().core.encode(batch.inputs)
        theirs = masked.eval().core.encode(batch.inputs[..., [2, 0, 1]])
    close(mine, theirs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"hidden": 8}}, r"model.hidden is \[8, 8\], there \[12, 12\]"),
        ({"model": {"bidirectional": False}}, "model.bidirectional is False, there True"),
        ({"model": {"kind": "gru"}}, 'model.kind is "gru", there "lstm"'),
        ({"data": {"inputs": ["a", "b"]}}, 'data.inputs lacks "c"'),
        ({"data": {"scale": "minmax"}}, "data.scale is minmax, there standard"),
        ({"train": {"init_from": "nowhere"}}, "there is no such run"),
    ],
)
def test_what_does_not_fit_is_listed_and_no_run_is_made(tmp_path, pretrained, table, change, said):
    with pytest.raises(UserError, match=said):
        slipstream.train(tuned(tmp_path, pretrained, change), table)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_test_set_that_the_encoder_has_seen_is_told(tmp_path, table):
    pa.csv.write_csv(table, tmp_path / "rows.csv")
    told = []
    for split in ({}, {"split": {"train": 0.7, "val": 0.1, "test": 0.2}}):
        data = {"data": {"path": str(tmp_path / "rows.csv")} | split}
        short = {"train": {"epochs": 1}}
        made = slipstream.pretrain(settings(tmp_path, PRETRAIN, short, data))
        asked = tuned(tmp_path, made, {"data": {"path": str(tmp_path / "rows.csv")}}, short)
        result = slipstream.train(asked)
        notes = result.summary["notes"]
        assert slipstream.evaluate(result.run)["metrics"] == result.metrics["test"]
        told.append(any("has seen rows of this run's test set" in note for note in notes))
    assert told == [True, False]


def test_rates_fall_from_layer_to_layer():
    train = {"init_from": "x", "encoder_lr": 0.5, "layer_decay": 0.1}
    config = configs.Config.model_validate({"train": train, "model": {"layers": 3}})
    rates = {
        "core.head.linear.weight": 1.0,
        "core.pool.score.weight": 1.0,
        "core.layers.2.weight_hh_l0": 0.5,
        "core.norms.1.bias": 0.05,
        "core.layers.0.bias_ih_l0": 0.005,
        "core.embed.weight": 0.0005,
        "core.norm.weight": 0.5,
    }
    for name, rate in rates.items():
        assert optim.compute_lr_factor(name, config) == pytest.approx(rate), name


@pytest.mark.gpu
@pytest.mark.parametrize("repeats", [1, 2])
def test_on_a_gpu_the_thaw_is_captured_too(tmp_path, pretrained, table, repeats):
    losses = []
    for capture in (False, True):
        engine = {"device": "cuda", "precision": "fp32", "capture": capture}
        part = {"engine": engine, "train": {"repeats": repeats}}
        result = slipstream.train(tuned(tmp_path, pretrained, part), table)
        assert result.summary["plan"]["capture"] is capture
        events = read_lines(runs.open_run(result.run))
        losses.append([event["val_loss"] for event in events if event["event"] == "epoch"])
    close(losses[0], losses[1])


@pytest.mark.parametrize("home", ["stream", "loader"])
def test_windows_may_come_from_elsewhere(tmp_path, table, home):
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=200)
    found = []
    for engine in ({}, {"home": home, "workers": 0}):
        part = {"data": {"path": str(tmp_path / "rows.parquet")}, "engine": engine}
        asked = settings(tmp_path, PRETRAIN, part, {"train": {"epochs": 1}})
        found.append(slipstream.pretrain(asked).summary)
    assert found[0]["windows"] == found[1]["windows"]
    for name in ("mean", "repeat", "interpolate"):
        one, two = (summary["baselines"][name]["metrics"]["val"] for summary in found)
        close(one["mae"], two["mae"])
    if home == "loader":  # a stream draws in another order
        close(found[0]["metrics"]["val"]["mae"], found[1]["metrics"]["val"]["mae"])


@pytest.mark.slow
def test_a_channel_is_an_encoder_of_its_own(tmp_path, table):
    each = {"data": {"channels": "independent"}}
    made = slipstream.pretrain(settings(tmp_path, PRETRAIN, each, {"train": {"epochs": 2}}), table)
    assert weights_of(made.run)["token"].shape == (1,)
    found = json.loads((made.run / "metrics.json").read_text())
    assert found["detail"]["model"]["per_column"].keys() == {"a", "b", "c"}
    asked = tuned(tmp_path, made, {"data": {"targets": ["c", "a"], "inputs": ["c", "a"]}})
    result = slipstream.train(asked, table)
    assert result.summary["init_from"]["matched"]
    assert slipstream.report(made.run).exists()
