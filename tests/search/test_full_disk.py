"""A search on a disk that fills up: it ends as one that goes on, however full the disk was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import ResumableError
from slipstream.cli.commands import app
from slipstream.search import database
from tests.conftest import slow
from tests.search.searches import make_settings
from tests.soak import forked, waited

SIZE = 32 << 20
LEVELS = (slow(16), slow(64), slow(280))
"""KiB that are free when a search begins"""


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no disk of a certain size can be mounted here; Linux's root can")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # files may be open


def leave(disk, free):
    """Fill the disk until so many bytes are free."""
    there = os.statvfs(disk)
    (disk / "ballast").write_bytes(b"x" * (there.f_bavail * there.f_frsize - free))


def command(*arguments):
    """Start `slipstream tune` in a process of its own."""

    def call():
        sys.stdout, sys.stderr = (os.fdopen(one, "w", buffering=1) for one in (1, 2))
        os._exit(app(["tune", *arguments, "--quiet"], standalone_mode=False) or 0)

    return call


@pytest.mark.parametrize("level", LEVELS)
def test_a_search_on_a_full_disk_goes_on_when_there_is_room(tmp_path, disk, level):
    log, path = tmp_path / "log.txt", tmp_path / "job.toml"
    tune = {"trials": 2, "retrain": 1, "retrain_seeds": 2, "parallel": 1}
    # a forked process has none of the threads that torch began in this one, and waits for them
    settings = make_settings(tmp_path, tune=tune, train={"epochs": 1}, engine={"threads": 1})
    settings["out"] = str(disk)
    path.write_text(configs.to_toml(configs.load(settings)))
    leave(disk, 1024 * level)
    code = waited(forked(command(str(path)), log))
    told = log.read_text()
    assert "Traceback" not in told, told
    found = [path.parent for path in disk.glob("*/config.toml")]
    assert code in (0, 75) or not found, told
    (disk / "ballast").unlink()
    if code == 0 or not found:
        return
    if "report cannot be written" not in told:
        assert f"resume with: slipstream tune --resume {found[0]}" in told, told
    code = waited(forked(command("--resume", str(found[0])), log))
    assert code == 0, log.read_text()
    assert runs.read_json(found[0] / "metrics.json")["trials"]["finished"] == 2
    assert (found[0] / "report.html").exists()


def test_a_database_that_finds_no_room_is_told_as_resumable(disk):
    leave(disk, 20 << 10)
    with pytest.raises(ResumableError, match="disk is full; free some space"):
        database.open_storage(database.make_run_database_url(disk))
