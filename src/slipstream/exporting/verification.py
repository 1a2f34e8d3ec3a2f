"""Run an export on every window of the test set and compare it with the model.

The relative difference is taken of the larger of a target's spread in training and the value
itself, so that values near zero do not count more than others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.data.scaler import Scaler
from slipstream.errors import UserError
from slipstream.exporting.formats import Floats, WrittenExport
from slipstream.exporting.interface import Interface
from slipstream.exporting.reference import (
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
        self.windows, self.max_abs, self.max_rel = 0, 0.0, 0.0

    def add(self, outputs: Mapping[str, npt.NDArray[Any]], wanted: dict[str, Floats]) -> None:
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

    def refuse(self, name: str, windows: int, limit: float) -> None:
        """Raise a UserError where the relative difference exceeds the limit."""
        if not self.max_rel <= limit:
            raise UserError(
                f"{name} differ from the model by up to {self.max_rel:.2g} of a value or its "
                f"spread ({self.max_abs:.3g} in its own unit) over {windows:,} windows, which is "
                f"more than {limit:g}; nothing was written"
            )


def verify(
    written: WrittenExport, source: VerificationData, interface: Interface
) -> dict[str, Any]:
    """Return the largest differences over all windows; refuse those beyond the format's limit."""
    requested = source.trained.first.config.train.batch
    batch = requested if isinstance(requested, int) else BATCH
    main = Differences(interface, source.joint.scaler)
    others = {name: Differences(interface, source.joint.scaler) for name in written.others}
    sizes = {batch, *OTHER_BATCHES}
    for number, reference in enumerate(iter_reference(source, interface, batch)):
        main.windows += len(reference.windows.rows)
        main.add(written.run(reference.windows), reference.outputs)
        for name, differences in others.items():
            differences.add(written.others[name](reference.windows), reference.outputs)
        for size in OTHER_BATCHES if number == 0 else ():
            for part in split_batch(next(split_batch(reference, OTHER_WINDOWS)), size):
                main.add(written.run(part.windows), part.outputs)
    if not main.windows:
        raise UserError("there are no windows to verify the export on; pass some with --data FILE")
    for name, differences in {"the exported files": main, **others}.items():
        differences.refuse(name, main.windows, written.limit)
    every = (main, *others.values())
    return {
        "windows": main.windows,
        "max_abs": max(one.max_abs for one in every),
        "max_rel": max(one.max_rel for one in every),
        "limit": written.limit,
        "batches": sorted(sizes),
        "on": "test" if source.which == "test" else "data",
        **({"others": {name: one.max_rel for name, one in others.items()}} if others else {}),
    }
