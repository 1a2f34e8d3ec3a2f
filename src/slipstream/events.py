"""The events that `watch` is called with, one class for each kind.

`slipstream.train(config, watch=function)` calls `function` with each of these as it happens; so do
`pretrain`, `tune` and `probe`. All are frozen dataclasses with `at_s`, the seconds since the run
was opened, or None where an event is not logged. A field that an event lacks is None. The same
events are in the run's `events.jsonl`, as JSON.

Example:
    def watch(event):
        match event:
            case slipstream.events.Epoch(epoch=epoch, val_loss=loss):
                print(epoch, loss)
            case slipstream.events.TrainingEnd(stopped=reason):
                print(reason)


    slipstream.train("job.toml", watch=watch, quiet=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = [
    "CheckpointSaved",
    "End",
    "Epoch",
    "Estimate",
    "Event",
    "Exploit",
    "Fallback",
    "LaneEnd",
    "Log",
    "Other",
    "PackStart",
    "ProbeStep",
    "Recovery",
    "Resume",
    "Retrained",
    "Scoring",
    "SearchEnd",
    "SearchStart",
    "Start",
    "Step",
    "ThreadsReviewed",
    "TrainingEnd",
    "TrialEnd",
    "Trouble",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have."""

    at_s: float | None = None
    """Seconds since the run was opened; None for events that are not logged"""


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """Training is about to begin: data and plan are settled."""

    run: str
    """The run folder"""
    windows: dict[str, int]
    """Windows of each set: train, val, test"""
    series: int
    parameters: int
    """Trainable numbers of the model"""
    epochs: int
    """At most; training may stop earlier"""
    steps_per_epoch: int
    expected_s: float
    """The longest that training should take"""
    plan: dict[str, Any]
    """As in plan.json"""
    scale: dict[str, Any] | None = None
    """Of a single target: its name, its size of one scaled unit, and which losses `train` and `val`
    are logged"""
    pack: dict[str, Any] | None = None
    """How several models (repeats, folds) train at a time"""
    notes: list[str]
    """What is remarkable about the data"""
    files: list[dict[str, Any]] = field(default_factory=list)
    """What was read from each file (of the first 100): name, format, rows, columns, notes"""
    opened_at: str | None = None
    """When `at_s` was zero, in UTC"""


@dataclass(frozen=True, kw_only=True)
class Resume(Event):
    """A run continues from its newest checkpoint."""

    step: int
    epoch: float | None = None
    lanes: str | None = None
    """How many of several models are done, in words"""
    differs: str = ""
    """Why the result may differ from that of an uninterrupted run; empty if it cannot"""
    spent_s: float = 0.0
    """The seconds that the run had taken before"""
    opened_at: str | None = None
    """When `at_s` was zero, in UTC"""


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """A step was launched. There is one for every step, so do little with it."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Log(Event):
    """The training loss, every `engine.log_every` steps."""

    step: int
    epoch: float | None = None
    loss: float | None = None
    """Mean since the last event; None for several models"""
    losses: dict[int, float] | None = None
    """By model, where several train"""
    lr: float | None = None
    steps_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Epoch(Event):
    """A validation; also an entry of `Result.history`."""

    epoch: float
    """Epochs done; with a fraction where validations are within an epoch"""
    step: int
    train_loss: float
    """Mean since the last validation"""
    val_loss: float
    best: bool
    """Whether it is the lowest validation loss so far"""
    lr: float | None = None
    seconds: float | None = None
    """Duration of the epoch so far"""
    lane: int | None = None
    """The model, counted from 0, where several train"""
    trial: int | None = None
    """The trial of a search"""
    phase: str | None = None
    """"exploit" once the low learning rate of `train.exploit_epochs` has begun"""


@dataclass(frozen=True, kw_only=True)
class Exploit(Event):
    """Patience has run out: training goes on from the best weights at a low learning rate."""

    epoch: float
    """Epochs done"""
    step: int
    best_epoch: float
    best_loss: float
    epochs: int
    """Epochs at the low rate, `train.exploit_epochs`"""
    lr: float
    """Learning rate that they begin with"""
    lane: int | None = None
    """The model, counted from 0, where several train"""
    trial: int | None = None
    """The trial of a search"""


@dataclass(frozen=True, kw_only=True)
class LaneEnd(Event):
    """One of several models has ended its training."""

    lane: int
    stopped: str
    step: int
    epoch: float
    best_epoch: float
    best_loss: float


@dataclass(frozen=True, kw_only=True)
class TrainingEnd(Event):
    """Training has ended; scoring follows. With several models, all fields but `at_s` are None."""

    stopped: str | None = None
    """Why it ended"""
    step: int | None = None
    epoch: float | None = None
    best_epoch: float | None = None
    best_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scoring(Event):
    """The model, or the baselines, are being scored."""

    what: str


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """The run, or the search, is finished and written."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is on disk."""

    step: int
    best_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate(Event):
    """A better estimate of the duration, after the first steps."""

    step: int
    ms_per_step: float
    expected_s: float


@dataclass(frozen=True, kw_only=True)
class ThreadsReviewed(Event):
    """The number of threads was reviewed in the first epoch, and training continues with it."""

    threads: int
    ms: float
    """Milliseconds per step"""
    before_threads: int
    before_ms: float
    planned_ms: float | None = None
    load: str | None = None
    """What other processes use of the cores, where they are busy"""


@dataclass(frozen=True, kw_only=True)
class Recovery(Event):
    """Training had a problem, such as a loss that is not finite, and continues with a remedy."""

    what: str
    remedy: str
    step: int | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fallback(Event):
    """Something was not possible, and something else is used."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Trouble(Event):
    """A problem that the run survives, such as a log that cannot be written."""

    what: str


@dataclass(frozen=True, kw_only=True)
class ProbeStep(Event):
    """A part of a probe begins."""

    what: str


@dataclass(frozen=True, kw_only=True)
class SearchStart(Event):
    """A search begins, or resumes with `done` of its trials."""

    run: str
    trials: int
    parallel: int
    space: list[str]
    windows: dict[str, int]
    device: str
    done: int
    opened_at: str | None = None
    """When `at_s` was zero, in UTC"""


@dataclass(frozen=True, kw_only=True)
class PackStart(Event):
    """Trials begin to train together."""

    trials: list[int]
    places: int
    mode: str


@dataclass(frozen=True, kw_only=True)
class TrialEnd(Event):
    """A trial of a search has ended; also an entry of `Study.history`."""

    trial: int
    state: str
    """finished, pruned, failed or cut off"""
    value: float | None
    """The validation metric"""
    params: dict[str, Any]
    epochs: float | None = None
    stopped: str | None = None
    best: bool = False
    """Whether it is the best trial so far"""


@dataclass(frozen=True, kw_only=True)
class SearchEnd(Event):
    """All trials are done; the best settings are retrained next."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Retrained(Event):
    """One of the best settings was trained again from another seed."""

    trial: int
    """-1 for the config without a search"""
    seed: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Other(Event):
    """An event without a class of its own, such as a sample of the machine's load."""

    name: str
    values: dict[str, Any]


CLASSES: dict[str, type[Event]] = {
    "start": Start,
    "resume": Resume,
    "step": Step,
    "log": Log,
    "epoch": Epoch,
    "lane": LaneEnd,
    "trained": TrainingEnd,
    "scoring": Scoring,
    "end": End,
    "checkpoint": CheckpointSaved,
    "estimate": Estimate,
    "review": ThreadsReviewed,
    "recovery": Recovery,
    "exploit": Exploit,
    "fallback": Fallback,
    "trouble": Trouble,
    "probe": ProbeStep,
    "search": SearchStart,
    "pack": PackStart,
    "trial": TrialEnd,
    "searched": SearchEnd,
    "retrained": Retrained,
}


def parse_event(logged: Mapping[str, Any]) -> Event:
    """Return the event that a line of `events.jsonl`, or a call of the watcher, describes."""
    name = logged["event"]
    kind = SearchStart if "space" in logged else CLASSES.get(name, Other)
    values = {key: value for key, value in logged.items() if key != "event"}
    if kind is not Other:
        names = {field.name for field in fields(kind)}
        try:
            return kind(**{key: value for key, value in values.items() if key in names})
        except TypeError:  # an event of another version lacks a field
            pass
    return Other(at_s=values.pop("at_s", None), name=name, values=values)
