"""Damaged files of every format end no process, and are refused with their name."""

from __future__ import annotations

import subprocess
import sys

import pytest


def damage(count, seed):
    command = [sys.executable, "-m", "tests.data.damaged", str(count), str(seed)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.returncode}: {ended.stdout}\n{ended.stderr}"


@pytest.mark.slow
def test_damaged_files_are_read_or_refused():
    damage(40, 0)


@pytest.mark.slow
def test_many_damaged_files_are_read_or_refused():
    damage(1500, 1)
