"""Search folders as `slipstream tune` writes them, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import runs
from slipstream.events import SearchStart, TrialEnd
from tests.logs import read_lines

SPACE = {
    "train.lr": {"low": 1e-4, "high": 1e-2, "log": True},
    "model.hidden": [8, [16, 8]],
    "model.kind": ["lstm", "gru"],
}
PARAMS = {"train.lr": 1e-3, "model.hidden": "[16, 8]", "model.kind": "gru"}


def write_search(out: Path, name: str = "job-1", *, space: Any = SPACE, **tune: Any) -> Path:
    """Write a search that was stopped after its first trials."""
    config = configs.load(
        {
            "name": "job",
            "data": {"path": "simulated:cell", "targets": ["soc_percent"]},
            "tune": {"space": space, "trials": 4, **tune},
        }
    )
    run = runs.create_run(name, out=str(out), files={"config.toml": runs.format_config(config)})
    folder = run.folder.rename(out / name)
    run = runs.Run(folder)
    run.append(make_start(folder, space=list(space)))
    return folder


def make_start(folder: Path, *, trials: int = 4, **values: Any) -> SearchStart:
    """The event with which a search starts or resumes."""
    facts: dict[str, Any] = {"parallel": 2, "space": [], "windows": {}, "device": "cpu", "done": 0}
    return SearchStart(run=str(folder), trials=trials, **(facts | values))


def add_trial(folder: Path, number: int, value: float | None, **about: Any) -> None:
    """Log the end of a trial."""
    values: dict[str, Any] = {"state": "finished", "params": PARAMS, "epochs": 3.0}
    runs.Run(folder).append(TrialEnd(trial=number, value=value, **(values | about)))


def finish_search(folder: Path, **more: Any) -> None:
    """Write what a search without retraining ends with."""
    events = read_lines(runs.Run(folder))
    trials = [
        {key: event[key] for key in ("trial", "state", "value", "params", "epochs")}
        for event in events
        if event["event"] == "trial"
    ]
    runs.write_json(folder / "trials.json", trials)
    summary = {
        "run": str(folder),
        "name": "job",
        "metric": "loss",
        "trials": {"finished": len(trials), "pruned": 0, "failed": 0},
        "best": {"trial": 0, "value": 0.5, "params": PARAMS},
        "retrained": [],
        "test": {},
        "comparison": None,
        "findings": [],
        "importances": {"train.lr": 0.25, "model.kind": 0.75},
        "pending": None,
        "seconds": 3.0,
    }
    runs.write_metrics(runs.Run(folder), summary | more)


def write_journal(
    folder: Path, *operations: dict[str, Any], torn: str = "", name: str = "study.log"
) -> None:
    """Write Optuna's journal."""
    lines = [json.dumps({"op_code": 0, "study_name": "job"}), *map(json.dumps, operations)]
    (folder / name).write_text("\n".join(lines) + "\n" + torn, encoding="utf-8")
