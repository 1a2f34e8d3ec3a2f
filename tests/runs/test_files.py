from __future__ import annotations

import os
import signal

import pytest

from slipstream import runs
from slipstream.runs import files


def killed_while_writing(path, *, folder=False):
    """A process that is killed when the temporary is there, and what it leaves."""
    child = os.fork()
    if not child:
        with runs.replace_atomically(path) as temporary:
            if folder:
                temporary.mkdir()
                (temporary / "half").touch()
            else:
                temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = path.parent.glob(".*")
    return left


def test_the_next_write_removes_what_a_killed_one_left(tmp_path):
    path = tmp_path / "a.json"
    left = killed_while_writing(path)
    assert left.exists()
    runs.write_json(path, {})
    assert list(tmp_path.iterdir()) == [path]


def test_taking_a_run_up_removes_what_a_killed_writer_left(tmp_path):
    run = runs.create_run("a", out=str(tmp_path), files={"config.toml": ""})
    run.checkpoints.mkdir()
    killed_while_writing(run.checkpoints / "step-7", folder=True)
    killed_while_writing(run.folder / "metrics.json")
    (run.checkpoints / f".step-5.{os.getpid()}.tmp").mkdir()  # as version 0.1 named them
    with runs.lock_run(run):
        assert {path.name for path in run.folder.iterdir()} == {
            "config.toml",
            "checkpoints",
            "lock.json",
        }
        assert list(run.checkpoints.iterdir()) == []


def test_a_folder_moved_aside_comes_back_when_the_writer_was_killed(tmp_path):
    run = runs.create_run("a", out=str(tmp_path), files={"config.toml": ""})
    run.model.mkdir()
    (run.model / "weights").touch()
    left = killed_while_writing(run.folder / "plan.json")
    pid = left.name.split(".")[-2]
    left.unlink()
    run.model.rename(run.folder / f".model.{pid}.old")
    with runs.lock_run(run):
        assert (run.model / "weights").exists()
        assert not list(run.folder.glob(".*"))


def test_what_a_living_writer_has_under_way_stays(tmp_path):
    path = tmp_path / "report.html"
    with runs.replace_atomically(path) as temporary:
        temporary.write_text("half")
        child = os.fork()
        if not child:
            files.recover_leftovers(tmp_path)
            os._exit(0)
        os.waitpid(child, 0)
        assert temporary.exists()
    assert path.read_text() == "half"


def test_another_machine_s_temporary_files_stay(tmp_path):
    theirs = tmp_path / ".a.json.0123abcd-999999999.tmp"
    theirs.touch()
    runs.write_json(tmp_path / "a.json", {})
    assert theirs.exists()


@pytest.mark.parametrize("name", ["a[1].json", "a*.json"])
def test_odd_names_are_written_and_cleaned_up_too(tmp_path, name):
    killed_while_writing(tmp_path / name)
    runs.write_json(tmp_path / name, {})
    assert [path.name for path in tmp_path.iterdir()] == [name]
