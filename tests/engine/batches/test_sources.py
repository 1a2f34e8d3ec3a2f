from __future__ import annotations

import multiprocessing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import runs
from slipstream.engine import loop
from slipstream.engine.batches import (
    DeviceSource,
    EpochSampler,
    LoaderSource,
    TransferOptions,
    shuffle_starts,
)
from slipstream.engine.planning import make_plan
from tests.conftest import KINDS, mostly_slow, slow, small_config, small_dataset, waves
from tests.engine.steps import make_task, run_steps
from tests.limits import FaultyDevice, run_out_of_memory


def test_every_window_comes_once_an_epoch_in_an_order_fixed_by_seed_and_epoch():
    starts = torch.arange(100) * 3
    first = shuffle_starts(starts, seed=1, epoch=2)
    assert torch.equal(first.sort().values, starts)
    assert torch.equal(first, shuffle_starts(starts, seed=1, epoch=2))
    others = [shuffle_starts(starts, seed=s, epoch=e) for s, e in ((1, 3), (2, 2), (0, 2))]
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("seed", [2**31, 20260131120000, 2**63 - 1])
def test_any_seed_of_the_config_gives_an_order(seed):
    starts = torch.arange(100)
    first = shuffle_starts(starts, seed=seed, epoch=2)
    assert torch.equal(first.sort().values, starts)
    assert torch.equal(first, shuffle_starts(starts, seed=seed, epoch=2))
    assert not torch.equal(first, shuffle_starts(starts, seed=seed, epoch=3))
    assert not torch.equal(first, shuffle_starts(starts, seed=seed - 1, epoch=2))
    assert not torch.equal(first, shuffle_starts(starts, seed=seed % 2**32 + 2**32, epoch=2))


@pytest.mark.parametrize("seed", [0, 1, 4295, 2**31, 2**32 - 1])
def test_seeds_of_32_bits_keep_the_order_that_they_always_had(seed):
    order = torch.randperm(100, generator=torch.Generator().manual_seed(seed * 1_000_003 + 7))
    assert torch.equal(shuffle_starts(torch.arange(100), seed=seed, epoch=7), order)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.integers(0, 3))
def test_a_step_takes_the_same_windows_however_they_are_passed(count, effective, batch, epoch):
    starts = torch.arange(1, count + 1)
    sampler = EpochSampler(starts, effective, min(batch, effective), 7)
    rows, weights = sampler.sample_epoch(epoch)
    assert (
        rows.shape
        == weights.shape
        == (sampler.num_steps, sampler.num_passes, sampler.windows_per_pass)
    )
    torch.testing.assert_close(weights.sum(dim=(1, 2)), torch.ones(sampler.num_steps))
    wanted = shuffle_starts(starts, seed=7, epoch=epoch).split(effective)
    for step, taken in enumerate(wanted):
        real = weights[step] > 0
        assert torch.equal(rows[step][real], taken)
        assert not rows[step][~real].any()


def test_validation_counts_every_window_as_one_and_keeps_their_order():
    sampler = EpochSampler(torch.arange(10), 4, 4, None)
    rows, weights = sampler.sample_epoch(0)
    assert rows.view(-1)[:10].tolist() == list(range(10))
    assert weights.sum() == 10


SHAPES = {
    "plain": {},
    "independent": {"data": {"channels": "independent"}},
    "static": {"data": {"static": ["k"], "scale": "none"}},
    "future": {"data": {"future": ["b"], "channels": "independent"}},
    "accumulate": {"train": {"accumulate": 3, "batch": 17}},
}


@pytest.mark.parametrize("workers", [0, slow(2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loader_gives_the_batches_of_the_device_to_the_bit(shape, workers):
    table = waves().to_pydict() | {"k": [0.5] * 400}
    config = small_config(model={"kind": "gru"}, **SHAPES[shape])
    through = small_config(
        model={"kind": "gru"},
        engine={"home": "loader", "workers": workers},
        **SHAPES[shape],
    )
    if shape != "static":
        del table["k"]
    dataset = small_dataset(config, table)
    wanted, found = (run_steps(c, dataset, steps=25) for c in (config, through))
    assert wanted[0] == found[0]
    assert all(torch.equal(wanted[1][name], found[1][name]) for name in wanted[1])
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "lstm", "mlp"))
def test_smaller_passes_give_the_same_steps(kind):
    config = small_config(model={"kind": kind, "dropout": 0.0}, train={"batch": 31})
    dataset = small_dataset(config)
    whole, _ = run_steps(config, dataset, steps=15)
    for batch in (16, 5, 1):
        parts, _ = run_steps(config, dataset, steps=15, batch=batch)
        torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), rtol=1e-4, atol=1e-6)


def test_a_home_can_begin_in_the_middle_of_an_epoch():
    config = small_config()
    dataset = small_dataset(config)
    sampler = EpochSampler(dataset.memory.starts["train"], 32, 32, 0)
    options = TransferOptions(torch.device("cpu"), config.engine)
    loader = LoaderSource(dataset.memory.series, sampler, options)
    loader.start_epoch(3, step=5)
    loader.wrap_program(lambda: None)()
    (micro_batch,) = loader.get_micro_batches(torch.tensor([5]))
    rows, weights = sampler.sample_epoch(3)
    taken = dataset.memory.series.inputs[rows[5, 0] + dataset.memory.series.context_rows]
    assert torch.equal(micro_batch.batch.inputs, taken)
    assert torch.equal(micro_batch.weights, weights[5, 0])


def test_a_home_closes_as_often_as_it_is_asked_to():
    config = small_config()
    dataset = small_dataset(config)
    sampler = EpochSampler(dataset.memory.starts["train"], 32, 32, 0)
    options = TransferOptions(torch.device("cpu"), config.engine)
    loader = LoaderSource(dataset.memory.series, sampler, options)
    for home in (loader, DeviceSource(dataset.memory.series, sampler)):
        home.start_epoch(0)
        home.close()
        home.close()


@pytest.mark.parametrize("home", ["device", "loader"])
def test_a_failed_recovery_from_full_memory_shows_its_own_cause(tmp_path, home):
    """The failed job is closed before the next is set up, and once more where that fails."""
    config = small_config(tmp_path, engine={"home": home, "workers": 0})
    dataset = small_dataset(config)
    chosen = make_plan(config, data_bytes=0)
    task = make_task(config, dataset, chosen, runs.create_run("t", out=str(tmp_path)))

    failures = []

    def full(*_):
        failures.append(run_out_of_memory())
        raise failures[-1]

    def fall_off(*_):
        return RuntimeError("the card fell off the bus") if failures else None

    task.model.register_forward_pre_hook(full)
    with FaultyDevice(fall_off), pytest.raises(RuntimeError, match="fell off the bus"):
        loop.fit_single(task, chosen)
    assert len(failures) == 1


def test_a_closed_loader_has_no_workers_although_somebody_holds_its_iterator():
    config = small_config()
    dataset = small_dataset(config)
    sampler = EpochSampler(dataset.memory.starts["train"], 32, 32, 0)
    options = TransferOptions(torch.device("cpu"), config.engine, 1, 2)
    loader = LoaderSource(dataset.memory.series, sampler, options)
    loader.start_epoch(0)
    held = loader._batches
    next(held)
    (worker,) = held._workers
    loader.close()
    assert not worker.is_alive()
