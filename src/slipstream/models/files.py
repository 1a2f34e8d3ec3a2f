"""The files of a run's model: weights as safetensors, everything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.run_names import ENSEMBLE_FILE
from slipstream.base.storage import read_verified
from slipstream.config import Config, Signature
from slipstream.data.scaler import Scaler
from slipstream.models.numpy_layers import Weights
from slipstream.runs import Run

if TYPE_CHECKING:
    from slipstream.data.prepare.steps import Limits

Content = TypeVar("Content")
WEIGHTS_FILE, SIGNATURE_FILE, SCALER_FILE = "weights.safetensors", "signature.json", "scaler.json"
ORIGIN = "origin.json"
WHOLE = "whole"
"""The entry of an origin that says that the rows of all sets were training rows"""
PREPARE_FILE = "prepare.json"
"""The file with the fitted ranges of the steps of `data.prepare`"""


def parse_safetensors(
    content: bytes, path: Path, load: Callable[[bytes], dict[str, Content]]
) -> dict[str, Content]:
    """Return the arrays or tensors of a file by name."""
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from None


def parse_weights(content: bytes, path: Path) -> Weights:
    """Return weights as float32 arrays by name."""
    arrays = parse_safetensors(content, path, safetensors.numpy.load)
    return {name: np.asarray(array, dtype=np.float32) for name, array in arrays.items()}


def parse_description(files: dict[str, bytes]) -> tuple[Signature, Scaler]:
    """Return the columns that a model reads, and how they are scaled."""
    signature = Signature.model_validate_json(files[SIGNATURE_FILE])
    content = json.loads(files[SCALER_FILE])
    return signature, Scaler(**content | {"series": tuple(content.get("series", ()))})


def load_run_config(run: Run, overrides: Iterable[str] = ()) -> Config:
    """Load the run's config with overrides, after a check that its model was trained with it."""
    if (run.folder / ENSEMBLE_FILE).exists():
        raise UserError(
            f"{run.folder}: is an ensemble, which has several models; name one of its members, "
            f"such as {run.folder / 'members' / '1'}"
        )
    return runs.load_config(run, overrides, origin=read_origin(run))


def read_origin(run: Run) -> dict[str, Any]:
    """Read the origin of a model: `config`, the text of config.toml, and `data`, the fingerprint.
    Runs of version 0.1 have no such file."""
    origin: dict[str, Any] = json.loads(read_verified(run.model).get(ORIGIN, b"{}"))
    return origin


def read_limits(run: Run) -> dict[str, Limits]:
    """Read the ranges that steps of `data.prepare` were fitted to, by the step's number."""
    return parse_limits(read_verified(run.model))


def parse_limits(files: dict[str, bytes]) -> dict[str, Limits]:
    """Return the ranges that steps of `data.prepare` were fitted to, by the step's number."""
    content = json.loads(files.get(PREPARE_FILE, b"{}"))
    return {
        number: {name: (low, high) for name, (low, high) in ranges.items()}
        for number, ranges in content.get("limits", {}).items()
    }
