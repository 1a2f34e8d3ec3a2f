"""Dropout by counter: what it drops, how often, and on what that depends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from slipstream.models.noise import Noise, dropout

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    return torch.device(request.param)


def noise(seed=0, rate=0.3, *, step=0, number=0, device="cpu"):
    step = torch.tensor(step, device=device)
    return Noise(torch.tensor(seed, device=device), torch.tensor(rate, device=device)).for_pass(
        step, number
    )


def mask(shape, noise, site=0, **how):
    return dropout(torch.ones(shape, device=noise.rate.device), noise, site, **how) > 0


def test_nothing_is_dropped_at_rate_zero_or_without_noise(device):
    x = torch.randn(5, 7, 11, device=device)
    assert torch.equal(dropout(x, noise(rate=0.0, device=device), 3), x)
    assert dropout(x, None, 3) is x


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_and_the_mean_are_what_was_asked_for(rate, device):
    for seed in (0, 1, 2**63 - 1):
        out = dropout(torch.ones(64, 128, 96, device=device), noise(seed, rate, device=device), 2)
        spread = (rate * (1 - rate) / out.numel()) ** 0.5
        assert abs(float((out == 0).double().mean()) - rate) < 4 * spread
        assert abs(float(out.double().mean()) - 1) < 4 * spread / (1 - rate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_stays_in_half_precision(dtype):
    out = dropout(torch.ones(64, 128, 128, dtype=dtype), noise(rate=0.1), 0)
    assert out.dtype == dtype
    assert abs(float(out.double().mean()) - 1) < 1.5e-3  # a rounded scale alone would be 1.6e-3 off


def correlation(one, other):
    return abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]).double())[0, 1]))


@pytest.mark.slow
def test_keys_steps_passes_sites_times_windows_and_units_are_independent():
    shape = (32, 64, 48)
    masks = [
        mask(shape, noise(seed, step=step, number=number), site)
        for seed, step, number, site in itertools.product((0, 1), (0, 1, 50), (0, 1), (0, 1, 2))
    ]
    bound = 4.5 / masks[0].numel() ** 0.5
    for one, other in itertools.combinations(masks, 2):
        assert correlation(one, other) < bound
    first = masks[0]
    for dim, lag in itertools.product(range(3), (1, 2, 3, 7)):
        moved = first.narrow(dim, lag, shape[dim] - lag)
        still = first.narrow(dim, 0, shape[dim] - lag)
        assert correlation(moved, still) < 1.2 * bound


def test_every_pass_of_a_step_has_its_own():
    masks = [mask((8, 64), noise(2**63 - 1, step=2**40, number=number)) for number in range(40)]
    assert len({tuple(one.flatten().tolist()) for one in masks}) == 40


def test_no_row_column_or_rectangle_stands_out():
    """Sums over rows and units scatter as they should, and so do products over rectangles."""
    found = mask((16, 256, 256), noise(rate=0.5)).double()
    for dim in range(3):
        sums = found.mean(dim=dim)
        wanted = (0.25 / found.shape[dim]) ** 0.5
        assert 0.95 < float(sums.std()) / wanted < 1.05
    sign = 2 * found - 1
    rectangles = sign[:, :-1, :-1] * sign[:, 1:, :-1] * sign[:, :-1, 1:] * sign[:, 1:, 1:]
    assert abs(float(rectangles.mean())) < 4.5 / rectangles.numel() ** 0.5


def test_padding_of_batch_width_and_time_changes_nothing():
    wide = mask((9, 20, 32), noise())
    assert torch.equal(mask((6, 13, 24), noise()), wide[:6, :13, :24])
    assert torch.equal(mask((13, 24), noise()), wide[0, :13, :24])
    both = mask((6, 13, 24), noise(), directions=2)
    padded = mask((6, 13, 40), noise(), directions=2)
    assert torch.equal(both[..., :12], padded[..., :12])
    assert torch.equal(both[..., 12:], padded[..., 20:32])
    assert not torch.equal(both[..., :12], both[..., 12:])


def test_a_lane_drops_what_it_drops_alone(device):
    keys = torch.tensor([5, 6, 7], device=device)
    rates = torch.tensor([0.0, 0.2, 0.6], device=device)
    x = torch.randn(3, 4, 5, 6, device=device, requires_grad=True)
    out = torch.func.vmap(lambda x, *noise: dropout(x, Noise(*noise), 1))(x, keys, rates)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    for lane in range(3):
        alone = dropout(x[lane], Noise(keys[lane], rates[lane]), 1)
        assert torch.equal(out[lane], alone)
        assert torch.equal(gradient[lane], torch.autograd.grad(alone.square().sum(), x)[0][lane])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_drops_what_a_cpu_drops(dtype):
    for shape, directions, rate in itertools.product(
        [(9, 20, 32), (7, 48)], (1, 2), (0.0, 0.1, 0.7)
    ):
        x = torch.randn(shape).to(dtype).requires_grad_()
        there = x.detach().cuda().requires_grad_()
        here = dropout(x, noise(3, rate), 4, directions=directions)
        away = dropout(there, noise(3, rate, device="cuda"), 4, directions=directions)
        assert torch.equal(away.cpu(), here)
        grads = torch.autograd.grad(here.sum(), x) + torch.autograd.grad(away.sum(), there)
        assert torch.equal(grads[0], grads[1].cpu())


INTERPRETED = """
import itertools, torch
from slipstream.kernels import dropout as drops
from slipstream.models import noise as d

def fused(x, noise, site, directions):
    how = drops.DropoutHash(d.MIX, d.UNIT, d._hash_unit_site(site), d.LAST, d.DIRECTION)
    return drops.apply_dropout(x, noise.key, noise.rate, how, directions)

def compare(x, run):
    ours, wanted = run(fused), run(d.dropout_eager)
    assert torch.equal(ours, wanted)
    up = torch.randn_like(ours)
    assert torch.equal(*(torch.autograd.grad(out, x, up)[0] for out in (ours, wanted)))

shapes = [(5, 7, 12), (9, 34), (40, 3, 24)]
for shape, directions, rate in itertools.product(shapes, (1, 2), (0.0, 0.9)):
    for dtype in (torch.float32, torch.float16):
        noise = d.Noise(torch.tensor(3), torch.tensor(rate)).for_pass(torch.tensor(11), 1)
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        compare(x, lambda how: how(x, noise, 4, directions))
x, keys, rates = torch.randn(3, 5, 4, 6, requires_grad=True), torch.arange(3), torch.rand(3)
compare(x, lambda how: torch.func.vmap(lambda x, *n: how(x, d.Noise(*n), 1, 2))(x, keys, rates))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_is_the_definition_to_the_bit():
    """By Triton's interpreter, so that it shows without a GPU too."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment)
