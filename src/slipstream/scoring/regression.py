"""Error metrics of predicted numbers, in physical units.

The sums stay on the device, in scaled units. Shapes: B windows, H predicted rows, C targets,
S series.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.base.statistics import PairedComparison, WindowUnits, compare_predictors
from slipstream.data.dataset import Dataset
from slipstream.data.predictions import list_number_columns, to_physical
from slipstream.data.scaler import Scaler
from slipstream.models.losses import select_point
from slipstream.runs.summary import ClassComparison, SetDetail
from slipstream.scoring.batch import HalfWidths, PredictionBatch, select_firsts, sum_by_group

Array = npt.NDArray[Any]

NAMES = ("mae", "rmse", "mse", "r2", "max_error", "bias")
HEADLINE = "mae"
MAX_UNITS = 4096
"""The number of windows whose errors are kept separately; of more windows, neighbours are joined"""
COMPARED: dict[str, Callable[[Array], Array]] = {
    "mae": lambda sums: sums[..., 1] / sums[..., 0],
    "rmse": lambda sums: np.sqrt(sums[..., 2] / sums[..., 0]),
    "scaled_mae": lambda sums: sums[..., 3] / sums[..., 0],
    "scaled_mse": lambda sums: sums[..., 4] / sums[..., 0],
}
"""The functions that compute metrics from the number of windows and their absolute and squared
errors, in physical and in standardised units, as means over the targets"""


class WindowSums:
    """Errors window by window, in the order in which they come. Above a limit, neighbours are
    joined, so that memory is bounded for any number of windows."""

    def __init__(self, num_sums: int, device: torch.device) -> None:
        self._sums = torch.zeros(MAX_UNITS, num_sums, dtype=torch.float64, device=device)
        self._firsts = torch.zeros(MAX_UNITS, dtype=torch.int64, device=device)
        self._count, self._joined = 0, 1

    def add(self, values: Tensor, starts: Tensor) -> None:
        """Add the sums [B, K] of windows that begin with these rows [B]; never waits."""
        count = len(starts)
        while self._count + count > MAX_UNITS * self._joined:
            self._join()
        first, before = divmod(self._count, self._joined)
        padding = (0, 0, before, -(before + count) % self._joined)
        units = functional.pad(values, padding).view(-1, self._joined, values.shape[1]).sum(dim=1)
        self._sums[first : first + len(units)] += units
        begin = -self._count % self._joined
        firsts = starts[begin :: self._joined]
        unit = (self._count + begin) // self._joined
        self._firsts[unit : unit + len(firsts)] = firsts
        self._count += count

    def _join(self) -> None:
        """Join each pair of consecutive units."""
        half = MAX_UNITS // 2
        pairs, firsts = self._sums.view(half, 2, -1).sum(dim=1), self._firsts[::2].clone()
        self._sums.zero_()
        self._sums[:half], self._firsts[:half] = pairs, firsts
        self._joined *= 2

    def collect(self) -> WindowUnits:
        """Return the units so far, on the host."""
        num_units = -(-self._count // self._joined)
        return WindowUnits(
            self._firsts[:num_units].cpu().numpy(), self._sums[:num_units].cpu().numpy()
        )


@dataclass(frozen=True)
class RegressionSums:
    """Running sums of the errors over one set of windows. Adding never waits for the device."""

    columns: tuple[str, ...]
    series: tuple[str, ...]
    quantiles: tuple[float, ...]
    size: Tensor
    """[C]: physical units in one scaled unit"""
    deviation: Tensor
    """[C]: standard deviation of the training rows, in physical units"""
    by_step: Tensor
    """[6, H, C] float64: count, error, absolute error, squared error, truth, squared truth"""
    by_series: Tensor
    """[6, S, C]"""
    max_by_step: Tensor
    """[H, C]: largest absolute error"""
    max_by_series: Tensor
    """[S, C]"""
    covered: Tensor
    """[3, C]: number of truths between the outermost quantiles, of all truths, and the distance of
    these quantiles, scaled"""
    pinball: Tensor
    """[C]: pinball loss, averaged over the quantiles; a point prediction counts as each of them"""
    shift: Tensor
    """[C]: the physical value of a scaled zero"""
    units: Tensor
    """[3, C]: `size`, `shift`, and the standard deviations in one scaled unit, on the device, since
    a copy of them for each batch would wait"""
    relative: Tensor
    """[2, S, C]: |error| / (|prediction| + |truth|), and |truth|, in physical units"""
    naive: Tensor | None
    """[S, C]: the mean error of a seasonal naive forecast of each series, scaled; None where
    nothing is forecast"""
    by_window: tuple[WindowSums, ...]
    """The sums for `COMPARED`; of merged sets, one entry for each set"""

    @classmethod
    def zeros(
        cls,
        columns: Sequence[str],
        scaler: Scaler,
        *,
        steps: int,
        series: Sequence[str],
        device: torch.device,
        quantiles: tuple[float, ...] = (),
        naive: Tensor | None = None,
    ) -> RegressionSums:
        """Return empty sums of these columns."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, len(columns), dtype=torch.float64, device=device)

        size, deviation, shift = (
            torch.tensor([by_column[name] for name in columns], dtype=torch.float64)
            for by_column in (scaler.size, scaler.deviation, scaler.shift)
        )
        return cls(
            columns=tuple(columns),
            series=tuple(series),
            quantiles=quantiles,
            size=size,
            deviation=deviation,
            shift=shift,
            units=torch.stack([size, shift, size / deviation]).to(device),
            relative=zeros(2, len(series)),
            naive=naive,
            by_step=zeros(6, steps),
            by_series=zeros(6, len(series)),
            max_by_step=zeros(steps),
            max_by_series=zeros(len(series)),
            covered=zeros(3),
            pinball=zeros(),
            by_window=(WindowSums(5, device),),
        )

    def update(self, batch: PredictionBatch) -> None:
        """Add a batch of predictions."""
        assert batch.truth is not None
        values, truth = batch.prediction, batch.truth
        has_quantiles = values.shape[-1] == len(self.quantiles)  # a baseline has none
        quantiles = self.quantiles if has_quantiles else ()
        series = batch.find_series()
        starts = batch.starts.to(series.device) + batch.chunk.first_row
        self.add(select_point(values, quantiles), truth, starts, series, batch.runs)
        if has_quantiles and len(quantiles) > 1:
            inside = (values[..., 0] <= truth) & (truth <= values[..., -1])
            width = (values[..., -1] - values[..., 0]).double()
            counts = torch.stack([inside, torch.ones_like(inside), width])
            self.covered.add_(counts.sum(dim=(1, 2)))
        if self.quantiles:
            equal = dict.fromkeys(self.quantiles, 1 / len(self.quantiles))
            each = values.expand(*truth.shape, len(self.quantiles)).unbind(dim=-1)
            self.pinball.add_(
                sum_pinball(dict(zip(self.quantiles, each, strict=True)), truth, equal)
            )

    def add(
        self,
        point: Tensor,
        truth: Tensor,
        starts: Tensor,
        series: Tensor,
        runs: Sequence[int] | None = None,
    ) -> None:
        """Add predictions and truths [B, H, C], scaled, of windows that begin with these rows [B]
        of all, and their series [B], which come in `runs`."""
        error = point - truth
        absolute, truth = error.abs(), truth.double()  # R² of a constant needs every digit
        terms = (error, absolute, error.square(), truth, truth.square())
        by_step = torch.stack([term.sum(dim=0, dtype=torch.float64) for term in terms])
        by_window = torch.stack([term.sum(dim=1, dtype=torch.float64) for term in terms])
        num_windows, steps, _ = error.shape
        self.by_step[0] += num_windows
        self.by_step[1:] += by_step
        counts = torch.full_like(by_window[:1], steps)
        by_owner = torch.cat([counts, by_window, self._compare_sizes(point, truth)])
        owners, totals = sum_by_group(series, by_owner.transpose(0, 1), runs)
        self.by_series.index_add_(1, owners, totals[:, :-2].transpose(0, 1))
        self.relative.index_add_(1, owners, totals[:, -2:].transpose(0, 1))
        torch.maximum(self.max_by_step, absolute.amax(dim=0).double(), out=self.max_by_step)
        largest = absolute.amax(dim=1).double()
        if runs is not None:
            largest = torch.stack([part.amax(dim=0) for part in largest.split(list(runs))])
            series = select_firsts(series, runs)
        rows = series[:, None].expand(-1, error.shape[2])
        self.max_by_series.scatter_reduce_(0, rows, largest, "amax")
        size, _, spread = self.units
        _, absolute, squared, _, _ = by_window / steps
        errors = [
            error.mean(dim=1)
            for unit in (size, spread)
            for error in (absolute * unit, squared * unit.square())
        ]
        means = [torch.ones_like(absolute[:, 0]), *errors]
        self.by_window[-1].add(torch.stack(means, dim=1), starts)

    def _compare_sizes(self, point: Tensor, truth: Tensor) -> Tensor:
        """Return what windows add to `relative`, [2, B, C]."""
        size, shift, _ = self.units
        known, predicted = (values.double() * size + shift for values in (truth, point))
        total = predicted.abs() + known.abs()
        shares = (predicted - known).abs() / torch.where(total > 0, total, 1.0)
        return torch.stack([shares.sum(dim=1), known.abs().sum(dim=1)])

    def merge(self, later: Sequence[RegressionSums]) -> RegressionSums:
        """Return the sums over this set and later ones of the same shape and scale."""
        merged: dict[str, Any] = {}
        for name in (
            *("by_step", "by_series", "covered", "pinball", "relative"),
            *("max_by_step", "max_by_series"),
        ):
            stacked = torch.stack([getattr(sums, name) for sums in (self, *later)])
            merged[name] = stacked.amax(dim=0) if "max" in name else stacked.sum(dim=0)
        merged["by_window"] = tuple(
            windows for sums in (self, *later) for windows in sums.by_window
        )
        return replace(self, **merged)

    def collect_units(self) -> WindowUnits:
        """Return the errors window by window."""
        parts = [windows.collect() for windows in self.by_window]
        return WindowUnits(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def compute(self) -> SetDetail:
        """Return the metrics: overall, per target, per predicted row and per series."""
        sums, largest, by_series = self.by_step.cpu(), self.max_by_step.cpu(), self.by_series.cpu()
        per_target = self._compute_errors(sums.sum(dim=1), largest.amax(dim=0))
        per_step = self._compute_errors(sums, largest)
        per_series = self._compute_errors(by_series, self.max_by_series.cpu())
        count = sums[0].sum(dim=0)
        of_quantiles, relative = self._compute_quantiles(count), self._compute_relative(by_series)
        return {
            "overall": _average_targets(
                {name: values[None] for name, values in per_target.items()}
            )[0]
            | {name: float(values.nanmean()) for name, values in relative.items()}
            | {name: float(values.mean()) for name, values in of_quantiles.items()},
            "scaled": {
                "mae": float((per_target["mae"] / self.deviation).mean()),
                "mse": float((per_target["mse"] / self.deviation.square()).mean()),
            },
            "per_target": {
                column: {name: float(per_target[name][i]) for name in NAMES}
                | {name: float(values[:, i].nanmean()) for name, values in relative.items()}
                | {name: float(values[i]) for name, values in of_quantiles.items()}
                for i, column in enumerate(self.columns)
            },
            "per_step": _average_targets(per_step),
            "per_series": {
                name: means
                for name, means, number in zip(
                    self.series,
                    _average_targets(per_series),
                    by_series[0, :, 0].tolist(),
                    strict=True,
                )
                if number > 0
            },
        }

    def _compute_relative(self, by_series: Tensor) -> dict[str, Tensor]:
        """Return errors relative to the size of each series, [S, C], NaN where that is unknown or
        zero. Their means are over series: of series of different size, each counts the same."""
        count, absolute = by_series[0], by_series[2]
        shares, truth = self.relative.cpu()
        parts = {
            "smape": (200 * shares, count),
            "wape": (100 * absolute * self.size, truth),
        }
        if self.naive is not None:
            parts["mase"] = absolute, count * self.naive.cpu()
        result = {}
        for name, (errors, sizes) in parts.items():
            known = (count > 0) & (sizes > 0)
            if bool(known.any()):
                result[name] = torch.where(known, errors / sizes, torch.nan)
        return result

    def _compute_quantiles(self, count: Tensor) -> dict[str, Tensor]:
        """Return the pinball loss in physical units, `crps`, and of two quantiles or more, the
        share of truths between the outermost ones and the distance of these; nothing without
        quantiles. [C] each."""
        if not self.quantiles:
            return {}
        pinball, truth = self.pinball.cpu() * self.size, self.relative[1].sum(dim=0).cpu()
        result = {"pinball": pinball / count}
        if (crps := compute_crps(pinball, truth)) is not None:
            result["crps"] = crps
        inside, possible, width = self.covered.cpu()
        if bool(possible.any()):
            result |= {"coverage": inside / possible, "width": width / possible * self.size}
        return result

    def _compute_errors(self, sums: Tensor, largest: Tensor) -> dict[str, Tensor]:
        """Return physical metrics [..., C] from scaled sums [6, ..., C]."""
        count, error, absolute, squared, truth, truth_squared = sums
        mse = squared / count
        variance = truth_squared / count - (truth / count).square()
        # a variance within rounding of zero is a constant truth, for which R² means nothing
        known = variance > 1e-12 * (truth_squared / count).clamp(min=1e-12)
        return {
            "mae": absolute / count * self.size,
            "rmse": mse.sqrt() * self.size,
            "mse": mse * self.size.square(),
            "r2": torch.where(known, 1 - mse / variance, torch.nan),
            "max_error": largest * self.size,
            "bias": error / count * self.size,
        }


def sum_pinball(
    quantiles: Mapping[float, Tensor], truth: Tensor, weights: Mapping[float, float]
) -> Tensor:
    """Return the pinball loss of quantiles [B, H, C] by level, summed over windows and rows: the
    weighted mean over the levels, [C]."""
    total = torch.zeros(truth.shape[2], dtype=torch.float64, device=truth.device)
    for level, values in quantiles.items():  # one at a time, which bounds the memory
        error = values.double() - truth.double()
        losses = torch.maximum(-level * error, (1 - level) * error)
        total += weights[level] * losses.sum(dim=(0, 1))
    return total


def weigh_levels(levels: Iterable[float]) -> dict[float, float]:
    """Return the share of the numbers from 0 to 1 that are closest to each level. With these
    weights, twice the mean pinball loss approximates the CRPS, which is its integral, also where
    levels are unevenly spaced."""
    ordered = sorted(levels)
    inner = [(low + high) / 2 for low, high in itertools.pairwise(ordered)]
    edges = itertools.pairwise([0.0, *inner, 1.0])
    return {level: high - low for level, (low, high) in zip(ordered, edges, strict=True)}


def compute_crps(pinball: Tensor, truth: Tensor) -> Tensor | None:
    """Return the weighted quantile loss: twice the summed pinball loss over the sum of the absolute
    truths, [C] each in the same units. None where the truths of a target are all zero."""
    return 2 * pinball / truth if bool((truth > 0).all()) else None


def _average_targets(errors: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Return the means over the targets of each row, [rows, C]; `max_error` is the largest."""
    columns = {name: errors[name].mean(dim=-1) for name in NAMES}
    columns["rmse"] = columns["mse"].sqrt()
    columns["max_error"] = errors["max_error"].amax(dim=-1)
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def start_sums(dataset: Dataset, device: torch.device) -> RegressionSums:
    """Return empty sums for the data set's targets."""
    signature = dataset.signature
    return RegressionSums.zeros(
        signature.targets,
        dataset.scaler,
        steps=signature.steps_out,
        series=dataset.index.series_names,
        device=device,
        quantiles=signature.quantiles,
        naive=dataset.naive_errors if signature.horizon else None,
    )


def build_columns(
    batch: PredictionBatch, dataset: Dataset, half_widths: HalfWidths | None
) -> Iterator[tuple[str, Any]]:
    """Return truths, predictions, quantiles and intervals in physical units, as float64."""
    widths = {level: width.cpu().numpy() for level, width in (half_widths or {}).items()}
    truth = None if batch.truth is None else batch.truth.cpu().numpy()
    scaled = batch.prediction.cpu().numpy()
    factor = None if batch.factor is None else batch.factor.cpu().numpy()
    values = to_physical(scaled, dataset.signature, dataset.scaler, widths, truth, factor)
    return list_number_columns(values, dataset.signature)


def compare_with(
    model: RegressionSums, references: Mapping[str, RegressionSums], *, context: int
) -> PairedComparison:
    """Compare the errors of a model with those of the references, window by window."""
    units = {name: sums.collect_units() for name, sums in references.items()}
    return compare_predictors(model.collect_units(), units, COMPARED, context=context)


def describe_test(
    _: RegressionSums, __: Mapping[str, RegressionSums], ___: Dataset
) -> tuple[ClassComparison, SetDetail]:
    """Return nothing: the metrics are all that is reported about numbers."""
    return {}, {}
