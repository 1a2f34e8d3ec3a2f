"""A run while it trains and when it is done: its curves, its plan, its result and its files."""

from __future__ import annotations

import io
import shlex
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from slipstream import config as configs
from slipstream import runs
from slipstream.app import paths
from slipstream.app import settings as app_settings
from slipstream.app.jobs import OPEN, choose_queue, read_object, stop_job, stop_run
from slipstream.app.pages import Screen, get_workspace, read_request, render, reply
from slipstream.app.rows import describe_row
from slipstream.app.searches import is_search
from slipstream.app.security import REPORT_POLICY
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.base.run_names import find_kind
from slipstream.base.text import format_number
from slipstream.config import Config
from slipstream.config.train import upgrade_plan
from slipstream.reporting.run_rows import FINISHED, RUNNING, looks_like_run, read_row
from slipstream.reporting.runs import show_run
from slipstream.reporting.wording import choose_layout, sort_key, was_trained
from slipstream.runs.summary import RunSummary, Scores

FILES = {
    "report.html": "Report",
    "predictions.parquet": "Predictions",
    "metrics.json": "Metrics",
    "config.toml": "Config",
    "plan.json": "Plan",
    "events.jsonl": "Event log",
    "model.zip": "Model",
}
"""Files that can be downloaded, by their fixed names"""
MAX_EPOCHS = 100_000


def show(request: Request) -> Response:
    """The page of a run."""
    workspace = get_workspace(request)
    name = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, name)
    details = show_run(folder)
    row = describe_row(workspace.folder, read_row(folder))
    job = workspace.store.find_by_run(name)
    if is_search(folder, job):
        return RedirectResponse(f"/search/{quote(name)}", 303)
    summary, parts = details["summary"] or {}, _list_parts(name, folder)
    has_training = not summary or was_trained(summary)
    return render(
        request,
        "run.html",
        run=row,
        id=name,
        url=quote(name),
        details=details,
        summary=summary,
        comparison=_compare(cast(RunSummary, summary)) if row["state"] == FINISHED else None,
        plan=_describe_plan(folder),
        config=paths.read_text(folder / "config.toml"),
        files=[(file, title) for file, title in FILES.items() if _has_file(folder, file)],
        resume=details["next"] if row["state"] == "stopped" else "",
        epochs=_read_epochs(folder),
        can_resume=row["kind"] in ("train", "pretrain") and has_training,
        parts=parts,
        has_training=has_training and not parts,
        outer=find_outer(name),
        is_open=job is not None and job.state in OPEN,
        error=job.error if job is not None else "",
    )


def find_outer(name: str) -> str:
    """Return the search that a run is the model of; "" for other runs."""
    outer, _, inner = name.rpartition("/retrained/")
    return outer if "/" not in inner else ""


def _list_parts(name: str, folder: Path) -> list[dict[str, str]]:
    """Return the runs inside a run without a log of its own, such as a probe."""
    if (folder / "events.jsonl").exists():
        return []
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and looks_like_run(path))
    return [{"name": path.name, "url": quote(f"{name}/{path.name}")} for path in inner]


def _compare(summary: RunSummary) -> dict[str, Any] | None:
    """Return the metrics of the model and the baselines, the best first."""
    try:
        layout = choose_layout(summary)
        columns = layout.columns
        results: list[tuple[str, Scores]] = [("model", summary)]
        if ensemble := summary.get("ensemble"):
            results.append(("ensemble", ensemble))
        results += [
            (name, metrics) for name, metrics in (summary.get("baselines") or {}).items() if metrics
        ]
        order = next(column for column in columns if column.key in ("mse", "log_loss"))
        results.sort(key=lambda pair: sort_key(order.read(pair[1])))
        cells = [
            (name, [format_number(column.read(metrics), column.decimals) for column in columns])
            for name, metrics in results
        ]
        title = layout.description[0].upper() + layout.description[1:]
        return {
            "title": title,
            "headings": [column.heading for column in columns],
            "rows": cells,
        }
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
        return None  # a pre-trained encoder, a search, or a run of another version


def _describe_plan(folder: Path) -> list[tuple[str, str, str]]:
    """Return the choices of a plan with their reasons."""
    plan = upgrade_plan(read_object(folder / "plan.json"))
    reasons = plan.get("reasons")
    reasons = reasons if isinstance(reasons, dict) else {}
    choices = ("device", "precision", "home", "capture", "rnn", "compile", "fused", "threads")
    settings = plan.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    lines = [
        (name, _format_choice(choice.get("value")), str(choice.get("reason", "")))
        for name, choice in settings.items()
        if isinstance(choice, dict)
    ]
    for name in choices:
        if name in plan:
            value = plan[name]
            text = ", ".join(map(_format_choice, value if isinstance(value, list) else [value]))
            lines.append((name, text, str(reasons.get(name, ""))))
    further = [name for name in reasons if name not in choices]
    return lines + [(name, "", str(reasons[name])) for name in further]


def _format_choice(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _read_epochs(folder: Path) -> int:
    try:
        settings = tomllib.loads(paths.read_text(folder / "config.toml"))
        return int(settings["train"]["epochs"])
    except (LookupError, TypeError, ValueError):
        return 0


def _has_file(folder: Path, name: str) -> bool:
    return (folder / "model").is_dir() if name == "model.zip" else (folder / name).is_file()


def stop(request: Request) -> Response:
    """Ask the process of a run to save and stop."""
    workspace = get_workspace(request)
    name = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, name)
    job = workspace.store.find_by_run(name)
    if job is not None and job.state in OPEN:
        stop_job(workspace.store, job.id)
        return reply({"state": "stopping"})
    writers = runs.find_writers(folder)
    if not writers:
        raise UserError("the run does not run")
    for writer in writers:
        stop_run(folder, dict(writer))
    return reply({"state": "stopping"})


async def resume(request: Request) -> Response:
    """Continue a stopped run, or train a finished one longer."""
    workspace = get_workspace(request)
    values = await read_request(request)
    job = await run_in_threadpool(
        submit_resume, workspace, request.path_params["run"], values.get("epochs")
    )
    return reply({"job": job})


def submit_resume(workspace: Workspace, name: str, epochs: Any) -> str:
    """Put the continuation of a run into the queue."""
    folder = paths.find_run_folder(workspace.folder, name)
    row = read_row(folder)
    if row.kind not in ("train", "pretrain"):
        raise UserError(f"a {row.kind} is resumed on the command line")
    if row.state == RUNNING:
        raise UserError("the run is running already")
    command = [row.kind, "--resume", str(folder), "--json"]
    if epochs is not None:
        if not isinstance(epochs, int) or not 0 < epochs <= MAX_EPOCHS:
            raise UserError(f"epochs is {epochs}; it should be an integer from 1 to {MAX_EPOCHS:,}")
        command += ["--set", f"train.epochs={epochs}"]
    elif row.state == FINISHED:
        raise UserError("the run is finished; say how many epochs it should have")
    if workspace.allow_code and row.kind == "train":
        command.append("--allow-code")
    open_job = workspace.store.find_by_run(name)
    if open_job is not None and open_job.state in OPEN:
        raise UserError("the run is in the queue already")
    config = load_resumed(workspace, folder)
    job, _ = workspace.store.create_folder()
    device = choose_queue(config.engine.device)
    workspace.store.submit(job, command, device=device, name=row.name, run=name)
    workspace.supervisor.start_workers()
    return job


def load_resumed(workspace: Workspace, folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a run to be resumed. It may come from another machine, so its paths and
    classes are checked like a form's."""
    config = configs.load(runs.load_config(runs.Run(folder)), overrides)
    try:
        app_settings.refuse_unsafe(workspace, config)
    except UserError as error:
        kind = {"search": "tune"}.get(find_kind(folder), find_kind(folder))
        command = f"slipstream {kind} --resume {shlex.quote(str(folder))}"
        raise UserError(f"{error}; resume the run on the command line: {command}") from None
    return config


def show_report(request: Request) -> Response:
    """A run's report, in an origin of its own."""
    path = _find_file(request, "report.html")
    return FileResponse(
        path,
        media_type="text/html",
        headers={
            "content-security-policy": REPORT_POLICY,
            "cross-origin-opener-policy": "same-origin",
        },
    )


def download(request: Request) -> Response:
    """A file of a run, by its fixed name."""
    name = request.path_params["file"]
    if name not in FILES:
        raise paths.MissingError("there is no such file")
    folder = paths.find_run_folder(get_workspace(request).folder, request.path_params["run"])
    if name == "model.zip":
        body = pack_folder(get_workspace(request).folder, folder / "model", folder)
        headers = {
            "content-disposition": f'attachment; filename="{make_download_name(folder)}-model.zip"'
        }
        return Response(body, media_type="application/zip", headers=headers)
    path = _find_file(request, name)
    return FileResponse(
        path,
        media_type="application/octet-stream",
        filename=f"{make_download_name(folder)}-{name}",
    )


def make_download_name(folder: Path) -> str:
    """Return a run's name with only characters that are safe in a download's name."""
    return "".join(
        character if character.isascii() and (character.isalnum() or character in "._-") else "-"
        for character in folder.name
    )[:100]


def _find_file(request: Request, name: str) -> Path:
    workspace = get_workspace(request)
    run = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, run)
    path = paths.resolve_below(workspace.folder, f"{run}/{name}")
    if folder.resolve() not in path.parents or not path.is_file():
        raise paths.MissingError(f"this run has no {name}")
    return path


def pack_folder(root: Path, folder: Path, base: Path) -> bytes:
    """Return the files of a folder below `root` as a ZIP archive, named from `base` on; links are
    left out."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            is_own = not path.is_symlink() and paths.is_below(root.resolve(), path.resolve())
            if path.is_file() and is_own:
                archive.write(path, path.relative_to(base))
    return packed.getvalue()


SCREEN = Screen(
    routes=(
        ("GET", "/run/{run:run}", show),
        ("POST", "/api/stop/{run:run}", stop),
        ("POST", "/api/resume/{run:run}", resume),
        ("GET", "/report/{run:run}", show_report),
        ("GET", "/download/{file}/{run:run}", download),
    ),
    section="/",
)
