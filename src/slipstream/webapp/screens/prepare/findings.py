"""What is known of the data that a form or a draft names: what `slipstream inspect` finds, and
whether a config can be trained on them. Each is found out once, while the files stay as they are.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream.config import SIMULATED, Config
from slipstream.config.data import find_matches
from slipstream.errors import UserError
from slipstream.runs import to_json
from slipstream.webapp import paths, settings
from slipstream.webapp.screens.prepare.draft import Draft
from slipstream.webapp.screens.prepare.roles import Column
from slipstream.webapp.workspace import Workspace

Findings = dict[str, Any]
INSPECT_S = 120.0
"""How long a look into a file may take"""
MOST_FINDINGS = 16
CHECKED_TRAIN = {"objective", "loss", "quantiles", "repeats"}
"""Settings of `[train]` on which it depends whether the data can be trained on"""
_known: OrderedDict[tuple[Any, ...], Findings] = OrderedDict()
"""The last ones, by the file, its time and size, and how it is read"""
_checked: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()
"""The last answers of `check_ready`, by the settings that matter and the state of the files"""


async def find(workspace: Workspace, draft: Draft) -> Findings:
    """Return what is known of the data that a draft names."""
    name = draft.get("data.path")
    if "\n" in name:
        raise UserError("this page takes one file, folder or pattern; data.path lists several")
    return await find_file(workspace, name, list_reading(draft))


def list_reading(draft: Draft) -> list[str]:
    """Return the settings that say how the files are read, as `--set` takes them."""
    from slipstream.inspection.api import READING  # pyarrow takes a while to import

    texts = {f"data.{key}": draft.get(f"data.{key}") for key in READING}
    return [f"{setting}={text}" for setting, text in texts.items() if text]


async def find_file(workspace: Workspace, name: str, overrides: Sequence[str] = ()) -> Findings:
    """Return what `slipstream inspect` says about a file; `overrides` say how it is read."""
    key = (workspace.folder, name, *overrides, _read_state(workspace, name))
    if key not in _known:
        _known[key] = await _inspect(workspace, name, overrides)
        while len(_known) > MOST_FINDINGS:
            _known.popitem(last=False)
    if "error" in _known[key]:
        raise UserError(str(_known[key]["error"]).replace(f"{workspace.folder}/", ""))
    return _known[key]


async def _inspect(workspace: Workspace, name: str, overrides: Sequence[str]) -> Findings:
    """Run `slipstream inspect` in a process of its own, since a file may be large; return what it
    prints, also its message where a file cannot be read."""
    path = name
    if not name.startswith(SIMULATED):
        path = str(paths.resolve_below(workspace.folder, name))
        if not name or not (Path(path).exists() or find_matches(Path(path))[1]):
            raise paths.MissingError(f"{name}: there is no such file")
    options = [word for one in overrides for word in ("--set", one)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "slipstream", "inspect", path, "--json", *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(INSPECT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise UserError(f"{name}: reading it took more than {INSPECT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        findings: dict[str, Any] = json.loads(output)
    except ValueError:
        raise UserError("the file could not be read") from None
    return findings


def _read_state(workspace: Workspace, name: str) -> tuple[tuple[str, int, int], ...]:
    """Return what changes when a file does: names, times and sizes."""
    if name.startswith(SIMULATED):
        return ()
    path = paths.resolve_below(workspace.folder, name)
    settings.refuse_path(workspace, settings.NamedPath("data.path", name))
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


async def check_ready(workspace: Workspace, config: Config) -> dict[str, Any]:
    """Return the rows and windows that a run of a config would have, as `readiness.check_data`
    does; a UserError says why it could not be trained. The code is that of training."""
    names = [*config.data.paths, config.data.labels or ""]
    names += [str(getattr(step, "path", "")) for step in config.data.prepare]
    states = [_read_state(workspace, name) for name in filter(None, names)]
    matters = {
        "data": config.data.model_dump(),
        "train": config.train.model_dump(include=CHECKED_TRAIN),
        "jitter": config.augment.model_dump(include={"jitter"}),
    }
    key = (workspace.folder, to_json(configs.to_json_values(matters)), *states)
    if key not in _checked:
        _checked[key] = await _check(workspace, config)
        while len(_checked) > MOST_FINDINGS:
            _checked.popitem(last=False)
    answer = _checked[key]
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


async def _check(workspace: Workspace, config: Config) -> dict[str, Any]:
    try:
        return await workspace.tables.check(config)
    except UserError as error:
        return {"error": str(error).replace(f"{workspace.folder}/", "")}
