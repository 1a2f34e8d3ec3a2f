"""Tables of predictions of every shape are read by one reader, at once or by groups of rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.data.predictions import (
    LABEL,
    chain_windows,
    open_predictions,
    read_predictions,
)

ROWS = {"series": ["a", "a", "b", "b"], "row": [5, 6, 0, 1]}
STEPS = {"step": [1, 2, 1, 2]}
TIMES = {"time": np.array([10.0, 11.0, 0.0, 1.0])}
DATES = {"time": np.array([1, 2, 3, 4], dtype="datetime64[s]").astype("datetime64[us]")}
FOLDS = {"fold": [1, 1, 2, 2]}
NUMBERS = {"y": [1.0, 2.0, 3.0, 4.0], "y_predicted": [1.5, 2.0, 2.0, 4.0]}
QUANTILES = {f"y_q{level}": [1.0] * 4 for level in ("10", "50", "90")}
INTERVALS = {"y_lo95": [0.0] * 4, "y_hi95": [5.0] * 4, "y_lo80": [0.5] * 4, "y_hi80": [4.5] * 4}
CLASSES = {
    "label": ["up", "down", "up", "other"],
    "predicted": ["up", "up", "down", "up"],
    "p_up": [0.9, 0.8, 0.3, 0.6],
    "p_down": [0.1, 0.2, 0.7, 0.4],
}
HOLES = {"y": [1.0, None, float("nan"), 4.0], "y_predicted": [1.5, 2.0, 2.0, 4.0]}

SHAPES = {
    "estimate": ROWS | TIMES | NUMBERS,
    "rows only": ROWS | NUMBERS,
    "forecast": ROWS | DATES | STEPS | NUMBERS,
    "folds": ROWS | FOLDS | TIMES | STEPS | NUMBERS,
    "quantiles": ROWS | STEPS | NUMBERS | QUANTILES,
    "intervals": ROWS | NUMBERS | INTERVALS,
    "targets": ROWS | STEPS | NUMBERS | {"z": [0.0] * 4, "z_predicted": [1.0] * 4},
    "no truth": ROWS | STEPS | {"y_predicted": [1.5, 2.0, 2.0, 4.0]},
    "missing targets": ROWS | STEPS | HOLES,
    "classes": ROWS | CLASSES,
    "classes ahead": ROWS | STEPS | CLASSES,
    "classes without labels": ROWS | {k: v for k, v in CLASSES.items() if k != "label"},
}


@pytest.fixture(params=SHAPES)
def shaped(request, tmp_path):
    """The name of a shape and its file, in groups of two rows."""
    path = tmp_path / "predictions.parquet"
    table = pa.table({k: pa.array(v, from_pandas=True) for k, v in SHAPES[request.param].items()})
    series = table.column("series").dictionary_encode()
    pa.parquet.write_table(table.set_column(0, "series", series), path, row_group_size=2)
    return request.param, path


def test_both_ways_of_reading_agree_on_every_shape(shaped):
    name, path = shaped
    whole, file = read_predictions(path), open_predictions(path)
    assert whole.shape == file.shape
    assert whole.names == file.names == ("a", "b")
    shape = file.shape
    target = "" if shape.classes else shape.targets[0]
    parts = list(file.read(shape.list_columns(target, bands=True)))
    assert [len(part) for part in parts] == [2, 2]
    for read in ("read_x", "find_starts"):
        joined = np.concatenate([getattr(part, read)() for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole, read)())
    joined = np.concatenate([part.read_errors(target) for part in parts])
    np.testing.assert_array_equal(joined, whole.read_errors(target))
    np.testing.assert_array_equal(np.concatenate([part.codes for part in parts]), whole.codes)
    (only,) = file.read([], series=1)
    assert set(only.codes) == {1}
    assert shape.is_forecast == ("step" in SHAPES[name])
    assert whole.find_windows().tolist() == ([0, 2, 4] if shape.is_forecast else [0, 1, 2, 3, 4])


def test_a_shape_names_its_targets_classes_truth_and_bands(shaped):
    name, path = shaped
    shape = read_predictions(path).shape
    is_class = name.startswith("classes")
    assert shape.classes == (("up", "down") if is_class else ())
    assert shape.targets == (() if is_class else ("y", "z") if name == "targets" else ("y",))
    assert shape.has_truth("" if is_class else "y") == ("no" not in name and "without" not in name)
    labels = [band.label for band in shape.find_bands("y")]
    expected = {
        "quantiles": ["quantiles 10 to 90 %"],
        "intervals": ["95 % interval", "80 % interval"],
    }
    assert labels == expected.get(name, [])
    assert shape.x_name == ("" if name == "forecast" else "time" if shape.has_time else "row")
    assert shape.x_size == (1e6 if name == "forecast" else 1.0)


def test_errors_of_classes_are_the_log_loss_of_the_label(tmp_path):
    pa.parquet.write_table(pa.table(SHAPES["classes"]), tmp_path / "p.parquet")
    predictions = read_predictions(tmp_path / "p.parquet")
    assert predictions.read_classes(LABEL).tolist() == [0, 1, 0, -1]
    expected = [-np.log(0.9), -np.log(0.2), -np.log(0.3), np.nan]
    np.testing.assert_allclose(predictions.read_errors(""), expected)


def test_a_missing_truth_is_unknown_and_a_prediction_that_is_no_number_infinitely_wrong(tmp_path):
    columns = ROWS | {"y": [1.0, None, 3.0, 4.0], "y_predicted": [1.5, 2.0, float("nan"), 4.0]}
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    pa.parquet.write_table(table, tmp_path / "p.parquet")
    errors = read_predictions(tmp_path / "p.parquet").compute_errors(["y"])
    np.testing.assert_array_equal(errors, [0.5, np.nan, np.inf, 0.0])


def test_many_rows_are_sampled_by_groups(tmp_path):
    pa.parquet.write_table(pa.table(SHAPES["estimate"]), tmp_path / "p.parquet", row_group_size=1)
    sample = read_predictions(tmp_path / "p.parquet", limit=2)
    assert sample.sampled
    assert sample["row"].tolist() == [5, 0]
    assert not read_predictions(tmp_path / "p.parquet", limit=4).sampled


def test_windows_end_to_end_do_not_overlap():
    assert chain_windows(np.array([0, 1, 3, 4, 6, 10]), 3) == [0, 3, 6, 10]
    assert chain_windows(np.array([4, 5, 9]), 3, 2.0) == [5, 9]
    assert chain_windows(np.array([], dtype=int), 3) == []


@given(
    st.lists(st.integers(0, 60), max_size=40), st.integers(1, 6), st.sampled_from([-np.inf, 0, 7])
)
def test_chained_windows_are_those_of_a_walk_from_the_first(numbers, length, last):
    firsts, wanted, end = np.array(sorted(numbers), dtype=np.int64), [], last + length
    for first in firsts.tolist():
        if first >= end:
            wanted.append(first)
            end = first + length
    assert chain_windows(firsts, length, last) == wanted


def test_a_damaged_or_missing_file_is_named(tmp_path):
    path = tmp_path / "predictions.parquet"
    path.write_bytes(b"PAR1 broken")
    for read in (read_predictions, open_predictions):
        with pytest.raises(UserError, match=r"predictions\.parquet: cannot be read; it is damaged"):
            read(path)
        with pytest.raises(UserError, match="is missing; was the run finished"):
            read(tmp_path / "none.parquet")
