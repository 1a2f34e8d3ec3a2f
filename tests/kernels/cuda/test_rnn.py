"""The CUDA kernels of recurrent layers, run on the CPU by `emulator.h`, against the definition in
float64; and their compiled code, for GPUs that are not here."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch

from slipstream.kernels.cuda import program as programs
from slipstream.kernels.cuda import rnn
from slipstream.kernels.rnn.weights import LayerWeights
from tests.kernels.cuda.emulation import HOPPER, emulate, needs_compiler
from tests.kernels.layers import Shape, apart, defined, drawn

AMPERE = rnn.GpuLimits(80, 108, 166_912)
ADA = rnn.GpuLimits(89, 128, 101_376)
TURING = rnn.GpuLimits(75, 40, 65_536)
GPUS = {"T4": TURING, "A100": AMPERE, "RTX 4090": ADA, "H200": HOPPER}
MOST = {torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def poisoned():
    """What `empty` gives is NaN: nothing may stay unwritten."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def choose(shape, given, dtype, limits, forward=None, backward=None):
    """The options of a layer, with so many windows to a block of each pass, or fewer if they do not
    fit; of a pair, one block has the first number and the others the second."""
    weights = LayerWeights(*given[1:5])
    states = shape.states
    options = rnn.choose_options(shape.kind, shape.last, given[0], weights, dtype, states=states)
    for name, windows in (("forward", forward), ("backward", backward)):
        if windows:
            pair = windows if isinstance(windows, tuple) else (windows,)
            tiles = [fit(options.shape, n, limits, is_backward=name == "backward") for n in pair]
            launches = divide(given[0].shape[2], *tiles)
            options = options._replace(**{name: launches})
    return options


def fit(shape, windows, limits, *, is_backward):
    tiles = (
        rnn._fit_tile(shape, fewer, limits, is_backward=is_backward)
        for fewer in (windows, windows // 2, 4)
    )
    return next(filter(None, tiles))


def divide(num_windows, tile, other=None):
    """One launch, or a first block and a second launch."""
    if other is None or num_windows <= tile.windows:
        return (rnn.Launch(tile, 0, -(-num_windows // tile.windows)),)
    rest = num_windows - tile.windows
    return (
        rnn.Launch(tile, 0, 1),
        rnn.Launch(other, tile.windows, -(-rest // other.windows)),
    )


def run(shape, dtype=torch.float16, limits=HOPPER, *, tiles=(None, None), **macros):
    """The output and all gradients, and the inputs and the gradient that they are of."""
    given = drawn(shape, dtype)
    with emulate(limits, **macros):
        options = choose(shape, given, dtype, limits, *tiles)
        states = [*given[5:], None, None][:2]
        out = rnn.run_layer(options, given[0], LayerWeights(*given[1:5]), *states)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        grad = grad.to(dtype).to(out.dtype)
        return [out, *torch.autograd.grad(out, given, grad)], given, grad


def measure_error(shape, dtype=torch.float16, limits=HOPPER, **options):
    found, given, grad = run(shape, dtype, limits, **options)
    return apart(found, defined(shape, given, grad))


CASES = {
    "inputs in the recurrence": (Shape("lstm", K=1, T=5, B=3, D=4, H=32), (4, 4)),
    "bulk copies": (Shape("lstm", K=2, T=6, B=9, D=3, H=16, W=2), (8, 8)),
    "products of x": (Shape("gru", K=1, T=6, B=5, D=70, H=48), (4, 4)),
    "two blocks of inputs": (Shape("lstm", K=1, T=6, B=5, D=32, H=32, W=2), (8, 4)),
    "states": (Shape("gru", K=2, T=3, B=17, D=3, H=20, W=2, states=True), (16, 16)),
    "two launches": (
        Shape("lstm", K=2, T=3, B=13, D=3, H=20, W=2, states=True),
        ((8, 4), (8, 4)),
    ),
    "two launches, products of x": (
        Shape("gru", K=1, T=5, B=19, D=70, H=16, W=2, last=True),
        ((16, 4), (4, 8)),
    ),
    "the last output": (Shape("lstm", K=1, T=2, B=6, D=70, H=32, last=True, states=True), (8, 4)),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    shape, tiles = CASES[name]
    assert measure_error(shape, tiles=tiles) < MOST[torch.float16]


def draw_shapes(count, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        H = draw.choice([1, 16, 24, 32, 48, 64, 80, 96, 112, 128])
        windows = tuple(draw.choice(rnn.WINDOWS) for _ in range(2))
        yield (
            Shape(
                draw.choice(["lstm", "gru"]),
                K=draw.choice([1, 2]),
                T=draw.choice([1, 2, 3, 7]),
                B=draw.choice([1, 4, 7, 17]),
                D=draw.choice([1, 14, 16, 33, 62, 80]),
                H=H,
                W=draw.choice([1, 2]),
                last=draw.random() < 0.4,
                states=draw.random() < 0.4,
            ),
            windows,
            draw.choice([torch.float16, torch.bfloat16]),
            draw.choice(["T4", "A100", "RTX 4090", "H200", "H200"]),
        )


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "tiles", "dtype", "gpu"), [*draw_shapes(24)], ids=str)
def test_drawn_shapes(shape, tiles, dtype, gpu):
    limits = GPUS[gpu]
    dtype = torch.float16 if gpu == "T4" else dtype
    assert measure_error(shape, dtype, limits, tiles=tiles) < MOST[dtype]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("windows", rnn.WINDOWS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_copies_may_arrive_early(kind, windows):
    """Memory that is copied to is not read any more."""
    shape = Shape(kind, K=1, T=9, B=5, D=20, H=32)
    found = measure_error(shape, limits=ADA, tiles=(windows, windows), EARLY_COPIES=1)
    assert found < MOST[torch.float16]


@needs_compiler
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_window_that_is_not_a_number_spoils_no_other(kind):
    shape = Shape(kind, K=1, T=4, B=6, D=3, H=16)
    given = drawn(shape, torch.float16)
    with emulate():
        options = choose(shape, given, torch.float16, HOPPER, 4, 4)
        before = rnn.run_layer(options, given[0], LayerWeights(*given[1:5])).detach()
        spoiled = given[0].detach().clone()
        spoiled[0, 2, 1, 0] = torch.nan
        after = rnn.run_layer(options, spoiled, LayerWeights(*given[1:5])).detach()
    others = [0, 2, 3, 4, 5]
    assert torch.equal(after[:, :, others], before[:, :, others])
    assert torch.equal(after[:, :2, 1], before[:, :2, 1])
    assert after[:, 2:, 1].isnan().all()


@needs_compiler
def test_a_lane_depends_on_no_other():
    shape = Shape("lstm", K=3, T=4, B=6, D=3, H=16, last=True)
    given = drawn(shape, torch.float16)
    with emulate():
        options = choose(shape, given, torch.float16, HOPPER)
        first = rnn.run_layer(options, given[0], LayerWeights(*given[1:5])).detach()
        with torch.no_grad():
            for tensor in given:
                tensor[1:] = torch.nan
        again = rnn.run_layer(options, given[0], LayerWeights(*given[1:5])).detach()
    assert torch.equal(again[0], first[0])


@needs_compiler
def test_two_halves_give_what_the_whole_gives():
    shape = Shape("lstm", K=1, T=6, B=5, D=3, H=16)
    given = drawn(shape, torch.float16)
    x, weights = given[0].detach(), LayerWeights(*(tensor.detach() for tensor in given[1:5]))
    with emulate():
        whole = rnn.run_layer(choose(shape, given, torch.float16, HOPPER), x, weights)
        options = choose(shape._replace(states=True), given, torch.float16, HOPPER)
        h = c = torch.zeros(1, 1, 5, 16)
        halves = []
        for part in x.split(3, dim=1):
            out, h, c = rnn.continue_layer(options, part, weights, h, c)
            halves.append(out)
    # the cell goes on in full precision, the output as it was rounded
    assert torch.equal(torch.cat(halves, dim=1), whole)


@needs_compiler
def test_the_backward_pass_runs_once():
    shape = Shape("lstm", K=1, T=2, B=2, D=2, H=16)
    given = drawn(shape, torch.float16)
    with emulate():
        options = choose(shape, given, torch.float16, HOPPER)
        out = rnn.run_layer(options, given[0], LayerWeights(*given[1:5])).sum()
        out.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="runs once"):
            out.backward()


def choose_division(lanes, batch, *, is_backward, num_steps=100):
    """The windows of a block and the blocks of each launch."""
    shape = rnn.LayerShape("lstm", 128, 1, 5, False, False, torch.float16)
    sizes = lanes, batch, num_steps
    launches = rnn.choose_launches(shape, *sizes, HOPPER, is_backward=is_backward)
    return [(launch.tile.windows, launch.blocks) for launch in launches]


def test_a_block_has_more_windows_where_not_all_blocks_run_at_once():
    assert choose_division(1, 256, is_backward=False) == [(4, 64)]
    assert choose_division(1, 256, is_backward=True) == [(4, 64)]
    assert choose_division(2, 512, is_backward=False) == [(8, 64)]
    assert choose_division(16, 256, is_backward=False) == [(16, 16)]
    assert choose_division(16, 256, is_backward=True) == [(8, 32)]


def test_a_last_round_of_few_blocks_becomes_a_launch_with_a_smaller_tile():
    assert choose_division(16, 200, is_backward=True) == [(8, 24), (4, 2)]
    assert choose_division(16, 200, is_backward=True, num_steps=4) == [(8, 25)]


@pytest.mark.parametrize("is_backward", [True, False])
def test_launches_cover_every_window_once(is_backward):
    shape = rnn.LayerShape("gru", 64, 2, 5, False, False, torch.float16)
    for recurrences, batch in itertools.product((1, 16, 31, 400), (1, 8, 25, 200, 1031)):
        sizes = recurrences, batch, 100
        launches = rnn.choose_launches(shape, *sizes, HOPPER, is_backward=is_backward)
        ends = [launch.begin + launch.blocks * launch.tile.windows for launch in launches]
        assert [launch.begin for launch in launches] == [0, *ends[:-1]]
        assert ends[-1] - launches[-1].tile.windows < batch <= ends[-1]
        assert all(launch.blocks for launch in launches)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("units", range(16, 129, 16))
def test_every_layer_fits_every_gpu(gpu, units):
    limits = GPUS[gpu]
    for D, is_backward, last in itertools.product((1, 40, 200), (True, False), (True, False)):
        shape = rnn.LayerShape("lstm", units, 2, D, last, False, torch.float16)
        launches = rnn.choose_launches(shape, 64, 2000, 100, limits, is_backward=is_backward)
        assert launches
        assert all(launch.tile.shared <= limits.room for launch in launches)


needs_nvrtc = pytest.mark.skipif(
    programs.find_compiler() is None, reason="NVRTC (nvidia-cuda-nvrtc) is not installed"
)
SPILLED = {
    ("lstm", 75): 80,
    ("lstm", 80): 32,
    ("lstm", 86): 32,
    ("lstm", 89): 32,
    ("lstm", 90): 52,
    ("lstm", 120): 320,
    ("gru", 90): 20,
    ("gru", 120): 68,
}
"""Bytes of a thread's registers that go to memory in the backward pass of 16 windows, by NVRTC
13.0.88; none do anywhere else"""


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("windows", rnn.WINDOWS)
@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 120])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_kernels_compile_for(kind, architecture, windows):
    shape = rnn.LayerShape(kind, 128, 2, 5, False, True, torch.float16)
    tile = rnn.Tile(windows, 4, architecture >= rnn.HOPPER and windows > 4, 0)
    for kernel in rnn.KERNELS:
        macros = shape.list_macros(kernel, save=True)
        macros |= {} if kernel == "pack_layer" else tile.list_macros(shape)
        source = programs.Source(rnn.SOURCE, tuple(macros.items()), architecture)
        _, log = programs.compile_source(source, ["--ptxas-options=-v"])
        assert re.findall(r"'(\w+)' for", log) == [kernel]
        registers = int(re.search(r"Used (\d+) registers", log)[1])
        spilled = int(re.search(r"(\d+) bytes spill stores", log)[1])
        assert registers * shape.threads <= 65_536
        known = SPILLED.get((kind, architecture), 0) if windows == 16 else 0
        assert spilled <= (known if kernel == "rnn_backward" else 0), kernel
