"""The steps of `data.prepare` in C, as `data/prepare/steps` writes them: row by row.

`prepare_in_c` puts the statements of all steps that a model needs into the values of the template
`prepare.c.j2`, or says which steps C cannot carry out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.base.errors import Option, UserError
from slipstream.base.text import format_c_double
from slipstream.data.prepare.c_code import Statements
from slipstream.data.prepare.chain import StepPlan, plan_steps, select_steps
from slipstream.data.prepare.resampling import CONSTANT, ROUNDING, get_lengths
from slipstream.data.prepare.rows import split_steps
from slipstream.data.prepare.steps import Padding, Resampling, Step, StepInputs
from slipstream.inference.portable import PortableModel


@dataclass(frozen=True)
class PreparedColumns:
    """The steps before a model, in C."""

    columns: tuple[str, ...]
    """The columns of the rows that come in"""
    given: tuple[Step[Any], ...]
    """The steps that the caller carries out before"""
    steps: tuple[Step[Any], ...]
    num_state: int
    num_constants: int
    pad_rows: int
    """How many copies of the first row come before it"""
    values: dict[str, Any]
    """The variables of the template"""
    resampling: Resampling | None = None
    """The first step, where it resamples: rows then come with their times"""


def prepare_in_c(
    model: PortableModel, name: str, *, after: str | None = None, has_dates: bool = False
) -> PreparedColumns:
    """Return the steps that a model's inputs come from; refuse those that C cannot carry out.

    Steps up to the one named `after` are left to the caller. `has_dates` is whether times are dates
    and not plain numbers, which matters where rows are resampled.
    """
    plan = plan_needed_steps(model)
    given = () if after is None else find_given_steps(model, after)
    last = given[-1].number if given else 0
    plan = replace(plan, steps=tuple(step for step in plan.steps if step.number > last))
    problems = list(explain_refusals(model, plan, after=last))
    if problems:
        fix = Option("after-prepare", True) + ", and give the code rows as they are after all steps"
        _, resampling, rest = split_steps(plan)
        later = replace(plan, steps=rest)
        if resampling is not None and not any(
            explain_refusals(model, later, after=resampling.number)
        ):
            fix = Option("after-prepare", "resample") + ", and give the code resampled rows"
        raise UserError(f"{'; '.join(problems)}: C code cannot do this row by row; pass " + fix)
    return _write_steps(model, plan, name, given, has_dates)


def find_given_steps(model: PortableModel, after: str) -> tuple[Step[Any], ...]:
    """Return the steps up to the last one of a kind, which the caller carries out."""
    steps = plan_steps(model.config.data).steps
    kinds = [step.config.step for step in steps]
    if after not in kinds:
        raise UserError(
            Option("after-prepare", after)
            + f": data.prepare has no such step; it has {', '.join(dict.fromkeys(kinds))}"
        )
    given = steps[: len(kinds) - kinds[::-1].index(after)]
    for step in given:
        if step.reads_table or isinstance(step, Padding):
            raise UserError(
                Option("after-prepare", after)
                + f": {step.where} cannot be left to the caller alone; pass "
                + Option("after-prepare", True)
            )
    return given


def plan_needed_steps(model: PortableModel) -> StepPlan:
    """Return the steps that the model's inputs and static columns come from."""
    signature = model.signature
    return select_steps(plan_steps(model.config.data), (*signature.inputs, *signature.static))


def explain_refusals(model: PortableModel, plan: StepPlan, *, after: int = 0) -> Iterator[str]:
    """Yield a reason for each step that C cannot carry out, of those after a number."""
    signature, data = model.signature, model.config.data
    # without their tables, the plan does not know which columns come from a join
    for step in plan_steps(data).steps:
        if step.reads_table and step.number > after:
            yield f"{step.where} {step.explain_no_c()}"
    outside = dict.fromkeys(signature.static, "a static column")
    outside |= dict.fromkeys(signature.future, "known ahead")
    for step in plan.steps:
        names = [name for name in step.writes if name in outside]
        reason = step.explain_no_c()
        if isinstance(step, Resampling) and reason is None:
            if step is not plan.steps[0]:
                reason = "comes after other steps; put it first"
            elif signature.future_shape[0]:
                reason = "makes other rows than those that data.future is passed for"
            elif data.duplicates in ("last", "mean"):
                reason = f'comes after data.duplicates = "{data.duplicates}"'
        if reason is not None:
            yield f"{step.where} {reason}"
        elif names:
            yield f'{step.where} makes "{names[0]}", which is {outside[names[0]]}'


def _write_steps(
    model: PortableModel,
    plan: StepPlan,
    name: str,
    given: tuple[Step[Any], ...],
    has_dates: bool,
) -> PreparedColumns:
    signature = model.signature
    resampling = next((step for step in plan.steps if isinstance(step, Resampling)), None)
    sources = plan.list_sources()
    direct = (n for n in signature.inputs if n not in plan.written or n in sources)
    columns = tuple(dict.fromkeys((*direct, *sources)))
    code = Statements()
    variables = {
        column: code.assign(f"isinf(row[{i}]) ? NAN : (double)row[{i}]")
        for i, column in enumerate(columns)
    }
    before: list[str] = []
    pad_rows, pad_columns, is_zero = 0, 0, False
    for step in plan.steps:
        if isinstance(step, Resampling):
            continue  # it comes first, and makes the rows that the statements read
        if isinstance(step, Padding):
            # the statements so far make the first row, which those that follow see several times
            pad_rows, pad_columns = step.count_rows(signature.context), len(variables)
            before, code.lines = code.lines, []
            for i, column in enumerate(variables):
                before.append(f"columns[{i}] = {variables[column]};")
                variables[column] = code.assign(f"columns[{i}]")
            is_zero = step.is_zero
        else:
            limits = model.limits.get(str(step.number))
            inputs = StepInputs(signature.context, limits, step_s=signature.step)
            variables |= step.write_c(variables, code, inputs)
    for i, column in enumerate(signature.inputs):
        code.lines.append(f"prepared[{i}] = ({name}_value){variables[column]};")
    values = {
        "uses": code.functions.__contains__,
        "prepare_arrays": code.arrays,
        "before_lines": before,
        "after_lines": code.lines,
        "pad_rows": pad_rows,
        "pad_columns": pad_columns,
        "pad_zero": is_zero,
        "resample": None if resampling is None else _list_lengths(model, resampling, has_dates),
    }
    num_constants = sum(count for _, (_, count) in code.arrays)
    num_state = max(code.num_state, 1)  # an array in C has at least one element
    return PreparedColumns(
        columns=columns,
        given=given,
        steps=plan.steps,
        num_state=num_state,
        num_constants=num_constants,
        pad_rows=pad_rows,
        values=values,
        resampling=resampling,
    )


def _list_lengths(model: PortableModel, step: Resampling, has_dates: bool) -> dict[str, Any]:
    """Return the lengths of a resampling in C, in microseconds or the unit of the times."""
    times = np.empty(0, dtype=np.int64 if has_dates else np.float64)
    every, limit = get_lengths(times, step.config.every, step.config.limit)
    data = model.config.data
    return {
        "mean": step.config.method == "mean",
        "dates": has_dates,
        "every": f"INT64_C({every})" if has_dates else format_c_double(every),
        "limit": f"INT64_C({limit})" if has_dates else format_c_double(limit),
        "rounding": "0" if has_dates else format_c_double(ROUNDING * every),
        "constant": format_c_double(CONSTANT),
        # how many steps apart two rows may be that follow each other
        "apart": 1 + int(min(data.gap_tolerance, 2**31 - 2)),
        "drops_repeated": data.duplicates == "first",
    }
