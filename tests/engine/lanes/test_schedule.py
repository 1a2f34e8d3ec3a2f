from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import Train
from slipstream.engine.lanes import (
    EpochStart,
    Pace,
    choose_pace,
    compute_lr,
    compute_lrs,
    find_position,
)

STEPS = 4


def all_rates(train: Train) -> list[float]:
    epochs = map(EpochStart, range(train.epochs))
    return [rate for epoch in epochs for rate in compute_lrs(train, epoch, STEPS)]


def torch_rates(train: Train, make, *, per_step: bool) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=train.lr)
    schedule = make(optimizer)
    found = []
    for _ in range(train.epochs):
        for _ in range(STEPS):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if per_step:
                schedule.step()
        if not per_step:
            schedule.step()
    return found


def test_constant():
    assert set(all_rates(Train(schedule="constant", epochs=3))) == {1e-3}
    assert set(all_rates(Train(schedule="plateau", epochs=3))) == {1e-3}


def test_step_cuts_like_torch():
    train = Train(schedule="step", epochs=12, step_epochs=5, step_factor=0.5)
    wanted = torch_rates(
        train, lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.5), per_step=False
    )
    assert all_rates(train) == pytest.approx(wanted)


def test_cosine_falls_like_torch():
    train = Train(schedule="cosine", epochs=6, lr_min=1e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR
    wanted = torch_rates(train, lambda o: scheduler(o, 6 * STEPS, 1e-5), per_step=True)
    assert all_rates(train) == pytest.approx(wanted)


def test_restarts_like_torch():
    train = Train(schedule="restarts", epochs=14, restart_epochs=2, restart_growth=2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
    wanted = torch_rates(train, lambda o: scheduler(o, 2 * STEPS, 2), per_step=True)
    assert all_rates(train) == pytest.approx(wanted)


def test_warm_up_rises_in_equal_steps_to_the_full_rate():
    train = Train(schedule="cosine", epochs=10, warmup_epochs=2)
    found = all_rates(train)
    assert found[:8] == pytest.approx([1e-3 * (i + 1) / 8 for i in range(8)])
    assert found[8] == pytest.approx(1e-3)
    assert found[-1] < 1e-5


@given(
    st.sampled_from(["constant", "step", "plateau", "cosine", "restarts"]),
    st.floats(0, 5),
    st.integers(1, 30),
    st.floats(0, 1e-3),
)
def test_no_schedule_leaves_its_bounds(schedule, warmup, epochs, lr_min):
    train = Train(schedule=schedule, warmup_epochs=warmup, epochs=epochs, lr_min=lr_min)
    assert all(
        0 < rate <= train.lr * (1 + 1e-12) or math.isclose(rate, 0) for rate in all_rates(train)
    )


def paced_rates(train: Train, steps_in_time: int, *, every: int = 3) -> list[float]:
    """The rates of steps that are launched `every` at a time, until the time is over."""
    rates, pace = [], None
    for begin in range(0, steps_in_time, every):
        for step in range(begin, min(begin + every, steps_in_time)):
            epoch = EpochStart(step // STEPS, steps_before=step // STEPS * STEPS, pace=pace)
            rates.append(compute_lr(train, epoch, step % STEPS, STEPS))
        done = begin + every
        here = EpochStart(done // STEPS, 1.0, done // STEPS * STEPS, done % STEPS, None, pace)
        pace = choose_pace(train, here, STEPS, max(steps_in_time - done, 0))
    return rates


@given(st.integers(1, 40), st.integers(4, 200), st.floats(0, 3))
def test_a_cosine_ends_with_the_time_or_with_the_epochs(epochs, steps_in_time, warmup):
    train = Train(epochs=epochs, warmup_epochs=min(warmup, epochs / 2))
    steps = min(steps_in_time, epochs * STEPS)
    rates = paced_rates(train, steps)
    if steps_in_time >= epochs * STEPS:
        assert rates == all_rates(train)  # to the bit: the time changes nothing
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if steps >= 40 and steps_in_time < epochs * STEPS:
        assert rates[-1] < 0.02 * train.lr


def test_a_pace_goes_on_from_where_the_schedule_stands():
    train = Train(epochs=50, warmup_epochs=5, minutes=1)
    here = EpochStart(2, steps_before=8, step=1)
    pace = choose_pace(train, here, STEPS, 19.0)
    assert pace is not None
    then = here._replace(pace=pace)
    assert find_position(then, 1, STEPS) == find_position(here, 1, STEPS) == 2.25
    assert pace.find_position(9 + 19) == pytest.approx(50)
    slower = choose_pace(train, then._replace(step=3), STEPS, 5.0)
    assert slower.find_position(11) == pytest.approx(pace.find_position(11))
    assert slower.find_position(16) == pytest.approx(50)


def test_a_machine_that_speeds_up_ends_with_the_epochs():
    train = Train(epochs=10, minutes=1)
    here = EpochStart(4, steps_before=16, pace=Pace(16, 6.0, 1.0))
    pace = choose_pace(train, here, STEPS, 1000.0)
    assert pace.find_position(10 * STEPS) == pytest.approx(10)


def test_the_epochs_at_a_low_rate_fall_along_their_own_cosine():
    train = Train(exploit_epochs=3)
    rates = [
        compute_lr(train, EpochStart(number, exploit_from=7), step, STEPS)
        for number in range(7, 10)
        for step in range(STEPS)
    ]
    assert rates[0] == pytest.approx(1e-5)
    assert rates[6] == pytest.approx((1e-5 + 1e-7) / 2)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 3e-7
