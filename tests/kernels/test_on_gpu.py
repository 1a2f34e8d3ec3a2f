"""The kernels on a GPU, over many shapes, against the definition in float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.kernels import attention, layer_norm, precompile
from slipstream.kernels.rnn import dispatch, fused, stepwise, wide
from slipstream.kernels.rnn.weights import LayerWeights, StepwiseOptions
from slipstream.models.boosting import Boosting
from tests.kernels.layers import (
    Attention,
    Shape,
    apart,
    attention_error,
    attention_is_the_same_alone,
    attention_shapes,
    defined,
    drawn,
    draws_agree,
    norm_error,
)
from tests.kernels.trees import draw_features, draw_trees

knobs = pytest.importorskip("triton").knobs

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
    x, weights = given[0], LayerWeights(*given[1:5])
    way = fused.choose_options(shape.kind, shape.last, x, weights, dtype, "ieee")
    return way, x, weights


def error_of(shape, dtype, *, seed=0):
    given = drawn(shape, dtype, "cuda", seed=seed)
    way, x, weights = way_for(shape, given, dtype)
    if way is None:
        assert dtype == torch.float32
        assert shape.H > 64
        return 0.0
    states = [*given[5:], None, None][:2]
    out = fused.run_layer(way, x, weights, *states)
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
    chosen = fused.fit_tiles(128, 4, 2, room=room, many=False)
    assert {tile.resident for tile in chosen[1:]} == {held}
    monkeypatch.setattr(fused, "fit_tiles", lambda *_, **__: chosen)
    shape = Shape(kind, K=2, T=20, B=40, D=4, H=128)
    assert error_of(shape, torch.float16) < MOST[torch.float16]


def test_a_capture_gives_the_same_bits():
    shape = Shape("lstm", K=4, T=30, B=50, D=5, H=64, W=2)
    given = drawn(shape, torch.float16, "cuda")
    way, x, weights = way_for(shape, given, torch.float16)
    grad = torch.randn(4, 30, 50, 128, device="cuda").half()

    def step():
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights)]
        out = fused.run_layer(way, leaves[0], LayerWeights(*leaves[1:]))
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
    first = fused.run_layer(way, x, weights)
    with torch.no_grad():
        for tensor in given:
            tensor[1:] = torch.nan
    assert torch.equal(fused.run_layer(way, x, weights)[0], first[0])


def test_the_way_back_runs_once():
    shape = Shape("lstm", K=1, T=3, B=4, D=2, H=16)
    given = drawn(shape, torch.float16, "cuda")
    way, x, weights = way_for(shape, given, torch.float16)
    out = fused.run_layer(way, x, weights).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        out.backward()


def wide_shapes(count, *, seed=0):
    """Layers too wide for the kernels that hold their weights on chip."""
    draw = random.Random(seed)
    for _ in range(count):
        T = draw.choice([1, 2, 3, 24, 50, 105])
        yield Shape(
            draw.choice(["lstm", "gru"]),
            K=draw.choice([1, 2, 3, 4, 5]),
            T=T,
            B=draw.choice([1, 5, 16, 33, 256]),
            D=draw.choice([1, 3, 11, 64, 130, 256]),
            H=draw.choice([129, 136, 160, 192, 200, 255, 256, 257, 300]),
            W=draw.choice([1, 2]),
            last=draw.random() < 0.3,
        )


WIDE = [
    Shape("lstm", K=16, T=24, B=256, D=11, H=256),
    Shape("gru", K=2, T=400, B=16, D=4, H=256, W=2),
]


def stepwise_results(shape, dtype, tile=None):
    """The output and all gradients, and by the definition; weights' lanes lie apart."""
    given = drawn(shape, dtype, "cuda")
    half = dtype.itemsize == 2
    way = StepwiseOptions(shape.kind, shape.last, dtype, use_triton=True, fast_tanh=half, tile=tile)
    weights = LayerWeights(
        *(torch.cat([w, w], dim=1).split(w.shape[1], dim=1)[0] for w in given[1:])
    )
    out = stepwise.run_layer(way, given[0], weights)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    return [out, *torch.autograd.grad(out, given, grad)], given, grad


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("shape", [*wide_shapes(25), *WIDE], ids=str)
def test_wide_layers_step_by_step(shape, dtype):
    found, given, grad = stepwise_results(shape, dtype)
    assert apart(found, defined(shape, given, grad)) < MOST[dtype]
    again, _, _ = stepwise_results(shape, dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


REHEARSED = [  # of sizes that no other test has
    Shape("lstm", K=3, T=7, B=33, D=13, H=56),
    Shape("gru", K=2, T=7, B=33, D=9, H=176),
    Shape("lstm", K=40, T=7, B=64, D=9, H=184),
]


def tile_for(shape, dtype):
    x, weights = drawn(shape, dtype, "cuda")[::2][:2]
    return wide.choose_tile(x, LayerWeights(*[weights] * 4), dtype)


SPLIT = [
    Shape("lstm", K=1, T=1000, B=16, D=4, H=256, last=True),
    Shape("lstm", K=1, T=24, B=512, D=11, H=256),
    Shape("gru", K=15, T=24, B=64, D=11, H=256),
    Shape("lstm", K=1, T=50, B=128, D=4, H=512),
    Shape("gru", K=1, T=50, B=30, D=4, H=300, W=2),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile", wide.TILES)
@pytest.mark.parametrize("shape", [*wide_shapes(12, seed=1), *SPLIT], ids=str)
def test_wide_layers_split_over_programs(shape, tile, dtype):
    programs = -(-shape.H // tile.units) * -(-shape.B // tile.windows) * shape.K * shape.W
    room = wide.shared_bytes(tile, shape.H, 2)
    at_once = 264 if room < 115_000 else 132 if room < 232_448 else 0
    if programs > at_once:
        pytest.skip("more programs than run at once")
    found, given, grad = stepwise_results(shape, dtype, tile)
    assert apart(found, defined(shape, given, grad)) < MOST[dtype] * (3 if shape.T > 400 else 1)
    for _ in range(3):
        again, _, _ = stepwise_results(shape, dtype, tile)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_a_lane_of_a_split_layer_knows_nothing_of_the_others():
    shape = Shape("lstm", K=6, T=40, B=70, D=5, H=200)
    given = drawn(shape, torch.float16, "cuda")
    tile = tile_for(shape, torch.float16)
    assert tile is not None
    way = StepwiseOptions("lstm", False, torch.float16, use_triton=True, fast_tanh=True, tile=tile)
    first = stepwise.run_layer(way, given[0], LayerWeights(*given[1:]))
    with torch.no_grad():
        for tensor in given:
            tensor[1:] = torch.nan
    assert torch.equal(stepwise.run_layer(way, given[0], LayerWeights(*given[1:]))[0], first[0])


def test_split_layers_in_several_streams_wait_for_their_own_programs():
    """Together, they ask for more programs than the card runs at once."""
    shapes = [Shape(kind, K=1, T=200, B=256, D=4, H=256) for kind in ("lstm", "gru") * 3]
    tile = wide.TILES[0]
    wanted = [stepwise_results(shape, torch.float16, tile)[0] for shape in shapes]
    streams = [torch.cuda.Stream() for _ in shapes]
    for _ in range(10):
        found = []
        torch.cuda.synchronize()
        for shape, stream in zip(shapes, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(stepwise_results(shape, torch.float16, tile)[0])
        torch.cuda.synchronize()
        for mine, theirs in zip(found, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_split_layer_is_one_kernel_each_way(kind):
    torch.use_deterministic_algorithms(False)  # else it fills what `empty` gives
    shape = Shape(kind, K=2, T=12, B=64, D=16, H=256)
    tile = tile_for(shape, torch.float16)
    stepwise_results(shape, torch.float16, tile)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        stepwise_results(shape, torch.float16, tile)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if "ward" in event.name]
    assert sorted(names) == ["split_backward", "split_forward"]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_capture_of_a_wide_layer_gives_the_same_bits(kind):
    shape = Shape(kind, K=4, T=12, B=50, D=11, H=200, W=2)
    given = drawn(shape, torch.float16, "cuda")
    grad = torch.randn(4, 12, 50, 400, device="cuda").half()

    def step():
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        by_way = [leaf[:, way] for way in range(2) for leaf in leaves[1:]]
        with torch.autocast("cuda", torch.float16):
            out = dispatch.rnn_layer_of_lanes(kind, False, leaves[0], *by_way)
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


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("W", [1, 2])
def test_a_time_step_is_a_product_and_one_kernel(kind, W):
    def seen(T):
        """Our kernels each way, and all that are neither ours nor products."""
        shape = Shape(kind, K=4, T=T, B=64, D=16, H=256, W=W)
        torch.use_deterministic_algorithms(False)  # else it fills what `empty` gives
        stepwise_results(shape, torch.float16)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            stepwise_results(shape, torch.float16)
            torch.cuda.synchronize()
        names = [event.name for event in profiler.events()]
        ours = [sum(f"{kind}_{way}" in name for name in names) for way in ("forward", "backward")]
        return ours, sum("at::native" in name for name in names)

    (few, rest_of_few), (many, rest_of_many) = seen(4), seen(12)
    assert few == [4, 4]
    assert many == [12, 12]
    assert rest_of_many == rest_of_few > 0


@pytest.mark.parametrize("tile", [None, wide.TILES[0]])
def test_the_way_back_of_a_wide_layer_runs_once(tile):
    given = drawn(Shape("lstm", K=1, T=3, B=4, D=2, H=160), torch.float16, "cuda")
    way = StepwiseOptions("lstm", False, torch.float16, use_triton=True, fast_tanh=True, tile=tile)
    out = stepwise.run_layer(way, given[0], LayerWeights(*given[1:])).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        out.backward()


@pytest.mark.parametrize("shape", REHEARSED, ids=str)
def test_a_rehearsal_builds_what_a_step_needs_and_runs_none_of_it(shape, monkeypatch):
    built = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **told: built.append(told["repr"])
    )
    given = drawn(shape, torch.float16, "cuda")

    def step():
        with torch.autocast("cuda", torch.float16):
            out = dispatch.rnn_layer_of_lanes(
                shape.kind, False, given[0], *(weight[:, 0] for weight in given[1:])
            )
        return [out, *torch.autograd.grad(out.float().square().sum(), given)]

    with precompile(), profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    assert any("forward" in name for name in built)
    assert any("backward" in name for name in built)
    assert not any("ward" in event.name for event in profiler.events())
    built.clear()
    assert all(tensor.isfinite().all() for tensor in step())
    assert not built


@pytest.mark.parametrize("out", MOST)
@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize(
    "shape", [(1, 105, 512, 256), (16, 24, 256, 64), (3, 1, 5), (2, 777, 31), (1, 9, 2048)], ids=str
)
def test_layer_norms(shape, dtype, out):
    assert norm_error(shape, dtype, out, "cuda") < max(MOST[dtype], MOST[out])


def test_a_lanes_norm_knows_nothing_of_the_others():
    x, weight, bias = torch.randn(4, 50, 70, device="cuda"), *torch.randn(2, 4, 70, device="cuda")
    grad = torch.randn_like(x)

    def gradients(lanes):
        leaves = [t[:lanes].clone().requires_grad_() for t in (x, weight, bias)]
        out = torch.func.vmap(lambda *one: layer_norm.layer_norm(*one, 1e-5, torch.float16))(
            *leaves
        )
        return [out, *torch.autograd.grad(out, leaves, grad[:lanes].half())]

    pairs = zip(gradients(4), gradients(1), strict=True)
    assert all(torch.equal(many[:1], alone) for many, alone in pairs)


@pytest.mark.parametrize("keys", [1, 300])
def test_draws(keys):
    assert draws_agree("cuda", rows=105, batch=300, keys=keys)


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize(
    "shape",
    [*attention_shapes(10, most=Attention(4, 64, 200, 8, 64)), Attention(16, 20, 64, 4, 8)],
    ids=str,
)
def test_attention(shape, dtype):
    assert attention_error(shape, dtype, "cuda", loose=shape.B % 2 == 0) < MOST[dtype]


@pytest.mark.parametrize("shape", [Attention(2, 64, 300, 2, 64), Attention(1, 50, 70, 3, 33)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_of_the_most_that_is_taken(shape, dtype):
    assert attention_error(shape, dtype, "cuda") < MOST[dtype]


@pytest.mark.parametrize("shape", [Attention(3, 20, 50, 4, 8), Attention(2, 64, 30, 2, 32)])
def test_attention_in_tf32(shape, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert 1e-5 < attention_error(shape, torch.float32, "cuda") < MOST[torch.float16]


@pytest.mark.parametrize("dtype", MOST)
def test_attention_knows_nothing_of_other_lanes_and_windows(dtype):
    assert attention_is_the_same_alone(dtype, "cuda")


@pytest.mark.parametrize("tokens", [64, 65])
@pytest.mark.parametrize("lanes", [False, True])
def test_short_sequences_take_one_kernel_each_way(tokens, lanes):
    torch.use_deterministic_algorithms(False)  # else it fills what `empty` gives
    joined = torch.randn(2, tokens, 3, 96, device="cuda").half().requires_grad_()
    grad = torch.randn(2, tokens, 3, 32, device="cuda").half()

    def both_ways():
        if lanes:
            out = torch.func.vmap(attention, (0, None))(joined, 4)
            return torch.autograd.grad(out, joined, grad)
        leaf = joined[0].detach().requires_grad_()
        return torch.autograd.grad(attention(leaf, 4), leaf, grad[0])

    both_ways()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        both_ways()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    ours = [name for name in names if name in ("attention_forward", "attention_backward")]
    if tokens <= 64:
        assert sorted(ours) == ["attention_backward", "attention_forward"]
        assert not any("at::native" in name for name in names)  # no copies
    else:
        assert not ours


@pytest.mark.parametrize(
    ("num_trees", "num_sums", "windows"), [(300, 8, 5000), (7, 1, 3), (0, 2, 9)]
)
def test_trees_have_the_sums_of_a_cpu(num_trees, num_sums, windows):
    generator = np.random.default_rng(num_trees)
    trees = draw_trees(generator, num_trees, num_sums, 5)
    features = draw_features(generator, windows, trees)
    eye = torch.eye(num_sums)
    network = Boosting((), torch.arange(0), (0.0,) * 4, 0, 0, eye, eye[0] * 0, trees)
    wanted = network.predict_outputs(features)
    found = network.to(torch.device("cuda")).predict_outputs(features.cuda())
    assert torch.equal(found.cpu(), wanted)
