"""Run an export on every window of the test set and compare it with the model.

The relative difference is a number's distance from the model's, divided by the target's spread in
training: what a prediction is good for is measured by that, wherever the target's zero lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.data.scaler import Scaler
from slipstream.errors import UserError
from slipstream.exporting.formats import (
    LIMIT,
    Floats,
    ReferenceBatch,
    ReferencePiece,
    Runner,
    WrittenExport,
)
from slipstream.exporting.interface import Interface, measure_spreads, widen_limit
from slipstream.exporting.reference import (
    VerificationData,
    iter_pieces,
    iter_reference,
    split_batch,
)
from slipstream.portable.rows import PhysicalWindows
from slipstream.stats import select_median

BATCH = 256
"""Windows at a time, where a run does not say"""
OTHER_BATCHES = (1, 7)
OTHER_WINDOWS = 50
"""Windows that are run in batches of other sizes as well"""


class Differences:
    """The largest differences so far."""

    def __init__(self, interface: Interface, scaler: Scaler, limit: float = LIMIT) -> None:
        signature = interface.signature
        self._spread, self._zero, self._unit = np.ones(1), np.zeros(1), np.zeros(1)
        if not signature.classes:
            self._spread = measure_spreads(signature.targets, scaler)
            self._zero = np.array([scaler.shift[name] for name in signature.targets])
            self._unit = np.array([scaler.size[name] for name in signature.targets])
        self._is_float = interface.dtype == "float32"
        self._limit = self.limit = limit
        self.windows, self.max_abs, self.max_rel, self.excess = 0, 0.0, 0.0, 0.0

    def add(
        self,
        outputs: Mapping[str, npt.NDArray[Any]],
        wanted: dict[str, Floats],
        read: Floats | float = 0.0,
    ) -> None:
        """Compare a batch; what is not a number counts as infinitely far. `read` is the largest
        scaled number that the model reads of each window."""
        for name, values in wanted.items():
            other = np.asarray(outputs[name], dtype=np.float64)
            if other.shape != values.shape:
                raise AssertionError(f"{name} is {other.shape}, not {values.shape}")
            spread, zero = self._spread, self._zero
            if values.ndim == 4:  # quantiles or levels lie behind the targets
                spread, zero = spread[:, None], zero[:, None]
            distance = np.nan_to_num(np.abs(other - values), nan=np.inf)
            relative = distance / spread
            inputs = np.reshape(read, (-1, *[1] * (values.ndim - 1))) * self._unit.reshape(
                zero.shape
            )
            size = np.maximum(np.abs(values - zero), inputs)
            if self._is_float:  # it is rounded once more, in physical units
                size = np.maximum(size, np.abs(values))
            allowed = widen_limit(self._limit, size / spread)
            self.max_abs = max(self.max_abs, float(distance.max()))
            self.max_rel = max(self.max_rel, float(relative.max()))
            self.excess = max(self.excess, float((relative / allowed).max()))
            self.limit = max(self.limit, float(allowed.max()))

    def refuse(self, name: str, windows: int) -> None:
        """Raise a UserError where a difference exceeds the limit."""
        if not self.excess <= 1:
            raise UserError(
                f"{name} differ from the model by up to {self.max_rel:.2g} of the target's spread "
                f"({self.max_abs:.3g} in its own unit) over {windows:,} windows, which is more "
                f"than {self._limit:g}; nothing was written"
            )


class ErrorComparison:
    """The test error of the model and of the export: the mean absolute error over the spread of
    each target, or the share of wrong classes."""

    def __init__(self, interface: Interface, scaler: Scaler) -> None:
        self._signature = interface.signature
        self._spread = np.ones(1)
        if not self._signature.classes:
            self._spread = measure_spreads(self._signature.targets, scaler)
        self._output = interface.output
        self.model = self.export = 0.0
        self._count = 0

    def add(
        self,
        reference: ReferenceBatch | ReferencePiece,
        outputs: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        if reference.truth is None:
            return
        self.model += self._sum(reference.outputs[self._output], reference.truth)
        self.export += self._sum(outputs[self._output], reference.truth)
        self._count += reference.truth.size

    def _sum(self, values: npt.NDArray[Any], truth: Floats) -> float:
        if self._signature.classes:
            return float((values.argmax(axis=-1) != truth[..., 0]).sum())
        if self._signature.quantiles:
            values = select_median(values, self._signature.quantiles)
        return float((np.abs(values - truth) / self._spread).sum())

    def describe(self, largest: float) -> dict[str, Any]:
        """Return both errors; refuse an export whose error is larger by more than this share."""
        if not self._count:
            raise UserError(
                "there is no test set to measure the loss of int8 on; export without --int8, or "
                "where the run's own data are"
            )
        model, export = self.model / self._count, self.export / self._count
        loss = export / model - 1 if model else float(export > 0)
        if not loss <= largest:
            raise UserError(
                f"the test error grows by {100 * loss:.2g} % (from {model:.4g} to {export:.4g}), "
                f"which is more than {100 * largest:g} %; nothing was written: export without "
                "--int8"
            )
        what = "share of wrong classes" if self._signature.classes else "mae over the spread"
        return {
            "error": what,
            "model": model,
            "export": export,
            "relative": loss,
            "limit": largest,
        }


class ExportComparison:
    """Runs the files of an export on the windows of a set."""

    def __init__(
        self, written: WrittenExport, source: VerificationData, interface: Interface
    ) -> None:
        self.written, self.source, self.interface = written, source, interface
        scaler = source.joint.scaler
        self.main = Differences(interface, scaler, written.limit)
        names = (*written.others, *written.rows)
        self.others = {name: Differences(interface, scaler, written.limit) for name in names}
        self.errors = ErrorComparison(interface, scaler)

    def compare_windows(self, run: Runner) -> list[int]:
        """Run all windows; return the sizes of batches."""
        requested = self.source.trained.first.config.train.batch
        batch = requested if isinstance(requested, int) else BATCH
        sizes: set[int] = set()
        for reference in iter_reference(self.source, self.interface, batch):
            count = len(reference.windows.rows)
            outputs = run(reference.windows)
            read = self._measure_inputs(reference.windows)
            self.main.add(outputs, reference.outputs, read)
            self.errors.add(reference, outputs)
            for name, other in self.written.others.items():
                self.others[name].add(other(reference.windows), reference.outputs, read)
                self.others[name].windows += count
            for size in () if sizes else OTHER_BATCHES:
                for part in split_batch(next(split_batch(reference, OTHER_WINDOWS)), size):
                    read = self._measure_inputs(part.windows)
                    self.main.add(run(part.windows), part.outputs, read)
            sizes = sizes or {min(size, count) for size in (batch, *OTHER_BATCHES)}
            self.main.windows += count
        return sorted(sizes)

    def compare_rows(self) -> None:
        """Run whole pieces of series row by row, where the format has such a way to run."""
        if not self.written.rows:
            return
        for reference in iter_pieces(self.source, self.interface):
            rows = reference.piece.rows[:, None]  # each of them counts from there on
            read = np.maximum.accumulate(self._measure_inputs(PhysicalWindows(rows, None, None)))
            for name, run in self.written.rows.items():
                every = run(reference.piece)
                outputs = {one: every[one][reference.ends] for one in reference.outputs}
                self.others[name].add(outputs, reference.outputs, read[reference.ends])
                self.others[name].windows += len(reference.ends)
                self.errors.add(reference, outputs)

    def _measure_inputs(self, windows: PhysicalWindows) -> Floats:
        """Return the largest scaled number of each window [B]: rounding is a share of that, too."""
        scaler, interface = self.source.joint.scaler, self.interface
        columns = (interface.inputs, interface.static, interface.future)
        largest = np.zeros(len(windows.rows))
        for values, names in zip(windows, columns, strict=True):
            if values is None:
                continue
            for place, name in enumerate(names):
                if name not in scaler.size:  # of another member
                    continue
                scaled = np.abs(values[..., place] - scaler.shift[name]) / scaler.size[name]
                largest = np.maximum(largest, scaled.reshape(len(largest), -1).max(axis=1))
        return largest


def verify(
    written: WrittenExport, source: VerificationData, interface: Interface
) -> dict[str, Any]:
    """Return the largest differences over all windows; refuse those beyond the format's limit.

    Where the state is carried on, rows one by one and passes over all rows of a series are compared
    at every window of the set, and the files themselves at some.
    """
    comparison = ExportComparison(written, source, interface)
    sizes = [1] if written.run is None else comparison.compare_windows(written.run)
    comparison.compare_rows()
    main, others = comparison.main, comparison.others
    every = (main, *others.values())
    windows = max(one.windows for one in every)
    if not windows:
        raise UserError("there are no windows to verify the export on; pass some with --data FILE")
    for name, differences in {"the exported files": main, **others}.items():
        differences.refuse(name, differences.windows)
    largest = written.largest_loss
    loss = {} if largest is None else {"loss": comparison.errors.describe(largest)}
    return {
        "windows": windows,
        "windows_of_set": source.num_windows,
        "max_abs": max(one.max_abs for one in every),
        "max_rel": max(one.max_rel for one in every),
        "limit": max(one.limit for one in every),
        "batches": sizes,
        "on": "test" if source.which == "test" else "data",
        **({"others": {name: one.max_rel for name, one in others.items()}} if others else {}),
        **loss,
    }
