"""Examines a job: notes on its data and settings, and what would help, measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream.models import permission
from slipstream.training import advice
from slipstream.training.context import load_dataset


def examine_job(path: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Load a job's data, note what is suspicious, and try what often helps for a few seconds."""
    config = configs.load(path)
    permission.allow_classes(config)
    tell(f"reading the data of {path} ...")
    _, dataset = load_dataset(config)
    return {
        "config": str(path),
        "series": len(dataset.index.series_names),
        "windows": dataset.num_windows,
        "windows_without_target": dataset.left_out,
        "notes": list(dataset.notes),
        "advice": advice.measure_suggestions(config, tell=tell),
    }
