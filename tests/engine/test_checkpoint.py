from __future__ import annotations

import os
import threading

import pytest
import torch

import slipstream
from slipstream import runs
from slipstream.engine import checkpoint
from slipstream.engine.checkpoint import Checkpoint, CheckpointWriter
from tests.conftest import small_config, waves
from tests.logs import as_lines, read_lines


def a_state(step, **facts):
    return Checkpoint(step, {"weights.safetensors": {"w": torch.ones(2)}}, facts)


class Slow:
    """Arrives from the device when it is let; CUDA's event has the same method."""

    def __init__(self):
        self.arrived = threading.Event()

    def synchronize(self):
        assert self.arrived.wait(60)


def checkpoints_logged(run):
    return [event["step"] for event in read_lines(run) if event["event"] == "checkpoint"]


def test_a_checkpoint_is_logged_when_it_is_on_disk(tmp_path):
    run = runs.create_run("a", out=str(tmp_path))
    slow = Slow()
    with CheckpointWriter(run, background=True) as writer:
        writer.save(late(1, slow), best_step=0)
        writer.collect()
        assert writer.busy
        assert checkpoints_logged(run) == []
        slow.arrived.set()
    assert checkpoint.list_steps(run) == [1]
    assert checkpoints_logged(run) == [1]


def late(step, ready):
    return Checkpoint(step, {"weights.safetensors": {"w": torch.ones(2)}}, {}, ready)


@pytest.mark.parametrize("background", [True, False])
def test_what_goes_wrong_with_a_checkpoint_is_raised(tmp_path, background):
    run = runs.create_run("a", out=str(tmp_path))
    unsound = Checkpoint(1, {"weights.safetensors": {"w": "no tensor"}}, {})

    def write_it():
        with CheckpointWriter(run, background=background) as writer:
            writer.save(unsound, best_step=0)

    with pytest.raises((TypeError, ValueError, AttributeError)):
        write_it()
    assert checkpoints_logged(run) == []


def test_a_fault_of_the_background_ends_the_training(tmp_path):
    config = small_config(tmp_path, engine={"checkpoint_minutes": 1e-9})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail_in_other_threads(os.fsync))
        with pytest.raises(ZeroDivisionError):
            slipstream.train(config, waves(400))
    assert not checkpoints_logged(runs.open_run(runs.find_last(str(tmp_path))))


def fail_in_other_threads(fsync):
    def wrapped(descriptor):
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError("by accident")
        fsync(descriptor)

    return wrapped


def test_what_a_disk_refuses_is_told_once_and_not_logged(tmp_path):
    told = []
    run = runs.create_run("a", out=str(tmp_path), watch=as_lines(told.append))
    run.checkpoints.touch()  # a file where the folder should be
    with CheckpointWriter(run, background=True) as writer:
        writer.save(a_state(1), best_step=0)
        writer.save(a_state(2), best_step=0)
    assert [event["event"] for event in told] == ["trouble"]
    assert "training goes on without" in told[0]["what"]
    assert checkpoints_logged(run) == []


def test_an_error_that_ends_the_run_is_not_hidden_by_that_of_a_checkpoint(tmp_path):
    told = []
    run = runs.create_run("a", out=str(tmp_path), watch=as_lines(told.append))

    def fail():
        with CheckpointWriter(run, background=True) as writer:
            writer.save(Checkpoint(1, {"weights.safetensors": {"w": "no tensor"}}, {}), best_step=0)
            raise KeyError("the first")

    with pytest.raises(KeyError, match="the first"):
        fail()
    assert "a checkpoint failed" in told[0]["what"]
