"""Predictions of a trained model as they leave the program."""

from __future__ import annotations

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

import slipstream
from slipstream import prediction
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
        prediction.write_predictions(predicted, path)
        read = pyarrow.csv.read_csv if ending == "csv" else pyarrow.parquet.read_table
        again = read(path)
        for name in predicted.column_names[4:]:
            assert again[name].to_pylist() == predicted[name].to_pylist()
            assert len(set(again[name].to_pylist())) > 500
