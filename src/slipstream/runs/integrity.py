"""The sums of a finished run's files: what a report is drawn from is compared with them first."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from slipstream.checksums import MANIFEST, compute_sha256
from slipstream.errors import UserError
from slipstream.runs.files import read_json, remove, to_json, write_json, write_text
from slipstream.runs.folder import Run

METRICS = "metrics.json"
SEALED = (
    *("config.toml", "labels.toml", "encoder.toml", "plan.json", "trials.json", "best.toml"),
    *("predictions.parquet", "reconstructions.parquet"),
)


def write_metrics(run: Run, summary: dict[str, Any], *, name: str = METRICS) -> None:
    """Write metrics.json, which says that a run is finished, and before it the SHA-256 sums of all
    that the run has ended with. Of a probe, `name` is another."""
    text = to_json(summary) + "\n"
    there = [run.folder / name for name in SEALED if (run.folder / name).is_file()]
    sums = {path.name: _sum(path) for path in there}
    sums[name] = hashlib.sha256(text.encode()).hexdigest()
    write_json(run.folder / MANIFEST, sums)
    write_text(run.folder / name, text)


def remove_manifest(run: Run) -> None:
    """Drop the sums: the run goes on, and its files will change."""
    remove(run.folder / MANIFEST)


def verify_files(folder: Path, *names: str) -> None:
    """Compare files with the run's sums; a UserError names one that differs. A run that goes on,
    or one of version 0.1, has no sums to compare with."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return
    sums = read_json(manifest)
    fix = f"restore it from a copy, train again, or remove {manifest} to have it read as it is"
    if not isinstance(sums, dict):
        raise UserError(f"{manifest}: lists no files; restore it from a copy, or remove it")
    for name in names:
        path = folder / name
        if name not in sums and not path.exists():
            continue
        if not path.is_file():
            raise UserError(f"{path}: is missing; {fix}")
        if sums.get(name) != _sum(path):
            raise UserError(f"{path}: is damaged (its SHA-256 differs from {MANIFEST}); {fix}")


def read_metrics(folder: Path) -> dict[str, Any]:
    """A finished run's metrics.json, verified."""
    verify_files(folder, METRICS)
    found = read_json(folder / METRICS)
    if not isinstance(found, dict):
        raise UserError(f"{folder / METRICS}: holds no figures; train the run again")
    return found


def _sum(path: Path) -> str:
    try:
        return compute_sha256(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
