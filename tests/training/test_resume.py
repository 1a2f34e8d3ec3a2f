"""Runs that stop and go on end exactly as those that never stopped."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream import Interrupted, UserError, runs, training
from slipstream.base import signals, storage
from slipstream.base.phases import PARTS
from slipstream.engine import checkpoint, loop
from tests.conftest import slow, small_config, waves
from tests.limits import hooked_models
from tests.logs import as_lines, read_lines

EVERYTHING = {"engine": {"log_every": 4, "checkpoint_minutes": 1e-9}}
JOBS = {
    "lstm, dropout": {"model": {"kind": "lstm", "layers": 2, "dropout": 0.3}},
    "gru, accumulated": {"model": {"kind": "gru"}, "train": {"batch": 7, "accumulate": 3}},
    "transformer, dropout": {"model": {"kind": "transformer", "dropout": 0.2}},
    "mlp, plateau": {
        "model": {"kind": "mlp"},
        "train": {"schedule": "plateau", "plateau_patience": 1, "min_delta": 0.05},
    },
    "linear, sgd": {
        "model": {"kind": "linear"},
        "train": {"optimizer": "sgd", "momentum": 0.9, "lr": 0.01},
    },
    "rmsprop, restarts": {
        "model": {"kind": "mlp"},
        "train": {"optimizer": "rmsprop", "schedule": "restarts", "restart_epochs": 2},
    },
    "validated every second epoch": {"train": {"validate_every": 2}},
    "at a low rate in the end": {
        "model": {"kind": "mlp"},
        "train": {"patience": 1, "min_delta": 10.0, "exploit_epochs": 3, "exploit_lr": 1e-3},
    },
    "augmented": {"augment": {"jitter": {"b": 0.1}, "warp": 0.3, "mixup": 0.4}},
    "masked": {"train": {"objective": "masked", "epochs": 3, "batch": 32}},
    "carried state": {
        "model": {"kind": "lstm", "layers": 2, "dropout": 0.3},
        "train": {"state": "carried", "batch": 3, "accumulate": 2},
    },
}


def configured(tmp_path, job=None, **sections):
    """Jobs with a checkpoint as often as possible."""
    together = {"train": {"epochs": 5}}
    for part in (EVERYTHING, JOBS.get(job, {}), sections):
        for name, settings in part.items():
            together[name] = together.get(name, {}) | settings
    return small_config(tmp_path, **together)


def stopping_at(step, number=signal.SIGINT):
    def watch(event):
        if event["event"] == "step" and event["step"] == step:
            signal.raise_signal(number)

    return watch


def ended(run):
    """All that must be the same: the log without its clock, weights, optimizer and figures."""
    kept = ("event", "step", "epoch", "loss", "lr", "train_loss", "val_loss", "best")
    log = [
        {key: event[key] for key in kept if key in event}
        for event in read_lines(run)
        if event["event"] in ("log", "epoch", "recovery")
    ]
    last = run.checkpoints / f"step-{checkpoint.list_steps(run)[-1]}"
    tensors = {
        (name, key): value.numpy().tobytes()
        for name in (path.name for path in sorted(last.glob("*.safetensors")))
        for key, value in load_file(last / name).items()
    }
    figures = runs.read_json(run.folder / "metrics.json")
    return log, tensors, figures["metrics"], figures["detail"], figures["steps"], figures["stopped"]


def same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert mine == theirs


def interrupted(config, table, step, number=signal.SIGINT):
    verb = "pretrain" if config.masked else "train"
    with pytest.raises(Interrupted, match=rf"resume with: slipstream {verb} --resume"):
        training.train(config, table, watch=as_lines(stopping_at(step, number)))
    return runs.open_run(runs.find_last(config.out))


@pytest.mark.parametrize(
    ("job", "shares"),
    [
        *((job, (0.5,)) for job in ("lstm, dropout", "linear, sgd", "masked", "carried state")),
        *(slow(job, (0.0, 0.05, 0.55, 0.95)) for job in JOBS),
    ],
)
def test_a_stopped_run_ends_as_the_unbroken_one(tmp_path, job, shares):
    config, table = configured(tmp_path / "whole", job), waves(400)
    whole = runs.open_run(slipstream.train(config, table).run)
    wanted = ended(whole)
    for step in (1 + int(share * wanted[4]) for share in shares):
        run = interrupted(configured(tmp_path / f"at{step}", job), table, step)
        assert not (run.folder / "lock.json").exists()
        slipstream.train(data=table, resume=run.folder)
        same(ended(run), wanted)


@pytest.mark.slow
def test_several_stops_in_one_run(tmp_path):
    config, table = configured(tmp_path / "a", "lstm, dropout"), waves(400)
    wanted = ended(runs.open_run(slipstream.train(config, table).run))
    run = interrupted(configured(tmp_path / "b", "lstm, dropout"), table, 5)
    for step in (6, 14, 30):
        with pytest.raises(Interrupted):
            training.train(
                data=table, resume=run.folder, watch=as_lines(stopping_at(step, signal.SIGTERM))
            )
    result = slipstream.train(data=table, resume=run.folder, overrides=("engine.monitor=false",))
    same(ended(run), wanted)
    assert [event["event"] for event in read_lines(run)].count("estimate") == 1
    assert result.summary["estimate"]["after_ten_steps_s"] > 0


@pytest.mark.slow
def test_a_stop_during_validation_validates_again(tmp_path):
    config, table = configured(tmp_path / "a"), waves(400)
    wanted = ended(runs.open_run(slipstream.train(config, table).run))
    calls = []

    def stop_while_validating(model, _):
        calls.append(not model.training)
        if not model.training and sum(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with hooked_models(before=stop_while_validating), pytest.raises(Interrupted):
        slipstream.train(configured(tmp_path / "b"), table)
    run = runs.open_run(runs.find_last(str(tmp_path / "b")))
    slipstream.train(data=table, resume=run.folder)
    same(ended(run), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, slow(2)])
def test_a_streamed_run_goes_on_too(tmp_path, workers):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(waves(900), path, row_group_size=100)
    sections = {
        "data": {"path": str(path)},
        "engine": {"home": "stream", "workers": workers, "buffer_rows": 300},
        "train": {"epochs": 3},
    }
    config = configured(tmp_path / "a", **sections)
    wanted = ended(runs.open_run(slipstream.train(config).run))
    run = interrupted(configured(tmp_path / "b", **sections), None, wanted[4] // 2 + 1)
    slipstream.train(resume=run.folder)
    same(ended(run), wanted)


@pytest.mark.slow
def test_after_a_rollback_in_the_same_epoch(tmp_path):
    """A loss that is no number after the resume goes back to where the epoch began."""
    config = configured(tmp_path / "a", "lstm, dropout", train={"epochs": 3, "lr": 1e-3})
    table = waves(400)
    with poisoned(training_pass=16):
        wanted = ended(runs.open_run(slipstream.train(config, table).run))
    assert any(event["event"] == "recovery" for event in wanted[0])
    config = configured(tmp_path / "b", "lstm, dropout", train={"epochs": 3, "lr": 1e-3})
    run = interrupted(config, table, 14)
    with poisoned(training_pass=2):  # which is step 16 too
        slipstream.train(data=table, resume=run.folder)
    same(ended(run), wanted)


def poisoned(training_pass):
    """Have a forward pass of training give no numbers, once."""
    passes = []

    def spoil(model, output):
        passes.append(model.training)
        is_spoilt = model.training and sum(passes) == training_pass
        return output * torch.nan if is_spoilt else None

    return hooked_models(after=spoil)


def test_more_epochs_than_before(tmp_path):
    table = waves(400)
    sections = {"train": {"epochs": 3, "schedule": "constant"}}
    longer = {"train": {"epochs": 5, "schedule": "constant"}}
    wanted = ended(runs.open_run(slipstream.train(configured(tmp_path / "a", **longer), table).run))
    run = runs.open_run(slipstream.train(configured(tmp_path / "b", **sections), table).run)
    with pytest.raises(UserError, match=r"is finished, after 3 epochs; .* raise train.epochs"):
        slipstream.train(data=table, resume=run.folder)
    slipstream.train(data=table, resume=run.folder, overrides=("train.epochs=5",))
    same(ended(run)[:2], wanted[:2])


class Clock:
    """Ours is the time: so many seconds have passed for every step that was taken."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(loop.time, "perf_counter", lambda: self.now)

    def __call__(self, event):
        self.now += event["event"] == "step"


@pytest.mark.parametrize(
    "job", ["lstm, dropout", slow("mlp, plateau"), slow("validated every second epoch")]
)
@pytest.mark.parametrize("cut", [slow(4), slow(13), 18, slow(27)])
def test_a_run_out_of_time_goes_on_where_it_was_cut(tmp_path, monkeypatch, job, cut):
    """9 steps an epoch, whose 4th, 8th and last look at the clock. The validation at the cut is one
    that an unbroken run does not have."""
    by_epochs = {"epochs": 5, "schedule": "step", "step_epochs": 2} | JOBS[job].get("train", {})
    config, table = configured(tmp_path / "a", job, train=by_epochs), waves(400)
    wanted = ended(runs.open_run(slipstream.train(config, table).run))
    with monkeypatch.context() as patch:
        limited = by_epochs | {"minutes": (cut - 0.5) / 60}
        config = configured(tmp_path / "b", job, train=limited)
        result = training.train(config, table, watch=as_lines(Clock(patch)))
    run = runs.open_run(result.run)
    assert result.summary["stopped"] == "train.minutes have passed"
    assert result.summary["steps"] == cut
    assert result.summary["epochs"] == pytest.approx(cut / 9)
    last = [event for event in read_lines(run) if event["event"] == "epoch"][-1]
    assert (last["step"], last["epoch"]) == (cut, pytest.approx(cut / 9))
    assert result.summary["best_epoch"] > 0
    slipstream.train(data=table, resume=run.folder, overrides=("train.minutes=60",))
    same(ended(run), wanted)


def list_rates(run):
    return [event["lr"] for event in read_lines(run) if event["event"] == "log"]


@pytest.mark.slow
def test_a_cosine_ends_when_the_time_does_and_rises_again_with_more_of_it(tmp_path, monkeypatch):
    """45 steps of 9 an epoch, one a second, of which 20 fit into the time."""
    table, minutes = waves(400), 20 / 60
    with monkeypatch.context() as patch:
        config = configured(tmp_path, train={"minutes": minutes})
        run = runs.open_run(training.train(config, table, watch=as_lines(Clock(patch))).run)
        rates = list_rates(run)
        assert len(rates) == 7
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > 9e-4
        assert rates[-1] < 1e-5
        doubled = ("train.minutes=0.6666",)
        training.train(
            data=table, resume=run.folder, overrides=doubled, watch=as_lines(Clock(patch))
        )
    more = list_rates(run)
    assert more[:7] == rates
    assert 3e-4 < more[7] < 7e-4  # half of the time is left
    assert more[7:] == sorted(more[7:], reverse=True)
    assert more[-1] < 3e-5


@pytest.mark.parametrize("step", [7, slow(12)])
def test_a_stopped_run_keeps_its_place_in_the_time(tmp_path, monkeypatch, step):
    """The same speed before and after gives the same learning rates."""
    table = waves(400)
    with monkeypatch.context() as patch:
        config = configured(tmp_path / "a", train={"minutes": 20 / 60})
        whole = training.train(config, table, watch=as_lines(Clock(patch)))
    with monkeypatch.context() as patch:
        config, clock = configured(tmp_path / "b", train={"minutes": 20 / 60}), Clock(patch)
        stop = stopping_at(step)
        with pytest.raises(Interrupted):
            training.train(config, table, watch=as_lines(lambda event: (clock(event), stop(event))))
        run = runs.open_run(runs.find_last(config.out))
        training.train(data=table, resume=run.folder, watch=as_lines(clock))
    wanted = {e["step"]: e["lr"] for e in read_lines(runs.open_run(whole.run)) if "lr" in e}
    rates = {e["step"]: e["lr"] for e in read_lines(run) if "lr" in e}
    shared = sorted(wanted.keys() & rates.keys())
    assert shared[-1] > step
    assert [rates[at] for at in shared] == pytest.approx([wanted[at] for at in shared], rel=1e-6)


@pytest.mark.slow
def test_more_time_than_the_epochs_take_changes_no_bit(tmp_path, monkeypatch):
    table = waves(400)
    wanted = ended(runs.open_run(slipstream.train(configured(tmp_path / "a"), table).run))
    with monkeypatch.context() as patch:
        config = configured(tmp_path / "b", train={"minutes": 1})
        run = runs.open_run(training.train(config, table, watch=as_lines(Clock(patch))).run)
    same(ended(run), wanted)


@pytest.mark.slow
def test_a_run_that_lost_patience_goes_on_at_a_low_rate_when_told_to(tmp_path):
    table, hasty = waves(400), {"patience": 1, "min_delta": 10.0}
    low = {"exploit_epochs": 2, "exploit_lr": 1e-3}
    at_once = configured(tmp_path / "a", train=hasty | low)
    wanted = ended(runs.open_run(slipstream.train(at_once, table).run))
    run = runs.open_run(slipstream.train(configured(tmp_path / "b", train=hasty), table).run)
    more = ("train.exploit_epochs=2", "train.exploit_lr=1e-3")
    slipstream.train(data=table, resume=run.folder, overrides=more)
    same(ended(run), wanted)


def test_other_settings_and_other_data_are_refused_by_name(tmp_path):
    table = waves(400)
    run = interrupted(configured(tmp_path), table, 12)
    before = sorted(path for path in run.folder.rglob("*"))
    with pytest.raises(UserError, match=r"other settings .*\(model.hidden, train.lr\).*force=True"):
        slipstream.train(
            data=table, resume=run.folder, overrides=("model.hidden=9", "train.lr=0.5")
        )
    other = table.to_pydict()
    other["a"][7] += 0.001
    for force in (False, True):
        said = r"data are not those that it began with, .* start a new run: slipstream\.train\("
        with pytest.raises(UserError, match=said):
            slipstream.train(data=other, resume=run.folder, force=force)
    assert sorted(path for path in run.folder.rglob("*")) == before
    seen = []
    training.train(
        data=table,
        resume=run.folder,
        overrides=("train.lr=0.0005",),
        force=True,
        watch=as_lines(seen.append),
    )
    (told,) = (event for event in seen if event["event"] == "resume")
    assert "train.lr was changed" in told["differs"]


def read_files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.scale=minmax", "the data are not those that it began with .data.scale was changed"),
        ("data.context=8", "the data are not those that it began with"),
        ("data.stride=2", "the data are not those that it began with"),
        ("model.hidden=9", r"its weights do not fit these settings \(model.hidden\)"),
        ("model.kind=gru", r"its weights do not fit these settings \(model.kind\)"),
        ("train.loss=quantile", r"its weights do not fit these settings \(train.loss\)"),
    ],
)
@pytest.mark.parametrize("is_finished", [False, slow(True)])
def test_force_never_leaves_a_run_with_weights_that_do_not_fit(tmp_path, change, said, is_finished):
    table = waves(400)
    if is_finished:
        run = runs.open_run(slipstream.train(configured(tmp_path), table, quiet=True).run)
    else:
        run = interrupted(configured(tmp_path), table, 12)
    before, longer = read_files(run.folder), "train.epochs=6"
    with pytest.raises(UserError, match=said):
        slipstream.train(data=table, resume=run.folder, overrides=(change, longer), force=True)
    assert read_files(run.folder) == before


def test_a_run_can_move(tmp_path, monkeypatch):
    config, table = configured(tmp_path / "a"), waves(400)
    wanted = ended(runs.open_run(slipstream.train(config, table).run))
    run = interrupted(configured(tmp_path / "b"), table, 12)
    moved = tmp_path / "elsewhere" / "run"
    shutil.copytree(run.folder, moved)
    shutil.rmtree(run.folder)
    monkeypatch.chdir(moved.parent)
    slipstream.train(data=table, resume="run")
    same(ended(runs.open_run(moved)), wanted)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    config, table = configured(tmp_path / "a"), waves(400)
    wanted = ended(runs.open_run(slipstream.train(config, table).run))
    config = configured(tmp_path / "b", engine={"async_checkpoints": False})
    run = interrupted(config, table, 14)
    newest = run.checkpoints / f"step-{checkpoint.list_steps(run)[-1]}" / "lanes.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-3] ^= 1
    newest.write_bytes(damaged)
    seen = []
    training.train(data=table, resume=run.folder, watch=as_lines(seen.append))
    (told,) = (event for event in seen if event["event"] == "fallback")
    assert f"{newest}: is damaged" in told["why"]
    assert any(event["event"] == "fallback" for event in read_lines(run))
    same(ended(run), wanted)


class Killed(BaseException):
    """As a kill: nothing of ours catches it."""


def killed_at(*events):
    def watch(event):
        if event["event"] in events:
            raise Killed

    return watch


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": {"repeats": 2, "epochs": 3}},
        slow({"train": {"objective": "masked", "epochs": 3, "batch": 32}}),
    ],
    ids=["one model", "repeats", "pre-training"],
)
def test_a_run_without_a_checkpoint_begins_again_in_its_folder(tmp_path, sections):
    table = waves(400)
    whole = runs.open_run(slipstream.train(configured(tmp_path / "a", **sections), table).run)
    with pytest.raises(Killed):
        training.train(
            configured(tmp_path / "b", **sections), table, watch=as_lines(killed_at("start", "log"))
        )
    run = runs.open_run(runs.find_last(str(tmp_path / "b")))
    assert not checkpoint.list_steps(run)
    seen = []
    result = training.train(data=table, resume=run.folder, watch=as_lines(seen.append))
    assert result.run == run.folder
    assert [event["step"] for event in seen if event["event"] == "resume"] == [0]
    assert logged(run) == logged(whole)
    wanted, got = (runs.read_json(one.folder / "metrics.json") for one in (whole, run))
    assert got["metrics"] == wanted["metrics"]
    assert not list((tmp_path / "b").glob(".*"))


def test_a_run_with_a_folder_begins_there_resumes_and_is_returned_when_finished(tmp_path):
    config, table, folder = configured(tmp_path / "a"), waves(400), tmp_path / "b" / "job"
    wanted = ended(runs.open_run(slipstream.train(config, table).run))
    with pytest.raises(Killed):
        training.train(config, table, folder=folder, watch=as_lines(killed_at("start", "log")))
    for step in (7, 30):
        with pytest.raises(Interrupted):
            training.train(
                config, table, folder=folder, watch=as_lines(stopping_at(step, signal.SIGTERM))
            )
    first = training.train(config, table, folder=folder)
    same(ended(runs.open_run(folder)), wanted)
    events = len(list(read_lines(runs.open_run(folder))))
    again = training.train(config, table, folder=folder)
    assert (first.is_new, again.is_new) == (True, False)
    assert again.summary["metrics"] == first.summary["metrics"]
    assert len(list(read_lines(runs.open_run(folder)))) == events
    with pytest.raises(UserError, match=r"other settings than it began with \(train.lr\)"):
        slipstream.train(config, table, folder=folder, overrides="train.lr=0.5")
    longer = slipstream.train(config, table, folder=folder, overrides="train.epochs=6")
    assert longer.summary["epochs"] == 6


def test_a_folder_with_other_files_is_not_taken_for_a_run(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="job: exists and is not a run; name another folder"):
        slipstream.train(configured(tmp_path / "a"), waves(400), folder=tmp_path / "job")
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_an_inner_run_that_was_killed_early_goes_on_in_its_folder(tmp_path):
    config, table, folder = configured(tmp_path), waves(400), tmp_path / "retrained" / "best"
    with pytest.raises(Killed):
        training.train_or_resume(folder, config, table, as_lines(killed_at("start")))
    (folder / "mark").touch()
    found = training.train_or_resume(folder, config, table, None)
    assert (folder / "mark").exists()
    assert runs.read_metrics(folder)["metrics"] == found["metrics"]


def logged(run):
    kept = ("event", "step", "losses", "loss", "lane", "val_loss")
    return [
        {key: event[key] for key in kept if key in event}
        for event in read_lines(run)
        if event["event"] in ("start", "log", "epoch", "lane", "recovery")
    ]


@pytest.mark.slow
def test_a_measured_batch_is_kept_when_a_run_begins_again(tmp_path):
    table = waves(400)
    auto = {"train": {"batch": "auto", "epochs": 2}}
    config = configured(tmp_path, **auto)
    with pytest.raises(Killed):
        training.train(config, table, watch=as_lines(killed_at("log")))
    run = runs.open_run(runs.find_last(str(tmp_path)))
    measured = runs.load_config(run).train.batch
    assert measured != "auto"
    slipstream.train(config, table, resume=run.folder)  # which still says auto
    assert runs.load_config(run).train.batch == measured


@pytest.mark.parametrize(("job", "verb"), [(None, "train"), slow("masked", "pretrain")])
@pytest.mark.parametrize("at", ["start", "scoring"])
def test_sigterm_before_or_after_training_says_how_to_resume(tmp_path, at, job, verb):
    def watch(event):
        if event["event"] == at:
            signal.raise_signal(signal.SIGTERM)

    table, before = waves(400), signal.getsignal(signal.SIGTERM)
    signals.raise_on_stop()
    try:
        with pytest.raises(Interrupted, match=f"resume with: slipstream {verb} ") as caught:
            training.train(configured(tmp_path, job), table, watch=as_lines(watch))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.exit_code == 143
    run = runs.open_run(tmp_path / "last")
    resumed = getattr(slipstream, verb)(None, table, resume=run.folder)
    assert resumed.summary["epochs"] == (5 if job is None else 3)


@pytest.mark.slow
def test_an_interrupt_while_it_is_scored_says_how_to_resume(tmp_path):
    def watch(event):
        if event["event"] == "scoring":
            signal.raise_signal(signal.SIGINT)

    table = waves(400)
    with pytest.raises(Interrupted, match="resume") as caught:
        training.train(configured(tmp_path), table, watch=as_lines(watch))
    assert caught.value.signal_number == signal.SIGINT
    run = runs.open_run(tmp_path / "last")
    assert not (run.folder / "metrics.json").exists()
    assert slipstream.train(None, table, resume=run.folder).summary["epochs"] == 5


def train_by_clock(monkeypatch, config, table, **options):
    """Train by a clock that ticks once a step."""
    with monkeypatch.context() as patch:
        clock, watch = Clock(patch), options.pop("watch", lambda _: None)
        return training.train(
            config, table, watch=as_lines(lambda event: (clock(event), watch(event))), **options
        ).summary


@pytest.mark.slow
def test_the_totals_of_a_resumed_run_count_from_its_first_start(tmp_path, monkeypatch):
    """9 steps an epoch, a second each. What a lost checkpoint made it train twice counts too."""
    table, off = waves(400), {"engine": EVERYTHING["engine"] | {"monitor": False}}
    config = configured(tmp_path, **off)
    for step in (12, 30):  # of which it trains the last ones twice
        earlier = {} if step == 12 else {"resume": tmp_path / "last"}
        with pytest.raises(Interrupted):
            train_by_clock(monkeypatch, config, table, watch=as_lines(stopping_at(step)), **earlier)
    run = runs.open_run(tmp_path / "last")
    shutil.rmtree(run.checkpoints / "step-30")
    (older,) = [step for step in checkpoint.list_steps(run)[-1:] if step < 30]
    summary = train_by_clock(monkeypatch, None, table, resume=run.folder)
    assert (summary["steps"], summary["epochs"]) == (45, 5)
    assert summary["seconds_before_resume"] == 30
    assert summary["seconds"] == 30 + 45 - older
    assert sum(summary["seconds_by_phase"].values()) == summary["seconds"]
    assert summary["seconds_by_phase"]["training"] == 45
    spent = summary["time"]
    assert (spent["training_s"], spent["earlier_s"]) == (45, 30 - older)
    assert (spent["process_s"], spent["wall_s"]) == (45 - older, 30 + 45 - older)
    assert sum(spent[name] for name in (*PARTS, "earlier_s")) == spent["wall_s"]
    longer = train_by_clock(
        monkeypatch, None, table, resume=run.folder, overrides=("train.epochs=6",)
    )
    assert longer["seconds"] == summary["seconds"] + 9
    assert runs.read_metrics(run.folder)["seconds"] == longer["seconds"]


@pytest.mark.parametrize("moment", ["mkdir", "lock", "config", "rename"])
def test_a_kill_while_a_folder_is_made_leaves_no_half_run(tmp_path, moment):
    """The child is killed at a system call on the way; the next run of the folder cleans up."""
    out = tmp_path / "runs"
    child = os.fork()
    if not child:
        stop_at(moment)
        runs.create_run("a", out=str(out), files={"config.toml": "seed = 1\n"})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [path for path in out.iterdir() if not path.name.startswith(".")] == []
    with pytest.raises(UserError, match="no run to resume"):
        runs.find_last(str(out))
    run = runs.create_run("a", out=str(out), files={"config.toml": "seed = 1\n"})
    assert list(out.iterdir()) == [run.folder]


def stop_at(moment):
    """Kill this process when it comes to a certain system call on an unpublished folder."""

    def audit(event, arguments):
        at = str(arguments[0]) if arguments else ""
        if ".unpublished" in at and (
            (moment == "lock" and event == "open" and at.endswith("lock.json"))
            or (moment == "config" and event == "open" and at.endswith("config.toml"))
            or (moment == "rename" and event == "os.rename")
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == "mkdir" and event == "os.mkdir" and at.endswith(".unpublished"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def test_checkpoints_that_were_removed_are_not_begun_again_in_silence(tmp_path):
    table = waves(400)
    run = interrupted(configured(tmp_path), table, 12)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(UserError, match="has no checkpoint to resume from"):
        slipstream.train(data=table, resume=run.folder)
    with pytest.raises(UserError, match="no run to resume"):
        runs.find_last(str(tmp_path / "empty"))


@pytest.mark.parametrize("repeats", [1, slow(2)])
def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path, repeats):
    """Its model can still be used."""
    table = waves(400)
    result = slipstream.train(configured(tmp_path, train={"repeats": repeats}), table)
    run = runs.open_run(result.run)
    for folder in run.checkpoints.iterdir():
        state = runs.read_json(folder / "state.json")
        del state["format"]
        runs.write_json(folder / "state.json", state)
        sums = {
            path.name: storage.compute_sha256(path)
            for path in folder.iterdir()
            if path.name != storage.MANIFEST
        }
        runs.write_json(folder / storage.MANIFEST, sums)
    told = r"earlier version of Slipstream; its model can be evaluated .* start a new run"
    with pytest.raises(UserError, match=told):
        slipstream.train(data=table, resume=run.folder, overrides=("train.epochs=9",))
    assert len(slipstream.predict(run.folder, table)) > 0
    slipstream.evaluate(run.folder, table)
    slipstream.report(run.folder)
