"""The definition is PyTorch's, and the op's rule under vmap makes one layer of many."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import vmap

from slipstream.kernels import recurrent
from tests.conftest import close

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}


def layers_of(kind, count, *, both_ways):
    torch.manual_seed(0)
    made = [CELLS[kind](3, 5, bidirectional=both_ways).double() for _ in range(count)]
    return made, [[w for way in layer.all_weights for w in way] for layer in made]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_a_layer_takes_and_gives_what_torch_does(kind, both_ways, last):
    (layer,), (weights,) = layers_of(kind, 1, both_ways=both_ways)
    x = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    wanted, final = layer(x)
    if last:
        states = final[0] if kind == "lstm" else final
        wanted = states.transpose(0, 1).flatten(1)
    found = recurrent(kind, x, weights, last=last)
    close(found.detach(), wanted.detach(), rel=1e-12)
    grad = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, [x, *weights], grad)
    for a, b in zip(torch.autograd.grad(found, [x, *weights], grad), theirs, strict=True):
        close(a, b, rel=1e-12)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_under_vmap_every_lane_is_its_own(kind, shared):
    layers, weights = layers_of(kind, 4, both_ways=True)
    x = torch.randn(*([] if shared else [4]), 6, 2, 3, dtype=torch.float64)
    stacked = [torch.stack(lane).detach().requires_grad_() for lane in zip(*weights, strict=True)]
    found = vmap(lambda x, *w: recurrent(kind, x, w), in_dims=(None if shared else 0, *[0] * 8))(
        x, *stacked
    )
    wanted = torch.stack([layer(x if shared else x[i])[0] for i, layer in enumerate(layers)])
    close(found.detach(), wanted.detach(), rel=1e-12)
    grad = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, [w for lane in weights for w in lane], grad)
    for number, found_grad in enumerate(torch.autograd.grad(found, stacked, grad)):
        close(found_grad, torch.stack(theirs[number :: len(stacked)]), rel=1e-12)
