"""Formulas of `data.prepare` as statements of C.

Every operation is one statement, since some keep rows in a state and must run once a row. What is
missing is NaN, and truth is 1 and 0, as in `data.prepare.functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.data.prepare import filters
from slipstream.data.prepare.filters import Floats
from slipstream.data.prepare.formulas import ColumnName, Formula, Node, Number, Operation
from slipstream.exporting.c.arrays import format_double, format_list

SIMPLE = {
    **{name: f"({{0}} {name} {{1}})" for name in "+-*/"},
    "**": "pow({0}, {1})",
    "//": "modulo({0}, {1}, 1)",
    "%": "modulo({0}, {1}, 0)",
    "negate": "(-{0})",
    **{
        name: f"(isnan({{0}}) || isnan({{1}}) ? NAN : (double)({{0}} {name} {{1}}))"
        for name in ("<", "<=", ">", ">=", "==", "!=")
    },
    "and": "(isnan({0}) || isnan({1}) ? NAN : (double)({0} != 0.0 && {1} != 0.0))",
    "or": "(isnan({0}) || isnan({1}) ? NAN : (double)({0} != 0.0 || {1} != 0.0))",
    "not": "(isnan({0}) ? NAN : (double)({0} == 0.0))",
    "where": "(isnan({0}) ? NAN : {0} != 0.0 ? {1} : {2})",
    "minimum": "(isnan({0}) || {0} < {1} ? {0} : {1})",
    "maximum": "(isnan({0}) || {0} > {1} ? {0} : {1})",
    "fill": "(isnan({0}) ? {1} : {0})",
    "missing": "(double)isnan({0})",
    "sign": "(isnan({0}) ? NAN : (double)(({0} > 0.0) - ({0} < 0.0)))",
    "abs": "fabs({0})",
    **{name: f"{name}({{0}})" for name in ("log", "exp", "sqrt", "floor", "sin", "cos", "tanh")},
}
"""What needs the row alone; arguments are names of variables"""
WINDOWS = {
    "lag": "lag({state}, {rows}, {x})",
    "diff": "{x} - lag({state}, {rows}, {x})",
    "mean": "mean({state}, {rows}, {x})",
    "sum": "sum({state}, {rows}, {x})",
    "std": "standard_deviation({state}, {rows}, {x})",
    "zscore": "zscore({state}, {rows}, {x})",
    "min": "extreme({state}, {rows}, {x}, 0)",
    "max": "extreme({state}, {rows}, {x}, 1)",
    "median": "median({state}, {rows}, {x})",
}
"""What keeps the last rows"""
NEEDS = {
    "lag": ("ring",),
    "diff": ("ring", "lag"),
    "mean": ("ring", "is_full", "moments"),
    "std": ("ring", "is_full", "moments"),
    "zscore": ("ring", "is_full", "moments"),
    "sum": ("ring", "is_full"),
    "min": ("ring", "is_full", "extreme"),
    "max": ("ring", "is_full", "extreme"),
    "median": ("ring", "is_full", "known_median"),
    "filter_median": ("ring", "known_median"),
    "filter_mean": ("ring",),
    "weigh": ("ring",),
    "//": ("modulo",),
    "%": ("modulo",),
}
"""Functions of the template that others call"""
RING = 2
"""Numbers of a ring beside its values"""


@dataclass
class Statements:
    """The statements of the steps, the numbers that they keep, and what they call."""

    lines: list[str] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    arrays: list[tuple[str, tuple[str, int]]] = field(default_factory=list)
    num_state: int = 0
    num_variables: int = 0

    def assign(self, expression: str) -> str:
        """Add a statement and return the name of its result."""
        name = f"v{self.num_variables}"
        self.num_variables += 1
        self.lines.append(f"const double {name} = {expression};")
        return name

    def call(self, function: str) -> None:
        self.functions |= {function, *NEEDS.get(function, ())}

    def allocate(self, count: int) -> str:
        """Return where so many numbers of the state begin."""
        begin = self.num_state
        self.num_state += count
        return f"s + {begin}"

    def add_array(self, values: Sequence[float]) -> str:
        name = f"filter{len(self.arrays)}"
        self.arrays.append((name, (format_list(values, double=True), len(values))))
        return name

    def apply_ring(self, function: str, template: str, x: str, rows: int) -> str:
        """Call a function that keeps the last rows."""
        self.call(function)
        state = self.allocate(RING + rows)
        return self.assign(template.format(state=state, rows=rows, x=x))

    def apply_low_pass(self, sections: Floats, x: str) -> str:
        """Apply second-order sections b0, b1, b2, 1, a1, a2."""
        self.call("low_pass")
        name = self.add_array(np.delete(sections, 3, axis=1).ravel().tolist())
        state = self.allocate(3 + 2 * len(sections))
        return self.assign(f"low_pass({state}, {len(sections)}, {name}, {x})")


def write_formula(formula: Formula, columns: Mapping[str, str], to: Statements) -> str:
    """Add the statements of a formula and return the variable of its value; what is not finite is
    missing."""
    value = _write(formula.root, columns, to)
    return to.assign(f"isfinite({value}) ? {value} : NAN")


def _write(node: Node, columns: Mapping[str, str], to: Statements) -> str:
    if isinstance(node, Number):
        return to.assign(format_double(node.value))
    if isinstance(node, ColumnName):
        return columns[node.name]
    values = [_write(one, columns, to) for one in node.arguments]
    return _OTHERS.get(node.name, _write_simple)(node, values, to)


def _write_simple(node: Operation, values: list[str], to: Statements) -> str:
    to.call(node.name)
    return to.assign(SIMPLE[node.name].format(*values))


def _write_window(node: Operation, values: list[str], to: Statements) -> str:
    assert node.rows is not None
    if node.rows == 0:  # of lag and diff
        return values[0] if node.name == "lag" else to.assign(f"{values[0]} - {values[0]}")
    return to.apply_ring(node.name, WINDOWS[node.name], values[0], node.rows)


def _write_ema(node: Operation, values: list[str], to: Statements) -> str:
    rows = node.rows
    sections = filters.design_sections(kind="ema", rows=rows, cutoff_hz=None, order=1, step_s=None)
    return to.apply_low_pass(sections, values[0])


def _write_cumsum(_: Operation, values: list[str], to: Statements) -> str:
    to.call("cumsum")
    return to.assign(f"accumulate({to.allocate(1)}, {values[0]})")


def _write_clip(_: Operation, values: list[str], to: Statements) -> str:
    value, low, high = values
    lower = to.assign(SIMPLE["maximum"].format(value, low))
    return to.assign(SIMPLE["minimum"].format(lower, high))


_OTHERS: dict[str, Callable[[Operation, list[str], Statements], str]] = {
    **dict.fromkeys(WINDOWS, _write_window),
    "ema": _write_ema,
    "cumsum": _write_cumsum,
    "clip": _write_clip,
}
