"""Workers that die: started again, given up, or taken over by another."""

from __future__ import annotations

import pytest

from slipstream import runs, training
from slipstream.errors import ResumableError
from slipstream.runs import Run
from slipstream.training.shares.pool import run_shares
from tests.training.shares.test_launcher import check_same, configured, train_here

BROKEN = {"PYTHONHOME": "/nowhere"}
"""Python does not start with it"""


def train_with(*envs):
    return lambda context, tasks, relay: run_shares(context.run, tasks, envs, relay)


def list_changes(folder):
    events = runs.read_events(Run(folder))
    return [(e["worker"], e["what"]) for e in events if e["event"] == "worker"]


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
