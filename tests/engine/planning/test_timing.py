from __future__ import annotations

import pytest

from slipstream.engine.planning import NUM_STRETCHES, measure_ms


class Clock:
    """Steps that take a given time each."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)
        self.calls = []

    def __call__(self, steps):
        self.calls.append(steps)
        return steps * (self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0])


def test_the_fastest_of_some_stretches_counts():
    clock = Clock(0.02, 0.01, 0.008, 0.03)
    assert measure_ms(clock, 100) == pytest.approx(8.0)
    assert clock.calls == [1] + NUM_STRETCHES * [2]


def test_a_candidate_is_stopped_at_its_first_step_if_that_is_clearly_slower():
    clock = Clock(1.29)
    assert measure_ms(clock, 100, best_ms=7.01) == pytest.approx(1290.0)
    assert clock.calls == [1]


def test_a_candidate_is_stopped_after_a_stretch_that_is_clearly_slower():
    clock = Clock(0.01, 0.03)
    assert measure_ms(clock, 100, best_ms=10.0) == pytest.approx(30.0)
    assert len(clock.calls) == 2


def test_a_candidate_that_is_not_clearly_slower_has_its_whole_time():
    clock = Clock(0.012)
    measure_ms(clock, 100, best_ms=10.0)
    assert len(clock.calls) == 1 + NUM_STRETCHES
