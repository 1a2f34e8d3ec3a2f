from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from slipstream.config import Train
from slipstream.models.losses import (
    average_predictions,
    compute_window_losses,
    explain_point,
    select_point,
)
from tests.conftest import small_config

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
    torch.testing.assert_close(compute_window_losses(PREDICTION, TARGET, train), wanted)


def test_the_quantile_loss_is_least_at_the_quantile():
    values = torch.randn(20_000, generator=generator)
    levels = (0.1, 0.5, 0.9)
    guess = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([guess], lr=0.05)
    train = Train(loss="quantile", quantiles=levels)
    for _ in range(300):
        optimizer.zero_grad()
        prediction = guess.expand(len(values), 1, 1, 3)
        compute_window_losses(prediction, values[:, None, None], train).mean().backward()
        optimizer.step()
    wanted = torch.quantile(values, torch.tensor(levels))
    torch.testing.assert_close(guess.detach(), wanted, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("levels", "point"),
    [
        ((), 3.0),
        ((0.3,), 3.0),
        ((0.1, 0.5, 0.9), 5.0),
        ((0.1, 0.9), 4.0),
        ((0.1, 0.4, 0.9), 5.4),
        ((0.05, 0.25, 0.75, 0.95), 6.0),
        ((0.6, 0.9), 3.0),
        ((0.1, 0.2), 5.0),
    ],
)
def test_the_point_is_the_median_or_between_the_quantiles_around_it(levels, point):
    prediction = (3 + 2 * torch.arange(max(len(levels), 1))).float().expand(2, 1, 1, -1)
    assert select_point(prediction, levels).flatten().tolist() == pytest.approx([point] * 2)


@pytest.mark.parametrize(
    ("levels", "what"),
    [
        ([0.1, 0.5, 0.9], None),
        ([0.1, 0.9], "the mean of those of 0.1 and 0.9"),
        ([0.1, 0.4, 0.9], "interpolated between those of 0.4 and 0.9"),
        ([0.8, 0.9], "that of 0.8, the nearest"),
    ],
)
def test_a_note_says_what_the_point_is_where_there_is_no_median(levels, what):
    config = small_config(train={"loss": "quantile", "quantiles": levels})
    assert [note.rpartition(" is ")[2] for note in explain_point(config)] == (
        [what] if what else []
    )
    assert explain_point(small_config(train={"loss": "mae", "quantiles": levels})) == []


LOGITS = torch.randn(5, 2, 1, 4, generator=torch.Generator().manual_seed(1))
NUMBERS = torch.tensor([[0, 1], [3, 2], [2, 2], [1, 0], [3, 3]])[..., None]


@pytest.mark.parametrize("weights", ["none", (1.0, 2.0, 0.5, 3.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_is_torchs(smoothing, weights):
    train = Train(loss="cross_entropy", label_smoothing=smoothing, class_weights=weights)
    found = compute_window_losses(LOGITS, NUMBERS.float(), train)
    one_hot = torch.nn.functional.one_hot(NUMBERS, 4) * (1 - smoothing) + smoothing / 4
    losses = -(one_hot * LOGITS.log_softmax(-1)).sum(-1)
    if weights != "none":
        losses = losses * torch.tensor(weights)[NUMBERS]
    torch.testing.assert_close(found, losses.flatten(1).mean(1))
    if weights == "none":
        wanted = torch.nn.functional.cross_entropy(
            LOGITS.reshape(-1, 4), NUMBERS.flatten(), label_smoothing=smoothing, reduction="none"
        )
        torch.testing.assert_close(found, wanted.view(5, 2).mean(1))


def test_focal_counts_what_is_known_less():
    of_label = LOGITS.softmax(-1).gather(-1, NUMBERS[..., None])[..., 0]
    wanted = ((1 - of_label) ** 2 * -of_label.log()).flatten(1).mean(1)
    found = compute_window_losses(LOGITS, NUMBERS.float(), Train(loss="focal"))
    torch.testing.assert_close(found, wanted)
    plain = compute_window_losses(LOGITS, NUMBERS.float(), Train(loss="cross_entropy"))
    same = compute_window_losses(LOGITS, NUMBERS.float(), Train(loss="focal", focal_gamma=0.0))
    torch.testing.assert_close(same, plain)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_gradients_stay_finite_where_the_model_is_certain(gamma):
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]]).view(2, 1, 1, 2).requires_grad_()
    labels = torch.zeros(2, 1, 1)
    compute_window_losses(logits, labels, Train(loss="focal", focal_gamma=gamma)).sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_padding_without_a_label_has_a_finite_loss():
    labels = torch.full((5, 2, 1), -1.0)
    found = compute_window_losses(LOGITS, labels, Train(loss="cross_entropy"))
    assert torch.isfinite(found).all()


def test_classes_are_pooled_by_their_probabilities():
    other = LOGITS.flip(0) * 3
    found = average_predictions([LOGITS, other], classes=True).softmax(-1)
    torch.testing.assert_close(found, (LOGITS.softmax(-1) + other.softmax(-1)) / 2)
    torch.testing.assert_close(
        average_predictions([LOGITS, other], classes=False), (LOGITS + other) / 2
    )
