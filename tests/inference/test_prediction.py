"""Predictions of a trained model as they leave the program."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import slipstream
from slipstream.inference import predict
from tests.conftest import small_config, waves

FAR = 123456789.0


def far_table():
    table = waves(400).to_pydict()
    table["a"] = [value + FAR for value in table["a"]]
    return table


@pytest.mark.parametrize("repeats", [1, 2])
def test_files_of_predictions_hold_physical_values_with_all_their_digits(tmp_path, repeats):
    config = small_config(tmp_path, data={"targets": ["a"]}, train={"repeats": repeats})
    table = far_table()
    result = slipstream.train(config, table)
    written = pyarrow.parquet.read_table(result.run / "predictions.parquet")
    rows = written["row"].to_numpy()
    np.testing.assert_allclose(written["a"], np.array(table["a"])[rows], rtol=0, atol=1e-6)
    assert len(set(written["a"].to_pylist())) == len(np.unique(rows))
    assert len(set(written["a_predicted"].to_pylist())) > 50
    error = np.abs(written["a_predicted"].to_numpy() - written["a"].to_numpy())
    assert error.mean() == pytest.approx(result.metrics["test"]["mae"], rel=1e-6)
    predicted = slipstream.predict(result.run, table, every=True)
    for ending in ("csv", "parquet"):
        path = tmp_path / f"predicted.{ending}"
        predict.write_predictions(predicted, path)
        read = pyarrow.csv.read_csv if ending == "csv" else pyarrow.parquet.read_table
        again = read(path)
        for name in predicted.column_names[4:]:
            assert again[name].to_pylist() == predicted[name].to_pylist()
            assert len(set(again[name].to_pylist())) > 500


LAG = {"step": "formula", "name": "change", "value": "a - lag(a, 3)"}
LEFT_OUT = {
    "steps that look back": {"prepare": [LAG], "inputs": ["b", "change"]},
    "rows that lack an input": {"missing": "drop", "inputs": ["a", "b"]},
    "first rows that lack an input": {"missing": "forward", "inputs": ["a", "b"]},
    "padding": {"prepare": [LAG, {"step": "pad"}], "inputs": ["b", "change"]},
    "both": {"prepare": [LAG], "missing": "drop", "inputs": ["b", "change"]},
    "without times": {"prepare": [LAG], "inputs": ["b", "change"], "time": None},
    "streamed": {"prepare": [LAG], "inputs": ["b", "change"]},
}


def read_by_row(table: pa.Table, column: str) -> dict[tuple, float]:
    """The values of a column by series, row and step."""
    keys = [name for name in ("series", "row", "step") if name in table.column_names]
    columns = [table[name].to_pylist() for name in (*keys, column)]
    return {tuple(key): value for *key, value in zip(*columns, strict=True)}


@pytest.mark.filterwarnings("ignore:.*left out rows with missing values")
@pytest.mark.filterwarnings("ignore:.*left out the first 2 rows")
@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("horizon", [0, 4])
def test_rows_are_numbered_as_the_file_has_them(tmp_path, name, horizon):
    """Whatever is left out of a series, `row` finds the row of the file."""
    files = {"x": waves(150), "y": waves(120, seed=1)}
    table = pa.concat_tables(files.values())
    table = table.append_column("id", pa.array(["x"] * 150 + ["y"] * 120))
    if "missing" in LEFT_OUT[name]:
        rows = table["time"].to_numpy()
        holes = (rows < 2) | np.isin(rows, [40, 41, 90])
        column = pa.array(np.where(holes, np.nan, table["b"]), from_pandas=True)
        table = table.set_column(2, "b", column)
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    data = {"path": str(tmp_path / "table.parquet"), "id": "id", "targets": ["c"]}
    data |= {"horizon": horizon, "context": 8, **LEFT_OUT[name]}
    engine = {"home": "stream", "workers": 0} if name == "streamed" else {}
    config = small_config(tmp_path, data=data, engine=engine, train={"epochs": 1})
    run = slipstream.train(config, quiet=True).run
    written = pyarrow.parquet.read_table(run / "predictions.parquet")
    truths = read_by_row(written, "c")
    assert {series for series, *_ in truths} == {"x", "y"}
    for (series, row, *_), truth in truths.items():
        assert truth == pytest.approx(files[series]["c"][row].as_py(), rel=1e-6)
    predicted = slipstream.predict(run, table, every=True)
    every = read_by_row(predicted, "c_predicted")
    for key, value in read_by_row(written, "c_predicted").items():
        assert every[key] == pytest.approx(value, rel=1e-5)
    if "time" in predicted.column_names:  # the times of the file count its rows
        assert all(row == time for (_, row, *_), time in read_by_row(predicted, "time").items())
    if horizon:
        ends = slipstream.predict(run, table)["row"].to_pylist()
        assert ends == [150, 151, 152, 153, 120, 121, 122, 123]
