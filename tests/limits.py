"""A process with little memory to take."""

from __future__ import annotations

import os
import traceback

import psutil
import pytest


def run_within(megabytes, work):
    """What `work` gives as text in a forked process that may take so much more memory."""
    resource = pytest.importorskip("resource", reason="this system limits no process")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of the parent's may run here but `work`
        try:
            limit = psutil.Process().memory_info().vms + megabytes * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            try:
                told = work()
            except BaseException:
                told = traceback.format_exc()
            os.write(writing, told.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told
