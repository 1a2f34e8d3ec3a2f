"""MLflow: one run, and a nested one for each model, on the server that `out` or
MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any

from slipstream.errors import UserError
from slipstream.tracking.points import WHOLE, Point
from slipstream.tracking.tracker import FollowedRun, Memory, Tracker

MOST_METRICS = 1000
"""That a request may have"""
MOST_PARAMS = 100
MOST_CHARACTERS = 6000
"""Of a parameter"""


class MLflow(Tracker):
    """Sends points with `log_batch`."""

    def __init__(self, about: FollowedRun, memory: Memory) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient

        super().__init__(about, memory)
        self.address = about.out or os.environ.get("MLFLOW_TRACKING_URI")
        if not self.address:
            raise UserError(
                "mlflow: which server? Pass --out http://HOST:PORT, or set MLFLOW_TRACKING_URI"
            )
        self._client: Any = MlflowClient(self.address)

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return function(*arguments, **named)
        except MlflowException as error:
            text = str(error).strip().partition("\n")[0][:300]
            raise UserError(f"mlflow at {self.address}: {text}") from None

    def _find_run(self, part: str) -> str:
        if part not in self.remote:
            self.remote[part] = self._create_run(part)
            self.memory.save()
        return self.remote[part]

    def _create_run(self, part: str) -> str:
        name = self.about.project
        earlier = self._call(self._client.get_experiment_by_name, name)
        experiment = earlier.experiment_id if earlier else None
        if experiment is None:
            experiment = self._call(self._client.create_experiment, name)
        tags = {"slipstream.run": str(self.about.folder)}
        if part != WHOLE:
            tags |= {"mlflow.parentRunId": self._find_run(WHOLE), "slipstream.part": part}
        created = self._call(
            self._client.create_run,
            experiment,
            tags=tags,
            run_name=f"{self.about.name} {part}".strip(),
        )
        run = str(created.info.run_id)
        self._add_settings(run, self.get_settings(part))
        return run

    def _add_settings(self, run: str, settings: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = (Param(key, str(value)[:MOST_CHARACTERS]) for key, value in settings.items())
        for batch in _split(params, MOST_PARAMS):
            self._call(self._client.log_batch, run, params=batch)

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        for part, own in _by_part(points):
            metrics = (Metric(one.name, one.value, int(one.at * 1000), one.step) for one in own)
            for batch in _split(metrics, MOST_METRICS):
                self._call(self._client.log_batch, self._find_run(part), metrics=batch)

    def begin_anew(self) -> bool:
        return False

    def find_missing(self, points: Sequence[Point]) -> list[Point]:
        there: set[tuple[str, str, int, float]] = set()
        for part, name in {(point.part, point.name) for point in points}:
            if part in self.remote:
                history = self._call(self._client.get_metric_history, self.remote[part], name)
                there |= {(part, name, one.step, one.value) for one in history}
        return [one for one in points if (one.part, one.name, one.step, one.value) not in there]

    def finish(self, figures: dict[str, float], files: dict[str, Path]) -> None:
        from mlflow.entities import Metric

        run = self._find_run(WHOLE)
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, 0) for name, value in figures.items()]
        for batch in _split(metrics, MOST_METRICS):
            self._call(self._client.log_batch, run, metrics=batch)
        for name, file in files.items():
            place = str(PurePosixPath(name).parent)
            self._call(self._client.log_artifact, run, str(file), None if place == "." else place)
        for own in self.remote.values():
            self._call(self._client.set_terminated, own)

    def close(self) -> None:
        """Nothing is open."""

    def describe(self) -> str:
        return f"{self.address}, experiment {self.about.project!r}, run {self.remote.get(WHOLE)}"


def _by_part(points: Sequence[Point]) -> Iterable[tuple[str, Iterable[Point]]]:
    return groupby(sorted(points, key=lambda one: one.part), key=lambda one: one.part)


def _split(values: Iterable[Any], size: int) -> Iterable[list[Any]]:
    waiting = iter(values)
    while batch := list(islice(waiting, size)):
        yield batch
