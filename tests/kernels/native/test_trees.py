"""The trees in C reach the leaves that PyTorch's products reach, to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels import find_compiler
from slipstream.kernels.native import library, trees
from slipstream.models.boosting import Boosting
from slipstream.scoring.trees import TreeTask, fit_trees
from tests.kernels.trees import draw_features, draw_trees


@pytest.fixture(scope="module", autouse=True)
def compiled(native_folder):
    """The library, compiled once for all tests."""
    if find_compiler() is None:
        pytest.skip("there is no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(native_folder))
        library.find_library.cache_clear()
        assert library.build_library("trees")
        yield
    library.find_library.cache_clear()


def predict_by_products(features, found, monkeypatch):
    eye = torch.eye(len(found["level"]))
    network = Boosting((), torch.arange(0), (0.0,) * 4, 0, 0, eye, eye[0] * 0, found)
    with monkeypatch.context() as patch:
        patch.setattr(trees, "is_supported", lambda *_: False)
        return network.predict_outputs(features)


@given(
    seed=st.integers(0, 10_000),
    num_trees=st.sampled_from([0, 1, 5, 40]),
    num_sums=st.sampled_from([1, 3]),
    windows=st.sampled_from([0, 1, 63, 64, 65, 300]),
)
@settings(max_examples=40, deadline=None)
def test_leaves_are_those_of_the_products(seed, num_trees, num_sums, windows):
    generator = np.random.default_rng(seed)
    found = draw_trees(generator, num_trees, num_sums, 5)
    features = draw_features(generator, windows, found)
    with pytest.MonkeyPatch.context() as patch:
        wanted = predict_by_products(features, found, patch)
    assert torch.equal(trees.add_leaves(features, found, found["level"]), wanted)


def test_threads_change_no_bit(monkeypatch):
    found = draw_trees(np.random.default_rng(1), 300, 2, 4)
    features = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(trees, "THREADED", 0)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(trees.add_leaves(features, found, found["level"]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_fitted_trees_of_a_baseline(monkeypatch):
    generator = np.random.default_rng(2)
    x = generator.standard_normal((400, 3)).astype(np.float32)
    y = (x[:, :1] * x[:, 1:2] + x[:, 2:]).astype(np.float32)
    found = fit_trees(TreeTask(x, y, x[:100], y[:100], 0, 30, 0.1), 1)
    tensors = {name: torch.from_numpy(values) for name, values in found.items()}
    features = torch.from_numpy(x)
    wanted = predict_by_products(features, tensors, monkeypatch)
    assert torch.equal(trees.add_leaves(features, tensors, tensors["level"]), wanted)


def test_few_windows_do_not_compile_the_library(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    library.find_library.cache_clear()
    found = draw_trees(np.random.default_rng(3), 300, 1, 4)
    assert not trees.is_supported(torch.zeros(10, 4), found)
    assert not library.get_path("trees").exists()
    assert trees.is_supported(torch.zeros(1000, 4), found)
    assert library.get_path("trees").exists()
    library.find_library.cache_clear()


def test_a_compiler_that_fails_is_not_called_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    library.find_library.cache_clear()
    calls = tmp_path / "calls"
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho >> {calls}\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = draw_trees(np.random.default_rng(4), 300, 1, 4)
    for _ in range(3):
        assert not trees.is_supported(torch.zeros(1000, 4), found)
    assert len(calls.read_text().splitlines()) == 2  # for this processor, then for any
    library.find_library.cache_clear()
