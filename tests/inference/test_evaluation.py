"""Scores of a trained model beside those of the baselines, on its own sets and on new data."""

from __future__ import annotations

import io
import shutil

import pyarrow.parquet as pq
import pytest
from rich.console import Console

import slipstream
from slipstream import runs
from slipstream.reporting.terminal.results import print_evaluation
from tests.conftest import merged, small_config, waves

QUICK = {"model": {"kind": "mlp"}, "train": {"epochs": 1}}


def train(folder, **sections):
    """Train on a file, so that the run can read its data again."""
    path = folder / "table.csv"
    waves(600).to_pandas().to_csv(path, index=False)
    config = small_config(folder, **merged(QUICK, merged({"data": {"path": str(path)}}, sections)))
    return slipstream.train(config)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return train(tmp_path_factory.mktemp("single"))


def copy_run(result, to):
    shutil.copytree(result.run, to)
    return to


def same_baselines(scored, result, which="test"):
    assert scored["baselines"].keys() == result.baselines.keys()
    for name, one in result.baselines.items():
        if one is None:
            assert scored["baselines"][name] is None
            continue
        assert scored["baselines"][name]["what"] == one["what"]
        for section in ("metrics", "scaled"):
            found, wanted = scored["baselines"][name][section], one[section][which]
            assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("which", ["val", "test"])
def test_baselines_have_the_metrics_that_training_wrote(result, which):
    same_baselines(slipstream.evaluate(result.run, on=which), result, which)


def test_baselines_of_folds_are_each_folds_own(tmp_path):
    walked = train(tmp_path, data={"split": {"walk_forward": 2}})
    same_baselines(slipstream.evaluate(walked.run), walked)


def test_a_run_that_saved_no_baselines_fits_them_again(result, tmp_path):
    run = copy_run(result, tmp_path / "run")
    runs.remove(run / "baselines")
    same_baselines(slipstream.evaluate(run), result)
    on_new = [slipstream.evaluate(one, waves(200, seed=1)) for one in (run, result.run)]
    for name in ("repeat", "ridge"):
        found, wanted = (scored["baselines"][name]["metrics"] for scored in on_new)
        assert found == pytest.approx(wanted, rel=1e-6)


def test_baselines_on_new_data_need_no_training_data(result, tmp_path):
    run, absent = copy_run(result, tmp_path / "run"), f"data.path={tmp_path / 'gone.csv'}"
    new = waves(200, seed=1)
    scored = slipstream.evaluate(run, new, overrides=(absent,))
    assert scored["baselines"]["ridge"]["metrics"]["mae"] > 0
    runs.remove(run / "baselines")
    scored = slipstream.evaluate(run, new, overrides=(absent,))
    assert scored["baselines"] == {}
    assert any("no baselines" in note and "gone.csv" in note for note in scored["notes"])


def test_the_table_lists_every_baseline_below_the_model(result):
    scored = slipstream.evaluate(result.run)
    out = io.StringIO()
    print_evaluation(scored, Console(file=out, width=120))
    cells = [line.strip("│ ").split("│")[0].strip() for line in out.getvalue().splitlines()]
    wanted = ["all", "baseline repeat", "baseline ridge", "baseline gbm"]
    assert cells[-5:-1] == wanted


def test_predictions_are_written_beside_the_truth(result, tmp_path):
    path = tmp_path / "test.parquet"
    scored = slipstream.evaluate(result.run, predictions=path)
    written = pq.read_table(path)
    assert written.equals(pq.read_table(result.run / "predictions.parquet"))
    errors = [
        abs(written[f"{target}_predicted"].to_numpy() - written[target].to_numpy()).mean()
        for target in scored["detail"]["per_target"]
    ]
    assert sum(errors) / len(errors) == pytest.approx(scored["metrics"]["mae"], rel=1e-6)
    new = waves(200, seed=1)
    slipstream.evaluate(result.run, new, predictions=path)
    assert set(pq.read_table(path).column_names) == set(written.column_names)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.csv", {}, "name a .parquet file"),
        ("none/a.parquet", {}, "there is no folder"),
        ("a.parquet", {"stream": True}, "either these or the stream"),
    ],
)
def test_predictions_that_cannot_be_written_are_refused(result, tmp_path, name, options, message):
    with pytest.raises(slipstream.UserError, match=message):
        slipstream.evaluate(result.run, predictions=tmp_path / name, **options)
