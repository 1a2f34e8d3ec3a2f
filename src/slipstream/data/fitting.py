"""Scalers of all columns, fitted on what training may know, and the series scaled by them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Data, Signature
from slipstream.data import scaling, tables, windows
from slipstream.data.prepare import Store
from slipstream.data.scaling import Scaler
from slipstream.data.windows import Series


def fit(
    store: Store,
    signature: Signature,
    training: npt.NDArray[np.bool_],
    data: Data,
    known: Scaler | None,
) -> tuple[Scaler, Series]:
    """A scaler from the rows that are for `training`, but for columns that are `known`, and the
    series scaled by it. A label keeps its numbers."""
    label = signature.targets[0] if signature.classes else None
    values = np.empty((store.layout.num_rows, len(store.columns)), dtype=np.float32)
    columns = in_order(signature)
    parts = []
    for i, name in enumerate(columns):
        column = store.read(name)
        if name == label:
            new = scaling.as_it_is(name, high=len(signature.classes) - 1.0)
        elif known is not None and name in known.shift:
            new = known.only((name,))
        else:
            new = scaling.fit(name, column, training, kind=data.scale)
        new.apply(name, column, values[:, i])
        parts.append(new)
        del column
        tables.release_memory()
    if signature.static:
        trained = np.logical_or.reduceat(training, store.layout.offsets[:-1])
        parts.append(_fit_static(store.static, signature.static, trained, data))
    scaler = scaling.join(data.scale, parts)
    return scaler, _series(values, store, scaler, signature)


def completed(
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
        parts.append(known.only(scaler.shift))
    if signature.static:
        parts.append(_fit_static(static, signature.static, trained, data))
    if signature.classes:
        high = len(signature.classes) - 1.0
        parts.append(scaling.as_it_is(signature.targets[0], high=high))
    return scaling.join(scaler.kind, parts)


def _fit_static(
    static: npt.NDArray[np.float64],
    names: tuple[str, ...],
    trained: npt.NDArray[np.bool_],
    data: Data,
) -> Scaler:
    return scaling.join(
        data.scale,
        (scaling.fit(name, static[:, i], trained, kind=data.scale) for i, name in enumerate(names)),
    )


def in_order(signature: Signature) -> tuple[str, ...]:
    """The columns of a series: inputs first, targets last, those that are both between."""
    return tuple(dict.fromkeys((*signature.inputs, *signature.targets)))


def scaled_series(store: Store, scaler: Scaler, signature: Signature) -> Series:
    """The store's series, scaled; targets that it does not have are left unknown."""
    columns = in_order(signature)
    values = np.full((store.layout.num_rows, len(columns)), np.nan, dtype=np.float32)
    for i, name in enumerate(columns):
        if name in store.columns:
            scaler.apply(name, store.read(name), values[:, i])
            tables.release_memory()
    return _series(values, store, scaler, signature)


def _series(
    values: npt.NDArray[np.float32], store: Store, scaler: Scaler, signature: Signature
) -> Series:
    static = scaled_static(store.static, scaler, signature) if signature.static else None
    offsets = torch.from_numpy(store.layout.offsets)
    return windows.build(torch.from_numpy(values), static, offsets, signature)


def scaled_static(static: npt.NDArray[np.float64], scaler: Scaler, signature: Signature) -> Tensor:
    scaled = np.empty(static.shape, dtype=np.float32)
    for i, name in enumerate(signature.static):
        scaler.apply(name, static[:, i], scaled[:, i])
    return torch.from_numpy(scaled)
