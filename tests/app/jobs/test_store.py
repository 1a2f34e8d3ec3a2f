"""Jobs as files: nothing starts twice, and what happened can be read."""

from __future__ import annotations

import json
import threading

import pytest

from slipstream.app.jobs import DeviceLock, JobStore, announce_server, choose_queue, has_server
from slipstream.base.errors import UserError


def submit(store, name="job", device="cpu"):
    job, _ = store.create_folder()
    store.submit(job, ["train"], device=device, name=name)
    return job


def test_jobs_of_a_device_are_taken_in_order(tmp_path):
    store = JobStore(tmp_path)
    jobs = [submit(store) for _ in range(3)]
    other = submit(store, device="cuda:0")
    assert [store.read(job).position for job in jobs] == [1, 2, 3]
    assert [store.take_next("cpu") for _ in range(4)] == [*jobs, None]
    assert store.take_next("cuda:0") == other


def test_jobs_of_one_second_are_listed_in_order_too(tmp_path):
    store = JobStore(tmp_path)
    jobs = [submit(store) for _ in range(20)]
    assert [job.id for job in store.list_recent()] == jobs[::-1]


def test_a_job_is_taken_once_by_many(tmp_path):
    store = JobStore(tmp_path)
    jobs = {submit(store) for _ in range(20)}
    taken, lock = [], threading.Lock()

    def work():
        while job := JobStore(tmp_path).take_next("cpu"):
            with lock:
                taken.append(job)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(jobs)


def test_a_job_moves_to_the_front(tmp_path):
    store = JobStore(tmp_path)
    first, second = submit(store), submit(store)
    store.move_first(second)
    assert [name for _, name in store.list_queue("cpu")] == [second, first]


def test_a_cancelled_job_is_not_taken_and_a_taken_one_not_cancelled(tmp_path):
    store = JobStore(tmp_path)
    job, other = submit(store), submit(store)
    assert store.cancel(job)
    assert store.read(job).state == "cancelled"
    assert store.take_next("cpu") == other
    assert not store.cancel(other)
    assert store.read(other).state == "running"


@pytest.mark.parametrize(
    ("code", "state"), [(0, "finished"), (143, "stopped"), (75, "stopped"), (2, "failed")]
)
def test_the_exit_code_says_how_a_job_ended(tmp_path, code, state):
    store = JobStore(tmp_path)
    job = submit(store)
    store.take_next("cpu")
    store.record_end(job, code)
    assert store.read(job).state == state


def test_the_message_of_a_failed_command_is_the_job_error(tmp_path):
    store = JobStore(tmp_path)
    job = submit(store)
    store.take_next("cpu")
    (store.jobs / job / "output.json").write_text(json.dumps({"error": "data.path: no"}))
    store.record_end(job, 2)
    assert store.read(job).error == "data.path: no"


def test_a_job_whose_process_is_gone_was_killed(tmp_path):
    store = JobStore(tmp_path)
    job = submit(store)
    store.take_next("cpu")
    claim = store.jobs / job / "claim.json"
    holder = json.loads(claim.read_text())
    claim.write_text(json.dumps(holder | {"since": holder["since"] - 100}))  # the pid of another
    assert store.read(job).state == "killed"
    assert store.read(job).error


@pytest.mark.parametrize("name", ["../x", ".", "..", "a/b", "nothing", ""])
def test_no_other_folder_is_read_as_a_job(tmp_path, name):
    with pytest.raises(UserError):
        JobStore(tmp_path).read(name)


def test_damaged_files_of_jobs_are_survived(tmp_path):
    store = JobStore(tmp_path)
    job = submit(store)
    (store.jobs / job / "claim.json").write_text("{")
    assert store.read(job).state == "queued"
    (store.jobs / "empty").mkdir()
    assert [one.id for one in store.list_recent()] == [job]


def test_a_device_is_used_by_one_at_a_time(tmp_path):
    one, other = (DeviceLock(tmp_path, "cpu", "use") for _ in range(2))
    assert one.acquire()
    assert not other.acquire()
    one.release()
    assert other.is_free()


def test_a_server_is_known_while_it_lives(tmp_path):
    assert not has_server(tmp_path)
    path = announce_server(tmp_path)
    assert has_server(tmp_path)
    holder = json.loads(path.read_text())
    path.write_text(json.dumps(holder | {"pid": 2**31 - 1}))  # beyond those that are given
    assert not has_server(tmp_path)


def test_each_device_has_a_queue():
    assert choose_queue("cuda") == "cuda:0"
    assert choose_queue("cuda:1") == "cuda:1"
    assert choose_queue("cpu") == "cpu"
    assert choose_queue("auto") in ("cpu", "cuda:0")
