"""`slipstream.follow`."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.errors import UserError
from slipstream.run_names import get_start_time
from slipstream.runs.following import EXTRAS
from slipstream.runs.lock import acquire
from slipstream.tracking.follower import Follower, SentPoints, check_run
from slipstream.tracking.tracker import FollowedRun, Tracker

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
        raise UserError(f"--to {to}: is none of {', '.join(EXTRAS)}")
    if to == "mlflow" and out and "@" in out:
        from slipstream.tracking.mlflow import take_password

        out = take_password(out)
    if to != "mlflow" and out and "://" in out:
        raise UserError(f"--out is an address; {to} takes a folder of this machine")
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
            from slipstream.tracking.tensorboard import TensorBoard

            return TensorBoard(about, state)
        if to == "mlflow":
            from slipstream.tracking.mlflow import MLflow

            return MLflow(about, state)
        from slipstream.tracking.wandb import WeightsAndBiases

        return WeightsAndBiases(about, state)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != EXTRAS[to]:
            raise
        raise UserError(
            f"{error.name} is missing; install the extra: pip install 'slipstream[{to}]'"
        ) from None
