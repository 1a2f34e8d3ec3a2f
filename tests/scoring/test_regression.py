from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.scaler import Scaler
from slipstream.scoring import regression
from slipstream.scoring.batch import PredictionBatch
from slipstream.scoring.regression import COMPARED, RegressionSums
from tests.conftest import small_config, small_dataset


def start(size, deviation, *, steps, series, quantiles=()):
    """Empty sums of as many columns as there are sizes."""
    names = tuple("xyz"[: len(size)])
    by_column = {"size": size, "deviation": deviation, "shift": [0.0] * len(size)}
    scales = {key: dict(zip(names, values, strict=True)) for key, values in by_column.items()}
    scaler = Scaler(kind="standard", low={}, high={}, **scales)
    names_of_series = tuple(f"s{number}" for number in range(series))
    return RegressionSums.zeros(
        names,
        scaler,
        steps=steps,
        series=names_of_series,
        device=torch.device("cpu"),
        quantiles=quantiles,
    )


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
    series, starts = draw.integers(0, 3, windows), np.arange(windows)
    sums = start(size.tolist(), deviation.tolist(), steps=steps, series=3)
    for chunk in np.array_split(np.arange(windows), 3):
        if len(chunk):
            sums.add(*(torch.from_numpy(a[chunk]) for a in (point, truth, starts, series)))
    names = tuple("xyz"[:targets])
    found = sums.compute()

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
    units = sums.collect_units()
    assert units.firsts.tolist() == starts.tolist()
    total = units.sums.sum(axis=0)
    for name, compute in COMPARED.items():
        section = found["scaled" if name.startswith("scaled") else "overall"]
        assert float(compute(total)) == pytest.approx(section[name.removeprefix("scaled_")]), name
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


def batch_of(prediction, truth):
    """Windows of the first series, one predicted row of one column each."""
    config = small_config(data={"targets": ["a"], "context": 4, "horizon": 1})
    (chunk,) = small_dataset(config).iter_chunks("train", None, rows=1)
    starts = chunk.starts[: len(truth)]
    return PredictionBatch(chunk, starts, prediction[:, None, None], truth[:, None, None])


def test_coverage_counts_what_lies_between_the_outer_quantiles():
    sums = start([1.0], [1.0], steps=1, series=1, quantiles=(0.1, 0.5, 0.9))
    truth = torch.tensor([0.0, 1.0, 2.0, 3.0])
    quantiles = torch.stack([torch.zeros(4), truth, torch.full((4,), 2.0)], dim=-1)
    sums.update(batch_of(quantiles, truth))
    found = sums.compute()
    assert found["overall"]["coverage"] == found["per_target"]["x"]["coverage"] == 0.75
    assert found["overall"]["mae"] == 0


def test_pinball_loss_is_that_of_every_quantile_in_physical_units():
    levels = (0.1, 0.5, 0.9)
    draw = np.random.default_rng(0)
    truth, quantiles = draw.standard_normal(6), np.sort(draw.standard_normal((6, 3)), axis=1)
    error = truth[:, None] - quantiles
    wanted = np.maximum(np.array(levels) * error, (np.array(levels) - 1) * error).mean()
    sums = start([4.0], [2.0], steps=1, series=1, quantiles=levels)
    sums.update(batch_of(torch.from_numpy(quantiles), torch.from_numpy(truth)))
    overall = sums.merge([]).compute()["overall"]
    assert overall["pinball"] == pytest.approx(4 * wanted)
    physical = np.abs(4 * truth + float(sums.shift[0]))
    assert overall["crps"] == pytest.approx(2 * 4 * wanted / physical.mean())
    assert overall["width"] == pytest.approx(4 * (quantiles[:, 2] - quantiles[:, 0]).mean())
    without = start([4.0], [2.0], steps=1, series=1)
    without.update(batch_of(torch.from_numpy(quantiles[:, 1:2]), torch.from_numpy(truth)))
    assert not {"pinball", "crps", "coverage", "width"} & set(without.compute()["overall"])


@pytest.mark.parametrize("count", [5, 64, 65, 1000])
@pytest.mark.parametrize("batch", [1, 7, 300])
def test_errors_of_very_many_windows_are_joined_in_their_order(count, batch, monkeypatch):
    monkeypatch.setattr(regression, "MAX_UNITS", 64)
    sums = regression.WindowSums(2, torch.device("cpu"))
    values, starts = torch.rand(count, 2).double(), 3 * torch.arange(count)
    for part, first in zip(values.split(batch), starts.split(batch), strict=True):
        sums.add(part, first)
    units = sums.collect()
    joined = 1
    while count > 64 * joined:
        joined *= 2
    assert units.firsts.tolist() == starts[::joined].tolist()
    wanted = [part.sum(dim=0) for part in values.split(joined)]
    np.testing.assert_allclose(units.sums, torch.stack(wanted).numpy())


def test_a_baselines_single_value_is_scored_beside_a_models_quantiles():
    sums = start([1.0], [1.0], steps=1, series=1, quantiles=(0.1, 0.5, 0.9))
    sums.update(batch_of(torch.ones(4, 1), torch.zeros(4)))
    overall = sums.compute()["overall"]
    assert overall["mae"] == 1
    assert overall["pinball"] == pytest.approx(0.5)
    assert not {"coverage", "width"} & set(overall)


def test_the_crps_of_a_single_value_is_its_relative_error():
    sums = start([1.0], [1.0], steps=1, series=1, quantiles=(0.1, 0.5, 0.9))
    sums.update(batch_of(torch.tensor([1.0, 2.0, 5.0])[:, None], torch.tensor([2.0, 2.0, 4.0])))
    overall = sums.compute()["overall"]
    assert overall["crps"] == pytest.approx(overall["wape"] / 100)


def test_levels_weigh_as_much_as_the_part_of_all_levels_that_is_closest():
    found = regression.weigh_levels([0.9, 0.025, 0.5, 0.1, 0.975])
    wanted = {0.025: 0.0625, 0.1: 0.2375, 0.5: 0.4, 0.9: 0.2375, 0.975: 0.0625}
    assert found == pytest.approx(wanted)
    many = [(number + 0.5) / 50 for number in range(50)]
    assert regression.weigh_levels(many) == pytest.approx(dict.fromkeys(many, 1 / 50))


def test_relative_errors_of_each_target_are_means_over_series():
    sums = start([2.0, 1.0], [1.0, 1.0], steps=1, series=2)
    draw = torch.Generator().manual_seed(0)
    truth = 5 + torch.rand(6, 1, 2, generator=draw, dtype=torch.float64)
    point, series = truth + 0.5, torch.tensor([0, 0, 0, 0, 1, 1])
    sums.add(point, truth, torch.arange(6), series)
    found = sums.compute()
    physical = (truth * sums.size + sums.shift)[:, 0].numpy()
    for place, name in enumerate(("x", "y")):
        shares = [
            100
            * np.sum(np.full(rows.sum(), 0.5 * float(sums.size[place])))
            / np.abs(physical[rows, place]).sum()
            for rows in (series.numpy() == 0, series.numpy() == 1)
        ]
        assert found["per_target"][name]["wape"] == pytest.approx(np.mean(shares))
    both = [found["per_target"][name]["wape"] for name in ("x", "y")]
    assert found["overall"]["wape"] == pytest.approx(np.mean(both))


def test_merged_sums_are_those_of_all_windows():
    parts = [(torch.zeros(3), torch.arange(3.0)), (torch.ones(5), torch.arange(5.0))]
    each = []
    for prediction, truth in parts:
        sums = start([2.0], [1.0], steps=1, series=1)
        sums.update(batch_of(prediction[:, None], truth))
        each.append(sums)
    whole = start([2.0], [1.0], steps=1, series=1)
    for prediction, truth in parts:
        whole.update(batch_of(prediction[:, None], truth))
    assert each[0].merge(each[1:]).compute() == whole.compute()
