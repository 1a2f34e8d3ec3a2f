"""The layers in C against the definition in float64, and their equalities to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream.kernels import (
    build_library,
    continue_rnn_layer,
    find_compiler,
    find_library,
    rnn_layer,
)
from slipstream.kernels.native import library, rnn
from slipstream.kernels.rnn.weights import LayerWeights
from tests.kernels.layers import Shape, apart, defined, drawn

pytestmark = pytest.mark.usefixtures("native_kernels")


def run_both_passes(shape: Shape, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = rnn.run_layer(shape.kind, shape.last, tensors[0], LayerWeights(*tensors[1:]))
    return [out, *torch.autograd.grad(out, tensors, grad)]


def draw_grad(shape: Shape) -> Tensor:
    torch.manual_seed(1)
    time = () if shape.last else (shape.T,)
    return torch.randn(shape.K, *time, shape.B, shape.W * shape.H)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("K", "T", "B", "D", "H", "W"),
    [
        (1, 1, 1, 1, 1, 1),
        (1, 5, 7, 3, 16, 1),
        (2, 4, 33, 10, 30, 2),
        (3, 6, 50, 65, 9, 1),
        (1, 12, 97, 2, 64, 2),
    ],
)
def test_a_layer_and_its_gradients_are_those_of_the_definition(
    kind: str, last: bool, K: int, T: int, B: int, D: int, H: int, W: int
) -> None:
    shape = Shape(kind, K, T, B, D, H, W, last)
    tensors, grad = drawn(shape, torch.float32), draw_grad(shape)
    mine = run_both_passes(shape, tensors, grad)
    assert apart(mine, defined(shape, tensors, grad)) < 2e-6


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["lstm", "gru"]),
    sizes=st.tuples(*(st.integers(1, most) for most in (3, 5, 60, 20, 40, 2))),
    last=st.booleans(),
)
def test_any_shape_is_right(kind: str, sizes: tuple[int, ...], last: bool) -> None:
    shape = Shape(kind, *sizes, last)  # type: ignore[arg-type]
    tensors, grad = drawn(shape, torch.float32), draw_grad(shape)
    mine = run_both_passes(shape, tensors, grad)
    few = shape.H < 4  # whose gradients may cancel to almost nothing
    assert apart(mine, defined(shape, tensors, grad)) < (1e-3 if few else 1e-5)


@settings(max_examples=30)
@given(
    kind=st.sampled_from(["lstm", "gru"]),
    sizes=st.tuples(*(st.integers(1, most) for most in (5, 60, 20, 40))),
)
def test_a_layer_goes_on_from_any_state(kind: str, sizes: tuple[int, ...]) -> None:
    """As torch's own in float64: outputs, the state after them, and all gradients but the first
    state's, which there is none of."""
    T, B, D, H = sizes
    torch.manual_seed(T + B + D + H)
    layer: nn.RNNBase = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](D, H)
    x, grad = torch.randn(T, B, D, requires_grad=True), torch.randn(T, B, H)
    before = torch.randn(2 if kind == "lstm" else 1, B, H)
    inputs = [x, *layer.parameters()]
    out, after = continue_rnn_layer(kind, x, before, layer.all_weights[0])
    mine = [after, out, *torch.autograd.grad(out, inputs, grad)]
    layer, x, before = layer.double(), x.detach().double().requires_grad_(), before.double()
    inputs = [x, *layer.parameters()]
    out, last = layer(x, (before[:1], before[1:]) if kind == "lstm" else before)
    after = torch.cat(last) if kind == "lstm" else last
    gradients = torch.autograd.grad(out, inputs, grad.double())
    wanted = [after.detach(), out.detach(), *gradients]
    assert apart(mine, wanted) < (1e-3 if H < 4 else 1e-5)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_without_gradients_nothing_is_kept_for_a_backward_pass(kind, monkeypatch):
    """Writing it would take longer than the forward pass itself."""
    shape, kept, describe = Shape(kind, 2, 9, 70, 5, 20, 2), [], rnn._describe

    def watch(is_lstm, x, weights, y, saved):
        kept.append(saved is not None)
        return describe(is_lstm, x, weights, y, saved)

    monkeypatch.setattr(rnn, "_describe", watch)
    x, *weights = (tensor.requires_grad_() for tensor in drawn(shape, torch.float32))
    with_grad = rnn.run_layer(kind, False, x, weights)
    with torch.no_grad():
        without = rnn.run_layer(kind, False, x, weights)
    with torch.inference_mode():
        in_inference = rnn.run_layer(kind, False, x, weights)
    assert kept == [True, False, False]
    assert with_grad.equal(without)
    assert with_grad.equal(in_inference)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_results_do_not_depend_on_the_threads_or_on_other_lanes(kind: str) -> None:
    shape = Shape(kind, 3, 6, 70, 5, 20, 2)
    tensors, grad = drawn(shape, torch.float32), draw_grad(shape)
    together = run_both_passes(shape, tensors, grad)
    try:
        torch.set_num_threads(4)
        threaded = run_both_passes(shape, tensors, grad)
    finally:
        torch.set_num_threads(1)
    alone = [tensor.detach()[1:2].requires_grad_() for tensor in tensors]
    lane = run_both_passes(shape._replace(K=1), alone, grad[1:2])
    for a, b, c in zip(together, threaded, lane, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1:2], c)


def test_lanes_in_threads_of_their_own_give_the_same() -> None:
    shape = Shape("lstm", 1, 6, 40, 5, 20)
    tensors, grad = drawn(shape, torch.float32), draw_grad(shape)
    alone = run_both_passes(shape, tensors, grad)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run_both_passes(shape, tensors, grad), range(8)))
    assert all(torch.equal(a, b) for one in results for a, b in zip(alone, one, strict=True))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("both", [False, True])
def test_several_layers_are_those_of_torch(kind: str, both: bool) -> None:
    torch.manual_seed(0)
    theirs = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](6, 24, 3, bidirectional=both)
    x, directions = torch.randn(15, 40, 6), 2 if both else 1
    wanted, _ = theirs(x)
    found = x
    for layer in range(3):
        each = theirs.all_weights[layer * directions : (layer + 1) * directions]
        found = rnn_layer(kind, found, [weight for one in each for weight in one])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(wanted)
    mine, others = (torch.autograd.grad(y, theirs.parameters(), grad) for y in (found, wanted))
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_lanes_of_a_vmap_take_one_call() -> None:
    shape = Shape("gru", 3, 5, 12, 4, 10)
    x, *weights = drawn(shape, torch.float32)
    by_lane = [weight[:, 0] for weight in weights]
    together = torch.func.vmap(lambda x, *w: rnn_layer("gru", x, w))(x, *by_lane)
    for lane in range(3):
        alone = rnn_layer("gru", x[lane], [weight[lane] for weight in by_lane])
        assert torch.equal(together[lane], alone)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_number_that_is_none_does_not_vanish(kind: str) -> None:
    shape = Shape(kind, 1, 4, 9, 2, 8)
    tensors = drawn(shape, torch.float32)
    with torch.no_grad():
        tensors[0][0, 1, 3, 0] = torch.nan
    out = rnn.run_layer(kind, False, tensors[0], LayerWeights(*tensors[1:]))
    assert out[0, 1:, 3].isnan().all()
    assert out[0, :, :3].isfinite().all()


def test_huge_inputs_saturate() -> None:
    shape = Shape("lstm", 1, 3, 5, 2, 8)
    tensors = drawn(shape, torch.float32)
    with torch.no_grad():
        tensors[0] *= 1e30
    out = rnn.run_layer("lstm", False, tensors[0], LayerWeights(*tensors[1:]))
    assert out.isfinite().all()


def test_a_second_backward_pass_is_refused() -> None:
    shape = Shape("lstm", 1, 3, 5, 2, 8)
    tensors = drawn(shape, torch.float32)
    out = rnn.run_layer("lstm", False, tensors[0], LayerWeights(*tensors[1:])).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        out.backward()


def test_other_numbers_than_fp32_are_left_to_torch() -> None:
    x = torch.zeros(1, 2, 3, 4)
    assert rnn.is_supported(x, torch.float32)
    assert not rnn.is_supported(x.double(), torch.float64)
    assert not rnn.is_supported(x, torch.bfloat16)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which no library has been compiled."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    library.find_library.cache_clear()
    yield tmp_path
    library.find_library.cache_clear()


def test_without_a_library_torch_computes_the_layer(request: pytest.FixtureRequest) -> None:
    shape = Shape("gru", 1, 3, 5, 2, 8)
    x, *weights = drawn(shape, torch.float32)
    by_lane = [weight[0, 0] for weight in weights]
    mine = rnn_layer("gru", x[0], by_lane)
    request.getfixturevalue("empty_cache")
    assert not rnn.is_supported(x, torch.float32)
    torch.testing.assert_close(rnn_layer("gru", x[0], by_lane), mine)


def test_a_library_is_compiled_once() -> None:
    path = library.get_path()
    before = path.stat().st_mtime_ns
    assert build_library()
    assert path.stat().st_mtime_ns == before
    assert find_library() is not None


def test_a_compiler_that_fails_leaves_nothing(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    assert find_compiler() == "/bin/false"
    assert not build_library()
    assert not list((empty_cache / "slipstream" / "native").iterdir())


COPIES = """#!/bin/sh
{before}
while [ "$1" != -o ]; do shift; done
cp {built} "$2"
"""
"""A compiler that takes no time; the last thing it is told is the file to write"""


def make_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, built: Path, before: str) -> None:
    compiler = folder / "compiler"
    compiler.write_text(COPIES.format(before=before, built=built))
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))


def test_a_library_that_another_machine_has_compiled_meanwhile_is_not_replaced(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = library.get_path()
    folder = request.getfixturevalue("empty_cache")
    path, seen = library.get_path(), folder / "inode"
    make_compiler(folder, monkeypatch, built, f"cp {built} {path}; ls -i {path} > {seen}")
    assert build_library()
    assert path.stat().st_ino == int(seen.read_text().split()[0])
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_library_is_replaced(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = library.get_path()
    folder = request.getfixturevalue("empty_cache")
    path = library.get_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x7fELF")
    make_compiler(folder, monkeypatch, built, "")
    assert build_library()
    assert path.read_bytes() == built.read_bytes()
