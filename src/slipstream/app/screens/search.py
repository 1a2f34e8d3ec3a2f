"""The forms of searches and of pre-training, which extend the form of a new run, and the page of a
search."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from slipstream.app import forms, paths, searches, settings
from slipstream.app.jobs import OPEN, choose_queue, read_object
from slipstream.app.pages import Screen, get_workspace, read_request, render, reply
from slipstream.app.rows import describe_row
from slipstream.app.screens.job import format_command
from slipstream.app.screens.new_run import answer_ready, describe_job, show_form, submit_config
from slipstream.app.screens.run import load_resumed
from slipstream.app.searches import DAMAGE_ERRORS, describe_search, is_search
from slipstream.app.settings import Checked
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.base.run_names import SEARCHES
from slipstream.base.text import format_number
from slipstream.config import Config, search_space
from slipstream.reporting import wording
from slipstream.reporting.run_rows import FINISHED, RUNNING, looks_like_run, read_row
from slipstream.reporting.runs import show_run
from slipstream.runs import studies
from slipstream.runs.summary import SearchSummary

SPACE = "tune.space"


def show_search(request: Request) -> Response:
    """The form of a search."""
    controls = [
        control for control in forms.list_controls(forms.TUNE) if control.section == forms.TUNE
    ]
    return show_form(
        request,
        forms.TUNE,
        "search_form.html",
        apart=(forms.TITLES[forms.TUNE],),
        tune_controls=controls,
        settings=searches.list_settings(),
        list_rows=_list_rows,
    )


def _list_rows(config: Config | None) -> list[dict[str, Any]]:
    return searches.list_rows(config.tune.space) if config else []


def show_pretraining(request: Request) -> Response:
    """The form of pre-training, and the encoders there are."""
    workspace = get_workspace(request)
    rows = workspace.rows.list(workspace.folder, workspace.run_folders)
    encoders = [row for row in rows if row["kind"] == "pretrain"]
    return show_form(request, forms.PRETRAIN, "pretrain_form.html", encoders=encoders)


async def check_search(request: Request) -> Response:
    """Check the form of a search: return its mistakes, or its config and command."""
    workspace, values = get_workspace(request), await read_request(request)
    checked = await run_in_threadpool(_check_search, workspace, values)
    if checked.config is None:
        return reply(_describe_problems(checked, values))
    usual = searches.list_rows(search_space.make_default_space(checked.config))
    return reply(describe_job(workspace, checked.config, forms.TUNE) | {"usual": usual})


async def ready_search(request: Request) -> Response:
    """Whether a search can be trained on its data."""
    workspace, values = get_workspace(request), await read_request(request)
    checked = await run_in_threadpool(_check_search, workspace, values)
    return await answer_ready(request, checked, values.get("settings"), forms.TUNE)


async def ready_pretraining(request: Request) -> Response:
    """Whether an encoder can be pre-trained on its data."""
    workspace, values = get_workspace(request), await read_request(request)
    checked = await _check_pretraining(workspace, values)
    return await answer_ready(request, checked, values.get("settings"), forms.PRETRAIN)


def _check_search(workspace: Workspace, values: dict[str, Any]) -> Checked:
    try:
        space = searches.parse_rows(values.get("space"))
    except UserError as error:
        return Checked(None, {SPACE: error.message})
    return settings.check_form(workspace, values.get("settings"), forms.TUNE, space)


def _describe_problems(checked: Checked, values: dict[str, Any]) -> dict[str, Any]:
    """Return problems by setting; problems of the space also by the row that they name."""
    message = checked.problems.get(SPACE) or checked.problems.get("tune", "")
    stated = message.partition("; did you mean")[0]
    named = [
        position for position, name in enumerate(_list_names(values.get("space"))) if name in stated
    ]
    rows = {str(position): message for position in named[-1:]} if "tune.space" in message else {}
    problems = dict(checked.problems)
    if "tune.space" in message:
        problems = {key: problem for key, problem in problems.items() if problem != message}
        problems[SPACE] = message
    return {"problems": problems, "rows": rows}


def _list_names(space: Any) -> list[str]:
    """Return the settings of the rows, as messages name them."""
    rows = space if isinstance(space, list) else []
    names = [row.get("setting") if isinstance(row, dict) else None for row in rows]
    return [f'"{name.strip()}"' if isinstance(name, str) else "\0" for name in names]


async def start_search(request: Request) -> Response:
    """Start a search; return its job, or the mistakes."""
    workspace, values = get_workspace(request), await read_request(request)
    checked = await run_in_threadpool(_check_search, workspace, values)
    if checked.config is None:
        return reply(_describe_problems(checked, values), 400)
    job = await run_in_threadpool(submit_config, workspace, checked.config, forms.TUNE)
    return reply({"job": job})


async def check_pretraining(request: Request) -> Response:
    """Check the form of pre-training."""
    workspace, values = get_workspace(request), await read_request(request)
    checked = await _check_pretraining(workspace, values)
    if checked.config is None:
        return reply({"problems": checked.problems})
    return reply(describe_job(workspace, checked.config, forms.PRETRAIN))


async def _check_pretraining(workspace: Workspace, values: dict[str, Any]) -> Checked:
    form = values.get("settings")
    return await run_in_threadpool(settings.check_form, workspace, form, forms.PRETRAIN)


async def start_pretraining(request: Request) -> Response:
    """Start pre-training; return its job, or the mistakes."""
    workspace, values = get_workspace(request), await read_request(request)
    checked = await _check_pretraining(workspace, values)
    if checked.config is None:
        return reply({"problems": checked.problems}, 400)
    job = await run_in_threadpool(submit_config, workspace, checked.config, forms.PRETRAIN)
    return reply({"job": job})


TESTS = {
    "best": "the chosen settings",
    "default": "the settings without a search",
    "refit": "all rows, untested",
}
"""Runs in retrained/"""
MAX_TRIALS = 1_000_000
LIMITS = ("trials", "minutes")
"""Limits that can be raised when a search is resumed"""


def list_searches(request: Request) -> Response:
    """The searches of the folder."""
    workspace = get_workspace(request)
    rows = workspace.rows.list(workspace.folder, workspace.run_folders)
    searches = [row | {"url": quote(row["id"])} for row in rows if row["kind"] in SEARCHES]
    return render(request, "searches.html", searches=searches, command="slipstream tune CONFIG")


def show(request: Request) -> Response:
    """The page of a search; a run of another kind has its own."""
    workspace = get_workspace(request)
    name = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, name)
    row = describe_row(workspace.folder, read_row(folder))
    job = workspace.store.find_by_run(name)
    if not is_search(folder, job):
        return RedirectResponse(f"/run/{quote(name)}", 303)
    details = show_run(folder)
    summary = cast(SearchSummary, details["summary"] or {})
    is_auto = row["kind"] == "auto" or (job is not None and job.command[:1] == ("auto",))
    return render(
        request,
        "search.html",
        run=row,
        id=name,
        url=quote(name),
        details=details,
        pending=summary.get("pending") or "",
        is_auto=is_auto,
        can_go_on=row["state"] == "stopped" or _is_incomplete(summary),
        leaderboard=_list_leaderboard(summary),
        retrained=_list_retrained(summary),
        tests=_list_tests(folder, name),
        findings=_list_findings(summary) if row["state"] == FINISHED else [],
        config=paths.read_text(folder / "config.toml"),
        best_config=paths.read_text(folder / "best.toml"),
        has_report=(folder / "report.html").is_file(),
        dashboard=_describe_dashboard(folder),
        command=format_command(job) if job else str(summary.get("command") or ""),
        elsewhere=_explain_storage(folder),
        is_open=job is not None and job.state in OPEN,
        error=job.error if job is not None else "",
    )


def was_interrupted(folder: Path) -> bool:
    """Whether a signal ended `slipstream auto` before its time, with what it had found so far."""
    return _is_incomplete(cast(SearchSummary, read_object(folder / "metrics.json")))


def _is_incomplete(summary: SearchSummary) -> bool:
    """Whether a signal ended `slipstream auto`, or its training on all rows is missing."""
    refit = summary.get("refit")
    lacks_refit = isinstance(refit, dict) and refit.get("state") != "done"
    return bool(summary.get("interrupted")) or lacks_refit


def _list_leaderboard(summary: SearchSummary) -> list[dict[str, Any]]:
    """Return the rows of the leaderboard of `slipstream auto`, as texts; empty for other
    searches."""
    try:
        return [
            {
                "name": str(row["name"]),
                "kind": str(row["kind"]),
                "val": format_number(row["val"]) if row["val"] is not None else str(row["state"]),
                "val_sd": format_number(row["val_sd"], figures=2),
                "test": format_number(row["test"]),
                "weight": float(row["weight"]),
                "seconds": "–" if row["train_s"] is None else f"{row['train_s']:.1f}",
                "costs": [text or "–" for text in wording.format_costs(row)],
                "what": wording.describe_candidate(row),
                "is_baseline": row["state"] == "baseline",
            }
            for row in summary.get("leaderboard") or ()
        ]
    except DAMAGE_ERRORS:
        return []


def _list_retrained(summary: SearchSummary) -> list[dict[str, Any]]:
    """Return the retrained settings with the mean of their seeds, the chosen one first."""
    try:
        return [
            {
                "what": str(candidate["what"]),
                "mean": format_number(candidate["mean"]),
                "sd": format_number(candidate["sd"], figures=2),
                "seeds": len(candidate["losses"]),
                "chosen": bool(candidate["chosen"]),
            }
            for candidate in summary.get("retrained") or ()
        ]
    except DAMAGE_ERRORS:
        return []


def _list_tests(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the test runs of a search's retrained models."""
    return [
        {
            "what": description,
            "url": quote(f"{name}/retrained/{folder_name}"),
            "is_untested": folder_name == "refit",
        }
        for folder_name, description in TESTS.items()
        if looks_like_run(folder / "retrained" / folder_name)
    ]


def _list_findings(summary: SearchSummary) -> list[str]:
    try:
        if summary.get("leaderboard"):
            findings = [str(finding) for finding in summary.get("findings") or ()]
            return [*findings, *filter(None, [wording.describe_refit(summary)])]
        return [str(finding) for finding in wording.describe_search(summary)]
    except DAMAGE_ERRORS:
        return []


def _describe_dashboard(folder: Path) -> dict[str, Any] | None:
    """Return the command that opens the study in optuna-dashboard, and its storage."""
    storage = _find_storage(folder)
    if storage is None:
        return None
    return {
        "command": shlex.join(["optuna-dashboard", storage]),
        "storage": storage,
        "is_installed": importlib.util.find_spec("optuna_dashboard") is not None,
    }


def _find_storage(folder: Path) -> str | None:
    for name in ("study.log", "study-shared.log"):
        if (folder / name).is_file():
            return str(folder / name)
    if (folder / "study.db").is_file():
        return f"sqlite:///{folder / 'study.db'}"
    storage = studies.read_storage(folder)
    return storage and storage.removeprefix(studies.PREFIX)


def _explain_storage(folder: Path) -> str:
    """Say how to resume a search whose study this app cannot find by itself; "" where it can."""
    storage = studies.read_storage(folder)
    is_found = storage is None or studies.find_storage(storage) is not None
    return "" if storage is None or is_found else str(studies.explain_missing(folder, storage))


def list_trials(request: Request) -> Response:
    """The data of the page, as JSON."""
    folder = paths.find_run_folder(get_workspace(request).folder, request.path_params["run"])
    return reply(describe_search(folder))


async def resume(request: Request) -> Response:
    """Continue a search, with more trials or minutes where they are named."""
    workspace, values = get_workspace(request), await read_request(request)
    job = await run_in_threadpool(submit_resume, workspace, request.path_params["run"], values)
    return reply({"job": job})


def submit_resume(workspace: Workspace, name: str, values: dict[str, Any]) -> str:
    """Put the continuation of a search into the queue."""
    folder = paths.find_run_folder(workspace.folder, name)
    row = read_row(folder)
    if row.kind not in SEARCHES:
        raise UserError("this run is not a search")
    if row.state == RUNNING:
        raise UserError("the search is running already")
    open_job = workspace.store.find_by_run(name)
    if open_job is not None and open_job.state in OPEN:
        raise UserError("the search is in the queue already")
    if problem := _explain_storage(folder):
        raise UserError(problem)
    overrides = [f"tune.{key}={values[key]}" for key in LIMITS if _is_number(key, values)]
    is_auto = row.kind == "auto"
    if is_auto and "trials" in values:
        raise UserError("slipstream auto has no number of trials; say how many minutes it may take")
    if row.state == FINISHED and not overrides and not (is_auto and was_interrupted(folder)):
        limit = "minutes" if is_auto else "trials"
        raise UserError(f"the search is finished; say how many {limit} it should have")
    config = load_resumed(workspace, folder, overrides)
    command = ["auto" if is_auto else "tune", "--resume", str(folder), "--json"]
    for override in overrides:
        command += ["--set", override]
    if workspace.allow_code:
        command.append("--allow-code")
    job, _ = workspace.store.create_folder()
    device = choose_queue(config.engine.device)
    workspace.store.submit(job, command, device=device, name=row.name, run=name)
    workspace.supervisor.start_workers()
    return job


def _is_number(key: str, values: dict[str, Any]) -> bool:
    value = values.get(key)
    if value is None:
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_TRIALS or (key == "trials" and value != int(value)):
        kind = "an integer from 1" if key == "trials" else "a number above 0"
        raise UserError(f"{key} is {str(value)[:40]}; it should be {kind} to {MAX_TRIALS:,}")
    return True


SCREEN = Screen(
    routes=(
        ("GET", "/search", list_searches),
        ("GET", "/search/new", show_search),
        ("GET", "/search/{run:run}", show),
        ("GET", "/api/trials/{run:run}", list_trials),
        ("POST", "/api/search/check", check_search),
        ("POST", "/api/search/ready", ready_search),
        ("POST", "/api/search/start", start_search),
        ("POST", "/api/search/resume/{run:run}", resume),
        ("GET", "/pretrain", show_pretraining),
        ("POST", "/api/pretrain/check", check_pretraining),
        ("POST", "/api/pretrain/ready", ready_pretraining),
        ("POST", "/api/pretrain/start", start_pretraining),
    ),
    navigation=(
        ("/search", "Search"),
        ("/pretrain", "Pre-train"),
    ),
)
