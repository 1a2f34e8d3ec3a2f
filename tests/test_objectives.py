from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from slipstream.config import Train
from slipstream.objectives import point, window_losses

generator = torch.Generator().manual_seed(0)
PREDICTION = torch.randn(7, 5, 3, 1, generator=generator)
TARGET = torch.randn(7, 5, 3, generator=generator)


@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        ("mse", lambda p, t: F.mse_loss(p, t, reduction="none")),
        ("mae", lambda p, t: F.l1_loss(p, t, reduction="none")),
        ("huber", lambda p, t: F.huber_loss(p, t, reduction="none", delta=0.7)),
    ],
)
def test_losses_are_the_usual_ones_per_window(loss, reference):
    train = Train(loss=loss, huber_delta=0.7)
    wanted = reference(PREDICTION[..., 0], TARGET).mean(dim=(1, 2))
    torch.testing.assert_close(window_losses(PREDICTION, TARGET, train), wanted)


def test_the_quantile_loss_is_least_at_the_quantile():
    values = torch.randn(20_000, generator=generator)
    levels = (0.1, 0.5, 0.9)
    guess = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([guess], lr=0.05)
    train = Train(loss="quantile", quantiles=levels)
    for _ in range(300):
        optimizer.zero_grad()
        prediction = guess.expand(len(values), 1, 1, 3)
        window_losses(prediction, values[:, None, None], train).mean().backward()
        optimizer.step()
    wanted = torch.quantile(values, torch.tensor(levels))
    torch.testing.assert_close(guess.detach(), wanted, atol=0.05, rtol=0)


def test_the_point_is_the_quantile_nearest_the_median():
    prediction = torch.arange(3.0).expand(2, 1, 1, 3)
    assert point(prediction, (0.1, 0.4, 0.9)).unique().item() == 1
    assert point(prediction[..., :1], ()).unique().item() == 0
