"""Errors in physical units, accumulated on the device over every window.

Shapes: B windows, H predicted rows, C targets, S series.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

NAMES = ("mae", "rmse", "mse", "r2", "max_error", "bias")


@dataclass(frozen=True)
class Tally:
    """Running sums of one set's errors. `add` never waits for the device."""

    size: Tensor
    """[C]: physical units in one scaled unit"""
    deviation: Tensor
    """[C]: the training rows' standard deviation, in physical units"""
    by_place: Tensor
    """[6, H, C] float64: count, error, absolute error, squared error, truth, squared truth"""
    by_series: Tensor
    """[6, S, C]"""
    worst_by_place: Tensor
    """[H, C]"""
    worst_by_series: Tensor
    """[S, C]"""
    covered: Tensor
    """[C]: how many truths lay between the outermost quantiles"""

    def add(
        self, point: Tensor, truth: Tensor, series: Tensor, band: tuple[Tensor, Tensor] | None
    ) -> None:
        """Take in predictions and truths [B, H, C], scaled, and each window's series [B]."""
        truth = truth.double()
        error = point.double() - truth
        terms = torch.stack(
            [torch.ones_like(error), error, error.abs(), error.square(), truth, truth.square()]
        )
        self.by_place.add_(terms.sum(dim=1))
        self.by_series.index_add_(1, series, terms.sum(dim=2))
        worst = error.abs()
        torch.maximum(self.worst_by_place, worst.amax(dim=0), out=self.worst_by_place)
        rows = series[:, None].expand(-1, worst.shape[2])
        self.worst_by_series.scatter_reduce_(0, rows, worst.amax(dim=1), "amax")
        if band is not None:
            self.covered.add_(((band[0] <= truth) & (truth <= band[1])).sum(dim=(0, 1)))


def start(
    *, size: list[float], deviation: list[float], steps: int, series: int, device: torch.device
) -> Tally:
    targets = len(size)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    return Tally(
        size=torch.tensor(size, dtype=torch.float64),
        deviation=torch.tensor(deviation, dtype=torch.float64),
        by_place=zeros(6, steps, targets),
        by_series=zeros(6, series, targets),
        worst_by_place=zeros(steps, targets),
        worst_by_series=zeros(series, targets),
        covered=zeros(targets),
    )


def merged(tallies: Sequence[Tally]) -> Tally:
    """The sums over several sets, of one shape and scale."""

    def every(name: str) -> Tensor:
        return torch.stack([getattr(tally, name) for tally in tallies])

    return replace(
        tallies[0],
        **{name: every(name).sum(dim=0) for name in ("by_place", "by_series", "covered")},
        **{name: every(name).amax(dim=0) for name in ("worst_by_place", "worst_by_series")},
    )


def read(tally: Tally, *, targets: tuple[str, ...], series: tuple[str, ...]) -> dict[str, Any]:
    """Everything the sums say: overall, per target, per predicted row and per series."""
    sums, worst = tally.by_place.cpu(), tally.worst_by_place.cpu()
    by_series, worst_by_series = tally.by_series.cpu(), tally.worst_by_series.cpu()
    per_target = _figures(tally, sums.sum(dim=1), worst.amax(dim=0))
    per_step = _figures(tally, sums, worst)
    per_series = _figures(tally, by_series, worst_by_series)
    count = sums[0].sum(dim=0)
    return {
        "overall": _mean_over_targets(per_target),
        "scaled": {
            "mae": float((per_target["mae"] / tally.deviation).mean()),
            "mse": float((per_target["mse"] / tally.deviation.square()).mean()),
        },
        "coverage": [float(share) for share in tally.covered.cpu() / count],
        "per_target": {name: _at(per_target, i) for i, name in enumerate(targets)},
        "per_step": [_mean_over_targets(_rows(per_step, h)) for h in range(sums.shape[1])],
        "per_series": {
            name: _mean_over_targets(_rows(per_series, s))
            for s, name in enumerate(series)
            if by_series[0, s, 0] > 0
        },
    }


def _figures(tally: Tally, sums: Tensor, worst: Tensor) -> dict[str, Tensor]:
    """Physical metrics from scaled sums [6, ..., C]."""
    count, error, absolute, squared, truth, truth_squared = sums
    mse = squared / count
    spread = truth_squared / count - (truth / count).square()
    # a spread within rounding of zero is a constant truth, for which R² means nothing
    known = spread > 1e-12 * (truth_squared / count).clamp(min=1e-12)
    return {
        "mae": absolute / count * tally.size,
        "rmse": mse.sqrt() * tally.size,
        "mse": mse * tally.size.square(),
        "r2": torch.where(known, 1 - mse / spread, torch.nan),
        "max_error": worst * tally.size,
        "bias": error / count * tally.size,
    }


def _rows(figures: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: values[row] for name, values in figures.items()}


def _at(figures: dict[str, Tensor], index: int) -> dict[str, float]:
    return {name: float(figures[name][index]) for name in NAMES}


def _mean_over_targets(figures: dict[str, Tensor]) -> dict[str, float]:
    """Targets count alike; the largest error is the largest of all."""
    means = {name: float(figures[name].mean()) for name in NAMES}
    means["rmse"] = means["mse"] ** 0.5
    means["max_error"] = float(figures["max_error"].max())
    return means
