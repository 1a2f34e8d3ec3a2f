"""C code that resamples raw rows predicts what `predict` and a stream do."""

from __future__ import annotations

import re

import numpy as np
import pyarrow.csv
import pytest

import slipstream
from slipstream import Stream, UserError
from slipstream.exporting.c.files import CLibrary, build_library
from tests.conftest import merged, slow, small_config
from tests.exporting.c.programs import needs_compiler
from tests.inference.resampled import make_rows, make_settings

pytestmark = [pytest.mark.filterwarnings("ignore"), needs_compiler]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    trained = {}

    def train_case(case, *, joined=False, **data):
        key = (case, joined, str(data))
        if key not in trained:
            folder = tmp_path_factory.mktemp("runs")
            pyarrow.csv.write_csv(make_rows(case), folder / "raw.csv")
            settings = make_settings(case)
            settings["data"] |= {"path": str(folder / "raw.csv"), **data}
            run = slipstream.train(small_config(folder, **settings)).run
            if joined:
                other = merged(settings, {"model": {"kind": "mlp"}, "data": {"context": 5}})
                members = [run, slipstream.train(small_config(folder, **other)).run]
                run = slipstream.ensemble(members, out=folder / "joined", quiet=True).run
            trained[key] = run
        return trained[key]

    return train_case


def export(run, folder, **options):
    result = slipstream.export(run, to="c", out=folder, **options)
    header = (folder / "slip.h").read_text()
    signature = Stream(run).signature
    targets = 1 if signature.classes else len(signature.targets)
    outputs = signature.steps_out * targets * signature.outputs
    kind = re.search(r"typedef (\w+) slip_value", header)[1]
    path = build_library(sorted(folder.glob("slip*.c")), folder / "slip.so")
    return result, CLibrary(path, "slip", kind, num_outputs=outputs), header


def step(library, table, stream):
    """What C predicts, by the row that completed it, and what the stream does."""
    columns = np.stack([table[name].to_numpy() for name in stream.columns], axis=1)
    times = table["time"].to_numpy()
    if times.dtype.kind == "M":
        times = times.astype("datetime64[us]").astype(np.int64)
    library.reset()
    out, complete = library.step(columns, times=times)
    wanted = []
    for row in table.to_pylist():
        answer = stream.push({**row, "cell": ""})
        wanted.append(answer)
    return out, complete, wanted


def get_values(answer):
    candidates = (answer.probabilities, answer.quantiles, answer.point)
    return next(values for values in candidates if values is not None).ravel()


CASES = [
    "mean",
    "steps",
    "last",
    "forecast",
    "quantiles",
    "padded",
    "forward",
    "classes",
    "filtered",
]


@pytest.mark.parametrize(
    ("case", "joined"),
    [
        *((case, False) for case in CASES),
        ("steps", True),
        *(slow(case, True) for case in CASES if case != "steps"),
    ],
)
def test_raw_rows_give_the_predictions_of_a_stream_and_of_predict(case, joined, train, tmp_path):
    run, table = train(case, joined=joined), make_rows(case, 1200, seed=3)
    result, library, header = export(run, tmp_path / "out", state="windows")
    assert "ok" in result["selftest"]
    assert "(resample)" in header
    out, complete, wanted = step(library, table, Stream(run, gaps="reset"))
    answered = [answer is not None for answer in wanted]
    np.testing.assert_array_equal(complete.astype(bool), answered)
    expected = np.stack([get_values(answer) for answer in wanted if answer is not None])
    np.testing.assert_allclose(out[complete > 0], expected, rtol=1e-5, atol=1e-5)
    assert 60 < sum(answered) < 130
    whole = slipstream.predict(run, table, every=True)
    count = sum(1 + len(answer.earlier) for answer in wanted if answer is not None)
    # windows of an ensemble are those that all members have, also members without weight
    assert joined or len(whole) == count * max(Stream(run).signature.horizon, 1)
    if case in ("mean", "steps", "last", "forward", "padded"):
        by_time = dict(
            zip(whole["time"].to_pylist(), whole["a_predicted"].to_pylist(), strict=True)
        )
        times = [answer.time for answer in wanted if answer is not None]
        pairs = [
            (value, by_time[t])
            for value, t in zip(out[complete > 0, 0], times, strict=True)
            if t in by_time
        ]
        np.testing.assert_allclose(*np.transpose(pairs), rtol=1e-5)
        assert joined or len(pairs) == len(times)


def test_dates_are_microseconds(train, tmp_path):
    run = train(
        "dated", future=[], inputs=["b", "a"], prepare=[{"step": "resample", "every": "1s"}]
    )
    table = make_rows("dated", 1200, seed=3)
    _, library, header = export(run, tmp_path / "out", state="windows")
    assert "typedef int64_t slip_time; /* microseconds" in header
    out, complete, wanted = step(library, table, Stream(run, gaps="reset"))
    expected = np.stack([get_values(answer) for answer in wanted if answer is not None])
    np.testing.assert_allclose(out[complete > 0], expected, rtol=1e-5, atol=1e-5)


def test_rows_that_repeat_the_time_of_a_complete_row_are_ignored_with_a_note(tmp_path):
    table = make_rows("mean", rough=False).to_pandas()
    table["time"] = np.round(np.arange(len(table)) * 0.1, 6)
    repeated = table.loc[np.sort(np.r_[np.arange(len(table)), [205, 500, 500]])]
    repeated = repeated.assign(b=repeated["b"] + 0.5 * repeated["time"].duplicated())
    repeated.to_csv(tmp_path / "raw.csv", index=False)
    settings = make_settings("mean")
    settings["data"] |= {"path": str(tmp_path / "raw.csv")}
    run = slipstream.train(small_config(tmp_path / "runs", **settings)).run
    result, library, header = export(run, tmp_path / "out", state="windows")
    assert any("ignores 2 rows of the data that repeat the time" in n for n in result["notes"])
    assert result["prepare"]["late_rows"] == 2
    once = repeated[~(repeated["time"].duplicated() & (repeated["time"] == 50))]
    out, complete = library.step(repeated[["b", "c"]].to_numpy(), times=repeated["time"].to_numpy())
    wanted = slipstream.predict(run, once, every=True)["a_predicted"].to_numpy()
    np.testing.assert_allclose(out[complete > 0, 0], wanted, rtol=1e-5)
    assert "comes too late" in " ".join(header.replace("*", "").split())


def test_a_carried_state_is_carried_over_new_rows(train, tmp_path):
    run, table = train("carried"), make_rows("carried", 1200, seed=3)
    result, library, _ = export(run, tmp_path / "out")
    assert "ok" in result["selftest"]
    out, complete, wanted = step(library, table, Stream(run, gaps="reset"))
    expected = np.stack([get_values(answer) for answer in wanted if answer is not None])
    rows = [number for number, answer in enumerate(wanted) if answer is not None]
    np.testing.assert_allclose(out[rows], expected, rtol=1e-5, atol=1e-5)
    assert complete[rows][:7].tolist() == [0] * 7  # from fewer rows than the context
    assert complete[rows][7:20].all()


def test_resampling_alone_can_be_left_to_the_caller(train, tmp_path):
    run, table = train("steps"), make_rows("steps", 1200, seed=3, rough=False)
    result, library, header = export(
        run, tmp_path / "out", state="windows", after_prepare="resample"
    )
    assert result["before"] == ["data.prepare, step 1 (resample)"]
    assert "NOT inside, to be done to the rows before: data.prepare, step 1 (resample)." in header
    assert "Inside slip_step, in double: data.prepare, step 2 (filter)" in header
    assert "slip_time" not in header
    frame = table.to_pandas()
    bins = np.ceil(frame["time"] - 1e-9).astype(int)
    means = frame.groupby(bins)[["b", "c"]].mean().iloc[:-1]
    out, complete = library.step(means.to_numpy())
    whole = slipstream.predict(run, table, every=True)["a_predicted"].to_numpy()
    np.testing.assert_allclose(out[complete > 0, 0], whole, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "data", "message"),
    [
        (
            "before",
            {},
            r"comes after other steps; put it first.*after_prepare=\"resample\"",
        ),
        ("dated", {}, r"step 2 \(calendar\) needs the time of each row"),
        ("bars", {}, r"step 1 \(resample\) makes bars.*after_prepare=\"resample\""),
        ("mean", {"duplicates": "mean"}, r'data.duplicates = "mean".*after_prepare="resample"'),
    ],
)
def test_what_c_cannot_resample_is_refused_by_name(case, data, message, train, tmp_path):
    run = train(case, **data)
    with pytest.raises(UserError, match=message):
        slipstream.export(run, to="c", out=tmp_path / "out")
    with pytest.raises(UserError, match=r"has no such step; it has"):
        slipstream.export(run, to="c", out=tmp_path / "out", after_prepare="filter")
