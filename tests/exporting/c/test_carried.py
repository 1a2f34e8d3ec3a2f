"""Runs with `train.state = "carried"` in C: steps only, compared over whole series."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.base.errors import UserError
from slipstream.exporting.c.files import build_program
from tests.conftest import merged, mostly_slow
from tests.exporting.c.programs import needs_compiler
from tests.exporting.carried_runs import ESTIMATE, train_carried

pytestmark = needs_compiler
STEPS = [
    {"step": "filter", "kind": "ema", "columns": ["a"], "rows": 4, "into": ["slow"]},
    {"step": "formula", "name": "power", "value": "b * lag(a, 1)"},
]
CASES: dict[str, dict[str, Any]] = {
    "lstm": merged(ESTIMATE, {"model": {"layers": 2}}),
    "gru with constants, norms and two networks": {
        "data": {"static": ["k"]},
        "model": {"kind": "gru", "layers": 2, "layer_norm": True, "output_range": [9.0, 31.0]},
        "train": {"repeats": 2},
    },
    "quantiles": {"data": {"future": ["a"], "targets": ["c"]}, "train": {"loss": "quantile"}},
    "channels": {"data": {"channels": "independent"}},
    "prepared and filtered": merged(
        ESTIMATE,
        {
            "data": {"inputs": ["slow", "power"], "prepare": STEPS},
            "predict": {"filter": {"kind": "moving_average", "rows": 5}},
        },
    ),
    "padded and filtered": merged(
        ESTIMATE,
        {
            "data": {"prepare": [{"step": "pad", "rows": 7}]},
            "predict": {"filter": {"kind": "ema", "rows": 5}},
        },
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_carried(tmp_path_factory.mktemp("carried"), **CASES["lstm"])


@pytest.mark.parametrize("name", mostly_slow(CASES, "lstm"))
def test_every_window_is_compared_after_all_rows_before_it(name, tmp_path):
    run = train_carried(tmp_path, **CASES[name])
    result = slipstream.export(run, to="c", out=tmp_path / "out")
    parity = result["parity"]
    assert parity["windows"] == parity["windows_of_set"] == slipstream.evaluate(run)["windows"]
    assert parity["others"].keys() == {"slip_step"}
    assert parity["max_rel"] <= 1e-5
    assert result["state"] == "carried"
    assert result["selftest"].endswith("ok")


def test_there_is_no_function_of_windows_and_the_header_says_why(run, tmp_path):
    result = slipstream.export(run, to="c", out=tmp_path / "out", name="soc")
    header = (tmp_path / "out" / "soc.h").read_text()
    assert "soc_window" not in header
    assert "soc_window" not in (tmp_path / "out" / "soc.c").read_text()
    assert "trained to carry its state on" in header
    assert result["sizes"]["window_multiply_adds"] is None
    assert result["notes"] == [
        "there is no soc_window: the run was trained to carry its state on from row to row"
    ]


def test_the_self_test_fails_where_a_weight_differs(run, tmp_path):
    out = tmp_path / "out"
    slipstream.export(run, to="c", out=out)
    source = (out / "slip.c").read_text()
    assert "input_shift[SLIP_INPUTS] = {" in source
    (out / "slip.c").write_text(
        source.replace("input_shift[SLIP_INPUTS] = {", "input_shift[SLIP_INPUTS] = {1.0 + ")
    )
    program = build_program([out / "slip.c", out / "main.c"], tmp_path / "test")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAILED" in done.stdout


def test_int8_is_measured_on_every_window(run, tmp_path):
    result = slipstream.export(run, to="c", out=tmp_path / "out", int8=True)
    loss = result["parity"]["loss"]
    assert loss["model"] != loss["export"]
    assert loss["relative"] <= loss["limit"]
    assert result["parity"]["windows"] == result["parity"]["windows_of_set"]


def test_rows_after_preparation_are_a_choice(tmp_path):
    run = train_carried(tmp_path, **CASES["prepared and filtered"])
    result = slipstream.export(run, to="c", out=tmp_path / "out", after_prepare=True)
    assert result["before"] == ["data.prepare, step 1 (filter)", "data.prepare, step 2 (formula)"]
    assert result["selftest"].endswith("ok")


def test_windows_are_refused(run, tmp_path):
    with pytest.raises(UserError, match=r'trained with train\.state = "carried", so that'):
        slipstream.export(run, to="c", out=tmp_path / "out", state="windows")
    assert not list(tmp_path.iterdir())
