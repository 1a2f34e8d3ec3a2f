"""A real SLURM of one node on this machine: munged, slurmctld and slurmd in a temporary folder."""

from __future__ import annotations

import getpass
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
WAIT_S = 300.0
SETTINGS = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={home}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000
PartitionName=low Nodes={host} Default=YES PriorityTier=1 State=UP
PartitionName=high Nodes={host} PriorityTier=10 State=UP
"""
"""Neither privileges nor cgroups are needed; the node claims eight cores, whatever it has"""


class Slurm:
    """The commands of a cluster."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = os.environ | {
            "SLURM_CONF": str(home / "slurm.conf"),
            "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}:/usr/sbin",
        }
        """With a `slipstream` that is the one under test"""

    def call(self, *words: object, cwd: Path | None = None, **variables: str) -> str:
        """Run a command; return what it prints."""
        command = [str(word) for word in words]
        done = subprocess.run(
            command, cwd=cwd, env=self.env | variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """Return what SLURM knows of a job."""
        text = self.call("scontrol", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in a state; one that waits after a requeue begins at once."""

        def look() -> dict[str, str] | None:
            shown = self.show(job)
            waits = shown["JobState"] == "PENDING" and shown["Reason"] == "BeginTime"
            if waits and "PENDING" not in states:
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now")
            return shown if shown["JobState"] in states else None

        return wait_until(look, f"{job}: {states}")


def wait_until(look: Callable[[], T | None], what: str) -> T:
    """Return what a function returns once that is something."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if found := look():
            return found
        time.sleep(0.2)
    raise TimeoutError(what)


@contextmanager
def start_slurm() -> Iterator[Slurm]:
    """Start a cluster, and end it."""
    home = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short name, for the socket
    home.chmod(0o711)
    slurm, processes = Slurm(home), []
    (home / "munge.key").write_bytes(secrets.token_bytes(1024))
    (home / "munge.key").chmod(0o400)
    (home / "state").mkdir()
    (home / "bin").mkdir()
    (home / "bin" / "slipstream").write_text(f'#!/bin/sh\nexec {sys.executable} -m slipstream "$@"')
    (home / "bin" / "slipstream").chmod(0o755)
    host, ports = platform.node().partition(".")[0], _find_ports(2)
    text = SETTINGS.format(home=home, host=host, ports=ports, user=getpass.getuser())
    (home / "slurm.conf").write_text(text)
    (home / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
    files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    munge = [f"--{name}={home / file}" for name, file in files.items()]
    try:
        for command in (["munged", "-F", "--force", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (home / f"{command[0]}.out").open("wb") as output:
                processes.append(
                    subprocess.Popen(command, env=slurm.env, stdout=output, stderr=output)
                )
            if command[0] == "munged":
                wait_until((home / "munge.socket").exists, "munged")
        wait_until(lambda: _is_ready(slurm), "slurmctld and slurmd")
        yield slurm
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(30)
        shutil.rmtree(home, ignore_errors=True)


def _is_ready(slurm: Slurm) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"],
        env=slurm.env,
        capture_output=True,
        text=True,
        check=False,
    )
    return "idle" in done.stdout


def _find_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
