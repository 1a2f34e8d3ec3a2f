"""Attention where there is no kernel of our own: torch's, of one model or of lanes."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from slipstream.kernels import attention
from tests.kernels.layers import apart, seen


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("tokens", [1, 20, 70])
def test_every_token_sees_every_other(tokens, heads):
    torch.manual_seed(0)
    joined = torch.randn(3, tokens, 5, 3 * 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, tokens, 5, 8, dtype=torch.float64)
    wanted = seen(joined, heads)
    gradient = torch.autograd.grad(wanted, joined, grad)
    for found in (
        vmap(attention, (0, None))(joined, heads),
        torch.stack([attention(lane, heads) for lane in joined]),
    ):
        both = [found, *torch.autograd.grad(found, joined, grad)]
        assert apart(both, [wanted.detach(), *gradient]) < 1e-12
