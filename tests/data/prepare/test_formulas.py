"""Formulas: what they compute, how they are refused, and that none of them is code."""

from __future__ import annotations

import pickle
import re
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from slipstream.base.errors import UserError
from slipstream.data.prepare.formulas import FUNCTIONS, parse_formula
from tests.data.prepare import hostile

NAN = np.nan
A = np.array([1.0, 2.0, 4.0, NAN, 16.0, 9.0])
B = np.array([3.0, 2.0, 1.0, 0.0, -1.0, -2.0])
TIMES = np.array([0, 1, 2, 3, 4, 5]) * 13 * 3_600_000_000
WATCHED = (
    "exec",
    "import",
    "open",
    "os.",
    "subprocess.",
    "socket.",
    "ctypes.",
    "code.",
    "marshal.",
)
watching: list[str] | None = None


def watch(event, _arguments):
    if watching is not None and event.startswith(WATCHED):
        watching.append(event)


@cache
def install_watch():
    sys.addaudithook(watch)  # stays until the process ends; once only


@contextmanager
def watch_code():
    """Record code that is run, modules that are imported, and files that are opened."""
    global watching
    install_watch()
    watching = events = []
    try:
        yield events
    finally:
        watching = None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a + b * 2", [7, 6, 6, NAN, 14, 5]),
        ("-a + +b", [2, 0, -3, NAN, -17, -11]),
        ("a / b", [1 / 3, 1, 4, NAN, -16, -4.5]),
        ("b // 2 + b % 2", [2, 1, 1, 0, 0, -1]),
        ("a ** 2 - a ** -1", [0, 3.5, 15.75, NAN, 255.9375, 80 + 8 / 9]),
        ("a > b", [0, 0, 1, NAN, 1, 1]),
        ("a == 2 or b == -1", [0, 1, 0, NAN, 1, 0]),
        ("not b", [0, 0, 0, 1, 0, 0]),
        ("0 <= b < 3", [0, 1, 1, 1, 0, 0]),
        ("1 / b", [1 / 3, 0.5, 1, NAN, -1, -0.5]),
        ("log(b)", [np.log(3), np.log(2), 0, NAN, NAN, NAN]),
        ("lag(a)", [NAN, 1, 2, 4, NAN, 16]),
        ("lag(a, 2)", [NAN, NAN, 1, 2, 4, NAN]),
        ("lag(a, -2)", [4, NAN, 16, 9, NAN, NAN]),
        ("lag(a, 99)", [NAN] * 6),
        ("lag(a, 0)", A),
        ("diff(b)", [NAN, -1, -1, -1, -1, -1]),
        ("diff(b, 2)", [NAN, NAN, -2, -2, -2, -2]),
        ("mean(b, 2)", [NAN, 2.5, 1.5, 0.5, -0.5, -1.5]),
        ("sum(a, 2)", [NAN, 3, 6, NAN, NAN, 25]),
        ("min(b, 3) + max(b, 3)", [NAN, NAN, 4, 2, 0, -2]),
        ("median(b, 3)", [NAN, NAN, 2, 1, 0, -1]),
        ("std(b, 2)", [NAN, 0.5, 0.5, 0.5, 0.5, 0.5]),
        ("zscore(b, 2)", [NAN, -1, -1, -1, -1, -1]),
        ("zscore(b * 0, 2)", [NAN, 0, 0, 0, 0, 0]),
        ("ema(a, 1)", A),
        ("ema(a, 3)", [1, 1.5, 2.75, NAN, 9.6875, 9.34375]),
        ("cumsum(a)", [1, 3, 7, NAN, 23, 32]),
        ("where(b > 0, a, b)", [1, 2, 4, 0, -1, -2]),
        ("where(a > 0, b, 7)", [3, 2, 1, NAN, -1, -2]),
        ("clip(b, -1, 1)", [1, 1, 1, 0, -1, -1]),
        ("minimum(a, b) + maximum(a, b)", A + B),
        ("fill(a, b)", [1, 2, 4, 0, 16, 9]),
        ("missing(a)", [0, 0, 0, 1, 0, 0]),
        ("exp(b * 0) + abs(b) + sign(b)", [5, 4, 3, 1, 1, 2]),
        ("sqrt(a) + floor(b / 2)", [2, np.sqrt(2) + 1, 2, NAN, 3, 2]),
        ("sin(b) ** 2 + cos(b) ** 2 + tanh(b * 0)", [1] * 6),
        ("hour() + 0 * b", [0, 13, 2, 15, 4, 17]),
        ("weekday()", [3, 3, 4, 4, 5, 5]),
        ("month() + day_of_year() + minute()", [2, 2, 3, 3, 4, 4]),
        ("`c d` + `a`", A + 1),
        ("`1 + x`", B),
        ("  a\n + b ", A + B),
        ("mean + log", A + B),
        ("lag(mean(b, 2), 2)", [NAN, NAN, NAN, 2.5, 1.5, 0.5]),
        ("where(1 > 2, a, 3)", [3] * 6),
        ("mean(2, 3) + 0 * b", [NAN, NAN, 2, 2, 2, 2]),
    ],
)
def test_a_formula_computes(text, wanted):
    columns = {"a": A, "b": B, "c d": np.ones(6), "1 + x": B, "mean": A, "log": B}
    result = parse_formula(text).evaluate(columns, TIMES)
    np.testing.assert_allclose(result, np.asarray(wanted, dtype=float), rtol=1e-14)


@pytest.mark.parametrize(
    ("text", "columns", "back", "ahead"),
    [
        ("b + a * b", ("b", "a"), 0, 0),
        ("lag(a, 3) + mean(b, 5)", ("a", "b"), 4, 0),
        ("lag(mean(a, 5), 3)", ("a",), 7, 0),
        ("lag(a, -3) - lag(a, 2)", ("a",), 2, 3),
        ("diff(a, -1)", ("a",), 0, 1),
        ("ema(a, 9)", ("a",), None, 0),
        ("lag(cumsum(`x y`), -1)", ("x y",), None, 1),
        ("hour()", (), 0, 0),
    ],
)
def test_a_formula_declares_what_it_reads(text, columns, back, ahead):
    formula = parse_formula(text)
    assert (formula.columns, formula.look_back, formula.look_ahead) == (columns, back, ahead)
    assert formula.needs_times == ("hour" in text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a + men(b, 3)", 'position 5: no function "men"; did you mean "mean"?'),
        ("`é` + xyzzy(a)", 'position 7: no function "xyzzy"; there are lag, diff'),
        ("  a + a.b", "position 7: .* put a column with a point in backticks"),
        ("max(a, b)", r"position 8: .* for the max of two values use maximum\(a, b\)"),
        ("a & b", 'position 3: "&" is not allowed in a formula; use and'),
        ("a[1]", r'position 2: "\[" is not allowed in a formula; use lag\(x, rows\)'),
        ("a if b else 1", r"position 1: .* use where\(condition, if_true, if_false\)"),
        ("mean(a)", r"needs a number of rows; write mean\(x, rows\)"),
        ("a ** b", "position 6: an exponent is a number up to 16"),
        ("a + (b", "position 5: not a formula"),
        ("ä + 1", "position 1: .* in backticks"),
        ("a" * 1001, "has 1,001 characters; at most 1,000 are allowed"),
        ("-" * 500 + "a", r'"-{80} \.\.\.", position 51: nested more than 50 deep'),
        ("3 * 4", "names no column"),
    ],
)
def test_a_refusal_names_the_position_and_the_fix(text, message):
    with pytest.raises(UserError, match=message):
        parse_formula(text)


def test_an_unknown_column_is_refused_with_the_nearest_one():
    formula = parse_formula("voltage * curent")
    with pytest.raises(UserError, match='position 11: no column "curent"; did you mean "current"'):
        formula.check_columns(["voltage", "current"])
    with pytest.raises(UserError, match="there are x, y"):
        formula.evaluate({"x": A, "y": B})


def test_the_hour_needs_timestamps():
    for times in (None, np.arange(6.0)):
        with pytest.raises(UserError, match="needs dates or timestamps"):
            parse_formula("a + hour()").evaluate({"a": A}, times)


def test_there_are_more_than_two_hundred_hostile_formulas():
    assert len(set(hostile.HOSTILE)) > 200


def test_hostile_formulas_are_refused_and_nothing_is_run():
    for text in hostile.HOSTILE:
        with watch_code() as events, pytest.raises(UserError) as refusal:
            parse_formula(text)
        assert events == [], text[:80]
        assert len(str(refusal.value)) < 500


def test_the_watch_on_hostile_formulas_sees_code_that_is_run():
    with watch_code() as events:
        eval("1 + 1")
        Path(__file__).open().close()
    assert {"exec", "open"} <= set(events)


def test_random_texts_are_refused_or_keep_the_past():
    outcomes = hostile.fuzz(400, seed=3)
    assert not outcomes["wrong"]
    assert min(outcomes["refused"], outcomes["evaluated"]) > 20


def test_a_formula_can_be_sent_to_another_process():
    formula = parse_formula("mean(a, 2) + `c d` * 2")
    again = pickle.loads(pickle.dumps(formula))
    assert again == formula
    columns = {"a": A, "c d": B}
    np.testing.assert_array_equal(again.evaluate(columns), formula.evaluate(columns))


@pytest.mark.parametrize("num_rows", [0, 1])
def test_every_function_takes_a_series_of_no_or_one_row(num_rows):
    columns = {name: np.ones(num_rows) for name in "xab"}
    columns |= {name: np.ones(num_rows) for name in ("condition", "if_true", "if_false")}
    columns |= {name: np.ones(num_rows) for name in ("low", "high", "value")}
    for function in FUNCTIONS.values():
        text = function.usage.replace("rows", "3")
        result = parse_formula(text).evaluate(columns, np.arange(num_rows))
        assert result.shape == (num_rows,)


def test_the_examples_of_the_manual_are_formulas():
    page = (Path(__file__).parents[3] / "docs" / "formulas.md").read_text(encoding="utf-8")
    examples = re.findall("`([^`]+)`", page.partition("## Examples")[2])
    assert len(examples) > 8
    for text in examples:
        formula, draw = parse_formula(text), np.random.default_rng(0)
        columns = {name: 100 + draw.random(200) for name in formula.columns}
        assert np.isfinite(formula.evaluate(columns, 3_600_000_000 * np.arange(200))[150:]).all()


def test_the_manual_names_every_function():
    page = (Path(__file__).parents[3] / "docs" / "formulas.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", page.partition("## Functions")[2].partition("## Missing")[0]))
    assert set(FUNCTIONS) <= words
