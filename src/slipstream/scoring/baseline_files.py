"""The fitted baselines of a run, saved beside its model: new data are scored without the old."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream import checksums
from slipstream.config import Signature
from slipstream.engine import checkpoint
from slipstream.runs import Run
from slipstream.scoring.baselines import restore_baseline
from slipstream.scoring.batch import Baseline

FOLDER, WEIGHTS, METADATA = "baselines", "weights.safetensors", "baselines.json"
MAX_BYTES = 256 * 2**20
"""Larger ones, of very many targets and predicted rows, are not saved but fitted when needed"""


def save_baselines(run: Run, folds: Sequence[Mapping[str, Baseline]]) -> None:
    """Write baselines/, unless they are very large; a run without folds has one entry."""
    tensors: dict[str, Tensor] = {}
    entries: list[dict[str, Any]] = []
    for number, baselines in enumerate(folds):
        for name, one in baselines.items():
            for key, value in one.state.items():
                tensors[f"{number}/{name}/{key}"] = value.detach().cpu().contiguous()
        entries.append(
            {
                name: {"what": one.what, "known": one.predict is not None}
                for name, one in baselines.items()
            }
        )
    if sum(one.nbytes for one in tensors.values()) <= MAX_BYTES:
        folder = run.folder / FOLDER
        checkpoint.write_folder(folder, {WEIGHTS: tensors}, {METADATA: {"folds": entries}})


def load_baselines(
    run: Run, signature: Signature, device: torch.device
) -> list[dict[str, Baseline]] | None:
    """Load the baselines of every fold; None where a run has none, as those of version 0.1."""
    folder = run.folder / FOLDER
    if not folder.exists():
        return None
    files = checksums.read_verified(folder)
    tensors = checkpoint.parse_tensors(files[WEIGHTS], folder / WEIGHTS)
    folds = []
    for number, entries in enumerate(json.loads(files[METADATA])["folds"]):
        baselines = {}
        for name, entry in entries.items():
            prefix = f"{number}/{name}/"
            state = {
                key.removeprefix(prefix): value.to(device)
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            baselines[name] = Baseline(entry["what"], None)
            if entry["known"]:
                baselines[name] = restore_baseline(name, entry["what"], state, signature)
        folds.append(baselines)
    return folds
