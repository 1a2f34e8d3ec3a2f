from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import Config, Tune
from slipstream.search import budget as budgets
from slipstream.search.budget import (
    NO_RETRAINING,
    ModelCosts,
    RetrainingPlan,
    SearchBudget,
    TrainingCosts,
    plan_retraining,
)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_budget(minutes, clock=None, *, spent_s=0.0, **tune):
    clock = clock or Clock()
    return SearchBudget(Tune(minutes=minutes, **tune), 40, spent_s, clock(), clock)


@given(
    model_s=st.floats(0, 1e4),
    score_s=st.floats(0, 1e3),
    limit_s=st.floats(-10, 1e5),
    retrain=st.integers(0, 6),
    seeds=st.integers(2, 5),
)
def test_what_is_retrained_fits_into_its_time_and_is_the_most_that_does(
    model_s, score_s, limit_s, retrain, seeds
):
    tune = Tune(retrain=retrain, retrain_seeds=seeds)
    costs = ModelCosts(model_s, score_s)
    plan = plan_retraining(tune, costs, limit_s)
    assert plan.num_trials <= retrain
    assert plan.num_seeds <= seeds
    assert plan.compute_seconds(costs) <= max(limit_s, 0.0)
    if plan != NO_RETRAINING and plan.num_trials < retrain:
        more = plan._replace(num_trials=plan.num_trials + 1)
        assert more.compute_seconds(costs) > limit_s


def test_fewer_trials_are_retrained_before_fewer_seeds():
    tune = Tune(retrain=5, retrain_seeds=3)
    costs = ModelCosts(1.0)
    plans = [plan_retraining(tune, costs, limit) for limit in (30, 12, 8, 5, 1)]
    assert plans == [(5, 3), (2, 3), (1, 3), (1, 2), (0, 0)]
    plans = [plan_retraining(tune, costs, limit, with_tests=True) for limit in (30, 20, 15, 10)]
    assert plans == [(5, 3), (2, 3), (1, 3), (1, 2)]


def test_only_tests_of_further_folds_take_time_of_their_own():
    plan, costs = RetrainingPlan(2, 3), ModelCosts(1.0)
    assert plan.compute_seconds(costs) == pytest.approx(1.2 * 9)
    assert plan.compute_seconds(costs, with_tests=True) == pytest.approx(1.2 * (9 + 6))
    assert plan.compute_seconds(ModelCosts(1.0, 0.5)) == pytest.approx(1.2 * (9 + 3))
    clock = Clock()
    for walks, end in ((False, 54.0), (True, 54.0 - 1.2 * 6)):
        budget = SearchBudget(Tune(minutes=1), 40, 0.0, 0.0, clock, with_tests=walks)
        clock.now = end - 0.1
        assert not budget.is_late(plan, costs)
        clock.now = end + 0.1
        assert budget.is_late(plan, costs)


def test_a_model_costs_what_the_trials_took_for_their_epochs():
    clock = Clock()
    costs = TrainingCosts(40, clock)
    assert costs.estimate_model() is None
    for now in (4.0, 8.0):  # four trials, each an epoch in four seconds
        clock.now = now
        for trial in range(4):
            costs.record_epoch(trial, 1)
    assert costs.epoch_s == pytest.approx(4.0)
    assert costs.estimate_model() == pytest.approx((40.0, 1.0))  # a second an epoch, 40 epochs
    costs.record_end(0, 10.0, is_complete=True)
    costs.record_end(1, 2.0, is_complete=False)  # it says nothing about the length of a training
    assert costs.estimate_model() == pytest.approx((10.0, 1.0))


@pytest.mark.parametrize("model_s", [None, 0.01, 1.0, 20.0, 1e4])
@pytest.mark.parametrize("retrain", [0, 5])
def test_the_trials_end_in_time_for_the_retraining_and_the_reports(model_s, retrain):
    clock = Clock()
    limits = make_budget(2.0, clock, retrain=retrain)
    costs = None if model_s is None else ModelCosts(model_s, model_s / 40)
    while not limits.is_over(costs):
        clock.now += 0.1
    assert clock.now >= 0.4 * 120  # the trials have a fair part
    plan = limits.plan_retraining(costs)
    end_s = plan.compute_seconds(costs or ModelCosts(0.0)) or limits.compute_least_s(costs)
    slack_s = 0.31 * end_s if plan == (1, 2) else 0.0  # it is cut off where it takes too long
    assert limits.elapsed_s + end_s - slack_s <= 120 - limits.overhead_s + 0.2
    if retrain and model_s in (0.01, 1.0):
        assert plan.num_trials > 0


def test_models_that_took_a_little_longer_in_the_end_are_retrained_nevertheless():
    clock, costs = Clock(), ModelCosts(8.0, 0.2)
    limits = make_budget(2.0, clock, retrain=1, retrain_seeds=2)
    while not limits.is_over(costs):
        clock.now += 0.1
    assert limits.plan_retraining(costs) == (1, 2)
    assert limits.plan_retraining(ModelCosts(10.0, 0.2)) == (1, 2)
    assert limits.plan_retraining(ModelCosts(16.0, 0.2)) == NO_RETRAINING


def test_without_time_to_retrain_there_is_time_to_test_the_best_trial():
    clock, costs = Clock(), ModelCosts(60.0, 6.0)
    limits = make_budget(2.0, clock, retrain=5)
    while not limits.is_past(costs):
        clock.now += 0.1
    assert limits.plan_retraining(costs) == NO_RETRAINING
    assert clock.now == pytest.approx(120 - 12 - 1.2 * 6.0, abs=0.11)
    assert make_budget(2.0, clock, retrain=0).compute_least_s(costs) == 0


def test_the_end_of_a_search_that_started_slowly_has_more_time():
    quick, slow = (
        SearchBudget(Tune(minutes=4), 40, clock=Clock(), started_at=0.0, setup_s=setup_s)
        for setup_s in (2.0, 5.0)
    )
    assert quick.overhead_s == 15
    assert slow.overhead_s == 20


def test_an_epoch_that_would_end_too_late_is_not_begun():
    clock = Clock()
    limits = make_budget(1.0, clock, retrain=0)
    clock.now = 50.0
    assert not limits.is_over(ModelCosts(1.0), ahead_s=3.0)
    assert limits.is_over(ModelCosts(1.0), ahead_s=5.0)


def test_earlier_parts_count():
    assert make_budget(1.0, spent_s=59.0, retrain=0).is_over(None)
    assert not make_budget(1.0, spent_s=30.0, retrain=0).is_over(None)


def test_without_minutes_there_is_no_limit():
    limits = make_budget(None, retrain=4, retrain_seeds=2)
    assert math.isinf(limits.total_s)
    costs = ModelCosts(1e9, 1e9)
    assert not limits.is_over(costs, 1e9)
    assert not limits.is_past(costs)
    assert limits.plan_retraining(costs) == (4, 2)
    assert SearchBudget.of(Config(), 3.0, 0.0).spent_s == 3.0
    assert budgets.NO_RETRAINING.compute_seconds(ModelCosts(5.0)) == 0
