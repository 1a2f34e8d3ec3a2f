"""New data for a trained model, held against what the model knows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.config import Config, Data, Signature, Split
from slipstream.data import fitting, splits, windows
from slipstream.data import series as prepare
from slipstream.data.dataset import Dataset, HostSeries
from slipstream.data.io.duplicates import find_duplicates
from slipstream.data.io.files import prepare_with_labels, read_tables
from slipstream.data.labels import classes, selection
from slipstream.data.resampling import resample_series
from slipstream.data.roles import Roles
from slipstream.data.scaler import Scaler
from slipstream.data.series import RawSeries, SeriesIndex
from slipstream.data.splits import SplitAssignment
from slipstream.data.windows import Series
from slipstream.errors import UserError

OTHER_STEP = 0.02
"""By how much the step of new data may differ from training's"""
STRANGE_SHARE = 0.05
"""Of a column's values, when they are worth a warning"""


def load_new_data(
    config: Config,
    signature: Signature,
    scaler: Scaler,
    given: Any,
    *,
    targets: bool,
    resample: bool = False,
) -> Dataset:
    """New data for a trained model: a path or a table, all of it one set named "all".

    With `targets`, windows are those whose target rows are known. Without, targets may be absent,
    and windows are those whose context is known, up to each series' last row.
    """
    data = config.data.model_copy(
        update={"where": {}, "split": Split(train=0.7, val=0.1, test=0.2)}
    )
    if isinstance(given, (str, Path)):
        data, given = data.model_copy(update={"path": str(given)}), None
    known = signature.horizon if targets else 0
    store = _store(data, signature, given, targets, min_rows=signature.context + known)
    if _other_step(store.index, signature, resample):
        if targets and signature.classes:
            raise UserError(
                "labels cannot be resampled: what lies between two classes is neither; bring the "
                f"rows and their labels to the step {signature.step:g} beforehand"
            )
        store = resample_series(store, signature.step or 0.0)
    layout = store.index
    everything = SplitAssignment(
        np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int8), layout.num_rows
    )
    ranges = windows.find_ranges(
        layout.breaks,
        everything,
        which=0,
        lead=signature.context if known else signature.context - 1,
        steps_out=max(known, 1),
        stride=data.stride if targets else 1,
    )
    if not len(ranges):
        raise UserError(splits.explain_empty_set("full", layout, layout.num_rows, data))
    starts = {"all": torch.from_numpy(ranges.list_starts())}
    if targets and signature.classes:
        starts = selection.filter_labelled(starts, selection.read_class_numbers(store), signature)
    series = fitting.scale_series(store, scaler, signature)
    return Dataset(
        signature=signature,
        scaler=scaler,
        index=layout,
        num_windows={"all": len(starts["all"])},
        period=None,
        notes=(*_unlike_training(store, series, scaler, signature), *store.notes),
        memory=HostSeries(series, starts, store.time),
        stream=None,
    )


def _store(
    data: Data, signature: Signature, given: Any, targets: bool, *, min_rows: int
) -> RawSeries:
    """What is given, with its labels as the model numbers them."""
    sources = read_tables(data, given)
    roles = Roles(signature.inputs, signature.targets, signature.static)
    read = targets or signature.targets[0] in signature.inputs
    if signature.classes and data.labels is None and read:
        sources, _ = classes.encode_labels(
            sources, signature.targets[0], "data.targets", signature.classes
        )
    if targets:
        store = prepare_with_labels(sources, data, roles, signature.classes, min_rows)[0]
    else:
        store = prepare.prepare_series(sources, data, roles, min_rows=min_rows, need_targets=False)
    return replace(store, notes=(*find_duplicates(sources), *store.notes))


def _other_step(layout: SeriesIndex, signature: Signature, resample: bool) -> bool:
    """Whether rows are further apart, or closer, than those that the model knows."""
    if signature.step is None or layout.step is None:
        return False
    if math.isclose(layout.step, signature.step, rel_tol=OTHER_STEP):
        return False
    if not resample:
        raise UserError(
            f"the rows are {layout.step:g} apart, those that the model was trained on "
            f"{signature.step:g} (seconds, or the time column's unit); resample them to that step, "
            "or pass --resample"
        )
    return True


def _unlike_training(
    store: RawSeries, series: Series, scaler: Scaler, signature: Signature
) -> tuple[str, ...]:
    """Notes on columns with many values far outside of what training saw: other units, perhaps."""
    notes = []
    for i, name in enumerate(fitting.order_columns(signature)):
        if name not in store.column_names:
            continue
        low, high = scaler.low[name], scaler.high[name]
        shift, size = scaler.shift[name], scaler.size[name]
        scaled, margin = series.values[:, i].numpy(), high - low
        below, above = (low - margin - shift) / size, (high + margin - shift) / size
        share = float(np.mean((scaled < below) | (scaled > above)))
        if share > STRANGE_SHARE:
            found = (float(edge) * size + shift for edge in (scaled.min(), scaled.max()))
            notes.append(
                f'column "{name}": {100 * share:.0f} % of the values are far outside of what '
                f"training saw ({low:g} to {high:g}; here {next(found):g} to {next(found):g}); "
                "are its units the same?"
            )
    return tuple(notes)
