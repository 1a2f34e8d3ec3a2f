"""The CUDA kernels on a GPU, over many shapes, against the definition in float64."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from slipstream.kernels.cuda import program as programs
from slipstream.kernels.cuda import rnn
from slipstream.kernels.rnn import dispatch
from slipstream.kernels.rnn.weights import LayerWeights
from tests.kernels.layers import Shape, apart, defined, drawn

pytestmark = pytest.mark.gpu

MOST = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def poisoned():
    """What `empty` gives is NaN: nothing may stay unwritten."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw_shapes(count, seed=0):
    """Lengths 1 to 500, batches 1 to 2000, lanes 1 to 64; not all large at once."""
    draw = random.Random(seed)
    for number in range(count):
        T = draw.choice([1, 2, 3, 17, 50, 105, 500])
        B = draw.choice([1, 5, 33, 200, 512, 2000] if T < 100 else [1, 7, 40, 256])
        K = draw.choice([1, 1, 2, 5, 64] if T * B < 4000 else [1, 2])
        yield Shape(
            ("lstm", "gru")[number % 2],
            K=K,
            T=T,
            B=B,
            D=draw.choice([1, 4, 14, 15, 32, 64, 130]),
            H=draw.choice([1, 13, 16, 32, 48, 64, 80, 96, 100, 112, 128]),
            W=draw.choice([1, 2]),
            last=draw.random() < 0.5,
            states=T < 20 and draw.random() < 0.5,  # later on, half precision forgets them
        )


LARGE = [
    Shape("lstm", K=1, T=400, B=200, D=5, H=128, last=True),
    Shape("lstm", K=1, T=105, B=512, D=11, H=128, W=2),
    Shape("lstm", K=16, T=60, B=200, D=4, H=128),
    Shape("gru", K=16, T=50, B=256, D=4, H=128, W=2),
]


def choose(shape, given, dtype):
    weights = LayerWeights(*given[1:5])
    states = shape.states
    return rnn.choose_options(shape.kind, shape.last, given[0], weights, dtype, states=states)


def run(given, options):
    """The output and all gradients, and the gradient that they are of."""
    states = [*given[5:], None, None][:2]
    out = rnn.run_layer(options, given[0], LayerWeights(*given[1:5]), *states)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grad = grad.to(options.shape.dtype).to("cuda", out.dtype)
    return [out, *torch.autograd.grad(out, given, grad)], grad


def measure_error(shape, dtype, **changes):
    given = drawn(shape, dtype, "cuda")
    options = choose(shape, given, dtype)._replace(**changes)
    found, grad = run(given, options)
    again, _ = run(given, options)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    return apart(found, defined(shape, given, grad))


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("shape", [*draw_shapes(40), *LARGE], ids=str)
def test_values_and_gradients(shape, dtype):
    assert measure_error(shape, dtype) < MOST[dtype] * (3 if shape.T >= 400 else 1)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("H", [13, 48, 128])
@pytest.mark.parametrize("D", [5, 40])
@pytest.mark.parametrize(("last", "states"), [(False, True), (True, False)])
def test_under_the_sanitizer(kind, H, D, last, states):
    """Few steps, and nothing of cuBLAS, in which racecheck finds hazards: `make test-gpu-sanitizer`
    runs these."""
    shape = Shape(kind, K=2, T=9, B=21, D=D, H=H, W=2, last=last, states=states)
    given = drawn(shape, torch.float16, "cuda")
    found, grad = run(given, choose(shape, given, torch.float16))
    on_cpu = [tensor.detach().cpu().requires_grad_() for tensor in given]
    wanted = defined(shape, on_cpu, grad.cpu())
    assert apart([tensor.cpu() for tensor in found], wanted) < MOST[torch.float16]


@pytest.mark.parametrize("windows", rnn.WINDOWS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("D", [5, 64, 130])
@pytest.mark.parametrize("H", [48, 128])
def test_each_tile(kind, D, H, windows):
    shape = Shape(kind, K=3, T=33, B=45, D=D, H=H, W=2)
    given = drawn(shape, torch.float16, "cuda")
    made, gpu = choose(shape, given, torch.float16).shape, rnn.get_limits(given[0].device)
    tiles = {
        name: rnn._fit_tile(made, windows, gpu, is_backward=name == "backward")
        for name in ("forward", "backward")
    }
    launches = {
        name: (rnn.Launch(tile, 0, -(-shape.B // windows)),)
        for name, tile in tiles.items()
        if tile is not None
    }
    assert measure_error(shape, torch.float16, **launches) < MOST[torch.float16]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(("D", "states"), [(5, False), (64, True)])
def test_the_code_for_turing(kind, D, states, monkeypatch):
    """Its PTX, which the driver compiles for the GPU that is there."""
    shape = Shape(kind, K=2, T=19, B=21, D=D, H=128, W=2, states=states)
    given = drawn(shape, torch.float16, "cuda")
    turing = rnn.GpuLimits(75, 40, 65_536)
    monkeypatch.setattr(rnn, "get_limits", lambda _: turing)
    monkeypatch.setattr(programs, "get_architecture", lambda _: 75)
    found = programs.get_program

    def get_ptx(path, macros, device):
        program = found(path, macros, device)
        source = replace(program.source, as_ptx=True)
        return ptx.setdefault(source, programs.Program(source, program.device))

    ptx: dict = {}
    monkeypatch.setattr(programs, "get_program", get_ptx)
    options = choose(shape, given, torch.float16)
    assert not any(launch.tile.bulk for launch in options.backward)
    result, grad = run(given, options)
    assert apart(result, defined(shape, given, grad)) < MOST[torch.float16]
    assert len(ptx) == 1 + len({*options.forward}) + len({*options.backward})


def test_a_capture_gives_the_same_bits():
    shape = Shape("lstm", K=4, T=30, B=50, D=5, H=64, W=2)
    given = drawn(shape, torch.float16, "cuda")
    options = choose(shape, given, torch.float16)
    grad = torch.randn(4, 30, 50, 128, device="cuda").half()

    def step():
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        out = rnn.run_layer(options, leaves[0], LayerWeights(*leaves[1:]))
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


def test_a_lane_depends_on_no_other():
    shape = Shape("gru", K=6, T=40, B=70, D=5, H=100, last=True)
    given = drawn(shape, torch.float16, "cuda")
    options = choose(shape, given, torch.float16)
    first = rnn.run_layer(options, given[0], LayerWeights(*given[1:]))
    with torch.no_grad():
        for tensor in given:
            tensor[1:] = torch.nan
    assert torch.equal(rnn.run_layer(options, given[0], LayerWeights(*given[1:]))[0], first[0])


@pytest.mark.parametrize("windows", rnn.WINDOWS)
def test_a_window_that_is_not_a_number_spoils_no_other(windows):
    shape = Shape("lstm", K=1, T=40, B=23, D=5, H=128, W=2)
    given = drawn(shape, torch.float16, "cuda")
    options = choose(shape, given, torch.float16)
    gpu = rnn.get_limits(given[0].device)
    tile = rnn._fit_tile(options.shape, windows, gpu, is_backward=False)
    options = options._replace(forward=(rnn.Launch(tile, 0, -(-23 // windows)),))
    before = rnn.run_layer(options, given[0], LayerWeights(*given[1:])).detach()
    spoiled = given[0].detach().clone()
    spoiled[0, 20, 5, 0] = torch.nan
    after = rnn.run_layer(options, spoiled, LayerWeights(*given[1:])).detach()
    others = [window for window in range(23) if window != 5]
    assert torch.equal(after[:, :, others], before[:, :, others])
    assert after[0, 20:, 5, :128].isnan().all()
    assert after[0, :21, 5, 128:].isnan().all()
    assert after[0, :20, 5, :128].isfinite().all()


def test_programs_load_in_several_threads():
    device = torch.device("cuda", torch.cuda.current_device())
    shape = rnn.LayerShape("lstm", 32, 1, 5, False, False, torch.float16)
    tiles = [rnn.Tile(4, ahead, False, 2048) for ahead in (2, 3, 4)]

    def load(tile):
        macros = shape.list_macros("rnn_forward", save=True) | tile.list_macros(shape)
        programs.get_program(rnn.SOURCE, macros, device).load()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(load, tiles * 3))


def test_layers_run_on_cuda_kernels():
    """What dispatch chooses, and that a code that does not compile leaves the layer to others."""
    given = drawn(Shape("lstm", K=2, T=5, B=8, D=3, H=32), torch.float16, "cuda")
    weights = [weight[:, 0] for weight in given[1:]]
    with torch.autocast("cuda", torch.float16):
        last = dispatch.rnn_layer_of_lanes("lstm", True, given[0], *weights)
    assert last.dtype == torch.float32  # the others return half precision


def test_code_that_does_not_compile_leaves_the_layer_to_others(monkeypatch, tmp_path):
    given = drawn(Shape("lstm", K=2, T=5, B=8, D=3, H=32), torch.float16, "cuda")
    weights = [weight[:, 0] for weight in given[1:]]
    broken = tmp_path / "rnn.cu"
    broken.write_text("no C++")
    monkeypatch.setattr(rnn, "SOURCE", broken)
    monkeypatch.setattr(rnn, "_failures", {})
    with torch.autocast("cuda", torch.float16):
        last = dispatch.rnn_layer_of_lanes("lstm", True, given[0], *weights)
    assert last.dtype == torch.float16
    assert "does not compile" in rnn.explain_unusable(given[0].device)
