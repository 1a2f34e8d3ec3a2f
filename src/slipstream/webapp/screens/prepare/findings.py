"""What `slipstream inspect` says about a draft's data: read once, while the file stays as it is."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream.config import SIMULATED, Config
from slipstream.config.data import find_matches
from slipstream.errors import UserError
from slipstream.webapp import paths
from slipstream.webapp.screens import new_run
from slipstream.webapp.screens.prepare.draft import Draft
from slipstream.webapp.screens.prepare.roles import Column
from slipstream.webapp.workspace import Workspace

Findings = dict[str, Any]
MOST_FINDINGS = 16
_known: OrderedDict[tuple[Any, ...], Findings] = OrderedDict()
"""The last ones, by the file, its time and size, and how it is read"""


async def find(workspace: Workspace, draft: Draft) -> Findings:
    """Return what is known of the data that a draft names."""
    from slipstream.inspection.api import READING  # pyarrow takes a while to import

    name = draft.get("data.path")
    if "\n" in name:
        raise UserError("this page takes one file, folder or pattern; data.path lists several")
    overrides = [
        f"data.{key}={draft.get(f'data.{key}')}" for key in READING if draft.get(f"data.{key}")
    ]
    key = (workspace.folder, name, *overrides, _read_state(workspace, name))
    if key not in _known:
        _known[key] = await new_run.read_findings(workspace, name, overrides)
        while len(_known) > MOST_FINDINGS:
            _known.popitem(last=False)
    return _known[key]


def _read_state(workspace: Workspace, name: str) -> tuple[tuple[str, int, int], ...]:
    """Return what changes when a file does: names, times and sizes."""
    if name.startswith(SIMULATED):
        return ()
    path = paths.resolve_below(workspace.folder, name)
    files = [path]
    if path.is_dir():
        files = [path / one for one in paths.list_tables(path)]
    elif not path.exists():
        files = find_matches(path)[1]
    return tuple(_describe(file) for file in files)


def _describe(file: Path) -> tuple[str, int, int]:
    try:
        facts = file.stat()
    except OSError:
        return str(file), 0, 0
    return str(file), facts.st_mtime_ns, facts.st_size


def list_columns(findings: Findings) -> list[Column]:
    """Return the columns of the file."""
    return [Column(one["name"], one["type"], one) for one in findings["columns"]]


def get_proposal(findings: Findings) -> Config:
    """Return the config that `slipstream inspect` proposes."""
    return Config.model_validate(configs.from_json_values(findings["config"]))
