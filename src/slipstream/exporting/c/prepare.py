"""The steps of `data.prepare` in C, as `data/prepare/steps` writes them: row by row.

`prepare_in_c` puts the statements of all steps that a model needs into the values of the template
`prepare.c.j2`, or says which steps C cannot carry out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.base.errors import Option, UserError
from slipstream.data.prepare.c_code import Statements
from slipstream.data.prepare.chain import StepPlan, plan_steps, select_steps
from slipstream.data.prepare.steps import Padding, Step, StepInputs
from slipstream.inference.portable import PortableModel


@dataclass(frozen=True)
class PreparedColumns:
    """The steps before a model, in C."""

    columns: tuple[str, ...]
    """The columns of the rows before `data.prepare`"""
    steps: tuple[Step[Any], ...]
    num_state: int
    num_constants: int
    pad_rows: int
    """How many copies of the first row come before it"""
    values: dict[str, Any]
    """The variables of the template"""


def prepare_in_c(model: PortableModel, name: str) -> PreparedColumns:
    """Return the steps that a model's inputs come from; refuse those that C cannot carry out."""
    plan = plan_needed_steps(model)
    problems = list(explain_refusals(model, plan))
    if problems:
        raise UserError(
            f"{'; '.join(problems)}: C code cannot do this row by row; pass "
            + Option("after-prepare", True)
            + ", and give the code rows as they are after all steps"
        )
    return _write_steps(model, plan, name)


def plan_needed_steps(model: PortableModel) -> StepPlan:
    """Return the steps that the model's inputs and static columns come from."""
    signature = model.signature
    return select_steps(plan_steps(model.config.data), (*signature.inputs, *signature.static))


def explain_refusals(model: PortableModel, plan: StepPlan) -> Iterator[str]:
    """Yield a reason for each step that C cannot carry out."""
    signature = model.signature
    # without their tables, the plan does not know which columns come from a join
    for step in plan_steps(model.config.data).steps:
        if step.reads_table:
            yield f"{step.where} {step.explain_no_c()}"
    outside = dict.fromkeys(signature.static, "a static column")
    outside |= dict.fromkeys(signature.future, "known ahead")
    for step in plan.steps:
        names = [name for name in step.writes if name in outside]
        reason = step.explain_no_c()
        if reason is not None:
            yield f"{step.where} {reason}"
        elif names:
            yield f'{step.where} makes "{names[0]}", which is {outside[names[0]]}'


def _write_steps(model: PortableModel, plan: StepPlan, name: str) -> PreparedColumns:
    signature = model.signature
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
    }
    num_constants = sum(count for _, (_, count) in code.arrays)
    num_state = max(code.num_state, 1)  # an array in C has at least one element
    return PreparedColumns(columns, plan.steps, num_state, num_constants, pad_rows, values)
