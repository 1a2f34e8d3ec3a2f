"""Shares that commands of their own train, as the tasks of an array job do."""

from __future__ import annotations

import shutil
import signal

import pytest

from slipstream import Interrupted, UserError, runs, training
from slipstream.reporting.page import report
from slipstream.runs import Run
from slipstream.training.shares.batch import ShareNumber, train_share_of
from tests.conftest import merged
from tests.test_cli import invoke
from tests.training.shares.test_launcher import FOLDS, check_same, configured

REPEATED = {"train": {"repeats": 3}}


def stop_at_epoch(event):
    if event["event"] == "epoch" and event["epoch"] == 2:
        signal.raise_signal(signal.SIGUSR1)


def test_shares_of_an_array_are_joined_by_the_last_command(tmp_path):
    config = configured(tmp_path, **merged({"train": {"repeats": 2}}, FOLDS))
    one, folder = training.train(config), tmp_path / "job"
    with pytest.raises(Interrupted, match=r"stopped share 2/2 of .*job; the same command") as stop:
        train_share_of(config, folder, ShareNumber(2, 2), watch=stop_at_epoch)
    assert stop.value.exit_code == 75
    shutil.move(tmp_path / "waves.csv", tmp_path / "copy.csv")  # staged elsewhere
    path = {"data": {"path": str(tmp_path / "copy.csv")}}
    staged = configured(tmp_path, **merged(merged({"train": {"repeats": 2}}, FOLDS), path))
    lanes = [
        train_share_of(staged, folder, ShareNumber(number, 2))["lanes"] for number in (1, 2, 2)
    ]
    assert sorted(lanes[0] + lanes[1]) == list(range(6))
    joined = training.train(staged, folder=folder)
    check_same(joined.run, one.run)
    kinds = [event["event"] for event in runs.read_events(Run(folder))]
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


@pytest.mark.parametrize("text", ["3", "0/2", "3/2", "a/b"])
def test_a_share_is_a_number_of_a_number(text, tmp_path):
    answer = invoke("train", "--folder", tmp_path / "job", "--share", text)
    assert answer.exit_code == 2
    assert f"--share is {text}; give I/N with I from 1 to N" in answer.stderr


def test_a_share_needs_the_folder_of_its_run():
    answer = invoke("train", "--share", "1/2")
    assert answer.exit_code == 2
    assert "--share needs --folder" in answer.stderr
