"""Shares that commands of their own train, as the tasks of an array job do."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

import slipstream
from slipstream import Interrupted, UserError, list_runs, remove_runs, training
from slipstream.base.errors import ResumableError
from slipstream.reporting.page import report
from slipstream.reporting.terminal.progress import TrainingDisplay
from slipstream.runs import Run
from slipstream.runs.lock import hold_lock
from slipstream.training import division
from slipstream.training.array_jobs import ShareNumber, train_share_of
from tests.cli.test_cli import invoke
from tests.conftest import merged
from tests.logs import as_lines, read_lines
from tests.training.shares.test_launcher import FOLDS, check_same, configured

REPEATED = {"train": {"repeats": 3}}


def stop_at_epoch(event):
    if event["event"] == "epoch" and event["epoch"] == 2:
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.slow
def test_shares_of_an_array_are_joined_by_the_last_command(tmp_path):
    config = configured(tmp_path, **merged({"train": {"repeats": 2}}, FOLDS))
    one, folder = training.train(config), tmp_path / "job"
    with pytest.raises(Interrupted, match=r"stopped share 2/2 of .*job; the same command") as stop:
        train_share_of(config, folder, ShareNumber(2, 2), watch=as_lines(stop_at_epoch))
    assert stop.value.exit_code == 75
    shutil.move(tmp_path / "waves.csv", tmp_path / "copy.csv")  # staged elsewhere
    path = {"data": {"path": str(tmp_path / "copy.csv")}}
    staged = configured(tmp_path, **merged(merged({"train": {"repeats": 2}}, FOLDS), path))
    lanes = [
        train_share_of(staged, folder, ShareNumber(number, 2))["lanes"] for number in (1, 2, 2)
    ]
    assert sorted(lanes[0] + lanes[1]) == list(range(6))
    joined = training.train(staged, folder=folder)
    assert 0 < joined.summary["seconds_before_resume"] < joined.summary["seconds"]
    check_same(joined.run, one.run)
    kinds = [event["event"] for event in read_lines(Run(folder))]
    assert (kinds[0], kinds.count("start")) == ("start", 1)
    assert report(folder).exists()
    assert train_share_of(staged, folder, ShareNumber(1, 2))["lanes"] == []


def test_more_shares_than_models_have_nothing_to_do(tmp_path):
    config, folder = configured(tmp_path, **REPEATED), tmp_path / "job"
    assert train_share_of(config, folder, ShareNumber(4, 4))["lanes"] == []
    assert train_share_of(config, folder, ShareNumber(1, 4))["lanes"] == [0]


def test_a_share_that_does_not_fit_the_run_is_refused(tmp_path):
    config, folder = configured(tmp_path, **REPEATED), tmp_path / "job"
    train_share_of(config, folder, ShareNumber(1, 3))
    with pytest.raises(UserError, match=r"is divided into 3 shares, so --share 2/4 is none of"):
        train_share_of(config, folder, ShareNumber(2, 4))
    other = configured(tmp_path, **merged(REPEATED, {"train": {"lr": 0.5}}))
    with pytest.raises(UserError, match=r"other settings than it began with \(train.lr\)"):
        train_share_of(other, folder, ShareNumber(2, 3))
    with pytest.raises(UserError, match="but this run trains one model"):
        train_share_of(configured(tmp_path), tmp_path / "single", ShareNumber(1, 2))
    assert not (tmp_path / "single").exists()


def test_a_run_whose_shares_train_is_listed_as_running(tmp_path):
    config, folder, rows = configured(tmp_path, **REPEATED), tmp_path / "out" / "job", []

    def look(event):
        if event["event"] == "epoch" and event["epoch"] == 2:
            rows.extend(list_runs(folder.parent))
            with pytest.raises(UserError, match="is writing to this run; nothing was removed"):
                remove_runs(folder)

    train_share_of(config, folder, ShareNumber(1, 2), watch=as_lines(look))
    rows += list_runs(folder.parent)
    assert [row.state for row in rows] == ["running", "running", "stopped"]
    assert f"process {os.getpid()} on" in rows[0].note
    assert "epoch 2 of 4" in rows[1].note
    assert rows[2].note == "after epoch 4 of 4, 1 of 2 shares done"


def test_a_share_that_another_process_trains_is_waited_for(tmp_path, monkeypatch):
    config, folder, events = configured(tmp_path, **REPEATED), tmp_path / "job", []
    train_share_of(config, folder, ShareNumber(1, 2))
    monkeypatch.setattr(division, "MAX_WAIT_S", 0.3)
    told = f"process {os.getpid()} on .* still trains a part of this run; wait until it has ended"
    with hold_lock(folder / "workers" / "1"), pytest.raises(UserError, match=told):
        training.train(config, folder=folder, watch=as_lines(events.append))
    assert [e["what"] for e in events if "waiting for process" in e.get("what", "")]


def test_a_share_shows_its_models_by_their_seeds(tmp_path, capsys):
    config, folder = configured(tmp_path, **REPEATED), tmp_path / "job"
    train_share_of(config, folder, ShareNumber(1, 2), watch=TrainingDisplay(quiet=False).show)
    shown = capsys.readouterr().err
    assert "lanes: 3 seeds; share 1/2: 2 models, all at once" in shown
    assert "lane 2 of 2 done: seed 2: all epochs done" in shown


@pytest.mark.slow
def test_a_share_that_cannot_save_says_to_start_it_again(tmp_path):
    config, folder = configured(tmp_path, **REPEATED), tmp_path / "job"
    train_share_of(config, folder, ShareNumber(1, 2))
    blocked = folder / "workers" / "1" / "checkpoints"
    blocked.write_text("")
    with pytest.raises(ResumableError, match=r"checkpoints'; run share 2/2 again, with the same"):
        train_share_of(config, folder, ShareNumber(2, 2))
    blocked.unlink()
    train_share_of(config, folder, ShareNumber(2, 2))
    check_same(training.train(config, folder=folder).run, training.train(config).run)


def test_a_share_of_a_finished_run_with_other_settings_is_refused(tmp_path):
    config, folder = configured(tmp_path, **REPEATED), tmp_path / "job"
    training.train(config, folder=folder)
    assert train_share_of(config, folder, ShareNumber(1, 2))["lanes"] == []
    other = configured(tmp_path, **merged(REPEATED, {"train": {"lr": 0.5}}))
    with pytest.raises(UserError, match=r"other settings than it began with \(train.lr\)"):
        train_share_of(other, folder, ShareNumber(1, 2))


@pytest.mark.slow
def test_shares_from_python_are_joined_by_train(tmp_path):
    config, folder = configured(tmp_path, **REPEATED), tmp_path / "job"
    told: list[slipstream.events.Event] = []
    first = slipstream.train_share(config, folder, (1, 2), quiet=True, on_event=told.append)
    assert (first["share"], first["of"], first["run"]) == (1, 2, str(folder))
    assert sum(isinstance(event, slipstream.events.LaneEnd) for event in told) == len(
        first["lanes"]
    )
    told.clear()
    joined = slipstream.train(config, folder=folder, quiet=True, on_event=told.append)
    check_same(joined.run, slipstream.train(config, quiet=True).run)
    starts = [event for event in told if isinstance(event, slipstream.events.Start)]
    assert starts[-1].pack["done"] == len(first["lanes"])  # what was trained before


@pytest.mark.parametrize("share", [(0, 2), (3, 2), (1.5, 2), 3, "3/8"])
def test_a_share_from_python_is_a_pair(share, tmp_path):
    with pytest.raises(UserError, match=r"share is .*; give \(I, N\) with I from 1 to N"):
        slipstream.train_share(configured(tmp_path), tmp_path / "job", share)


@pytest.mark.parametrize("text", ["3", "0/2", "3/2", "a/b"])
def test_a_share_is_a_number_of_a_number(text, tmp_path):
    answer = invoke("train", "--folder", tmp_path / "job", "--share", text)
    assert answer.exit_code == 2
    assert f"--share is {text}; give I/N with I from 1 to N" in answer.stderr


def test_a_share_needs_the_folder_of_its_run():
    answer = invoke("train", "--share", "1/2")
    assert answer.exit_code == 2
    assert "--share needs --folder" in answer.stderr
