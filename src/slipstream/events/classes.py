"""The classes of the log's events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base class of all events."""

    at_s: float | None = None
    """Seconds since the run was opened; None for events that are not logged"""


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """Training is about to begin; the data are loaded and the plan is chosen."""

    run: str
    """The run folder"""
    windows: dict[str, int]
    """Windows of each set: train, val, test"""
    series: int
    """Number of series"""
    parameters: int
    """Number of trainable parameters"""
    epochs: int
    """Maximum number of epochs; training may stop earlier"""
    steps_per_epoch: int
    """Steps of one model in an epoch"""
    expected_s: float
    """Upper estimate of the training time"""
    expected_is: str | None = None
    """"measured", or "guessed" by rules of thumb"""
    plan: dict[str, Any]
    """As in plan.json"""
    scale: dict[str, Any] | None = None
    """With a single target: its name, the size of one scaled unit, and which losses `train` and
    `val` are"""
    rounds: int | None = None
    """How many times models train one after the other, where not all train at a time"""
    pack: dict[str, Any] | None = None
    """How several models (repeats, folds) train at a time"""
    notes: list[str]
    """Remarks on the data"""
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
    """Step of the checkpoint; 0: from the beginning"""
    epoch: float | None = None
    """Epochs done"""
    lanes: str | None = None
    """How many of several models are done, in words"""
    differs: str = ""
    """Why the result may differ from that of an uninterrupted run; empty if it cannot"""
    spent_s: float | None = None
    """Seconds that the run had taken before; None in logs of earlier builds"""
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
    """The last step; with several models, that of the longest trained one"""
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
    """Steps that were repeated so far because their fp16 gradients overflowed; None if there were
    none. With several models, the sum over the models of this event"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class Epoch(Event):
    """A validation has ended; also an entry of `Result.history`."""

    epoch: float
    """Epochs done; with a fraction where validations are within an epoch"""
    step: int
    """Steps of this model so far"""
    train_loss: float
    """Mean training loss since the last validation"""
    val_loss: float
    """Loss on the whole validation set"""
    best: bool
    """Whether it is the lowest validation loss so far"""
    lr: float | None = None
    """Learning rate of the last step; None for several models"""
    rate: float | None = None
    """With several models: this model's learning rate as a fraction of the schedule's"""
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
    """Patience has run out: training continues from the best weights at a low learning rate."""

    epoch: float
    """Epochs done"""
    step: int
    """Steps so far"""
    best_epoch: float
    """Epoch of the best weights"""
    best_loss: float
    """Validation loss of the best weights"""
    epochs: int
    """Epochs at the low rate, `train.exploit_epochs`"""
    lr: float
    """Learning rate at the start of these epochs"""
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
    """Epoch of its lowest validation loss"""
    best_loss: float
    """Its lowest validation loss"""
    best_step: int | None = None
    """Step of the lowest validation loss"""
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
    """Training has ended; scoring follows. With several models, each has its own `LaneEnd`, and
    this event has only totals."""

    stopped: str | None = None
    """Why training ended. With several models, this and the fields up to `best_step` are None"""
    step: int | None = None
    """Number of steps"""
    epoch: float | None = None
    """Number of epochs"""
    best_epoch: float | None = None
    """Epoch of the lowest validation loss"""
    best_loss: float | None = None
    """The lowest validation loss"""
    best_step: int | None = None
    """Step of the lowest validation loss"""
    repeated: int | None = None
    """Steps that were repeated, since their fp16 gradients overflowed"""
    steps: int | None = None
    """With several models: steps of the program that trains them"""
    train_s: float | None = None
    """With several models: seconds of training"""
    validate_s: float | None = None
    """With several models: seconds of validation"""
    signal_number: int | None = None
    """With several models: the signal that stopped them; 0 if none did"""
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
    """Duration from the first start, including all resumed parts"""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is on disk. Events before it are not repeated by a resumed run, except for those
    that were logged while it was written."""

    step: int
    """Step of the checkpoint"""
    best_step: int | None = None
    """Step of the lowest validation loss so far"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class Recovery(Event):
    """Training had a problem, such as a loss that is not finite, and continues with a remedy."""

    what: str
    """The problem"""
    remedy: str
    """How training continues"""
    step: int | None = None
    """Step at which it happened"""
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
    """A technique was not possible, and another one is used instead."""

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
    """Tensors that have the encoder's weights"""
    new: list[str]
    """Tensors that are initialised at random"""
    unused: list[str]
    """Tensors of the encoder that the model does not use"""
    columns_reordered: bool
    """Whether the encoder had its columns in another order"""


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
    minutes: float | None = None
    """Time limit of the whole command, of which this part has `left_s` left"""
    left_s: float | None = None
    """Seconds that are left of it"""
    is_resumed: bool = field(default=False, metadata={"key": None})
    """Whether the search resumes; the log has no such field, but calls the event "resume\""""
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
class RefitStart(Event):
    """The models of the tested answer are trained on all rows."""

    num_models: int
    """Number of models, baselines included"""
    windows: int
    """Number of training windows"""


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


@dataclass(frozen=True, kw_only=True)
class Estimate(Event):
    """A better estimate of the duration, after the first steps."""

    step: int
    """Steps so far"""
    trained_s: float | None = None
    """Seconds that these steps took"""
    ms_per_step: float
    """Milliseconds per step"""
    expected_s: float
    """Upper estimate of the training time"""


@dataclass(frozen=True, kw_only=True)
class PlanComparison(Event):
    """The speed of the first epoch, compared with what the plan had measured."""

    promised_ms: float
    """Milliseconds per step that the plan measured"""
    seen_ms: float
    """Milliseconds per step in the first epoch"""
    ratio: float
    """`seen_ms` divided by `promised_ms`"""
    kernels: list[str]
    """GPU kernels that ran"""


@dataclass(frozen=True, kw_only=True)
class ThreadsReviewed(Event):
    """The number of threads was reviewed in the first epoch, and training continues with it."""

    threads: int
    """Number of threads from here on"""
    ms: float
    """Milliseconds per step with them"""
    before_threads: int
    """Planned number of threads"""
    before_ms: float
    """Milliseconds per step with the planned number"""
    planned_ms: float | None = None
    """Milliseconds per step that the plan had measured"""
    load: str | None = None
    """Use of the cores by other processes, if they are busy"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class MachineSample(Event):
    """The load of the machine since the last sample, at most once a second (`engine.monitor`)."""

    seconds: float
    """Seconds since the last sample"""
    cpu_percent: float
    """CPU use of this process and its children; 100 is one core"""
    rss_bytes: int
    """Memory of this process and its children"""
    gpu_utilisation: int | None = None
    """Percent of the time in which the GPU was busy"""
    gpu_memory_bytes: int | None = None
    """GPU memory in use by all processes"""
    temperature_c: int | None = None
    """Temperature of the GPU"""
    clock_mhz: int | None = None
    """Clock of the GPU's multiprocessors"""
    throttled: list[str] | None = None
    """Why the GPU is slowed down; empty if it is not"""
    power_w: float | None = None
    """Power of the GPU"""
    energy_j: float | None = None
    """Energy of the GPU since the last sample"""
    worker: int | None = None
    """The worker that logged it, where several train"""


@dataclass(frozen=True, kw_only=True)
class CopiesOnDisk(Event):
    """The augmented copies of `augment.cache` are used."""

    what: str
    """writing, or reading the copies of an earlier run"""
    copies: int
    """Number of copies of each window"""
    bytes: int
    """Size of the copies"""
    folder: str
    """Folder of the copies"""
    worker: int | None = None
    """The worker that logged it, where several train"""
