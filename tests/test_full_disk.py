"""Disks that fill up at every point of a run: each ends resumable, and the resume is accepted."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import contextmanager

import pyarrow.parquet
import pytest

import slipstream
from slipstream import config as configs
from slipstream import runs
from slipstream.cli.commands import app
from tests.conftest import mostly_slow, slow, waves
from tests.soak import forked, waited
from tests.training.test_resume import configured

JOBS = {"one model": {"epochs": 3}, "repeats": {"repeats": 3, "epochs": 3}}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Where a model goes that its own folder does not take."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def small_disk(folder, kilobytes):
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here; Linux's root can")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def make_room(folder):
    subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)


@pytest.mark.parametrize("job", mostly_slow(JOBS, "one model"))
@pytest.mark.parametrize("kilobytes", [slow(8), 24, slow(64), slow(120)])
def test_a_full_disk_ends_resumable_and_the_resume_is_accepted(tmp_path, job, kilobytes):
    table, log = waves(400), tmp_path / "log.txt"
    with small_disk(tmp_path / "disk", kilobytes) as disk:
        config = configured(disk, train=JOBS[job])
        assert waited(forked(lambda: slipstream.train(config, table), log)) == 75, log.read_text()
        assert "make room and resume with: slipstream.train(resume=" in log.read_text()
        make_room(disk)
        run = runs.open_run(runs.find_last(str(disk)))
        code = waited(forked(lambda: slipstream.train(data=table, resume=run.folder), log))
        assert code == 0, log.read_text()
        assert runs.read_metrics(run.folder)["metrics"]
        assert not list(run.folder.rglob(".*"))


def test_a_disk_without_room_for_a_folder_says_to_start_again(tmp_path):
    log = tmp_path / "log.txt"
    with small_disk(tmp_path / "disk", 4) as disk:
        config = configured(disk / "runs")
        assert waited(forked(lambda: slipstream.train(config, waves(400)), log)) == 75
        assert "make room and start again" in log.read_text()
        assert not list(disk.glob("runs/*"))


@pytest.mark.slow
def test_room_for_the_run_but_not_for_its_report(tmp_path):
    path, job, log = tmp_path / "data.parquet", tmp_path / "job.toml", tmp_path / "log.txt"

    pyarrow.parquet.write_table(waves(400), path)

    def run_command(*arguments):
        sys.stderr = sys.__stderr__  # the log's, not pytest's
        code = app([*map(str, arguments)], standalone_mode=False)
        if code:
            raise SystemExit(code)

    with small_disk(tmp_path / "disk", 260) as disk:
        made = configured(disk, data={"path": str(path)}, train={"epochs": 3})
        job.write_text(configs.to_toml(made))
        code = waited(forked(lambda: run_command("train", job, "--quiet"), log))
        assert code == 75, log.read_text()
        told = log.read_text()
        assert "Traceback" not in told
        folder = runs.find_last(str(disk))
        assert f"make room and draw it again: slipstream report {folder}" in told
        make_room(disk)
        assert waited(forked(lambda: run_command("report", folder), log)) == 0
        assert (folder / "report.html").exists()
