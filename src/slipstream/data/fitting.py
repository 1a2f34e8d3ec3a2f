"""Scalers of all columns, fitted on what training may know, and the series scaled by them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Data, Signature
from slipstream.data import scaler as scaling
from slipstream.data import windows
from slipstream.data.io import table
from slipstream.data.scaler import Scaler
from slipstream.data.series import RawSeries
from slipstream.data.windows import Series


def fit_scaler(
    store: RawSeries,
    signature: Signature,
    training: npt.NDArray[np.bool_],
    data: Data,
    known: Scaler | None,
) -> tuple[Scaler, Series]:
    """A scaler from the rows that are for `training`, but for columns that are `known`, and the
    series scaled by it. A label keeps its numbers."""
    label = signature.targets[0] if signature.classes else None
    values = np.empty((store.index.num_rows, len(store.column_names)), dtype=np.float32)
    columns = order_columns(signature)
    parts = []
    for i, name in enumerate(columns):
        column = store.read_column(name)
        if name == label:
            new = scaling.make_identity(name, high=len(signature.classes) - 1.0)
        elif known is not None and name in known.shift:
            new = known.select((name,))
        else:
            new = scaling.fit_column(name, column, training, kind=data.scale)
        new.apply(name, column, values[:, i])
        parts.append(new)
        del column
        table.release_memory()
    if signature.static:
        trained = np.logical_or.reduceat(training, store.index.offsets[:-1])
        parts.append(_fit_static(store.static, signature.static, trained, data))
    scaler = scaling.merge_scalers(data.scale, parts)
    return scaler, _series(values, store, scaler, signature)


def complete_scaler(
    scaler: Scaler,
    signature: Signature,
    static: npt.NDArray[np.float64],
    trained: npt.NDArray[np.bool_],
    data: Data,
    known: Scaler | None,
) -> Scaler:
    """A scaler of streamed columns, with what is known of them, statics and the label.

    Statics are learnt from the series of which some row is `trained` on.
    """
    parts = [scaler]
    if known is not None:
        parts.append(known.select(scaler.shift))
    if signature.static:
        parts.append(_fit_static(static, signature.static, trained, data))
    if signature.classes:
        high = len(signature.classes) - 1.0
        parts.append(scaling.make_identity(signature.targets[0], high=high))
    return scaling.merge_scalers(scaler.kind, parts)


def _fit_static(
    static: npt.NDArray[np.float64],
    names: tuple[str, ...],
    trained: npt.NDArray[np.bool_],
    data: Data,
) -> Scaler:
    return scaling.merge_scalers(
        data.scale,
        (
            scaling.fit_column(name, static[:, i], trained, kind=data.scale)
            for i, name in enumerate(names)
        ),
    )


def order_columns(signature: Signature) -> tuple[str, ...]:
    """The columns of a series: inputs first, targets last, those that are both between."""
    return tuple(dict.fromkeys((*signature.inputs, *signature.targets)))


def scale_series(store: RawSeries, scaler: Scaler, signature: Signature) -> Series:
    """The store's series, scaled; targets that it does not have are left unknown."""
    columns = order_columns(signature)
    values = np.full((store.index.num_rows, len(columns)), np.nan, dtype=np.float32)
    for i, name in enumerate(columns):
        if name in store.column_names:
            scaler.apply(name, store.read_column(name), values[:, i])
            table.release_memory()
    return _series(values, store, scaler, signature)


def _series(
    values: npt.NDArray[np.float32], store: RawSeries, scaler: Scaler, signature: Signature
) -> Series:
    static = scale_static(store.static, scaler, signature) if signature.static else None
    offsets = torch.from_numpy(store.index.offsets)
    return windows.build_series(torch.from_numpy(values), static, offsets, signature)


def scale_static(static: npt.NDArray[np.float64], scaler: Scaler, signature: Signature) -> Tensor:
    scaled = np.empty(static.shape, dtype=np.float32)
    for i, name in enumerate(signature.static):
        scaler.apply(name, static[:, i], scaled[:, i])
    return torch.from_numpy(scaled)
