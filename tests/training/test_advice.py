"""What often helps: suggested where it is not set, measured on request."""

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
from slipstream.reporting.page import report
from slipstream.tools.doctor.trials import examine_job
from slipstream.training import advice
from tests.conftest import small_config, small_dataset, waves


def settings_of(config, table=None, result=None):
    dataset = small_dataset(config, table)
    return [one.settings for one in advice.suggest(config, dataset, result)]


def test_a_plain_forecast_gets_every_suggestion():
    config = small_config(data={"context": 48, "period": 48})
    assert settings_of(config, waves(2000)) == [
        {"model.normalize": "last"},
        {"data.channels": "independent"},
        {"data.context": 96},
        {"model.patch": 16},
        {"train.lr": pytest.approx(1e-3 / 3)},
    ]


def test_what_is_set_or_does_not_apply_is_not_suggested():
    model = {"kind": "mlp", "normalize": "window"}
    config = small_config(data={"channels": "independent"}, model=model)
    assert settings_of(config) == [{"data.context": 32}, {"train.lr": pytest.approx(1e-3 / 3)}]
    estimate = {"horizon": 0, "targets": ["c"], "context": 90}
    assert [list(one) for one in settings_of(small_config(data=estimate))] == [["train.lr"]]


def test_a_best_epoch_that_comes_early_points_to_the_rate():
    result = {"best_epoch": 2.0, "epochs": 20.0}
    assert list(settings_of(small_config(), result=result)[0]) == ["train.lr"]


def test_every_suggestion_gives_a_valid_config():
    for kind in ("lstm", "transformer", "tcn", "linear", "nhits"):
        config = small_config(data={"context": 48}, model={"kind": kind})
        for settings in settings_of(config, waves(2000)):
            assert configs.replace_settings(config, settings) != config


def drifting(rows=600):
    """Two random walks, of which the last value says nearly everything."""
    steps = np.random.default_rng(0).normal(size=(rows, 2))
    a, b = np.cumsum(steps, axis=0).T
    return pa.table({"time": np.arange(rows), "a": a, "b": b})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("advice") / "walk.csv"
    drifting().to_pandas().to_csv(path, index=False)
    return path


def test_trials_measure_what_helps(path):
    config = small_config(data={"path": str(path)}, model={"kind": "linear"})
    lines = []
    result = advice.measure_suggestions(config, seconds=0.2, tell=lines.append)
    first, last, both = result["trials"]
    assert first["settings"] == {}
    assert last["settings"] == {"model.normalize": "last"}
    assert last["change"] < -0.2
    assert last["scaled_error"] < first["scaled_error"]
    assert both["settings"] == {"model.normalize": "last", "data.channels": "independent"}
    assert result["best"].items() >= last["settings"].items()
    assert len(lines) == 3
    text = "\n".join(result["lines"])
    assert "validation MAE after 0 s of training each:" in text
    assert f'  model.normalize = "last": {last["error"]:.4g} (' in text
    assert "--set model.normalize=last" in text


def test_a_run_that_a_baseline_beats_names_what_often_helps(path, tmp_path):
    config = small_config(tmp_path, data={"path": str(path)}, model={"kind": "linear"})
    summary = slipstream.train(config).summary
    (line,) = summary["advice"]["lines"]
    assert line.startswith('what often helps and is not set: model.normalize = "last"')
    assert line in summary["notes"]
    dataset = small_dataset(config)
    for r2, verdict, advised in (
        (0.9, "better", False),
        (float("nan"), "better", False),
        (-0.1, "better", True),
        (0.9, "no difference shown", True),
        (0.9, "worse", True),
    ):
        other = {"against_baselines": {"verdict": verdict}, "metrics": {"test": {"r2": r2}}}
        assert bool(advice.summarize_suggestions(config, dataset, summary | other)) == advised


def test_the_command_measures_on_request(path, tmp_path, capsys):
    job = tmp_path / "job.toml"
    config = small_config(tmp_path, data={"path": str(path)}, model={"kind": "linear"})
    job.write_text(configs.to_toml(config, only_set=True))
    with pytest.raises(SystemExit) as end:
        app(["train", str(job), "--advise", "--json"])
    assert end.value.code == 0
    summary = json.loads(capsys.readouterr().out)
    assert len(summary["advice"]["trials"]) == 3
    saved = runs.read_metrics(runs.find_last(str(tmp_path)))
    assert saved["advice"] == summary["advice"]
    assert saved["detail"]


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
