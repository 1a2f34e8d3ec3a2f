"""The data that a run was trained on, loaded again and compared with what training saw."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slipstream import config as configs
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.data.prepare.chain.replay import Replay
from slipstream.errors import UserError
from slipstream.portable import files
from slipstream.runs import Run
from slipstream.scoring.ensemble import RunPredictors


def read_own_data(
    config: Config, trained: RunPredictors, replay: Replay, table: Any = None
) -> Dataset:
    """Load the data of a run, or the table that it was trained on."""
    # a run that started from an encoder has the encoder's scaler, which is not fitted again
    known = trained.scaler.select(trained.signature.inputs) if config.train.init_from else None
    return datasets.load_dataset(config, table, known=known, replay=replay)


def verify_own_data(
    run: Run, config: Config, trained: RunPredictors, dataset: Dataset, table: Any = None
) -> Dataset:
    """Refuse data that the model's scaler or classes no longer fit, and note other changes."""
    signature, scaler = trained.signature, trained.scaler
    if dataset.signature.classes != signature.classes:
        raise UserError(
            "the data of this run have changed since training: the classes now are "
            f"{', '.join(dataset.signature.classes[:20])}, then "
            f"{', '.join(signature.classes[:20])}; to score the model on them as new data, pass "
            "them with --data"
        )
    if any(dataset.left_out.values()) and "left_out" not in files.read_origin(run):
        note = (
            "windows without a target are left out, which was not so when this run was trained: "
            "its sets are not quite those of training"
        )
        replay = Replay(files.read_limits(run))
        dataset = datasets.load_dataset(config, table, known=scaler, replay=replay)
        return replace(dataset, notes=(*dataset.notes, note))
    for name, shift in scaler.shift.items():
        now = dataset.scaler.shift.get(name, math.nan), dataset.scaler.size.get(name, math.nan)
        was = shift, scaler.size[name]
        if not all(
            math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6 * scaler.size[name])
            for a, b in zip(now, was, strict=True)
        ):
            raise UserError(
                f'the data of this run have changed since training: column "{name}" now has '
                f"centre {now[0]:g} and size {now[1]:g}, then {was[0]:g} and {was[1]:g}; to score "
                "the model on them as new data, pass them with --data"
            )
    if has_changed(run, config, dataset):
        note = (
            "the data of this run have changed since training, though its inputs are scaled as "
            "they were; these metrics are of the data as they are now"
        )
        return replace(dataset, notes=(*dataset.notes, note))
    return dataset


def has_changed(run: Run, config: Config, dataset: Dataset) -> bool:
    """Say whether the data's fingerprint differs from that of training, if the two are comparable:
    other windows have another fingerprint, and so has the same data when it is streamed."""
    origin = files.read_origin(run)
    changed = configs.list_differences(files.load_run_config(run), config)
    same_windows = not any(
        name.startswith("data.") and name not in ("data.path", "data.labels") for name in changed
    )
    same_kind = origin.get("streamed") == (dataset.stream is not None)
    return same_windows and same_kind and origin["data"] != dataset.compute_fingerprint()
