"""Whether pre-training helps: three strategies, compared seed by seed."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from typer.testing import CliRunner

import slipstream
from slipstream import UserError, runs
from slipstream import config as configs
from slipstream.cli.commands import app
from slipstream.data import dataset as datasets
from slipstream.data import windows
from slipstream.data.simulated import bars
from slipstream.search import probe as probing
from tests.conftest import SMALL, close, merged
from tests.labelled import states

SETTINGS = merged(SMALL, {"data": {"context": 12, "inputs": ["a", "b"]}, "model": {"hidden": 6}})
ENCODER = merged(SETTINGS, {"name": "waves", "train": {"epochs": 1}, "pretrain": {"length": 3}})
LABELS = {
    "data": {"time": "time", "task": "classify", "targets": ["state"]},
    "train": {"epochs": 3, "freeze_epochs": 1, "batch": 128, "lr": 0.01},
    "engine": SMALL["engine"],
}
KEYS = {
    *("run", "name", "objective", "seeds", "judged_by", "scaled", "windows", "encoder", "ways"),
    *("beat_majority", "baselines", "against_scratch", "notes", "helped", "verdict", "seconds"),
    *("finished_at", "command"),
}


@pytest.fixture(scope="module")
def table():
    return states(600)


@pytest.fixture(scope="module")
def found(tmp_path_factory, table):
    out = tmp_path_factory.mktemp("probes")
    return slipstream.probe({**ENCODER, "out": str(out)}, LABELS, table, seeds=2)


def test_three_ways_are_trained_from_the_same_seeds(found):
    summary = found.summary
    assert set(summary) == KEYS
    assert summary["seeds"] == [0, 1]
    assert list(summary["ways"]) == ["scratch", "frozen", "fine-tuned"]
    asked = {way: configs.load(found.run / way / "config.toml") for way in summary["ways"]}
    assert asked["scratch"].train.init_from is None
    assert asked["frozen"].train.freeze_epochs == asked["frozen"].train.epochs == 3
    assert asked["fine-tuned"].train.freeze_epochs == 1
    assert asked["fine-tuned"].train.init_from == str(found.run / "encoder")
    for config in asked.values():
        assert config.model == asked["scratch"].model
        assert config.model.bidirectional
        assert config.data == asked["scratch"].data
    assert set(summary["baselines"]) == {"majority", "logistic", "gbm", "rocket"}


def test_its_figures_are_those_of_the_runs(found):
    for way, told in found.summary["ways"].items():
        lanes = json.loads((found.run / way / "metrics.json").read_text())["lanes"]
        for key in ("log_loss", "balanced_accuracy"):
            wanted = [lane["metrics"]["test"][key] for lane in lanes]
            assert told["metrics"][key]["by_seed"] == wanted
            close(told["metrics"][key]["mean"], np.mean(wanted))
    assert found.summary == json.loads((found.run / "summary.json").read_text())


def test_what_is_finished_is_not_trained_twice(found, table):
    logs = {path: path.stat().st_mtime_ns for path in found.run.glob("*/events.jsonl")}
    assert len(logs) == 4
    runs.remove(found.run / "frozen")
    again = slipstream.probe(
        configs.load(found.run / "encoder.toml"), LABELS, table, seeds=2, folder=found.run
    )
    close(
        again.summary["ways"]["frozen"]["metrics"]["log_loss"]["by_seed"],
        found.summary["ways"]["frozen"]["metrics"]["log_loss"]["by_seed"],
    )
    kept = {path for path, at in logs.items() if path.stat().st_mtime_ns == at}
    assert {path.parent.name for path in kept} == {"encoder", "scratch", "fine-tuned"}
    with pytest.raises(UserError, match="began with other settings"):
        slipstream.probe(
            configs.load(found.run / "encoder.toml"), LABELS, table, seeds=3, folder=found.run
        )


def test_the_report_draws_every_seed(found):
    page = slipstream.report(found.run).read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert found.summary["verdict"].split(":")[0] in page
    assert "balanced accuracy" in page


@pytest.mark.slow
def test_the_command_answers_in_json(found, table, tmp_path):
    pa.csv.write_csv(table, tmp_path / "states.csv")
    job = configs.replace_settings(
        configs.load(LABELS), {"data.path": str(tmp_path / "states.csv"), "train.repeats": 1}
    )
    (tmp_path / "labels.toml").write_text(configs.to_toml(job, only_set=True))
    given = ["--probe", str(tmp_path / "labels.toml"), "--encoder", str(found.run / "encoder")]
    sets = ["--seeds", "2", "--set", f"out={tmp_path}", "--probe-set", "train.epochs=2", "--json"]
    answer = CliRunner().invoke(app, ["pretrain", *given, *sets])
    assert answer.exit_code == 0, answer.output
    summary = json.loads(answer.stdout)
    assert set(summary) == KEYS | {"report"}
    assert summary["encoder"]["run"] == str(found.run / "encoder")


def test_the_interval_is_that_of_a_paired_t():
    scratch, other = [1.0, 1.2, 0.9, 1.1], [0.9, 1.0, 0.9, 0.8]
    told = probing.compare_with_scratch(scratch, other, "log_loss")
    # differences -0.1, -0.2, 0, -0.3: mean -0.15, error 0.0645497; t(3) at 0.975 is 3.18245
    close(told["difference"], -0.15)
    close([told["low"], told["high"]], [-0.15 - 3.18245 * 0.0645497, -0.15 + 3.18245 * 0.0645497])
    assert told["verdict"] == "no difference shown"
    lower = [one - 0.1 for one in scratch]
    for metric, verdict in (("log_loss", "better"), ("balanced_accuracy", "worse")):
        assert probing.compare_with_scratch(scratch, lower, metric)["verdict"] == verdict


@pytest.mark.parametrize(
    ("labels", "seeds", "said"),
    [
        ({"train": {"freeze_epochs": 3}}, 2, "leaves none of train.epochs = 3"),
        ({"train": {"init_from": "elsewhere", "freeze_epochs": 1}}, 2, "elsewhere"),
        ({}, 1, "an interval takes at least 2"),
    ],
)
def test_what_cannot_be_probed_is_refused_before_anything_is_trained(
    labels, seeds, said, table, tmp_path
):
    with pytest.raises(UserError, match=said):
        slipstream.probe(
            {**ENCODER, "out": str(tmp_path)}, merged(LABELS, labels), table, seeds=seeds
        )
    assert not list(tmp_path.iterdir())


def test_the_demo_has_a_hundred_labels():
    config = configs.load(configs.load_demo("regimes"), ["data.context=32"])
    dataset = datasets.load_dataset(
        configs.replace_settings(
            config, {"data.inputs": ["open", "high", "low", "close", "volume"]}
        )
    )
    assert dataset.num_windows == {"train": 100, "val": 50, "test": 1840}


def test_shuffling_the_future_never_changes_a_past_windows_label():
    table = bars.simulate()
    config = configs.load(
        configs.load_demo("regimes"), ['data.inputs=["close", "volume"]', "data.context=32"]
    )
    border, draw = 3000, np.random.default_rng(0)
    order = np.arange(table.num_rows).reshape(bars.NUM_INSTRUMENTS, bars.NUM_BARS)
    order[:, border:] = draw.permuted(order[:, border:], axis=1)
    shuffled = table.take(pa.array(order.ravel()))
    bar = table.column_names.index("bar")
    shuffled = shuffled.set_column(bar, "bar", table.column("bar"))
    seen = []
    for given in (table, shuffled):
        memory = datasets.load_dataset(config, given).memory
        starts = torch.cat([memory.starts[name] for name in ("train", "val")])
        past = starts[(starts + 31) % bars.NUM_BARS < border].sort().values
        seen.append((past, windows.gather(memory.series, past).targets))
    assert len(seen[0][0]) > 100
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])


def test_the_sp500s_label_looks_five_days_ahead_and_its_inputs_none():
    path = Path(__file__).parents[2] / "dev" / "sp500.py"
    spec = importlib.util.spec_from_file_location("sp500", path)
    sp500 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sp500)
    draw = np.random.default_rng(0)
    close_ = np.exp(np.cumsum(0.01 * draw.standard_normal(200)))
    rows = {"date": np.arange(200), "high": 1.01 * close_, "low": 0.99 * close_, "close": close_}
    rows["volume"] = np.exp(draw.standard_normal(200))
    order = np.arange(200)
    order[150:] = draw.permutation(order[150:])
    changed = {name: values[order] for name, values in rows.items()}
    one, two = (sp500.table(pa.table(given)) for given in (rows, changed))
    inputs = ["return", "range", "volume_change"]
    assert one.select(inputs).slice(0, 149).equals(two.select(inputs).slice(0, 149))
    labels = [table.column("direction").to_pylist() for table in (one, two)]
    assert labels[0][:144] == labels[1][:144]
    assert labels[0][-5:] == [None] * 5
    wanted = ["up" if close_[i + 5] > close_[i] else "down" for i in range(1, 195)]
    assert labels[0][:-5] == wanted


@pytest.mark.slow
def test_an_interrupted_probe_says_how_to_resume_it(tmp_path, table):
    def watch(event):
        if isinstance(event, slipstream.events.Step):
            signal.raise_signal(signal.SIGINT)

    encoder = {**ENCODER, "out": str(tmp_path / "runs")}
    with pytest.raises(slipstream.Interrupted) as caught:
        slipstream.probe(encoder, LABELS, table, seeds=2, on_event=watch)
    (folder,) = (tmp_path / "runs").iterdir()
    assert str(caught.value).endswith(
        f'; resume the probe with the same call and folder="{folder}"'
    )
    row = slipstream.list_runs(tmp_path / "runs")[0]
    assert (row.kind, row.state, row.repeats) == ("probe", "stopped", 2)
    assert slipstream.show_run(folder)["next"] == (
        f"slipstream pretrain {folder}/encoder.toml --probe {folder}/labels.toml --seeds 2 "
        f"--resume {folder}"
    )
    probe = slipstream.probe(encoder, LABELS, table, seeds=2, folder=tmp_path / "runs" / "last")
    parts = [probe.summary["encoder"], *probe.summary["ways"].values()]
    assert probe.summary["seconds"] >= sum(part["seconds"] for part in parts)
    row = slipstream.list_runs(tmp_path / "runs")[0]
    assert (row.state, row.test) == (
        *("finished", probe.summary["ways"]["fine-tuned"]["metrics"]["log_loss"]["mean"]),
    )
