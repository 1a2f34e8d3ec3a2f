"""Turn the log of a run into points, and send them with files and pictures to a tracker."""

from __future__ import annotations

import importlib
import math
import tempfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.run_names import SEARCHES, find_kind, is_run
from slipstream.events import (
    Epoch,
    Event,
    Log,
    MachineSample,
    Retrained,
    SearchStart,
    TrialEnd,
    format_event,
)
from slipstream.runs.summary import IntervalScores, list_interval_scores

if TYPE_CHECKING:
    from slipstream.reporting.charts import Chart

WHOLE = ""
"""The part of points that belong to the run as a whole"""
LOGGED = ("loss", "lr", "steps_per_s")
VALIDATED = ("train_loss", "val_loss", "lr")


class Point(NamedTuple):
    """One number."""

    part: str
    """The model it belongs to: lane-0, trial-7, or WHOLE"""
    name: str
    step: int
    value: float
    at: float
    """POSIX time"""


class PointReader:
    """Turns the events of one log into points, in their order."""

    def __init__(
        self,
        opened: float,
        child: str = "lane",
        counts: dict[str, int] | None = None,
        waiting: Sequence[Sequence[Any]] = (),
        last: dict[str, Sequence[float]] | None = None,
    ) -> None:
        """`opened`: the POSIX time from which `at_s` counts, for logs that do not state it."""
        self.opened, self.child, self.counts = opened, child, counts or {}
        self.waiting = [Point(*values) for values in waiting]
        """Samples of the machine since the last loss: they count once another one follows, since a
        finished run that trains longer writes those after its last checkpoint anew"""
        self.last = last or {}
        """Step and value of the last point, by part and name"""

    def read(self, event: Event) -> list[Point]:
        """Return the points of an event; numbers that are not finite are left out, and those that
        the event before has already."""
        opened_at = getattr(event, "opened_at", None)
        if opened_at is not None:
            self.opened = datetime.fromisoformat(opened_at).timestamp()
        if isinstance(event, SearchStart):
            self.child = "trial"
        logged_at = self.opened + (event.at_s or 0.0)
        points = [
            Point(part, name, step, float(value), logged_at)
            for part, name, step, value in self._list_values(event)
            if _is_number(value)
        ]
        if isinstance(event, MachineSample):
            self.waiting += points
            return []
        if points:
            points, self.waiting = [*self.waiting, *points], []
        return [point for point in points if self._is_new(point)]

    def _is_new(self, point: Point) -> bool:
        series, value = f"{point.part}/{point.name}", (point.step, point.value)
        before = tuple(self.last.get(series, ()))
        self.last[series] = value
        return before != value

    def _list_values(self, event: Event) -> Iterator[tuple[str, str, int, Any]]:
        match event:
            case Log():
                for name in LOGGED:
                    yield WHOLE, name, event.step, getattr(event, name)
                for model, loss in (event.losses or {}).items():
                    yield f"{self.child}-{model}", "loss", event.step, loss
            case Epoch():
                part = self._find_part(event)
                for name in VALIDATED:
                    yield part, name, event.step, getattr(event, name)
            case TrialEnd():
                yield WHOLE, "trial_value", event.trial, event.value
                step = event.steps or 0
                yield f"trial-{event.trial}", "val_loss", step, event.value
                yield f"trial-{event.trial}", "epochs", step, event.epochs
            case Retrained():
                yield WHOLE, "retrained_loss", self._count("retrained"), event.loss
            case MachineSample():
                worker = event.worker
                owner = "monitor" if worker is None else f"monitor/worker-{worker}"
                sample = self._count(owner)
                for name, value in format_event(event).items():
                    if name not in ("event", "at_s", "seconds", "worker"):
                        yield WHOLE, f"{owner}/{name}", sample, value

    def _find_part(self, event: Epoch) -> str:
        if event.trial is not None:
            return f"trial-{event.trial}"
        return WHOLE if event.lane is None else f"lane-{event.lane}"

    def _count(self, name: str) -> int:
        self.counts[name] = self.counts.get(name, -1) + 1
        return self.counts[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


STATE = "state.json"
"""Of a checkpoint"""


def find_durable_size(folder: Path) -> int | None:
    """Return the bytes of a run's log that a resumed run retains: those up to its last checkpoint;
    None for all."""
    if (folder / "workers").is_dir() or find_kind(folder) in SEARCHES:
        return None
    steps = [
        int(path.name.removeprefix("step-"))
        for path in (folder / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdecimal()
    ]
    for step in sorted(steps, reverse=True):
        try:
            saved = runs.read_json(folder / "checkpoints" / f"step-{step}" / STATE)
            return int(saved["log_bytes"])
        except (UserError, KeyError, TypeError, ValueError):
            continue  # just removed, or damaged
    return None if is_finished(folder) else 0


def is_finished(folder: Path) -> bool:
    return (folder / "metrics.json").exists()


MAX_DEPTH = 2
"""Folders between a run and the search that has trained it: search/retrained/best"""
OF_RUNS = ("events.jsonl", "labels.toml")
"""Files that only runs have, the second one those of probes"""


@dataclass(frozen=True)
class FollowedRun:
    """The run that is followed."""

    folder: Path
    project: str
    out: str | None
    """Where the points go: a folder or an address; None: where the tracker's own settings say"""
    settings: dict[str, Any] = field(default_factory=dict)
    """`model.hidden` and so on"""

    @cached_property
    def name(self) -> str:
        """The name of its folder; of a run inside of another one, such as those that a search
        retrains, the path from that one's, since all searches call them alike."""
        folder = self.folder.absolute()
        outer = [parent for parent in folder.parents[:MAX_DEPTH] if _holds_runs(parent)]
        return folder.relative_to(outer[-1].parent).as_posix() if outer else folder.name


def _holds_runs(folder: Path) -> bool:
    """Whether a folder is itself a run: a search or a probe. A config alone may be a user's."""
    return is_run(folder) and any((folder / name).exists() for name in OF_RUNS)


class Memory(Protocol):
    """The state of a tracker that is kept between processes."""

    is_new: bool
    """Whether nothing was sent before"""
    remote: dict[str, str]
    """The tracker's names for the run and its models"""

    def save(self) -> None: ...


class TrackerDown(Exception):
    """The tracker does not answer; it may later."""


class Tracker(ABC):
    """Takes points and, at the end, figures and files."""

    pictures = ".png"
    """The kind of pictures that it shows"""
    can_rewrite = False
    """Whether points can be taken back, so that those may be sent that a resumed run replaces"""

    def __init__(self, about: FollowedRun, memory: Memory) -> None:
        if self.pictures == ".png":
            importlib.import_module("PIL.Image")  # if missing, better now than after training
        self.about, self.memory, self.remote = about, memory, memory.remote
        self.part_settings: dict[str, dict[str, Any]] = {}
        """By part: what a trial of a search has of its own"""

    def get_settings(self, part: str) -> dict[str, Any]:
        return self.about.settings | self.part_settings.get(part, {})

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Send points of any parts; they have arrived when it returns."""

    @abstractmethod
    def begin_anew(self) -> None:
        """Erase what was sent: the log was cut, and some of it no longer holds."""

    @abstractmethod
    def find_missing(self, points: Sequence[Point]) -> Sequence[Point] | None:
        """Return those of the points that have not arrived, of which a killed process may have sent
        some; None where that cannot be known, and all has to be sent anew."""

    @abstractmethod
    def end_part(self, part: str, state: str) -> None:
        """Note that a model has ended: finished, pruned, failed or cut off."""

    @abstractmethod
    def finish(self, figures: Sequence[Point], files: dict[str, Path]) -> None:
        """Add the final figures and files of a finished run."""

    @abstractmethod
    def stop(self) -> None:
        """Note that the run has stopped before its end; it may go on later."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def describe(self) -> str:
        """Return where the points are, for the terminal."""


MAX_PICTURE_ROWS = 1500
"""Of a series in a picture"""


def draw_pictures(folder: Path, out: Path, suffix: str) -> Iterator[Path]:
    """Draw the losses and the predictions of a run as files with the suffix ".svg" or ".png", and
    yield those that the run has data for."""
    from slipstream.reporting.charts import render_png, render_svg

    drawings = {"losses": _draw_losses, "predictions": _draw_predictions}
    for name, draw in drawings.items():
        chart = draw(folder)
        if chart is None:
            continue
        file = out / f"{name}{suffix}"
        if suffix == ".svg":
            file.write_text(render_svg([chart]), "utf-8")
        else:
            file.write_bytes(render_png([chart]))
        yield file


def _draw_losses(folder: Path) -> Chart | None:
    """Return a chart of both losses of every model: a lane, or a trial of a search."""
    from slipstream.reporting.plots.training import build_loss_chart

    by_model: dict[tuple[int | None, int | None], list[Epoch]] = defaultdict(list)
    for event in runs.read_events(runs.Run(folder)):
        if isinstance(event, Epoch) and event.val_loss is not None:
            by_model[event.trial, event.lane].append(event)
    chart = build_loss_chart(by_model.values())
    if chart is not None:
        chart.title = "Losses"
    return chart


def _draw_predictions(folder: Path) -> Chart | None:
    """Return a chart of the first target of the first series; of a forecast, of the first row
    ahead. Classes have none."""
    from slipstream.data.predictions import PREDICTIONS, ROW, STEP, read_predictions
    from slipstream.reporting.charts import INK, MODEL, Chart, Scale, cover

    file = folder / PREDICTIONS
    predictions = read_predictions(file) if file.is_file() else None
    if not predictions or not predictions.shape.targets:
        return None
    target = predictions.shape.targets[0]
    chosen = predictions.codes == predictions.codes[0]
    if predictions.shape.is_forecast:
        chosen &= predictions[STEP] == predictions[STEP][0]
    rows = chosen.nonzero()[0][:MAX_PICTURE_ROWS]
    x, truth, predicted = (
        values[rows]
        for values in (
            predictions[ROW],
            predictions.read_truth(target),
            predictions.read_predicted(target),
        )
    )
    ends = float(x.min()), float(x.max())
    chart = Chart(Scale(*ends, whole=True), cover([*truth, *predicted]), "row", height=300)
    chart.title = f"{target}: the first series of the test set"
    chart.line(x, truth, INK, width=1.4, label="true")
    chart.line(x, predicted, MODEL, width=1.4, label="predicted")
    return chart


FILES = ("config.toml", "best.toml", "plan.json", "metrics.json", "report.html", "signature.json")


def read_figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a summary that say how good the model is: `test/mae` and so on."""
    figures = {
        f"{name}/{key}": float(value)
        for name, values in (metrics.get("metrics") or {}).items()
        if isinstance(values, Mapping)
        for key, value in values.items()
        if isinstance(value, int | float)
    }
    intervals = list_interval_scores(cast(IntervalScores, metrics))
    return figures | {f"test/{key}": float(value) for key, value in intervals.items()}


@contextmanager
def list_files(folder: Path, pictures: str) -> Iterator[dict[str, Path]]:
    """Return the files of a finished run by the names that they get, with pictures of its plots
    (".svg" or ".png"), which exist while the context does."""
    files = {name: folder / name for name in FILES if (folder / name).is_file()}
    files |= {f"model/{file.name}": file for file in sorted((folder / "model").glob("*.*"))}
    with tempfile.TemporaryDirectory() as out:
        for picture in draw_pictures(folder, Path(out), pictures):
            files[f"plots/{picture.name}"] = picture
        yield files
