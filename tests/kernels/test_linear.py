"""A linear layer of many lanes, against torch's of each."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from slipstream.kernels import linear as through_lanes
from slipstream.kernels.layers import _Linear
from slipstream.kernels.operands import call_under_vmap
from tests.conftest import close

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
SHAPES = [(3, (20, 7), 5, 4), (2, (9,), 1, 1), (4, (2, 3, 5), 16, 3)]  # lanes, rows, inputs, units


def drawn(shape, device, dtype=torch.float32):
    K, rows, D, N = shape
    torch.manual_seed(0)
    sizes = [(K, *rows, D), (K, N, D), (K, N), (K, *rows, N)]
    *given, grad = (torch.randn(size).to(device, dtype) for size in sizes)
    return [one.requires_grad_() for one in given], grad


def with_gradients(out, given, grad):
    """By way of a loss: no thread begins with a product of cuBLAS, which would warn of it."""
    loss = (out.float() * grad.float()).sum()
    return [out.detach(), *torch.autograd.grad(loss, given)]


def of_each(given, grad):
    """The output and gradients by float64, lane after lane."""
    exact = [one.detach().double().requires_grad_() for one in given]
    out = torch.stack([F.linear(*one) for one in zip(*exact, strict=True)])
    return [out.detach(), *torch.autograd.grad(out, exact, grad.double())]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, device):
    given, grad = drawn(shape, device)
    out = torch.func.vmap(lambda *one: call_under_vmap(_Linear.apply, *one))(*given)
    found = with_gradients(out, given, grad)
    for one, wanted in zip(found, of_each(given, grad), strict=True):
        assert one.dtype == torch.float32
        close(one.double(), wanted, rel=1e-5)


@pytest.mark.parametrize("shared", [0, 1, 2], ids=["inputs", "weight", "bias"])
def test_what_all_lanes_share(shared):
    given, grad = drawn(SHAPES[0], "cpu")
    given[shared] = given[shared][0].detach().clone().requires_grad_()
    dims = tuple(None if i == shared else 0 for i in range(3))
    out = torch.func.vmap(lambda *one: call_under_vmap(_Linear.apply, *one), dims)(*given)
    wanted = torch.func.vmap(F.linear, dims)(*given)
    pairs = (with_gradients(one, given, grad) for one in (out, wanted))
    for one, other in zip(*pairs, strict=True):
        close(one, other, rel=1e-5)


def test_one_model_is_left_to_torch():
    (x, weight, bias), _ = drawn((1, (6,), 3, 2), "cpu")
    assert torch.equal(through_lanes(x[0], weight[0], bias[0]), F.linear(x[0], weight[0], bias[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_under_autocast(dtype):
    given, grad = drawn((16, (20, 64), 32, 96), "cuda")
    grad = grad.to(dtype)
    with torch.autocast("cuda", dtype):
        out = torch.func.vmap(through_lanes)(*given)
    assert out.dtype == dtype
    found = with_gradients(out, given, grad)
    most = 4e-3 if dtype == torch.float16 else 3e-2
    for one, wanted in zip(found, of_each(given, grad), strict=True):
        assert float((one.double() - wanted).norm() / wanted.norm()) < most


@pytest.mark.gpu
def test_a_lane_knows_nothing_of_the_others():
    given, grad = drawn((6, (20, 64), 32, 96), "cuda")

    def results():
        leaves = [one.detach().clone().requires_grad_() for one in given]
        with torch.autocast("cuda", torch.float16):
            out = torch.func.vmap(through_lanes)(*leaves)
        return with_gradients(out, leaves, grad.half())

    before = [one[0].clone() for one in results()]
    with torch.no_grad():
        for one in given:
            one[1:] = torch.nan
    assert all(torch.equal(a, b[0]) for a, b in zip(before, results(), strict=True))
