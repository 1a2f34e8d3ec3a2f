from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError, runs
from slipstream.base.machine import CpuLoad
from slipstream.engine import planning
from slipstream.engine.planning import PlanSearch, StepMeasurement, make_plan
from tests.conftest import small_config, small_dataset, waves
from tests.engine.steps import make_task

CACHED = {"plan": "cached", "threads": 1}
"""With a number of threads, other processes on the machine do not keep a plan from the cache"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream" / "plans.json"


def made(tmp_path, table=None, **sections):
    engine = {"plan": "measure", "threads": "auto", "rnn": "torch"}
    engine |= sections.pop("engine", {})
    train = {"epochs": 100_000} | sections.pop("train", {})
    config = small_config(tmp_path, engine=engine, train=train, **sections)
    dataset = small_dataset(config, table)
    chosen = make_plan(config, data_bytes=0)
    return make_task(config, dataset, chosen, runs.create_run("t", out=str(tmp_path))), chosen


def test_every_candidate_is_in_the_evidence_and_the_fastest_is_taken(tmp_path):
    task, rules = made(tmp_path)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    generator = torch.get_rng_state()
    decided = planning.choose_plan(task, rules)
    names = [item["candidate"] for item in decided.evidence]
    one = ", threads = 1" if rules.threads > 1 else ""
    assert names[0] == f"rules of thumb{one}"
    assert any(name.startswith("threads = ") for name in names) or rules.threads == 1
    assert any(name.startswith("onednn = ") for name in names)
    timed = [item["ms"] for item in decided.evidence if "ms" in item and "refused" not in item]
    assert decided.ms_per_step <= min(timed) / planning.BUSY_RATIO
    assert decided.reasons["plan"].startswith("measured in")
    # measuring leaves no trace in what will be trained
    assert all(torch.equal(task.model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_was_measured_is_remembered_by_shape(tmp_path, cache):
    task, rules = made(tmp_path, engine=CACHED)
    first = planning.choose_plan(task, rules)
    assert len(json.loads(cache.read_text())) == 1
    again = planning.choose_plan(task, rules)
    assert again.reasons["plan"].startswith("measured before")
    assert again.ms_per_step == first.ms_per_step
    assert again.evidence == first.evidence
    other, rules = made(tmp_path, engine=CACHED, model={"hidden": 9})
    assert planning.choose_plan(other, rules).reasons["plan"].startswith("measured in")
    assert len(json.loads(cache.read_text())) == 2


def test_a_broken_cache_is_as_good_as_none(tmp_path, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("{ not json")
    task, rules = made(tmp_path, engine={"plan": "cached"})
    assert planning.choose_plan(task, rules).reasons["plan"].startswith("measured in")


def test_off_means_rules_of_thumb(tmp_path, cache):
    task, rules = made(tmp_path, engine={"plan": "off"})
    assert planning.choose_plan(task, rules) == rules
    assert not cache.exists()


def test_a_short_run_is_not_held_up_by_its_plan(tmp_path):
    task, rules = made(tmp_path, train={"epochs": 1})
    decided = planning.choose_plan(task, rules)
    assert decided.evidence == []
    assert "too few to measure" in decided.reasons["plan"]


def test_what_does_not_fit_into_the_time_is_told(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(planning, "SHARE_OF_RUN", 1e-9)
    monkeypatch.setattr(planning, "FIRST_TRIAL_S", 0.0)
    task, rules = made(tmp_path)
    decided = planning.choose_plan(task, rules)
    assert "ms" in decided.evidence[0]
    assert all("skipped" in item for item in decided.evidence[1:])
    assert not cache.exists()  # a longer run would have looked further


def change_without_rules(task, rules, change):
    """Have the model give `change(output)` wherever oneDNN is not as the rules of thumb want it."""

    def call(_, __, output):
        return output if torch.backends.mkldnn.enabled == rules.onednn else change(output)

    task.model.register_forward_hook(call)


def find_onednn(decided):
    return next(item for item in decided.evidence if item["candidate"].startswith("onednn"))


def test_a_candidate_that_fails_is_shown_as_failed(tmp_path):
    task, rules = made(tmp_path, engine={"threads": 1})

    def fail(_):
        raise RuntimeError("no such layer")

    change_without_rules(task, rules, fail)
    decided = planning.choose_plan(task, rules)
    assert decided.onednn == rules.onednn
    assert find_onednn(decided)["failed"] == "no such layer"


def test_a_candidate_with_other_losses_is_refused(tmp_path):
    task, rules = made(tmp_path, engine={"threads": 1})
    change_without_rules(task, rules, lambda output: output * 3)
    decided = planning.choose_plan(task, rules)
    assert decided.onednn == rules.onednn
    assert "instead of" in find_onednn(decided)["refused"]


def test_a_batch_that_does_not_fit_is_planned_in_smaller_passes(tmp_path):
    task, rules = made(tmp_path, train={"batch": 31})

    def check(_, given):
        if given[0].shape[1] > 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    task.model.register_forward_pre_hook(check)
    decided = planning.choose_plan(task, rules)
    assert decided.micro_batch == 8
    assert decided.reasons["micro_batch"] == "16 windows per pass did not fit"
    assert ["failed" in item for item in decided.evidence[:3]] == [True, True, False]


def test_memory_that_was_full_once_is_not_remembered(tmp_path, cache):
    """A neighbour may have had it; the next run finds out anew."""
    task, rules = made(tmp_path, train={"batch": 31}, engine=CACHED)

    def check(_, given):
        if given[0].shape[1] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    full = task.model.register_forward_pre_hook(check)
    assert planning.choose_plan(task, rules).micro_batch == 16
    full.remove()
    decided = planning.choose_plan(task, rules)
    assert decided.micro_batch is None
    assert decided.reasons["plan"].startswith("measured in")
    assert planning.choose_plan(task, rules).reasons["plan"].startswith("measured before")
    (kept,) = json.loads(cache.read_text()).values()
    assert "micro_batch" not in kept["choices"]


@pytest.mark.parametrize("what", ["slipstream", "triton", "driver", "torch"])
def test_a_plan_of_another_version_is_measured_anew(tmp_path, what):
    task, rules = made(tmp_path, engine={"plan": "cached"})
    key = planning.compute_key(task, rules)
    assert what in rules.hardware or what == "driver"  # which only a machine with a GPU has
    other = replace(rules, hardware=rules.hardware | {what: "0.0.1"})
    assert planning.compute_key(task, other) != key


@pytest.mark.slow
def test_a_batch_is_found_by_speed_and_by_what_fits(tmp_path):
    task, rules = made(tmp_path, table=waves(2000), model={"kind": "linear"})
    batch, evidence = planning.find_batch_size(task, rules)
    assert 32 <= batch <= len(task.dataset.memory.starts["train"])
    assert evidence[0]["candidate"] == "batch = 32"

    def check(_, given):
        if given[0].shape[1] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    task.model.register_forward_pre_hook(check)
    batch, evidence = planning.find_batch_size(task, rules)
    assert batch <= 100
    assert any("failed" in item for item in evidence) or batch < 64


def test_not_even_one_window(tmp_path):
    task, rules = made(tmp_path, model={"kind": "linear"})

    def check(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    task.model.register_forward_pre_hook(check)
    with pytest.raises(UserError, match="out of memory with a single window"):
        planning.find_batch_size(task, rules)


# decisions, from figures


IDLE, BUSY = CpuLoad(0.0, 8, 8), CpuLoad(7.6, 8, 8)
SETTINGS = {
    "threads": [1, 2, 8],
    "onednn": [True, False],
    "fused": [True, False],
    "workers": [0, 4],
    "precision": ["fp32", "bf16", "tf32", "fp16"],
    "compile": [False, True],
    "capture": [True, False],
    "rnn": [("slipstream", "slipstream"), ("torch", "torch"), ("cudnn-standard", "cudnn")],
}
RULES = make_plan(small_config(engine={"threads": 8}), data_bytes=0)


def search_with(load=IDLE, loss=1.0, **changes):
    """A search whose first plan is the rules of thumb with some values changed."""
    search = PlanSearch(None, replace(RULES, **changes), reference_loss=loss)
    search.record_load(load)
    return search


def decide(search, setting, value, best_ms, ms):
    """Have a search decide about a value, by given times."""
    (candidate,) = planning.make_candidates(setting, value)
    other = replace(search.plan, **{setting: value})
    search.evidence.append({"candidate": candidate.name, "ms": ms})
    found = StepMeasurement(ms, 1.0, [])
    return search.decide(candidate, other, StepMeasurement(best_ms, 1.0, []), found)


def read_figures(text):
    return [float(figure.replace(",", "")) for figure in re.findall(r"\d[\d,]*\.?\d*", text)]


@given(
    setting=st.sampled_from(sorted(SETTINGS)),
    data=st.data(),
    times=st.tuples(st.floats(1e-3, 1e5), st.floats(1e-3, 1e5)),
)
def test_a_reason_follows_from_the_figures_beside_it(setting, data, times):
    before, value = data.draw(st.permutations(SETTINGS[setting]))[:2]
    search = search_with(**{setting: before})
    best = decide(search, setting, value, *times)
    reason = search.reasons.get(setting)
    if best.ms == times[0]:
        assert getattr(search.plan, setting) == before
        return
    assert getattr(search.plan, setting) == value
    ratio, *_, new, old = read_figures(reason)
    assert ratio == pytest.approx(old / new, rel=6e-3)
    assert (old, new) == pytest.approx(times, rel=6e-3)
    assert "e+" not in reason
    assert "1 threads" not in reason
    assert planning.describe_value(setting, before) in reason


def test_threads_that_lose_are_named_with_both_times():
    search = search_with(threads=1)
    best = decide(search, "threads", 2, 7.01, 1290.0)
    assert (best.ms, search.plan.threads) == (7.01, 1)
    assert search.reasons["threads"] == "7.01 ms a step, 1,290 with 2 threads"


def test_a_busy_machine_is_named_and_has_to_be_clearly_faster_with_more_threads():
    search = search_with(BUSY, threads=1)
    assert search.reasons["load"] == "the machine is busy: other processes use 7.6 of 8 cores"
    assert decide(search, "threads", 8, 10.0, 9.0).ms == 10.0
    assert decide(search, "threads", 8, 10.0, 7.0).ms == 7.0
    idle = search_with(IDLE, threads=1)
    assert "load" not in idle.reasons
    assert decide(idle, "threads", 8, 10.0, 9.0).ms == 9.0


def test_a_busy_machine_keeps_our_kernels_unless_others_are_clearly_faster():
    for load, stays in ((BUSY, True), (IDLE, False)):
        search = search_with(load, threads=8)
        search.plan = replace(search.plan, rnn=("slipstream",))
        decide(search, "rnn", ("torch",), 10.0, 9.0)
        assert bool(search.plan.native_kernels) is stays
        decide(search, "rnn", ("torch",), 10.0, 7.0)
        assert not search.plan.native_kernels


def test_what_a_trial_may_take_is_bounded_by_what_it_can_save():
    search = search_with(IDLE, threads=1)
    search.run_s = 20.0
    config = small_config(engine={"threads": "auto"})
    listed = list(planning.list_candidates(config, search.plan))
    assert all(one.most_gain == one.value for one in listed if one.setting == "threads")
    one, eight = (listed[0]._replace(value=n, most_gain=n) for n in (1, 8))
    assert search.compute_allowance(one) == 0
    assert search.compute_allowance(eight) == pytest.approx(0.1 * 20 * 7 / 8)
    search.run_s = 1e6
    assert search.compute_allowance(eight) == planning.MEASURE_LIMIT_S
    search.record_load(BUSY)
    assert search.compute_allowance(eight) == 0


def test_threads_that_there_was_no_time_for_follow_the_rules_unless_the_machine_is_busy():
    best = StepMeasurement(5.0, 1.0, [])
    decided = search_with(IDLE, threads=1).leave_threads_to_rules(RULES, best)
    assert (decided.threads, decided.ms_per_step) == (8, None)
    assert decided.reasons["threads"] == "requested; not measured (time limit)"
    decided = search_with(BUSY, threads=1).leave_threads_to_rules(RULES, best)
    assert (decided.threads, decided.ms_per_step) == (1, 5.0)
    assert decided.reasons["threads"] == "more were not measured (time limit)"


def test_one_thread_is_timed_first_unless_its_step_is_long():
    config = small_config(engine={"threads": "auto"})
    assert planning.prefer_one_thread(config, RULES, 0.01).threads == 1
    assert planning.prefer_one_thread(config, RULES, 10.0) is RULES
    assert planning.prefer_one_thread(small_config(), RULES, 0.01) is RULES  # the user's number


def test_a_run_is_no_longer_than_its_minutes():
    assert planning.limit_duration(small_config(), 600.0) == 600.0
    limited = small_config(train={"minutes": 2})
    assert planning.limit_duration(limited, 600.0) == 120.0
    assert planning.limit_duration(limited, 60.0) == 60.0
