"""Follow a run and send what is new, once and no more."""

from __future__ import annotations

import copy
import hashlib
import time
import warnings
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import runs
from slipstream.base.errors import Option, ResumableError, UserError
from slipstream.base.run_names import get_start_time
from slipstream.events import LaneEnd, TrialEnd
from slipstream.reporting.tracking.tracker import (
    WHOLE,
    FollowedRun,
    Point,
    PointReader,
    Tracker,
    TrackerDown,
    find_durable_size,
    is_finished,
)
from slipstream.runs import lock as locks
from slipstream.runs.lock import acquire
from slipstream.runs.log import LOG_START, Chunk, read_chunk
from slipstream.runs.watching import EXTRAS

POLL_S = 1.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Between two attempts to reach a server that does not answer"""
PATIENCE_S = 300.0
"""How long a server is tried after the run has ended; before that, as long as the run trains"""
LOSS = "/val_loss"
"""The series whose last step is that of the final figures"""


class Followed(NamedTuple):
    """How far a follower has come."""

    points: int
    """Sent by this process"""
    is_finished: bool
    """Whether the run is, and its figures and files were added"""


class SentPoints:
    """The state of a follower on disk: how far the log was sent."""

    def __init__(self, path: Path, opened: float) -> None:
        self.path, self.is_new = path, not path.exists()
        saved = {} if self.is_new else runs.read_json(path)
        self.position: str = saved.get("position", LOG_START)
        self.remote: dict[str, str] = saved.get("remote", {})
        self.finished_at: str | None = saved.get("finished_at")
        reader = saved.get("reader") or {"opened": opened}
        self.reader = PointReader(**reader)
        self.pending: list[Point] = [Point(*values) for values in saved.get("pending", [])]
        """That may or may not have arrived"""

    def save(self) -> None:
        names = ("position", "remote", "finished_at", "pending")
        reader = {"reader": vars(self.reader)}
        runs.write_json(self.path, {name: getattr(self, name) for name in names} | reader)

    def forget(self, opened: float) -> None:
        """Begin anew: nothing was sent."""
        self.position, self.reader = LOG_START, PointReader(opened)
        self.pending, self.finished_at = [], None


class Follower:
    """Sends one run's points to one tracker."""

    def __init__(
        self, folder: Path, state: SentPoints, tracker: Tracker, warn: Callable[[str], None]
    ) -> None:
        self.folder, self.state, self.tracker, self.warn = folder, state, tracker, warn
        self._sent = 0
        self._is_unsure = False
        """Whether the pending points may have been sent already"""

    def follow(self, show: Callable[[int], None] | None) -> Followed:
        """Send points until the run ends; `show` is called with their number."""
        self._call(self._recover)
        while True:
            is_running = self._is_running()  # before its last lines are read
            while self._send_durable():
                if show is not None:
                    show(self._sent)
            if not is_running:
                break
            time.sleep(POLL_S)
        finished = is_finished(self.folder)
        if finished:
            self._read_rest()
            self._call(self._finish)
        else:
            self._call(self.tracker.stop)
        self.state.save()
        return Followed(self._sent, finished)

    def _is_running(self) -> bool:
        return bool(locks.find_holder(self.folder))

    def _call(self, function: Callable[[], Any]) -> None:
        """Call a function that needs the server, again and again while that does not answer."""
        pause_s, since = FIRST_PAUSE_S, None
        while True:
            try:
                function()
            except TrackerDown as error:
                now = time.monotonic()
                if since is None:
                    self.warn(
                        f"{error}; trying again, while the run trains and five minutes longer"
                    )
                if since is None or self._is_running():
                    since = now
                if now - since > PATIENCE_S:
                    raise ResumableError(
                        f"{error}; the rest is sent by the same command, once it answers"
                    ) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                if since is not None:
                    self.warn("the tracker answers again")
                return

    def _recover(self) -> None:
        """Send those of the pending points that have not arrived: the follower was killed, or the
        server went away."""
        pending = self.state.pending
        missing = self.tracker.find_missing(pending) if pending else []
        if missing is None:
            self._begin_anew()
            return
        self.tracker.send(missing)
        self._sent += len(missing)
        self.state.pending = []

    def _begin_anew(self) -> None:
        self.tracker.begin_anew()
        self.state.forget(get_start_time(self.folder))

    def _send_durable(self) -> bool:
        """Send the new events that a resumed run would retain; return whether there were any."""
        end = None if self.tracker.can_rewrite else find_durable_size(self.folder)
        chunk = read_chunk(self.folder / "events.jsonl", self.state.position, end=end)
        if chunk.is_reset:
            self._call(self._begin_anew)
            return True
        if chunk.position == self.state.position:
            return False
        self._send(self.state.reader, chunk)
        return True

    def _read_rest(self) -> None:
        """Send the last points of a finished run. Without any, the position stays, so that a run
        that trains longer, and cuts its log to its checkpoint, goes on from there."""
        while True:
            chunk = read_chunk(self.folder / "events.jsonl", self.state.position)
            trial = copy.deepcopy(self.state.reader)
            if not any(map(trial.read, chunk.events)):
                return
            self._send(self.state.reader, chunk)

    def _send(self, reader: PointReader, chunk: Chunk) -> None:
        """Send the points of a chunk, which is pending until they have arrived."""
        points: list[Point] = []
        ended: dict[str, str] = {}
        for event in chunk.events:
            points += reader.read(event)
            match event:
                case TrialEnd():
                    part = f"trial-{event.trial}"
                    ended[part] = event.state
                    self.tracker.part_settings[part] = event.params
                case LaneEnd():
                    ended[f"lane-{event.lane}"] = "finished"
        self.state.position = chunk.position
        if points:
            self.state.pending = points
            self.state.save()
            self._call(self._send_pending)
        for part, state in ended.items():
            self._call(partial(self.tracker.end_part, part, state))
        if points or ended:
            self.state.save()

    def _send_pending(self) -> None:
        if self._is_unsure:
            self._recover()
        else:
            self._is_unsure = True
            self.tracker.send(self.state.pending)
            self._sent += len(self.state.pending)
            self.state.pending = []
        self._is_unsure = False

    def _finish(self) -> None:
        # they import pyarrow, which training shall not wait for
        from slipstream.reporting.tracking.tracker import list_files, read_figures

        metrics = runs.read_json(self.folder / "metrics.json")
        finished_at = str(metrics.get("finished_at"))
        if self.state.finished_at != finished_at:
            steps = [last[0] for name, last in self.state.reader.last.items() if LOSS in name]
            finished = parse_time(metrics.get("finished_at"))
            figures = [
                Point(WHOLE, name, int(max(steps, default=0)), value, finished)
                for name, value in read_figures(metrics).items()
            ]
            with list_files(self.folder, self.tracker.pictures) as files:
                self.tracker.finish(figures, files)
            self.state.finished_at = finished_at


def parse_time(text: str | None) -> float:
    """Return the POSIX time of a text; now where there is none."""
    return datetime.fromisoformat(text).timestamp() if text else time.time()


def check_run(folder: Path) -> None:
    """Refuse a run whose folder cannot take the state."""
    if not (folder / "events.jsonl").exists() and not locks.find_holder(folder):
        raise UserError(f"{folder}: has no events.jsonl to follow")


PROJECT = "slipstream"


def follow(
    run: str | Path,
    to: str,
    *,
    out: str | None = None,
    project: str = PROJECT,
    show: Callable[[int], None] | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> dict[str, Any]:
    """Send the log of a run to a tracker, until the run ends; a finished run is sent at once.

    The run's folder records what was sent, so another call continues from there. If a server does
    not answer, the call retries until five minutes after the end of the run.

    Args:
        run: A run folder, the beginning of its name, or "last".
        to: "tensorboard", "mlflow" or "wandb".
        out: TensorBoard: the folder (default: tensorboard). MLflow: the server's address (default:
            MLFLOW_TRACKING_URI). Weights & Biases: the folder of its files.
        project: MLflow's experiment, or the project of Weights & Biases.
        show: Called with the number of points sent so far.
        warn: Called with a message when the server does not answer, and when it does again.

    Returns:
        A dict: `to`, `run`, `where`, `points` (sent by this call) and `finished` (whether the run
        is finished, and its metrics, config, report, plots and model were sent).

    Raises:
        UserError: There is no such run or tracker, a package is missing, or the server does not
            answer as it should.
        ResumableError: The server does not answer; the same call sends the rest later.

    Example:
        result = slipstream.train("job.toml")
        slipstream.follow(result.run, "tensorboard", out="board")
    """
    if to not in EXTRAS:
        raise UserError(Option("to", to) + f": is none of {', '.join(EXTRAS)}")
    if to == "mlflow" and out and "@" in out:
        from slipstream.reporting.tracking.mlflow import take_password

        out = take_password(out)
    if to != "mlflow" and out and "://" in out:
        raise UserError(Option("out") + f" is an address; {to} takes a folder of this machine")
    folder = runs.find_run(run)
    check_run(folder)
    place = folder / "follow" / _name_place(to, out)
    place.mkdir(parents=True, exist_ok=True)
    lock = acquire(place)
    try:
        state = SentPoints(place / "sent.json", opened=get_start_time(folder))
        has_config = (folder / "config.toml").is_file()  # a probe has none
        settings = runs.read_settings(runs.Run(folder)) if has_config else {}
        tracker = _open_tracker(to, FollowedRun(folder, project, out, settings), state)
        try:
            followed = Follower(folder, state, tracker, warn).follow(show)
        finally:
            tracker.close()
        return {
            "to": to,
            "run": str(folder),
            "where": tracker.describe(),
            "points": followed.points,
            "finished": followed.is_finished,
        }
    finally:
        lock.release()


def _name_place(to: str, out: str | None) -> str:
    """Return the name of the folder for what was sent to one place."""
    absolute = str(Path(out).absolute()) if out and "://" not in out else out or ""
    return f"{to}-{hashlib.sha256(absolute.encode()).hexdigest()[:8]}"


def _open_tracker(to: str, about: FollowedRun, state: SentPoints) -> Tracker:
    try:
        if to == "tensorboard":
            from slipstream.reporting.tracking.tensorboard import TensorBoard

            return TensorBoard(about, state)
        if to == "mlflow":
            from slipstream.reporting.tracking.mlflow import MLflow

            return MLflow(about, state)
        from slipstream.reporting.tracking.wandb import WeightsAndBiases

        return WeightsAndBiases(about, state)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != EXTRAS[to]:
            raise
        raise UserError(
            f"{error.name} is missing; install the extra: pip install 'slipstream[{to}]'"
        ) from None
