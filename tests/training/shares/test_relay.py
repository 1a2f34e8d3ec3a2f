"""The events of workers in the log of their run: each once, with the run's numbers."""

from __future__ import annotations

from slipstream import runs
from slipstream.events import Epoch, Log, Resume, WorkerChange
from slipstream.training.division import Division, get_share
from slipstream.training.shares import EventRelay, rebuild_log
from tests.logs import read_lines

DIVISION = Division(2, [[0, 2], [1, 3]], num_lanes=4, log_bytes=0)


def make_run(folder):
    run = runs.Run(folder)
    for index in range(2):
        get_share(run, index).folder.mkdir(parents=True)
    return run


def log(step, *lanes):
    return Log(at_s=1.0, step=step, losses={lane: step + lane / 10 for lane in lanes})


def epoch(lane, step):
    values = {"epoch": 1.0, "train_loss": 0.5, "val_loss": 0.4, "best": True, "rate": 1.0}
    return Epoch(at_s=1.0, lane=lane, step=step, **values)


def list_points(run):
    """What the log says: lane and step of each loss and epoch."""
    points = []
    for event in read_lines(run):
        if event["event"] == "log":
            points += [("log", int(lane), event["step"]) for lane in event["losses"]]
        elif event["event"] == "epoch":
            points.append(("epoch", event["lane"], event["step"]))
    return points


def test_an_event_that_a_restarted_worker_repeats_is_logged_once(tmp_path):
    run = make_run(tmp_path)
    relay = EventRelay(run, DIVISION)
    for event in (log(4, 0, 1), epoch(0, 8), log(4, 0, 1), epoch(0, 8), epoch(1, 8)):
        relay.add(1, event)
    expected = [("log", 1, 4), ("log", 3, 4), ("epoch", 1, 8), ("epoch", 3, 8)]
    assert list_points(run) == expected
    EventRelay(run, DIVISION).add(1, epoch(1, 8))  # also after the command itself was restarted
    assert list_points(run) == expected


def test_a_rebuilt_log_has_what_the_checkpoints_of_the_shares_have(tmp_path):
    """The command was killed before it heard of lane 2's epoch; worker 1 was killed after step 8,
    with a checkpoint of step 4."""
    run = make_run(tmp_path)
    run.append(Resume(step=0, lanes="no lane done", differs="", spent_s=0.0))
    head = runs.get_log_size(run)
    first, second = get_share(run, 0), get_share(run, 1)
    for event in (log(4, 0, 1), epoch(0, 8), epoch(1, 8)):
        runs.add_event(first.log, event)
    runs.add_event(second.log, log(4, 0, 1))
    saved = [(0, runs.get_log_size(first)), (1, runs.get_log_size(second))]
    runs.add_event(second.log, epoch(0, 8))
    relay = EventRelay(run, DIVISION)
    for index, event in ((0, log(4, 0, 1)), (1, log(4, 0, 1)), (0, epoch(0, 8)), (1, epoch(0, 8))):
        relay.add(index, event)
    killed = {"what": "died", "why": "ended by SIGKILL", "remedy": "started again"}
    run.append(WorkerChange(worker=1, **killed))
    division = Division(2, DIVISION.shares, num_lanes=4, log_bytes=head)
    for _ in range(2):
        rebuild_log(run, division, saved)
        assert list_points(run) == [
            *(("log", 0, 4), ("log", 2, 4), ("log", 1, 4), ("log", 3, 4)),
            *(("epoch", 0, 8), ("epoch", 2, 8)),
        ]
        kinds = [event["event"] for event in read_lines(run)]
        assert kinds.count("worker") == kinds.count("resume") == 1
    assert get_share(run, 1).log.stat().st_size == saved[1][1]


def test_predictions_of_the_first_share_are_shown_while_somebody_looks(tmp_path):
    run = make_run(tmp_path)
    relay = EventRelay(run, DIVISION)
    relay.add(0, epoch(0, 8))
    assert not runs.is_watched(get_share(run, 0).folder)
    runs.mark_watched(run.folder)
    runs.write_preview(get_share(run, 0).folder, {"lane": 1})
    relay.add(0, epoch(0, 16))
    assert runs.is_watched(get_share(run, 0).folder)
    assert runs.read_json(run.folder / runs.PREVIEW) == {"lane": 2}
