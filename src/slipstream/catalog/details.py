"""One run in detail: its row, its settings, its summary, and the command to use next."""

from __future__ import annotations

import tomllib
from os import PathLike
from typing import Any

from slipstream.catalog.comparison import list_differences
from slipstream.catalog.listing import find_listed
from slipstream.catalog.rows import (
    DAMAGE_ERRORS,
    DAMAGED,
    FINISHED,
    RUNNING,
    RunFiles,
    make_row,
    read_files,
)
from slipstream.reporting import wording
from slipstream.reporting.formatting import format_seconds
from slipstream.run_names import OUT, suggest_resume
from slipstream.runs import studies

RESUME_PROBE = (
    "slipstream pretrain {run}/encoder.toml --probe {run}/labels.toml --seeds {repeats} "
    "--resume {run}"
)
SUGGESTED = {
    "pretrain": "slipstream train CONFIG --set train.init_from={run}",
    "probe": "slipstream predict {run}/fine-tuned DATA",
}
"""The command that uses a finished run, where that is not predict"""


def show_run(name: str | PathLike[str], *, out: str | PathLike[str] = OUT) -> dict[str, Any]:
    """Describe one run: what it is, how good it is, and what to do next.

    Args:
        name: The run: its folder, the beginning of its name, `last`, or the result of `train`.
        out: The folder in which the name is looked up.

    Returns:
        A dict with the fields of `RunRow`, `settings` that differ from the defaults, the `summary`
        that the run ended with (None if it has not ended), its `verdict` as a sentence and the
        `outcome` in a word (better, worse, or no difference shown), where the `time` went, the path
        of its `report`, and `next`: the command that uses, resumes or removes the run.

    Raises:
        UserError: There is no such run.

    Example:
        slipstream.show_run("last")["settings"]
    """
    files = read_files(find_listed(name, out))
    report = files.folder / "report.html"
    summary = files.summary and {k: v for k, v in files.summary.items() if k != "detail"}
    return {
        **make_row(files).to_dict(),
        "settings": _list_settings(files),
        "summary": summary,
        **_judge(files),
        "time": _describe_time(files),
        "report": str(report) if report.exists() else None,
        "next": suggest_command(files),
    }


def _list_settings(files: RunFiles) -> dict[str, Any]:
    """Return the settings that differ from the defaults, by their dotted names; of an ensemble,
    those of the data, since each member has a model of its own."""
    from slipstream import config as configs

    defaults = tomllib.loads(configs.to_toml(configs.Config()))
    rows = list_differences({"run": files.config, "default": defaults})
    settings = {row["setting"]: row["run"] for row in rows if row["run"] is not None}
    if files.kind == "ensemble":
        return {name: value for name, value in settings.items() if name.startswith("data.")}
    return settings


def _judge(files: RunFiles) -> dict[str, str | None]:
    """Return the verdict on a finished run, as a sentence and in a word."""
    nothing: dict[str, str | None] = {"verdict": None, "outcome": None}
    if files.summary is None or files.state != FINISHED:
        return nothing
    summary = dict(files.summary)
    try:
        if files.kind == "probe":
            return {"verdict": str(summary["verdict"]), "outcome": str(summary["helped"])}
        if files.kind == "search":
            sentence = wording.describe_search_verdict(summary)
            return {"verdict": sentence, "outcome": wording.judge_search(summary)}
        return {"verdict": wording.describe_verdict(summary), "outcome": wording.judge(summary)}
    except DAMAGE_ERRORS:  # version 0.1 wrote no checksum that would have shown the damage
        return nothing


def _describe_time(files: RunFiles) -> str | None:
    """Say where the time of a finished run went."""
    summary = files.summary or {}
    try:
        parts = wording.describe_time(summary)
        return f"{format_seconds(wording.get_total_s(summary))}: {parts}" if parts else None
    except DAMAGE_ERRORS:
        return None


def suggest_command(files: RunFiles) -> str | None:
    """Return the command that makes sense next for a run in its state."""
    run = files.folder
    if files.state == RUNNING:
        return None
    if files.state == DAMAGED:
        return f"slipstream runs remove {run}"
    if files.state == FINISHED:
        return SUGGESTED.get(files.kind, f"slipstream predict {run} DATA").format(run=run)
    if files.kind == "probe" and not (run / "encoder").exists():
        return None  # of an encoder that was named on the command line
    if files.kind == "search":
        return studies.suggest_resume(run, studies.read_storage(run))
    if files.kind == "probe":
        return RESUME_PROBE.format(run=run, repeats=make_row(files).repeats)
    return None if files.kind == "ensemble" else suggest_resume(run)
