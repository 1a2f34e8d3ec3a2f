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


def step_large(device, *, in_pieces, overflow):
    """Weights and states after three updates of tensors that are more than a piece."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator) for size in ((600, 130), (7,), (300, 40))]
    weights = [torch.nn.Parameter(weight.to(device)) for weight in weights]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.1}]
    optimizer = optim.build_optimizer(Train(), groups, torch.tensor(0.1, device=device))
    for number in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(device)
        found = torch.tensor(float(overflow and number == 1), device=device)
        vars(optimizer).update(grad_scale=torch.tensor(2.0, device=device), found_inf=found)
        if in_pieces:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    optim._step_in_pieces(optimizer, group)
        else:
            inspect.unwrap(type(optimizer).step)(optimizer)
    states = [value for weight in weights for value in optimizer.state[weight].values()]
    return [*weights, *states]


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_in_pieces_is_torchs_step(device, overflow):
    pieces = step_large(device, in_pieces=True, overflow=overflow)
    whole = step_large(device, in_pieces=False, overflow=overflow)
    for piece, wanted in zip(pieces, whole, strict=True):
        if device == "cuda":
            assert torch.equal(piece, wanted)
        else:  # its vectors end elsewhere
            torch.testing.assert_close(piece, wanted)


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
