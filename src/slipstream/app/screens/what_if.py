"""The routes of What-if: choose a base, move sliders, look at the history."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream import config as configs
from slipstream import runs
from slipstream.app import forms, paths, settings
from slipstream.app.jobs import OPEN, AppJob, choose_queue, stop_job
from slipstream.app.pages import Screen, get_workspace, read_request, render, reply
from slipstream.app.paths import clean_run_name
from slipstream.app.screens.new_run import format_job
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.config import Config, ConfigError, OptionText
from slipstream.reporting.run_rows import looks_like_run, make_row, rank, read_files
from slipstream.reporting.runs import format_against
from slipstream.reporting.wording import format_metric
from slipstream.runs import to_json, write_text
from slipstream.runs.summary import RunSummary

KIND = "model.kind"
BUDGET = ("train.epochs",)
"""Settings that a run made from a try takes from the base instead"""
FEW_EPOCHS = 3
"""Epochs of a try at first, so that its result appears within seconds"""
TIME_LIMIT_S = 30
"""Seconds of training after which a try is cut off"""
FIXED = (f"train.minutes={TIME_LIMIT_S / 60:g}", "train.repeats=1", "name=try")
"""Options that every try has"""
STOPS: dict[str, tuple[float, ...]] = {
    "model.hidden": (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    "model.layers": (1, 2, 3, 4),
    "model.dropout": (0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5),
    "train.lr": (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05),
    "train.batch": (16, 32, 64, 128, 256, 512, 1024),
    "train.weight_decay": (0, 1e-5, 1e-4, 1e-3, 0.01, 0.1),
    "train.epochs": (1, 2, 3, 5, 8, 12, 20, 30, 50),
}
"""Positions of a slider; the base's own value is one more"""
CONTEXTS = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4)
"""Positions of the context's slider, as multiples of the base's context"""
LABELS = {"train.weight_decay": "Weight decay"}
MAX_TEXT = 40


@dataclass(frozen=True)
class Slider:
    """A setting and the positions of its slider."""

    setting: str
    label: str
    help: str
    stops: tuple[float, ...]
    value: float
    """The base's value, or the budget's where that is smaller"""


def list_sliders(base: Config) -> list[Slider]:
    """Return a slider for each setting that is a single number in the base config."""
    help_texts = {
        control.setting: (control.label, control.help) for control in forms.list_controls()
    }
    sliders = []
    for setting in ("data.context", *STOPS):
        value = read_setting(base, setting)
        if setting == "train.epochs":
            value = min(value, FEW_EPOCHS)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue  # a width for each layer, or a batch size that is measured
        label, text = help_texts[setting]
        stops = STOPS.get(setting) or _list_contexts(base)
        positions = tuple(sorted({*stops, value}))
        sliders.append(Slider(setting, LABELS.get(setting, label), text, positions, value))
    return sliders


def _list_contexts(base: Config) -> tuple[float, ...]:
    """Return contexts around the base's context, as multiples of a patch."""
    patch = base.model.patch
    rounded = (round(base.data.context * factor / patch) * patch for factor in CONTEXTS)
    return tuple(context for context in rounded if context >= patch)


def list_kinds() -> tuple[str, ...]:
    """Return the kinds of models to choose from."""
    return next(control.choices for control in forms.list_controls() if control.setting == KIND)


def read_setting(config: Config | Mapping[str, Any], setting: str) -> Any:
    """Return the value of a setting by its name."""
    value: Any = config
    for key in setting.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return value


def list_values(base: Config, sliders: list[Slider]) -> dict[str, Any]:
    """Return the initial values of a page."""
    return {KIND: base.model.kind} | {slider.setting: slider.value for slider in sliders}


def list_options(base: Config, values: Any) -> list[str]:
    """Return the options of the command that tries some values, for values that differ from the
    base."""
    if not isinstance(values, dict):
        raise UserError("values: expected an object")
    sliders = list_sliders(base)
    known = list_values(base, sliders)
    options = []
    for setting, value in known.items():
        value = values.get(setting, value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number or (setting == KIND and isinstance(value, str))):
            raise UserError(f"{setting}: expected a number")
        if setting == KIND and value != base.model.kind and value not in list_kinds():
            raise UserError(f"{setting}: expected one of {', '.join(list_kinds())}")
        if value != read_setting(base, setting):
            text = value if isinstance(value, str) else to_json(value)
            options.append(OptionText(f"{setting}={text}"))
    if unknown := values.keys() - known.keys():
        raise UserError(f"{min(unknown)[:MAX_TEXT]} has no slider here")
    return [*options, *map(OptionText, FIXED)]


FOLDER = "what-if"
BASE = "base.toml"
SESSION = "what_if"
"""The key of a job's `extra` that has the name of its session"""
MAX_NAME = 40
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
    text = format_job(_resolve_sliders(base))
    name = clean_run_name(base.name)[:MAX_NAME].strip("._-") or "base"
    session = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    folder = workspace.folder / FOLDER / session
    if not (folder / BASE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / BASE, text)
    return session


def _resolve_sliders(base: Config) -> Config:
    """Return the base with the numbers that the data decide where its settings are left out: a
    slider has to show what is trained with."""
    from slipstream.data import defaults  # numpy takes a while to import

    resolved = defaults.resolve(base, measures=False)
    values = {
        name: choice.value if (choice := resolved.choices.get(name)) else read_setting(base, name)
        for name in defaults.list_unset(base)
        if name in ("data.context", *STOPS)
    }
    return configs.replace_settings(base, values)


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
                folders = [run for run in folder.iterdir() if (run / "metrics.json").is_file()]
                changed_s = folder.stat().st_mtime
                sessions.append({"name": folder.name, "tries": len(folders), "at": changed_s})
    return sorted(sessions, key=lambda entry: entry["at"], reverse=True)


def load_base(workspace: Workspace, session: str) -> Config:
    """Return the base config of a session."""
    base = configs.load(find_session(workspace, session) / BASE)
    settings.refuse_unsafe(workspace, base)
    return base


def build_command(workspace: Workspace, session: str, options: Sequence[str]) -> list[str]:
    """Return the command of a try; its paths are relative to the folder of the app."""
    folder = f"{FOLDER}/{session}"
    command = ["train", f"{folder}/{BASE}", "--out", folder]
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
    for attempt in list_tries(workspace, session, list(values)):
        if attempt["values"] == wanted:
            return {"run": attempt["run"]}
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
    """Remove the folders of tries that were stopped before they had a result."""
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
    for run in sorted(folder.iterdir()):
        with suppress(OSError, LookupError, TypeError, ValueError):
            if looks_like_run(run) and (read := _read_try(workspace, run)):
                values = {name: read_setting(read["config"], name) for name in names}
                entry = {key: value for key, value in read.items() if key != "config"}
                tries.append(entry | {"values": values})
    scores = [rank(attempt["val"], attempt["metric"]) for attempt in tries]
    if scores:
        tries[scores.index(min(scores))]["is_best"] = True
    return tries


def _read_try(workspace: Workspace, folder: Path) -> dict[str, Any] | None:
    """Return the history's entry of a try; None where it has no result yet."""
    try:
        changed_ns = (folder / "metrics.json").stat().st_mtime_ns
    except OSError:
        return None
    with _lock:
        if (known := _read.get(folder)) and known[0] == changed_ns:
            return known[1]
    files = read_files(folder)
    row, summary = make_row(files), cast(RunSummary | None, files.summary)
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
        _read[folder] = (changed_ns, result)
    return result


def write_config(workspace: Workspace, session: str, values: Any) -> str:
    """Write the base with a try's values, but the base's own length of training, for a new run;
    return its path below the folder."""
    base = load_base(workspace, session)
    if not isinstance(values, dict):
        raise UserError("values: expected an object")
    budget = {name: read_setting(base, name) for name in BUDGET if name in values}
    options = [option for option in list_options(base, values | budget) if not _is_fixed(option)]
    config = configs.load(base, options)
    text = format_job(config)
    name = f"{session}-{hashlib.sha256(text.encode()).hexdigest()[:6]}.toml"
    path = workspace.store.root / FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return str(path.relative_to(workspace.folder))


def _is_fixed(option: str) -> bool:
    return option.partition("=")[0] in ("train.minutes", "train.repeats", "name")


MAX_RUNS = 50
"""Runs to begin with that a page lists"""


def show(request: Request) -> Response:
    """The page: the sliders of a session, or else a choice of starting points."""
    workspace = get_workspace(request)
    session = request.query_params.get("session", "")
    if not session:
        return render(
            request,
            "what_if_start.html",
            start=request.query_params.get("start", ""),
            sessions=list_sessions(workspace),
            runs=_list_runs(workspace),
            configs=[
                config for config in paths.list_configs(workspace.folder) if not _is_own(config)
            ],
            tables=paths.list_tables(workspace.folder),
        )
    base = load_base(workspace, session)
    controls = list_sliders(base)
    return render(
        request,
        "what_if.html",
        session=session,
        base=base,
        sliders=controls,
        kinds=list_kinds(),
        limit_s=TIME_LIMIT_S,
        toml=format_job(base),
        values={
            "base": list_values(base, controls),
            "sliders": [asdict(slider) for slider in controls],
        },
    )


def _is_own(config: str) -> bool:
    return config.startswith(f"{FOLDER}/")


def _list_runs(workspace: Workspace) -> list[dict[str, Any]]:
    rows = workspace.rows.list(workspace.folder, workspace.run_folders)
    return [row for row in rows if row["kind"] == "train"][:MAX_RUNS]


async def open_session(request: Request) -> Response:
    """Create the folder of a base: `start` names a run, a config or the demo, or `settings` are
    those of a form."""
    workspace = get_workspace(request)
    values = await read_request(request)
    if "settings" in values:
        checked = await run_in_threadpool(settings.check_form, workspace, values["settings"])
        if checked.config is None:
            return reply({"error": "\n".join(checked.problems.values())}, 400)
        base = checked.config
    else:
        start = str(values.get("start", ""))
        base = await run_in_threadpool(settings.load_start, workspace, start)
    return reply({"session": await run_in_threadpool(create_session, workspace, base)})


def describe(request: Request) -> Response:
    """The history of a session and the try that waits or trains, as JSON."""
    workspace = get_workspace(request)
    session = request.path_params["session"]
    base = load_base(workspace, session)
    names = list(list_values(base, list_sliders(base)))
    jobs = list_jobs(workspace, session)
    newest = jobs[0] if jobs else None
    current = None
    if newest is not None:
        current = {key: getattr(newest, key) for key in ("id", "state", "run", "position", "error")}
        current |= {"values": newest.extra.get("values"), "is_open": newest.state in OPEN}
    history = list_tries(workspace, session, names)
    for attempt in history:
        attempt["command"] = _format_command(workspace, session, base, attempt["values"])
    return reply({"tries": history, "current": current})


def _format_command(workspace: Workspace, session: str, base: Config, values: Any) -> str:
    """Return the shell command that tries some values."""
    options = list_options(base, values)
    return shlex.join(["slipstream", *build_command(workspace, session, options)])


async def start(request: Request) -> Response:
    """Try some values: return the job, a finished try with the same values, or the mistakes."""
    workspace = get_workspace(request)
    session = request.path_params["session"]
    values = (await read_request(request)).get("values")
    try:
        result = await run_in_threadpool(submit_try, workspace, session, values)
    except ConfigError as error:
        problems = {".".join(problem.path): str(problem.message) for problem in error.problems}
        return reply({"problems": problems, "error": str(error)}, 400)
    base = await run_in_threadpool(load_base, workspace, session)
    return reply(result | {"command": _format_command(workspace, session, base, values)})


async def stop(request: Request) -> Response:
    """Stop the try that waits or trains."""
    workspace = get_workspace(request)
    session = request.path_params["session"]
    await run_in_threadpool(find_session, workspace, session)
    await run_in_threadpool(stop_tries, workspace, session)
    return reply({})


async def export(request: Request) -> Response:
    """Write the config of a try, without its limits, for New run."""
    workspace = get_workspace(request)
    values = (await read_request(request)).get("values")
    path = await run_in_threadpool(write_config, workspace, request.path_params["session"], values)
    return reply({"start": f"file:{path}"})


SCREEN = Screen(
    routes=(
        ("GET", "/what-if", show),
        ("POST", "/api/what-if", open_session),
        ("GET", "/api/what-if/{session}", describe),
        ("POST", "/api/what-if/{session}/try", start),
        ("POST", "/api/what-if/{session}/stop", stop),
        ("POST", "/api/what-if/{session}/config", export),
    ),
    navigation=(("/what-if", "What-if"),),
)
