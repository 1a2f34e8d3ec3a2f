from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream import UserError, runs
from slipstream.engine import planning
from slipstream.engine.planning import make_plan
from tests.conftest import small_dataset
from tests.engine.lanes.test_pack import configured, lanes_of
from tests.engine.steps import make_task
from tests.limits import CrowdedDevice, FaultyDevice, run_out_of_memory

SHORT = {"train": {"batch": 64}, "model": {"kind": "mlp"}}


def chosen(count, **how):
    dataset = small_dataset(configured())
    some = lanes_of([{"seed": seed} for seed in range(count)], dataset, **SHORT)
    rules = make_plan(some[0].config, data_bytes=0)
    return planning.choose_pack_size(some, dataset.signature, dataset.memory.series, rules, **how)


def test_the_soonest_way_is_taken_and_all_evidence_kept():
    found = chosen(3)
    timed = [item for item in found.evidence if "ms" in item]
    assert {item["mode"] for item in timed} == {"together", "branches"}
    assert all(item["windows_per_s"] > 0 for item in timed)
    taken = min(timed, key=lambda item: -(-3 // item["places"]) * item["ms"])
    assert (found.mode, found.num_lanes) == (taken["mode"], taken["places"])


def test_what_does_not_fit_ends_the_doubling(monkeypatch):
    # else a busy machine might end it sooner
    monkeypatch.setattr(planning, "WORTHWHILE_RATIO", 100.0)
    with CrowdedDevice(holds=2):
        found = chosen(8, modes=("together",))
    assert [item["places"] for item in found.evidence] == [1, 2, 4]
    assert found.evidence[-1]["out_of_memory"]
    assert found.num_lanes <= 2


def test_without_time_the_first_that_works_is_taken():
    found = chosen(4, limit_s=0.0)
    assert (found.mode, found.num_lanes) == ("together", 1)
    assert [("skipped" in item) for item in found.evidence] == [False, True]


def test_a_model_that_cannot_be_trained_says_why():
    def refuse(name, _):
        return RuntimeError("no such kernel") if name == "gather" else None

    with FaultyDevice(refuse), pytest.raises(UserError, match="no such kernel"):
        chosen(2)


def on_gpu(ms, **how):
    """Choose on a GPU whose packs take so many milliseconds a step, by their number of lanes."""
    measured = []

    def measure(_, num_lanes, *rest):
        measured.append((num_lanes, rest[-1]))
        if (value := ms(num_lanes)) is None:
            raise run_out_of_memory()
        return value

    dataset = small_dataset(configured())
    changes = [{"seed": seed, "train": {"batch": 64, "epochs": 10_000}} for seed in range(16)]
    some = lanes_of(changes, dataset)
    plan = replace(make_plan(some[0].config, data_bytes=0), device=torch.device("cuda"))
    series = dataset.memory.series
    data = some, dataset.signature, series, plan
    return planning.choose_pack_size(*data, time_pack=measure, **how), measured


def test_a_gpu_begins_with_all_lanes_and_stops_where_fewer_are_slower():
    found, measured = on_gpu(lambda lanes: 1.0 + 0.1 * lanes)
    assert (found.mode, found.num_lanes) == ("together", 16)
    assert measured == [(16, "together"), (16, "branches"), (8, "together"), (8, "branches")]


def test_a_gpu_without_time_takes_all_lanes():
    found, measured = on_gpu(lambda _: 1.0, limit_s=0.0)
    assert (found.mode, found.num_lanes) == ("together", 16)
    assert measured == [(16, "together")]


def test_a_gpu_halves_what_does_not_fit():
    found, _ = on_gpu(lambda lanes: 1.0 if lanes <= 4 else None)
    assert (found.mode, found.num_lanes) == ("together", 4)
    assert [item["places"] for item in found.evidence if item.get("out_of_memory")] == [
        16,
        16,
        8,
        8,
    ]


def test_measuring_is_limited_by_what_it_can_save():
    plan = make_plan(configured(), data_bytes=0)
    on_gpu = replace(plan, device=torch.device("cuda"))
    assert planning.limit_measuring(1.0, 4, plan) == 0.0
    assert planning.limit_measuring(100.0, 4, plan) == planning.MEASURE_LIMIT_S
    assert planning.limit_measuring(4.0, 16, on_gpu) == 0.0
    assert planning.limit_measuring(60.0, 16, on_gpu) == pytest.approx(6.0)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A task with its lanes and its plan, and a cache of its own."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    config = configured(**SHORT | {"engine": {"plan": "cached"}})
    dataset = small_dataset(config)
    rules = make_plan(config, data_bytes=0)
    task = make_task(config, dataset, rules, runs.create_run("t", out=str(tmp_path)))
    return task, lanes_of([{"seed": seed} for seed in range(3)], dataset, **SHORT), rules


def test_a_choice_is_remembered_for_the_same_job(job):
    task, lanes, rules = job
    first = planning.recall_or_choose(task, lanes, rules, 10.0)
    again = planning.recall_or_choose(task, lanes, rules, 10.0)
    assert (first.reason, again.reason) == ("measured", "measured before")
    assert (again.mode, again.num_lanes) == (first.mode, first.num_lanes)
    assert again.evidence == first.evidence
    fewer = planning.recall_or_choose(task, lanes[:2], rules, 10.0)
    assert fewer.reason == "measured"


def test_a_choice_that_lacked_memory_is_not_remembered(job):
    task, lanes, rules = job
    with CrowdedDevice(holds=1):
        assert planning.recall_or_choose(task, lanes, rules, 10.0).num_lanes == 1
    assert planning.recall_or_choose(task, lanes, rules, 10.0).reason == "measured"


def test_no_more_lanes_are_tried_than_are_expected_to_fit():
    found = chosen(8, modes=("together",), most=2)
    assert max(item["places"] for item in found.evidence) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hidden", [32, 128])
def test_the_estimate_of_memory_is_above_what_lanes_take(hidden):
    wide = {"train": {"batch": 256}, "model": {"kind": "lstm", "hidden": hidden}}
    config = configured(**wide | {"engine": {"device": "cuda"}})
    dataset = small_dataset(config)
    rules = make_plan(config, data_bytes=0)
    task = make_task(config, dataset, rules)
    lanes = lanes_of([{"seed": seed} for seed in range(16)], dataset, **wide)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = planning.measure_pack(lanes, 16, dataset.signature, task.series, rules, "together")
    taken = torch.cuda.max_memory_allocated() - before
    assert ms > 0
    assert 16 * planning.estimate_bytes(task, lanes[0], rules) > taken
