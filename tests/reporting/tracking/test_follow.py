"""Followers send every point of a log once, whatever is killed and resumed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest

import slipstream
from slipstream import runs
from slipstream.base.errors import ResumableError, UserError
from slipstream.base.run_names import get_start_time
from slipstream.events import Resume
from slipstream.reporting.tracking import tracker as tracking_tracker
from slipstream.reporting.tracking.follower import PROJECT, Followed, Follower, SentPoints, follow
from slipstream.reporting.tracking.tensorboard import TensorBoard
from slipstream.reporting.tracking.tracker import (
    FollowedRun,
    Point,
    Tracker,
    TrackerDown,
    draw_pictures,
    read_figures,
)
from slipstream.training import train
from tests.conftest import HUNG_S, merged, mostly_slow, slow, small_config, waves
from tests.labelled import class_config, states
from tests.logs import as_lines
from tests.reporting.tracking.reading import logged_points, read_scalars, to_single

REPEATED = {"train": {"repeats": 2, "epochs": 3}, "engine": {"log_every": 4}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("runs"), **REPEATED)
    return Path(slipstream.train(config, waves(), quiet=True).run)


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / trained.name))


def figures(run: Path) -> list[tuple[str, str, int, float]]:
    return [one for one in read_scalars(run) if "/" in one[1] and not one[1].startswith("monitor")]


def curves(folder: Path) -> list[tuple[str, str, int, float]]:
    return sorted(set(read_scalars(folder)) - set(figures(folder)))


def test_the_points_of_a_finished_run_arrive_once(run, tmp_path):
    result = follow(run, "tensorboard", out=str(tmp_path / "board"))
    wanted = logged_points(run)
    assert {"lane-0", "lane-1"} <= {part for part, *_ in wanted}
    assert {"loss", "train_loss", "val_loss"} <= {name for _, name, *_ in wanted}
    assert result["points"] == len(wanted) == len(set(wanted))
    board = tmp_path / "board" / run.name
    assert curves(board) == sorted(wanted)
    errors = {name: value for _, name, _, value in figures(board)}
    metrics = json.loads((run / "metrics.json").read_text())["metrics"]
    assert errors["test/mae"] == pytest.approx(metrics["test"]["mae"], rel=1e-6)
    again = follow(run, "tensorboard", out=str(tmp_path / "board"))
    assert again["points"] == 0
    assert again["finished"]
    assert len(read_scalars(board)) == len(wanted) + len(errors)


def follow_by(
    kind: type[Tracker], run: Path, out: str, warn=print, *, project: str = PROJECT
) -> Followed:
    """Follow a run as `follow` does, with a tracker of this class."""
    place = run / "follow" / kind.__name__
    place.mkdir(parents=True, exist_ok=True)
    state = SentPoints(place / "sent.json", opened=get_start_time(run))
    about = FollowedRun(run, project, out, runs.read_settings(runs.Run(run)))
    tracker = kind(about, state)
    try:
        return Follower(run, state, tracker, warn).follow(None)
    finally:
        tracker.close()


def cut_log(run: Path, lines: int) -> bytes:
    """Cut a log as a kill and a resume do; return what follows."""
    content = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(content[:lines]))
    return b"".join(content[lines:])


def test_a_log_that_a_resumed_run_cut_gives_the_points_that_stand_there(run, tmp_path):
    whole = logged_points(run)
    metrics = (run / "metrics.json").read_bytes()
    (run / "metrics.json").unlink()
    rest = cut_log(run, 12)
    board = tmp_path / "board"
    assert not follow(run, "tensorboard", out=str(board))["finished"]
    cut_log(run, 7)
    runs.Run(run).append(Resume(step=4, spent_s=1.0))
    with (run / "events.jsonl").open("ab") as log:
        log.write(b"".join(rest.splitlines(keepends=True)))
    (run / "metrics.json").write_bytes(metrics)
    follow(run, "tensorboard", out=str(board))
    standing = logged_points(run)
    assert set(standing) < set(whole)
    assert curves(board / run.name) == sorted(standing)


def test_points_beside_the_runs_own_files_leave_these_alone(run):
    before = {path for path in run.rglob("*") if path.name != "events.jsonl"}
    out = str(run.parent)  # the event files lie in the run's folder
    follow(run, "tensorboard", out=out)
    cut_log(run, 9)
    runs.Run(run).append(Resume(step=4, spent_s=1.0))
    follow(run, "tensorboard", out=out)
    assert before <= set(run.rglob("*"))
    assert set(logged_points(run)) <= set(read_scalars(run))


class Halting(TensorBoard):
    """Is killed in the middle of its second message."""

    messages = 0

    def send(self, points):
        Halting.messages += 1
        super().send(points if Halting.messages != 2 else points[: len(points) // 2])
        if Halting.messages == 2:
            raise KeyboardInterrupt


def test_a_follower_that_is_killed_goes_on_without_loss_or_repetition(run, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.runs.log.MAX_BYTES", 500)  # several messages
    with pytest.raises(KeyboardInterrupt):
        follow_by(Halting, run, str(tmp_path / "board"))
    follow_by(Halting, run, str(tmp_path / "board"))
    assert Halting.messages > 3
    board = tmp_path / "board" / run.name
    assert curves(board) == sorted(logged_points(run))
    assert len(read_scalars(board)) == len(set(read_scalars(board)))


class Keeping(TensorBoard):
    """A tracker that cannot take back a point, as MLflow."""

    can_rewrite = False
    sent: ClassVar[list[Point]] = []
    begins = 0

    def send(self, points):
        type(self).sent += points
        super().send(points)

    def find_missing(self, points):
        return [point for point in points if point not in self.sent]

    def begin_anew(self):
        type(self).begins += 1
        type(self).sent = []
        super().begin_anew()


@pytest.fixture
def keeping():
    """Such a tracker, to which nothing was sent yet."""

    class Empty(Keeping):
        sent: ClassVar[list[Point]] = []

    return Empty


class Killed(Exception):
    """Ends a run where it stands."""


def stop_after(number, kind):
    """A function that stops a run as a kill does, without a checkpoint, at an event."""
    left = [number]

    def look(event):
        left[0] -= event["event"] == kind
        if left[0] == 0:
            raise Killed

    return look


def as_points(points):
    return sorted((one.part, one.name, one.step, to_single(one.value)) for one in points)


@pytest.mark.parametrize("repeats", [slow(1), 2])
def test_points_that_a_resumed_run_writes_again_are_sent_once(keeping, tmp_path, repeats):
    sections = {"train": {"repeats": repeats, "epochs": 8}, "engine": {"log_every": 2}}
    config = small_config(tmp_path / "runs", **sections)
    out, folders = str(tmp_path / "board"), []
    with pytest.raises(Killed):
        train(config, waves(), watch=as_lines(stop_after(3 * repeats, "epoch")))
    for events in (2, 4):  # killed again after the resume
        folders.append(runs.find_last(config.out))
        unsettled = set(logged_points(folders[-1]))
        assert not follow_by(keeping, folders[-1], out).is_finished
        assert set(as_points(keeping.sent)) < unsettled
        again = {"resume": folders[-1], "watch": as_lines(stop_after(events, "log"))}
        with pytest.raises(Killed):  # other steps are logged, at another speed
            train(None, waves(), overrides=("engine.log_every=3",), **again)
    follow_by(keeping, folders[-1], out)
    result = slipstream.train(data=waves(), resume=folders[-1], quiet=True)
    follow_by(keeping, result.run, out)
    assert keeping.begins == 0
    assert as_points(set(keeping.sent)) == as_points(keeping.sent)
    assert as_points(keeping.sent) == sorted(logged_points(result.run) + figures_of(result))


def figures_of(result) -> list[tuple[str, str, int, float]]:
    step = max(one.step for one in result.history)
    values = read_figures(json.loads((result.run / "metrics.json").read_text()))
    return [("", name, step, to_single(value)) for name, value in values.items()]


def test_the_figures_of_a_run_hold_the_scores_of_its_intervals():
    metrics = {"test": {"mae": 2.0, "r2": None}}
    assert read_figures({"metrics": metrics}) == {"test/mae": 2.0}
    scores = {"coverage": {"80": 0.79}, "width": {"80": 1.5}, "crps": 0.03}
    wanted = {"test/coverage_80": 0.79, "test/width_80": 1.5, "test/interval_crps": 0.03}
    assert read_figures({"metrics": metrics} | scores) == {"test/mae": 2.0} | wanted


def test_a_run_that_trains_longer_goes_on_in_the_same_place(keeping, tmp_path):
    config = small_config(tmp_path / "runs", engine={"log_every": 2})
    out = str(tmp_path / "board")
    first = slipstream.train(config, waves(), quiet=True)
    follow_by(keeping, first.run, out)
    early = figures_of(first)
    longer = slipstream.train(
        data=waves(), resume=first.run, overrides="train.epochs=4", quiet=True
    )
    follow_by(keeping, longer.run, out)
    assert keeping.begins == 0
    wanted = sorted(logged_points(longer.run) + early + figures_of(longer))
    assert as_points(keeping.sent) == wanted


def test_a_log_that_was_cut_before_what_was_sent_is_sent_anew(keeping, run, tmp_path):
    out = str(tmp_path / "board")
    follow_by(keeping, run, out)
    rest = cut_log(run, 9)
    with (run / "events.jsonl").open("ab") as log:  # an older checkpoint was used
        log.write(b"".join(rest.splitlines(keepends=True)[4:]))
    (run / "checkpoints").rename(run / "removed")
    follow_by(keeping, run, out)
    assert keeping.begins == 1
    assert as_points(one for one in keeping.sent if not is_figure(one.name)) == sorted(
        logged_points(run)
    )


def is_figure(name: str) -> bool:
    return "/" in name and not name.startswith("monitor")


class Failing(Keeping):
    """Its server is away for some calls, in the middle of a message."""

    sent: ClassVar[list[Point]] = []
    calls = 0

    def send(self, points):
        Failing.calls += 1
        if 2 <= Failing.calls <= 4:
            super().send(points[: len(points) // 2])
            raise TrackerDown("the server does not answer")
        super().send(points)


def test_a_server_that_is_away_gets_what_is_missing_later(run, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.runs.log.MAX_BYTES", 500)
    monkeypatch.setattr("slipstream.reporting.tracking.follower.FIRST_PAUSE_S", 0.01)
    messages: list[str] = []
    follow_by(Failing, run, str(tmp_path / "board"), messages.append)
    assert messages == [
        "the server does not answer; trying again, while the run trains and five minutes longer",
        "the tracker answers again",
    ]
    sent = [one for one in Failing.sent if not is_figure(one.name)]
    assert as_points(sent) == sorted(logged_points(run))


def test_a_server_that_stays_away_ends_the_follower_which_can_go_on(run, tmp_path, monkeypatch):
    class Server(TensorBoard):
        is_away = True

        def send(self, points):
            if self.is_away:
                raise TrackerDown("the server does not answer")
            super().send(points)

    monkeypatch.setattr("slipstream.reporting.tracking.follower.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("slipstream.reporting.tracking.follower.PATIENCE_S", 0.05)
    out = str(tmp_path / "board")
    with pytest.raises(ResumableError, match="the same command"):
        follow_by(Server, run, out, lambda _: None)
    Server.is_away = False
    assert follow_by(Server, run, out).points == len(logged_points(run))
    assert curves(tmp_path / "board" / run.name) == sorted(logged_points(run))


@pytest.mark.slow
def test_a_search_has_its_trials_as_parts(tmp_path):
    study = slipstream.tune(
        small_config(
            tmp_path / "runs",
            train={"epochs": 2},
            tune={"trials": 3, "retrain": 1, "space": {"train.lr": {"low": 1e-3, "high": 1e-2}}},
        ),
        waves(),
        quiet=True,
    )
    folder = Path(study.run)
    follow(folder, "tensorboard", out=str(tmp_path / "board"))
    wanted = logged_points(folder)
    parts = {part for part, *_ in wanted}
    assert {"trial-0", "trial-1", "trial-2"} <= parts
    assert [step for _, name, step, _ in wanted if name == "trial_value"] != []
    assert curves(tmp_path / "board" / folder.name) == sorted(set(wanted))
    best = folder / "retrained" / "best"  # every search has one of this name
    follow(best, "tensorboard", out=str(tmp_path / "board"))
    name = f"{folder.name}/retrained/best"
    assert curves(tmp_path / "board" / name) == sorted(set(logged_points(best)))


def test_times_are_those_of_the_log(run):
    events = list(runs.read_events(runs.Run(run)))
    reader = tracking_tracker.PointReader(0.0)
    points = [point for event in events for point in reader.read(event)]
    opened = tracking_tracker.PointReader(0.0)
    opened.read(events[0])
    assert opened.opened > 1.7e9
    assert all(point.at >= opened.opened for point in points)


def test_two_followers_of_one_place_do_not_meet(run, tmp_path):
    out, shown = str(tmp_path / "board"), []

    def follow_again(sent):
        shown.append(sent)
        with pytest.raises(UserError, match=r"lock\.json|process"):
            follow(run, "tensorboard", out=out)

    assert follow(run, "tensorboard", out=out, show=follow_again)["points"]
    assert shown


@pytest.mark.slow
def test_a_config_starts_the_follower_with_the_run(tmp_path):
    board = tmp_path / "board"
    config = small_config(tmp_path / "runs", follow={"to": "tensorboard", "out": str(board)})
    run = Path(slipstream.train(config, waves(), quiet=True).run)
    wait_for(lambda: read_sent(run).get("finished_at"))
    assert curves(board / run.name) == sorted(set(logged_points(run)))


def read_sent(run: Path) -> dict[str, object]:
    found = list(run.glob("follow/*/sent.json"))
    return runs.read_json(found[0]) if found else {}


def wait_for(condition) -> None:
    until = time.monotonic() + HUNG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


SHAPES = {
    "a forecast": {},
    "an estimate": {"data": {"horizon": 0, "targets": ["c"]}},
    "several targets": {"data": {"targets": ["a", "b"]}},
    "channels": {"data": {"channels": "independent"}},
    "quantiles": {"train": {"loss": "quantile"}},
    "intervals": {"train": {"repeats": 2}},
    "folds": {"data": {"split": {"walk_forward": 2}}},
}


@pytest.mark.parametrize("shape", mostly_slow(SHAPES, "an estimate", "intervals"))
def test_predictions_of_every_shape_are_drawn(tmp_path, shape):
    sections, table = SHAPES[shape], waves(160)
    holes = np.where(np.arange(160) % 9 == 4, np.nan, table["c"].to_numpy())
    table = table.set_column(3, "c", pa.array(holes, from_pandas=True))
    settings = merged({"data": {"inputs": ["a", "b"], "targets": ["c"]}}, sections)
    if "targets" in sections.get("data", {}) or "channels" in sections.get("data", {}):
        settings, table = merged(settings, {"data": {"inputs": None}}), waves(160)
    config = small_config(tmp_path, **merged({"train": {"epochs": 1}}, settings))
    run = slipstream.train(config, table, quiet=True).run
    assert [path.name for path in draw_pictures(run, tmp_path, ".png")] == [
        "losses.png",
        "predictions.png",
    ]


def test_classes_have_no_picture_of_their_predictions(tmp_path):
    run = slipstream.train(class_config(tmp_path), states(300), quiet=True).run
    assert [path.name for path in draw_pictures(run, tmp_path, ".png")] == ["losses.png"]
    assert follow(run, "tensorboard", out=str(tmp_path / "board"))["finished"]


@pytest.mark.parametrize("name", ["config.toml", "predictions.parquet"])
@pytest.mark.parametrize("content", [b"\xff\xfe no = [text", b"PAR1 half of it PAR1"])
def test_a_damaged_file_is_named(run, tmp_path, name, content):
    (run / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: .*is damaged"):
        follow(run, "tensorboard", out=str(tmp_path / "board"))
