"""Run an export on every window of the test set and compare it with the model.

The relative difference is taken of the larger of a target's spread in training and the value
itself, so that values near zero do not count more than others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.data.scaler import Scaler
from slipstream.errors import UserError
from slipstream.exporting.formats import Floats, WrittenExport
from slipstream.exporting.interface import Interface
from slipstream.exporting.reference import (
    ReferenceBatch,
    VerificationData,
    iter_reference,
    split_batch,
)

BATCH = 256
"""Windows at a time, where a run does not say"""
OTHER_BATCHES = (1, 7)
OTHER_WINDOWS = 50
"""Windows that are run in batches of other sizes as well"""


class Differences:
    """The largest differences so far."""

    def __init__(self, interface: Interface, scaler: Scaler) -> None:
        signature = interface.signature
        self._spread = np.ones(1)
        if not signature.classes:
            self._spread = np.array([scaler.deviation[name] for name in signature.targets])
        self._has_classes = bool(signature.classes)
        self.windows, self.max_abs, self.max_rel = 0, 0.0, 0.0

    def add(self, outputs: dict[str, npt.NDArray[Any]], wanted: dict[str, Floats]) -> None:
        """Compare a batch; what is not a number counts as infinitely far."""
        for name, values in wanted.items():
            other = np.asarray(outputs[name], dtype=np.float64)
            if other.shape != values.shape:
                raise AssertionError(f"{name} is {other.shape}, not {values.shape}")
            spread = self._spread
            if values.ndim == 4:  # quantiles or levels lie behind the targets
                spread = spread[:, None]
            distance = np.nan_to_num(np.abs(other - values), nan=np.inf)
            relative = distance / np.maximum(spread, np.abs(values))
            self.max_abs = max(self.max_abs, float(distance.max()))
            self.max_rel = max(self.max_rel, float(relative.max()))


def verify(
    written: WrittenExport, source: VerificationData, interface: Interface
) -> dict[str, Any]:
    """Return the largest differences over all windows; refuse those beyond the format's limit."""
    requested = source.trained.first.config.train.batch
    batch = requested if isinstance(requested, int) else BATCH
    differences = Differences(interface, source.joint.scaler)
    sizes = {batch}
    for number, reference in enumerate(iter_reference(source, interface, batch)):
        _compare(written, reference, differences)
        differences.windows += len(reference.windows.rows)
        if number == 0:
            few = next(split_batch(reference, OTHER_WINDOWS))
            for size in OTHER_BATCHES:
                sizes.add(size)
                for part in split_batch(few, size):
                    _compare(written, part, differences)
    if not differences.windows:
        raise UserError("there are no windows to verify the export on; pass some with --data FILE")
    if not differences.max_rel <= written.limit:
        raise UserError(
            f"the exported files differ from the model by up to {differences.max_rel:.2g} of a "
            f"value or its spread ({differences.max_abs:.3g} in its own unit) over "
            f"{differences.windows:,} windows, which is more than {written.limit:g}; nothing was "
            "written"
        )
    return {
        "windows": differences.windows,
        "max_abs": differences.max_abs,
        "max_rel": differences.max_rel,
        "limit": written.limit,
        "batches": sorted(sizes),
        "on": "test" if source.which == "test" else "data",
    }


def _compare(written: WrittenExport, reference: ReferenceBatch, differences: Differences) -> None:
    differences.add(dict(written.run(reference.windows)), reference.outputs)
