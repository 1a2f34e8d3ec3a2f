"""Series and windows with a scale of their own: the size of a series does not matter, wherever rows
are scaled."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import slipstream
from slipstream import Stream, UserError
from slipstream.data import dataset as datasets
from tests.conftest import assert_interval_scores, close, merged, small_config, waves

ROWS = 90
CASES = {
    "lstm": {},
    "quantiles": {"train": {"loss": "quantile"}, "model": {"kind": "gru", "normalize": "last"}},
    "repeats": {"train": {"repeats": 2}, "model": {"kind": "mlp"}},
    "channels": {"data": {"channels": "independent", "inputs": ["a", "b"]}},
    "estimate": {"data": {"horizon": 0, "inputs": ["b", "c"], "targets": ["a"]}},
    "carried": {"train": {"state": "carried"}},
    "minmax": {"data": {"scale": "minmax"}, "model": {"kind": "linear"}},
    "seasonal": {"data": {"scale": "seasonal", "period": 3, "context": 12}},
    "walk forward": {"data": {"split": {"walk_forward": 2}}, "model": {"kind": "mlp"}},
    "known ahead": {"data": {"future": ["c"]}},
    "filtered": {
        "data": {"horizon": 1},
        "predict": {"filter": {"kind": "moving_average", "rows": 3}},
    },
}


def make_table(sizes=(1.0, 1.0, 1.0), rows=ROWS, names="xyz"):
    """Three series; each is multiplied by its size, except for the column that is known ahead and
    the target that is no input."""
    parts = []
    for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
        part = waves(rows, seed=number).to_pandas()
        part[["a", "b"]] *= size
        part.insert(0, "id", name)
        parts.append(pa.Table.from_pandas(part, preserve_index=False))
    return pa.concat_tables(parts)


def make_config(folder, case, **sections):
    base = {
        "data": {"id": "id", "context": 8, "inputs": ["a", "b", "c"], "scale_by": "series"},
        "train": {"epochs": 1},
    }
    if "targets" not in CASES[case].get("data", {}) and "inputs" not in sections.get("data", {}):
        base["data"]["targets"] = ["a", "b"]
    return small_config(folder, **merged(merged(base, CASES[case]), sections))


def train(config, data=None):
    return slipstream.train(config, data, quiet=True)


def read_column(table, name):
    return np.array(table[name].to_pylist())


@pytest.mark.parametrize("case", [case for case in CASES if case != "estimate"])
def test_the_size_of_a_series_changes_nothing_but_the_units_of_its_predictions(tmp_path, case):
    sizes = {"x": 1.0, "y": 1e4, "z": 1e-3}
    few = train(make_config(tmp_path, case, name="few"), data=make_table())
    many = train(make_config(tmp_path, case, name="many"), data=make_table(sizes.values()))
    for data, other in (
        (make_table(), make_table(sizes.values())),
        (make_table(rows=30), make_table(sizes.values(), rows=30)),
        (make_table(names=["x", "new", "other"]), make_table((1, 1e3, 7), names=["x", "n", "o"])),
    ):
        options = {"every": case != "known ahead"}
        if case == "known ahead":
            continue
        wanted = slipstream.predict(few.run, data, **options)
        got = slipstream.predict(many.run, other, **options)
        size = np.repeat([1.0, 1.0, 1.0], 1)
        names = list(dict.fromkeys(got["series"].to_pylist()))
        known = dict(zip(names, sizes.values(), strict=True))
        if "n" in names:
            known = {"x": 1.0, "n": 1e3, "o": 7.0}
        size = np.array([known[name] for name in got["series"].to_pylist()])
        for column in got.column_names:
            if column.startswith("a_"):
                close(read_column(got, column) / size, read_column(wanted, column), rel=2e-4)
    for name in ("mase", "smape", "wape"):
        assert few.metrics["test"][name] == pytest.approx(many.metrics["test"][name], rel=1e-3)


def test_a_target_that_is_no_input_has_one_scale(tmp_path):
    run = train(make_config(tmp_path, "estimate"), data=make_table())
    table = slipstream.predict(run.run, make_table((1, 1, 1), names=["n", "o", "p"]))
    with pytest.warns(UserWarning, match="are its units the same"):
        again = slipstream.predict(run.run, make_table((1, 5, 1), names=["n", "o", "p"]))
    close(read_column(again, "a_predicted"), read_column(table, "a_predicted"), rel=2e-4)


@pytest.mark.parametrize("scale", ["standard", "seasonal"])
def test_each_series_is_scaled_by_its_training_rows_in_memory_and_streamed(tmp_path, scale):
    path = tmp_path / "table.parquet"
    pa.parquet.write_table(make_table((1.0, 100.0, 3.0)), path, row_group_size=40)
    data = {"path": str(path), "scale": scale, "period": 50 if scale == "seasonal" else None}
    config = make_config(tmp_path, "lstm", data=data)
    memory = datasets.load_dataset(config)
    series = memory.memory.series
    num_train = round(0.7 * ROWS)
    for begin in memory.index.offsets[:-1]:
        rows = series.values[begin : begin + num_train, :3].double()
        close(rows.mean(dim=0) + 1, torch.ones(3).double(), rel=1e-5)
        size = rows.std(dim=0, correction=0)
        if scale == "seasonal":
            size = (rows[50:] - rows[:-50]).abs().mean(dim=0)
        close(size, torch.ones(3).double())
    stream = {"home": "stream", "buffer_rows": 64}
    streamed = datasets.load_dataset(make_config(tmp_path, "lstm", data=data, engine=stream))
    for name in ("a", "b", "c"):
        close(
            np.array(streamed.scaler.series_shift[name]), np.array(memory.scaler.series_shift[name])
        )
        close(
            np.array(streamed.scaler.series_size[name]), np.array(memory.scaler.series_size[name])
        )
    close(streamed.naive_errors, memory.naive_errors, rel=1e-4)
    for chunk in streamed.iter_chunks("test", None, rows=50):
        rows = chunk.starts + chunk.first_row
        close(chunk.series.values[chunk.starts], series.values[rows])
        scales, wanted = (
            chunk.series.find_target_scales(chunk.starts),
            series.find_target_scales(rows),
        )
        close(scales, wanted)


def test_a_streamed_run_scores_as_one_in_memory(tmp_path):
    path = tmp_path / "table.parquet"
    pa.parquet.write_table(make_table((1.0, 100.0, 3.0)), path, row_group_size=40)
    runs = [
        train(
            make_config(
                tmp_path, "lstm", name=home, data={"path": str(path)}, engine={"home": home}
            )
        )
        for home in ("device", "stream")
    ]
    first, second = (slipstream.evaluate(run.run, quiet=True) for run in runs)
    assert first["metrics"]["mase"] > 0
    again = slipstream.evaluate(runs[0].run, quiet=True, overrides=["engine.home=stream"])
    assert again["metrics"]["mae"] == pytest.approx(first["metrics"]["mae"], rel=1e-4)
    assert second["metrics"]["mase"] > 0


def test_a_series_without_training_rows_is_scaled_by_its_first_context(tmp_path):
    split = {"by": "id", "val": ["y"], "test": ["z"]}
    config = make_config(tmp_path, "lstm", data={"split": split})
    dataset = datasets.load_dataset(config, make_table((1.0, 100.0, 3.0)))
    for begin in dataset.index.offsets[1:-1]:
        rows = dataset.memory.series.values[begin : begin + 8, :3].double()
        close(rows.std(dim=0, correction=0), torch.ones(3).double())


def test_a_constant_series_is_scaled_by_its_level(tmp_path):
    table = make_table().to_pandas()
    table.loc[table["id"] == "y", "a"] = 5.0
    table.loc[table["id"] == "z", "a"] = 0.0
    dataset = datasets.load_dataset(
        make_config(tmp_path, "lstm"), pa.Table.from_pandas(table, preserve_index=False)
    )
    assert dataset.scaler.series_size["a"][1] == 5.0
    assert dataset.scaler.series_size["a"][2] == dataset.scaler.size["a"]
    place = dataset.signature.inputs.index("a")
    assert not dataset.memory.series.values[ROWS:, place].any()


@pytest.mark.parametrize(
    "case", ["lstm", "quantiles", "repeats", "channels", "estimate", "filtered"]
)
@pytest.mark.parametrize("names", ["xyz", "new"])
def test_a_stream_predicts_as_predict_does(tmp_path, case, names):
    run = train(make_config(tmp_path, case), data=make_table((1.0, 100.0, 3.0)))
    table = make_table((2.0, 50.0, 0.1), rows=24, names=names)
    every = slipstream.predict(run.run, table, every=True)
    stream = Stream(run.run)
    got = []
    for number, row in enumerate(table.to_pylist()):
        prediction = stream.push(row)
        if prediction is not None:
            got.append(prediction.to_dict())
        if number % 5 == 0:  # a state moves to another process, also before the scale is known
            state = stream.save_state(row["id"])
            stream = Stream(run.run)
            stream.load_state(state, row["id"])
    for column in got[0]:
        flat = np.concatenate([prediction[column] for prediction in got])
        close(flat, read_column(every, column))


def test_intervals_are_scored_in_the_units_of_each_series(tmp_path):
    run = train(make_config(tmp_path, "repeats"), data=make_table((1.0, 100.0, 3.0)))
    (low, high), file = run.summary["width"].values(), run.run / "predictions.parquet"
    assert 0 < low < high
    assert_interval_scores(run.summary, file, run.baselines["ridge"]["per_target"])


def test_a_carried_state_of_a_new_series_is_refused(tmp_path):
    run = train(make_config(tmp_path, "carried"), data=make_table((1.0, 100.0, 3.0)))
    table = make_table((1.0, 100.0, 3.0), rows=20)
    every = slipstream.predict(run.run, table, every=True)
    stream, got = Stream(run.run), {}
    for row in table.to_pylist():
        got.setdefault(row["id"], []).append(stream.push(row).to_dict()["a_predicted"])
    flat = np.concatenate([np.concatenate(rows[7:]) for rows in got.values()])
    close(flat, read_column(every, "a_predicted"))
    with pytest.raises(UserError, match=r'series "new" is new.*data.scale_by.*regime="window"'):
        stream.push({"id": "new", "time": 0, "a": 1.0, "b": 2.0, "c": 3.0})


@pytest.mark.parametrize("to", ["onnx", "c", "torch"])
def test_exports_refuse_series_and_hold_windows(tmp_path, to):
    path = tmp_path / "table.parquet"
    pa.parquet.write_table(make_table((1.0, 100.0, 3.0)), path)
    data = {"path": str(path)}
    run = train(make_config(tmp_path, "lstm", name="series", data=data))
    with pytest.raises(UserError, match=r'data.scale_by = "series".*data.scale_by = "window"'):
        slipstream.export(run.run, to=to, out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    model = slipstream.load(run.run)
    with pytest.raises(UserError, match=r"data\.scale_by"):
        model(np.zeros((1, 8, 3)))
    run = train(make_config(tmp_path, "lstm", name="window", data={**data, "scale_by": "window"}))
    assert slipstream.export(run.run, to=to, out=tmp_path / "window")["parity"]["windows"] > 0


def test_windows_of_any_size_have_the_same_loss(tmp_path):
    config = make_config(tmp_path, "lstm", data={"scale_by": "window", "inputs": ["a", "b"]})
    assert config.model.normalize == "window"
    few = train(config, data=make_table())
    other = make_config(
        tmp_path, "lstm", name="many", data={"scale_by": "window", "inputs": ["a", "b"]}
    )
    many = train(other, data=make_table((1.0, 1e4, 30.0)))
    for name in ("mase", "smape", "wape"):
        assert few.metrics["test"][name] == pytest.approx(many.metrics["test"][name], rel=2e-2)


@pytest.mark.parametrize("scale_by", ["series", "window"])
def test_a_lane_trains_as_the_model_alone(tmp_path, scale_by):
    table = make_table((1.0, 100.0, 3.0))
    alone = train(
        make_config(tmp_path, "lstm", name="one", data={"scale_by": scale_by}), data=table
    )
    lanes = train(
        make_config(
            tmp_path, "lstm", name="two", data={"scale_by": scale_by}, train={"repeats": 2}
        ),
        data=table,
    )
    wanted = alone.metrics["test"]["mae"]
    assert lanes.summary["lanes"][0]["metrics"]["test"]["mae"] == pytest.approx(wanted, rel=1e-3)


def test_a_constant_context_has_a_finite_loss(tmp_path):
    table = make_table().to_pandas()
    table.loc[table["time"] % 40 < 20, ["a", "b"]] = 7.0
    config = make_config(tmp_path, "lstm", data={"scale_by": "window"})
    run = train(config, data=pa.Table.from_pandas(table, preserve_index=False))
    assert run.metrics["test"]["mae"] < 30


def test_an_encoder_is_pretrained_and_used_with_scales_of_series(tmp_path):
    table = make_table((1.0, 100.0, 3.0), rows=300)
    settings = {"data": {"id": "id", "context": 16, "scale_by": "series"}, "train": {"epochs": 1}}
    config = small_config(tmp_path, **merged(settings, {"train": {"objective": "masked"}}))
    encoder = train(config, data=table)
    tuned = small_config(tmp_path, **merged(settings, {"train": {"init_from": str(encoder.run)}}))
    run = train(tuned, data=table)
    assert run.metrics["test"]["mase"] > 0
    other = merged(settings, {"data": {"scale_by": "global"}, "train": tuned.train.model_dump()})
    other["train"] = {"epochs": 1, "init_from": str(encoder.run)}
    with pytest.raises(UserError, match=r"data\.scale_by"):
        train(small_config(tmp_path, **other), data=table)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"scale": "none"}}, r'data.scale_by = "series" has no effect'),
        (
            {"model": {"output_range": [0, 1]}},
            r"model.output_range does not work with data.scale_by",
        ),
        (
            {"data": {"scale_by": "window"}, "model": {"normalize": "last"}},
            r'model.normalize is "last"',
        ),
        (
            {"data": {"scale_by": "window"}, "train": {"state": "carried"}},
            r'train.state = "carried" does not work with data.scale_by = "window"',
        ),
        ({"data": {"scale_by": "window"}, "augment": {"jitter": 0.1}}, r"augment.jitter"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, sections, message):
    with pytest.raises(UserError, match=message):
        make_config(tmp_path, "lstm", **sections)


def test_series_of_very_different_size_are_noted(tmp_path):
    config = make_config(tmp_path, "lstm", data={"scale_by": "global"})
    run = train(config, data=make_table((1.0, 1e3, 1.0)))
    note, _ = (note for note in run.summary["notes"] if "differ in size" in note)  # of two targets
    assert 'target "a"' in note
    assert 'data.scale_by = "series"' in note


def test_relative_errors_are_averaged_over_series(tmp_path):
    data = {"period": 12, "scale_by": "global", "targets": ["a"], "horizon": 1}
    table = make_table((1.0, 100.0, 3.0))
    run = train(make_config(tmp_path, "lstm", data=data), data=table)
    predictions = pa.parquet.read_table(run.run / "predictions.parquet").to_pandas()
    truth = table.to_pandas()
    smape, wape, mase = [], [], []
    for name, rows in predictions.groupby("series"):
        error = (rows["a_predicted"] - rows["a"]).abs()
        smape.append((200 * error / (rows["a_predicted"].abs() + rows["a"].abs())).mean())
        wape.append(100 * error.sum() / rows["a"].abs().sum())
        past = truth[truth["id"] == name]["a"].to_numpy()
        naive = np.abs(past[12:] - past[:-12])[: round(0.7 * ROWS) - 12]
        mase.append(error.mean() / naive.mean())
    test = run.metrics["test"]
    assert test["smape"] == pytest.approx(np.mean(smape), rel=1e-4)
    assert test["wape"] == pytest.approx(np.mean(wape), rel=1e-4)
    assert test["mase"] == pytest.approx(np.mean(mase), rel=1e-4)
