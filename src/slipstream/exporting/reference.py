"""The windows that an export is verified on, in physical units, and what the model predicts there.

A data set holds scaled rows in float32. Physical rows are computed back from them in float64, which
costs less than a float32's last digit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream import runs
from slipstream.data.dataset import Dataset
from slipstream.data.scaler import Scaler
from slipstream.data.windows import Series, WindowChunk
from slipstream.errors import UserError
from slipstream.exporting.formats import Floats, ReferenceBatch, ReferencePiece, SeriesPiece
from slipstream.exporting.interface import Interface
from slipstream.inference.alignment import join_datasets
from slipstream.inference.trained import TrainedRun, load_own_sets
from slipstream.objectives import select_point
from slipstream.portable.rows import PhysicalWindows
from slipstream.scoring.batch import HalfWidths, PredictionBatch, Predictor
from slipstream.scoring.predict import predict_batches

OWN_SET, NEW_SET = "test", "all"
CARRIED_WINDOWS = 32
"""Windows that whole passes of a model with a carried state are verified on"""


class VerificationData(NamedTuple):
    """The data sets of a run's members, and which of their windows count."""

    trained: TrainedRun
    datasets: list[Dataset]
    which: str
    joint: Dataset
    """The windows that all members have"""
    predict: Predictor
    half_widths: HalfWidths | None

    @property
    def num_windows(self) -> int:
        return self.joint.num_windows[self.which]


def load_verification_data(trained: TrainedRun, data: Any) -> VerificationData:
    """Load the run's own data with its test windows, or new data with all windows."""
    if data is not None:
        datasets = [one.load_new(data, targets=False, resample=False) for one in trained.members]
        which = NEW_SET
    else:
        runs.require_data(
            trained.run,
            trained.first.config,
            data,
            "an export is verified on windows before it is written: pass rows with the same "
            "columns with --data FILE",
        )
        try:
            datasets, which = load_own_sets(trained.members), OWN_SET
        except UserError as error:
            raise UserError(
                f"{error}\nAn export is verified on windows before it is written: on those of the "
                "run's test set, or on new rows with the same columns (--data FILE)"
            ) from None
    bound = trained.bind(datasets, [which])
    joint, fold = bound.dataset, bound.folds[-1]
    if joint.folds:
        joint = joint.select_fold(joint.folds[-1])
    return VerificationData(trained, datasets, which, joint, fold.predict, fold.half_widths)


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
        for chunk in source.joint.iter_chunks(source.which, None, rows=rows):
            stride = -(-len(chunk.starts) // CARRIED_WINDOWS) if carried else 1
            for starts in chunk.starts[:: max(stride, 1)].split(1 if carried else batch):
                yield _predict_part(source, interface, readers, chunk._replace(starts=starts))


def iter_pieces(source: VerificationData, interface: Interface) -> Iterator[ReferencePiece]:
    """Yield the rows from each place where the state is zero to the last window after it, with the
    predictions of every window."""
    rows = source.trained.first.config.engine.buffer_rows
    with source.trained.first.plan.flags():
        for chunk in source.joint.iter_chunks(source.which, None, rows=rows):
            assert chunk.series.segments is not None
            last = chunk.starts + interface.context - 1
            places = torch.searchsorted(chunk.series.segments, last, right=True) - 1
            for place in places.unique():
                begin, own = int(chunk.series.segments[place]), places == place
                part = chunk._replace(starts=chunk.starts[own])
                piece = _read_piece(part, source.joint, begin, int(last[own].max()) + 1)
                parts = [
                    (_to_physical(one, source, interface), _restore_truth(one.truth, source))
                    for one in predict_batches(
                        source.predict, [part], truth=source.which == OWN_SET
                    )
                ]
                outputs = {
                    name: np.concatenate([one[name] for one, _ in parts]) for name in parts[0][0]
                }
                known = [truth for _, truth in parts if truth is not None]
                truth = np.concatenate(known) if known else None
                yield ReferencePiece(piece, last[own].numpy() - begin, outputs, truth)


def read_start(source: VerificationData, count: int) -> SeriesPiece:
    """Return the first rows of the first series that has as many, or of the longest one."""
    rows = source.trained.first.config.engine.buffer_rows
    chunk = next(iter(source.joint.iter_chunks(source.which, None, rows=rows)))
    assert chunk.series.segments is not None
    begins = chunk.series.segments.numpy()
    lengths = np.minimum(np.diff(begins, append=len(chunk.series.values)), count)
    chosen = int(lengths.argmax())
    return _read_piece(
        chunk, source.joint, int(begins[chosen]), int(begins[chosen] + lengths[chosen])
    )


def read_examples(source: VerificationData, interface: Interface, count: int) -> ReferenceBatch:
    """Return some of the windows, spread evenly over the first rows that are loaded at a time."""
    rows = source.trained.first.config.engine.buffer_rows
    chunk = next(iter(source.joint.iter_chunks(source.which, None, rows=rows)))
    places = np.unique(np.linspace(0, len(chunk.starts) - 1, count).round().astype(np.int64))
    part = chunk._replace(starts=chunk.starts[torch.from_numpy(places)])
    with source.trained.first.plan.flags():
        return _predict_part(source, interface, _make_readers(source), part)


def _predict_part(
    source: VerificationData,
    interface: Interface,
    readers: Sequence[_MemberReader],
    part: WindowChunk,
) -> ReferenceBatch:
    (predicted,) = predict_batches(source.predict, [part], truth=source.which == OWN_SET)
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
    """What a member reads: its series and scaler, and where its windows start."""

    dataset: Dataset
    starts: Tensor | None
    """By the row that the reference's window starts at; None where they are the same"""

    def select(self, chunk: WindowChunk) -> tuple[Series, Tensor]:
        if self.starts is None:
            return chunk.series, chunk.starts
        assert self.dataset.memory is not None
        return self.dataset.memory.series, self.starts[chunk.starts]


def _make_readers(source: VerificationData) -> list[_MemberReader]:
    """Return the members' readers, those with the longest context first."""
    trained = source.trained
    if not trained.mixtures:
        return [_MemberReader(source.datasets[0], None)]
    _, starts = join_datasets(source.datasets, trained.reference)
    readers = [_MemberReader(*pair) for pair in zip(source.datasets, starts, strict=True)]
    return sorted(readers, key=lambda one: -one.dataset.signature.context)


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
            own = column[starts[:, None] + series.context_rows[:, 0]]
            place = interface.inputs.index(name)
            rows[:, interface.context - signature.context :, place] = _unscale(own, name, scaler)
        for name in _take(missing["static"], signature.static):
            assert series.static is not None
            own = series.static[series.find_series(starts), signature.static.index(name)]
            static[:, interface.static.index(name)] = _unscale(own, name, scaler)
        for name in _take(missing["future"], signature.future):
            column = series.inputs[:, signature.inputs.index(name)]
            own = column[starts[:, None] + series.target_rows]
            future[:, :, interface.future.index(name)] = _unscale(own, name, scaler)
    return PhysicalWindows(
        rows, static if interface.static else None, future if interface.future else None
    )


def _take(missing: set[str], columns: Collection[str]) -> list[str]:
    """Return those of the columns that are missing, and strike them off."""
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

    every = restore(batch.prediction)
    outputs = {interface.output: every if signature.quantiles else every[..., 0]}
    if source.half_widths:
        point = select_point(batch.prediction, signature.quantiles)[..., None].double()
        reach = torch.stack([one.double() for one in source.half_widths.values()], dim=-1)
        outputs["lower"], outputs["upper"] = restore(point - reach), restore(point + reach)
    return outputs


def split_batch(batch: ReferenceBatch, size: int) -> Iterator[ReferenceBatch]:
    """Yield a batch in parts of this size; the last may be smaller."""
    for begin in range(0, len(batch.windows.rows), size):
        part = slice(begin, begin + size)
        windows = (None if values is None else values[part] for values in batch.windows)
        outputs = {name: values[part] for name, values in batch.outputs.items()}
        # the truth is compared once, with the whole batch
        yield ReferenceBatch(PhysicalWindows(*windows), outputs)  # type: ignore[arg-type]
