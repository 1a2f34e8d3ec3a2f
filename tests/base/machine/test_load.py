from __future__ import annotations

import pytest

from slipstream.base.machine import CpuLoad, CpuUsage, compute_load, read_cpu_usage


@pytest.mark.parametrize(
    ("others", "cores", "available", "threads", "busy"),
    [
        (0.0, 2, 2, 2, False),
        (0.4, 2, 2, 2, False),  # less than half a core is no load
        (1.9, 2, 2, 2, True),
        (1.0, 2, 2, 1, False),  # one thread has a core for itself
        (1.9, 2, 2, 1, True),
        (20.0, 64, 2, 2, False),  # a container of two cores on a large machine
        (64.0, 64, 2, 2, True),
    ],
)
def test_threads_that_share_cores_with_others_make_a_machine_busy(
    others, cores, available, threads, busy
):
    assert CpuLoad(others, cores, available).is_busy_for(threads) is busy


def test_the_load_is_what_others_used():
    start = CpuUsage(10.0, 100.0, 30.0)
    load = compute_load(start, CpuUsage(12.0, 103.0, 31.0))
    assert load.others == pytest.approx(1.0)
    assert compute_load(start, CpuUsage(12.0, 101.0, 31.5)).others == 0  # ticks are coarse
    assert compute_load(start, CpuUsage(10.05, 101.0, 30.0)) is None


def test_the_load_is_named_with_the_cores():
    assert CpuLoad(1.94, 2, 2).describe() == "other processes use 1.9 of 2 cores"
    assert CpuLoad(1.0, 1, 1).describe() == "other processes use 1.0 of 1 core"


def test_our_own_time_is_part_of_all_time():
    before = read_cpu_usage()
    sum(range(3_000_000))
    after = read_cpu_usage()
    assert after.own_s >= before.own_s
    assert after.all_s >= before.all_s
    assert after.at_s > before.at_s
