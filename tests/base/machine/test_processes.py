from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from slipstream.base import machine
from tests.conftest import HUNG_S

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"],
                         stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("groups", [True, False])
def test_a_killed_process_takes_its_children_along(groups, monkeypatch):
    """With process groups, and as on Windows, which has none."""
    if not groups:
        monkeypatch.delattr("os.killpg", raising=False)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        lines = {process.stdout.readline().strip() for _ in range(2)}
        child = psutil.Process(int((lines - {"up"}).pop()))
        machine.kill_process_group(process.pid)
        process.wait(HUNG_S)
        _, alive = psutil.wait_procs([child], timeout=HUNG_S)
        assert not alive
    machine.kill_process_group(process.pid)  # which is gone: nothing happens


def test_an_exit_is_described_by_its_signal_or_code_and_the_last_line():
    assert machine.describe_exit(-int(signal.SIGTERM), "") == "ended by SIGTERM"
    assert machine.describe_exit(3, "one\ntwo\n\n") == "ended with code 3: two"
