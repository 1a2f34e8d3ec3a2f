"""The steps of a draft: the columns that they make, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slipstream.config import Config, Data
from slipstream.config.prepare import JoinStep, LabelStep, parse_steps
from slipstream.errors import UserError
from slipstream.webapp.screens.prepare.draft import Draft, Texts, parse_step_values
from slipstream.webapp.screens.prepare.roles import Column
from slipstream.webapp.workspace import Workspace

NUMBER = re.compile(r"data\.prepare, step (\d+)")


def find_number(message: str) -> int | None:
    """Return the number of the step that a message is about."""
    match = NUMBER.search(message)
    return int(match[1]) if match else None


def list_created(workspace: Workspace, draft: Draft, present: Sequence[Column]) -> list[Column]:
    """Return the columns that steps make and the file does not have; steps that are not complete
    yet make none."""
    names = {column.name for column in present}
    created = []
    for number, step in enumerate(draft.steps, start=1):
        for name, kind in _list_outputs(workspace, draft, step):
            if name not in names:
                names.add(name)
                created.append(Column(name, kind, {}, number))
    return created


def _list_outputs(workspace: Workspace, draft: Draft, step: Texts) -> list[tuple[str, str]]:
    from slipstream.data.prepare.chain.joined import read_joins
    from slipstream.data.prepare.chain.plan import plan_steps
    from slipstream.webapp.screens.prepare.preview import refuse_large_joins
    from slipstream.webapp.settings import JOINED, NamedPath, refuse_path

    try:
        (parsed,) = parse_steps([parse_step_values(workspace, step)])
        time = tuple(draft.get_names("data.time")) or ("time",)
        data = Data().model_copy(update={"prepare": (parsed,), "time": time})
        joined = {}
        if isinstance(parsed, JoinStep):
            refuse_path(workspace, NamedPath(JOINED, parsed.path))
            refuse_large_joins([parsed])
            joined = {n: join.column_names for n, join in read_joins(data, {}).items()}
        writes = plan_steps(data, joined).written
    except (UserError, ValueError, OSError):
        return []
    kind = "text" if isinstance(parsed, LabelStep) else "number"
    return [(name, kind) for name in writes]


def check_steps(config: Config, columns: Sequence[Column]) -> str:
    """Return what is wrong with the steps of a config, beyond what the config says; "" for
    nothing. `columns` are those of the file."""
    if not config.data.prepare:
        return ""
    from slipstream.data.io.table import DataTable, MemoryReader
    from slipstream.data.prepare.chain.tables import PrepareChain, check_columns
    from slipstream.webapp.screens.prepare.preview import refuse_large_joins

    joined = [config.data.time_column] if config.data.time_column else []
    names = tuple(dict.fromkeys([*(one.name for one in columns if one.made_by is None), *joined]))
    try:
        refuse_large_joins(config.data.prepare)
        chain = PrepareChain(config.data.model_copy(update={"inputs": None}))
        check_columns(chain.plan, DataTable("the file", names, 1, MemoryReader({}), ()))
    except UserError as error:
        return str(error)
    return ""
