"""The steps of `data.prepare` in C: those that need past rows only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.base.errors import UserError
from slipstream.config.prepare import (
    ClipStep,
    FilterStep,
    JoinStep,
    OutliersStep,
    PadStep,
    UnitStep,
    name_step,
)
from slipstream.data.prepare import filters
from slipstream.data.prepare.chain import Limits, PlannedStep, StepPlan, plan_steps, select_steps
from slipstream.data.prepare.filters import Floats
from slipstream.data.prepare.formulas import ColumnName, Formula, Node, Number, Operation
from slipstream.inference.portable import PortableModel
from slipstream.models.c_code import format_double, format_list

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


@dataclass(frozen=True)
class PreparedColumns:
    """The steps before a model, in C."""

    columns: tuple[str, ...]
    """Of the rows that come in"""
    steps: tuple[PlannedStep, ...]
    num_state: int
    num_constants: int
    pad_rows: int
    """How often the first row is repeated before it"""
    values: dict[str, Any]
    """What the template names"""


def prepare_in_c(model: PortableModel, name: str) -> PreparedColumns:
    """Return the steps that a model's inputs come from; refuse those that C cannot carry out."""
    plan = plan_needed_steps(model)
    problems = list(explain_refusals(model, plan))
    if problems:
        raise UserError(
            f"{'; '.join(problems)}: C code cannot do this row by row; pass --after-prepare, and "
            "give the code rows as they are after all steps"
        )
    return _write_steps(model, plan, name)


def plan_needed_steps(model: PortableModel) -> StepPlan:
    """Return the steps that the model's inputs and static columns come from."""
    signature = model.signature
    return select_steps(plan_steps(model.config.data), (*signature.inputs, *signature.static))


def explain_refusals(model: PortableModel, plan: StepPlan) -> Iterator[str]:
    """Say of every step that C cannot carry out why."""
    signature = model.signature
    for number, config in enumerate(model.config.data.prepare, start=1):
        if isinstance(config, JoinStep):
            yield f"{name_step(number, config)} reads another table"
    outside = dict.fromkeys(signature.static, "a static column")
    outside |= dict.fromkeys(signature.future, "known ahead")
    for step in plan.steps:
        config = step.config
        names = [one for one in step.writes if one in outside]
        if config.step == "resample":
            yield f"{step.where} makes rows at other times"
        elif config.step == "calendar" or (step.formula is not None and step.formula.needs_times):
            yield f"{step.where} needs the time of each row"
        elif step.look_ahead:
            yield f"{step.where} looks ahead"
        elif names:
            yield f'{step.where} makes "{names[0]}", which is {outside[names[0]]}'


def _write_steps(model: PortableModel, plan: StepPlan, name: str) -> PreparedColumns:
    signature = model.signature
    written = {column for step in plan.steps for column in step.writes}
    sources = plan.list_sources()
    own = (one for one in signature.inputs if one not in written or one in sources)
    columns = tuple(dict.fromkeys((*own, *sources)))
    to = Statements()
    env = {
        column: to.assign(f"isinf(row[{i}]) ? NAN : (double)row[{i}]")
        for i, column in enumerate(columns)
    }
    before: list[str] = []
    pad_rows, pad_columns, zero = 0, 0, False
    for step in plan.steps:
        if isinstance(step.config, PadStep):
            pad_rows = step.config.rows or signature.context - 1
            pad_columns = len(env)
            before, to.lines = to.lines, []
            for i, column in enumerate(env):
                before.append(f"columns[{i}] = {env[column]};")
                env[column] = to.assign(f"columns[{i}]")
            zero = step.config.value == "zero"
            continue
        env |= _write_step(step, env, to, model)
    for i, column in enumerate(signature.inputs):
        to.lines.append(f"prepared[{i}] = ({name}_value){env[column]};")
    values = {
        "uses": to.functions.__contains__,
        "prepare_arrays": to.arrays,
        "before_lines": before,
        "after_lines": to.lines,
        "pad_rows": pad_rows,
        "pad_columns": pad_columns,
        "pad_zero": zero,
    }
    num_constants = sum(count for _, (_, count) in to.arrays)
    num_state = max(to.num_state, 1)  # an array has to have something
    return PreparedColumns(columns, plan.steps, num_state, num_constants, pad_rows, values)


def _write_step(
    step: PlannedStep, env: dict[str, str], to: Statements, model: PortableModel
) -> dict[str, str]:
    """Add a step's statements; return the variables of the columns that it writes."""
    match step.config:
        case UnitStep(columns=names, factor=factor, offset=offset):
            return {
                one: to.assign(f"{env[one]} * {format_double(factor)} + {format_double(offset)}")
                for one in names
            }
        case ClipStep(columns=names, low=low, high=high):
            return {one: _limit(env[one], low, high, to) for one in names}
        case OutliersStep(columns=names, action=action):
            limits: Limits = model.limits.get(str(step.number), {})
            restrict = _limit if action == "clip" else _drop
            return {one: restrict(env[one], *limits[one], to) for one in names if one in limits}
        case FilterStep() as config:
            pairs = zip(config.columns, config.outputs, strict=True)
            return {
                output: _filter(config, env[one], model.signature.step, to) for one, output in pairs
            }
    assert step.formula is not None
    return {step.writes[0]: write_formula(step.formula, env, to)}


def _limit(x: str, low: float | None, high: float | None, to: Statements) -> str:
    if low is not None:
        edge = format_double(low)
        x = to.assign(f"{x} < {edge} ? {edge} : {x}")
    if high is not None:
        edge = format_double(high)
        x = to.assign(f"{x} > {edge} ? {edge} : {x}")
    return x


def _drop(x: str, low: float, high: float, to: Statements) -> str:
    return to.assign(f"{x} < {format_double(low)} || {x} > {format_double(high)} ? NAN : {x}")


def _filter(config: FilterStep, x: str, step_s: float | None, to: Statements) -> str:
    order = config.order or filters.DEFAULT_ORDER
    rows, cutoff_hz = config.rows, config.cutoff_hz
    if config.kind in ("ema", "butterworth"):
        sections = filters.design_sections(
            kind=config.kind, rows=rows, cutoff_hz=cutoff_hz, order=order, step_s=step_s
        )
        return to.apply_low_pass(sections, x)
    assert rows is not None
    if config.kind == "savgol":
        weights = to.add_array(filters.design_savgol(rows, order).tolist())
        return to.apply_ring("weigh", f"weigh({{state}}, {{rows}}, {weights}, {{x}})", x, rows)
    kind = "filter_median" if config.kind == "median" else "filter_mean"
    return to.apply_ring(kind, f"{kind}({{state}}, {{rows}}, {{x}})", x, rows)
