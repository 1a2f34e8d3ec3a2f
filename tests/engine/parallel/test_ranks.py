from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.engine.batches import BatchShare, EpochSampler
from slipstream.kernels import find_compiler
from slipstream.models import noise as rng
from slipstream.models.noise import Noise
from tests.conftest import HUNG_S, close
from tests.engine.parallel import cases

TESTS = Path(__file__).parents[3]


def weigh_windows(rows: torch.Tensor, weights: torch.Tensor) -> dict[int, float]:
    pairs = zip(rows.flatten().tolist(), weights.flatten().tolist(), strict=True)
    return {row: weight for row, weight in pairs if weight}


@pytest.mark.parametrize(("batch", "size", "own"), [(8, 2, 4), (7, 3, 3), (5, 4, 2), (8, 2, 3)])
def test_the_shares_of_all_processes_are_the_batch(batch, size, own):
    starts = torch.arange(100, 130)
    whole = EpochSampler(starts, 2 * batch, batch, 3)
    rows, weights = whole.sample_epoch(1)
    wanted = weigh_windows(rows, weights)
    together: dict[int, float] = {}
    for rank in range(size):
        sampler = EpochSampler(starts, 2 * batch, own, 3, BatchShare(rank, size, batch))
        rows, weights = sampler.sample_epoch(1)
        assert rows.shape == (whole.num_steps, sampler.num_passes, own)
        mine = weigh_windows(rows, weights)
        assert not together.keys() & mine.keys()
        together |= mine
    assert together == wanted


def test_a_pass_of_a_share_knows_its_place_in_the_batch():
    starts, batch, own = torch.arange(64), 16, 3
    rows = EpochSampler(starts, 32, batch, 0).sample_epoch(0)[0]
    for rank in range(2):
        share = BatchShare(rank, 2, batch)
        mine, weights = EpochSampler(starts, 32, own, 0, share).sample_epoch(0)
        for number in range(mine.shape[1]):
            whole, first = share.locate(number, own)
            real = int((weights[0, number] > 0).sum())
            assert torch.equal(mine[0, number, :real], rows[0, whole, first : first + real])


def test_a_share_draws_what_the_batch_draws_at_its_place():
    noise = Noise(torch.tensor(7), torch.tensor(0.3)).for_pass(torch.tensor(5), 1)
    x = torch.ones(6, 10, 4)
    whole, part = rng.dropout(x, noise, 2), rng.dropout(x[:, 4:], noise.skip(4), 2)
    assert torch.equal(whole[:, 4:], part)
    drawn = rng.draw_normal(noise.key, 3, 5, 10)
    assert torch.equal(drawn[:, 4:], rng.draw_normal(noise.skip(4).key, 3, 5, 6))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, trained by two processes; a folder per case, in it one per process."""
    out = tmp_path_factory.mktemp("together")
    command = [sys.executable, "-m", cases.__name__]
    arguments = [["2", str(out / "store"), str(out)]] * 2
    processes = [
        subprocess.Popen([*command, str(rank), *rest], cwd=TESTS)
        for rank, rest in enumerate(arguments)
    ]
    assert [process.wait(HUNG_S) for process in processes] == [0, 0]
    return out


def read_log(folder: Path) -> list[tuple[str, int]]:
    return [(kind, step) for kind, step, _ in json.loads((folder / "log.json").read_text())]


def read_numbers(folder: Path) -> list[float]:
    return [one for *_, some in json.loads((folder / "log.json").read_text()) for one in some]


def flatten(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return all weights but the bias of attention's keys: softmax cancels it, so that its gradient
    is rounding alone, which Adam divides by its size."""
    for key in [key for key in weights if key.endswith("in_proj_bias")]:
        query, _, value = weights[key].chunk(3)
        weights[key] = torch.cat([query, value])
    return torch.cat([weights[key].flatten() for key in sorted(weights)])


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_two_processes_train_what_one_trains(together, tmp_path, name):
    if name == "own kernels" and find_compiler() is None:
        pytest.skip("there is no C compiler")
    cases.train(name, tmp_path, None)
    first, second = together / name / "0", together / name / "1"
    assert read_log(first) == read_log(tmp_path)
    assert not read_log(second)  # only the first one writes
    close(read_numbers(first), read_numbers(tmp_path), rel=1e-4)
    one, mine, other = (load_file(p / "weights.safetensors") for p in (tmp_path, first, second))
    for key in one:
        assert torch.equal(mine[key], other[key])
    flat = [flatten(weights) for weights in (mine, one)]
    close(*flat, rel=1e-4)
    assert np.isfinite(flat[0].numpy()).all()
