from __future__ import annotations

import errno
import json
import multiprocessing
import os
import platform
import signal
import threading
import time

import psutil
import pytest

from slipstream import UserError, runs
from slipstream.runs import lock

PAIRS = 300
STALE = json.dumps({"host": platform.node(), "pid": 999_999_999, "since": 1.0})


def take_together(folders):
    """Two processes take each folder's lock at the same moment; how often both held one."""
    fork = multiprocessing.get_context("fork")
    barrier, overlaps = fork.Barrier(2), fork.Value("i", 0)

    def take_all():
        for folder in folders:
            barrier.wait()
            if hold_once(runs.Run(folder)) == "overlap":
                with overlaps.get_lock():
                    overlaps.value += 1

    pair = [fork.Process(target=take_all) for _ in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
        assert process.exitcode == 0
    return overlaps.value


def hold_once(run):
    inside = run.folder / "inside"
    try:
        with runs.lock_run(run):
            try:
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return "overlap"
            time.sleep(0.002)
            inside.unlink(missing_ok=True)
            return "held"
    except UserError:
        return "refused"


@pytest.mark.slow
@pytest.mark.parametrize("left", [None, "", STALE], ids=["no lock", "an empty one", "a stale one"])
def test_of_two_simultaneous_takers_one_holds_the_lock_at_a_time(tmp_path, left):
    folders = [tmp_path / str(number) for number in range(PAIRS)]
    for folder in folders:
        folder.mkdir()
        if left is not None:
            (folder / "lock.json").write_text(left)
    assert take_together(folders) == 0
    assert [path for folder in folders for path in folder.iterdir()] == []


def test_two_threads_of_one_process_exclude_each_other(tmp_path):
    run, outcomes = runs.Run(tmp_path), []

    def take():
        try:
            with runs.lock_run(run):
                outcomes.append("held")
        except UserError as error:
            outcomes.append(str(error))

    with runs.lock_run(run):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    assert outcomes == [f"{tmp_path}: process {os.getpid()} on this machine is writing to this run"]


def test_a_forked_worker_that_outlives_its_parent_holds_nothing(tmp_path):
    run = runs.Run(tmp_path)
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        with runs.lock_run(run):
            worker = os.fork()
            if not worker:
                signal.pause()
            os.write(write, str(worker).encode())
            signal.pause()
    worker = int(os.read(read, 20))
    try:
        with (
            pytest.raises(UserError, match=f"process {parent} on this machine"),
            runs.lock_run(run),
        ):
            pass
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert psutil.pid_exists(worker)
        with runs.lock_run(run):
            assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_worker_that_ends_first_leaves_its_parent_the_lock(tmp_path):
    run = runs.Run(tmp_path)
    with runs.lock_run(run):
        worker = os.fork()
        if not worker:
            try:
                raise SystemExit
            finally:
                os._exit(0)
        os.waitpid(worker, 0)
        with pytest.raises(UserError, match="is writing to this run"), runs.lock_run(run):
            pass


def test_a_worker_that_leaves_the_block_in_its_copy_does_not_give_the_lock_back(tmp_path):
    run = runs.Run(tmp_path)
    mine = os.getpid()
    try:
        with runs.lock_run(run):
            worker = os.fork()
            if worker:
                os.waitpid(worker, 0)
                assert (tmp_path / "lock.json").exists()
    finally:
        if os.getpid() != mine:
            os._exit(0)


def test_a_living_process_of_version_0_1_is_respected(tmp_path):
    process = psutil.Process()
    old = {"host": platform.node(), "pid": process.pid, "since": process.create_time()}
    (tmp_path / "lock.json").write_text(json.dumps(old))
    told = f"process {process.pid} on this machine is writing to this run"
    with pytest.raises(UserError, match=told), runs.lock_run(runs.Run(tmp_path)):
        pass


def test_a_killed_holder_whose_number_went_to_a_living_process_is_replaced(tmp_path):
    process = psutil.Process()
    dead = {"host": platform.node(), "pid": process.pid, "since": process.create_time()}
    (tmp_path / "lock.json").write_text(json.dumps(dead | {"by": "flock"}))
    with runs.lock_run(runs.Run(tmp_path)):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_file_locks_a_file_that_one_can_create_is_the_lock(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    fcntl = pytest.importorskip("fcntl", reason="this system locks otherwise")
    monkeypatch.setattr(fcntl, "flock", refuse)
    run = runs.Run(tmp_path)
    with runs.lock_run(run):
        told = rf"process {os.getpid()} on .* holds this run; if it has ended, remove .*lock.held"
        with pytest.raises(UserError, match=told), runs.lock_run(run):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def in_slurm(tmp_path, monkeypatch):
    """Puts this process into a SLURM job, whose `squeue` gives this answer."""

    def enter(job, restarts, answer="exit 1"):
        lock.is_gone.cache_clear()
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "lab")
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "bin" / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    return enter


def leave_lock(tmp_path, name="lock.json", **job):
    """Write the lock of a killed process on another machine; return its run."""
    folder = tmp_path / "run"
    folder.mkdir()
    slurm = {"cluster": "lab", "job": "7", "restarts": 0} | job
    holder = {"host": "node-of-before", "pid": 12, "since": 1.0, "by": "flock", "slurm": slurm}
    (folder / name).write_text(json.dumps(holder))
    return runs.Run(folder)


@pytest.mark.parametrize("name", ["lock.json", "lock.held"])
@pytest.mark.parametrize(
    ("job", "restarts", "answer", "is_over"),
    [
        ("7", "1", "exit 1", True),  # started again
        ("7", "0", "exit 1", False),  # another step of the same start
        ("8", "0", "exit 0", True),  # ended a moment ago
        ("8", "0", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", True),
        ("8", "0", "echo 7 main job me R 1:00 1 node-of-before", False),
        ("8", "0", "echo Unable to contact slurm controller >&2; exit 1", False),
    ],
)
def test_a_killed_holder_on_another_machine_is_replaced_where_slurm_knows_it_is_over(
    tmp_path, monkeypatch, in_slurm, name, job, restarts, answer, is_over
):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    if name == "lock.held":
        monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse)
    run = leave_lock(tmp_path, name)
    in_slurm(job, restarts, answer)
    if is_over:
        with runs.lock_run(run):
            holder = json.loads((run.folder / name).read_text())
        assert holder["slurm"] == {"cluster": "lab", "job": job, "restarts": int(restarts)}
        assert list(run.folder.iterdir()) == []
        return
    told = r"process 12 on node-of-before \(SLURM job 7\) holds this run; if it has ended, remove"
    with pytest.raises(UserError, match=told), runs.lock_run(run):
        pass


def test_a_job_of_another_cluster_or_outside_of_slurm_is_not_over(tmp_path, monkeypatch, in_slurm):
    run = leave_lock(tmp_path, cluster="other")
    in_slurm("7", "1", "exit 0")
    with pytest.raises(UserError, match="holds this run"), runs.lock_run(run):
        pass
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(UserError, match="holds this run"), runs.lock_run(run):
        pass


def test_slurm_is_not_asked_again_at_every_look_at_a_lock(tmp_path, monkeypatch, in_slurm):
    monkeypatch.setattr(lock, "ASK_EVERY_S", 1e9)
    run, calls = leave_lock(tmp_path), tmp_path / "calls"
    in_slurm("8", "0", f"echo asked >> {calls}; echo 7 main job me R 1:00 1 node-of-before")
    assert all(runs.find_holder(run.folder) for _ in range(5))
    assert calls.read_text() == "asked\n"


def test_a_lock_that_a_file_server_has_not_released_yet_is_waited_for(
    tmp_path, monkeypatch, in_slurm
):
    fcntl = pytest.importorskip("fcntl")
    run, waits = leave_lock(tmp_path), []
    in_slurm("7", "1")
    held = os.open(run.folder / "lock.json", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)

    def release(seconds):
        waits.append(seconds)
        os.close(held)

    monkeypatch.setattr(time, "sleep", release)
    with runs.lock_run(run):
        assert len(waits) == 1


def test_a_lock_on_a_folder_that_is_gone_names_the_folder(tmp_path):
    gone = tmp_path / "gone"
    with (
        pytest.raises(UserError, match=f"{gone}: cannot be written to"),
        runs.lock_run(runs.Run(gone)),
    ):
        pass
