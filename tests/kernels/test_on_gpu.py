"""The kernels on a GPU, over many shapes, against the definition in float64."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.kernels import fused
from slipstream.kernels.shapes import Weights
from tests.kernels.layers import Shape, apart, defined, drawn

pytestmark = pytest.mark.gpu

MOST = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def poisoned():
    """What `empty` gives is NaN: nothing may stay unwritten."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def shapes(count, *, seed=0):
    """Lengths 1 to 1000, batches 1 to 4096, odd widths; not all large at once."""
    draw = random.Random(seed)
    for _ in range(count):
        T = draw.choice([1, 2, 3, 17, 50, 105, 400, 1000])
        B = draw.choice([1, 5, 16, 33, 200, 512] if T < 400 else [1, 7, 40])
        yield Shape(
            draw.choice(["lstm", "gru"]),
            K=draw.choice([1, 1, 2, 5]),
            T=T,
            B=B,
            D=draw.choice([1, 3, 10, 29, 64, 130]),
            H=draw.choice([1, 13, 16, 31, 64, 100, 128]),
            W=draw.choice([1, 2]),
            last=draw.random() < 0.5,
            states=T < 20 and draw.random() < 0.5,  # later on, half precision forgets them
        )


LARGE = [
    Shape("lstm", K=1, T=20, B=4096, D=4, H=64),
    Shape("gru", K=1, T=1000, B=64, D=8, H=128, last=True),
    Shape("lstm", K=16, T=50, B=256, D=4, H=128, W=2),
]


def way_for(shape, given, dtype):
    x, weights = given[0], Weights(*given[1:5])
    way = fused.choose(shape.kind, shape.last, x, weights, dtype, "ieee")
    return way, x, weights


def error_of(shape, dtype, *, seed=0):
    given = drawn(shape, dtype, "cuda", seed=seed)
    way, x, weights = way_for(shape, given, dtype)
    if way is None:
        assert dtype == torch.float32
        assert shape.H > 64
        return 0.0
    states = [*given[5:], None, None][:2]
    out = fused.layer(way, x, weights, *states)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    found = [out, *torch.autograd.grad(out, given, grad)]
    return apart(found, defined(shape, given, grad))


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("shape", [*shapes(40), *LARGE], ids=str)
def test_values_and_gradients(shape, dtype):
    assert error_of(shape, dtype) < MOST[dtype] * (3 if shape.T > 400 else 1)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("held", [4, 1])
def test_tiles_of_smaller_cards(kind, held, monkeypatch):
    room = 101_376 if held == 1 else 166_912
    chosen = fused.tiles(128, 4, 2, room=room, many=False)
    assert {tile.held for tile in chosen[1:]} == {held}
    monkeypatch.setattr(fused, "tiles", lambda *_, **__: chosen)
    shape = Shape(kind, K=2, T=20, B=40, D=4, H=128)
    assert error_of(shape, torch.float16) < MOST[torch.float16]


def test_a_capture_gives_the_same_bits():
    shape = Shape("lstm", K=4, T=30, B=50, D=5, H=64, W=2)
    given = drawn(shape, torch.float16, "cuda")
    way, x, weights = way_for(shape, given, torch.float16)
    grad = torch.randn(4, 30, 50, 128, device="cuda").half()

    def step():
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights)]
        out = fused.layer(way, leaves[0], Weights(*leaves[1:]))
        return [out, *torch.autograd.grad(out, leaves, grad)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


def test_a_lane_knows_nothing_of_the_others():
    shape = Shape("gru", K=6, T=40, B=70, D=5, H=100, last=True)
    given = drawn(shape, torch.float16, "cuda")
    way, x, weights = way_for(shape, given, torch.float16)
    first = fused.layer(way, x, weights)
    with torch.no_grad():
        for tensor in given:
            tensor[1:] = torch.nan
    assert torch.equal(fused.layer(way, x, weights)[0], first[0])


def test_the_way_back_runs_once():
    shape = Shape("lstm", K=1, T=3, B=4, D=2, H=16)
    given = drawn(shape, torch.float16, "cuda")
    way, x, weights = way_for(shape, given, torch.float16)
    out = fused.layer(way, x, weights).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        out.backward()
