"""What a run that beats no baseline shows, and changes of settings, measured on request."""

from __future__ import annotations

import html
import json

import numpy as np
import pyarrow as pa
import pytest

import slipstream
from slipstream import config as configs
from slipstream import runs
from slipstream.cli.commands import app
from slipstream.engine.lanes import OUT_OF_TIME
from slipstream.reporting.page import report
from slipstream.tools.doctor.trials import examine_job
from slipstream.training import advice
from tests.conftest import small_config, small_dataset, waves

CHANGE_NAMES = ("model.", "data.", "train.lr")
"""Beginnings of the names of settings that only a measurement may recommend"""


def list_changes(config, table=None):
    return advice.list_changes(config, small_dataset(config, table))


def test_a_plain_forecast_has_every_change():
    config = small_config(data={"context": 48, "period": 48})
    assert list_changes(config, waves(2000)) == [
        {"model.normalize": "last"},
        {"data.channels": "independent"},
        {"data.context": 96},
        {"model.patch": 16},
    ]


def test_what_is_set_or_does_not_apply_is_not_tried():
    model = {"kind": "mlp", "normalize": "window"}
    config = small_config(data={"channels": "independent"}, model=model)
    assert list_changes(config) == [{"data.context": 32}]
    estimate = {"horizon": 0, "targets": ["c"], "context": 90}
    assert list_changes(small_config(data=estimate)) == []


def test_every_change_gives_a_valid_config():
    for kind in ("lstm", "transformer", "tcn", "linear", "nhits"):
        config = small_config(data={"context": 48}, model={"kind": kind})
        for settings in list_changes(config, waves(2000)):
            assert configs.replace_settings(config, settings) != config


def summarize(best, epochs, stopped="all epochs done", **more):
    result = {"run": "runs/a", "best_epoch": best, "epochs": epochs, "stopped": stopped}
    scores = {"metrics": {"test": {"r2": 0.5}}, "against_baselines": {"verdict": "worse"}}
    return result | scores | more


@pytest.mark.parametrize(
    ("result", "observed"),
    [
        (
            summarize(20.0, 20.0),
            ["after the last epoch (20); to go on: slipstream train --resume "],
        ),
        (summarize(2.0, 20.0), ["was lowest after 2 of 20 epochs"]),
        (summarize(10.0, 20.0), []),
        (summarize(3.5, 3.5, OUT_OF_TIME), ["train.minutes ended the training after 3.5 epochs"]),
    ],
)
def test_what_the_losses_show_is_stated_with_the_command_that_goes_on(result, observed):
    config = small_config(data={"path": "a.csv"}, train={"minutes": 2.0})
    found = advice.advise(config, result)
    assert len(found["observations"]) == len(observed)
    for line, part in zip(found["observations"], observed, strict=True):
        assert part in line
    command = "slipstream auto runs/a/config.toml --minutes 5"
    assert found["command"] == command
    assert found["lines"] == [*found["observations"], found["lines"][-1]]
    assert found["lines"][-1].startswith(command)


def test_the_commands_for_a_table_from_python_are_calls():
    found = advice.advise(small_config(), summarize(20.0, 20.0))
    assert found["command"] == 'slipstream.auto("runs/a/config.toml", TABLE, minutes=5)'
    call = 'slipstream.train(resume="runs/a", data=TABLE, overrides="train.epochs=40")'
    assert call in found["observations"][0]


@pytest.mark.parametrize(
    ("r2", "verdict", "advised"),
    [
        (0.9, "better", False),
        (float("nan"), "better", False),
        (None, "better", False),
        (-0.1, "better", True),
        (0.9, "no difference shown", True),
        (0.9, "worse", True),
    ],
)
def test_only_a_run_that_is_not_shown_to_be_better_is_advised(r2, verdict, advised):
    more = {"against_baselines": {"verdict": verdict}, "metrics": {"test": {"r2": r2}}}
    assert bool(advice.advise(small_config(), summarize(5.0, 9.0, **more))) == advised


def drifting(rows=600):
    """Two random walks, of which the last value says nearly everything."""
    steps = np.random.default_rng(0).normal(size=(rows, 2))
    a, b = np.cumsum(steps, axis=0).T
    return pa.table({"time": np.arange(rows), "a": a, "b": b})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("advice") / "walk.csv"
    drifting(3000).to_pandas().to_csv(path, index=False)
    return path


def test_trials_measure_what_helps(path):
    config = small_config(data={"path": str(path)}, model={"kind": "linear"})
    lines = []
    result = advice.measure_changes(config, seconds=0.2, tell=lines.append)
    first, last, both = result["trials"]
    assert first["settings"] == {}
    assert last["settings"] == {"model.normalize": "last"}
    assert last["change"] < -0.2
    assert last["change"] == pytest.approx(last["scaled_error"] / first["scaled_error"] - 1)
    low, high = last["interval"]
    assert low < last["change"] < high < 0
    assert last["verdict"] == "better"
    assert both["settings"] == {"model.normalize": "last", "data.channels": "independent"}
    assert result["best"].items() >= last["settings"].items()
    assert len(lines) == 3
    text = "\n".join(result["lines"])
    assert "validation MAE after 0 s of training each, from the same seed:" in text
    assert f'  model.normalize = "last": {last["error"]:.4g} (' in text
    assert "95 % interval" in text
    assert "--set model.normalize=last" in text


def test_a_change_that_is_not_shown_to_help_is_not_recommended(tmp_path):
    """Of noise there is nothing to learn, so that no change can help."""
    noise = np.random.default_rng(0).normal(size=(3000, 2))
    table = pa.table({"time": np.arange(3000), "a": noise[:, 0], "b": noise[:, 1]})
    config = small_config(tmp_path, model={"kind": "linear"})
    result = advice.measure_changes(config, table, seconds=0.2)
    assert result["best"] == {}
    assert all(trial["verdict"] != "better" for trial in result["trials"])
    assert result["lines"][-1] == "none is shown to help in so short a time"
    assert not any("--set" in line for line in result["lines"])


def test_a_run_that_a_baseline_beats_observes_and_names_a_command(path, tmp_path):
    config = small_config(tmp_path, data={"path": str(path)}, model={"kind": "linear"})
    result = slipstream.train(config)
    lines = result.summary["advice"]["lines"]
    assert lines[-1].startswith(f"slipstream auto {result.run}/config.toml --minutes 5")
    assert set(lines) <= set(result.summary["notes"])
    assert not any(name in line for line in lines for name in CHANGE_NAMES)
    page = html.unescape(report(result.run).read_text(encoding="utf-8"))
    assert all(line in page for line in lines)


def test_the_command_measures_on_request(path, tmp_path, capsys):
    job = tmp_path / "job.toml"
    config = small_config(tmp_path, data={"path": str(path)}, model={"kind": "linear"})
    job.write_text(configs.to_toml(config, only_set=True))
    with pytest.raises(SystemExit) as end:
        app(["train", str(job), "--advise", "--json"])
    assert end.value.code == 0
    summary = json.loads(capsys.readouterr().out)
    assert len(summary["advice"]["trials"]) == 3
    assert summary["advice"]["seconds"] == 6
    run = runs.find_last(str(tmp_path))
    saved = runs.read_metrics(run)
    assert saved["advice"] == summary["advice"]
    assert saved["detail"]
    assert summary["notes"][-len(summary["advice"]["lines"]) :] == summary["advice"]["lines"]
    assert len(set(summary["notes"])) == len(summary["notes"])


def test_the_doctor_examines_a_job(path, tmp_path):
    job = tmp_path / "job.toml"
    settings = {"data": {"path": str(path)}, "model": {"kind": "linear", "patch": 4}}
    job.write_text(configs.to_toml(small_config(tmp_path, **settings), only_set=True))
    findings = examine_job(job, lambda _: None)
    assert any("model.patch = 4 has no effect" in note for note in findings["notes"])
    assert len(findings["advice"]["trials"]) == 3
    assert findings["windows"]["train"] > 0


@pytest.mark.parametrize(
    ("step", "what"),
    [
        ({"step": "filter", "kind": "ema", "columns": ["a"], "rows": 4}, "filtered"),
        ({"step": "formula", "name": "a", "value": "mean(a, 4)"}, "filtered"),
        ({"step": "clip", "columns": ["a"], "high": 1.0}, "limited"),
        ({"step": "filter", "kind": "ema", "columns": ["a"], "rows": 4, "into": "slow"}, None),
    ],
)
def test_a_target_that_steps_make_easier_is_noted_in_terminal_report_and_table(
    tmp_path, step, what
):
    data = {"time": "time", "targets": ["a"], "context": 8, "horizon": 2, "prepare": [step]}
    config = small_config(tmp_path, data=data, train={"epochs": 1})
    result = slipstream.train(config, drifting(), quiet=True)
    found = [note for note in result.summary["notes"] if 'the target "a"' in note]
    row = slipstream.list_runs(tmp_path)[0]
    if what is None:
        assert found == []
        assert row.data == "a table in memory: a +2"
        return
    (note,) = found
    assert f'the target "a" is {what}' in note
    assert "cannot be compared with scores on them" in note
    assert f"({step['step']})" in note
    page = report(result.run).read_text(encoding="utf-8")
    assert note in html.unescape(page)
    assert row.data == f"a table in memory: a ({what}) +2"
