"""The classes of the log's events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    """Number of series"""
    parameters: int
    """Trainable numbers of the model"""
    epochs: int
    """At most; training may stop earlier"""
    steps_per_epoch: int
    """Steps of one model in an epoch"""
    expected_s: float
    """The longest that training should take"""
    expected_is: str | None = None
    """"measured", or "guessed" by rules of thumb"""
    plan: dict[str, Any]
    """As in plan.json"""
    scale: dict[str, Any] | None = None
    """Of a single target: its name, its size of one scaled unit, and which losses `train` and `val`
    are logged"""
    rounds: int | None = None
    """How many times models train one after the other, where not all train at a time"""
    pack: dict[str, Any] | None = None
    """How several models (repeats, folds) train at a time"""
    notes: list[str]
    """What is remarkable about the data"""
    files: list[dict[str, Any]] = field(default_factory=list)
    """What was read from each file (of the first 100): name, format, rows, columns, notes"""
    opened_at: str | None = None
    """When `at_s` was zero, in UTC"""
    schema: int | None = None
    """The version of these events; None in logs of earlier builds"""


@dataclass(frozen=True, kw_only=True)
class Resume(Event):
    """A run continues from its newest checkpoint."""

    step: int
    """Of the checkpoint; 0: from the beginning"""
    epoch: float | None = None
    """Epochs done"""
    lanes: str | None = None
    """How many of several models are done, in words"""
    differs: str = ""
    """Why the result may differ from that of an uninterrupted run; empty if it cannot"""
    spent_s: float = 0.0
    """The seconds that the run had taken before"""
    opened_at: str | None = None
    """When `at_s` was zero, in UTC"""
    schema: int | None = None
    """The version of these events; None in logs of earlier builds"""


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """A step was launched. There is one for every step, so do little with it. It is not logged."""

    step: int
    """Counted from 1"""


@dataclass(frozen=True, kw_only=True)
class Log(Event):
    """The training loss, every `engine.log_every` steps."""

    step: int
    """The last of them; of the longest trained model, where several train"""
    epoch: float | None = None
    """Epochs done; None for several models"""
    loss: float | None = None
    """Mean since the last event; None for several models"""
    losses: dict[int, float] | None = None
    """By model, where several train; JSON has texts for the numbers of models"""
    lr: float | None = None
    """Learning rate of the last step"""
    steps_per_s: float | None = None
    """Steps a second since the last event"""
    repeated: int | None = None
    """Steps that were repeated so far, since their fp16 gradients overflowed; None where there are
    none. Of several models: those of all in this event together"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class Epoch(Event):
    """A validation; also an entry of `Result.history`."""

    epoch: float
    """Epochs done; with a fraction where validations are within an epoch"""
    step: int
    """Steps of this model so far"""
    train_loss: float
    """Mean since the last validation"""
    val_loss: float
    """Of the whole validation set"""
    best: bool
    """Whether it is the lowest validation loss so far"""
    lr: float | None = None
    """Learning rate of the last step; None for several models"""
    rate: float | None = None
    """Learning rate of a model of several, as a share of the schedule's"""
    seconds: float | None = None
    """Duration of the epoch so far"""
    lane: int | None = None
    """The model, counted from 0, where several train"""
    trial: int | None = None
    """The trial of a search"""
    fold: int | None = None
    """The fold of a trial"""
    phase: str | None = None
    """"exploit" once the low learning rate of `train.exploit_epochs` has begun"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class Exploit(Event):
    """Patience has run out: training goes on from the best weights at a low learning rate."""

    epoch: float
    """Epochs done"""
    step: int
    """Steps so far"""
    best_epoch: float
    """Of the best weights"""
    best_loss: float
    """Their validation loss"""
    epochs: int
    """Epochs at the low rate, `train.exploit_epochs`"""
    lr: float
    """Learning rate that they begin with"""
    lane: int | None = None
    """The model, counted from 0, where several train"""
    trial: int | None = None
    """The trial of a search"""
    fold: int | None = None
    """The fold of a trial"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class LaneEnd(Event):
    """One of several models has ended its training."""

    lane: int
    """The model, counted from 0"""
    stopped: str
    """Why it ended"""
    step: int
    """Its steps"""
    epoch: float
    """Its epochs"""
    best_epoch: float
    """Of its lowest validation loss"""
    best_loss: float
    """Its lowest validation loss"""
    best_step: int | None = None
    """The step of that"""
    repeated: int | None = None
    """Steps that were repeated, since their fp16 gradients overflowed"""
    trial: int | None = None
    """The trial of a search"""
    fold: int | None = None
    """The fold of a trial"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class TrainingEnd(Event):
    """Training has ended; scoring follows. With several models, these are ended by `LaneEnd`, and
    here are only totals."""

    stopped: str | None = None
    """Why it ended; None for several models, as all fields to `best_step`"""
    step: int | None = None
    """Steps"""
    epoch: float | None = None
    """Epochs"""
    best_epoch: float | None = None
    """Of the lowest validation loss"""
    best_loss: float | None = None
    """The lowest validation loss"""
    best_step: int | None = None
    """The step of that"""
    repeated: int | None = None
    """Steps that were repeated, since their fp16 gradients overflowed"""
    steps: int | None = None
    """Of several models: steps of the program that trains them"""
    train_s: float | None = None
    """Of several models: seconds of training"""
    validate_s: float | None = None
    """Of several models: seconds of validation"""
    signal_number: int | None = None
    """Of several models: the signal that stopped them; 0 if none did"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class Scoring(Event):
    """The model, or the baselines, are being scored."""

    what: str
    """What is being scored"""


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """The run, or the search, is finished and written."""

    seconds: float
    """From its first start, with all resumed parts"""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is on disk. Events before it are not repeated by a resumed run, except for those
    that were logged while it was written."""

    step: int
    """Of the checkpoint"""
    best_step: int | None = None
    """Of the lowest validation loss so far"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class Recovery(Event):
    """Training had a problem, such as a loss that is not finite, and continues with a remedy."""

    what: str
    """The problem"""
    remedy: str
    """What is done about it"""
    step: int | None = None
    """When it happened"""
    why: str | None = None
    """The message of the error"""
    lane: int | None = None
    """The model, counted from 0, where several train"""
    trial: int | None = None
    """The trial of a search"""
    fold: int | None = None
    """The fold of a trial"""
    worker: int | None = None
    """The worker that logged it"""


@dataclass(frozen=True, kw_only=True)
class Fallback(Event):
    """Something was not possible, and something else is used."""

    what: str
    """What is used instead"""
    why: str
    """The reason"""
    worker: int | None = None
    """The worker that logged it"""


@dataclass(frozen=True, kw_only=True)
class Trouble(Event):
    """A problem that the run survives, such as a log that cannot be written. It is not logged."""

    what: str
    """The problem"""


@dataclass(frozen=True, kw_only=True)
class EncoderLoaded(Event):
    """A model begins with the weights of a pre-trained encoder (`train.init_from`)."""

    from_run: str = field(metadata={"key": "from"})
    """The run of the encoder"""
    matched: list[str]
    """Tensors with its weights"""
    new: list[str]
    """Tensors that begin at random"""
    unused: list[str]
    """Tensors of the encoder that the model has no place for"""
    columns_reordered: bool
    """Whether the columns are in another order here"""


@dataclass(frozen=True, kw_only=True)
class EncoderThawed(Event):
    """The epochs with a frozen encoder (`train.freeze_epochs`) are over."""

    what: str
    """What trains from here on"""
    epoch: float
    """Epochs done"""
    step: int
    """Steps so far"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class ProbeStep(Event):
    """A part of a probe begins. It is not logged."""

    what: str
    """The part"""


@dataclass(frozen=True, kw_only=True)
class SearchStart(Event):
    """A search begins, or resumes with `done` of its trials."""

    run: str
    """The run folder"""
    trials: int
    """How many are to be trained"""
    parallel: int
    """How many train at a time"""
    space: list[str]
    """The settings that are searched"""
    windows: dict[str, int]
    """Windows of each set: train, val, test"""
    device: str
    """cpu, cuda:0 and so on"""
    done: int
    """Trials that have ended before"""
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
    """How many models train at a time"""
    mode: str
    """together or branches: as one program, or as parallel branches of it"""
    widths: list[int] | None = None
    """Hidden widths that the program has room for"""
    batch: int | None = None
    """Windows of a step of one model"""
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
    """Of the longest trained fold"""
    steps: int | None = None
    """Of all folds"""
    best_epoch: float | None = None
    """Mean of the folds"""
    seconds: float | None = None
    """From its start, beside other trials"""
    stopped: str | None = None
    """Why it ended"""
    lowest: float | None = None
    """Of a pruned trial: the lowest value it had reached"""
    best: bool = False
    """Whether it is the best trial so far"""
    worker: int | None = None
    """The worker that trained it"""


@dataclass(frozen=True, kw_only=True)
class SearchEnd(Event):
    """All trials are done; the best settings are retrained next."""

    seconds: float
    """From the first start of the search"""
    optuna_s: float | None = None
    """Seconds that Optuna took of them"""
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
    """How many settings"""
    num_seeds: int
    """From how many seeds each"""


@dataclass(frozen=True, kw_only=True)
class Retrained(Event):
    """One of the best settings was trained again from another seed."""

    trial: int
    """-1 for the config without a search"""
    seed: int
    """Of this model"""
    loss: float
    """Its lowest validation loss"""
    epochs: float | None = None
    """Of the longest trained fold"""
    steps: int | None = None
    """Of all folds"""
    best_epoch: float | None = None
    """Mean of the folds"""
    seconds: float | None = None
    """From its start, beside other models"""
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
    """The process that works from here on"""
    why: str | None = None
    """Why it died"""
    remedy: str | None = None
    """What happens to its work"""
    lanes: list[int] | None = None
    """The models that it trains, where the lanes of a run are divided"""
    of: int | None = None
    """The worker that had them first"""
    node: str | None = None
    """On a cluster: the machine that it is on"""
    shared: bool | None = None
    """On a cluster: whether its machine sees the run's folder"""


@dataclass(frozen=True, kw_only=True)
class WorkerStart(Event):
    """A worker has opened the study; in the log of its own folder."""

    worker: int
    """Its number"""


@dataclass(frozen=True, kw_only=True)
class Estimate(Event):
    """A better estimate of the duration, after the first steps."""

    step: int
    """Steps so far"""
    trained_s: float | None = None
    """Seconds that they took"""
    ms_per_step: float
    """Milliseconds per step"""
    expected_s: float
    """The longest that training should take"""


@dataclass(frozen=True, kw_only=True)
class PlanComparison(Event):
    """The speed of the first epoch, compared with what the plan had measured."""

    promised_ms: float
    """Milliseconds per step of the plan"""
    seen_ms: float
    """Milliseconds per step of the epoch"""
    ratio: float
    """The second by the first"""
    kernels: list[str]
    """GPU kernels that ran"""


@dataclass(frozen=True, kw_only=True)
class ThreadsReviewed(Event):
    """The number of threads was reviewed in the first epoch, and training continues with it."""

    threads: int
    """From here on"""
    ms: float
    """Milliseconds per step"""
    before_threads: int
    """As planned"""
    before_ms: float
    """Milliseconds per step with them"""
    planned_ms: float | None = None
    """Milliseconds per step that the plan had measured"""
    load: str | None = None
    """What other processes use of the cores, where they are busy"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class MachineSample(Event):
    """The load of the machine since the last sample, at most once a second (`engine.monitor`)."""

    seconds: float
    """Since the last sample"""
    cpu_percent: float
    """Of this process and its children; 100 is one core"""
    rss_bytes: int
    """Their memory"""
    gpu_utilisation: int | None = None
    """Percent of the time in which the GPU was busy"""
    gpu_memory_bytes: int | None = None
    """In use, of all processes"""
    temperature_c: int | None = None
    """Of the GPU"""
    clock_mhz: int | None = None
    """Of its multiprocessors"""
    throttled: list[str] | None = None
    """Why the GPU is slowed down; empty if it is not"""
    power_w: float | None = None
    """Of the GPU"""
    energy_j: float | None = None
    """Of the GPU, since the last sample"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class CopiesOnDisk(Event):
    """The augmented copies of `augment.cache` are used."""

    what: str
    """writing, or reading those of an earlier run"""
    copies: int
    """Of each window"""
    bytes: int
    """Their size"""
    folder: str
    """Where they are"""
    worker: int | None = None
    """The worker that logged it, where several train"""
