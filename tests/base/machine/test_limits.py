"""What a process may use, which a container makes less than the machine has."""

from __future__ import annotations

import os

import psutil
import pytest

from slipstream.base import machine


@pytest.fixture
def cgroup(tmp_path):
    """Writes the files of a control group and gives where they are."""

    def make(files, membership="0::/\n"):
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "membership").write_text(membership)
        return machine.Cgroup(tmp_path / "cgroup", tmp_path / "membership")

    return make


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({"cpu.max": "400000 100000"}, "0::/\n", 4),
        ({"cpu.max": "150000 100000"}, "0::/\n", 2),
        ({"cpu.max": "20000 100000"}, "0::/\n", 1),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, "0::/a/b\n", 3),
        (
            {"cpu/x/cpu.cfs_quota_us": "250000", "cpu/x/cpu.cfs_period_us": "100000"},
            "2:cpu,cpuacct:/x\n",
            3,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "2:cpu:/\n", None),
        ({}, "", None),
    ],
)
def test_a_quota_of_cpu_time_is_whole_cores_rounded_up(
    cgroup, monkeypatch, files, membership, quota
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert machine.count_visible_cores() == 64
    assert machine.count_available_cores(cgroup(files, membership)) == (quota or 64)


def test_no_more_cores_than_the_process_may_run_on(cgroup, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert machine.count_available_cores(cgroup({"cpu.max": "900000 100000"})) == 2


@pytest.mark.parametrize(
    ("variables", "cores"),
    [
        ({"SLURM_CPUS_PER_TASK": "4", "SLURM_CPUS_ON_NODE": "16"}, 4),
        ({"SLURM_CPUS_ON_NODE": "16"}, 16),
        ({"SLURM_CPUS_PER_TASK": "999"}, 64),
        ({"SLURM_CPUS_PER_TASK": "many"}, 64),
    ],
)
def test_no_more_cores_than_slurm_has_allocated(cgroup, monkeypatch, variables, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert machine.count_available_cores(cgroup({})) == cores


def test_memory_is_what_the_innermost_limit_leaves(cgroup):
    files = {
        "a/memory.max": "4000000",
        "a/memory.current": "3000000",
        "a/memory.stat": "anon 1\ninactive_file 500000\n",
        "a/b/memory.max": "max",
        "a/b/memory.current": "100",
        "memory.max": "9000000",
        "memory.current": "8500000",
    }
    group = cgroup(files, "0::/a/b\n")
    assert machine.get_total_memory(group) == 4_000_000
    assert machine.get_available_memory(group) == 500_000  # the outer one leaves less


def test_without_limits_memory_is_the_machines(cgroup):
    group = cgroup({"memory.max": "max", "memory.current": "5"})
    assert machine.get_total_memory(group) == psutil.virtual_memory().total
    assert machine.get_available_memory(group) <= psutil.virtual_memory().total
    beyond = cgroup({"memory.max": str(2**59), "memory.current": "5"})
    assert machine.get_total_memory(beyond) == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "membership", "quota", "limit"),
    [
        (
            {"cpu.max": "150000 100000", "memory.max": "8000", "memory.current": "5000"},
            "0::/\n",
            1.5,
            (8000, 5000),
        ),
        (
            {
                "a/cpu.max": "max 100000",
                "cpu.max": "200000 100000",
                "a/memory.max": "8000",
                "a/memory.current": "5000",
                "a/memory.stat": "anon 1\ninactive_file 3000\n",
            },
            "0::/a/b\n",
            2.0,
            (8000, 2000),
        ),
        (
            {
                "cpu/x/cpu.cfs_quota_us": "50000",
                "cpu/x/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9000",
                "memory/memory.usage_in_bytes": "1000",
            },
            "4:memory:/elsewhere\n2:cpu,cpuacct:/x\n0::/\n",
            0.5,
            (9000, 1000),
        ),
        (
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "1000",
            },
            "4:memory:/\n2:cpu:/\n",
            None,
            None,
        ),
        ({"memory.max": "max", "memory.current": "5000"}, "0::/\n", None, None),
        ({}, "", None, None),
    ],
)
def test_limits_of_a_container_are_found(files, membership, quota, limit, cgroup):
    group = cgroup(files, membership)
    assert list(machine.read_cpu_quotas(group)) == ([] if quota is None else [quota])
    assert list(machine.read_memory_limits(group)) == ([] if limit is None else [limit])
