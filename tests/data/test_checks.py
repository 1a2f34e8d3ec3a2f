"""Suspicious data are named; ordinary data are not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from slipstream import config as configs
from slipstream.data import checks
from slipstream.data import dataset as datasets
from tests.conftest import real_file, small_config, small_dataset, waves
from tests.labelled import class_config, states

ESTIMATE = {"horizon": 0, "targets": ["c"]}


def notes_of(table=None, **data):
    return checks.find_suspicious(small_dataset(small_config(data=data), table))


def changed(name, values, table=None):
    """The waves with a column replaced or added."""
    content = (waves() if table is None else table).to_pydict()
    return pa.table(content | {name: values})


def test_ordinary_data_raise_no_suspicion():
    assert notes_of() == []
    assert notes_of(**ESTIMATE) == []
    assert checks.find_suspicious(datasets.load_dataset(class_config(), states())) == []


@pytest.mark.parametrize("name", ["demo", "bars", "regimes"])
def test_the_embedded_data_raise_no_suspicion(name):
    assert checks.find_suspicious(datasets.load_dataset(configs.load_demo(name))) == []


@pytest.mark.parametrize("code", [-200.0, 9999.0, 1e6])
def test_an_extreme_value_repeated_often_is_named(code):
    values = waves()["b"].to_numpy().copy()
    values[::23] = code
    (note,) = notes_of(changed("b", values))
    assert note.startswith(f'column "b": 4.5 % of the values are {code:.6g}, all others 17.')


def test_a_usual_code_is_named_even_near_a_wide_column():
    draw = np.random.default_rng(0)
    values = draw.uniform(2, 1500, 400)
    values[::40] = -200
    (note,) = notes_of(changed("b", values))
    assert "are -200, all others" in note


def test_zeros_clipping_and_switches_are_no_codes():
    wave = waves()["b"].to_numpy()
    switch = np.where(np.arange(400) % 7 == 0, 50.0, 0.0)
    for values in (np.clip(wave, 19, 21), np.where(wave > 20, wave, 0), switch):
        assert notes_of(changed("b", values)) == []


def test_an_input_that_is_the_target_is_named():
    c = waves()["c"].to_numpy()
    (note,) = notes_of(changed("d", 5 - 3 * c), **ESTIMATE)
    assert note.startswith('input "d" tells the target "c" of the same row')
    assert notes_of(changed("d", c + np.random.default_rng(0).normal(size=400)), **ESTIMATE) == []
    assert notes_of(changed("d", c)) == []  # a forecast may know it


def test_a_copy_with_another_scale_in_each_series_is_named():
    one, two = waves(300).to_pydict(), waves(300, seed=1).to_pydict()
    one["d"], two["d"] = ([k * v for v in some["c"]] for k, some in ((1, one), (3, two)))
    rows = {name: [*one[name], *two[name]] for name in one}
    rows["id"] = ["x"] * 300 + ["y"] * 300
    assert any('input "d" tells' in note for note in notes_of(pa.table(rows), id="id", **ESTIMATE))


def test_an_input_that_is_a_code_of_the_class_is_named():
    table = states()
    numbers = {"calm": 7.0, "up": 3.0, "down": 5.0}
    names = sorted(set(table["state"].to_pylist()))
    code = {name: numbers.get(name, 10.0 * i) for i, name in enumerate(names)}
    leak = pa.array([code[name] for name in table["state"].to_pylist()])
    dataset = datasets.load_dataset(class_config(), table.append_column("leak", leak))
    assert any('input "leak" tells the target' in one for one in checks.find_suspicious(dataset))


def test_row_numbers_and_ids_are_named():
    (counter, outside) = notes_of(
        changed("No", np.arange(1.0, 401.0)), inputs=["a", "No"], targets=["a"]
    )
    assert counter.startswith('input "No" rises by the same step')
    assert '"No" (17 to 279 in training' in outside
    tables = [changed("station", [100.0 + 7 * i**2] * 200, waves(200, seed=i)) for i in range(4)]
    table = pa.concat_tables(tables).append_column("id", pa.array(np.repeat(list("wxyz"), 200)))
    split = {"by": "id", "val": ["y"], "test": ["z"]}
    notes = notes_of(table, id="id", targets=["a"], split=split)
    assert any(
        'input "station" is a number of its own for each of the 4 series' in n for n in notes
    )


def test_test_rows_beyond_training_are_named_with_what_helps():
    drift = np.linspace(0, 100, 400) + waves()["a"].to_numpy()
    (note,) = notes_of(changed("a", drift), targets=["a"])
    assert note.startswith('test rows are outside of what training sees: 100 % of "a" (')
    assert note.endswith('where a level drifts, model.normalize = "last" helps')


def test_a_validation_period_unlike_the_test_period_is_named():
    level = np.zeros(400)
    level[::2] = 8.0  # training sees both levels
    level[280:320], level[320:] = 0.0, 8.0
    values = level + np.random.default_rng(0).normal(size=400)
    (note,) = notes_of(changed("a", values), targets=["a"])
    assert note.startswith('target "a": the validation rows are unlike the test rows (mean')


def test_real_data_are_named_for_what_they_are():
    path = str(real_file("beijing_pm25.csv"))
    config = small_config(
        data={"path": path, "time": None, "targets": ["TEMP"], "ignore": ["pm2.5"]}
    )
    notes = checks.find_suspicious(datasets.load_dataset(config))
    assert [note[:11] for note in notes] == ['input "No" ', "test rows a"]
    config = small_config(data={"path": str(real_file("ETTh1.csv")), "time": "date"})
    assert checks.find_suspicious(datasets.load_dataset(config)) == []
