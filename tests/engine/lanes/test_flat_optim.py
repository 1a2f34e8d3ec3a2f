"""The flat update is torch's own, lane by lane, and touches nobody else."""

from __future__ import annotations

import pytest
import torch

from slipstream.config import Train
from slipstream.engine import optim, pack
from tests.conftest import close

K, P = 3, 37
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def settings(device, **changed):
    found = {
        "lr": torch.tensor([0.1, 0.01, 0.003]),
        "decay": torch.tensor([0.0, 0.1, 0.01]),
        "momentum": torch.tensor([0.9, 0.0, 0.5]),
        "moves": torch.ones(K, dtype=torch.bool),
    }
    return {name: value.to(device) for name, value in (found | changed).items()}


def buffers(device):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(K, P, generator=generator).to(device)
    return weights, torch.zeros_like(weights), torch.zeros_like(weights), generator


def update_lanes(optimizer, tensors, count, divisor, given):
    """Prepare an update, which changes nothing, and do it."""
    before = [tensor.clone() for tensor in tensors]
    update = pack.prepare_update(
        optimizer,
        pack.LaneTensors(*tensors),
        pack.UpdateSettings(step_count=count, divisor=divisor, **given),
    )
    for old, tensor in zip(before, tensors, strict=True):
        assert old.cpu().numpy().tobytes() == tensor.cpu().numpy().tobytes()
    update()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("clip", [0.5, "off"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "rmsprop"])
def test_thirty_steps_are_those_of_torch(optimizer, clip, device):
    weights, first, second, generator = buffers(device)
    given, limit = settings(device), float("inf") if clip == "off" else clip
    alone = [weights[k].clone().requires_grad_() for k in range(K)]
    makers = []
    for k in range(K):
        train = Train(
            optimizer=optimizer,
            momentum=float(given["momentum"][k]),
            weight_decay=float(given["decay"][k]),
        )
        makers.append(optim.build_optimizer(train, [alone[k]], given["lr"][k].clone()))
    for step in range(1, 31):
        grads = torch.randn(K, P, generator=generator).to(device)
        divisor, overflow = pack.compute_divisor(
            grads, torch.full((K,), limit, device=device), None
        )
        assert overflow is None
        count = torch.full((K,), float(step), device=device)
        update_lanes(optimizer, (weights, grads, first, second), count, divisor, given)
        for k in range(K):
            alone[k].grad = grads[k].clone()
            optim.apply_gradients(
                makers[k], [alone[k]], clip=None if clip == "off" else clip, scale=None
            )
    for k in range(K):
        close(weights[k].cpu(), alone[k].detach().cpu(), rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "rmsprop"])
def test_lanes_that_do_not_move_stay_and_touch_nobody(optimizer):
    kept = []
    for spoilt in (1.0, torch.nan, torch.inf):
        weights, first, second, generator = buffers("cpu")
        first.normal_(generator=generator)
        second.uniform_(generator=generator)
        before = [tensor.clone() for tensor in (weights, first, second)]
        grads = torch.randn(K, P, generator=generator)
        grads[1] *= spoilt
        divisor, overflow = pack.compute_divisor(
            grads, torch.full((K,), 0.5), torch.full((K,), 8.0)
        )
        assert overflow.tolist() == [False, spoilt != 1.0, False]
        moves = torch.tensor([True, False, True])
        given = settings("cpu", moves=moves)
        count = torch.tensor([4.0, 0.0, 9.0])
        update_lanes(optimizer, (weights, grads, first, second), count, divisor, given)
        for old, new in zip(before, (weights, first, second), strict=True):
            assert torch.equal(old[1], new[1])
        assert not torch.equal(before[0][0], weights[0])
        kept.append(torch.cat([weights, first, second]))
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


def test_the_loss_scale_of_every_lane_moves_as_torchs():
    scale, since = torch.full((K,), 2.0**16), torch.zeros(K, dtype=torch.int32)
    alone = [optim.build_loss_scale(torch.device("cpu")) for _ in range(K)]
    active = torch.tensor([True, True, False])
    for step in range(4100):
        overflow = torch.tensor([step == 5, False, True])
        pack.update_loss_scale(scale, since, overflow, active)
        for k in range(2):
            alone[k].update(overflow[k].float())
    assert scale.tolist() == [*(float(one.scale) for one in alone[:2]), 2.0**16]
    assert since.tolist() == [*(int(one.since_growth) for one in alone[:2]), 0]
