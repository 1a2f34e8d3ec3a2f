"""Steps of data.prepare in C give the columns that they give in Python, row by row."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.config import Config
from slipstream.data.prepare.frames import SeriesFrame
from slipstream.data.prepare.steps import StepInputs
from slipstream.exporting.c.files import load_library
from slipstream.exporting.c.prepare import plan_needed_steps
from slipstream.exporting.c.source import CSettings, make_source
from slipstream.inference.portable import PortableModel
from tests.exporting.c.programs import needs_compiler
from tests.exporting.random_models import RandomRun, make_signature

FORMULAS = [
    *("a + 2 * b - a / b", "(a > 11) + (b <= 2) * 2", "a ** 2 % 7", "-a // 3", "not (a > 11)"),
    *("where(a > 11, b, -b)", "clip(a, 9, 11)", "minimum(a, 5 * b)", "maximum(a, 5 * b)"),
    *("fill(b, a)", "missing(b) + sign(b - 2)", "log(abs(b)) + exp(b / 4) + sqrt(a)"),
    *("floor(a) + sin(b) * cos(b) + tanh(b)", "a > 10 and b > 2 or b == 1", "b != 2"),
    *("lag(a, 3)", "diff(a)", "lag(a, 0) - diff(a, 0)", "mean(a, 5)", "sum(a, 4)", "std(a, 6)"),
    *("min(a, 5)", "max(a, 5)", "median(a, 5)", "median(a, 4)", "zscore(a, 5)", "ema(b, 6)"),
    *("cumsum(b)", "mean(lag(a, 2) * b, 3) - ema(a, 3)"),
]
FILTERS: list[dict[str, Any]] = [
    {"kind": "ema", "rows": 5},
    {"kind": "moving_average", "rows": 4},
    {"kind": "median", "rows": 5},
    {"kind": "median", "rows": 4},
    {"kind": "butterworth", "cutoff_hz": 0.1, "order": 3},
    {"kind": "savgol", "rows": 7, "order": 2},
]
OTHERS: list[dict[str, Any]] = [
    {"step": "unit", "columns": ["b"], "factor": 1.8, "offset": 32, "unit": "F"},
    {"step": "clip", "columns": ["b"], "low": 1.5, "high": 2.5},
    {"step": "outliers", "columns": ["b"]},
    {"step": "outliers", "columns": ["b"], "action": "missing"},
]


def list_steps() -> tuple[list[dict[str, Any]], list[str]]:
    """All steps at once, each into a column of its own, so that one program tests them."""
    steps: list[dict[str, Any]] = []
    names = []
    for number, value in enumerate(FORMULAS):
        names.append(f"formula{number}")
        steps.append({"step": "formula", "name": names[-1], "value": value})
    for number, how in enumerate(FILTERS):
        names.append(f"filter{number}")
        steps.append({"step": "filter", "columns": ["b"], "into": [names[-1]], **how})
    for number, how in enumerate(OTHERS):
        names.append(f"other{number}")
        steps.append({"step": "formula", "name": names[-1], "value": "b"})
        steps.append({**how, "columns": [names[-1]]})
    return steps, names


def make_model(steps: list[dict[str, Any]], inputs: tuple[str, ...]) -> PortableModel:
    """An untrained linear model behind these steps."""
    signature = make_signature(inputs=inputs, targets=("y",), shared=0, horizon=0)
    model = RandomRun({"kind": "linear"}, signature).portable.first
    data = {"time": "time", "prepare": steps, "context": 8}
    config: Config = configs.load({"data": data, "model": {"kind": "linear"}})
    limits = {
        str(number): {step["columns"][0]: (1.2, 3.0)}
        for number, step in enumerate(steps, start=1)
        if step["step"] == "outliers"
    }
    return PortableModel(config, model.signature, model.scaler, model.weights, limits)


def draw_rows(num: int = 60) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    b = 2 + draw.standard_normal(num).round(1)
    b[[row for row in (7, 20, 21, 40) if row < num]] = np.nan
    return {"a": 10 + np.cumsum(draw.standard_normal(num)) / 3, "b": b}


def prepare_in_python(model: PortableModel, rows: dict[str, Any]) -> Any:
    num = len(rows["a"])
    times = np.arange(num, dtype=np.float64)
    frame = SeriesFrame("s", range(num), 0, times, 1.0, dict(rows), range(num))
    for step in plan_needed_steps(model).steps:
        limits = model.limits.get(str(step.number))
        frame = step.apply(frame, StepInputs(8, limits))
    return np.stack([frame.columns[name] for name in model.signature.inputs], axis=1)


def compile_model(model: PortableModel) -> Any:
    with tempfile.TemporaryDirectory() as name:
        source = make_source([model], CSettings(double=True))
        for file, text in source.files.items():
            (Path(name) / file).write_text(text)
        return load_library(Path(name), source.layout), source.layout


@needs_compiler
def test_formulas_filters_units_and_limits_give_the_same_columns():
    steps, names = list_steps()
    model = make_model(steps, tuple(names))
    library, layout = compile_model(model)
    rows = draw_rows()
    raw = np.stack([rows[name] for name in layout.prepared.columns], axis=1)
    values = library.prepare(raw, len(names), state_bytes=layout.sizes.state_bytes)
    expected = prepare_in_python(model, rows)
    for i, step in enumerate(names):
        np.testing.assert_allclose(
            values[:, i], expected[:, i], rtol=1e-9, atol=1e-9, err_msg=f"{step}: {steps[i]}"
        )


@needs_compiler
@pytest.mark.parametrize("value", ["first", "zero"])
def test_padded_rows_come_before_the_first_one(value):
    steps = [
        {"step": "unit", "columns": ["a"], "factor": 2.0, "unit": "x"},
        {"step": "pad", "value": value},
        {"step": "filter", "kind": "ema", "rows": 3, "columns": ["a"]},
    ]
    model = make_model(steps, ("a", "b"))
    library, _ = compile_model(model)
    rows = {name: np.nan_to_num(values, nan=2.0) for name, values in draw_rows(12).items()}
    out, complete = library.step(np.stack([rows["a"], rows["b"]], axis=1))
    assert complete.tolist() == [1] * 12
    prepared = prepare_in_python(model, rows)
    expected = library.predict(np.stack([prepared[i : i + 8] for i in range(12)]))
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"step": "calendar", "features": ["hour"]}, r"step 1 \(calendar\) needs the time"),
        (
            {"step": "resample", "every": 5, "method": "nearest", "lookahead": True},
            r"step 1 \(resample\) looks ahead",
        ),
        (
            {"step": "formula", "name": "hour_sin", "value": "lag(a, -1)", "lookahead": True},
            r"step 1 \(formula\) looks ahead",
        ),
        ({"step": "formula", "name": "hour_sin", "value": "hour() + a"}, "needs the time"),
        ({"step": "join", "path": "x.csv", "label": "end"}, r"step 1 \(join\) reads another table"),
    ],
    ids=lambda value: value.get("step") if isinstance(value, dict) else "",
)
def test_steps_that_cannot_run_row_by_row_are_refused_by_name(step, reason):
    model = make_model([step], ("a", "hour_sin"))
    with pytest.raises(UserError, match=rf"{reason}[\s\S]*--after-prepare"):
        make_source([model], CSettings())
    header = make_source([model], CSettings(after_prepare=True)).files["slip.h"]
    assert "NOT inside, to be done to the rows before: data.prepare, step 1" in header
