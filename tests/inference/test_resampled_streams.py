"""A stream of raw rows predicts what `predict` does from the whole table, once per new row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import slipstream
from slipstream import Stream, UserError
from tests.conftest import small_config
from tests.inference.resampled import CASES, EVERY, make_rows, make_settings

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run of a case, trained when it is first needed."""
    trained = {}

    def get(case):
        if case not in trained:
            config = small_config(tmp_path_factory.mktemp("runs"), **make_settings(case))
            trained[case] = slipstream.train(config, make_rows(case)).run
        return trained[case]

    return get


def list_rows(table):
    names = table.column_names
    return [
        dict(zip(names, row, strict=True)) for row in zip(*table.to_pydict().values(), strict=True)
    ]


def push_all(stream, table, **options):
    """All predictions, the earlier ones of a row too, and the answers by row."""
    answers = [stream.push(row, **options) for row in list_rows(table)]
    found = [p for answer in answers if answer is not None for p in (*answer.earlier, answer)]
    return found, answers


def compare(found, wanted):
    columns = [
        n for n in wanted.column_names if n not in ("series", "row", "time", "step", "predicted")
    ]
    assert columns
    for name in columns:
        got = np.concatenate([prediction.to_dict()[name] for prediction in found])
        np.testing.assert_allclose(got, wanted[name].to_numpy(), rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", [case for case in CASES if case != "carried"])
def test_a_stream_of_raw_rows_predicts_as_predict_does(runs, case):
    run, table = runs(case), make_rows(case, 900, seed=3)
    wanted = slipstream.predict(run, table, every=True)
    stream = Stream(run, gaps="reset")
    found, answers = push_all(stream, table)
    compare(found, wanted)
    assert len(found) < 120 < len(answers)  # once per new row, not per row
    steps = len(wanted) // len(found)
    times = wanted["time"].to_pylist()[::steps]
    if not stream.signature.horizon:  # a table says when the predicted row is
        assert [prediction.time for prediction in found] == pytest.approx(times) or (
            [prediction.time for prediction in found] == times
        )


def test_a_carried_state_goes_on_over_new_rows(runs):
    run, table = runs("carried"), make_rows("carried", 900, seed=3)
    wanted = slipstream.predict(run, table, every=True)
    found, _ = push_all(Stream(run, gaps="reset"), table)
    by_time = {round(prediction.time): prediction for prediction in found}
    chosen = [by_time[round(time)] for time in wanted["time"].to_pylist()]
    compare(chosen, wanted)
    assert len(found) > len(wanted)  # from the first row on


@pytest.mark.parametrize("case", ["steps", "carried", "before", "bars"])
def test_a_saved_state_goes_on_within_a_bin(runs, case, tmp_path):
    table, stream = make_rows(case, 400, seed=5), Stream(runs(case), gaps="reset")
    push_all(stream, table.slice(0, 173))
    np.savez(tmp_path / "state.npz", **stream.save_state())
    other = Stream(runs(case), gaps="reset")
    with np.load(tmp_path / "state.npz") as state:
        other.load_state(dict(state))
    (wanted, _), (got, _) = (push_all(one, table.slice(173)) for one in (stream, other))
    assert [one.time for one in wanted] == [one.time for one in got]
    for left, right in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(left.point, right.point)


def test_a_row_at_the_end_of_a_bin_completes_it_and_a_repeated_one_corrects_it(runs):
    run = runs("mean")
    table = make_rows("mean", 200, seed=4, rough=False).to_pydict()
    time = np.round(np.arange(200) * 0.1, 6)
    stream = Stream(run)
    columns = {name: table[name] for name in "bc"}
    for i in range(101):
        answer = stream.push({"time": time[i], **{n: columns[n][i] for n in "bc"}})
        assert (answer is not None) == (i % 10 == 0 and i >= 70)
    assert answer.time == 10.0
    again = stream.push({"time": 10.0, "b": 25.0, "c": 33.0})
    assert again.time == 10.0
    assert again.value != answer.value
    rows = {"time": [*time[:101], 10.0]} | {
        name: [*columns[name][:101], extra] for name, extra in (("b", 25.0), ("c", 33.0))
    }
    wanted = slipstream.predict(run, rows, every=True)["a_predicted"].to_pylist()
    assert again.value == pytest.approx(wanted[-1], rel=1e-6)


def test_a_refused_row_changes_nothing(runs):
    stream = Stream(runs("mean"))
    rows = list_rows(make_rows("mean", 200, seed=4, rough=False))
    for row in rows[:150]:
        stream.push(row)
    before = stream.save_state()
    late = rows[149]["time"]
    for row, message in [
        ({"time": late - 5, "b": 1.0, "c": 1.0}, "earlier than"),
        ({"time": late + 50, "b": 1.0, "c": 1.0}, "after the one before it"),
        ({"time": late + 0.9, "b": 1.0}, 'no column "c"'),
        ([20.0, 30.0], "needs the time of each row"),
    ]:
        with pytest.raises(UserError, match=message):
            stream.push(row)
    after = stream.save_state()
    assert before.keys() == after.keys()
    assert all(
        np.array_equal(before[name], after[name], equal_nan=True)
        for name in before
        if before[name].dtype.kind == "f"
    )
    late = rows[149]["time"] + 0.1
    missing = [{"time": late + 0.1 * k, "b": None, "c": 30.0} for k in range(60)]

    def push() -> None:
        for row in missing:  # the last known value is held for three seconds
            stream.push(row)

    with pytest.raises(UserError, match='no value in the column "b"'):
        push()


@pytest.mark.parametrize("policy", ["first", "last", "mean"])
@pytest.mark.parametrize("resamples", [False, True], ids=["rows", "resampled"])
def test_repeated_times_of_a_stream_are_merged(policy, resamples, tmp_path):
    settings = make_settings("mean")
    settings["data"] |= {"duplicates": policy, "prepare": [EVERY] if resamples else []}
    draw = np.random.default_rng(0)
    time = np.repeat(np.arange(300) * (0.2 if resamples else 1.0), draw.choice([1, 1, 2, 3], 300))
    num = len(time)
    table = pa.table(
        {"time": np.round(time, 6)}
        | {name: 10 * (i + 1) + draw.standard_normal(num) for i, name in enumerate("abc")}
    )
    run = slipstream.train(small_config(tmp_path, **settings), table).run
    wanted = slipstream.predict(run, table, every=True)
    stream = Stream(run)
    found = {}
    for number, row in enumerate(list_rows(table)):
        if number % 100 == 50:  # a state that was saved between rows of one time goes on, too
            state, stream = stream.save_state(), Stream(run)
            stream.load_state(state)
        answer = stream.push(row)
        for prediction in () if answer is None else (*answer.earlier, answer):
            found[round(prediction.time, 6)] = prediction.value  # the last one counts
    assert list(found) == pytest.approx(wanted["time"].to_pylist())
    assert list(found.values()) == pytest.approx(wanted["a_predicted"].to_pylist(), rel=1e-5)
