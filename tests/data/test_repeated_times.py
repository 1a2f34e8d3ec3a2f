"""Rows of a series with the same time: refused, or merged (`data.duplicates`)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

import slipstream
from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.data import dataset as datasets
from tests.conftest import waves

POLICIES = ("first", "last", "mean")
KEEP = {"first": "first", "last": "last"}


def repeat_times(num_rows=200, seed=0, ids=False):
    """Waves of which some times occur two to four times, at borders too, with other values."""
    draw = np.random.default_rng(seed)
    frame = waves(num_rows, seed=seed).to_pandas()
    frame["time"] = np.arange(num_rows, dtype=float)
    if ids:
        frame["id"] = np.repeat(["x", "y"], num_rows // 2)
    counts = np.ones(num_rows, dtype=int)
    counts[[0, 7, 50, 99, 100, 150, num_rows - 1]] = [2, 3, 4, 2, 2, 2, 3]
    frame = frame.loc[np.repeat(np.arange(num_rows), counts)].reset_index(drop=True)
    numbers = [name for name in frame.columns if name not in ("time", "id")]
    frame[numbers] += 0.1 * draw.standard_normal((len(frame), len(numbers)))
    return frame


def merge(frame, policy, keys=("time",)):
    """The same by pandas."""
    keys = list(keys)
    if policy in KEEP:
        return frame.drop_duplicates(keys, keep=KEEP[policy]).reset_index(drop=True)
    numbers = frame.select_dtypes("number").columns.difference(keys)
    first = frame.drop_duplicates(keys).reset_index(drop=True)
    means = frame.groupby(keys, sort=False)[list(numbers)].mean().reset_index(drop=True)
    return first.assign(**{name: means[name] for name in numbers})


def load(frame, tmp_path=None, engine=None, **data):
    settings = {"time": "time", "context": 8, "horizon": 2} | data
    if tmp_path is None:
        return datasets.load_dataset(configs.load({"data": settings}), frame)
    path = tmp_path / "table.parquet"
    pa.parquet.write_table(pa.Table.from_pandas(frame, preserve_index=False), path)
    config = {"data": settings | {"path": str(path)}, "engine": engine or {}}
    return datasets.load_dataset(configs.load(config))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ids", [False, True], ids=["one series", "ids"])
def test_merged_rows_are_those_of_pandas(policy, ids):
    frame = repeat_times(ids=ids)
    chosen = {"id": "id"} if ids else {}
    keys = ("id", "time") if ids else ("time",)
    merged, plain = (
        load(frame, duplicates=policy, **chosen),
        load(merge(frame, policy, keys), **chosen),
    )
    assert merged.index.offsets.tolist() == plain.index.offsets.tolist()
    assert merged.index.breaks.tolist() == plain.index.breaks.tolist()
    np.testing.assert_allclose(merged.memory.series.values, plain.memory.series.values, rtol=1e-6)
    assert merged.num_windows == plain.num_windows
    (note,) = (note for note in merged.notes if "merged" in note)
    assert note.startswith(
        f'merged 11 rows with the time of another row (data.duplicates = "{policy}"'
    )
    assert not any("merged" in note for note in plain.notes)


@pytest.mark.parametrize("policy", POLICIES)
def test_repeated_times_are_merged_after_sorting(policy):
    frame = repeat_times()
    shuffled = frame.sample(frac=1, random_state=3, ignore_index=True)
    expected = merge(shuffled.sort_values("time", kind="stable"), policy)
    merged = load(shuffled, duplicates=policy, unsorted="sort")
    plain = load(expected.reset_index(drop=True))
    np.testing.assert_allclose(merged.memory.series.values, plain.memory.series.values, rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("missing", ["forward", "drop"])
def test_missing_values_are_looked_for_after_merging(policy, missing):
    frame = repeat_times()
    name = frame.columns[1]
    at_seven = np.flatnonzero(frame["time"] == 7)
    frame.loc[at_seven[0], name] = np.nan
    frame.loc[[20, 21], name] = np.nan
    merged = load(frame, duplicates=policy, missing=missing)
    plain = load(merge(frame, policy), missing=missing)
    assert merged.index.num_missing == plain.index.num_missing
    assert merged.index.breaks.tolist() == plain.index.breaks.tolist()
    np.testing.assert_allclose(merged.memory.series.values, plain.memory.series.values, rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [[], [{"step": "formula", "name": "d", "value": "diff(b, 2)"}]])
def test_a_table_on_disk_is_merged_as_one_in_memory(policy, steps, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.data.series.SCAN_ROWS", 50)  # a group lies across parts
    frame = repeat_times(ids=True)
    clean = merge(frame, policy, ("id", "time"))
    settings = {"id": "id", "prepare": steps, "engine": {"home": "stream"}}
    for folder in ("merged", "clean"):
        (tmp_path / folder).mkdir()
    merged = load(frame, tmp_path / "merged", duplicates=policy, **settings)
    plain = load(clean, tmp_path / "clean", **settings)
    assert merged.stream is not None
    assert merged.num_windows == plain.num_windows
    assert merged.index.breaks.tolist() == plain.index.breaks.tolist()
    whole = load(frame, duplicates=policy, id="id", prepare=steps)
    assert [n for n in merged.notes if "merged" in n] == [n for n in whole.notes if "merged" in n]
    for name in ("train", "val", "test"):
        parts = [
            [
                chunk.series.values[start : start + 10].numpy()
                for chunk in dataset.iter_chunks(name, None, rows=16)
                for start in chunk.starts.tolist()
            ]
            for dataset in (merged, plain)
        ]
        np.testing.assert_allclose(np.stack(parts[0]), np.stack(parts[1]), rtol=1e-5, atol=1e-6)


def test_labels_are_those_of_the_first_row():
    frame = repeat_times()
    frame["state"] = np.where(np.arange(len(frame)) % 3, "on", "off")
    chosen = {"task": "classify", "targets": ["state"], "horizon": 0}
    merged = load(frame, duplicates="mean", **chosen)
    plain = load(merge(frame, "mean"), **chosen)
    np.testing.assert_array_equal(merged.memory.series.targets, plain.memory.series.targets)
    numbers = merge(frame.assign(state=(frame["state"] == "on") * 7), "first")["state"]
    numbered = load(frame.assign(state=(frame["state"] == "on") * 7), duplicates="mean", **chosen)
    assert numbered.signature.classes == ("0", "7")
    np.testing.assert_array_equal(numbered.memory.series.targets[:, 0] * 7, numbers)


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_work_on_merged_rows(policy):
    frame = repeat_times()
    frame["note"] = [f"n{i}" for i in range(len(frame))]
    steps = [
        {"step": "formula", "name": "d", "value": "lag(b, 1)"},
        {"step": "filter", "kind": "ema", "rows": 4, "columns": ["c"]},
    ]
    merged = load(frame, duplicates=policy, prepare=steps)
    plain = load(merge(frame, policy), prepare=steps)
    assert merged.signature == plain.signature
    np.testing.assert_allclose(merged.memory.series.values, plain.memory.series.values, rtol=1e-6)
    assert any("merged 11 rows" in note for note in merged.notes)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_joined_table_is_merged_by_the_same_setting(policy, tmp_path):
    side = pd.DataFrame({"time": [0.0, 4.0, 4.0, 4.0, 50.0], "w": [1.0, 2.0, 4.0, 9.0, 3.0]})
    side.to_csv(tmp_path / "side.csv", index=False)
    join = {"step": "join", "path": str(tmp_path / "side.csv"), "label": "end"}
    frame = merge(repeat_times(), "first")
    with pytest.raises(UserError, match=r"side.csv, line 4.*2 rows.*data.duplicates = \"mean\""):
        load(frame, prepare=[join])
    merge(side, policy).to_csv(tmp_path / "clean.csv", index=False)
    clean = join | {"path": str(tmp_path / "clean.csv")}
    merged, plain = load(frame, prepare=[join], duplicates=policy), load(frame, prepare=[clean])
    np.testing.assert_array_equal(merged.memory.series.values, plain.memory.series.values)


def test_the_error_names_the_setting_its_values_the_rows_and_an_example(tmp_path):
    frame = repeat_times()
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = {"path": str(tmp_path / "t.csv"), "time": "time", "context": 8, "horizon": 2}
    with pytest.raises(UserError) as caught:
        datasets.load_dataset(configs.load({"data": data}))
    text = str(caught.value)
    assert 't.csv, line 3, column "time": the same time as t.csv, line 2' in text
    assert "11 rows" in text
    for value in ('data.duplicates = "mean"', '"first"', '"last"', "data.id"):
        assert value in text
    with pytest.raises(UserError, match=r'same time .*data.duplicates = "mean"'):
        load(frame, tmp_path, engine={"home": "stream"})


def test_rows_of_a_bin_may_share_times_without_a_setting():
    frame = repeat_times(400)
    resample = {"step": "resample", "every": 4}
    whole = load(frame, prepare=[resample])
    bins = np.ceil(frame["time"] / 4).astype(int)
    first = int(bins.iloc[0])
    expected = frame.groupby(bins)["b"].mean()
    scaler, values = whole.scaler, whole.memory.series.values.numpy()
    column = list(whole.signature.inputs).index("b")
    physical = values[:, column] * scaler.size["b"] + scaler.shift["b"]
    last = int(frame["time"].iloc[-1] // 4)
    np.testing.assert_allclose(physical, expected.loc[first:last], rtol=1e-5)
    with pytest.raises(UserError, match=r"data\.duplicates"):
        load(frame, prepare=[{"step": "clip", "columns": ["b"], "high": 9.0}, resample])
    with pytest.raises(UserError, match="earlier"):
        load(frame.iloc[::-1].reset_index(drop=True), prepare=[resample])


@pytest.mark.filterwarnings("ignore:merged")
def test_predict_and_evaluate_merge_and_say_so(tmp_path):
    frame = repeat_times()
    settings = {"time": "time", "context": 8, "horizon": 2, "duplicates": "mean"}
    config = {"data": settings, "model": {"kind": "linear"}, "train": {"epochs": 1}}
    result = slipstream.train(config | {"out": str(tmp_path / "runs")}, frame)
    assert any("merged 11 rows" in note for note in result.summary["notes"])
    clean = merge(frame, "mean")
    with pytest.warns(UserWarning, match="merged 11 rows"):
        got = slipstream.predict(result.run, frame)
    expected = slipstream.predict(result.run, clean)
    assert got["time"].to_pylist() == expected["time"].to_pylist()
    for name in expected.column_names:
        if name.startswith("b"):
            np.testing.assert_allclose(got[name].to_numpy(), expected[name].to_numpy(), rtol=1e-5)
    scored = slipstream.evaluate(result.run, frame)
    assert any("merged 11 rows" in note for note in scored["notes"])


def test_an_estimator_returns_an_estimate_for_every_row():
    frame = repeat_times()
    settings = {"context": 8, "horizon": 0, "time": "time", "kind": "linear", "epochs": 1}
    model = slipstream.Forecaster(**settings, duplicates="last", targets="b")
    X, y = frame.drop(columns="b"), frame["b"]
    model.fit(X, y)
    estimates = np.asarray(model.predict(X))
    assert len(estimates) == len(frame)
    assert not np.isnan(estimates).any()
    for rows in frame.groupby("time").groups.values():
        assert len(np.unique(estimates[rows])) == 1
