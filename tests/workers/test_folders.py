"""Folders of workers that the caller does not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import runs
from slipstream.runs import Run
from slipstream.workers import ray
from slipstream.workers.ray import FolderSender, copy_folder, place_probe, write_files


def read_tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write_tree(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_only_changes_are_sent_and_the_copy_equals_the_folder(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    write_tree(source, log="1", checkpoints__one__state="a", lock="free")
    (source / "lock.json").write_text("held")
    (source / ".log.tmp").write_text("half")
    sender = FolderSender(source)
    write_files(target, sender.collect())
    assert read_tree(target) == {"log": "1", "checkpoints/one/state": "a", "lock": "free"}
    assert sender.collect() is None
    (source / "checkpoints/one/state").unlink()
    (source / "checkpoints/one").rmdir()
    write_tree(source, log="12", checkpoints__two__state="b")
    changed = sender.collect()
    assert set(changed.contents) == {"log", "checkpoints/two/state"}
    write_files(target, changed)
    assert read_tree(target) == {"log": "12", "checkpoints/two/state": "b", "lock": "free"}
    assert not (target / "checkpoints/one").exists()


def test_a_worker_starts_from_the_files_and_sends_what_it_wrote_even_if_it_fails(tmp_path):
    write_tree(tmp_path / "caller", log="1", old="x")
    files = FolderSender(tmp_path / "caller").collect()
    sent: list[ray.FolderFiles] = []

    def work() -> None:
        with copy_folder(files, sent.append) as local:
            assert read_tree(local) == {"log": "1", "old": "x"}
            (local / "log").write_text("12")
            (local / "old").unlink()
            used.append(local)
            raise ZeroDivisionError

    used: list[Path] = []
    with pytest.raises(ZeroDivisionError):
        work()
    assert not used[0].exists()
    (one,) = sent
    assert one.contents == {"log": b"12"}
    write_files(tmp_path / "caller", one)
    assert read_tree(tmp_path / "caller") == {"log": "12"}


def test_files_travel_while_the_worker_runs_and_again_if_a_transfer_failed(monkeypatch):
    monkeypatch.setattr(ray, "SEND_EVERY_S", (0.01, 0.01))
    sent: list[ray.FolderFiles] = []
    failures = [ConnectionError("lost")]

    def send(new: ray.FolderFiles) -> None:
        if failures:
            raise failures.pop()
        sent.append(new)

    with copy_folder(None, send) as local:
        (local / "log").write_text("1")
        while not sent:
            pass
    assert sent[0].contents == {"log": b"1"}


def test_a_probe_is_seen_only_with_the_right_text(tmp_path):
    with place_probe(tmp_path / "workers") as probe:
        assert probe.is_visible()
        Path(probe.path).write_text("of another caller")
        assert not probe.is_visible()
    assert not probe.is_visible()
    assert not Path(probe.path).exists()


def test_locks_of_ended_workers_are_removed_and_those_of_living_ones_left(tmp_path):
    write_tree(tmp_path, **{"0__lock.json": '{"host": "another", "pid": 1}', "log": "1"})
    write_tree(tmp_path, **{"0__packs__0__lock.json": "{}"})
    (tmp_path / "1").mkdir()
    with runs.lock_run(Run(tmp_path / "1")):
        ray.release_locks(tmp_path)
        assert set(read_tree(tmp_path)) == {"log", "1/lock.json"}
        ray.release_locks(tmp_path, died=True)
        assert set(read_tree(tmp_path)) == {"log"}
