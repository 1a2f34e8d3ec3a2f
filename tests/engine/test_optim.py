from __future__ import annotations

import inspect

import pytest
import torch

from slipstream.config import Train
from slipstream.engine import optim


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
