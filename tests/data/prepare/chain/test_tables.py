"""What steps make of the tables of a data set: rows, columns and messages."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from slipstream.base.errors import UserError
from slipstream.data import dataset as datasets
from tests.conftest import small_config, waves
from tests.data.prepare.chain.tables import MINUTE, START, make_bars, prepare, to_dict

LAG = {"step": "formula", "name": "before", "value": "lag(close, 3)"}


def test_steps_restart_with_every_series_though_rows_are_mixed():
    table = make_bars(40, names=("A", "B"))
    mixed = table.take(np.arange(80).reshape(2, 40).T.ravel())
    steps = [LAG, {"step": "filter", "kind": "ema", "columns": ["volume"], "rows": 3}]
    one, two = to_dict(prepare(table, steps)), to_dict(prepare(mixed, steps))
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name])
    assert len(one["close"]) == 2 * 37
    for name in ("A", "B"):
        mine = one["name"] == name
        wanted = table["close"].to_numpy()[table["name"].to_numpy() == name]
        np.testing.assert_array_equal(one["before"][mine], wanted[:-3])


def test_rows_are_sorted_before_the_first_step_where_that_is_asked_for():
    table = make_bars(40)
    shuffled = table.take(np.random.default_rng(0).permutation(40))
    with pytest.raises(UserError, match="earlier than"):
        prepare(shuffled, [LAG])
    one, two = (to_dict(prepare(some, [LAG], unsorted="sort")) for some in (table, shuffled))
    np.testing.assert_array_equal(one["before"], two["before"])


def test_where_selects_rows_before_the_steps():
    table = make_bars(40, names=("A", "B"))
    result = to_dict(prepare(table, [LAG], where={"name": "B"}, id=None))
    np.testing.assert_array_equal(result["before"], table["close"].to_numpy()[40:77])


def test_resampling_keeps_text_and_ids():
    table = make_bars(40, names=("A", "B"))
    table = table.append_column("note", pa.array([f"r{row}" for row in range(80)]))
    result = to_dict(prepare(table, [{"step": "resample", "every": "1h"}]))
    assert result["note"].tolist()[:3] == ["r0", "r4", "r8"]
    assert np.unique(result["name"], return_counts=True)[1].tolist() == [10, 10]
    np.testing.assert_allclose(result["close"][1], table["close"].to_numpy()[1:5].mean())


def test_an_error_in_a_prepared_table_names_the_line_of_the_file(tmp_path):
    close = np.append(np.arange(1.0, 60), [np.nan])
    text = "time,close\n" + "\n".join(
        f"{i},{'' if np.isnan(v) else v}" for i, v in enumerate(close)
    )
    path = tmp_path / "rows.csv"
    path.write_text(text)
    steps = [{"step": "formula", "name": "double", "value": "2 * close + lag(close, 2)"}]
    data = {"path": str(path), "time": "time", "prepare": steps, "inputs": ["double"]}
    data |= {"targets": ["double"], "context": 4, "horizon": 1}
    with pytest.raises(UserError, match=r'rows\.csv, line 61, column "double": is missing'):
        datasets.load_dataset(small_config(data=data))


def test_padded_rows_are_context_and_never_scored_or_scaled_by():
    table = waves(100, columns=2)
    steps = [{"step": "pad", "value": "zero"}]
    data = {"prepare": steps, "context": 16, "horizon": 0, "targets": ["b"], "inputs": ["a"]}
    plain = small_config(data=data | {"prepare": []})
    first, padded = (datasets.load_dataset(one, table) for one in (plain, small_config(data=data)))
    assert padded.num_windows["train"] == first.num_windows["train"] + 15
    assert padded.num_windows["val"] == first.num_windows["val"]
    assert padded.scaler == first.scaler
    values = padded.memory.series.values
    shift, size = padded.scaler.shift["a"], padded.scaler.size["a"]
    np.testing.assert_allclose(values[:15, 0] * size + shift, 0, atol=1e-5)
    np.testing.assert_array_equal(values[15:], first.memory.series.values)
    assert padded.memory.time[:15].tolist() == list(range(-15, 0))


def test_padding_makes_a_short_series_usable():
    table = make_bars(200, names=("A", "B"))
    table = table.filter(pa.array((np.arange(400) < 200) | (np.arange(400) > 388)))
    data = {"time": "time", "id": "name", "context": 16, "horizon": 0, "targets": ["close"]}
    data |= {"inputs": ["volume"]}
    data |= {"split": {"train": 0.5, "val": 0.25, "test": 0.25}}
    with pytest.raises(UserError, match='"B" has 11 rows of the 16 needed'):
        datasets.load_dataset(small_config(data=data), table)
    padded = data | {"prepare": [{"step": "pad"}]}
    dataset = datasets.load_dataset(small_config(data=padded), table)
    assert sum(dataset.num_windows.values()) == 211


def test_units_and_clips():
    steps = [
        {"step": "unit", "columns": ["close"], "factor": 1.8, "offset": 32.0, "unit": "degF"},
        {"step": "clip", "columns": ["volume"], "low": 50.0, "high": 120.0},
    ]
    table = make_bars(40)
    result = to_dict(prepare(table, steps))
    np.testing.assert_allclose(result["close"], table["close"].to_numpy() * 1.8 + 32)
    np.testing.assert_array_equal(result["volume"], np.clip(table["volume"].to_numpy(), 50, 120))


def fit_range(values, **settings):
    steps = [{"step": "outliers", "columns": ["a"], **settings}]
    table = waves(400, columns=1)
    table = table.set_column(1, "a", pa.array(values(table["a"].to_numpy().copy())))
    dataset = datasets.load_dataset(small_config(data={"prepare": steps}), table)
    return dataset.limits["1"]["a"], table["a"].to_numpy(), dataset


def test_ranges_are_fitted_on_training_rows_only():
    def spoil(values):
        values[10], values[350:] = 1e4, 1e6
        return values

    (low, high), values, dataset = fit_range(spoil, method="quantile", low=0.02, high=0.98)
    assert (low, high) == tuple(np.quantile(values[:280], (0.02, 0.98)))
    assert dataset.scaler.high["a"] == high
    (low, high), values, _ = fit_range(spoil)
    middle = np.median(values[:280])
    spread = 6 * 1.4826 * np.median(np.abs(values[:280] - middle))
    assert (low, high) == (middle - spread, middle + spread)


def test_a_range_that_is_fitted_before_resampling_sees_every_training_row():
    steps = [
        {"step": "outliers", "columns": ["volume"], "method": "quantile", "low": 0.1, "high": 0.9},
        {"step": "resample", "every": "1h"},
    ]
    table = make_bars(400)
    data = {"time": "time", "id": "name", "prepare": steps, "targets": ["close"], "context": 8}
    dataset = datasets.load_dataset(small_config(data=data), table)
    training = table["volume"].to_numpy()[: 4 * 69 + 1]  # 70 of 100 new rows, up to the last one
    assert dataset.limits["1"]["volume"] == tuple(np.quantile(training, (0.1, 0.9)))


def test_values_outside_may_become_missing():
    def spoil(values):
        values[30] = 500.0
        return values

    with pytest.raises(UserError, match=r'column "a": is missing'):
        fit_range(spoil, action="missing")


@pytest.mark.parametrize(
    ("kind", "more", "wanted"),
    [
        ("move", {"up": 0.1}, ["up", "flat", "down", None, None]),
        ("move", {"up": 0.1, "down": 0.6}, ["up", "flat", "flat", None, None]),
        ("move", {"up": 3.0, "relative": False}, ["up", "flat", "down", None, None]),
        ("sign", {}, ["up", None, "down", None, None]),
        ("barrier", {"up": 0.1}, ["up", "up", "down", None, None]),
    ],
)
def test_labels_follow_from_the_rows_to_come(kind, more, wanted):
    table = {"time": [0, 1, 2, 3, 4], "x": [10.0, 12.0, 13.0, 12.0, 8.0]}
    if kind == "barrier":
        table["x"] = [10.0, 12.0, 13.5, 12.0, 8.0]
    step = {"step": "label", "name": "move", "column": "x", "rows": 2, "kind": kind, **more}
    settings = {"task": "classify", "targets": ["move"], "id": None}
    result = to_dict(prepare(table, [step], **settings))
    assert result["move"].tolist() == wanted


def test_a_barrier_is_reached_by_highs_and_lows_and_by_both_at_once_counts_as_flat():
    columns = {
        "time": np.arange(6),
        "close": np.full(6, 100.0),
        "high": [100.0, 100.0, 102.0, 100.0, 100.0, 100.0],
        "low": [100.0, 100.0, 98.0, 98.0, 100.0, 100.0],
    }
    step = {"step": "label", "name": "move", "column": "close", "rows": 1, "kind": "barrier"}
    step |= {"up": 0.01, "high": "high", "low": "low"}
    settings = {"task": "classify", "targets": ["move"], "id": None}
    result = to_dict(prepare(columns, [step], **settings))
    assert result["move"].tolist() == ["flat", "flat", "down", "flat", "flat", None]


def test_labels_are_purged_at_the_borders_of_the_split():
    label = {"step": "label", "name": "move", "column": "close", "rows": 7, "kind": "sign"}
    data = {"time": "time", "id": "name", "prepare": [label], "task": "classify"}
    data |= {"targets": ["move"], "context": 8, "horizon": 0}
    dataset = datasets.load_dataset(small_config(data=data), make_bars(200))
    last = {which: int(some.max()) + 7 for which, some in dataset.memory.starts.items()}
    assert last == {"train": 140 - 7 - 1, "val": 160 - 7 - 1, "test": 200 - 7 - 1}
    assert any("targets look 7 rows ahead" in note for note in dataset.notes)


def test_a_purge_spares_no_short_run_of_rows_between_two_sets():
    group = np.repeat(["a", "b", "a", "c"], [60, 3, 40, 40])
    label = {"step": "label", "name": "move", "column": "close", "rows": 5, "kind": "sign"}
    data = {"time": "time", "prepare": [label], "task": "classify", "targets": ["move"]}
    data |= {"horizon": 0}
    data |= {
        "split": {"by": "group", "val": ["b"], "test": ["c"]},
        "context": 4,
        "inputs": ["close"],
    }
    table = make_bars(143).append_column("group", pa.array(group))
    with pytest.raises(UserError, match="no val window"):
        datasets.load_dataset(small_config(data=data), table)


# joins


def make_weather(folder, **columns):
    times = pa.array(START + 60 * MINUTE * np.arange(-2, 60)).cast(pa.timestamp("us"))
    table = pa.table({"time": times, "heat": np.arange(62.0)} | columns)
    pa.csv.write_csv(table, folder / "weather.csv")
    return table


def test_a_join_goes_by_id_and_shows_a_row_at_the_end_of_its_period(tmp_path):
    parts = [make_weather(tmp_path, name=pa.array([name] * 62)) for name in ("B", "A")]
    parts[1] = parts[1].set_column(1, "heat", pa.array(1000 + np.arange(62.0)))
    pa.csv.write_csv(pa.concat_tables(parts), tmp_path / "both.csv")
    step = {"step": "join", "path": str(tmp_path / "both.csv"), "period": "1h", "id": "name"}
    result = to_dict(prepare(make_bars(40, names=("A", "B")), [step]))
    assert result["heat"][:5].tolist() == [1001, 1001, 1001, 1001, 1002]
    assert result["heat"][40:45].tolist() == [1, 1, 1, 1, 2]


def test_rows_before_the_first_joined_one_are_left_out(tmp_path):
    table = make_weather(tmp_path)
    pa.csv.write_csv(table.slice(4), tmp_path / "late.csv")
    step = {"step": "join", "path": str(tmp_path / "late.csv"), "period": "1h", "prefix": "w_"}
    prepared = prepare(make_bars(40), [step])
    assert prepared.tables[0].num_rows == 40 - 12
    assert "leaves out the first 12 rows" in prepared.notes[0]


def test_other_tables_take_the_place_of_joined_files(tmp_path):
    table = make_weather(tmp_path)
    step = {"step": "join", "path": str(tmp_path / "weather.csv"), "period": "1h", "prefix": "w_"}
    other = table.set_column(1, "heat", pa.array(np.full(62, 5.0)))
    for name in ("weather.csv", "weather", "w_", "w"):
        result = to_dict(prepare(make_bars(40), [step], joins={name: other}))
        assert set(result["w_heat"]) == {5.0}
    with pytest.raises(UserError, match=r'no joined table "wether"; there is weather\.csv'):
        prepare(make_bars(40), [step], joins={"wether": other})


# bad input

BAD = {
    "an unknown column": (
        {"step": "formula", "name": "x", "value": "clos * 2"},
        r'data: data.prepare, step 1 \(formula\): .*no column "clos"; did you mean "close"\?',
    ),
    "an unknown column of a filter": (
        {"step": "filter", "kind": "ema", "columns": ["volme"], "rows": 3},
        r'data: has no column "volme" \(data.prepare, step 1 \(filter\)\); did you mean "volume"',
    ),
    "an unknown function": (
        {"step": "formula", "name": "x", "value": "men(close, 3)"},
        r"data.prepare, step 1 \(formula\): .*men",
    ),
    "a broken formula": (
        {"step": "formula", "name": "x", "value": "close *"},
        r"data.prepare, step 1 \(formula\): ",
    ),
    "a name that is taken": (
        {"step": "formula", "name": "high", "value": "close * 2"},
        r'step 1 \(formula\) makes "high", but there is a column of that name; choose another',
    ),
    "a look-ahead": (
        {"step": "formula", "name": "x", "value": "lag(close, -2)"},
        r"step 1 \(formula\) looks 2 rows ahead, .*set lookahead = true",
    ),
    "a centered filter": (
        {"step": "filter", "kind": "median", "columns": ["close"], "rows": 5, "centered": True},
        r"step 1 \(filter\) looks 2 rows ahead",
    ),
    "linear upsampling": (
        {"step": "resample", "every": "5min", "method": "linear"},
        r"step 1 \(resample\) looks .* ahead",
    ),
    "a cut-off above the Nyquist rate": (
        {"step": "filter", "kind": "butterworth", "columns": ["close"], "cutoff_hz": 1.0},
        r'data, "A": data.prepare, step 1 \(filter\): cutoff_hz is 1, .*900 s.* below half',
    ),
    "a text column": (
        {"step": "filter", "kind": "ema", "columns": ["name"], "rows": 3},
        r'column "name".*data.prepare, step 1|"A" is not a number',
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_steps_are_refused_with_the_step_and_the_fix(name):
    step, message = BAD[name]
    with pytest.raises(UserError, match=message):
        prepare(make_bars(40), [step])


def test_steps_that_need_times_are_refused_without_them():
    for step in (
        {"step": "calendar", "features": ["hour"]},
        {"step": "resample", "every": "1h"},
        {"step": "formula", "name": "x", "value": "close * hour()"},
    ):
        with pytest.raises(UserError, match=r"step 1 .* needs the time of each row; set data.time"):
            prepare(make_bars(40).drop_columns(["time"]), [step], time=None)


def test_a_label_is_no_input_of_another_step():
    label = {"step": "label", "name": "move", "column": "close", "rows": 7, "kind": "sign"}
    settings = {"task": "classify", "targets": ["move"]}
    other = {"step": "formula", "name": "x", "value": "move * 2"}
    with pytest.raises(UserError, match=r'step 2 \(formula\) reads "move", .*only be a target'):
        prepare(make_bars(40), [label, other], **settings)
    with pytest.raises(UserError, match=r"can only be a target; remove it from data.inputs"):
        prepare(make_bars(40), [label], inputs=["move"], **settings)
    with pytest.raises(
        UserError, match=r'set data.task = "classify" and data.targets = \["move"\]'
    ):
        prepare(make_bars(40), [label])


def test_bad_joins_are_refused_with_the_file_and_the_fix(tmp_path):
    make_weather(tmp_path)
    step = {"step": "join", "path": str(tmp_path / "weather.csv"), "period": "1h"}
    with pytest.raises(UserError, match=r"step 1 \(join\): .*wether.csv: there is no such file"):
        prepare(make_bars(40), [step | {"path": str(tmp_path / "wether.csv")}])
    with pytest.raises(UserError, match=r'data, "A": .*step 1 \(join\): the join matches nothing'):
        prepare(make_bars(40), [step | {"delay": "90d"}])
    with pytest.raises(
        UserError, match=r"step 1 \(join\) makes .*a column of that name; set prefix"
    ):
        prepare(make_bars(40).rename_columns({"volume": "heat"}), [step])
    with pytest.raises(UserError, match=r'step 1 \(join\): .*no column "het".*did you mean "heat"'):
        prepare(make_bars(40), [step | {"columns": ["het"]}])
    lines = (tmp_path / "weather.csv").read_text().splitlines()
    (tmp_path / "twice.csv").write_text("\n".join([*lines[:9], lines[8], *lines[9:]]))
    with pytest.raises(
        UserError, match=r"twice\.csv, line 10.*the same time as twice\.csv, line 9"
    ):
        prepare(make_bars(40), [step | {"path": str(tmp_path / "twice.csv")}])
    (tmp_path / "mixed.csv").write_text("\n".join([lines[0], *lines[:0:-1]]))
    with pytest.raises(UserError, match=r"mixed\.csv, line 3.*earlier than .*sort the file"):
        prepare(make_bars(40), [step | {"path": str(tmp_path / "mixed.csv")}])


def test_times_of_a_joined_table_are_told_by_the_settings_of_its_step(tmp_path):
    make_weather(tmp_path)
    lines = (tmp_path / "weather.csv").read_text().splitlines()
    dates = [
        f"31.01.2024 {hour:02}:00,{line.split(',', 1)[1]}" for hour, line in enumerate(lines[1:20])
    ]
    (tmp_path / "german.csv").write_text("\n".join([lines[0], *dates]))
    step = {"step": "join", "path": str(tmp_path / "german.csv"), "period": "1h"}
    for settings, told in (
        ({}, r'is not an ISO 8601 time; set time_format = "%d.%m.%Y %H:%M"'),
        ({"time_format": "%Y"}, r'does not match time_format = "%Y"'),
        ({"time_format": "Y"}, r"which has no directives such as %d; set time_format = "),
    ):
        with pytest.raises(UserError, match=rf"step 1 \(join\): german.csv, line 2.*{told}"):
            prepare(make_bars(40), [step | settings])


def test_a_series_that_is_shorter_than_the_look_back_is_refused_or_left_out():
    table = make_bars(40, names=("A", "B")).slice(0, 45)
    steps = [{"step": "formula", "name": "z", "value": "zscore(close, 10)"}]
    with pytest.raises(
        UserError, match=r'series "B" has 5 rows, of which data.prepare leaves none'
    ):
        prepare(table, steps)
    prepared = prepare(table, steps, short="drop")
    assert prepared.tables[0].num_rows == 31
    assert 'series "B" has 5 rows' in prepared.left_out[0]


def test_a_file_that_is_too_short_is_left_out_and_the_others_stay(tmp_path):
    for name, rows in (("long", 60), ("short", 5)):
        pa.csv.write_csv(make_bars(rows), tmp_path / f"{name}.csv")
    steps = [{"step": "formula", "name": "z", "value": "zscore(close, 10)"}]
    prepared = prepare(None, steps, path=str(tmp_path), id=None, short="drop")
    assert [table.num_rows for table in prepared.tables] == [51]
    assert 'series "short.csv" has 5 rows' in prepared.left_out[0]
    assert prepared.notes == [
        "data.prepare leaves out the first 9 rows, before every column has a value"
    ]


def test_wrong_steps_are_refused_before_any_file_is_read(tmp_path):
    steps = [
        {"step": "join", "path": str(tmp_path / "missing.csv"), "period": "1h"},
        {"step": "formula", "name": "x", "value": "men(close, 3)"},
    ]
    with pytest.raises(UserError, match=r"step 2 \(formula\)"):
        prepare(None, steps, path=str(tmp_path / "missing-too.csv"))
