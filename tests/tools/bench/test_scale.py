"""The simulation behind `benchmarks/scale.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.tools.bench.scripts import load

cluster = load("cluster")
FLAT = dict.fromkeys((1, 16), 1.0)
"""A GPU that is no faster with more lanes"""
JOB = cluster.SearchJob(
    trials=256, epochs=4, steps_per_epoch=100, ms=FLAT, max_lanes=4, share_under_way=1.0
)
NO_COSTS = cluster.WorkerCosts()


def simulate(gpus: int = 8, job: Any = JOB, storage: Any = cluster.FREE, **options: Any) -> Any:
    costs, faults = options.pop("costs", NO_COSTS), options.pop("faults", cluster.Faults())
    return cluster.Simulation(job, costs, storage, faults, gpus=gpus, **options).run()


@pytest.mark.parametrize("gpus", [1, 4, 32])
def test_gpus_without_failures_and_with_a_free_storage_share_the_time_evenly(gpus: int) -> None:
    alone = 256 * 4 * 100 * 1.0 / 1e3
    assert simulate(gpus).wall_s == pytest.approx(alone / gpus)
    assert simulate(gpus).compute_shares()["training"] == pytest.approx(1.0)


def test_a_pack_costs_what_was_measured_and_numbers_between_lie_between() -> None:
    job = replace(JOB, ms={1: 0.2, 16: 0.025, 64: 0.0125})
    assert [job.compute_ms(lanes) for lanes in (1, 16, 64, 128)] == [0.2, 0.025, 0.0125, 0.0125]
    assert job.compute_ms(32) == pytest.approx(math.sqrt(0.025 * 0.0125))


@pytest.mark.parametrize("hours", [math.inf, 0.002, 0.0005])
def test_every_trial_ends_once_whatever_fails(hours: float) -> None:
    faults = cluster.Faults(process_hours=hours, machine_hours=4 * hours, replace_s=5, grace_s=5)
    job = replace(JOB, pruned_share=0.6)
    result = simulate(16, job, faults=faults)
    assert result.finished + result.failed == job.trials
    assert (result.failures > 0) == math.isfinite(hours)
    assert sum(result.spent_s.values()) == pytest.approx(result.gpu_s)


def test_processes_that_fail_more_often_are_never_faster() -> None:
    costs = cluster.WorkerCosts(start_up_s=1.0)
    rates = (math.inf, 0.1, 0.01, 0.003, 0.001)
    faults = [cluster.Faults(process_hours=hours, checkpoint_every_s=2) for hours in rates]
    times = [simulate(4, costs=costs, faults=one).wall_s for one in faults]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_a_failed_process_loses_the_time_since_its_checkpoint_only() -> None:
    rare = cluster.Faults(process_hours=0.003, checkpoint_every_s=1e9)
    often = replace(rare, checkpoint_every_s=0.5)
    lost = [simulate(4, faults=one).spent_s["lost work"] for one in (often, rare)]
    assert lost[0] < lost[1]
    assert lost[0] <= 0.5 * simulate(4, faults=often).failures


def test_the_same_seed_gives_the_same_result_and_another_one_does_not() -> None:
    faults = cluster.Faults(process_hours=0.01, speed_spread=0.1)
    job = replace(JOB, pruned_share=0.6)
    walls = [simulate(8, job, faults=faults, seed=seed).wall_s for seed in (0, 0, 1)]
    assert walls[0] == walls[1]
    assert walls[0] != walls[2]


def test_pruning_ends_the_given_share_of_trials_after_the_warm_up() -> None:
    job = replace(JOB, epochs=10, pruned_share=0.7)
    lengths = [job.draw_epochs(number, 0) for number in range(4_000)]
    assert sum(one < 10 for one in lengths) / 4_000 == pytest.approx(0.7, abs=0.05)
    assert min(lengths) == job.warmup_epochs + 1
    assert lengths == [job.draw_epochs(number, 0) for number in range(4_000)]


def test_writes_that_wait_for_each_other_bound_the_speed_whatever_the_gpus() -> None:
    write = cluster.Operation(serial_s=0.01)
    storage = cluster.StorageCosts("slow", report=write)
    result = simulate(64, storage=storage)
    assert result.wall_s >= 256 * 4 * 0.01
    assert result.limit == "queue at the storage"
    alone = simulate(1, storage=storage)
    assert alone.spent_s["queue at the storage"] == pytest.approx(0.0, abs=1e-6)


def test_heartbeats_load_the_storage_but_do_not_stop_a_worker_that_does_not_write() -> None:
    job = replace(JOB, trials=64, steps_per_epoch=100_000)
    beats = cluster.StorageCosts("beats", heartbeat=cluster.Operation(serial_s=0.1))
    result = simulate(4, job, storage=beats)
    assert result.wall_s == pytest.approx(simulate(4, job).wall_s)
    assert result.slowest_heartbeat_s == pytest.approx(4 * 4 * 0.1)


def test_a_read_costs_more_with_more_trials_under_way_and_none_where_nobody_prunes() -> None:
    storage = cluster.StorageCosts("reads", read_running=cluster.Operation(client_s=1e-3))
    few, many = (simulate(gpus, storage=storage).spent_s["storage"] for gpus in (2, 32))
    assert many > 5 * few
    seldom = replace(storage, read_every_s=1.0)
    assert simulate(32, storage=seldom).spent_s["storage"] < many / 4


def test_a_walk_forward_ends_with_its_last_share_and_the_merging() -> None:
    work = cluster.WalkForward(lanes=64, job=JOB, score_s=2.0, score_lane_s=0.1, merge_lane_s=0.01)
    costs = cluster.WorkerCosts(start_up_s=5.0)
    result = cluster.simulate_walk_forward(work, costs, gpus=16)
    assert result.wall_s == pytest.approx(5 + 4 * 4 * 100 / 1e3 + 2 + 4 * 0.1 + 64 * 0.01)
    uneven = cluster.simulate_walk_forward(work, costs, gpus=48)  # shares of two and of one
    assert uneven.spent_s["waiting for the last"] > 0


def test_every_measured_time_is_in_a_record_and_every_storage_has_its_costs() -> None:
    inputs = load("scale_inputs")
    for source in inputs.SOURCES.values():
        assert source.read() > 0
        assert (inputs.RECORDS / source.record / "record.toml").exists()
    model = inputs.load_model()
    assert model.costs.ask_finished_s > 0
    assert 0 < model.faults.speed_spread < 1
    for storage in model.storages.values():
        assert storage.report.client_s + storage.report.serial_s > 0
        assert storage.ask.client_s + storage.ask.serial_s > storage.report.serial_s
