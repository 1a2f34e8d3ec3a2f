"""Error metrics of predicted numbers, in physical units.

The sums stay on the device, in scaled units. Shapes: B windows, H predicted rows, C targets,
S series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.data.dataset import Dataset
from slipstream.data.scaler import Scaler
from slipstream.objectives import select_point
from slipstream.portable.table import list_number_columns, to_physical
from slipstream.scoring.batch import HalfWidths, PredictionBatch

NAMES = ("mae", "rmse", "mse", "r2", "max_error", "bias")
HEADLINE = "mae"


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
    """[C]: number of truths between the outermost quantiles"""

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
    ) -> RegressionSums:
        """Return empty sums of these columns."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, len(columns), dtype=torch.float64, device=device)

        return cls(
            columns=tuple(columns),
            series=tuple(series),
            quantiles=quantiles,
            size=torch.tensor([scaler.size[name] for name in columns], dtype=torch.float64),
            deviation=torch.tensor(
                [scaler.deviation[name] for name in columns], dtype=torch.float64
            ),
            by_step=zeros(6, steps),
            by_series=zeros(6, len(series)),
            max_by_step=zeros(steps),
            max_by_series=zeros(len(series)),
            covered=zeros(),
        )

    def update(self, batch: PredictionBatch) -> None:
        """Add a batch of predictions."""
        assert batch.truth is not None
        values, truth = batch.prediction, batch.truth
        has_quantiles = values.shape[-1] == len(self.quantiles)  # a baseline has none
        quantiles = self.quantiles if has_quantiles else ()
        self.add(select_point(values, quantiles), truth, batch.find_series())
        if has_quantiles:
            inside = (values[..., 0] <= truth) & (truth <= values[..., -1])
            self.covered.add_(inside.sum(dim=(0, 1)))

    def add(self, point: Tensor, truth: Tensor, series: Tensor) -> None:
        """Add predictions and truths [B, H, C], scaled, of windows of these series [B]."""
        truth = truth.double()
        error = point.double() - truth
        absolute = error.abs()
        terms = torch.stack(
            [torch.ones_like(error), error, absolute, error.square(), truth, truth.square()]
        )
        self.by_step.add_(terms.sum(dim=1))
        self.by_series.index_add_(1, series, terms.sum(dim=2))
        torch.maximum(self.max_by_step, absolute.amax(dim=0), out=self.max_by_step)
        rows = series[:, None].expand(-1, absolute.shape[2])
        self.max_by_series.scatter_reduce_(0, rows, absolute.amax(dim=1), "amax")

    def merge(self, others: Sequence[RegressionSums]) -> RegressionSums:
        """Return the sums over this set and others of the same shape and scale."""
        merged: dict[str, Any] = {}
        for name in ("by_step", "by_series", "covered", "max_by_step", "max_by_series"):
            stacked = torch.stack([getattr(sums, name) for sums in (self, *others)])
            merged[name] = stacked.amax(dim=0) if "max" in name else stacked.sum(dim=0)
        return replace(self, **merged)

    def compute(self) -> dict[str, Any]:
        """Return the metrics: overall, per target, per predicted row and per series."""
        sums, largest, by_series = self.by_step.cpu(), self.max_by_step.cpu(), self.by_series.cpu()
        per_target = self._compute_errors(sums.sum(dim=1), largest.amax(dim=0))
        per_step = self._compute_errors(sums, largest)
        per_series = self._compute_errors(by_series, self.max_by_series.cpu())
        count = sums[0].sum(dim=0)
        return {
            "overall": _average_targets({name: one[None] for name, one in per_target.items()})[0],
            "scaled": {
                "mae": float((per_target["mae"] / self.deviation).mean()),
                "mse": float((per_target["mse"] / self.deviation.square()).mean()),
            },
            "coverage": [float(share) for share in self.covered.cpu() / count],
            "per_target": {
                column: {name: float(per_target[name][i]) for name in NAMES}
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
    )


def build_columns(
    batch: PredictionBatch, dataset: Dataset, half_widths: HalfWidths | None
) -> Iterator[tuple[str, Any]]:
    """Return truths, predictions, quantiles and intervals in physical units, as float64."""
    widths = {level: width.cpu().numpy() for level, width in (half_widths or {}).items()}
    truth = None if batch.truth is None else batch.truth.cpu().numpy()
    scaled = batch.prediction.cpu().numpy()
    values = to_physical(scaled, dataset.signature, dataset.scaler, widths, truth)
    return list_number_columns(values, dataset.signature)


def compare_on_test(
    _: RegressionSums, __: Mapping[str, RegressionSums], ___: Dataset
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return nothing: errors of numbers come without intervals."""
    return {}, {}
