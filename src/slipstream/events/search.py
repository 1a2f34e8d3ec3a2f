"""Events of a search and of its workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipstream.events.base import Event


@dataclass(frozen=True, kw_only=True)
class SearchStart(Event):
    """A search begins, or resumes with `done` of its trials."""

    run: str
    """The run folder"""
    trials: int
    """Number of trials to train"""
    parallel: int
    """Number of trials that train at a time"""
    space: list[str]
    """The settings that are searched"""
    windows: dict[str, int]
    """Windows of each set: train, val, test"""
    device: str
    """cpu, cuda:0 and so on"""
    done: int
    """Trials that had ended before"""
    workers: int | None = None
    """Number of processes"""
    on: str | None = None
    """ray, where they are on a cluster"""
    storage: str | None = None
    """The database or journal that workers share, without its password"""
    opened_at: str | None = None
    """When `at_s` was zero, in UTC"""
    schema: int | None = None
    """The version of these events; None in logs of earlier builds"""


@dataclass(frozen=True, kw_only=True)
class PackStart(Event):
    """Trials begin to train together."""

    trials: list[int]
    """Their numbers"""
    places: int
    """Number of models that train at a time"""
    mode: str
    """together or branches: as one program, or as parallel branches of it"""
    widths: list[int] | None = None
    """Hidden widths of the program's layers"""
    batch: int | None = None
    """Windows per step and model"""
    plan: dict[str, Any] | None = None
    """As in plan.json"""
    worker: int | None = None
    """The worker that trains them"""


@dataclass(frozen=True, kw_only=True)
class TrialEnd(Event):
    """A trial of a search has ended; also an entry of `Study.history`."""

    trial: int
    """Its number"""
    state: str
    """finished, pruned, failed or cut off"""
    value: float | None
    """The validation metric"""
    params: dict[str, Any]
    """Its settings"""
    epochs: float | None = None
    """Epochs of the longest trained fold"""
    steps: int | None = None
    """Steps of all folds together"""
    best_epoch: float | None = None
    """Best epoch, as a mean over the folds"""
    seconds: float | None = None
    """Duration from its start; other trials train at the same time"""
    stopped: str | None = None
    """Why it ended"""
    lowest: float | None = None
    """For a pruned trial: the lowest value it had reached"""
    best: bool = False
    """Whether it is the best trial so far"""
    worker: int | None = None
    """The worker that trained it"""


@dataclass(frozen=True, kw_only=True)
class SearchEnd(Event):
    """All trials are done; the best settings are retrained next."""

    seconds: float
    """Duration from the first start of the search"""
    optuna_s: float | None = None
    """Seconds of them that Optuna took"""
    packs: int | None = None
    """Programs that were built"""
    score_s: float | None = None
    """Seconds of predicting every window with one model at most, beside others in its program"""
    model_s: float | None = None
    """Seconds that a model takes, for the plan of retraining"""
    limits: dict[str, Any] | None = field(default=None, metadata={"key": "asked"})
    """The limits of the search: trials, minutes"""


@dataclass(frozen=True, kw_only=True)
class RetrainingStart(Event):
    """The best settings are retrained from fresh seeds."""

    num_trials: int
    """Number of settings"""
    num_seeds: int
    """Number of seeds of each"""


@dataclass(frozen=True, kw_only=True)
class Retrained(Event):
    """One of the best settings was trained again from another seed."""

    trial: int
    """Number of the trial; -1 for the config without a search"""
    seed: int
    """Seed of this model"""
    loss: float
    """Its lowest validation loss"""
    epochs: float | None = None
    """Epochs of the longest trained fold"""
    steps: int | None = None
    """Steps of all folds together"""
    best_epoch: float | None = None
    """Best epoch, as a mean over the folds"""
    seconds: float | None = None
    """Duration from its start; other models train at the same time"""
    stopped: str | None = None
    """Why it ended"""


@dataclass(frozen=True, kw_only=True)
class WorkerChange(Event):
    """A worker process has started or died, or took over the models of another."""

    worker: int
    """Its number"""
    what: str
    """started, died or took over"""
    pid: int | None = None
    """Process id of the worker from here on"""
    why: str | None = None
    """Why it died"""
    remedy: str | None = None
    """What happens to its work"""
    lanes: list[int] | None = None
    """The models that it trains, where the lanes of a run are divided"""
    of: int | None = None
    """The worker that had these models before"""
    node: str | None = None
    """On a cluster: the worker's machine"""
    shared: bool | None = None
    """On a cluster: whether its machine sees the run's folder"""


@dataclass(frozen=True, kw_only=True)
class WorkerStart(Event):
    """A worker has opened the study; in the log of its own folder."""

    worker: int
    """Its number"""
