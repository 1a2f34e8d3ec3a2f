"""The windows of a run, and the encoder that it starts from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.engine import recovery
from slipstream.models import build
from slipstream.training import encoder as encoders
from slipstream.training.encoder import EncoderMatch, PretrainedEncoder


@recovery.explain_out_of_memory()
def load_dataset(
    settings: Config, data: Any = None, *, num_folds: int = 1
) -> tuple[EncoderMatch | None, Dataset]:
    """The encoder to start from, if any, and the windows, scaled as it knows them; `num_folds` are
    those of a search."""
    encoder = encoders.load_encoder(settings)
    if encoder is None:
        return None, datasets.load_dataset(settings, data, num_folds=num_folds)
    dataset = datasets.load_dataset(settings, data, known=encoder.scaler, num_folds=num_folds)
    with torch.random.fork_rng([]):
        model = build(settings.model, dataset.signature)
    init = encoders.match_weights(encoder, settings, dataset.signature, model)
    notes = [
        f"starts from the encoder of {encoder.folder}: {len(init.weights)} weights matched, new "
        f"are {', '.join(init.summary['new'])}; inputs are scaled as they were there"
    ]
    if data is None and _seen_before(encoder, settings, dataset):
        notes.append(
            "the encoder has seen rows of this run's test set, though not what is predicted there; "
            "pre-train it with the same data.split to keep them unseen"
        )
    return init, replace(dataset, notes=(*dataset.notes, *notes))


def _seen_before(encoder: PretrainedEncoder, settings: Config, dataset: Dataset) -> bool:
    """Whether the encoder was pre-trained on rows that are tested here, as far as can be told."""
    theirs, mine = encoder.config.data, settings.data
    same = all(
        getattr(theirs, name) == getattr(mine, name) for name in ("paths", "ids", "where", "short")
    )
    alike = (theirs.split.by, theirs.split.folders) == (mine.split.by, mine.split.folders)
    return dataset.memory is not None and same and alike and datasets.shares_rows(dataset, theirs)
