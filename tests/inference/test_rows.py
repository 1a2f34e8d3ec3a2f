"""New rows without torch: the windows of `predict`, from files, tables and dicts of columns."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from slipstream import UserError
from slipstream.data import windows
from slipstream.data.dataset import load_dataset
from slipstream.inference.rows import find_last_windows, read_new_rows
from slipstream.inference.trained import load_new_data
from tests.conftest import small_config, waves

SERIES = {"id": "cell", "static": ["size"], "future": ["c"], "targets": ["a", "b"]}


def two_series():
    """Two series with a static column."""
    first, second = waves(120), waves(90, seed=1)
    joined = pa.concat_tables([first, second])
    cell = pa.array(["x"] * 120 + ["y"] * 90)
    return joined.append_column("cell", cell).append_column(
        "size", pa.array([1.0] * 120 + [2] * 90)
    )


def train_data(**data):
    config = small_config(data=SERIES | data)
    return config, load_dataset(config, two_series())


def test_windows_are_those_of_the_torch_data_set():
    config, trained = train_data()
    signature, scaler = trained.signature, trained.scaler
    rows = read_new_rows(config, signature, scaler, two_series())
    other = load_new_data(config, signature, scaler, two_series(), targets=False)
    assert rows.starts.tolist() == other.memory.starts["all"].tolist()
    got = rows.gather(rows.starts)
    inputs, beside = windows.gather_inputs(other.memory.series, torch.from_numpy(rows.starts))
    for i, name in enumerate(signature.inputs):
        scaled = ((got.rows[..., i] - scaler.shift[name]) / scaler.size[name]).astype(np.float32)
        np.testing.assert_array_equal(scaled.T, inputs[..., i].numpy())
    assert set(zip(got.static[:, 0], rows.starts >= 120, strict=True)) == {
        (1.0, False),
        (2.0, True),
    }
    ahead = (got.future[..., 0] - scaler.shift["c"]) / scaler.size["c"]
    np.testing.assert_array_equal(ahead.astype(np.float32), beside[:, 1:].numpy())


def test_a_dict_of_columns_and_a_table_are_read_alike():
    config, trained = train_data()
    columns = json.loads(json.dumps(two_series().to_pydict()))
    every = [
        read_new_rows(config, trained.signature, trained.scaler, source)
        for source in (columns, two_series())
    ]
    np.testing.assert_array_equal(every[0].inputs, every[1].inputs)
    assert every[0].starts.tolist() == every[1].starts.tolist()


def test_columns_of_different_lengths_are_refused():
    config, trained = train_data()
    columns = two_series().to_pydict()
    columns["a"].pop()
    with pytest.raises(UserError, match="cannot be read as an Arrow table"):
        read_new_rows(config, trained.signature, trained.scaler, columns)


def test_the_last_windows_end_with_what_is_known_of_each_series():
    config, trained = train_data()
    table = two_series().to_pandas()
    table.loc[list(range(116, 120)) + list(range(206, 210)), ["a", "b"]] = np.nan
    rows = read_new_rows(config, trained.signature, trained.scaler, table)
    last = find_last_windows(rows.index, config.data, trained.signature, rows.starts)
    assert last.tolist() == [116 - 16, 206 - 16]
