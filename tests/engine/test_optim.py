from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import Train
from slipstream.engine import optim

STEPS = 4


def all_rates(train: Train) -> list[float]:
    return [
        rate for epoch in range(train.epochs) for rate in optim.compute_lrs(train, epoch, STEPS)
    ]


def torch_rates(train: Train, make, *, per_step: bool) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=train.lr)
    schedule = make(optimizer)
    found = []
    for _ in range(train.epochs):
        for _ in range(STEPS):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if per_step:
                schedule.step()
        if not per_step:
            schedule.step()
    return found


def test_constant():
    assert set(all_rates(Train(schedule="constant", epochs=3))) == {1e-3}
    assert set(all_rates(Train(schedule="plateau", epochs=3))) == {1e-3}


def test_step_cuts_like_torch():
    train = Train(schedule="step", epochs=12, step_epochs=5, step_factor=0.5)
    wanted = torch_rates(
        train, lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.5), per_step=False
    )
    assert all_rates(train) == pytest.approx(wanted)


def test_cosine_falls_like_torch():
    train = Train(schedule="cosine", epochs=6, lr_min=1e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR
    wanted = torch_rates(train, lambda o: scheduler(o, 6 * STEPS, 1e-5), per_step=True)
    assert all_rates(train) == pytest.approx(wanted)


def test_restarts_like_torch():
    train = Train(schedule="restarts", epochs=14, restart_epochs=2, restart_growth=2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
    wanted = torch_rates(train, lambda o: scheduler(o, 2 * STEPS, 2), per_step=True)
    assert all_rates(train) == pytest.approx(wanted)


def test_warm_up_rises_in_equal_steps_to_the_full_rate():
    train = Train(schedule="cosine", epochs=10, warmup_epochs=2)
    found = all_rates(train)
    assert found[:8] == pytest.approx([1e-3 * (i + 1) / 8 for i in range(8)])
    assert found[8] == pytest.approx(1e-3)
    assert found[-1] < 1e-5


@given(
    st.sampled_from(["constant", "step", "plateau", "cosine", "restarts"]),
    st.floats(0, 5),
    st.integers(1, 30),
    st.floats(0, 1e-3),
)
def test_no_schedule_leaves_its_bounds(schedule, warmup, epochs, lr_min):
    train = Train(schedule=schedule, warmup_epochs=warmup, epochs=epochs, lr_min=lr_min)
    assert all(
        0 < rate <= train.lr * (1 + 1e-12) or math.isclose(rate, 0) for rate in all_rates(train)
    )


def stepped(optimizer_name, gradient, *, clip=None, scaled=True):
    """One update of a weight that has an optimizer state already."""
    train = Train(optimizer=optimizer_name, lr=0.1)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.build_optimizer(train, [weight], torch.tensor(0.1))
    weight.grad = torch.full((3,), 0.5)
    optim.apply_gradients(optimizer, [weight], clip=None, scale=None)
    scale = optim.build_loss_scale(torch.device("cpu")) if scaled else None
    before = weight.detach().clone(), {k: v.clone() for k, v in optimizer.state[weight].items()}
    weight.grad = gradient * (float(scale.scale) if scale else 1.0)
    optim.apply_gradients(optimizer, [weight], clip=clip, scale=scale)
    return weight.detach(), optimizer.state[weight], before, scale


OPTIMIZERS = ["adam", "adamw", "sgd", "rmsprop"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_overflow_changes_nothing_but_the_scale(optimizer):
    weight, state, before, scale = stepped(optimizer, torch.tensor([1.0, torch.inf, 1.0]), clip=1.0)
    assert torch.equal(weight, before[0])
    for name, value in before[1].items():
        assert torch.equal(state[name], value), name
    assert float(scale.scale) == optim.FIRST_SCALE / 2


@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_scaled_and_clipped_gradients_step_as_torch_would(optimizer, clip):
    gradient = torch.tensor([1.0, -2.0, 3.0])
    scaled, _, before, scale = stepped(optimizer, gradient, clip=clip)
    plain, _, _, _ = stepped(optimizer, gradient, clip=clip, scaled=False)
    holder = torch.nn.Parameter(torch.zeros(3))
    holder.grad = gradient.clone()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_([holder], clip)
    wanted, _, _, _ = stepped(optimizer, holder.grad, scaled=False)
    torch.testing.assert_close(plain, wanted)
    torch.testing.assert_close(scaled, wanted)
    assert not torch.equal(scaled, before[0])
    assert float(scale.scale) == optim.FIRST_SCALE
    assert int(scale.since_growth) == 1


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop"])
def test_torchs_own_optimizers_stay_as_they_are(name, monkeypatch):
    """What is set for the sake of ours would be seen by everything else in the process."""
    methods = ("add_param_group", "zero_grad", "state_dict", "load_state_dict", "step")
    owned = [inspect.unwrap(getattr(torch.optim.Optimizer, method)) for method in methods]
    for method in owned:
        monkeypatch.delattr(method, "__dynamo_disable", raising=False)
    before = [dict(vars(method)) for method in owned]
    weight = torch.zeros(2, requires_grad=True)
    optimizer = optim.build_optimizer(Train(optimizer=name), [weight], torch.tensor(0.1))
    weight.grad = torch.ones(2)
    optim.apply_gradients(optimizer, [weight], clip=None, scale=None)
    optim.clear_grads(optimizer, set_to_none=True)
    assert weight.grad is None
    assert [vars(method) for method in owned] == before
