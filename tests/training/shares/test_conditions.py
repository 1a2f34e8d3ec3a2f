"""Shares under the conditions of real runs: disks and memory that run out, limits of time, measured
batches, streams, more epochs. Each ends as in one process."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from dataclasses import replace

import pyarrow.csv
import pyarrow.parquet
import pytest

from slipstream import Interrupted, UserError, runs, training
from slipstream import config as configs
from slipstream.base.errors import ResumableError
from slipstream.engine import loop
from slipstream.engine.lanes import OUT_OF_TIME
from slipstream.events import Epoch, Log
from slipstream.runs import Run
from slipstream.training.request import TrainRequest
from slipstream.training.resuming import load_resumed
from slipstream.training.run import train_run
from slipstream.training.shares import train_share
from tests.conftest import merged, slow, waves
from tests.labelled import CLASSIFY, states
from tests.limits import CrowdedDevice, allocate_lanes
from tests.logs import read_lines
from tests.training.shares.test_launcher import (
    FOLDS,
    check_same,
    configured,
    in_this_process,
    train_here,
)

WALK = merged({"train": {"repeats": 2}}, FOLDS)


def resume_here(folder, *, overrides=(), workers=None):
    """Resume a run, its shares without processes."""
    request = TrainRequest(None, None, overrides=overrides, resume=folder, workers=workers)
    run = request.open_run()
    with runs.lock_run(run):
        return train_run(load_resumed(run, request), train_tasks=in_this_process)


def list_events(folder, kind):
    return [event for event in read_lines(Run(folder)) if event["event"] == kind]


def block_checkpoints(share):
    """Have the checkpoints of a share fail to be written."""

    def train_tasks(context, tasks, relay):
        blocked = context.run.folder / "workers" / str(share) / "checkpoints"
        blocked.write_text("")
        in_this_process(context, tasks, relay)

    return train_tasks


@pytest.mark.slow
def test_a_share_that_cannot_save_ends_resumable(tmp_path):
    config = configured(tmp_path, **WALK)
    with pytest.raises(ResumableError, match=r"the run had to stop: .*File exists: .*checkpoints"):
        train_here(config, train_tasks=block_checkpoints(1))
    folder = runs.find_last(config.out)
    (folder / "workers" / "1" / "checkpoints").unlink()
    finished = resume_here(folder, workers=2)
    check_same(finished.run, training.train(config).run)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [4, slow(2)])
def test_uneven_shares_of_folds_and_repeats(tmp_path, num_workers):
    config = configured(tmp_path, **merged(WALK, {"train": {"repeats": 3}}))
    spread = train_here(config, num_workers)
    (start,) = list_events(spread.run, "start")
    assert (start["pack"]["places"], start["pack"]["lanes"]) == (9, 9)
    # folds end their epochs at different steps, where losses are logged too
    check_same(spread.run, training.train(config).run, kinds=("epoch", "lane"))


@pytest.mark.slow
def test_classes(tmp_path):
    path = tmp_path / "states.csv"
    pyarrow.csv.write_csv(states(900), path)
    sections = merged(CLASSIFY, {"data": {"path": str(path)}, "train": {"repeats": 3, "epochs": 3}})
    config = configured(tmp_path, **sections)
    check_same(train_here(config).run, training.train(config).run)


@pytest.mark.slow
def test_a_streamed_series(tmp_path):
    path = tmp_path / "waves.parquet"
    pyarrow.parquet.write_table(waves(900), path, row_group_size=100)
    engine = {"home": "stream", "workers": 0, "buffer_rows": 300}
    sections = {"data": {"path": str(path)}, "engine": engine, "train": {"repeats": 3, "epochs": 2}}
    config = configured(tmp_path, **sections)
    check_same(train_here(config).run, training.train(config).run)


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", ["set-up", "step"])
def test_memory_that_runs_out_in_one_share(tmp_path, fails_at):
    config = configured(tmp_path, **merged(WALK, {"train": {"repeats": 3}}))
    one = training.train(config)
    # one share has four lanes, the other five
    device = allocate_lanes(holds=4) if fails_at == "set-up" else CrowdedDevice(holds=4)
    with device:
        spread = train_here(config)
    check_same(spread.run, one.run, kinds=("epoch", "lane"))
    (recovery,) = list_events(spread.run, "recovery")
    assert "3 lanes at a time" in recovery["remedy"]
    shares = runs.read_json(spread.run / "plan.json")["pack"]["shares"]
    assert [share["places"] for share in shares] == [4, 3]


class Clock:
    """A second passes for each look at the losses."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(loop.time, "perf_counter", lambda: self.now)

    def train(self, _, tasks, relay):
        """Train one share after another, each from the start of the clock."""
        for task in tasks:
            self.now = 0.0

            def add(event, index=task.index):
                self.now += isinstance(event, Log)
                relay.add(index, event)

            train_share(task, add)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, slow(1), slow(2)])
def test_out_of_time_goes_on_with_any_number_of_workers(tmp_path, monkeypatch, workers):
    sections = merged(WALK, {"train": {"schedule": "step"}})
    one = training.train(configured(tmp_path, **sections))
    limited = configured(tmp_path, **merged(sections, {"train": {"minutes": 4.5 / 60}}))
    with monkeypatch.context() as patch:
        cut = train_here(limited, train_tasks=Clock(patch).train)
    lanes = cut.summary["lanes"]
    assert [lane["stopped"] for lane in lanes] == [OUT_OF_TIME] * 6
    assert cut.summary["stopped"] == OUT_OF_TIME
    again = resume_here(cut.run, overrides=("train.minutes=60",), workers=workers)
    check_same(again.run, one.run, kinds=())


ONE_BY_ONE = {
    "train": {"repeats": 3, "state": "carried", "batch": 3, "schedule": "step"},
    "model": {"kind": "lstm"},
}


@pytest.mark.slow
@pytest.mark.parametrize("folds", [False, slow(True)])
def test_models_that_never_began_for_want_of_time_begin_later(tmp_path, monkeypatch, folds):
    """With folds, the run ends without a result: a fold has no model."""
    sections = merged(ONE_BY_ONE, FOLDS) if folds else ONE_BY_ONE
    limited = configured(tmp_path, **merged(sections, {"train": {"minutes": 2.5 / 60}}))
    expected = (
        pytest.raises(UserError, match="had passed before a model of fold") if folds else None
    )
    with monkeypatch.context() as patch, expected or nullcontext():
        train_here(limited, train_tasks=Clock(patch).train)
    folder = runs.find_last(limited.out)
    again = resume_here(folder, overrides=("train.minutes=60",), workers=3)
    check_same(again.run, training.train(configured(tmp_path, **sections)).run, kinds=())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [slow(2, 3), (1, 2), slow(2, 2), slow(2, 1), slow(1, 3), slow(3, 2)]
)
@pytest.mark.parametrize("sections", [WALK, slow(ONE_BY_ONE)], ids=["pack", "one by one"])
def test_more_epochs_with_another_number_of_workers(tmp_path, sections, before, after):
    sections = merged(sections, {"train": {"schedule": "constant", "epochs": 2}})
    config = configured(tmp_path, **sections)
    longer = configured(tmp_path, **merged(sections, {"train": {"epochs": 4}}))
    first = train_here(config, before) if before > 1 else training.train(config)
    more = resume_here(first.run, overrides=("train.epochs=4",), workers=after)
    check_same(more.run, training.train(longer).run, kinds=("epoch",))


@pytest.mark.slow
def test_shares_of_which_only_some_train_several_models_at_a_time(tmp_path):
    """As where the series fit into the memory of one GPU, but not of another."""
    config = configured(tmp_path, train={"repeats": 4})
    num_epochs = 0

    def train_tasks(_, tasks, relay):
        alone = configs.replace_settings(config, {"engine.sync": True})

        def add(event):
            nonlocal num_epochs
            relay.add(1, event)
            is_epoch = isinstance(event, Epoch)
            num_epochs += is_epoch
            if is_epoch and num_epochs == 3:
                signal.raise_signal(signal.SIGTERM)

        in_this_process(_, tasks[:1], relay)
        train_share(replace(tasks[-1], config_toml=configs.to_toml(alone)), add)

    with pytest.raises(Interrupted, match="stopped in epoch 4 with 2 of 4 lanes done"):
        train_here(config, train_tasks=train_tasks)
    folder = runs.find_last(config.out)
    with pytest.raises(UserError, match="resume with the number of workers that the run began"):
        resume_here(folder, workers=3)
    finished = resume_here(folder)
    check_same(finished.run, training.train(config).run, kinds=("epoch", "lane"))
    (event,) = list_events(folder, "fallback")
    assert event["what"] == "the models cannot be trained further"
    with pytest.raises(UserError, match="checkpoint"):
        resume_here(folder, overrides=("train.epochs=9",))


def list_batches(plan):
    return [item["candidate"] for item in plan["evidence"] if "batch" in item["candidate"]]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_measured_batch_is_the_same_for_all_and_is_in_the_plan_once(tmp_path, workers):
    config = configured(tmp_path, train={"repeats": 3, "batch": "auto", "epochs": 1})
    first = train_here(config) if workers > 1 else training.train(config)
    plan = runs.read_json(first.run / "plan.json")
    batch, measured = runs.load_config(Run(first.run)).train.batch, list_batches(plan)
    assert plan["reasons"]["batch"].startswith(f"{batch} windows")
    assert f"batch = {batch}" in measured
    assert len(set(measured)) == len(measured)
    (start,) = list_events(first.run, "start")
    assert list_batches(start["plan"]) == measured
    more = resume_here(first.run, overrides=("train.epochs=2",), workers=3)
    again = runs.read_json(more.run / "plan.json")
    assert list_batches(again) == measured
    assert all(lane["steps"] == more.summary["steps"] for lane in more.summary["lanes"])
