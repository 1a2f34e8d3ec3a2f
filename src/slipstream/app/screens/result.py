"""The page of a result, and the figures that its script draws."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from slipstream import config as configs
from slipstream import runs
from slipstream.app import paths, settings
from slipstream.app.jobs import FINISHED as JOB_FINISHED
from slipstream.app.jobs import OPEN, AppJob, choose_queue, read_object
from slipstream.app.pages import Screen, get_workspace, read_request, render, reply
from slipstream.app.rows import describe_row
from slipstream.app.screens.job import format_command
from slipstream.app.screens.run import FILES, find_outer, make_download_name, pack_folder
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.base.run_names import EXPORT_FILE
from slipstream.base.statistics import HIGHER_IS_BETTER
from slipstream.base.text import format_number
from slipstream.reporting.run_rows import DAMAGE_ERRORS, FINISHED, read_row
from slipstream.reporting.runs import show_run
from slipstream.reporting.wording import choose_layout, format_percent
from slipstream.runs.summary import ByStep, RunSummary

if TYPE_CHECKING:
    from slipstream.data.predictions import PredictionFile

TEST, EXPORT = "test", "export"
"""Kinds of jobs of a finished run"""
PREDICTIONS = "predictions.parquet"
MAX_JOBS = 400
"""Jobs that are looked through, newest first"""
MAX_LISTED = 20


async def start_test(request: Request) -> Response:
    """Score a file, or only predict it where it has no true values."""
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
    job, job_folder = workspace.store.create_folder()
    out = str(job_folder / PREDICTIONS)
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
        if looked_at >= MAX_JOBS:
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
        tests.append(_describe_test(workspace, job))
        if len(tests) == MAX_LISTED:
            break
    return reply({"tests": tests})


def _describe_test(workspace: Workspace, job: AppJob) -> dict[str, Any]:
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
    """Return the metrics of the model and the baselines from the command's output, as far as it has
    come."""
    notes = [str(note) for note in output.get("notes") or []]
    result: dict[str, Any] = {"windows": output.get("windows"), "notes": notes[:20], "scores": []}
    if "metrics" not in output:
        return result | {"rows": output.get("rows")}
    columns = choose_layout(output).columns
    everyone = {"model": output, **(output.get("baselines") or {})}
    result["headings"] = [column.heading for column in columns]
    for name, scores in everyone.items():
        if scores:
            values = [(scores.get(column.section) or {}).get(column.key) for column in columns]
            cells = [
                format_number(value, column.decimals)
                for value, column in zip(values, columns, strict=True)
            ]
            result["scores"].append({"name": name, "cells": cells, "values": values})
    return result


def download_predictions(request: Request) -> Response:
    """The predictions of a test, as a file."""
    workspace = get_workspace(request)
    test = find_test(workspace, request.path_params["run"], request.path_params["job"])
    path = workspace.store.jobs / test.id / PREDICTIONS
    if not path.is_file():
        raise paths.MissingError("this test has no predictions")
    return FileResponse(path, media_type="application/octet-stream", filename=PREDICTIONS)


INNER = {"search": "retrained/best", "auto": "retrained/best", "probe": "fine-tuned"}
"""By kind of run: the inner run whose model `predict` uses"""
MAX_NAME = 200
"""Characters of a name in a list"""
MAX_SERIES = 20_000


class ResultSource(NamedTuple):
    """Predictions, and the scores that belong to them."""

    path: Path
    summary: RunSummary
    """The run's summary"""
    scores: Mapping[str, Any]
    """Detailed scores of these predictions; empty where they were not scored"""
    config: Mapping[str, Any]


def show(request: Request) -> Response:
    """The page of a finished run's result."""
    workspace = get_workspace(request)
    name = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, name)
    row = describe_row(workspace.folder, read_row(folder))
    values: dict[str, Any] = {"run": row, "id": name, "url": quote(name), "inner": ""}
    values["outer"] = find_outer(name)
    inner = INNER.get(row["kind"], "")
    if inner and (folder / inner / "metrics.json").is_file():
        values["inner"] = quote(f"{name}/{inner}")
    is_scored = row["state"] == FINISHED and not inner
    summary: RunSummary = _read_summary(folder) if is_scored else {}
    values |= _describe(summary, row)
    return render(
        request,
        "result.html",
        **values,
        details=show_run(folder),
        has_predictions=(folder / PREDICTIONS).is_file() and bool(values["rows"]),
        files=[(file, title) for file, title in FILES.items() if _has_file(folder, file)],
        commands=_list_commands(folder),
        config=paths.read_text(folder / "config.toml"),
        tables=paths.list_tables(workspace.folder) if values["rows"] else [],
    )


def _list_commands(folder: Path) -> dict[str, str]:
    """Return the page's actions as commands."""
    run = shlex.quote(str(folder))
    return {
        "evaluate": f"slipstream evaluate {run} --data FILE --predictions predictions.parquet",
        "predict": f"slipstream predict {run} FILE --out predictions.csv",
        "export": f"slipstream export {run} --to onnx --out FOLDER",
        "report": f"slipstream report {run}",
    }


def _has_file(folder: Path, name: str) -> bool:
    return (folder / "model").is_dir() if name == "model.zip" else (folder / name).is_file()


def _read_summary(folder: Path) -> RunSummary:
    try:
        return runs.read_metrics(folder)
    except UserError:
        return {}  # of a run of another kind


def _describe(summary: RunSummary, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's tables for a summary; empty lists where there is nothing to compare."""
    empty: dict[str, Any] = {
        "rows": [],
        "headings": [],
        "headline": "",
        "sorted_by": "",
        "notes": [],
        "facts": [],
        "targets": [],
        "classes": None,
        "lanes": None,
    }
    if not summary:
        return empty
    if untested := summary.get("untested"):
        return {**empty, "notes": [untested]}
    from slipstream.reporting.page import build_rows, find_order

    try:
        layout = choose_layout(summary)
        return {
            "rows": _add_bars(build_rows(summary)),
            "headings": [column.heading for column in layout.columns],
            "headline": layout.headline.heading,
            "sorted_by": find_order(layout.columns).heading,
            "notes": [str(note) for note in summary.get("notes") or ()],
            "facts": _list_facts(summary, row),
            "targets": _compare_targets(summary),
            "classes": _describe_classes(summary),
            "lanes": _describe_lanes(summary),
        }
    except DAMAGE_ERRORS:
        return empty  # a pre-trained encoder, or a run of another version


def _add_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the length of each row's bar, in percent of the longest, by the first metric."""
    largest = max((row["headline"] for row in rows if row["headline"] is not None), default=0.0)
    for row in rows:
        known = row["headline"] is not None and largest > 0
        row["bar"] = round(100 * row["headline"] / largest, 1) if known else 0
    return rows


def _list_facts(summary: RunSummary, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures at the top: name, value, and a note."""
    layout = choose_layout(summary)
    found = summary.get("intervals")
    intervals = found["test"] if found and layout.subset == "test" else {}
    facts = []
    for column in dict.fromkeys((layout.headline, layout.second, layout.facts[-1][0])):
        value = format_number(column.read(summary), column.decimals)
        interval = intervals.get(column.key)
        note = ""
        if interval:
            low, high = (format_number(bound, column.decimals) for bound in interval)
            note = f"95 % interval {low} to {high}"
        facts.append({"name": column.heading, "key": column.key, "value": value, "note": note})
    ensemble = summary.get("ensemble")
    if ensemble and summary.get("uses") == "ensemble":
        value = format_number(layout.headline.read(ensemble), layout.headline.decimals)
        name = f"{layout.headline.heading} of the ensemble"
        facts.append({"name": name, "key": "ensemble", "value": value})
        facts[-1]["note"] = "which predict uses"
    if row["baseline"]:
        best = format_number(row["baseline_error"])
        against = str(row["against"] or "").rpartition(", ")[0]
        if row["against_low"] is not None and row["metric"] not in HIGHER_IS_BETTER:
            low, high = (format_percent(row[name]) for name in ("against_low", "against_high"))
            against += f", 95 % interval {low} to {high}"
        predictor = "the ensemble" if summary.get("uses") == "ensemble" else "the model"
        name = f"{layout.headline.heading}, best baseline"
        facts.append({"name": name, "key": "baseline", "value": best})
        facts[-1]["note"] = (
            f"{row['baseline']}; {predictor}: {against}" if against else row["baseline"]
        )
    windows = (summary.get("windows") or {}).get(layout.subset)
    if windows is not None:
        left_out = (summary.get("windows_without_target") or {}).get(layout.subset)
        note = f"{left_out:,} left out: no target" if left_out else ""
        facts.append({"name": "Windows", "key": "windows", "value": f"{windows:,}", "note": note})
    facts += _list_quantile_facts(summary)
    facts += _list_interval_facts(summary)
    return facts


def _list_interval_facts(summary: RunSummary) -> list[dict[str, Any]]:
    """Return the coverage and width of the intervals by level, and their CRPS."""
    coverage, widths = summary.get("coverage") or {}, summary.get("width") or {}
    whose = ["of the single model"] if summary.get("uses") == "ensemble" else []
    facts = []
    for level, share in coverage.items():
        name, value = f"Inside the {level} % interval", f"{100 * share:.1f} %"
        width = [f"mean width {format_number(widths[level])}"] if level in widths else []
        note = "; ".join([*width, *whose])
        facts.append({"name": name, "key": f"coverage-{level}", "value": value, "note": note})
    if coverage and (crps := summary.get("crps")) is not None:
        value, note = format_number(crps), "; ".join([CRPS_NOTE, *whose])
        facts.append(
            {"name": "CRPS of the intervals", "key": "interval-crps", "value": value, "note": note}
        )
    return facts


CRPS_NOTE = "twice the pinball loss, relative to the size of the true values"


def _list_quantile_facts(summary: RunSummary) -> list[dict[str, Any]]:
    """Return the pinball loss of predicted quantiles, and the coverage of the outermost ones."""
    metrics, levels = (summary.get("metrics") or {}).get("test") or {}, summary.get("quantiles")
    facts = []
    if levels and "pinball" in metrics:
        value = format_number(metrics["pinball"])
        note = f"the mean of the quantiles {', '.join(f'{level:g}' for level in levels)}"
        facts.append({"name": "Pinball loss", "key": "pinball", "value": value, "note": note})
    if levels and (crps := metrics.get("crps")) is not None:
        value = format_number(crps)
        facts.append({"name": "CRPS", "key": "crps", "value": value, "note": CRPS_NOTE})
    if levels and (coverage := metrics.get("coverage")) is not None:
        name = f"Between the quantiles {levels[0]:g} and {levels[-1]:g}"
        note = f"of the true values; {100 * (levels[-1] - levels[0]):.0f} % should be"
        if (width := metrics.get("width")) is not None:
            note += f"; {format_number(width)} apart on average"
        value = f"{100 * coverage:.1f} %"
        facts.append({"name": name, "key": "coverage", "value": value, "note": note})
    return facts


def _compare_targets(summary: RunSummary) -> list[dict[str, Any]]:
    """Return the errors of each of several targets for the model and the baselines."""
    from slipstream.reporting.wording import get_unit

    per_target = summary["detail"]["test"].get("per_target") or {}
    if len(per_target) < 2:
        return []
    baselines = {
        name: scores["per_target"]
        for name, scores in (summary.get("baselines") or {}).items()
        if scores and scores.get("per_target")
    }
    return [
        {
            "name": target,
            "unit": get_unit(summary, target),
            "cells": [format_number(errors[key]) for key in ("mae", "rmse", "r2", "bias")],
            "baselines": {
                name: format_number(scores[target]["mae"]) for name, scores in baselines.items()
            },
        }
        for target, errors in per_target.items()
    ]


def _describe_classes(summary: RunSummary) -> dict[str, Any] | None:
    """Return the confusion matrix with shares, the figures of each class, and the calibration."""
    if not summary.get("classes"):
        return None
    detail = summary["detail"]["test"]
    confusion = []
    for name, row in zip(summary["classes"], detail["confusion"], strict=True):
        total = max(sum(row), 1)
        cells = [
            {"count": n, "percent": 100 * n / total, "shade": -(-10 * n // total)} for n in row
        ]
        confusion.append({"name": name, "cells": cells})
    figures = [
        {
            "name": name,
            "count": scores["count"],
            "cells": [
                format_number(scores[key], 4) for key in ("precision", "recall", "f1", "auc")
            ],
        }
        for name, scores in detail["per_class"].items()
    ]
    return {"names": summary["classes"], "confusion": confusion, "figures": figures}


def _describe_lanes(summary: RunSummary) -> dict[str, Any] | None:
    """Return the test errors of the models of a run with repeats or folds, as points on a line."""
    from slipstream.reporting import wording

    lanes = summary.get("lanes")
    if not lanes:
        return None
    column = choose_layout(summary).headline
    values = [column.read(lane) for lane in lanes]
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin
    groups: dict[str, list[dict[str, Any]]] = {}
    for lane, value in zip(lanes, values, strict=True):
        name = f"fold {lane['fold']}" if lane.get("fold") is not None else "repeats"
        position = None if value is None else round(100 * (value - low) / (high - low), 2)
        text = format_number(value, column.decimals)
        point = {
            "seed": lane.get("seed"),
            "place": position,
            "text": text,
            "best": lane.get("best"),
        }
        point["label"] = lane.get("label") or ""
        groups.setdefault(name, []).append(point)
    return {
        "heading": column.heading,
        "groups": groups,
        "low": format_number(low),
        "high": format_number(high),
        "lines": list(wording.describe_lanes(summary)),
    }


def describe(request: Request) -> Response:
    """The errors of a run's predictions, or of a test's, as JSON: by series, time and horizon."""
    from slipstream.app.screens.result_plots import compute_digest

    source = find_source(request)
    file = _open_predictions(source.path)
    target = _choose_target(request, file.shape.targets)
    values: dict[str, Any] = {
        "targets": list(file.shape.targets),
        "target": target,
        "classes": list(file.shape.classes),
        "names": [name[:MAX_NAME] for name in file.names[:MAX_SERIES]],
        "more_series": max(len(file.names) - MAX_SERIES, 0),
        "dates": file.shape.has_dates,
        "x_name": file.shape.x_name,
        "steps": _count_steps(source) if file.shape.is_forecast else 0,
        "unit": _find_unit(source.summary, target),
        "has_truth": file.shape.has_truth(target),
        "num_rows": file.num_rows,
        "by_step": _compare_steps(source),
        "by_step_metric": choose_layout(source.summary).headline.heading,
        "reliability": _read_reliability(source),
    }
    if file.shape.has_truth(target) and not request.query_params.get("brief"):
        values |= compute_digest(file, target, _read_span(source.config))
        values["series"] = values["series"][:MAX_SERIES]
    return reply(values)


def plot(request: Request) -> Response:
    """The rows of one series for a plot, as JSON."""
    from slipstream.app.screens.result_plots import PlotView, read_plot

    source = find_source(request)
    file = _open_predictions(source.path)
    series = _read_whole(request, "series")
    if series >= len(file.names):
        raise paths.MissingError("there is no such series")
    size = file.shape.x_size
    view = PlotView(
        series=series,
        target=_choose_target(request, file.shape.targets),
        ahead=_read_whole(request, "ahead"),
        low=_read_number(request, "low", float("-inf")) * size,
        high=_read_number(request, "high", float("inf")) * size,
        points=_read_whole(request, "points", 1_500),
        window=_read_whole(request, "window") if "window" in request.query_params else None,
    )
    return reply(read_plot(file, view))


def _open_predictions(path: Path) -> PredictionFile:
    from slipstream.data.predictions import open_predictions  # imports pyarrow

    if not path.is_file():
        raise paths.MissingError("there are no predictions here")
    return open_predictions(path)


def find_source(request: Request) -> ResultSource:
    """Return the run's own predictions, or the predictions of a test by its job."""
    workspace = get_workspace(request)
    run = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, run)
    summary, config = _read_summary(folder), read_config(folder)
    job = request.query_params.get("source", "")
    if job:
        test = find_test(workspace, run, job)
        path = workspace.store.jobs / test.id / PREDICTIONS
        scores = read_object(workspace.store.jobs / test.id / "output.json")
        return ResultSource(path, summary, scores.get("detail") or {}, config)
    path = paths.resolve_below(workspace.folder, f"{run}/{PREDICTIONS}")
    detail = summary.get("detail")
    test_scores = detail.get("test") if isinstance(detail, dict) else None
    return ResultSource(path, summary, test_scores or {}, config)


def read_config(folder: Path) -> dict[str, Any]:
    """Return a run's settings; empty where they cannot be read."""
    try:
        return tomllib.loads(paths.read_text(folder / "config.toml"))
    except (ValueError, RecursionError):
        return {}


def _choose_target(request: Request, targets: tuple[str, ...]) -> str:
    """Return the target of a request, by its number; empty for classes."""
    number = _read_whole(request, "target")
    if not targets:
        return ""
    if number >= len(targets):
        raise paths.MissingError("there is no such target")
    return targets[number]


def _read_whole(request: Request, name: str, default: int = 0) -> int:
    text = request.query_params.get(name, "") or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UserError(f"{name}: expected a whole number")
    return int(text)


def _read_number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        raise UserError(f"{name}: expected a number") from None
    if value != value:
        raise UserError(f"{name}: expected a number")
    return value


def _read_span(config: Mapping[str, Any]) -> int:
    """Return the number of rows of a window."""
    data = config.get("data")
    sizes = [data.get(key) for key in ("context", "horizon")] if isinstance(data, dict) else []
    return max(sum(size for size in sizes if isinstance(size, int)), 1)


def _count_steps(source: ResultSource) -> int:
    data = source.config.get("data")
    horizon = data.get("horizon") if isinstance(data, dict) else None
    return horizon if isinstance(horizon, int) and horizon > 0 else 1


def _find_unit(summary: RunSummary, target: str) -> str:
    from slipstream.reporting.wording import get_unit

    return get_unit(summary, target) if target else ""


def _compare_steps(source: ResultSource) -> dict[str, list[Any]]:
    """Return the error over the rows ahead, of the model and, on its own test set, of the
    baselines."""
    steps = source.scores.get("per_step")
    if not isinstance(steps, list) or len(steps) < 2:
        return {}
    headline = choose_layout(source.summary).headline.key
    key: ByStep = "log_loss_by_step" if source.summary.get("classes") else "mae_by_step"
    curves = {"model": [step.get(headline) for step in steps]}
    detail = source.summary.get("detail")
    if isinstance(detail, dict) and detail.get("test") is source.scores:
        for name, scores in (source.summary.get("baselines") or {}).items():
            if scores and scores.get(key):
                curves[name] = list(scores[key])
    return curves


def _read_reliability(source: ResultSource) -> list[Any]:
    bins = source.scores.get("reliability")
    return [bin_ for bin_ in bins if bin_.get("count")] if isinstance(bins, list) else []


FOLDER = "exports"
"""Below the run's folder: one folder for each format"""
FLAGS = ("int8", "after_prepare")
TEXTS = {"name": 60, "license": 60, "state": 20}
"""Options with a value, and the largest length of the value"""


async def start_export(request: Request) -> Response:
    """Start an export of a run."""
    values = await read_request(request)
    run = request.path_params["run"]
    job = await run_in_threadpool(submit_export, get_workspace(request), run, values)
    return reply({"job": job})


def submit_export(workspace: Workspace, run: str, values: dict[str, Any]) -> str:
    """Put an export into the queue; an export of the same format is replaced."""
    from slipstream.exporting.formats import find_format

    to = values.get("to")
    if not isinstance(to, str):
        raise UserError("choose a format first")
    chosen = find_format(to[:40])
    folder = find_finished(workspace, run)
    out = folder / FOLDER / to
    options = _read_options(values.get("options"), chosen.settings)
    if any(job.state in OPEN for job in list_jobs(workspace, run, EXPORT) if job.extra["to"] == to):
        raise UserError(f"an export to {to} waits or runs already")
    paths.resolve_below(workspace.folder, f"{run}/{FOLDER}/{to}")  # no link leads out
    out.parent.mkdir(exist_ok=True)
    job, _ = workspace.store.create_folder()
    command = ["export", str(folder), "--to", to, "--out", str(out), "--force", *options]
    submit(workspace, job, command, run=run, extra={"kind": EXPORT, "to": to})
    return job


def _read_options(values: Any, settings: tuple[str, ...]) -> list[str]:
    """Return the options of a format for the command line."""
    if values is None:
        return []
    if not isinstance(values, dict):
        raise UserError("options: expected an object")
    options = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"[:60]
        if name not in settings:
            raise UserError(f"{option}: is no option of this format")
        if name in FLAGS and isinstance(value, bool):
            options += [option] if value else []
        elif name in TEXTS and isinstance(value, str) and len(value) <= TEXTS[name]:
            options += [f"{option}={value}"] if value.strip() else []
        else:
            raise UserError(f"{option}: expected a short text, or yes or no")
    return options


def list_exports(request: Request) -> Response:
    """Every format with its export, or the job that writes it."""
    from slipstream.exporting.formats import FORMATS

    workspace = get_workspace(request)
    run = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, run)
    jobs: dict[str, Any] = {}
    for job in list_jobs(workspace, run, EXPORT):
        jobs.setdefault(str(job.extra.get("to")), job)
    exports = []
    for name, format_ in FORMATS.items():
        values: dict[str, Any] = {
            "to": name,
            "what": format_.description,
            "settings": list(format_.settings),
        }
        if newest := jobs.get(name):
            state = {"job": newest.id, "state": newest.state, "error": newest.error}
            values |= state | {"position": newest.position, "command": format_command(newest)}
        values["export"] = _read_export(workspace, folder, run, name)
        exports.append(values)
    return reply({"exports": exports})


def _read_export(workspace: Workspace, folder: Path, run: str, to: str) -> dict[str, Any] | None:
    """Return the content of export.json for a page."""
    content = read_object(_find_export(workspace, folder, run, to) / EXPORT_FILE)
    if not content:
        return None
    names = ("parity", "inside", "before", "after", "notes", "versions", "files", "memory")
    result = {name: content[name] for name in names if name in content}
    files = [file for file in content.get("files") or [] if isinstance(file, dict)]
    return result | {"bytes": sum(int(file.get("bytes", 0)) for file in files)}


def _find_export(workspace: Workspace, folder: Path, run: str, to: str) -> Path:
    path = paths.resolve_below(workspace.folder, f"{run}/{FOLDER}/{to}")
    if folder.resolve() not in path.parents:
        raise paths.MissingError("there is no such export")
    return path


def download_export(request: Request) -> Response:
    """An export as a ZIP archive."""
    from slipstream.exporting.formats import FORMATS

    workspace = get_workspace(request)
    run, to = request.path_params["run"], request.path_params["format"]
    folder = paths.find_run_folder(workspace.folder, run)
    if to not in FORMATS:
        raise paths.MissingError("there is no such format")
    path = _find_export(workspace, folder, run, to)
    if not (path / EXPORT_FILE).is_file():
        raise paths.MissingError(f"this run has no export to {to}")
    name = f"{make_download_name(folder)}-{to}.zip"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    body = pack_folder(folder, path, path.parent)
    return Response(body, media_type="application/zip", headers=headers)


SCREEN = Screen(
    routes=(
        ("GET", "/result/{run:run}", show),
        ("GET", "/api/result/{run:run}", describe),
        ("GET", "/api/plot/{run:run}", plot),
        ("GET", "/api/tests/{run:run}", list_tests),
        ("POST", "/api/test/{run:run}", start_test),
        ("GET", "/tested/{job}/{run:run}", download_predictions),
        ("GET", "/api/exports/{run:run}", list_exports),
        ("POST", "/api/export/{run:run}", start_export),
        ("GET", "/export/{format}/{run:run}", download_export),
    ),
    section="/",
)
