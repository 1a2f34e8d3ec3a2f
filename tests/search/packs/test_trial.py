"""The pool of trials: who takes an empty place."""

from __future__ import annotations

from slipstream.search.packs import TrialPool, TrialRun, TrialSource
from tests.conftest import small_config


class Source(TrialSource):
    """Some trials, and one that is retrained after them."""

    def __init__(self, *trials):
        self.trials = list(trials)
        self.filler = TrialRun(-1, small_config(), keeps_lane=True)

    def ask(self):
        return self.trials.pop(0) if self.trials else None

    def fill_place(self, fits):
        return self.filler if fits(self.filler) else None


def make_trials(count):
    return [TrialRun(number, small_config()) for number in range(count)]


def test_what_is_retrained_takes_a_place_only_if_no_trial_waits():
    first, second = make_trials(2)
    source = Source(first, second)
    pool = TrialPool(source, parallel=4)
    assert pool.start_fitting(lambda one: one is not first) is second
    assert pool.waiting == [first]
    assert pool.start_fitting(lambda one: one is not first) is None
    assert pool.start_fitting(lambda _: True) is first
    assert pool.start_fitting(lambda _: True) is source.filler
    assert pool.running == [second, first, source.filler]


def test_what_is_retrained_does_not_count_among_the_parallel_trials():
    trials = make_trials(3)
    pool = TrialPool(Source(*trials), parallel=2)
    pool.running.append(TrialRun(-2, small_config(), keeps_lane=True))
    pool.fill()
    assert pool.waiting == trials[:2]
