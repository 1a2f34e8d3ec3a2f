"""Scalers of all columns, fitted on what training may know, and the series scaled by them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Data, Signature
from slipstream.data import scaling, windows
from slipstream.data.prepare import Store
from slipstream.data.scaling import Scaler
from slipstream.data.windows import Series


def fit(
    store: Store,
    signature: Signature,
    training: npt.NDArray[np.bool_],
    data: Data,
    known: Scaler | None,
) -> Scaler:
    """From the rows that are for `training`. A label, which stands last, keeps its numbers."""
    names = signature.classes
    columns = store.columns[:-1] if names else store.columns
    scaler = scaling.fit(
        store.values, columns, store.anchors, training, kind=data.scale, known=known
    )
    if names:
        scaler = scaler.joined(scaling.as_it_is(store.columns[-1], high=len(names) - 1.0))
    if not signature.static:
        return scaler
    trained = np.logical_or.reduceat(training, store.layout.offsets[:-1])
    return scaler.joined(_fit_static(store.static, signature.static, trained, data))


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
    if known is not None:
        scaler = scaler.joined(known.only(scaler.shift))
    if signature.static:
        scaler = scaler.joined(_fit_static(static, signature.static, trained, data))
    if signature.classes:
        high = len(signature.classes) - 1.0
        scaler = scaler.joined(scaling.as_it_is(signature.targets[0], high=high))
    return scaler


def _fit_static(
    static: npt.NDArray[np.float64],
    names: tuple[str, ...],
    trained: npt.NDArray[np.bool_],
    data: Data,
) -> Scaler:
    anchors = dict.fromkeys(names, 0.0)
    return scaling.fit(static.astype(np.float32), names, anchors, trained, kind=data.scale)


def scaled_series(store: Store, scaler: Scaler, signature: Signature) -> Series:
    """The store's values, scaled in place, in the signature's order of columns."""
    columns = tuple(dict.fromkeys((*signature.inputs, *signature.targets)))
    values = store.values
    for i, name in enumerate(store.columns):
        scaler.apply(name, values[:, i], store.anchors[name])
    if store.columns != columns:  # targets that predict was not given are left unknown
        found = {name: i for i, name in enumerate(store.columns)}
        ordered = np.full((len(values), len(columns)), np.nan, dtype=np.float32)
        for i, name in enumerate(columns):
            if name in found:
                ordered[:, i] = values[:, found[name]]
        values = ordered
    static = scaled_static(store.static, scaler, signature) if signature.static else None
    offsets = torch.from_numpy(store.layout.offsets)
    return windows.build(torch.from_numpy(values), static, offsets, signature)


def scaled_static(static: npt.NDArray[np.float64], scaler: Scaler, signature: Signature) -> Tensor:
    scaled = static.astype(np.float32)
    for i, name in enumerate(signature.static):
        scaler.apply(name, scaled[:, i], 0.0)
    return torch.from_numpy(scaled)
