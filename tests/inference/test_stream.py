"""Streams: the numbers of `predict`, row after row, and errors that change nothing."""

from __future__ import annotations

import datetime
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest

import slipstream
from slipstream import Stream, UserError
from tests.conftest import merged, slow, small_config, waves
from tests.labelled import CLASSIFY, states

QUICK = {"train": {"epochs": 1, "lr": 0.02}, "data": {"targets": ["a"], "context": 8}}
ESTIMATE = {"data": {"horizon": 0, "inputs": ["b", "c"]}}
PREPARE = [
    {"step": "unit", "columns": ["b"], "factor": 2.0, "offset": 1.0, "unit": "mV"},
    {"step": "filter", "kind": "ema", "columns": ["b"], "rows": 4, "into": "slow"},
    {"step": "filter", "kind": "butterworth", "columns": ["c"], "cutoff_hz": 0.05, "into": "low"},
    {"step": "filter", "kind": "savgol", "columns": ["c"], "rows": 5},
    {"step": "filter", "kind": "moving_average", "columns": ["b"], "rows": 6, "into": "mean"},
    {"step": "formula", "name": "change", "value": "b - lag(b, 2)"},
    {"step": "clip", "columns": ["change"], "low": -2.0, "high": 2.0},
    {"step": "outliers", "columns": ["c"], "z": 3.0},
    {"step": "filter", "kind": "median", "columns": ["change"], "rows": 3, "into": "steady"},
]
MADE = ["b", "slow", "mean", "low", "c", "change", "steady"]
TIMES = datetime.datetime(2026, 1, 1)
CASES = {
    "forecast": {},
    "estimate": merged(ESTIMATE, {"model": {"kind": "gru", "layer_norm": True}}),
    "quantiles": {
        "train": {"loss": "quantile", "quantiles": [0.1, 0.5, 0.9]},
        "model": {"kind": "transformer", "normalize": "last", "patch": 2, "output_range": [8, 12]},
    },
    "channels": {"data": {"channels": "independent", "targets": ["a", "b"], "inputs": ["a", "b"]}},
    "repeats": {"model": {"kind": "mlp"}, "train": {"repeats": 2}},
    "steps": {"data": {"horizon": 0, "inputs": MADE, "prepare": PREPARE}},
    "padded": merged(ESTIMATE, {"data": {"prepare": [{"step": "pad"}]}}),
    "forward": merged(ESTIMATE, {"data": {"missing": "forward"}}),
    "drop": merged(ESTIMATE, {"data": {"missing": "drop"}}),
    "filtered": merged(ESTIMATE, {"predict": {"filter": {"kind": "savgol", "rows": 5}}}),
    "averaged": merged(ESTIMATE, {"predict": {"filter": {"kind": "moving_average", "rows": 3}}}),
    "series": merged(ESTIMATE, {"data": {"id": "cell", "static": ["size"]}}),
    "dated": {
        "data": {
            "future": ["hour_sin", "hour_cos"],
            "inputs": ["hour_sin", "hour_cos", "b", "a"],
            "prepare": [{"step": "calendar", "features": ["hour"]}],
        },
    },
    "known ahead": {"data": {"future": ["c"]}},
    "classes": merged(CLASSIFY, {"model": {"kind": "tcn"}}),
}


def make_table(case, rows=60, seed=0):
    """A table for a case: with missing values, series or dates where it has them."""
    if case == "classes":
        return states(rows * 2, seed=seed)
    table = waves(rows, seed=seed).to_pandas()
    if case in ("forward", "drop"):
        table.loc[[3, 20, 21, 40], ["b"]] = np.nan
    if case == "dated":
        table["time"] = [TIMES + datetime.timedelta(hours=i) for i in range(rows)]
    if case == "series":
        table["cell"] = ["x"] * (rows // 2) + ["y"] * (rows - rows // 2)
        table["size"] = [1.0] * (rows // 2) + [2.0] * (rows - rows // 2)
    return pa.Table.from_pandas(table, preserve_index=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run of a case, trained when it is first needed."""
    trained = {}

    def get(case):
        if case not in trained:
            sections = CASES[case] if case == "classes" else merged(QUICK, CASES[case])
            config = small_config(tmp_path_factory.mktemp("runs"), **sections)
            trained[case] = slipstream.train(config, make_table(case, 300)).run
        return trained[case]

    return get


def push_all(stream, table, **options):
    """Predictions by row."""
    names = table.column_names
    rows = [
        dict(zip(names, row, strict=True)) for row in zip(*table.to_pydict().values(), strict=True)
    ]
    return [stream.push(row, **options) for row in rows]


def list_values(predictions, columns):
    """All predictions, one row per predicted row."""
    every = [one.to_dict() for one in predictions if one is not None]
    return np.array([np.concatenate([one[name] for one in every]) for name in columns])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [case for case in CASES if case != "known ahead"])
def test_a_window_predicts_as_predict_does(runs, case):
    run, table = runs(case), make_table(case, seed=3)
    wanted = slipstream.predict(run, table, every=True).to_pandas()
    got = push_all(Stream(run), table)
    columns = [
        name for name in wanted if name not in ("series", "row", "time", "step", "predicted")
    ]
    assert columns
    np.testing.assert_allclose(
        list_values(got, columns), wanted[columns].to_numpy().T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:left out windows")
def test_columns_that_are_known_ahead_are_passed(runs):
    run, table = runs("known ahead"), make_table("known ahead", seed=3)
    wanted = slipstream.predict(run, table, every=True).to_pandas()["a_predicted"]
    stream, columns = Stream(run), table.to_pydict()
    got = []
    for i in range(table.num_rows - 4):
        row = {name: values[i] for name, values in columns.items()}
        got.append(stream.push(row, future={"c": columns["c"][i + 1 : i + 5]}))
    np.testing.assert_allclose(list_values(got, ["a_predicted"])[0], wanted, rtol=1e-5)
    with pytest.raises(UserError, match=r"reads c \(data.future\) over the next 4 rows"):
        stream.push({"time": 56, "a": 1.0, "b": 1.0, "c": 1.0})


def test_a_carried_state_predicts_as_a_window_of_all_rows_so_far(runs):
    from slipstream.data.predictions import to_physical
    from slipstream.inference.networks import predict_windows
    from slipstream.inference.portable import load_portable
    from slipstream.inference.rows import PhysicalWindows

    portable = load_portable(runs("estimate"))
    model = portable.first
    stream = Stream(portable, regime="carried")
    rows = np.stack([waves(20, seed=5)[name].to_numpy() for name in ("b", "c")], axis=1)
    for count, row in enumerate(rows, start=1):
        got = stream.push(row)
        windows = PhysicalWindows(rows[None, :count], None, None)
        scaled = predict_windows([model], windows)
        wanted = to_physical(scaled, model.signature, model.scaler).point[0]
        np.testing.assert_allclose(got.point, wanted, rtol=1e-5)
        assert got.rows == count


def test_a_gap_starts_the_context_anew_as_in_predict(runs):
    run = runs("estimate")
    table = pa.concat_tables([waves(60, seed=3).slice(0, 20), waves(60, seed=3).slice(30)])
    wanted = slipstream.predict(run, table).to_pandas()["a_predicted"]
    got = push_all(Stream(run, gaps="reset"), table)
    np.testing.assert_allclose(list_values(got, ["a_predicted"])[0], wanted, rtol=1e-5)


def test_an_ensemble_mixes_its_members(runs, tmp_path):
    members = [runs("forecast"), runs("repeats")]
    joined = slipstream.ensemble(members, make_table("forecast", 300), out=tmp_path).run
    table = make_table("forecast", seed=3)
    wanted = slipstream.predict(joined, table, every=True).to_pandas()
    got = push_all(Stream(joined), table)
    columns = ["a_predicted", "a_lo80", "a_hi95"]
    np.testing.assert_allclose(list_values(got, columns), wanted[columns].T, rtol=1e-5)


BAD_ROWS = {
    "another column": ({"time": 20, "b": 1.0, "C": 1.0}, 'no column "c".*did you mean "C"'),
    "text": ({"time": 20, "b": "high", "c": 1.0}, "'high' in the column \"b\""),
    "a missing value": ({"time": 20, "b": None, "c": 1.0}, 'no value in the column "b"'),
    "NaN": ({"time": 20, "b": float("nan"), "c": 1.0}, 'no value in the column "b"'),
    "infinity": ({"time": 20, "b": float("inf"), "c": 1.0}, "infinite"),
    "an earlier row": ({"time": 18, "b": 1.0, "c": 1.0}, "earlier than the row before"),
    "the same time": ({"time": 19, "b": 1.0, "c": 1.0}, "the same time"),
    "a gap": ({"time": 25, "b": 1.0, "c": 1.0}, "6 after the one before it"),
    "a date": ({"time": TIMES, "b": 1.0, "c": 1.0}, "numbers in some rows and dates in others"),
    "no time": ({"b": 1.0, "c": 1.0}, 'no column "time"'),
    "too few numbers": ([1.0], "1 values of the 2 columns: b, c"),
    "no row": (None, "a row is a mapping"),
}


@pytest.mark.parametrize("regime", ["window", "carried"])
@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_bad_row_is_refused_and_changes_nothing(runs, what, regime):
    row, message = BAD_ROWS[what]
    stream, alone = (Stream(runs("estimate"), regime=regime) for _ in range(2))
    table = waves(20, seed=1)
    push_all(stream, table)
    push_all(alone, table)
    before = stream.save_state()
    with pytest.raises(UserError, match=message):
        stream.push(row)
    after = stream.save_state()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    good = {"time": 20, "b": 20.0, "c": 30.0}
    assert stream.push(good).value == alone.push(good).value


def test_a_bad_first_row_leaves_no_series(runs):
    stream = Stream(runs("series"))
    with pytest.raises(UserError, match="size"):
        stream.push([20.0, 30.0], id="z", time=0)
    assert stream.ids == ()
    stream.push([20.0, 30.0], id="z", time=0, static={"size": 1.0})
    with pytest.raises(UserError, match='"size" is 2 in this row'):
        stream.push([20.0, 30.0], id="z", time=1, static=[2.0])
    stream.push([20.0, 30.0], id="z", time=1)


@pytest.mark.parametrize("regime", ["window", slow("carried")])
def test_interleaved_streams_give_what_each_gives_alone(runs, regime):
    count, length = 1000, 9
    numbers = 20 + np.random.default_rng(0).standard_normal((count, length, 2))
    together = Stream(runs("estimate"), regime=regime)
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(count), length))
    places, got = [0] * count, [[] for _ in range(count)]
    for series in order:
        got[series].append(together.push(numbers[series, places[series]], id=int(series)))
        places[series] += 1
    alone = Stream(together.run, regime=regime)
    for series in range(count):
        alone.reset()
        for row, prediction in zip(numbers[series], got[series], strict=True):
            wanted = alone.push(row)
            assert (wanted is None) == (prediction is None)
            assert wanted is None or np.array_equal(wanted.point, prediction.point)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["estimate", "steps", "filtered", "series", "repeats"])
def test_a_saved_state_goes_on_where_it_was(runs, case, tmp_path):
    regime = "carried" if case == "estimate" else "window"
    table, stream = make_table(case, seed=2), Stream(runs(case), regime=regime)
    push_all(stream, table.slice(0, 40))
    other, name = Stream(runs(case), regime=regime), stream.ids[-1]
    np.savez(tmp_path / "state.npz", **stream.save_state(name or None))
    with np.load(tmp_path / "state.npz") as state:
        other.load_state(dict(state), name or None)
    rest = [push_all(one, table.slice(40)) for one in (stream, other)]
    for wanted, got in zip(*rest, strict=True):
        np.testing.assert_array_equal(wanted.point, got.point)


def test_the_state_of_another_model_is_refused(runs):
    stream, other = Stream(runs("estimate")), Stream(runs("forecast"))
    push_all(stream, waves(3))
    with pytest.raises(UserError, match="not one of this stream"):
        other.load_state(stream.save_state())
    with pytest.raises(UserError, match="not one of this stream"):
        other.load_state({})


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            {"step": "resample", "every": 2, "method": "nearest", "lookahead": True},
            "step 1 .resample. cannot be streamed",
        ),
        ({"step": "formula", "name": "d", "value": "ema(b, 3)"}, "looks back over all rows"),
        (
            {"step": "formula", "name": "d", "value": "lag(b, -1)", "lookahead": True},
            "1 rows ahead",
        ),
    ],
)
def test_steps_that_cannot_be_streamed_are_refused_by_name(step, message):
    from slipstream.config import Data
    from slipstream.data.prepare.rows import RowSteps

    data = Data(time="time", prepare=[step])
    with pytest.raises(UserError, match=message):
        RowSteps(data, ["b", "d"], {}, 1.0)


def test_a_model_without_a_state_cannot_carry_one(runs):
    with pytest.raises(UserError, match="reads a window as a whole"):
        Stream(runs("quantiles"), regime="carried")


def test_a_stream_imports_neither_torch_nor_scipy(runs):
    code = (
        "import sys, slipstream; stream = slipstream.Stream(sys.argv[1]);"
        "[stream.push([20.0, 30.0 + i]) for i in range(9)]; assert 'torch' not in sys.modules; "
        "assert 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(runs("estimate"))], check=True)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.datetimes(),
    st.lists(st.floats(), max_size=3),
    st.dictionaries(st.text(max_size=2), st.floats(), max_size=2),
)


@pytest.mark.slow
@hypothesis.settings(max_examples=150)
@hypothesis.given(
    st.one_of(
        JUNK, st.dictionaries(st.sampled_from(["time", "b", "c", "d"]), JUNK), st.lists(JUNK)
    ),
    st.one_of(st.none(), JUNK),
)
def test_junk_is_refused_by_a_user_error_and_changes_nothing(stream_of_ten, row, time):
    stream, state = stream_of_ten
    stream.load_state(state)
    before = stream.save_state()
    try:
        stream.push(row, time=time)
    except UserError:
        after = stream.save_state()
        assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def stream_of_ten(runs):
    stream = Stream(runs("estimate"), regime="carried", gaps="reset")
    push_all(stream, waves(10))
    return stream, stream.save_state()


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 1, 31, 12, 30),
        np.datetime64("2026-01-31T12:30"),
        "2026-01-31 12:30",
        "2026-01-31T12:30:00",
        datetime.datetime(
            2026, 1, 31, 13, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=1))
        ),
    ],
)
def test_times_of_every_type_are_the_same(value):
    from slipstream.inference.stream import parse_time

    wanted = np.datetime64("2026-01-31T12:30", "us").astype(np.int64)
    assert parse_time(value, None) == (int(wanted), True)


def test_a_time_of_several_columns_is_joined_as_in_a_file():
    from slipstream.config import Data
    from slipstream.inference.stream import RowParser, parse_time

    parser = RowParser(Data(time=["day", "clock"]), ["b"], [])
    row = {"day": "2026-01-31", "clock": "12:30:00", "b": 1.0}
    parsed = parser.parse(row, time=None, series=None, static=None)
    assert parsed.time == parse_time("2026-01-31 12:30:00", None)
