"""Lanes that several workers train end as in one process, whoever is killed on the way."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow.csv
import pytest

import slipstream
from slipstream import Interrupted, UserError, runs, training
from slipstream.base.phases import PhaseTimer
from slipstream.runs import Run
from slipstream.training import fitting
from slipstream.training.run import train_run
from slipstream.training.shares import train_share
from tests.conftest import close, merged, small_config, waves
from tests.logs import as_lines, read_lines

FOLDS = {"data": {"split": {"walk_forward": 3, "purge": 2}}}
SMALL = {
    "model": {"kind": "mlp"},
    "train": {"epochs": 4, "lr": 0.01},
    "engine": {"log_every": 4, "checkpoint_minutes": 1e-9},
}


def configured(folder: Path, **sections):
    path = folder / "waves.csv"
    if not path.exists():
        pyarrow.csv.write_csv(waves(600), path)
    return small_config(
        folder / "runs", **merged(merged(SMALL, {"data": {"path": str(path)}}), sections)
    )


def in_this_process(_, tasks, relay):
    """Train one share after another, here."""
    for task in tasks:
        train_share(task, lambda event, index=task.index: relay.add(index, event))


def train_here(config, num_workers=2, train_tasks=in_this_process):
    """Train a run in shares, without processes."""
    timer = PhaseTimer()
    context = fitting.load_context(config, None, timer)
    files = {"config.toml": runs.format_config(config)}
    with runs.create_locked(config.name, out=config.out, files=files) as run:
        context = replace(context, run=run, started_at=run.started_at, num_workers=num_workers)
        return train_run(context, train_tasks=train_tasks)


def lane_events(folder: Path) -> dict[tuple, tuple]:
    """What the log says of each lane, in its order; nothing may be there twice."""
    seen, order = {}, Counter()
    for event in read_lines(Run(folder)):
        kind = event["event"]
        if kind == "log":
            values = {int(lane): (loss,) for lane, loss in event["losses"].items()}
        elif kind in ("epoch", "lane"):
            names = ("train_loss", "val_loss", "best_loss")
            values = {event["lane"]: tuple(event[name] for name in names if name in event)}
        else:
            continue
        for lane, value in values.items():
            seen[kind, lane, order[kind, lane]] = value
            order[kind, lane] += 1
    return seen


def check_same(
    folder: Path,
    wanted: Path,
    *,
    rel: float = 1e-4,
    kinds: Sequence[str] = ("log", "epoch", "lane"),
) -> None:
    """Compare a run of several workers with one of a single process."""
    one, other = (runs.read_json(path / "metrics.json") for path in (folder, wanted))
    for mine, theirs in zip(one["lanes"], other["lanes"], strict=True):
        for name in ("seed", "steps", "epochs", "best_epoch", "stopped", "best"):
            assert mine[name] == theirs[name], name
        for which in ("val", "test"):
            figures = [list(lane["metrics"][which].values()) for lane in (mine, theirs)]
            close(*figures, rel=rel)
    for which in ("train", "val", "test"):
        close(*(list(run["metrics"][which].values()) for run in (one, other)), rel=rel)
    assert one["baselines"] == other["baselines"]
    assert one.keys() - other.keys() <= {"workers", "seconds_before_resume"}
    mine, theirs = (
        {key: values for key, values in lane_events(path).items() if key[0] in kinds}
        for path in (folder, wanted)
    )
    assert mine.keys() == theirs.keys()
    close(
        [value for key in sorted(mine) for value in mine[key]],
        [value for key in sorted(mine) for value in theirs[key]],
        rel=rel,
    )


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"train": {"repeats": 5}}, id="repeats", marks=pytest.mark.slow),
        pytest.param({"train": {"repeats": 2}} | FOLDS, id="folds and repeats"),
        pytest.param(
            {"train": {"repeats": 3, "state": "carried", "batch": 3}, "model": {"kind": "lstm"}},
            id="one at a time",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_shares_end_as_lanes_of_one_process(tmp_path, sections):
    config = configured(tmp_path, **sections)
    one = training.train(config)
    spread = train_here(config)
    check_same(spread.run, one.run)
    assert spread.summary["workers"] == 2
    pack = runs.read_json(spread.run / "plan.json")["pack"]
    assert sorted(n for share in pack["shares"] for n in share["lanes"]) == list(
        range(pack["lanes"])
    )
    assert not (spread.run / "workers").exists()


class Watcher:
    """Watches a run of workers, and acts at some of its epochs."""

    def __init__(self, act=None):
        self.act, self.pids, self.events = act, {}, []

    def __call__(self, event):
        self.events.append(event)
        if event["event"] == "worker" and "pid" in event:
            self.pids[event["worker"]] = event["pid"]
        if event["event"] == "epoch" and self.act:
            self.act(self, event)

    def list_deaths(self):
        return [e["remedy"] for e in self.events if e["event"] == "worker" and e["what"] == "died"]


def once(action):
    """Do it at the first epoch that has gone far enough."""

    def act(watcher, event):
        if event["epoch"] >= 3 and not getattr(watcher, "done", False):
            watcher.done = True
            action(watcher, event)

    return act


LONG = {"train": {"repeats": 4, "epochs": 40, "patience": "off"}}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run in one process, to compare with."""
    folder = tmp_path_factory.mktemp("long")
    config = configured(folder, **LONG)
    return config, training.train(config).run


@pytest.mark.slow
def test_two_processes_with_four_repeats_each_are_eight_lanes_of_one(tmp_path):
    config = configured(tmp_path, train={"repeats": 8, "epochs": 6})
    one = slipstream.train(config, quiet=True)
    two = slipstream.train(config, workers=2, quiet=True)
    check_same(two.run, one.run)
    pack = runs.read_json(two.run / "plan.json")["pack"]
    assert [len(share["lanes"]) for share in pack["shares"]] == [4, 4]


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_changes_nothing(long_run, tmp_path):
    config, wanted = long_run
    watcher = Watcher(once(lambda w, e: os.kill(w.pids[e["worker"]], signal.SIGKILL)))
    config = config.model_copy(update={"out": str(tmp_path)})
    run = training.train(config, workers=2, watch=as_lines(watcher)).run
    assert watcher.list_deaths() == ["started again"]
    check_same(run, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 1, 3])
def test_a_stopped_run_goes_on_with_any_number_of_workers(long_run, tmp_path, workers):
    config, wanted = long_run
    config = config.model_copy(update={"out": str(tmp_path)})
    watcher = Watcher(once(lambda *_: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(Interrupted, match="resume with: slipstream train --resume") as stopped:
        training.train(config, workers=2, watch=as_lines(watcher))
    assert stopped.value.signal_number == signal.SIGTERM
    assert "the best weights so far are in" in str(stopped.value)
    assert not any(psutil.pid_exists(pid) for pid in watcher.pids.values())
    again = Watcher()
    folder = runs.find_last(config.out)
    run = training.train(resume=folder, workers=workers, watch=as_lines(again)).run
    assert len(again.pids) == {None: 2, 1: 0, 3: 3}[workers]
    # lanes that are joined stand at different steps, so their losses are logged at others
    kinds = ("epoch", "lane") if workers else ("log", "epoch", "lane")
    check_same(run, wanted, kinds=kinds)


def test_what_workers_cannot_train_is_refused_before_a_folder_is_made(tmp_path):
    config = configured(tmp_path)
    with pytest.raises(UserError, match=r"workers=2 divides the models .* but this run trains one"):
        slipstream.train(config, workers=2)
    masked = configured(tmp_path, model={"kind": "lstm"}, train={"objective": "masked"})
    with pytest.raises(UserError, match="this run pre-trains one encoder"):
        training.train(masked, workers=2)
    several = configured(tmp_path, train={"repeats": 2})
    with pytest.raises(UserError, match=r"set data\.path instead of passing a table"):
        slipstream.train(several, waves(), workers=2)
    with pytest.raises(UserError, match="workers is 0; give a number from 1, or auto"):
        slipstream.train(several, workers=0)
    assert not Path(config.out).exists()
