from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream import runs
from slipstream.base.machine import CpuLoad
from slipstream.engine import checkpoint, loop, plan
from slipstream.engine.plan import NUM_TRIED, Plan, ThreadReview, plan_review
from slipstream.engine.planning import make_plan
from tests.conftest import small_config, small_dataset
from tests.engine.steps import make_task
from tests.logs import read_lines

BUSY, IDLE = CpuLoad(1.9, 2, 2), CpuLoad(0.0, 2, 2)
OPEN = {"threads": "auto", "plan": "measure"}


def review_steps(review, times, load=BUSY, limit=100):
    """Feed a review with the time that each number of threads takes; return the tried numbers."""
    used = []
    for _ in range(limit):
        if review.is_over:
            break
        used.append(review.next_threads)
        review.record_step(times[review.next_threads], lambda: load)
    return used


def test_steps_as_planned_are_not_reviewed():
    review = ThreadReview(2, planned_ms=300.0)
    assert set(review_steps(review, {2: 400.0, 1: 1.0})) == {2}
    assert not review.tried


@pytest.mark.parametrize(("load", "tries"), [(BUSY, True), (IDLE, False), (None, False)])
def test_without_a_measured_plan_only_a_busy_machine_is_a_reason(load, tries):
    review = ThreadReview(2)
    review_steps(review, {2: 400.0, 1: 50.0}, load)
    assert review.is_over is tries


def test_one_thread_replaces_two_that_are_much_slower_than_planned():
    review = ThreadReview(2, planned_ms=30.0)
    used = review_steps(review, {2: 1290.0, 1: 7.0})
    assert used.count(1) == NUM_TRIED
    assert review.choose() == (1, 7.0)
    rules = make_plan(small_config(engine={"threads": 2}), data_bytes=0)
    changed = review.apply(rules)
    assert changed.threads == 1
    assert (
        "184x as fast as 2 threads: 7.00 ms a step instead of 1,290" in changed.reasons["threads"]
    )
    assert changed.reasons["load"] == "the machine is busy: other processes use 1.9 of 2 cores"
    assert Plan.from_dict(changed.to_dict()) == changed


def test_threads_stay_where_fewer_are_not_clearly_faster():
    review = ThreadReview(2, planned_ms=30.0)
    review_steps(review, {2: 100.0, 1: 90.0})
    assert review.choose() == (2, 100.0)
    rules = make_plan(small_config(engine={"threads": 2}), data_bytes=0)
    assert review.apply(rules) is rules


def test_a_slower_number_of_threads_is_given_up_at_its_second_step():
    review = ThreadReview(2, planned_ms=30.0)
    assert review_steps(review, {2: 100.0, 1: 900.0}).count(1) == 2
    assert review.choose()[0] == 2


def test_the_cores_that_others_leave_are_tried_too():
    review = ThreadReview(8, planned_ms=10.0)
    used = review_steps(review, {8: 100.0, 3: 20.0, 1: 40.0}, CpuLoad(4.7, 8, 8))
    assert set(used) == {8, 3, 1}
    assert review.choose() == (3, 20.0)


def test_a_fixed_number_of_threads_is_not_reviewed():
    rules = make_plan(small_config(engine={"threads": 2}), data_bytes=0)
    assert plan_review(rules, is_open=False) is None
    assert plan_review(replace(rules, threads=1), is_open=True) is None
    assert plan_review(rules, is_open=True).threads == 2


@pytest.mark.parametrize("threads", ["auto", 2])
def test_training_goes_on_with_the_reviewed_threads_and_records_them(
    tmp_path, monkeypatch, threads
):
    """The plan promises far too much, so the review comes at once, whatever the machine does."""
    monkeypatch.setattr(plan, "REVIEW_S", 0.0)
    monkeypatch.setattr(plan, "FASTER_RATIO", 1e9)  # whatever is tried is taken
    engine = OPEN | {"threads": threads, "log_every": 3}
    config = small_config(tmp_path, engine=engine, train={"batch": 8, "epochs": 2})
    chosen = replace(make_plan(config, data_bytes=0), threads=2, ms_per_step=1e-6)
    run = runs.create_run("t", out=str(tmp_path))
    runs.write_json(run.folder / "plan.json", chosen.to_dict())
    before = torch.get_num_threads()
    with chosen.flags():
        task = make_task(config, small_dataset(config), chosen, run)
        ran = loop.fit_single(task, chosen).plan
    assert torch.get_num_threads() == before
    reviews = [event for event in read_lines(run) if event["event"] == "review"]
    saved, _ = checkpoint.read_newest(run)
    recorded = [runs.read_json(run.folder / "plan.json"), saved.metadata["plan"]]
    if threads == "auto":
        assert [event["threads"] for event in reviews] == [1]
        assert ran.threads == 1
        assert all(one["threads"] == 1 for one in recorded)
    else:
        assert (reviews, ran.threads) == ([], 2)
        assert all(one["threads"] == 2 for one in recorded)
