"""Runs compared on the same predicted rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import slipstream
from slipstream import runs
from slipstream.reporting.pairing import pair_runs
from tests.conftest import close

ROWS = 600


def write(folder: Path, error: np.ndarray, *, first: int = 0, shift: float = 0.0) -> Path:
    """Write predictions with some errors, from a row on."""
    folder.mkdir()
    row = np.arange(first, ROWS)
    truth = np.sin(row / 9) + shift
    columns = {
        "series": pa.array(["s"] * len(row)).dictionary_encode(),
        "row": row,
        "y": truth,
        "y_predicted": truth + error[first:],
    }
    pq.write_table(pa.table(columns), folder / "predictions.parquet")
    return folder


@pytest.fixture
def noise():
    return np.random.default_rng(0).normal(size=ROWS)


def test_a_common_difficulty_cancels_out_of_the_difference(tmp_path, noise):
    """The error of the second is a little larger in every row: far less than rows differ."""
    folders = {"a": write(tmp_path / "a", noise), "b": write(tmp_path / "b", 1.02 * noise)}
    result = pair_runs(folders, context=5)
    a, b = (next(r for r in result.rows if (r["run"], r["metric"]) == (n, "mae")) for n in "ab")
    close([a["value"], b["value"]], [np.abs(noise).mean(), 1.02 * np.abs(noise).mean()])
    assert a["low"] < b["value"] < a["high"]  # the intervals of the errors overlap by far
    assert b["verdict"] == "worse"
    assert 0 < b["difference_low"] < b["difference"] < b["difference_high"]
    assert result.notes == []


def test_noise_shows_no_difference(tmp_path, noise):
    other = np.random.default_rng(1).permutation(noise)
    folders = {"a": write(tmp_path / "a", noise), "b": write(tmp_path / "b", other)}
    verdicts = {row.get("verdict") for row in pair_runs(folders, context=5).rows}
    assert verdicts == {None, "no difference shown"}


def test_runs_of_another_context_are_compared_on_the_rows_that_both_have(tmp_path, noise):
    folders = {"a": write(tmp_path / "a", noise), "b": write(tmp_path / "b", noise, first=100)}
    result = pair_runs(folders, context=5)
    assert {row["rows"] for row in result.rows} == {500}
    assert "of up to 600 predicted rows, the 500 that these runs share" in result.notes[0]
    close(result.rows[0]["value"], np.abs(noise[100:]).mean())


def test_other_truths_or_targets_cannot_be_compared(tmp_path, noise):
    folders = {
        "a": write(tmp_path / "a", noise),
        "b": write(tmp_path / "b", noise, shift=1.0),
    }
    result = pair_runs(folders, context=5)
    assert result.rows == []
    assert result.notes == [
        "b and a have different true values in the same rows (of other data, or changed by "
        "data.prepare), so their errors cannot be compared"
    ]
    assert result.incomparable == ["b"]


def test_too_few_windows_have_no_intervals(tmp_path, noise):
    folders = {"a": write(tmp_path / "a", noise), "b": write(tmp_path / "b", noise)}
    result = pair_runs(folders, context=400)
    assert all("low" not in row and "verdict" not in row for row in result.rows)
    assert "too few windows" in result.notes[0]


def test_classes_are_compared_by_log_loss_and_accuracy(tmp_path):
    labels = np.array(["x", "y"] * 150)
    for name, sure in (("a", 0.9), ("b", 0.6)):
        p_x = np.where(labels == "x", sure, 1 - sure)
        columns = {"series": ["s"] * 300, "row": np.arange(300), "label": labels}
        columns |= {"predicted": labels, "p_x": p_x, "p_y": 1 - p_x}
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(columns), tmp_path / name / "predictions.parquet")
    rows = pair_runs({name: tmp_path / name for name in "ab"}, context=1).rows
    b = {row["metric"]: row for row in rows if row["run"] == "b"}
    close(b["log_loss"]["value"], -np.log(0.6))
    assert b["log_loss"]["verdict"] == "worse"
    assert b["accuracy"]["value"] == 1
    assert b["accuracy"]["verdict"] == "no difference shown"


@pytest.mark.usefixtures("out")
def test_the_paired_values_are_the_metrics_of_the_runs():
    """Of repeats, those of the best model, whose predictions are in the folder."""
    comparison = slipstream.compare_runs("one", "three")
    paired = [row["value"] for row in comparison.paired if row["metric"] == "mae"]
    one, three = (runs.read_metrics(row.run) for row in comparison.runs)
    close(paired, [part["metrics"]["test"]["mae"] for part in (one, three)])
