"""`slipstream prepare`: the rows that training sees, with the set of each row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.base.errors import UserError
from slipstream.cli.commands import app
from slipstream.config import Config
from slipstream.data.dataset import load_dataset
from tests.conftest import merged, small_config, waves
from tests.labelled import CLASSIFY, states

RESAMPLED = [
    {"step": "resample", "every": 2},
    {"step": "formula", "name": "power", "value": "a * lag(b, 1)"},
]


def make_table(rows: int = 240) -> pa.Table:
    """Three series of one table, by the column `cell`."""
    table = waves(rows)
    cell = np.repeat(["x", "y", "z"], rows // 3)
    time = np.tile(np.arange(rows // 3), 3)
    return table.set_column(0, "time", pa.array(time)).append_column("cell", pa.array(cell))


CASES: dict[str, dict[str, Any]] = {
    "estimate": {"horizon": 0, "targets": ["c"], "inputs": ["a", "b"]},
    "forecast": {},
    "id": {"id": "cell"},
    "by": {"id": "cell", "split": {"by": "cell", "val": ["y"], "test": ["z"]}},
    "resample first": {"id": "cell", "prepare": RESAMPLED, "targets": ["c"]},
    "folds": {"id": "cell", "split": {"walk_forward": 2}},
    "pad": {"id": "cell", "prepare": [{"step": "pad", "rows": 5}]},
}


def load_case(folder: Path, name: str) -> Config:
    table = make_table() if "id" in CASES[name] else waves(240)
    path = folder / "table.csv"
    pa.csv.write_csv(table, path)
    return small_config(folder / "runs", data={"path": str(path), "time": "time", **CASES[name]})


def scale(table: pa.Table, config: Config) -> tuple[np.ndarray[Any, Any], Any]:
    """Return the rows as training scales them, and the data set of training."""
    dataset = load_dataset(config)
    signature, scaler = dataset.signature, dataset.scaler
    names = [*signature.inputs, *(n for n in signature.targets if n not in signature.inputs)]
    values = [(table[n].to_numpy() - scaler.shift[n]) / scaler.size[n] for n in names]
    return np.stack(values, axis=1), dataset


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_those_of_training_before_scaling(name, tmp_path):
    config = load_case(tmp_path, name)
    table = slipstream.prepare(config)
    scaled, dataset = scale(table, config)
    wanted = dataset.memory.series.values.numpy()
    assert scaled.shape == wanted.shape
    np.testing.assert_allclose(scaled, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_window_predicts_rows_of_its_own_set(name, tmp_path):
    config = load_case(tmp_path, name)
    table = slipstream.prepare(config)
    dataset = load_dataset(config)
    folds = dataset.folds or (dataset.memory,)
    names = [column for column in table.column_names if column.startswith("split")]
    assert names == (["split_1", "split_2"] if dataset.folds else ["split"])
    lead, rows = dataset.signature.lead, np.arange(dataset.signature.steps_out)
    for column, fold in zip(names, folds, strict=True):
        sets = np.array(table[column].to_pylist())
        for which, starts in fold.starts.items():
            assert len(starts)
            # the last test windows of a fold reach into the next one's block
            ahead = rows[:1] if dataset.folds and which == "test" else rows
            assert set(sets[starts.numpy()[:, None] + lead + ahead].ravel()) == {which}


def test_series_rows_and_times_are_those_of_the_file(tmp_path):
    config = load_case(tmp_path, "id")
    table = slipstream.prepare(config)
    assert table.column_names == ["series", "row", "time", "a", "b", "c", "split"]
    source = make_table()
    assert table["series"].to_pylist() == source["cell"].to_pylist()
    assert table["time"].to_pylist() == source["time"].to_pylist()
    assert table["row"].to_pylist() == source["time"].to_pylist()
    np.testing.assert_allclose(table["b"].to_numpy(), source["b"].to_numpy())


def test_a_table_from_python_gives_the_rows_of_its_file(tmp_path):
    config = load_case(tmp_path, "resample first")
    wanted = slipstream.prepare(config)
    got = slipstream.prepare(config, make_table())
    assert got.drop_columns("series").equals(wanted.drop_columns("series"))
    assert got["series"].to_pylist() == wanted["series"].to_pylist()


def test_classes_have_their_names(tmp_path):
    table = states(300)
    config = small_config(tmp_path, **CLASSIFY)
    rows = slipstream.prepare(config, table)
    target = config.data.targets[0]
    assert rows[target].to_pylist() == [
        None if v is None else str(v) for v in table[target].to_pylist()
    ]
    assert set(rows["split"].to_pylist()) <= {"train", "val", "test", "unused"}


def test_a_stratified_split_gives_rows_the_set_of_the_window_that_predicts_them(tmp_path):
    split = {"stratified": True, "train": 0.6, "val": 0.2, "test": 0.2}
    config = small_config(tmp_path, **merged(CLASSIFY, {"data": {"split": split}}))
    table = states(600)
    sets = np.array(slipstream.prepare(config, table)["split"].to_pylist())
    dataset = load_dataset(config, table)
    for which, starts in dataset.memory.starts.items():
        assert set(sets[starts.numpy() + dataset.signature.lead]) == {which}


def test_pre_training_has_its_rows_too(tmp_path):
    config = small_config(tmp_path, train={"objective": "masked"})
    rows = slipstream.prepare(config, waves(600))
    assert rows.num_rows == 600
    assert set(rows["split"].to_pylist()) >= {"train", "val"}


def test_a_missing_target_is_null_and_a_missing_input_follows_its_setting(tmp_path):
    table = waves(240)
    gap = pa.array([None if 20 <= i < 23 else v for i, v in enumerate(table["a"].to_pylist())])
    table = table.set_column(1, "a", gap)
    data = {"horizon": 0, "targets": ["c"], "inputs": ["a", "b"]}
    with pytest.raises(UserError, match=r'column "a".*missing'):
        slipstream.prepare(small_config(tmp_path, data=data), table)
    filled = slipstream.prepare(small_config(tmp_path, data=data | {"missing": "forward"}), table)
    assert filled["a"].to_pylist()[20:23] == [table["a"][19].as_py()] * 3
    data = {"horizon": 0, "targets": ["a"], "inputs": ["b", "c"]}
    rows = slipstream.prepare(small_config(tmp_path, data=data), table)
    assert rows["a"].to_pylist()[19:24].count(None) == 3


def test_a_streamed_table_is_written_in_batches_and_equals_the_one_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.data.stream.SCAN_ROWS", 70)
    path = tmp_path / "table.parquet"
    pa.parquet.write_table(make_table(), path, row_group_size=60)
    steps = [{"step": "formula", "name": "power", "value": "a * lag(b, 1)"}]
    data = {"path": str(path), "time": "time", "id": "cell", "prepare": steps, "targets": ["c"]}
    wanted = slipstream.prepare(small_config(tmp_path, data=data))
    streamed = small_config(tmp_path, data=data, engine={"home": "stream"})
    rows = slipstream.prepare(streamed)
    assert rows["power"].num_chunks > 2
    out = tmp_path / "rows.parquet"
    empty = slipstream.prepare(streamed, out=out)
    assert (empty.num_rows, empty.column_names) == (0, rows.column_names)
    file = pa.parquet.ParquetFile(out)
    assert file.num_row_groups > 2
    for name in ("series", "time", "a", "power", "c", "split"):
        known = ~np.array(pc.is_null(rows["power"], nan_is_null=True))
        values = [v for v, use in zip(rows[name].to_pylist(), known, strict=True) if use]
        assert values == wanted[name].to_pylist(), name
        assert file.read()[name].to_pylist() == rows[name].to_pylist()


def test_columns_with_the_names_of_ours_keep_theirs(tmp_path):
    table = (
        waves(240)
        .rename_columns(["time", "split", "row", "series"])
        .append_column("y", waves(240)["b"])
    )
    data = {"targets": ["y"], "time": "time"}
    rows = slipstream.prepare(small_config(tmp_path, data=data), table)
    assert {"split_", "row_", "series_", "split", "row", "series"} <= set(rows.column_names)
    assert rows["split"].to_pylist() == pytest.approx(table["split"].to_pylist())
    assert set(rows["split_"].to_pylist()) == {"train", "val", "test"}


@pytest.mark.parametrize("ending", ["parquet", "csv", "arrow"])
def test_the_command_writes_a_file_and_says_what_is_in_it(ending, tmp_path):
    config = load_case(tmp_path, "folds")
    job = tmp_path / "job.toml"
    from slipstream import runs

    job.write_text(runs.format_config(config))
    out = tmp_path / f"rows.{ending}"
    args = ["prepare", str(job), "--out", str(out), "--set", "data.context=6", "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    wanted = slipstream.prepare(config, overrides="data.context=6")
    assert found["columns"] == wanted.column_names
    assert (found["rows"], found["series"]) == (240, 3)
    counts = pc.value_counts(wanted["split_2"].cast("string")).to_pylist()
    listed = {c["values"]: c["counts"] for c in counts}
    assert {name: n for name, n in found["splits"][1]["rows"].items() if n} == listed
    assert " to " in found["splits"][1]["fold"]
    read = {"csv": pa.csv.read_csv, "parquet": pa.parquet.read_table, "arrow": read_arrow}[ending]
    table = read(out)
    assert table["split_1"].to_pylist() == wanted["split_1"].to_pylist()
    assert table["b"].to_pylist() == pytest.approx(wanted["b"].to_pylist())
    again = CliRunner().invoke(app, args)
    assert again.exit_code == 2
    assert "exists; pass --force" in again.output
    shown = CliRunner().invoke(app, [*args[:-1], "--force"])
    assert "prepared rows: 240 rows of 3 series" in shown.output


def read_arrow(path: Path) -> pa.Table:
    return pa.ipc.open_file(path).read_all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("rows.txt", "written as .csv, .parquet or .arrow"),
        ("none/rows.csv", "there is no folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_data_are_read(out, message, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('[data]\npath = "nothing.csv"\n')
    result = CliRunner().invoke(app, ["prepare", str(job), "--out", str(tmp_path / out)])
    assert result.exit_code == 2
    assert message in result.output


def test_a_mistake_leaves_no_file(tmp_path):
    config = load_case(tmp_path, "estimate")
    out = tmp_path / "rows.csv"
    with pytest.raises(UserError, match='has no column "nothing"'):
        slipstream.prepare(config, overrides='data.inputs=["nothing"]', out=out)
    assert not out.exists()
    with pytest.raises(UserError, match="config is None"):
        slipstream.prepare(None)
