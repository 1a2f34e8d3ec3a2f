"""The events that `on_event` is called with, one class for each kind.

`slipstream.train(config, on_event=function)` calls `function` with each of these as it happens; so
do `pretrain`, `tune`, `probe`, `ensemble` and `Forecaster.fit`. All are frozen dataclasses with
`at_s`, the seconds since the run was opened, or None where an event is not logged. An absent field
is None. The same events are in the run's `events.jsonl`, as JSON; docs/events.md describes every
field and what is stable.

An exception in the function stops the run as Ctrl-C does, with a checkpoint, and then reaches the
caller with a note that says how to resume.

Example:
    def show(event):
        match event:
            case slipstream.events.Epoch(epoch=epoch, val_loss=loss):
                print(epoch, loss)
            case slipstream.events.TrainingEnd(stopped=reason):
                print(reason)


    slipstream.train("job.toml", on_event=show, quiet=True)
"""

from __future__ import annotations

from slipstream.events.classes import (
    CheckpointSaved,
    CopiesOnDisk,
    EncoderLoaded,
    EncoderThawed,
    End,
    Epoch,
    Estimate,
    Event,
    Exploit,
    Fallback,
    LaneEnd,
    Log,
    MachineSample,
    PackStart,
    PlanComparison,
    ProbeStep,
    Recovery,
    RefitStart,
    Resume,
    Retrained,
    RetrainingStart,
    Scoring,
    SearchEnd,
    SearchStart,
    Start,
    Step,
    ThreadsReviewed,
    TrainingEnd,
    TrialEnd,
    Trouble,
    WorkerChange,
    WorkerStart,
)
from slipstream.events.parsing import Other, format_event, parse_event

__all__ = [
    "CheckpointSaved",
    "CopiesOnDisk",
    "EncoderLoaded",
    "EncoderThawed",
    "End",
    "Epoch",
    "Estimate",
    "Event",
    "Exploit",
    "Fallback",
    "LaneEnd",
    "Log",
    "MachineSample",
    "Other",
    "PackStart",
    "PlanComparison",
    "ProbeStep",
    "Recovery",
    "RefitStart",
    "Resume",
    "Retrained",
    "RetrainingStart",
    "Scoring",
    "SearchEnd",
    "SearchStart",
    "Start",
    "Step",
    "ThreadsReviewed",
    "TrainingEnd",
    "TrialEnd",
    "Trouble",
    "WorkerChange",
    "WorkerStart",
    "format_event",
    "parse_event",
]
