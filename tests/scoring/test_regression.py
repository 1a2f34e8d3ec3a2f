from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import scoring


def naive(point, truth):
    """Physical errors [N] to figures."""
    error = point - truth
    spread = ((truth - truth.mean()) ** 2).sum()
    return {
        "mae": np.abs(error).mean(),
        "rmse": math.sqrt((error**2).mean()),
        "mse": (error**2).mean(),
        "r2": 1 - (error**2).sum() / spread if spread > 1e-9 else None,
        "max_error": np.abs(error).max(),
        "bias": error.mean(),
    }


def agree(found, wanted):
    for name, value in wanted.items():
        if value is None:
            assert math.isnan(found[name])
        else:
            assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@given(
    windows=st.integers(1, 12),
    steps=st.integers(1, 3),
    targets=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_sums_over_chunks_agree_with_numpy_over_everything(windows, steps, targets, seed):
    draw = np.random.default_rng(seed)
    size, deviation = draw.uniform(0.5, 5, targets), draw.uniform(0.5, 5, targets)
    point = draw.standard_normal((windows, steps, targets))
    truth = draw.standard_normal((windows, steps, targets))
    series = draw.integers(0, 3, windows)
    tally = scoring.start(
        size=size.tolist(),
        deviation=deviation.tolist(),
        steps=steps,
        series=3,
        device=torch.device("cpu"),
    )
    for chunk in np.array_split(np.arange(windows), 3):
        if len(chunk):
            given = (torch.from_numpy(a[chunk]) for a in (point, truth, series))
            tally.add(*given, band=None)
    names = tuple("xyz"[:targets])
    found = scoring.read(tally, targets=names, series=("s0", "s1", "s2"))

    point, truth = point * size, truth * size
    for i, name in enumerate(names):
        agree(found["per_target"][name], naive(point[..., i].ravel(), truth[..., i].ravel()))
    each = [naive(point[..., i].ravel(), truth[..., i].ravel()) for i in range(targets)]
    agree(
        found["overall"],
        {
            "mae": np.mean([e["mae"] for e in each]),
            "mse": np.mean([e["mse"] for e in each]),
            "rmse": math.sqrt(np.mean([e["mse"] for e in each])),
            "max_error": max(e["max_error"] for e in each),
        },
    )
    error = (point - truth) / deviation
    assert found["scaled"]["mse"] == pytest.approx((error**2).mean())
    assert found["scaled"]["mae"] == pytest.approx(np.abs(error).mean())
    assert len(found["per_step"]) == steps
    for h in range(steps):
        wanted = np.mean([np.abs(point[:, h, i] - truth[:, h, i]).mean() for i in range(targets)])
        assert found["per_step"][h]["mae"] == pytest.approx(wanted)
    present = {f"s{s}" for s in series}
    assert set(found["per_series"]) == present
    for s in set(series.tolist()):
        mine = series == s
        worst = np.abs(point[mine] - truth[mine]).max()
        assert found["per_series"][f"s{s}"]["max_error"] == pytest.approx(worst)


def test_coverage_counts_what_lies_between_the_outer_quantiles():
    tally = scoring.start(
        size=[1.0], deviation=[1.0], steps=1, series=1, device=torch.device("cpu")
    )
    truth = torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None, None]
    band = torch.zeros(4, 1, 1), torch.full((4, 1, 1), 2.0)
    tally.add(truth, truth, torch.zeros(4, dtype=torch.int64), band)
    found = scoring.read(tally, targets=("a",), series=("s",))
    assert found["coverage"] == [0.75]
    assert found["overall"]["mae"] == 0
