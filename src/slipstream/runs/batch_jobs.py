"""The SLURM job that a process belongs to, and whether another job has ended."""

import os
import subprocess
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

ASK_EVERY_S = 10.0
"""Lists of runs look at every lock each time, and its controller serves the whole cluster"""
QUERY_LIMIT_S = 30.0
"""A controller that does not answer for so long is not waited for"""


def describe_job() -> dict[str, Any]:
    """Return the job of this process, and how often SLURM has started it again; empty outside of
    SLURM."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return {}
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return {
        "cluster": os.environ.get("SLURM_CLUSTER_NAME", ""),
        "job": job,
        "restarts": int(restarts) if restarts.isdecimal() else 0,
    }


def has_ended(job: Mapping[str, Any]) -> bool:
    """Whether a job, as `describe_job` returned it on some node, is known to be over: SLURM ends it
    before it starts it again."""
    own = describe_job()
    if not own or job.get("cluster") != own["cluster"]:
        return False
    if job.get("job") == own["job"]:
        return bool(int(job.get("restarts", 0)) < own["restarts"])
    now = int(time.monotonic() / ASK_EVERY_S)
    return str(job.get("job", "")).isdecimal() and is_gone(str(job["job"]), now)


@lru_cache(maxsize=1024)
def is_gone(job: str, _: int) -> bool:
    """Ask SLURM whether a job is neither waiting nor running; once in every period of time."""
    command = ["squeue", "--noheader", "--jobs", job]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    forgotten = answer.returncode != 0 and "Invalid job id" in answer.stderr
    return forgotten or (answer.returncode == 0 and not answer.stdout.strip())
