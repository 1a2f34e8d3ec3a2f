"""A window is a start row. Batches are gathered from the series on the device that holds them.

Shapes: T context rows, H predicted rows, B windows, F inputs, C targets, K numbers beside the
context: static columns, then the rows of the U inputs that are known ahead, one after the other.
With independent channels a window becomes C sequences of one target each, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Signature
from slipstream.data.scaler import SeriesScales
from slipstream.kernels import should_use_triton


class Batch(NamedTuple):
    """A batch of windows, scaled; time is the first axis of the model's inputs."""

    inputs: Tensor
    """[T, B, F]; independent: [T, B * C, F - C + 1], the sequence's own channel last"""
    static: Tensor | None
    """[B, K]; independent: [B * C, K]"""
    targets: Tensor
    """[B, H, C]; independent: [B * C, H, 1]"""


@dataclass(frozen=True)
class Series:
    """All series on one device, scaled, end to end."""

    values: Tensor
    """[rows, columns]: inputs first, targets last, columns with both roles between"""
    static: Tensor | None
    """[series, static columns]"""
    offsets: Tensor
    """[series + 1]"""
    num_inputs: int
    num_targets: int
    sequences_per_window: int
    """The number of sequences per window: 1, or C with independent channels"""
    context_rows: Tensor
    """[T, 1]: 0, 1, 2 ..."""
    target_rows: Tensor
    """[H]: positions of the target rows, counted from the window's start"""
    num_future: int = 0
    """U, the number of inputs known over the target rows as well; they are the first inputs"""
    has_unknown: bool = False
    """Whether any target is missing: NaN, in no window of any set"""
    segments: Tensor | None = None
    """First rows of the pieces between gaps; None where they are not known"""
    scales: Tensor | None = None
    """[2, series, columns] float64, with `data.scale_by = "series"`: the factor and the offset from
    values in the scale of their series to values in that of the whole table"""

    @property
    def inputs(self) -> Tensor:
        return self.values[:, : self.num_inputs]

    @property
    def targets(self) -> Tensor:
        return self.values[:, self.values.shape[1] - self.num_targets :]

    def to(self, device: torch.device) -> Series:
        names = ("values", "offsets", "context_rows", "target_rows")
        moved = {name: getattr(self, name).to(device) for name in names}
        optional = {"static": self.static, "segments": self.segments, "scales": self.scales}
        moved |= {
            name: tensor.to(device) for name, tensor in optional.items() if tensor is not None
        }
        return replace(self, **moved)

    def find_series(self, starts: Tensor) -> Tensor:
        """Return the series of each window."""
        return torch.bucketize(starts.contiguous(), self.offsets, right=True) - 1

    def to_table_scale(self, values: Tensor, rows: Tensor, columns: slice) -> Tensor:
        """Return values [N, columns] of these rows in the scale of the whole table."""
        if self.scales is None:
            return values
        factor, offset = self.scales[:, self.find_series(rows), columns]
        scaled: Tensor = values * factor + offset
        return scaled

    def compute_differences(self, target: int, distance: int) -> Tensor:
        """Return the absolute difference of each row's target, given by its number, from that of
        the row `distance` rows before, [rows] float64 in the scale of the whole table; 0 for rows
        without such a row."""
        place = self.values.shape[1] - self.num_targets + target
        values = self.values[:, place].double()
        if self.scales is not None:
            owners = self.find_series(torch.arange(len(values), device=values.device))
            factor, offset = self.scales[:, owners, place]
            values = values * factor + offset
        errors = torch.zeros_like(values)
        errors[distance:] = (values[distance:] - values[:-distance]).abs_()
        return errors

    def find_target_scales(self, starts: Tensor) -> Tensor | None:
        """Return the factor and the offset of each window's targets, [2, B, 1, C] (see `scales`);
        None where all series have one scale."""
        if self.scales is None:
            return None
        scales = self.scales[..., self.scales.shape[-1] - self.num_targets :]
        return scales[:, self.find_series(starts), None]


def build_series(
    values: npt.NDArray[np.float32],
    static: npt.NDArray[np.float32] | None,
    scales: SeriesScales | None,
    offsets: npt.NDArray[np.int64],
    signature: Signature,
    segments: npt.NDArray[np.int64] | None = None,
) -> Series:
    """Return scaled rows on the host as series; their memory is shared."""
    return Series(
        values=torch.from_numpy(values),
        static=None if static is None else torch.from_numpy(static),
        offsets=torch.from_numpy(offsets),
        num_inputs=len(signature.inputs),
        num_targets=len(signature.targets),
        sequences_per_window=signature.sequences_per_window,
        context_rows=torch.arange(signature.context)[:, None],
        target_rows=signature.lead + torch.arange(signature.steps_out),
        num_future=signature.future_shape[1],
        has_unknown=bool(np.isnan(values[:, len(signature.inputs) :]).any()),
        segments=None if segments is None else torch.from_numpy(segments),
        scales=None if scales is None else torch.from_numpy(np.stack(scales)),
    )


def concatenate_series(parts: Sequence[Series]) -> tuple[Series, list[int]]:
    """Return several `Series` of one shape as one, and the first row of each in it."""
    if len(parts) == 1:
        return parts[0], [0]
    rows = len(parts[0].values)
    firsts = [rows * i for i in range(len(parts))]
    moved = [part.offsets[1:] + first for part, first in zip(parts, firsts, strict=True)]
    static = [part.static for part in parts if part.static is not None]
    pieces = [part.segments for part in parts if part.segments is not None]
    scales = [part.scales for part in parts if part.scales is not None]
    whole = replace(
        parts[0],
        values=torch.cat([part.values for part in parts]),
        static=torch.cat(static) if static else None,
        offsets=torch.cat([parts[0].offsets[:1], *moved]),
        has_unknown=any(part.has_unknown for part in parts),
        scales=torch.cat(scales, dim=1) if scales else None,
        segments=torch.cat(
            [segments + first for segments, first in zip(pieces, firsts, strict=True)]
        )
        if pieces
        else None,
    )
    return whole, firsts


def gather(series: Series, starts: Tensor) -> Batch:
    """Gather the windows that begin at `starts`, [B]; with [K, B] every result has K in front."""
    return split_channels(*gather_raw(series, starts), series)


def gather_inputs(series: Series, starts: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gather the model's inputs of the windows."""
    context, static = _take_context(series, starts), gather_static(series, starts)
    return split_input_channels(context, static, series.sequences_per_window)


def gather_raw(series: Series, starts: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gather inputs [T, B, F], targets [B, H, C] and static [B, K], channels still together."""
    inputs, targets = _gather_windows(series, starts)
    static = gather_static(series, starts)
    if series.has_unknown:  # a window that pads a batch may have any target, but a finite one
        targets = targets.nan_to_num(0.0)
    return inputs, targets, static


def _gather_windows(series: Series, starts: Tensor) -> tuple[Tensor, Tensor]:
    if should_use_triton(series.values):
        from slipstream.kernels.gather import gather_windows

        columns = series.inputs, series.targets
        return gather_windows(*columns, starts, series.context_rows, series.target_rows)
    return _take_context(series, starts), take_rows(
        series.targets, starts[..., None] + series.target_rows
    )


def _take_context(series: Series, starts: Tensor) -> Tensor:
    return take_rows(series.inputs, starts[..., None, :] + series.context_rows)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return `values[rows]`, on a CPU in a quarter of the time."""
    if values.is_cuda:
        return values[rows]
    return values.index_select(0, rows.reshape(-1)).view(*rows.shape, *values.shape[1:])


def gather_static(series: Series, starts: Tensor) -> Tensor | None:
    """Gather the numbers that windows have besides their context, [B, K]."""
    static = None if series.static is None else series.static[series.find_series(starts)]
    if not series.num_future:
        return static
    known = series.values[:, : series.num_future]
    ahead = take_rows(known, starts[..., None] + series.target_rows)
    return ahead.flatten(-2) if static is None else torch.cat([static, ahead.flatten(-2)], dim=-1)


def gather_rows(series: Series, rows: Tensor) -> Batch:
    """Gather rows [T, B] that a model reads one after the other, each as the last of its context:
    targets [T * B, H, C] and static [T * B, K]. Rows past the last row of all series repeat it."""
    ahead = series.target_rows - series.context_rows[-1]
    positions = (rows.flatten()[:, None] + ahead).clamp(max=len(series.values) - 1)
    targets = take_rows(series.targets, positions)
    if series.has_unknown:
        targets = targets.nan_to_num(0.0)
    static = None if series.static is None else series.static[series.find_series(rows.flatten())]
    if series.num_future:
        known = take_rows(series.values[:, : series.num_future], positions).flatten(-2)
        static = known if static is None else torch.cat([static, known], dim=-1)
    return split_channels(take_rows(series.inputs, rows), targets, static, series)


def split_channels(inputs: Tensor, targets: Tensor, static: Tensor | None, series: Series) -> Batch:
    """Return the batch of the tensors of `gather_raw`, with one sequence per independent
    channel."""
    inputs, static = split_input_channels(inputs, static, series.sequences_per_window)
    if series.sequences_per_window > 1:
        targets = targets.transpose(-2, -1).flatten(-3, -2)[..., None]
    return Batch(inputs, static, targets)


def split_input_channels(
    inputs: Tensor, static: Tensor | None, num_channels: int
) -> tuple[Tensor, Tensor | None]:
    """Return the model's inputs with one sequence per independent channel."""
    if num_channels > 1:
        inputs = _split_rows(inputs, num_shared=inputs.shape[-1] - num_channels)
        static = None if static is None else static.repeat_interleave(num_channels, dim=-2)
    return inputs, static


def gather_past(series: Series, starts: Tensor, num_rows: int) -> Tensor:
    """Gather the last context rows of the targets, [T, B, C], which a baseline may repeat.

    A missing value is replaced by the last known one in the context; missing values at its
    beginning stay.
    """
    rows = series.context_rows if series.has_unknown else series.context_rows[-num_rows:]
    past = _fill_forward(series.targets[starts + rows])[-num_rows:]
    return _split_rows(past, num_shared=0) if series.sequences_per_window > 1 else past


def gather_season(series: Series, starts: Tensor, period: int) -> Tensor:
    """Gather the targets one season before each predicted row, again and again: [B, H, C]. They may
    lie before the context; NaN where the series, or its piece since a gap, begins later."""
    steps = torch.arange(len(series.target_rows), device=starts.device)
    lead = series.target_rows[:1]
    rows = starts[:, None] + lead - period + steps % period
    borders = series.offsets if series.segments is None else series.segments
    first = borders[(torch.bucketize(starts, borders, right=True) - 1).clamp(min=0)]
    values = series.targets[rows.clamp(min=0)]
    return torch.where((rows >= first[:, None])[..., None], values, torch.nan)


def _fill_forward(rows: Tensor) -> Tensor:
    """Replace each missing value along the first axis by the last known one."""
    missing = rows.isnan()
    if not bool(missing.any()):
        return rows
    position = torch.arange(len(rows), device=rows.device).view(-1, *[1] * (rows.dim() - 1))
    known = torch.where(missing, 0, position).cummax(dim=0).values
    return rows.gather(0, known)


def merge_channels(sequences: Tensor, num_channels: int) -> Tensor:
    """Turn [B * C, H, 1, ...] back into [B, H, C, ...]."""
    if num_channels == 1:
        return sequences
    windows: Tensor = sequences.squeeze(2).unflatten(0, (-1, num_channels))
    return windows.transpose(1, 2)


def separate_channels(predictions: Tensor, num_channels: int) -> Tensor:
    """Turn [B, H, C, ...] into [B * C, H, 1, ...], as a model of independent channels predicts."""
    if num_channels == 1:
        return predictions
    return predictions.transpose(1, 2).flatten(0, 1).unsqueeze(2)


def _split_rows(rows: Tensor, *, num_shared: int) -> Tensor:
    """Turn [T, B, num_shared + C] into [T, B * C, num_shared + 1]."""
    channels = rows[..., num_shared:, None]
    if num_shared:
        shared = rows[..., None, :num_shared].expand(*channels.shape[:-1], -1)
        channels = torch.cat([shared, channels], dim=-1)
    return channels.flatten(-3, -2)


class WindowChunk(NamedTuple):
    """Some rows of the series, and the windows that start there."""

    series: Series
    starts: Tensor
    """First rows of the windows, within the chunk"""
    first_row: int
    """The chunk's first row among all rows"""
    series_ids: Tensor
    """The number of each of the chunk's series among all series"""
    time: npt.NDArray[Any] | None
    """The rows' times"""
