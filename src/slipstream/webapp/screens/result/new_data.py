"""Test a finished run on new data: `slipstream evaluate RUN --data FILE` as a job, with what it
predicts beside the truth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from slipstream import config as configs
from slipstream.catalog.rows import FINISHED, read_row
from slipstream.errors import UserError
from slipstream.reporting.formatting import choose_layout, format_number
from slipstream.webapp import paths, settings
from slipstream.webapp.jobs.store import FINISHED as JOB_FINISHED
from slipstream.webapp.jobs.store import AppJob, read_object
from slipstream.webapp.jobs.supervisor import choose_queue
from slipstream.webapp.pages import get_workspace, reply
from slipstream.webapp.pages import read_object as read_request
from slipstream.webapp.screens.job import format_command
from slipstream.webapp.workspace import Workspace

TEST, EXPORT = "test", "export"
"""Kinds of jobs of a finished run"""
PREDICTIONS = "predictions.parquet"
MOST_JOBS = 400
"""Jobs that are looked through, newest first"""
MOST_LISTED = 20


async def start(request: Request) -> Response:
    """Score a file, or only predict it where the true values are not known."""
    values = await read_request(request)
    data, score = values.get("data"), values.get("score", True)
    if not isinstance(data, str) or not data or not isinstance(score, bool):
        raise UserError("choose a file first")
    workspace = get_workspace(request)
    run = request.path_params["run"]
    job = await run_in_threadpool(submit_test, workspace, run, data, score=score)
    return reply({"job": job})


def submit_test(workspace: Workspace, run: str, data: str, *, score: bool) -> str:
    """Put the test of a run on a file below the folder into the queue."""
    folder = find_finished(workspace, run)
    path = paths.resolve_below(workspace.folder, data)
    if not path.exists():
        raise paths.MissingError(f"{data[:200]}: there is no such file")
    settings.refuse_path(workspace, settings.NamedPath("data.path", data))
    for joined in settings.list_paths(configs.load(folder / "config.toml")):
        if joined.setting == settings.JOINED:  # tables that the steps of the run read
            settings.refuse_path(workspace, joined)
    job, own = workspace.store.create_folder()
    out = str(own / PREDICTIONS)
    command = ["evaluate", str(folder), "--data", str(path), "--predictions", out]
    if not score:
        command = ["predict", str(folder), str(path), "--every", "--out", out]
    submit(workspace, job, command, run=run, extra={"kind": TEST, "data": data, "score": score})
    return job


def find_finished(workspace: Workspace, run: str) -> Path:
    """Return the folder of a run that has a trained model."""
    folder = paths.find_run_folder(workspace.folder, run)
    row = read_row(folder)
    if row.state != FINISHED:
        raise UserError(f"the run is {row.state}; only a finished one can be used")
    return folder


def submit(
    workspace: Workspace, job: str, command: list[str], *, run: str, extra: dict[str, Any]
) -> None:
    """Put a command that uses a finished run into the queue."""
    folder = workspace.folder / run
    if workspace.allow_code:
        command = [*command, "--allow-code"]
    name = f"{extra['kind']} {folder.name}"
    extra = {**extra, "of": run, "page": f"/result/{quote(run)}"}
    workspace.store.submit(
        job, [*command, "--json"], device=choose_queue("auto"), name=name, extra=extra
    )
    workspace.supervisor.start_workers()


def list_jobs(workspace: Workspace, run: str, kind: str) -> Iterator[AppJob]:
    """Yield the jobs of one kind that use a run, the newest first."""
    for looked_at, name in enumerate(workspace.store.iter_ids()):
        if looked_at >= MOST_JOBS:
            return
        extra = read_object(workspace.store.jobs / name / "job.json").get("extra")
        if isinstance(extra, dict) and extra.get("of") == run and extra.get("kind") == kind:
            yield workspace.store.read(name)


def find_test(workspace: Workspace, run: str, job: str) -> AppJob:
    """Return a test of a run by its job."""
    missing = paths.MissingError("there is no such test; its files may have been removed")
    try:
        test = workspace.store.read(job)
    except UserError:
        raise missing from None
    if test.extra.get("of") != run or test.extra.get("kind") != TEST:
        raise missing
    return test


def list_tests(request: Request) -> Response:
    """The tests of a run, with their scores."""
    workspace = get_workspace(request)
    run = request.path_params["run"]
    paths.find_run_folder(workspace.folder, run)
    tests = []
    for job in list_jobs(workspace, run, TEST):
        tests.append(_describe(workspace, job))
        if len(tests) == MOST_LISTED:
            break
    return reply({"tests": tests})


def _describe(workspace: Workspace, job: AppJob) -> dict[str, Any]:
    folder = workspace.store.jobs / job.id
    values: dict[str, Any] = {
        "job": job.id,
        "data": str(job.extra.get("data", "")),
        "score": bool(job.extra.get("score", True)),
        "state": job.state,
        "error": job.error,
        "position": job.position,
        "created_at": job.created_at,
        "command": format_command(job),
        "has_predictions": (folder / PREDICTIONS).is_file(),
    }
    if job.state == JOB_FINISHED:
        values |= _read_scores(read_object(folder / "output.json"))
    return values


def _read_scores(output: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of the model and the baselines, as far as the command has printed them."""
    notes = [str(note) for note in output.get("notes") or []]
    result: dict[str, Any] = {"windows": output.get("windows"), "notes": notes[:20], "scores": []}
    if "metrics" not in output:
        return result | {"rows": output.get("rows")}
    columns = choose_layout(output).columns
    everyone = {"model": output, **(output.get("baselines") or {})}
    result["headings"] = [column.heading for column in columns]
    for name, one in everyone.items():
        if one:
            values = [(one.get(column.section) or {}).get(column.key) for column in columns]
            cells = [
                format_number(value, column.decimals)
                for value, column in zip(values, columns, strict=True)
            ]
            result["scores"].append({"name": name, "cells": cells, "values": values})
    return result


def download(request: Request) -> Response:
    """What a test has predicted, as a file."""
    workspace = get_workspace(request)
    test = find_test(workspace, request.path_params["run"], request.path_params["job"])
    path = workspace.store.jobs / test.id / PREDICTIONS
    if not path.is_file():
        raise paths.MissingError("this test has no predictions")
    return FileResponse(path, media_type="application/octet-stream", filename=PREDICTIONS)
