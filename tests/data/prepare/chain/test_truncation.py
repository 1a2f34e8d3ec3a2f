"""No row knows more than its steps declare: not when the table is cut, nor when the future is
another one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.base.errors import UserError
from slipstream.data import dataset as datasets
from slipstream.data.prepare.chain import Replay
from slipstream.scoring.baselines import fit_baselines
from tests.conftest import small_config
from tests.data.prepare.chain.tables import MINUTE, START, make_bars, prepare, to_dict

HOURLY = pa.table(
    {
        "time": pa.array(START - 180 * MINUTE + 60 * MINUTE * np.arange(60)).cast(
            pa.timestamp("us")
        ),
        "trend": np.sin(np.arange(60.0)),
    }
)
STEPS = {
    "lag": {"step": "formula", "name": "f{i}", "value": "{x} / lag({x}, 2)"},
    "zscore": {"step": "formula", "name": "f{i}", "value": "zscore({x}, 5)"},
    "cumsum": {"step": "formula", "name": "f{i}", "value": "cumsum({x})"},
    "ahead": {"step": "formula", "name": "f{i}", "value": "lag({x}, -3)", "lookahead": True},
    "ema": {"step": "filter", "kind": "ema", "columns": ["{x}"], "rows": 4, "into": "f{i}"},
    "butterworth": {
        "step": "filter",
        "kind": "butterworth",
        "columns": ["{x}"],
        "cutoff_hz": 1e-4,
        "into": "f{i}",
    },
    "median": {"step": "filter", "kind": "median", "columns": ["{x}"], "rows": 3},
    "centered": {
        "step": "filter",
        "kind": "moving_average",
        "columns": ["{x}"],
        "rows": 5,
        "into": "f{i}",
        "centered": True,
        "lookahead": True,
    },
    "savgol": {"step": "filter", "kind": "savgol", "columns": ["{x}"], "rows": 5, "into": "f{i}"},
    "calendar": {"step": "calendar", "features": ["hour", "weekday"], "holidays": ["2026-01-01"]},
    "join": {"step": "join", "path": "hourly", "period": "1h", "prefix": "j{i}_"},
    "delayed": {
        "step": "join",
        "path": "hourly",
        "label": "end",
        "delay": "20min",
        "prefix": "j{i}_",
    },
    "unit": {"step": "unit", "columns": ["{x}"], "factor": 2.0, "offset": 1.0, "unit": "V"},
    "clip": {"step": "clip", "columns": ["{x}"], "low": 90.0},
    "outliers": {"step": "outliers", "columns": ["{x}"], "action": "clip"},
    "pad": {"step": "pad", "rows": 4},
    "mean": {"step": "resample", "every": "30min"},
    "last": {"step": "resample", "every": "5min", "method": "last", "limit": "1h"},
    "linear": {
        "step": "resample",
        "every": "10min",
        "method": "linear",
        "limit": "1h",
        "lookahead": True,
    },
    "nearest": {
        "step": "resample",
        "every": "20min",
        "method": "nearest",
        "limit": "1h",
        "lookahead": True,
    },
}
FIRST = ("mean", "last", "linear", "nearest")
LABEL = {"step": "label", "name": "move", "column": "close", "rows": 4, "up": 0.004}


def fill(step, column, number):
    def change(value):
        if isinstance(value, list):
            return [change(one) for one in value]
        return value.format(x=column, i=number) if isinstance(value, str) else value

    return {key: change(value) for key, value in step.items()}


def run(table, names, *, labelled):
    steps, columns = [], ["close", "volume"]
    for number, name in enumerate(names):
        step = fill(STEPS[name], columns[number % len(columns)], number)
        steps.append(step)
        if f"f{number}" in (step.get("name"), step.get("into")):
            columns.append(f"f{number}")
    chosen = {"task": "classify", "targets": ["move"]} if labelled else {"targets": ["close"]}
    steps += [LABEL] if labelled else []
    limits = {
        str(number): {step["columns"][0]: (95.0, 105.0)}
        for number, step in enumerate(steps, start=1)
        if step["step"] == "outliers"
    }
    joins = {"hourly": HOURLY} if any(step["step"] == "join" for step in steps) else None
    return prepare(table, steps, joins=joins, limits=limits, **chosen)


def check_cut(names, after, *, labelled=False):
    """Cut every series after a row: rows that are older than the declared look-ahead stay."""
    table = make_bars(96, names=("A", "B"))
    whole = run(table, names, labelled=labelled)
    rows = np.arange(96) <= after
    try:
        cut = run(table.filter(pa.array(np.tile(rows, 2))), names, labelled=labelled)
    except UserError:
        assume(False)
    full, part = to_dict(whole), to_dict(cut)
    ahead, latency = whole.tables[0].look_ahead, whole.latency
    for name in ("A", "B"):
        mine, theirs = full["name"] == name, part["name"] == name
        step = np.diff(np.sort(full["time"][mine]))[0]
        last = np.datetime64(START + 15 * MINUTE * after, "us")
        known = part["time"][theirs] <= last - (ahead if labelled else latency) * step
        for column, values in part.items():
            wanted = full[column][mine][: len(values[theirs])]
            if values.dtype == object:
                assert values[theirs][known].tolist() == wanted[known].tolist(), column
            else:
                np.testing.assert_array_equal(values[theirs][known], wanted[known], column)
        older = full["time"][mine] <= last - (latency + 1) * step
        assert known.sum() + max(ahead - latency, 0) * labelled >= older.sum() - 1
    return int(known.sum())


@pytest.mark.parametrize("name", STEPS)
def test_cutting_the_table_changes_nothing_before(name):
    assert check_cut([name], 70) > 10


@settings(max_examples=60)
@given(
    first=st.sampled_from([None, *FIRST]),
    names=st.lists(st.sampled_from([name for name in STEPS if name not in FIRST]), max_size=5),
    after=st.integers(40, 94),
    labelled=st.booleans(),
)
def test_cutting_the_table_changes_nothing_before_after_chains_of_steps(
    first, names, after, labelled
):
    assume(names.count("pad") < 2 and names.count("calendar") < 2)
    names = [first, *names] if first else names
    assume(names)
    check_cut(names, after, labelled=labelled)


def change_future(table, row, rows):
    """Other values from a row on, of every series."""
    later = np.tile(np.arange(rows) >= row, len(table) // rows)
    for name in ("close", "high", "low", "volume"):
        values = table[name].to_numpy()
        table = table.set_column(
            table.column_names.index(name), name, pa.array(np.where(later, 3 * values + 50, values))
        )
    return table


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize(("split", "border"), [({}, 320), ({"walk_forward": 2}, 322)])
def test_other_test_rows_change_neither_features_nor_scaler_labels_ranges_or_baselines(
    labelled, split, border
):
    rows = 400
    steps = [
        {"step": "outliers", "columns": ["volume"], "method": "quantile", "low": 0.1, "high": 0.9},
        {"step": "formula", "name": "change", "value": "log(close / lag(close, 1))"},
        {"step": "filter", "kind": "ema", "columns": ["volume"], "rows": 5, "into": "slow"},
        {"step": "calendar", "features": ["hour"]},
    ]
    data = {"time": "time", "id": "name", "context": 8, "prepare": steps}
    if labelled:
        steps.append({"step": "label", "name": "move", "column": "close", "rows": 6, "up": 0.004})
        data |= {"task": "classify", "targets": ["move"], "horizon": 0}
    else:
        data |= {"targets": ["close"], "horizon": 2}
    if split:
        data["split"] = split
    config = small_config(data=data)
    table = make_bars(rows, names=("A", "B"))
    first = datasets.load_dataset(config, table)
    other = datasets.load_dataset(config, change_future(table, border, rows))
    assert first.limits == other.limits != {}
    assert first.scaler == other.scaler
    sets = [one.select_fold(one.folds[0]) if one.folds else one for one in (first, other)]
    for which in ("train", "val"):
        starts = sets[0].memory.starts[which]
        assert torch.equal(starts, sets[1].memory.starts[which])
        assert len(starts) > 20
        reach = torch.arange(first.signature.lead + first.signature.steps_out)
        values = [one.memory.series.values[starts[:, None] + reach] for one in sets]
        assert torch.equal(*values)
    if labelled:
        return  # the labels are among the values, and what a baseline is fitted to is equal

    def load(one):
        return lambda which: one.iter_chunks(which, None, rows=0)

    chosen = [fit_baselines(one, load(one)) for one in sets]
    starts = sets[0].memory.starts["val"]
    for name, baseline in chosen[0].items():
        if baseline.predict:
            one, two = (
                by_name[name].predict(data.memory.series, starts)
                for by_name, data in zip(chosen, sets, strict=True)
            )
            assert torch.equal(one, two), name


def test_joined_rows_that_become_known_in_the_test_rows_change_nothing_before():
    table = make_bars(240)
    step = {"step": "join", "path": "hourly", "period": "4h"}
    data = {"time": "time", "id": "name", "prepare": [step], "targets": ["close"], "context": 8}
    config = small_config(data=data)
    border = START + 15 * MINUTE * (
        4 + round(0.8 * 236)
    )  # four rows come before the first bar's end
    times = HOURLY["time"].cast(pa.int64()).to_numpy()

    def load(changed):
        trend = HOURLY["trend"].to_numpy() + 5.0 * changed
        joined = HOURLY.set_column(1, "trend", pa.array(trend))
        return datasets.load_dataset(config, table, replay=Replay(joins={"hourly": joined}))

    first, later, earlier = (
        load(times + 4 * 60 * MINUTE >= border),
        load(np.zeros(len(times), dtype=bool)),
        load(times + 4 * 60 * MINUTE >= border - 15 * MINUTE * 12),
    )
    assert first.scaler == later.scaler
    known = round(0.8 * 236)
    assert torch.equal(*(one.memory.series.values[:known] for one in (first, later)))
    assert not torch.equal(first.memory.series.values, later.memory.series.values)
    assert not torch.equal(*(one.memory.series.values[:known] for one in (earlier, later)))
