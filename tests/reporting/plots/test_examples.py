from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from slipstream.data.predictions import read_predictions
from slipstream.reporting.plots.predictions import choose_ranked, draw_examples, to_safe_json

ERRORS = {"good": 0.1, "fair": 1.0, "bad": 5.0, "poor": 2.0}


@pytest.fixture
def forecasts(tmp_path):
    """Windows of three rows, one starting at each row, of series that differ in their error."""
    columns = {name: [] for name in ("series", "row", "time", "step", "y", "y_predicted")}
    for name, error in ERRORS.items():
        for start in range(20):
            for step in range(1, 4):
                row = start + step - 1
                values = (name, row, np.datetime64("2020-01-01", "us") + np.timedelta64(row, "h"))
                for key, value in zip(
                    columns, (*values, step, float(row), row + error), strict=True
                ):
                    columns[key].append(value)
    columns["y_lo95"] = [value - 1 for value in columns["y_predicted"]]
    columns["y_hi95"] = [value + 1 for value in columns["y_predicted"]]
    pa.parquet.write_table(pa.table(columns), tmp_path / "predictions.parquet")
    return read_predictions(tmp_path / "predictions.parquet")


def test_the_worst_the_median_and_the_best_series_are_drawn(forecasts):
    drawn = draw_examples(forecasts, ["y"])
    titles = [one.title for one in drawn.series]
    assert titles == ["Worst series: bad", "Median series: poor", "Best series: good"]
    assert "7 of 20 test windows" in drawn.series[0].note
    assert "1 to 3 rows ahead" in drawn.series[0].note
    assert [title.split(":")[0] for title, _ in drawn.windows] == [
        "Worst of 80 windows",
        "Median of 80 windows",
        "Best of 80 windows",
    ]


def test_windows_follow_each_other_without_overlap(forecasts):
    plot = json.loads(draw_examples(forecasts, ["y"]).data)[0]
    assert plot["dates"]
    times = np.cumsum(plot["steps"])
    assert times[0] == 1577836800
    assert len(times) == 21 + 6  # rows, and an interruption between windows
    assert plot["predicted"].count(None) == 6
    assert plot["true"].count(None) == 0
    assert [band["label"] for band in plot["bands"]] == ["95 % interval"]


def test_a_single_series_has_no_rank():
    assert [one.rank for one in choose_ranked(np.array([1.0]))] == [""]
    assert [one.rank for one in choose_ranked(np.array([1.0, 2.0]))] == ["worst", "best"]


def test_what_is_not_finite_is_worst_and_interrupts_the_line(tmp_path):
    columns = {"series": ["a", "a", "b", "b", "c", "c"], "row": [0, 1] * 3, "y": [1.0] * 6}
    columns["y_predicted"] = [1.0, 1.5, float("inf"), 1e300, 3.0, 1.0]
    pa.parquet.write_table(pa.table(columns), tmp_path / "predictions.parquet")
    drawn = draw_examples(read_predictions(tmp_path / "predictions.parquet"), ["y"])
    assert [one.title for one in drawn.series] == [
        "Worst series: b",
        "Median series: c",
        "Best series: a",
    ]
    assert json.loads(drawn.data)[0]["predicted"] == [None, 1e300]


def test_quantiles_are_a_fan_with_the_widest_first(tmp_path):
    names = ["y_q2.5", "y_q25", "y_q50", "y_q75", "y_q97.5"]
    columns = {"series": ["a"] * 3, "row": [0, 1, 2], "y": [1.0] * 3, "y_predicted": [1.0] * 3}
    table = pa.table(columns | {name: [1.0] * 3 for name in names})
    pa.parquet.write_table(table, tmp_path / "predictions.parquet")
    bands = read_predictions(tmp_path / "predictions.parquet").shape.find_bands("y")
    assert [(band.low, band.high) for band in bands] == [("y_q2.5", "y_q97.5"), ("y_q25", "y_q75")]


def test_data_cannot_end_its_script():
    text = to_safe_json({"a": "</script><!-- & \0"})
    assert not set("<>&\0") & set(text)
    assert json.loads(text) == {"a": "</script><!-- & \0"}


def test_series_are_ranked_by_the_rows_whose_truth_is_known(tmp_path):
    columns = {"series": ["a", "a", "b", "b", "c", "c"], "row": [0, 1] * 3}
    columns |= {"y": [1.0, None, 1.0, 1.0, None, None]}
    columns["y_predicted"] = [1.5, 9.0, 3.0, 3.0, 1.0, 1.0]
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    pa.parquet.write_table(table, tmp_path / "predictions.parquet")
    drawn = draw_examples(read_predictions(tmp_path / "predictions.parquet"), ["y"])
    assert [one.title for one in drawn.series] == ["Worst series: b", "Best series: a"]
    assert drawn.series[1].plots[0]["title"] == "y · mean absolute error 0.5000"
