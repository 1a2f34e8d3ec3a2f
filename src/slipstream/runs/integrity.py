"""SHA-256 sums of a finished run's files, verified before a report is drawn from them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from slipstream.checksums import MANIFEST, compute_sha256
from slipstream.errors import UserError
from slipstream.runs.files import read_json, remove, to_json, write_json, write_text
from slipstream.runs.folder import Run

METRICS = "metrics.json"
LISTED = (
    *("config.toml", "labels.toml", "encoder.toml", "plan.json", "trials.json", "best.toml"),
    *("predictions.parquet", "reconstructions.parquet"),
)


def write_metrics(run: Run, summary: dict[str, Any], *, name: str = METRICS) -> None:
    """Write metrics.json, which marks a run as finished, and before it the manifest of SHA-256 sums
    of all its files. A probe uses another `name`."""
    text = to_json(summary) + "\n"
    files = [run.folder / name for name in LISTED if (run.folder / name).is_file()]
    sums = {path.name: _compute_sum(path) for path in files}
    sums[name] = hashlib.sha256(text.encode()).hexdigest()
    write_json(run.folder / MANIFEST, sums)
    write_text(run.folder / name, text)


def remove_manifest(run: Run) -> None:
    """Remove the manifest: the run continues, and its files will change."""
    remove(run.folder / MANIFEST)


def verify_files(folder: Path, *names: str) -> None:
    """Verify files against the run's manifest; a UserError names a damaged one. Unfinished runs and
    runs of version 0.1 have no manifest."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return
    sums = read_json(manifest)
    fix = f"restore it from a copy, train again, or remove {manifest} to skip the check"
    if not isinstance(sums, dict):
        raise UserError(f"{manifest}: lists no files; restore it from a copy, or remove it")
    for name in names:
        path = folder / name
        if name not in sums and not path.exists():
            continue
        if not path.is_file():
            raise UserError(f"{path}: is missing; {fix}")
        if sums.get(name) != _compute_sum(path):
            raise UserError(f"{path}: is damaged (its SHA-256 differs from {MANIFEST}); {fix}")


def read_metrics(folder: Path) -> dict[str, Any]:
    """Read and verify the metrics.json of a finished run."""
    verify_files(folder, METRICS)
    metrics = read_json(folder / METRICS)
    if not isinstance(metrics, dict):
        raise UserError(f"{folder / METRICS}: holds no metrics; train the run again")
    return metrics


def _compute_sum(path: Path) -> str:
    try:
        return compute_sha256(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
