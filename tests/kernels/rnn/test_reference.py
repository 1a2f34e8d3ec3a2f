"""The definition is PyTorch's; step by step it is the same; under vmap one layer becomes many."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import vmap

from slipstream.kernels import rnn_layer
from slipstream.kernels.rnn import stepwise
from slipstream.kernels.rnn.weights import LayerWeights, StepwiseOptions
from tests.conftest import close, slow
from tests.kernels.layers import Shape, apart, defined, drawn

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
    found = rnn_layer(kind, x, weights, last=last)
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
    found = vmap(lambda x, *w: rnn_layer(kind, x, w), in_dims=(None if shared else 0, *[0] * 8))(
        x, *stacked
    )
    wanted = torch.stack([layer(x if shared else x[i])[0] for i, layer in enumerate(layers)])
    close(found.detach(), wanted.detach(), rel=1e-12)
    grad = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, [w for lane in weights for w in lane], grad)
    for number, found_grad in enumerate(torch.autograd.grad(found, stacked, grad)):
        close(found_grad, torch.stack(theirs[number :: len(stacked)]), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        Shape("lstm", K=3, T=9, B=4, D=5, H=7),
        Shape("gru", K=2, T=1, B=1, D=3, H=20, W=2),
        slow(Shape("lstm", K=1, T=30, B=8, D=2, H=140, W=2)),
        Shape("gru", K=2, T=12, B=5, D=4, H=6),
        Shape("lstm", K=2, T=8, B=3, D=4, H=6, W=2, last=True),
        Shape("gru", K=5, T=7, B=1, D=2, H=9, last=True),
    ],
    ids=str,
)
def test_step_by_step_is_what_is_defined(shape, dtype):
    given = drawn(shape, dtype)
    way = StepwiseOptions(shape.kind, shape.last, dtype)
    out = stepwise.run_layer(way, given[0], LayerWeights(*given[1:5]))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = [out, *torch.autograd.grad(out, given, grad)]
    error = apart(found, defined(shape, given, grad))
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)
