"""What a model must beat to be worth its time. Each is a function of scaled windows.

Shapes: T context rows, B sequences, F inputs, H predicted rows, C targets, D features, K static
columns, Q classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_FEATURES = 2048
WIDE_INPUTS = MAX_FEATURES // 2
"""From so many inputs on, features are too many however they are pooled."""
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Ridge penalties to choose from, per training window."""


def predict_repeat(past: Tensor, steps: int) -> Tensor:
    """The last known target, for every predicted row: [T, B, C] to [B, H, C]."""
    return past[-1][:, None].expand(-1, steps, -1)


def predict_seasonal(past: Tensor, steps: int, period: int) -> Tensor:
    """The targets one season ago, over and over."""
    rows = torch.arange(steps, device=past.device) % period
    return past[-period:][rows].transpose(0, 1)


@dataclass(frozen=True)
class Ridge:
    """Least squares from the window's rows, with a penalty chosen on the validation set.

    Where every target is an input (`relative`), rows and targets count from the window's last row.
    """

    weights: Tensor
    """[D + 1, H * C], the constant last"""
    penalty: float
    pooled: int
    """Rows averaged into one, so that features stay few"""
    relative: bool
    basis: Tensor | None = None
    """[D + 1, N + 1]: of wide tables, features become products with so many training windows, and
    the constant"""

    def predict(self, inputs: Tensor, steps: int) -> Tensor:
        features = _features(inputs, self.pooled, self.relative)
        if self.basis is not None:
            features = features @ self.basis
        out: Tensor = (features @ self.weights).float().unflatten(1, (steps, -1))
        if not self.relative:
            return out
        return out + inputs[-1][:, None, -out.shape[2] :]


def fit_ridge(
    train: Iterable[tuple[Tensor, Tensor]],
    val: Iterable[tuple[Tensor, Tensor]],
    *,
    context: int,
    inputs: int,
    relative: bool,
) -> Ridge:
    """Solve in closed form from batches of inputs [T, B, F] and targets [B, H, C]."""
    pooled = -(-context * inputs // MAX_FEATURES)
    if inputs >= WIDE_INPUTS:
        return _fit_wide(train, val, pooled, relative)
    xx, xy, _, count = _moments(train, pooled, relative)
    val_xx, val_xy, val_yy, _ = _moments(val, pooled, relative)
    penalized = torch.ones(len(xx), dtype=xx.dtype, device=xx.device)
    penalized[-1] = 1e-9  # the constant is free; what is left keeps the system regular
    best: tuple[float, Tensor, float] | None = None
    for penalty in PENALTIES:
        weights = torch.linalg.solve(xx + torch.diag(penalty * count * penalized), xy)
        explained = 2 * (weights * val_xy).sum() - (weights * (val_xx @ weights)).sum()
        error = float(val_yy - explained)
        if best is None or error < best[0]:
            best = error, weights, penalty
    assert best is not None
    return Ridge(best[1], best[2], pooled, relative)


def _fit_wide(
    train: Iterable[tuple[Tensor, Tensor]],
    val: Iterable[tuple[Tensor, Tensor]],
    pooled: int,
    relative: bool,
) -> Ridge:
    """The same solution from the windows' products with each other: fewer than the features'."""
    x, y = _rows(train, pooled, relative)
    val_x, val_y = _rows(val, pooled, relative)
    mean, level = x.mean(dim=0), y.mean(dim=0)
    centred = x - mean  # without the constant, which is then free of penalty
    basis = torch.zeros(x.shape[1], len(x) + 1, dtype=x.dtype, device=x.device)
    basis[:, :-1] = centred.T
    basis[-1, :-1] = -(centred @ mean)
    basis[-1, -1] = 1.0
    sizes, vectors = torch.linalg.eigh(centred @ centred.T)
    turned = vectors.T @ (y - level)
    val_x = val_x @ basis
    best: tuple[float, Tensor, float] | None = None
    for penalty in PENALTIES:
        solved = vectors @ (turned / (sizes.clamp(min=0.0) + penalty * len(x))[:, None])
        weights = torch.cat([solved, level[None]])
        error = float((val_x @ weights - val_y).square().sum())
        if best is None or error < best[0]:
            best = error, weights, penalty
    assert best is not None
    return Ridge(best[1], best[2], pooled, relative, basis)


def _rows(
    batches: Iterable[tuple[Tensor, Tensor]], pooled: int, relative: bool
) -> tuple[Tensor, Tensor]:
    """Features [N, D + 1] and targets [N, H * C] of every window, in float64."""
    pairs = [_pair(inputs, targets, pooled, relative) for inputs, targets in batches]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _pair(inputs: Tensor, targets: Tensor, pooled: int, relative: bool) -> tuple[Tensor, Tensor]:
    if relative:
        targets = targets - inputs[-1][:, None, -targets.shape[2] :]
    return _features(inputs, pooled, relative), targets.flatten(1).double()


def _moments(
    batches: Iterable[tuple[Tensor, Tensor]], pooled: int, relative: bool
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Sums of x x', x y' and y'y over every window."""
    sums: tuple[Tensor, Tensor, Tensor] | None = None
    count = 0
    for inputs, targets in batches:
        x, y = _pair(inputs, targets, pooled, relative)
        terms = x.T @ x, x.T @ y, y.square().sum()
        sums = (
            terms if sums is None else (sums[0] + terms[0], sums[1] + terms[1], sums[2] + terms[2])
        )
        count += len(x)
    assert sums is not None
    return *sums, count


def _features(inputs: Tensor, pooled: int, relative: bool) -> Tensor:
    """[T, B, F] to [B, D + 1] in float64: rows, averaged by `pooled` from the end, and a one."""
    if relative:
        inputs = inputs - inputs[-1]
    if pooled > 1:
        kept = inputs[inputs.shape[0] % pooled :]
        means = kept.unflatten(0, (-1, pooled)).mean(dim=1)
        inputs = torch.cat([means, inputs[-1:]])
    rows = inputs.transpose(0, 1).flatten(1).double()
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


class VisibleRows(NamedTuple):
    """For each row of windows, [T, B]: where the nearest row lies that is not masked."""

    before: Tensor
    """At or before it; -1 where there is none"""
    after: Tensor
    """At or after it; T where there is none"""
    distance: Tensor
    """Rows to the nearer of the two; 0 where it is not masked itself"""


def find_visible_rows(mask: Tensor) -> VisibleRows:
    """What masked rows [T, B] can be filled in from."""
    rows = len(mask)
    place = torch.arange(rows, device=mask.device)[:, None].expand_as(mask)
    before = place.masked_fill(mask, -1).cummax(dim=0).values
    after = place.masked_fill(mask, rows).flip(0).cummin(dim=0).values.flip(0)
    back = (place - before).masked_fill(before < 0, rows)
    ahead = (after - place).masked_fill(after == rows, rows)
    return VisibleRows(before, after, torch.minimum(back, ahead))


def fill_with_last_visible(inputs: Tensor, seen: VisibleRows) -> Tensor:
    """Every row [T, B, F] as the last one that is not masked; before the first such, as that."""
    return _rows_at(inputs, torch.where(seen.before < 0, seen.after, seen.before))


def fill_by_interpolation(inputs: Tensor, seen: VisibleRows) -> Tensor:
    """Every row on the straight line between those around it that are not masked."""
    rows = len(inputs)
    left = torch.where(seen.before < 0, seen.after, seen.before)
    right = torch.where(seen.after == rows, seen.before, seen.after)
    place = torch.arange(rows, device=inputs.device)[:, None]
    share = (place - left) / (right - left).clamp(min=1)
    first, second = _rows_at(inputs, left), _rows_at(inputs, right)
    return first + (second - first) * share[..., None]


def _rows_at(inputs: Tensor, index: Tensor) -> Tensor:
    return inputs.gather(0, index[..., None].expand_as(inputs))


STATISTICS = ("mean", "deviation", "first", "last", "least", "most", "slope")
"""What the logistic regression knows of each input"""
RIDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Its penalties to choose from, the strongest first: each begins where the one before ended"""
MOST_ITERATIONS = 200


def compute_statistics(inputs: Tensor, static: Tensor | None) -> Tensor:
    """Windows [T, B, F] to [B, 7 F + K] in float64: a few numbers of each input, and the static."""
    rows = inputs.double()
    time = torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
    time = (time - time.mean())[:, None, None]
    slope = (time * rows).sum(dim=0) / time.square().sum().clamp(min=1.0)
    deviation, mean = torch.std_mean(rows, dim=0, correction=0)
    found = [mean, deviation, rows[0], rows[-1], rows.amin(dim=0), rows.amax(dim=0), slope]
    return torch.cat(found if static is None else [*found, static.double()], dim=1)


@dataclass(frozen=True)
class Logistic:
    """Multinomial logistic regression on standardised features, one for every predicted row."""

    mean: Tensor
    size: Tensor
    weights: Tensor
    """[D + 1, H * Q], the constant last"""
    penalty: float

    def predict(self, features: Tensor) -> Tensor:
        """[B, D] to logits [B, H * Q]."""
        return (_standardised(features, self.mean, self.size) @ self.weights).float()


def fit_logistic(sets: Iterable[tuple[Tensor, Tensor]], *, classes: int) -> Logistic:
    """Fit to features [B, D] and class numbers [B, H] of training; those of validation choose the
    penalty."""
    (features, numbers), (val_features, val_numbers) = sets
    deviation, mean = torch.std_mean(features, dim=0, correction=0)
    size = torch.where(deviation > 1e-12, deviation, 1.0)
    x, val_x = (_standardised(some, mean, size) for some in (features, val_features))
    weights = x.new_zeros(x.shape[1], numbers.shape[1] * classes)
    best: tuple[float, Tensor, float] | None = None
    for penalty in RIDGES:
        weights = _least(x, numbers, weights, penalty)
        loss = float(_log_loss(val_x @ weights, val_numbers))
        if best is None or loss < best[0]:
            best = loss, weights, penalty
    assert best is not None
    return Logistic(mean, size, best[1], best[2])


def _standardised(features: Tensor, mean: Tensor, size: Tensor) -> Tensor:
    """And a one."""
    found = (features - mean) / size
    return torch.cat([found, found.new_ones(len(found), 1)], dim=1)


def _log_loss(logits: Tensor, numbers: Tensor) -> Tensor:
    by_row = logits.unflatten(1, (numbers.shape[1], -1))
    return torch.nn.functional.cross_entropy(by_row.flatten(0, 1), numbers.flatten())


def _least(x: Tensor, numbers: Tensor, weights: Tensor, penalty: float) -> Tensor:
    """The weights with the lowest penalised loss, from `weights` on; the constant is free."""
    from scipy import optimize  # takes a while, and only classes need it

    def loss(flat: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        with torch.enable_grad():
            now = torch.from_numpy(flat).to(x.device).view_as(weights).requires_grad_()
            found = _log_loss(x @ now, numbers) + 0.5 * penalty * now[:-1].square().sum()
            (slope,) = torch.autograd.grad(found, now)
        return float(found.detach()), slope.cpu().numpy().ravel()

    start = weights.cpu().numpy().ravel()
    options = {"maxiter": MOST_ITERATIONS}
    found = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    return torch.from_numpy(found.x).to(x.device).view_as(weights)
