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


def test_a_lock_on_a_folder_that_is_gone_names_the_folder(tmp_path):
    gone = tmp_path / "gone"
    with (
        pytest.raises(UserError, match=f"{gone}: cannot be written to"),
        runs.lock_run(runs.Run(gone)),
    ):
        pass
