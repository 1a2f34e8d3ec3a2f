"""Exports are compared with the model by what a prediction is good for: the target's spread."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import slipstream
from slipstream.base.errors import UserError
from slipstream.data.scaler import Scaler
from slipstream.exporting.formats import LIMIT, make_interface
from slipstream.exporting.verification import Differences
from slipstream.training import train
from tests.conftest import slow, small_config, waves
from tests.exporting.random_models import RandomRun, make_signature

CASES: dict[str, tuple[float, float, str]] = {
    "far from zero": (1e6, 1.0, "standard"),
    "far from zero, minmax": (1e6, 1.0, "minmax"),
    "not scaled": (0.0, 1.0, "none"),
    "not scaled, far from zero": (3e3, 1.0, "none"),
    "small": (0.0, 1e-9, "standard"),
    "small beside zero": (10.0, 1e-2, "none"),
}
"""What is added to a column, what it is multiplied by, and data.scale"""


def make_differences(*, deviation: float, level: float, shift: float) -> Differences:
    run = RandomRun({"kind": "linear"}, make_signature(targets=("c",)))
    by_name = dict.fromkeys("abc", shift)
    sizes, ends = dict.fromkeys("abc", 1.0), dict.fromkeys("abc", level)
    scaler = Scaler("none", by_name, sizes, dict.fromkeys("abc", deviation), ends, ends)
    return Differences(make_interface(run.portable), scaler)


def add(differences: Differences, level: float, error: float) -> None:
    values = level + np.linspace(-1, 1, 6).reshape(3, 2, 1)
    differences.add({"prediction": values + error}, {"prediction": values})


@pytest.mark.parametrize("level", [0.0, 10.0, 1e6])
def test_an_error_of_the_spread_counts_as_one_wherever_zero_lies(level):
    differences = make_differences(deviation=1.0, level=level, shift=level)
    add(differences, level, 1.0)
    assert differences.max_rel == pytest.approx(1.0)
    with pytest.raises(UserError, match="up to 1 of the target's spread"):
        differences.refuse("the files", 3)


def test_numbers_far_from_zero_may_differ_by_float32_and_no_more():
    near, far, wrong = (make_differences(deviation=1.0, level=1e3, shift=0.0) for _ in range(3))
    add(near, 0.0, 0.9e-5)
    near.refuse("the files", 3)
    add(far, 1e3, 1e3 * 2.0**-23)
    far.refuse("the files", 3)
    assert far.max_rel > LIMIT
    assert far.max_rel <= far.limit
    add(wrong, 1e3, 1e3 * 2.0**-19)
    with pytest.raises(UserError, match="differ from the model"):
        wrong.refuse("the files", 3)


def test_a_constant_target_is_compared_by_its_value():
    differences = make_differences(deviation=0.0, level=50.0, shift=0.0)
    add(differences, 50.0, 1e-3)
    assert differences.max_rel == pytest.approx(1e-3 / 50)
    zero = make_differences(deviation=0.0, level=0.0, shift=0.0)
    add(zero, 0.0, 1e-3)
    assert zero.max_rel == pytest.approx(1e-3)


@pytest.mark.parametrize("normalize", ["none", slow("last"), slow("window")])
@pytest.mark.parametrize("case", CASES)
def test_targets_of_every_place_and_size_are_exported(case, normalize, tmp_path):
    level, size, scale = CASES[case]
    table = waves(200)
    values = np.asarray(table["a"])
    values = (values - values.mean()) / values.std() * size + level
    table = table.set_column(table.column_names.index("a"), "a", pa.array(values))
    check_exports(table, tmp_path, {"scale": scale}, normalize)


def test_a_target_that_leaves_its_range_of_training_is_exported(tmp_path):
    table = waves(200)
    jump = np.where(np.arange(200) < 150, 0.0, 1e4)
    values = np.asarray(table["a"]) + jump
    table = table.set_column(table.column_names.index("a"), "a", pa.array(values))
    check_exports(table, tmp_path, {}, "last")


def check_exports(table: pa.Table, folder: Path, data: dict[str, Any], normalize: str) -> None:
    pa.parquet.write_table(table, folder / "rows.parquet")
    data = {"path": str(folder / "rows.parquet"), "targets": ["a"], "context": 8, **data}
    model = {"kind": "mlp", "hidden": [8], "normalize": normalize}
    run = train(small_config(folder / "runs", data=data, model=model, train={"epochs": 1})).run
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    for to in ("onnx", *(("c",) if has_compiler else ())):
        parity = slipstream.export(run, to=to, out=folder / to)["parity"]
        assert parity["max_rel"] <= parity["limit"]
