"""MLflow: one run, and a nested one for each model, on the server that `out` or
MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from slipstream.base.errors import Option, UserError
from slipstream.base.text import holds_secret, mask_secrets
from slipstream.reporting.tracking.tracker import (
    WHOLE,
    FollowedRun,
    Memory,
    Point,
    Tracker,
    TrackerDown,
)

MAX_METRICS = 1000
"""That a request may have"""
MAX_PARAMS = 100
MAX_CHARACTERS = 6000
"""Of a parameter"""
DEFAULTS = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the follower tries again itself
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
}
STATES = {"finished": "FINISHED", "failed": "FAILED", "pruned": "KILLED", "cut off": "KILLED"}
"""MLflow's names for the states of a trial"""
TOO_MANY = 429
"""The status of a server that gets too many requests"""
MAX_MESSAGE = 300
"""Characters of a message of MLflow's"""
SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([\w ]+)")
NOTE = "mlflow.note.content"
"""The tag with a run's description"""


class MLflow(Tracker):
    """Sends points with `log_batch`."""

    pictures = ".svg"

    def __init__(self, about: FollowedRun, memory: Memory) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        super().__init__(about, memory)
        self._secret_address = about.out or os.environ.get("MLFLOW_TRACKING_URI") or ""
        self.address = take_password(self._secret_address)
        if not self.address:
            raise UserError(
                "mlflow: which server? Pass "
                + Option("out", "http://HOST:PORT")
                + ", or set MLFLOW_TRACKING_URI"
            )
        try:
            self._client: Any = MlflowClient(self.address)
        except Exception as error:  # of many kinds: the address chooses what is imported
            reason = self._describe(error).partition(". ")[0]
            raise UserError(
                f"mlflow at {self.address}: {reason}; write the address of a server as "
                "http://HOST:PORT"
            ) from None
        self._experiment: str | None = None
        self._user_tags: dict[str, str] = {}
        """Of a run that was replaced"""
        self._open: set[str] = set()
        """Parts whose runs are marked as running"""

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return function(*arguments, **named)
        except (MlflowException, OSError) as error:  # requests' errors are OSErrors
            text = self._describe(error)
            if is_outage(error):
                raise TrackerDown(f"mlflow at {self.address}: does not answer ({text})") from None
            raise UserError(f"mlflow at {self.address}: {text}") from None

    def _describe(self, error: Exception) -> str:
        """Return the first line of an error's message, or the system's words at the end of it."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if reasons := SYSTEM_ERROR.findall(lines[0]):
            return str(reasons[-1])
        return mask_secrets(lines[0][:MAX_MESSAGE], self._secret_address)

    def _find_run(self, part: str) -> str:
        if part not in self.remote:
            self.remote[part] = self._create_run(part)
            self.memory.save()
        elif part not in self._open:  # an earlier follower has created it, and perhaps ended it
            self._call(self._client.update_run, self.remote[part], status="RUNNING")
        self._open.add(part)
        return self.remote[part]

    def _find_experiment(self) -> str:
        if self._experiment is None:
            name = self.about.project
            earlier = self._call(self._client.get_experiment_by_name, name)
            self._experiment = (
                earlier.experiment_id
                if earlier
                else self._call(self._client.create_experiment, name)
            )
        return str(self._experiment)

    def _create_run(self, part: str) -> str:
        tags = {"slipstream.run": str(self.about.folder)} | self._user_tags
        if part != WHOLE:
            parent = self._find_run(WHOLE)
            tags = {"mlflow.parentRunId": parent, "slipstream.part": part}
        created = self._call(
            self._client.create_run,
            self._find_experiment(),
            tags=tags,
            run_name=f"{self.about.name} {part}".strip(),
        )
        run = str(created.info.run_id)
        self._add_settings(run, self.get_settings(part))
        return run

    def _add_settings(self, run: str, settings: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = (Param(key, str(value)[:MAX_CHARACTERS]) for key, value in settings.items())
        for batch in _split(params, MAX_PARAMS):
            self._call(self._client.log_batch, run, params=batch)

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        for part, points_of_part in _by_part(points):
            metrics = (
                Metric(point.name, point.value, int(point.at * 1000), point.step)
                for point in points_of_part
            )
            for batch in _split(metrics, MAX_METRICS):
                self._call(self._client.log_batch, self._find_run(part), metrics=batch)

    def begin_anew(self) -> None:
        """Delete the runs (until `mlflow gc` they can be restored), since no single point can be
        taken back. The new run has the tags and the description of the old one."""
        for part in list(self.remote):
            run = self.remote[part]
            with suppress(UserError):  # somebody has deleted it
                if part == WHOLE:
                    tags = self._call(self._client.get_run, run).data.tags
                    self._user_tags = {key: tags[key] for key in tags if is_user_tag(key)}
                self._call(self._client.delete_run, run)
            del self.remote[part]

    def find_missing(self, points: Sequence[Point]) -> list[Point]:
        there: set[tuple[str, str, int, float]] = set()
        for part, name in {(point.part, point.name) for point in points}:
            if part in self.remote:
                history = self._call(self._client.get_metric_history, self.remote[part], name)
                there |= {(part, name, metric.step, metric.value) for metric in history}
        return [
            point
            for point in points
            if (point.part, point.name, point.step, point.value) not in there
        ]

    def end_part(self, part: str, state: str) -> None:
        if part in self.remote:
            self._call(self._client.set_terminated, self.remote[part], STATES.get(state))

    def finish(self, figures: Sequence[Point], files: dict[str, Path]) -> None:
        self.send(figures)  # the same ones again change nothing
        run = self._find_run(WHOLE)
        for name, file in files.items():
            place = str(PurePosixPath(name).parent)
            self._call(self._client.log_artifact, run, str(file), None if place == "." else place)
        self._end_open("FINISHED")

    def stop(self) -> None:
        self._end_open("KILLED")

    def _end_open(self, status: str) -> None:
        for part, run in self.remote.items():
            if part.startswith("trial-"):  # which are over when they are created
                continue
            if self._call(self._client.get_run, run).info.status == "RUNNING":
                self._call(self._client.set_terminated, run, status)
        self._open.clear()

    def close(self) -> None:
        """Nothing is open."""

    def describe(self) -> str:
        return f"{self.address}, experiment {self.about.project!r}, run {self.remote.get(WHOLE)}"


def take_password(address: str) -> str:
    """Return an address without its user and password, which go to the variables that MLflow reads
    them from, so that no message contains them."""
    if "://" not in address or "@" not in address:
        return address
    try:
        parts = urlsplit(address)
    except ValueError:  # such as a [ that is not closed
        raise UserError(
            Option("out") + " is not an address; write it as http://HOST:PORT"
        ) from None
    if "@" not in parts.netloc and holds_secret(address):
        raise UserError(
            Option("out")
            + ": what is before the @ looks like a password; write / ? and # in a password, "
            "and @ in a path, as %2F, %3F, %23 and %40"
        )
    if parts.username is not None:
        os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    if parts.password is not None:
        os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def is_outage(error: Exception) -> bool:
    """Whether a request may succeed later."""
    response = getattr(error, "response", None)
    if response is not None:
        return bool(response.status_code >= 500 or response.status_code == TOO_MANY)
    ask = getattr(error, "get_http_status_code", None)
    return ask is None or ask() >= 500 or ask() == TOO_MANY


def is_user_tag(name: str) -> bool:
    return name == NOTE or not name.startswith(("mlflow.", "slipstream."))


def _by_part(points: Sequence[Point]) -> Iterable[tuple[str, Iterable[Point]]]:
    return groupby(sorted(points, key=lambda point: point.part), key=lambda point: point.part)


def _split(values: Iterable[Any], size: int) -> Iterable[list[Any]]:
    waiting = iter(values)
    while batch := list(islice(waiting, size)):
        yield batch
