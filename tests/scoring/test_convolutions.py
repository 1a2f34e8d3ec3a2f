from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from slipstream.scoring import baselines, convolutions
from tests.conftest import close, merged, small_config, small_dataset
from tests.labelled import CLASSIFY, states

generator = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("context", "inputs"), [(9, 1), (40, 3), (64, 20)])
def test_features_are_the_largest_response_and_the_share_of_positive_ones(context, inputs):
    drawn = convolutions.draw_kernels(context, inputs, 60)
    rows = torch.randn(context, 4, inputs, generator=generator)
    found = drawn.compute(rows)
    assert found.shape == (4, 2 * len(drawn.bias))
    number = 0
    for (count, length, dilation, padding), channels in zip(
        drawn.groups.tolist(), drawn.channels, strict=True
    ):
        kernel = drawn.kernels[number, :, :length].double().numpy()
        series = rows[:, 1, channels].double().numpy()
        series = np.pad(series, ((padding, padding), (0, 0)))
        places = range(len(series) - (length - 1) * dilation)
        responses = [
            float(drawn.bias[number])
            + (kernel.T * series[at : at + length * dilation : dilation]).sum()
            for at in places
        ]
        assert responses
        close(found[1, number], max(responses), rel=1e-4)
        share = np.mean([response > 0 for response in responses])
        assert float(found[1, len(drawn.bias) + number]) == pytest.approx(share, abs=1e-6)
        number += count
    assert number == len(drawn.bias)


@pytest.mark.parametrize("shape", [(30, 50), (80, 20)])
def test_the_classifier_is_ridge_and_its_unseen_predictions_leave_one_out(monkeypatch, shape):
    monkeypatch.setattr(convolutions, "PENALTIES", (2.0,))
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    y = torch.randn(shape[0], 2, generator=generator, dtype=torch.float64)
    x = x - x.mean(dim=0)

    def solve(x, y):
        mean, level = x.mean(dim=0), y.mean(dim=0)
        z = x - mean
        weights = torch.linalg.solve(z.T @ z + 2 * torch.eye(x.shape[1]), z.T @ (y - level))
        return weights, level - mean @ weights

    weights, unseen = convolutions.solve_classifier(x, y)
    wanted, constant = solve(x, y)
    close(weights, torch.cat([wanted, constant[None]]), rel=1e-8)
    for left in (0, 7):
        others = torch.arange(len(x)) != left
        wanted, constant = solve(x[others], y[others])
        close(unseen[left], x[left] @ wanted + constant, rel=1e-8)


def fit_rocket(context: int):
    config = small_config(**merged(CLASSIFY, {"data": {"context": context}}))
    dataset = small_dataset(config, states(900))
    load = functools.partial(dataset.iter_chunks, series=None, rows=0)
    return dataset, baselines.fit_baselines(dataset, load)["rocket"]


def test_random_convolutions_classify():
    dataset, rocket = fit_rocket(16)
    series, starts = dataset.memory.series, dataset.memory.starts["test"]
    found = rocket.predict(series, starts)
    truth = series.targets[starts[:, None] + series.target_rows][..., 0].long()
    assert found.shape == (*truth.shape, 1, len(dataset.signature.classes))
    likely = found[:, :, 0].flatten(0, 1)
    assert float((likely.argmax(-1) == truth.flatten()).double().mean()) > 0.8
    share = 1 / len(dataset.signature.classes)
    assert float(torch.nn.functional.cross_entropy(likely, truth.flatten())) < -np.log(share) / 2
    again = baselines.restore_baseline("rocket", "", rocket.state, dataset.signature)
    assert torch.equal(again.predict(series, starts), found)


def test_short_windows_have_no_convolutions():
    _, rocket = fit_rocket(8)
    assert rocket[:2] == ("windows of 8 rows are too short", None)
