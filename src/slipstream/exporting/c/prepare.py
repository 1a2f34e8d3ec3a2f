"""The steps of `data.prepare` in C: those that need past rows only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
from slipstream.data.prepare.chain.plan import PlannedStep, StepPlan, plan_steps, select_steps
from slipstream.data.prepare.chain.replay import Limits
from slipstream.errors import UserError
from slipstream.exporting.c.arrays import format_double
from slipstream.exporting.c.formulas import Statements, write_formula
from slipstream.portable.model import PortableModel


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
