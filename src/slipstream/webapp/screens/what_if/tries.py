"""Tries of one base config: runs in `FOLDER/what-if/NAME`, beside `base.toml`.

A try is `slipstream train base.toml --set ...` as a job. The history is what the folder holds, so
it survives the server, and the command line can read it: `slipstream runs what-if/NAME`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import runs
from slipstream.catalog.listing import format_against
from slipstream.catalog.rows import looks_like_run, make_row, read_files
from slipstream.catalog.scores import rank
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.reporting.formatting import format_metric
from slipstream.runs import write_text
from slipstream.webapp import paths, settings
from slipstream.webapp.jobs.store import OPEN, AppJob
from slipstream.webapp.jobs.supervisor import choose_queue, stop_job
from slipstream.webapp.paths import clean_run_name
from slipstream.webapp.screens.new_run import format_job
from slipstream.webapp.screens.what_if.sliders import BUDGET, list_options, read_setting
from slipstream.webapp.workspace import Workspace

FOLDER = "what-if"
BASE = "base.toml"
SESSION = "what_if"
"""The key of a job's `extra` that has the name of its session"""
MOST_NAME = 40
SESSION_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
History = list[dict[str, Any]]
_read: dict[Path, tuple[int, dict[str, Any]]] = {}
"""Finished tries, with the time of their metrics"""
_lock = threading.Lock()


def create_session(workspace: Workspace, base: Config) -> str:
    """Write a base config into a folder for its tries, and return the folder's name; the same
    settings have the same folder."""
    settings.refuse_unsafe(workspace, base)
    if not base.data.paths:
        raise UserError("there are no data in these settings; start from a run or a data file")
    text = format_job(base)
    name = clean_run_name(base.name)[:MOST_NAME].strip("._-") or "base"
    session = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    folder = workspace.folder / FOLDER / session
    if not (folder / BASE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / BASE, text)
    return session


def find_session(workspace: Workspace, session: str) -> Path:
    """Return the folder of a session."""
    missing = paths.MissingError("there is no such what-if; it may have been removed")
    if not SESSION_NAME.fullmatch(session):
        raise missing
    folder = paths.resolve_below(workspace.folder, f"{FOLDER}/{session}")
    if not (folder / BASE).is_file():
        raise missing
    return folder


def list_sessions(workspace: Workspace) -> list[dict[str, Any]]:
    """Return the sessions of the folder, the latest first, with the number of their tries."""
    sessions = []
    with suppress(OSError):
        for folder in (workspace.folder / FOLDER).iterdir():
            if folder.name[0] != "." and (folder / BASE).is_file():
                folders = [one for one in folder.iterdir() if (one / "metrics.json").is_file()]
                at = folder.stat().st_mtime
                sessions.append({"name": folder.name, "tries": len(folders), "at": at})
    return sorted(sessions, key=lambda one: one["at"], reverse=True)


def load_base(workspace: Workspace, session: str) -> Config:
    """Return the base config of a session."""
    base = configs.load(find_session(workspace, session) / BASE)
    settings.refuse_unsafe(workspace, base)
    return base


def build_command(workspace: Workspace, session: str, options: Sequence[str]) -> list[str]:
    """Return the command of a try; its paths are relative to the folder of the app."""
    place = f"{FOLDER}/{session}"
    command = ["train", f"{place}/{BASE}", "--out", place]
    for option in options:
        command += ["--set", str(option)]
    return command + (["--allow-code"] if workspace.allow_code else [])


def submit_try(workspace: Workspace, session: str, values: Any) -> dict[str, Any]:
    """Stop the try that trains, if any, and put another into the queue; return its job, or the
    finished try that had the same settings."""
    base = load_base(workspace, session)
    options = list_options(base, values)
    config = configs.load(base, options)
    settings.refuse_unsafe(workspace, config)
    stop_tries(workspace, session)
    remove_stopped(workspace, session)
    wanted = {name: read_setting(config, name) for name in values}
    for one in list_tries(workspace, session, list(values)):
        if one["values"] == wanted:
            return {"run": one["run"]}
    store = workspace.store
    job, _ = store.create_folder()
    store.submit(
        job,
        [*build_command(workspace, session, options), "--json", "--quiet"],
        device=choose_queue(config.engine.device),
        name=f"what-if {base.name}",
        extra={"out": str(workspace.folder / FOLDER / session), SESSION: session, "values": values},
    )
    workspace.supervisor.start_workers()
    return {"job": job}


def list_jobs(workspace: Workspace, session: str) -> list[AppJob]:
    """Return the recent jobs of a session, the newest first."""
    recent = workspace.store.list_recent()
    return [job for job in recent if job.extra.get(SESSION) == session]


def stop_tries(workspace: Workspace, session: str) -> None:
    """Stop the tries of a session that wait or train."""
    for job in list_jobs(workspace, session):
        if job.state in OPEN:
            stop_job(workspace.store, job.id)


def remove_stopped(workspace: Workspace, session: str) -> None:
    """Remove what is left of tries that were stopped before they had a result."""
    for job in list_jobs(workspace, session):
        folder = workspace.folder / (job.run or "")
        is_ours = job.run is not None and folder.parent.name == session
        if job.state in OPEN or not is_ours or (folder / "metrics.json").exists():
            continue
        with suppress(UserError, OSError):
            if looks_like_run(folder) and not runs.find_holder(folder):
                shutil.rmtree(folder)


def list_tries(workspace: Workspace, session: str, names: Sequence[str]) -> History:
    """Return the finished tries, the oldest first, with their values of some settings."""
    folder = find_session(workspace, session)
    tries = []
    for one in sorted(folder.iterdir()):
        with suppress(OSError, LookupError, TypeError, ValueError):
            if looks_like_run(one) and (read := _read_try(workspace, one)):
                values = {name: read_setting(read["config"], name) for name in names}
                entry = {key: value for key, value in read.items() if key != "config"}
                tries.append(entry | {"values": values})
    scores = [rank(one["val"], one["metric"]) for one in tries]
    if scores:
        tries[scores.index(min(scores))]["is_best"] = True
    return tries


def _read_try(workspace: Workspace, folder: Path) -> dict[str, Any] | None:
    """Return what the history shows of a try; None where it has no result yet."""
    try:
        at = (folder / "metrics.json").stat().st_mtime_ns
    except OSError:
        return None
    with _lock:
        if (known := _read.get(folder)) and known[0] == at:
            return known[1]
    files = read_files(folder)
    row, summary = make_row(files), files.summary
    if summary is None or files.damage:
        return None
    result = {
        "run": str(folder.relative_to(workspace.folder)),
        "metric": row.metric or "",
        "metric_name": format_metric(row.metric) if row.metric else "",
        "val": row.val,
        "test": row.test,
        "baseline": row.baseline,
        "baseline_error": row.baseline_error,
        "against": format_against(row) if row.against_baseline is not None else "",
        "seconds": row.seconds,
        "parameters": summary.get("parameters"),
        "test_windows": (summary.get("windows") or {}).get("test"),
        "is_cut": "train.minutes" in str(summary.get("stopped", "")),
        "at": row.at.timestamp(),
        "config": files.config,
    }
    with _lock:
        _read[folder] = (at, result)
    return result


def write_config(workspace: Workspace, session: str, values: Any) -> str:
    """Write the base with a try's values, but the base's own length of training, for a new run;
    return its path below the folder."""
    base = load_base(workspace, session)
    if not isinstance(values, dict):
        raise UserError("values: expected an object")
    own = {name: read_setting(base, name) for name in BUDGET if name in values}
    options = [one for one in list_options(base, values | own) if not _is_fixed(one)]
    config = configs.load(base, options)
    text = format_job(config)
    name = f"{session}-{hashlib.sha256(text.encode()).hexdigest()[:6]}.toml"
    path = workspace.store.root / FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return str(path.relative_to(workspace.folder))


def _is_fixed(option: str) -> bool:
    return option.partition("=")[0] in ("train.minutes", "train.repeats", "name")
