"""Workers that die: started again, given up, or taken over by another."""

from __future__ import annotations

import tempfile

import pytest

from slipstream import runs, training
from slipstream.base.errors import ResumableError
from slipstream.runs import Run
from slipstream.training.shares import run_local_shares
from tests.logs import read_lines
from tests.test_full_disk import make_room, small_disk
from tests.training.shares.test_launcher import check_same, configured, train_here

BROKEN = {"PYTHONHOME": "/nowhere"}
"""Python does not start with it"""


def train_with(*envs):
    return lambda context, tasks, relay: run_local_shares(context.run, tasks, envs, relay)


def list_changes(folder):
    events = read_lines(Run(folder))
    return [(e["worker"], e["what"]) for e in events if e["event"] == "worker"]


@pytest.mark.slow
def test_the_run_can_be_resumed_where_every_worker_dies(tmp_path):
    config = configured(tmp_path, train={"repeats": 2})
    with pytest.raises(ResumableError, match=r"every worker died .*resume with: slipstream train"):
        train_here(config, train_tasks=train_with(BROKEN, BROKEN))
    folder = runs.find_last(config.out)
    changes = list_changes(folder)
    assert changes.count((0, "died")) == changes.count((1, "died")) == 3
    finished = training.train(resume=folder, workers=1)
    check_same(finished.run, training.train(config).run)


@pytest.mark.slow
def test_another_worker_takes_over_what_one_that_dies_leaves(tmp_path):
    config = configured(tmp_path, train={"repeats": 4})
    finished = train_here(config, train_tasks=train_with({}, BROKEN))
    changes = list_changes(finished.run)
    assert changes.count((1, "died")) == 3
    assert changes[-1] == (0, "took over")
    check_same(finished.run, training.train(config).run)


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [28, 64, 160])
def test_workers_on_a_full_disk_end_resumable_and_go_on(tmp_path, monkeypatch, kilobytes):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for a model that finds no room
    config = configured(tmp_path, train={"repeats": 3})
    with small_disk(tmp_path / "disk", kilobytes) as disk:
        on_disk = config.model_copy(update={"out": str(disk)})
        with pytest.raises(ResumableError, match="make room and resume with: slipstream train"):
            training.train(on_disk, workers=2)
        folder = runs.find_last(str(disk))
        make_room(disk)
        finished = training.train(resume=folder)
        assert finished.summary["workers"] == 2
        check_same(folder, training.train(config).run)
        assert not list(folder.rglob(".*"))
