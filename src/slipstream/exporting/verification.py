"""Run an export on every window of the test set and compare it with the model.

The relative difference is the distance between the two numbers divided by the target's spread in
training. Unlike a share of the value, it does not depend on where the target's zero lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream import runs
from slipstream.base.errors import DATA_FILE, Option, UserError
from slipstream.base.statistics import select_median
from slipstream.data.dataset import Dataset
from slipstream.data.scaler import Scaler
from slipstream.data.windows import Series, WindowChunk
from slipstream.exporting.formats import (
    LIMIT,
    Floats,
    Interface,
    ReferenceBatch,
    ReferencePiece,
    Runner,
    SeriesPiece,
    WrittenExport,
    measure_spreads,
    widen_limit,
)
from slipstream.inference.mixture import join_datasets
from slipstream.inference.rows import PhysicalWindows
from slipstream.inference.trained import TrainedRun, load_own_sets
from slipstream.models.losses import select_point
from slipstream.scoring.batch import HalfWidths, PredictionBatch, Predictor
from slipstream.scoring.predict import predict_batches

OWN_SET, NEW_SET = "test", "all"
CARRIED_WINDOWS = 32
"""Windows that whole passes of a model with a carried state are verified on"""


class VerificationData(NamedTuple):
    """The data sets of a run's members, and the set of windows for the verification."""

    trained: TrainedRun
    datasets: list[Dataset]
    set_name: str
    joint: Dataset
    """The windows that all members have"""
    predict: Predictor
    half_widths: HalfWidths | None

    @property
    def num_windows(self) -> int:
        return self.joint.num_windows[self.set_name]


def load_verification_data(trained: TrainedRun, data: Any) -> VerificationData:
    """Load the run's own data with its test windows, or new data with all windows."""
    if data is not None:
        datasets = [
            member.load_new(data, targets=False, resample=False) for member in trained.members
        ]
        set_name = NEW_SET
    else:
        runs.require_data(
            trained.run,
            trained.first.config,
            data,
            (
                "an export is verified on windows before it is written: pass rows with the same "
                "columns with " + DATA_FILE
            ),
        )
        try:
            datasets, set_name = load_own_sets(trained.members), OWN_SET
        except UserError as error:
            raise UserError(
                error.message
                + "\nAn export is verified on windows before it is written: on those of the run's "
                "test set, or on new rows with the same columns (" + DATA_FILE + ")"
            ) from None
    if trained.untested and set_name == OWN_SET:
        set_name = "val"  # an export is compared with the model, on rows that it may have seen
    bound = trained.bind(datasets, [set_name])
    joint, fold = bound.dataset, bound.folds[-1]
    if joint.folds:
        joint = joint.select_fold(joint.folds[-1])
    return VerificationData(trained, datasets, set_name, joint, fold.predict, fold.half_widths)


def iter_reference(
    source: VerificationData, interface: Interface, batch: int
) -> Iterator[ReferenceBatch]:
    """Yield every window, `batch` at a time; where the state is carried on, an even sample of
    windows, each with all rows since the state was zero."""
    readers = _make_readers(source)
    plan = source.trained.first.plan
    rows = source.trained.first.config.engine.buffer_rows
    carried = interface.signature.state == "carried"
    with plan.flags():
        for chunk in source.joint.iter_chunks(source.set_name, None, rows=rows):
            stride = -(-len(chunk.starts) // CARRIED_WINDOWS) if carried else 1
            for starts in chunk.starts[:: max(stride, 1)].split(1 if carried else batch):
                yield _predict_part(source, interface, readers, chunk._replace(starts=starts))


def iter_pieces(source: VerificationData, interface: Interface) -> Iterator[ReferencePiece]:
    """Yield each segment, from the row where the state is zero to its last window, with the
    predictions of all its windows."""
    rows = source.trained.first.config.engine.buffer_rows
    with source.trained.first.plan.flags():
        for chunk in source.joint.iter_chunks(source.set_name, None, rows=rows):
            assert chunk.series.segments is not None
            last = chunk.starts + interface.context - 1
            segments = torch.searchsorted(chunk.series.segments, last, right=True) - 1
            for segment in segments.unique():
                begin, is_inside = int(chunk.series.segments[segment]), segments == segment
                part = chunk._replace(starts=chunk.starts[is_inside])
                piece = _read_piece(part, source.joint, begin, int(last[is_inside].max()) + 1)
                parts = [
                    (_to_physical(batch, source, interface), _restore_truth(batch.truth, source))
                    for batch in predict_batches(
                        source.predict, [part], truth=source.set_name != NEW_SET
                    )
                ]
                outputs = {
                    name: np.concatenate([part_outputs[name] for part_outputs, _ in parts])
                    for name in parts[0][0]
                }
                known = [truth for _, truth in parts if truth is not None]
                truth = np.concatenate(known) if known else None
                yield ReferencePiece(piece, last[is_inside].numpy() - begin, outputs, truth)


def read_start(source: VerificationData, interface: Interface, count: int) -> SeriesPiece:
    """Return the first rows of the first series that has as many, or of the longest one."""
    if source.trained.mixtures:
        return _join_windows(source, interface, count)
    rows = source.trained.first.config.engine.buffer_rows
    chunk = next(iter(source.joint.iter_chunks(source.set_name, None, rows=rows)))
    assert chunk.series.segments is not None
    begins = chunk.series.segments.numpy()
    lengths = np.minimum(np.diff(begins, append=len(chunk.series.values)), count)
    chosen = int(lengths.argmax())
    return _read_piece(
        chunk, source.joint, int(begins[chosen]), int(begins[chosen] + lengths[chosen])
    )


def read_examples(source: VerificationData, interface: Interface, count: int) -> ReferenceBatch:
    """Return this many windows, evenly spread over the first chunk of rows."""
    rows = source.trained.first.config.engine.buffer_rows
    chunk = next(iter(source.joint.iter_chunks(source.set_name, None, rows=rows)))
    places = np.unique(np.linspace(0, len(chunk.starts) - 1, count).round().astype(np.int64))
    part = chunk._replace(starts=chunk.starts[torch.from_numpy(places)])
    with source.trained.first.plan.flags():
        return _predict_part(source, interface, _make_readers(source), part)


def _join_windows(source: VerificationData, interface: Interface, count: int) -> SeriesPiece:
    """Return so many rows, or one window if that is more, in the columns of all members: the rows
    of consecutive windows. What is known ahead is that of the first window, up to its end."""
    rows = source.trained.first.config.engine.buffer_rows
    chunk = next(iter(source.joint.iter_chunks(source.set_name, None, rows=rows)))
    first = int(chunk.starts[0])
    wanted = torch.arange(max(count - interface.context, 0) + 1)
    follow = chunk.starts[: len(wanted)] == first + wanted[: len(chunk.starts)]
    consecutive = chunk._replace(starts=chunk.starts[: int(follow.int().cumprod(0).sum())])
    windows = _read_windows(_make_readers(source), consecutive, interface)
    static = None if windows.static is None else windows.static[0]
    future = None
    if windows.future is not None:
        before = np.repeat(windows.future[:1], interface.context - 1, axis=0)
        future = np.concatenate([before, windows.future])
    joined = np.concatenate([windows.rows[0], windows.rows[1:, -1]])
    return SeriesPiece(joined, static, future)


def _predict_part(
    source: VerificationData,
    interface: Interface,
    readers: Sequence[_MemberReader],
    part: WindowChunk,
) -> ReferenceBatch:
    (predicted,) = predict_batches(source.predict, [part], truth=source.set_name != NEW_SET)
    windows = _read_windows(readers, part, interface)
    if interface.signature.state == "carried" and len(part.starts) == 1:
        end = int(part.starts[0]) + interface.context
        assert part.series.segments is not None
        place = int(torch.searchsorted(part.series.segments, end - 1, right=True)) - 1
        piece = _read_piece(part, source.joint, int(part.series.segments[place]), end)
        windows = windows._replace(rows=piece.rows[None])
    return ReferenceBatch(
        windows=windows,
        outputs=_to_physical(predicted, source, interface),
        truth=_restore_truth(predicted.truth, source),
    )


def _read_piece(chunk: WindowChunk, dataset: Dataset, begin: int, end: int) -> SeriesPiece:
    """Return these rows; behind the last row of the data, what is known ahead is repeated."""
    signature, scaler, series = dataset.signature, dataset.scaler, chunk.series

    def unscale(values: Tensor, names: Sequence[str]) -> Floats:
        columns = [_unscale(values[..., i], name, scaler) for i, name in enumerate(names)]
        return np.stack(columns, axis=-1)

    static = future = None
    if signature.static:
        assert series.static is not None
        static = unscale(series.static[series.find_series(torch.tensor(begin))], signature.static)
    if signature.future_shape[0]:
        starts = torch.arange(begin, end) - signature.context + 1
        places = (starts[:, None] + series.target_rows).clamp(0, len(series.inputs) - 1)
        future = unscale(series.inputs[places], signature.future)
    return SeriesPiece(unscale(series.inputs[begin:end], signature.inputs), static, future)


class _MemberReader(NamedTuple):
    """A member's data set, and where its windows start."""

    dataset: Dataset
    starts: Tensor | None
    """The member's window start for each row where the reference's window starts; None if equal"""

    def select(self, chunk: WindowChunk) -> tuple[Series, Tensor]:
        if self.starts is None:
            return chunk.series, chunk.starts
        assert self.dataset.memory is not None
        return self.dataset.memory.series, self.starts[chunk.starts]


def _make_readers(source: VerificationData) -> list[_MemberReader]:
    """Return the members' readers, the longest context first."""
    trained = source.trained
    if not trained.mixtures:
        return [_MemberReader(source.datasets[0], None)]
    _, starts = join_datasets(source.datasets, trained.reference)
    readers = [_MemberReader(*pair) for pair in zip(source.datasets, starts, strict=True)]
    return sorted(readers, key=lambda reader: -reader.dataset.signature.context)


def _read_windows(
    readers: Sequence[_MemberReader], chunk: WindowChunk, interface: Interface
) -> PhysicalWindows:
    """Gather each column from the first member that reads it."""
    count, horizon = len(chunk.starts), interface.signature.horizon
    rows = np.zeros((count, interface.context, len(interface.inputs)))
    static = np.zeros((count, len(interface.static)))
    future = np.zeros((count, horizon, len(interface.future)))
    missing: dict[str, set[str]] = {
        name: set(getattr(interface, name)) for name in ("inputs", "static", "future")
    }
    for reader in readers:
        signature, scaler = reader.dataset.signature, reader.dataset.scaler
        series, starts = reader.select(chunk)
        for name in _take(missing["inputs"], signature.inputs):
            column = series.inputs[:, signature.inputs.index(name)]
            values = column[starts[:, None] + series.context_rows[:, 0]]
            position = interface.inputs.index(name)
            rows[:, interface.context - signature.context :, position] = _unscale(
                values, name, scaler
            )
        for name in _take(missing["static"], signature.static):
            assert series.static is not None
            values = series.static[series.find_series(starts), signature.static.index(name)]
            static[:, interface.static.index(name)] = _unscale(values, name, scaler)
        for name in _take(missing["future"], signature.future):
            column = series.inputs[:, signature.inputs.index(name)]
            values = column[starts[:, None] + series.target_rows]
            future[:, :, interface.future.index(name)] = _unscale(values, name, scaler)
    return PhysicalWindows(
        rows, static if interface.static else None, future if interface.future else None
    )


def _take(missing: set[str], columns: Collection[str]) -> list[str]:
    """Return the columns that are still missing, and remove them from `missing`."""
    here = [name for name in columns if name in missing]
    missing -= set(here)
    return here


def _unscale(values: Tensor, name: str, scaler: Scaler) -> Floats:
    physical: Floats = values.double().numpy() * scaler.size[name] + scaler.shift[name]
    return physical


def _restore_truth(truth: Tensor | None, source: VerificationData) -> Floats | None:
    if truth is None:
        return None
    signature, scaler = source.joint.signature, source.joint.scaler
    values = [_unscale(truth[..., i], name, scaler) for i, name in enumerate(signature.targets)]
    return np.stack(values, axis=-1)


def _to_physical(
    batch: PredictionBatch, source: VerificationData, interface: Interface
) -> dict[str, Floats]:
    """Return the outputs as `predict` writes them: physical units, or probabilities."""
    signature, scaler = source.joint.signature, source.joint.scaler
    if signature.classes:
        likely = torch.softmax(batch.prediction[:, :, 0].float(), dim=-1)
        return {interface.output: likely.double().numpy()}
    size, shift = (
        np.array([by[name] for name in signature.targets]) for by in (scaler.size, scaler.shift)
    )
    low, high = signature.output_range or (-np.inf, np.inf)

    def restore(values: Tensor) -> Floats:
        """[B, H, C, any]"""
        physical = values.double().numpy() * size[:, None] + shift[:, None]
        return np.asarray(physical.clip(low, high))

    physical = restore(batch.prediction)
    outputs = {interface.output: physical if signature.quantiles else physical[..., 0]}
    if source.half_widths:
        point = select_point(batch.prediction, signature.quantiles)[..., None].double()
        reach = torch.stack([widths.double() for widths in source.half_widths.values()], dim=-1)
        outputs["lower"], outputs["upper"] = restore(point - reach), restore(point + reach)
    return outputs


def split_batch(batch: ReferenceBatch, size: int) -> Iterator[ReferenceBatch]:
    """Yield a batch in parts of this size; the last may be smaller."""
    for begin in range(0, len(batch.windows.rows), size):
        part = slice(begin, begin + size)
        rows, static, future = batch.windows
        windows = PhysicalWindows(
            rows[part],
            None if static is None else static[part],
            None if future is None else future[part],
        )
        outputs = {name: values[part] for name, values in batch.outputs.items()}
        # the truth is compared once, with the whole batch
        yield ReferenceBatch(windows, outputs)


BATCH = 256
"""Windows of a batch where `train.batch` is "auto\""""
OTHER_BATCHES = (1, 7)
"""Further batch sizes: a single window, and a size that divides nothing evenly"""
OTHER_WINDOWS = 50
"""Windows that are run in batches of other sizes as well"""


class Differences:
    """The largest differences between the export and the model so far."""

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
        """Compare a batch; NaN counts as an infinite difference. `read` is the largest
        scaled number that the model reads of each window."""
        for name, values in wanted.items():
            exported = np.asarray(outputs[name], dtype=np.float64)
            if exported.shape != values.shape:
                raise AssertionError(f"{name} is {exported.shape}, not {values.shape}")
            spread, zero = self._spread, self._zero
            if values.ndim == 4:  # quantiles or levels lie behind the targets
                spread, zero = spread[:, None], zero[:, None]
            distance = np.nan_to_num(np.abs(exported - values), nan=np.inf)
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
                "there is no test set to measure the loss of int8 on; export without "
                + Option("int8", True)
                + ", or where the run's own data are"
            )
        model, export = self.model / self._count, self.export / self._count
        loss = export / model - 1 if model else float(export > 0)
        if not loss <= largest:
            raise UserError(
                f"the test error grows by {100 * loss:.2g} % (from {model:.4g} to {export:.4g}), "
                f"which is more than {100 * largest:g} %; nothing was written: export without "
                + Option("int8", True)
            )
        name = "share of wrong classes" if self._signature.classes else "mae over the spread"
        return {
            "error": name,
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
        names = (*written.window_runners, *written.rows)
        self.by_file = {name: Differences(interface, scaler, written.limit) for name in names}
        self.errors = ErrorComparison(interface, scaler)

    def compare_windows(self, run: Runner) -> list[int]:
        """Run all windows and compare them; return the batch sizes that were used."""
        requested = self.source.trained.first.config.train.batch
        batch = requested if isinstance(requested, int) else BATCH
        sizes: set[int] = set()
        for reference in iter_reference(self.source, self.interface, batch):
            count = len(reference.windows.rows)
            outputs = run(reference.windows)
            read = self._measure_inputs(reference.windows)
            self.main.add(outputs, reference.outputs, read)
            self.errors.add(reference, outputs)
            for name, run_file in self.written.window_runners.items():
                self.by_file[name].add(run_file(reference.windows), reference.outputs, read)
                self.by_file[name].windows += count
            for size in () if sizes else OTHER_BATCHES:
                for part in split_batch(next(split_batch(reference, OTHER_WINDOWS)), size):
                    read = self._measure_inputs(part.windows)
                    self.main.add(run(part.windows), part.outputs, read)
            sizes = sizes or {min(size, count) for size in (batch, *OTHER_BATCHES)}
            self.main.windows += count
        return sorted(sizes)

    def compare_rows(self) -> None:
        """Run whole segments row by row and compare them, where the format can."""
        if not self.written.rows:
            return
        for reference in iter_pieces(self.source, self.interface):
            rows = reference.piece.rows[:, None]  # a row affects all later predictions
            read = np.maximum.accumulate(self._measure_inputs(PhysicalWindows(rows, None, None)))
            for name, run in self.written.rows.items():
                outputs_by_row = run(reference.piece)
                outputs = {
                    output: outputs_by_row[output][reference.ends] for output in reference.outputs
                }
                self.by_file[name].add(outputs, reference.outputs, read[reference.ends])
                self.by_file[name].windows += len(reference.ends)
                self.errors.add(reference, outputs)

    def _measure_inputs(self, windows: PhysicalWindows) -> Floats:
        """Return the largest scaled number of each window [B]; rounding errors grow with it."""
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
    main, by_file = comparison.main, comparison.by_file
    compared = (main, *by_file.values())
    windows = max(differences.windows for differences in compared)
    if not windows:
        raise UserError("there are no windows to verify the export on; pass some with " + DATA_FILE)
    for name, differences in {"the exported files": main, **by_file}.items():
        differences.refuse(name, differences.windows)
    largest = written.largest_loss
    loss = {} if largest is None else {"loss": comparison.errors.describe(largest)}
    return {
        "windows": windows,
        "windows_of_set": source.num_windows,
        "max_abs": max(differences.max_abs for differences in compared),
        "max_rel": max(differences.max_rel for differences in compared),
        "limit": max(differences.limit for differences in compared),
        "batches": sizes,
        "on": "test" if source.set_name == "test" else "data",
        **(
            {"others": {name: differences.max_rel for name, differences in by_file.items()}}
            if by_file
            else {}
        ),
        **loss,
    }
