"""The page that compares runs: their metrics, differences, settings, commands and configs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from slipstream.catalog.comparison import Comparison, compare_runs, format_bounds, format_setting
from slipstream.catalog.rows import RUNNING
from slipstream.errors import UserError
from slipstream.reporting.formatting import format_metric, format_number
from slipstream.stats import HIGHER_IS_BETTER
from slipstream.webapp import paths
from slipstream.webapp.pages import get_workspace, render
from slipstream.webapp.workspace import Workspace

MOST_RUNS = 8
"""Runs side by side: as many as there are colours for lines"""
MOST_CHOICES = 200
"""Runs that can be chosen on this page; Home lists all"""


def show(request: Request) -> Response:
    """The page of some runs, or what to choose from where there are fewer than two."""
    workspace = get_workspace(request)
    folders, missing = find_folders(workspace, request.query_params.getlist("run"))
    values: dict[str, Any] = {
        "choices": list_choices(workspace, list(folders)),
        "chosen": list(folders),
        "missing": missing,
        "most": MOST_RUNS,
        "comparison": None,
    }
    if len(folders) > 1:
        comparison = compare_runs(*folders.values())
        values |= describe(comparison, folders)
        values["command"] = _format_command(workspace, list(folders))
    return render(request, "compare.html", **values)


def find_folders(workspace: Workspace, names: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Return the folders of runs by their ids, and the ids of those that are gone."""
    names = list(dict.fromkeys(names))
    if len(names) > MOST_RUNS:
        raise UserError(f"{len(names)} runs; choose at most {MOST_RUNS} to compare")
    folders, missing = {}, []
    for name in names:
        try:
            folders[name] = paths.find_run_folder(workspace.folder, name)
        except paths.MissingError:
            missing.append(name)
    return folders, missing


def list_choices(workspace: Workspace, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs to choose from: those that are chosen, then the newest."""
    rows = workspace.rows.list(workspace.folder, workspace.places)
    rows.sort(key=lambda row: row["id"] not in chosen)
    return rows[: max(MOST_CHOICES, len(chosen))]


def describe(comparison: Comparison, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return what the page shows of a comparison."""
    labels = list(comparison.settings[0])[1:] if comparison.settings else _list_labels(comparison)
    ids = list(folders)
    by_label = dict(zip(labels, ids, strict=True))
    return {
        "comparison": comparison,
        "runs": [
            {
                "id": id_,
                "row": row,
                "reference": _format_link([id_, *(one for one in ids if one != id_)]),
                "without": _format_link([one for one in ids if one != id_]),
                "config": paths.read_text(folders[id_] / "config.toml"),
            }
            for id_, row in zip(ids, comparison.runs, strict=True)
        ],
        "settings": [
            (row["setting"], [format_setting(row[label]) for label in labels])
            for row in comparison.settings
        ],
        "metrics": list(_iter_metrics(comparison, labels)),
        "paired": list(_iter_paired(comparison.paired, by_label)),
        "is_running": any(row.state == RUNNING for row in comparison.runs),
        "losses_differ": any(row["setting"] == "train.loss" for row in comparison.settings),
    }


def _list_labels(comparison: Comparison) -> list[str]:
    names = [row.name for row in comparison.runs]
    is_unique = len(set(names)) == len(names)
    return names if is_unique else [str(row.run) for row in comparison.runs]


def _iter_metrics(
    comparison: Comparison, labels: Sequence[str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each metric's name and one cell per run, the best of them marked; there is none where
    the errors cannot be compared."""
    rows = comparison.metrics
    for metric in dict.fromkeys(row["metric"] for row in rows):
        by_run = {row["run"]: row for row in rows if row["metric"] == metric}
        values = {label: _read_value(row) for label, row in by_run.items()}
        choose = max if metric in HIGHER_IS_BETTER else min
        is_judged = len(values) > 1 and not comparison.incomparable
        best = choose(values.values()) if is_judged else None
        cells = []
        for label in labels:
            row = by_run.get(label)
            cells.append(
                {
                    "value": format_number(values[label]) if row else "–",
                    "is_best": row is not None and values[label] == best,
                    "note": _describe_seeds(row) if row else "",
                }
            )
        yield format_metric(metric), cells


def _read_value(row: Mapping[str, Any]) -> float:
    return float(row.get("mean", row["test"]))


def _describe_seeds(row: Mapping[str, Any]) -> str:
    if "mean" not in row:
        return ""
    low, high = (format_number(row[end]) for end in ("low", "high"))
    return f"{low} to {high}, {row['n']} seeds"


def _iter_paired(
    rows: Sequence[Mapping[str, Any]], ids: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the paired metrics, each with its runs and the places of their intervals in a plot."""
    for metric in dict.fromkeys(row["metric"] for row in rows):
        mine = [row for row in rows if row["metric"] == metric]
        bounds = [
            bound
            for row in mine
            for bound in (row.get("difference_low"), row.get("difference_high"))
            if bound is not None
        ]
        low, high = min([0.0, *bounds]), max([0.0, *bounds])
        margin = 0.06 * (high - low) or 1.0

        def place(value: float, low: float = low - margin, high: float = high + margin) -> float:
            return round(100 * (value - low) / (high - low), 2)

        yield {
            "metric": format_metric(metric),
            "zero": place(0.0),
            "runs": [
                {
                    "id": ids.get(row["run"], row["run"]),
                    "value": format_bounds(row, "value", ""),
                    "difference": format_bounds(row, "difference", "difference_"),
                    "verdict": row.get("verdict", ""),
                    "places": [
                        place(row[key])
                        for key in ("difference_low", "difference", "difference_high")
                    ]
                    if "difference_low" in row
                    else None,
                }
                for row in mine
            ],
            "rows": mine[0]["rows"],
        }


def _format_link(ids: Sequence[str]) -> str:
    return "/compare?" + urlencode([("run", one) for one in ids])


def _format_command(workspace: Workspace, ids: Sequence[str]) -> str:
    folders = " ".join(shlex.quote(str(workspace.folder / one)) for one in ids)
    return f"slipstream runs compare {folders}"
