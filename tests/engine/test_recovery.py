"""Memory that runs out and losses that stop being numbers, injected into real runs."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

from slipstream import UserError
from slipstream.engine import recovery
from slipstream.engine.lanes import DIVERGED
from tests.conftest import KINDS, close, mostly_slow, waves
from tests.engine.test_loop import fit, of_kind
from tests.limits import run_within

STEADY = {"dropout": 0.0}


def no_more_than(windows):
    """A model on a card that holds so many windows and no more."""

    def change(model):
        def check(_, given):
            if given[0].shape[1] > windows and model.training:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        model.register_forward_pre_hook(check)

    return change


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "lstm", "mlp"))
def test_out_of_memory_goes_on_in_halves_with_the_same_losses(tmp_path, kind):
    sections = {"model": STEADY | {"kind": kind}, "train": {"epochs": 3, "batch": 31}}
    calm, calm_events, _, _ = fit(tmp_path, **sections)
    result, events, _, _ = fit(tmp_path, change=no_more_than(9), **sections)
    found = of_kind(events, "recovery")
    assert [event["remedy"] for event in found] == ["16 windows per pass", "8 windows per pass"]
    assert "out of memory" in found[0]["what"]
    assert result.progress.step == calm.progress.step
    losses, wanted = (
        [event["loss"] for event in of_kind(all_events, "log")]
        for all_events in (events, calm_events)
    )
    close(losses, wanted, rel=1e-4)
    close(result.progress.best_loss, calm.progress.best_loss, rel=1e-4)


def test_out_of_memory_in_mid_run_goes_on_from_the_same_step(tmp_path):
    sections = {"model": STEADY, "train": {"epochs": 2}}
    calls = 0

    def change(model):
        def check(_, given):
            nonlocal calls
            calls += model.training
            if calls == 12 and given[0].shape[1] > 16:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        model.register_forward_pre_hook(check)

    _, calm, _, _ = fit(tmp_path, **sections)
    result, events, _, _ = fit(tmp_path, change=change, **sections)
    assert len(of_kind(events, "recovery")) == 1
    assert result.progress.step == 18
    close(
        [event["loss"] for event in of_kind(events, "log")],
        [event["loss"] for event in of_kind(calm, "log")],
        rel=1e-4,
    )


HUNGRY = {
    "torch": lambda: torch.zeros(2**28),
    "numpy": lambda: np.zeros(2**28),
    "arrow": lambda: pa.array(np.zeros(2**4)).take(np.zeros(2**28, dtype=np.int8)),
    "arrow's pool": lambda: pa.allocate_buffer(2**30),
    "python": lambda: bytearray(2**30),
    "c++": lambda: torch.randperm(2**27),
}


@pytest.mark.parametrize("who", HUNGRY)
def test_whoever_asks_a_host_for_too_much_memory_is_understood(who):
    def work():
        try:
            HUNGRY[who]()
        except Exception as error:
            return f"{recovery.is_out_of_memory(error)} {error!r}"
        return "there was enough"

    assert run_within(64, work).startswith("True")


def test_a_thread_that_finds_no_memory_is_understood():
    assert recovery.is_out_of_memory(RuntimeError("can't start new thread"))
    assert not recovery.is_out_of_memory(RuntimeError("shapes do not match"))
    assert not recovery.is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4294967296 bytes. Error code 12"
        ),
        RuntimeError("std::bad_alloc"),
    ],
    ids=["python", "torch", "c++"],
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "validating"])
def test_a_host_whose_memory_is_full_goes_on_in_halves_too(tmp_path, error, training):
    def change(model):
        def check(_, given):
            if given[0].shape[1] > 20 and model.training is training:
                raise error

        model.register_forward_pre_hook(check)

    sections = {"model": STEADY, "train": {"epochs": 2}}
    calm, _, _, _ = fit(tmp_path, **sections)
    result, events, _, _ = fit(tmp_path, change=change, **sections)
    assert of_kind(events, "recovery")
    close(result.progress.best_loss, calm.progress.best_loss, rel=1e-4)


def test_out_of_memory_while_validating_is_survived_too(tmp_path):
    def change(model):
        def check(_, given):
            if given[0].shape[1] > 20 and not model.training:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        model.register_forward_pre_hook(check)

    table = waves(3000)
    result, events, _, _ = fit(tmp_path, table=table, change=change, train={"epochs": 1})
    calm, _, _, _ = fit(tmp_path, table=table, train={"epochs": 1})
    assert of_kind(events, "recovery")
    close(result.progress.best_loss, calm.progress.best_loss, rel=1e-5)


def test_a_single_window_that_does_not_fit_ends_with_the_remedies(tmp_path):
    with pytest.raises(UserError) as caught:
        fit(tmp_path, change=no_more_than(0))
    for remedy in ("engine.recompute = true", "data.context = 8", "model.hidden = 4"):
        assert remedy in str(caught.value)


def test_another_runtime_error_is_not_swallowed(tmp_path):
    def change(model):
        def check(*_):
            raise RuntimeError("something else")

        model.register_forward_pre_hook(check)

    with pytest.raises(RuntimeError, match="something else"):
        fit(tmp_path, change=change)


def poisoned(calls):
    """A model whose training output is not a number in these calls."""
    seen = 0

    def change(model):
        def spoil(_, __, out):
            nonlocal seen
            seen += model.training
            return out * torch.nan if model.training and calls(seen) else None

        model.register_forward_hook(spoil)

    return change


def test_a_loss_that_is_no_number_is_rolled_back_and_the_rate_halved(tmp_path):
    sections = {"train": {"epochs": 4, "schedule": "constant"}}
    result, events, _, model = fit(tmp_path, change=poisoned(lambda n: n == 14), **sections)
    (found,) = of_kind(events, "recovery")
    assert found["remedy"] == "learning rate times 0.5"
    assert found["step"] == 9  # where the epoch began
    assert result.stop_reason == "all epochs done"
    assert result.progress.step == 36
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert [event["lr"] for event in of_kind(events, "epoch")] == [1e-3, 5e-4, 5e-4, 5e-4]


def test_a_rollback_restores_weights_and_optimizer_exactly(tmp_path):
    """A run whose second epoch is poisoned is one whose schedule halves the rate there."""
    model = {"layers": 2, "dropout": 0.3}
    constant = {"epochs": 2, "schedule": "constant"}
    change = poisoned(lambda n: n == 16)  # 9 steps an epoch
    _, events, _, _ = fit(tmp_path, change=change, train=constant, model=model)
    halved = {"epochs": 2, "schedule": "step", "step_epochs": 1, "step_factor": 0.5}
    _, calm, _, _ = fit(tmp_path, train=halved, model=model)
    (recovery,) = of_kind(events, "recovery")
    assert recovery["step"] == 9
    wanted = [event["val_loss"] for event in of_kind(calm, "epoch")]
    assert [event["val_loss"] for event in of_kind(events, "epoch")] == wanted


def test_three_times_is_enough(tmp_path):
    change = poisoned(lambda n: n > 12)
    result, events, _, _ = fit(tmp_path, change=change, train={"epochs": 9})
    assert result.stop_reason == DIVERGED
    assert len(of_kind(events, "recovery")) == 3
    assert result.progress.best_epoch == 1
    assert all(torch.isfinite(value).all() for value in result.weights.values())


@pytest.mark.slow
def test_recoveries_leak_nothing(tmp_path):
    sections = {"train": {"epochs": 1, "batch": 256}, "model": {"kind": "linear"}}

    def tensors():
        gc.collect()
        return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())

    def survive(times):
        for _ in range(times):
            _, events, _, _ = fit(tmp_path, change=no_more_than(1), **sections)
            assert len(of_kind(events, "recovery")) == 8

    survive(3)
    gc.freeze()  # what is there already need not be looked through again and again
    before, memory = tensors(), psutil.Process().memory_info().rss
    survive(25)
    assert tensors() <= before + 5
    assert psutil.Process().memory_info().rss < memory + 30e6
    gc.unfreeze()
