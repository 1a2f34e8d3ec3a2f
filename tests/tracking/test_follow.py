"""Followers send every point of a log once, whatever is killed and resumed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

import slipstream
from slipstream import runs
from slipstream.errors import UserError
from slipstream.tracking import follower
from slipstream.tracking.api import follow
from slipstream.tracking.tensorboard import TensorBoard
from tests.conftest import HUNG_S, small_config, waves
from tests.tracking.reading import logged_points, read_scalars

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
    runs.Run(run).append("resume", step=4, spent_s=1.0)
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
    runs.Run(run).append("resume", step=4, spent_s=1.0)
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
    monkeypatch.setattr("slipstream.runs.tail.MOST_BYTES", 500)  # several messages
    monkeypatch.setattr("slipstream.tracking.tensorboard.TensorBoard", Halting)
    with pytest.raises(KeyboardInterrupt):
        follow(run, "tensorboard", out=str(tmp_path / "board"))
    follow(run, "tensorboard", out=str(tmp_path / "board"))
    assert Halting.messages > 3
    board = tmp_path / "board" / run.name
    assert curves(board) == sorted(logged_points(run))
    assert len(read_scalars(board)) == len(set(read_scalars(board)))


def test_a_tracker_without_erasing_gets_only_what_is_new(run, tmp_path, monkeypatch):
    sent = []

    class Keeping(TensorBoard):
        def send(self, points):
            sent.extend(points)

        def begin_anew(self):
            return False

    monkeypatch.setattr("slipstream.tracking.tensorboard.TensorBoard", Keeping)
    whole = logged_points(run)
    rest = cut_log(run, 12)
    follow(run, "tensorboard", out=str(tmp_path / "board"))
    cut_log(run, 9)
    runs.Run(run).append("resume", step=4, spent_s=1.0)
    with (run / "events.jsonl").open("ab") as log:
        log.write(rest)
    follow(run, "tensorboard", out=str(tmp_path / "board"))
    keys = [(one.part, one.name, one.step) for one in sent]
    assert len(keys) == len(set(keys))
    assert set(keys) == {one[:3] for one in whole}


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


def test_times_are_those_of_the_log(run):
    events = list(runs.read_events(runs.Run(run)))
    reader = follower.PointReader(0.0)
    points = [point for event in events for point in reader.read(event)]
    opened = follower.PointReader(0.0)
    opened.read(events[0])
    assert opened.opened > 1.7e9
    assert all(point.at >= opened.opened for point in points)


@pytest.mark.parametrize(
    ("to", "message"), [("excel", "is none of"), ("mlflow", "which server|mlflow is missing")]
)
def test_what_cannot_be_followed_is_refused(run, monkeypatch, to, message):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=message):
        follow(run, to)


def test_two_followers_of_one_place_do_not_meet(run, tmp_path, monkeypatch):
    out = str(tmp_path / "board")

    class Second(TensorBoard):
        def send(self, points):
            with pytest.raises(UserError, match=r"lock\.json|process"):
                follow(run, "tensorboard", out=out)
            super().send(points)

    monkeypatch.setattr("slipstream.tracking.tensorboard.TensorBoard", Second)
    assert follow(run, "tensorboard", out=out)["points"]


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
