from __future__ import annotations

import time

import pytest

from slipstream.runs.folder import describe_origin, find_command


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/usr/bin/slipstream", "train", "a job.toml"], "slipstream train 'a job.toml'"),
        (["/src/slipstream/__main__.py", "train"], "slipstream train"),
        (["/usr/bin/pytest", "-x"], None),
        ([""], None),
        (
            ["slipstream", "tune", "--storage", "postgresql://me:secret@host/db"],
            "slipstream tune --storage 'postgresql://me:***@host/db'",
        ),
    ],
)
def test_a_command_is_repeated_without_passwords(argv, command):
    assert find_command(argv) == command


def test_results_within_a_second_have_other_times():
    times = set()
    for _ in range(20):
        times.add(describe_origin()["finished_at"])
        time.sleep(0.01)
    assert len(times) == 20
