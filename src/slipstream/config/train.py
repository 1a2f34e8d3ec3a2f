"""The sections `train`, `pretrain`, `engine` and `tune`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from slipstream.base.errors import Command
from slipstream.config.base import (
    CLASS_LOSSES,
    MAX_MODELS,
    Count,
    CountOrZero,
    Fraction,
    FromData,
    NonNegative,
    OptionText,
    PositiveFloat,
    PositiveOrInf,
    Scalar,
    Scalars,
    Section,
    Weights,
    Width,
    match_pattern,
)
from slipstream.config.data import Data
from slipstream.config.errors import explain, format_value
from slipstream.config.model import SPECS, Model, format_encoders

Share = Annotated[float, Field(ge=0, lt=1)]
Chance = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1_000)]
ColumnAmounts = dict[str, Amount]
Amounts = Annotated[tuple[Amount, ...], Field(strict=False, min_length=1)]
Loss = Literal["mse", "mae", "huber", "quantile", "cross_entropy", "focal"]
FORECAST_LOSSES = tuple(name for name in get_args(Loss) if name not in CLASS_LOSSES)
KINDS = ("jitter", "scaling", "volatility", "warp", "slice", "mixup", "cutmix")


class Train(Section):
    """Loss, optimizer, schedule and stopping."""

    objective: Literal["predict", "masked"] = "predict"
    """`"predict"` learns the targets; `"masked"`, set by `slipstream pretrain`, learns to fill in
    masked rows of the inputs."""
    loss: Annotated[Loss, FromData()] = "mse"
    """The loss, on scaled values: with `data.scale_by`, `"mae"` is relative to the size of each
    series or window. For classes: `"cross_entropy"` (the default there) or `"focal"`. `"auto"`:
    `"mse"`, for classes `"cross_entropy"`."""
    quantiles: Annotated[
        tuple[Fraction, ...], Field(strict=False, min_length=1, max_length=1_000)
    ] = (0.1, 0.5, 0.9)
    """Levels for the quantile loss, in increasing order. Predicted quantiles are sorted, since a
    network's quantiles may cross. The point prediction is the median; without the level 0.5 it is
    interpolated between the nearest levels (for 0.1 and 0.9: their mean)."""
    huber_delta: PositiveOrInf = 1.0
    """Error at which the Huber loss turns from quadratic to linear, in scaled units."""
    focal_gamma: Annotated[float, Field(ge=0, le=100)] = 2.0
    """How strongly the focal loss down-weights easy windows; 0 is cross-entropy."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """For classes: the fraction of each label that is spread over all classes."""
    class_weights: Literal["none", "balanced"] | Weights = "none"
    """For classes: weights in the loss; `"balanced"` gives rare classes more weight, by the
    training windows (with several folds, of the first); a list is in the order of the classes.
    Weights also shift the predicted probabilities."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adamw"
    """The optimizer."""
    lr: Annotated[PositiveFloat, FromData()] = 1e-3
    """Learning rate, before the schedule. `"auto"`: 0.002 for forecasts by an LSTM or a GRU with
    patches and `normalize = "window"`, otherwise 0.001."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd."""
    weight_decay: Annotated[float, Field(ge=0, le=1_000)] = 1e-4
    """Weight decay (decoupled in adamw)."""
    schedule: Annotated[
        Literal["constant", "step", "plateau", "cosine", "restarts"], FromData()
    ] = "cosine"
    """Schedule of the learning rate. `"auto"`: `"cosine"`."""
    warmup_epochs: NonNegative = 0.0
    """Epochs over which the learning rate rises from zero."""
    lr_min: NonNegative = 0.0
    """Final learning rate of cosine and restarts, and lower bound of plateau."""
    step_epochs: Count = 5
    """step: epochs between two cuts."""
    step_factor: Fraction = 0.5
    """step: factor of one cut."""
    plateau_patience: Count = 5
    """plateau: validations without improvement before a cut."""
    plateau_factor: Fraction = 0.5
    """plateau: factor of one cut."""
    restart_epochs: Count = 10
    """restarts: length of the first cycle."""
    restart_growth: Annotated[int, Field(ge=1, le=1_000)] = 2
    """restarts: factor by which each cycle is longer than the one before."""
    batch: Annotated[int, Field(ge=1, le=2**24)] | Literal["auto"] = 256
    """Windows in one forward pass. Default: 256; fewer where an epoch would have less than 32
    steps, and where `data.channels` makes several sequences of each window. `"auto"` doubles it as
    long as it fits into memory and throughput grows; in a search it is the default."""
    accumulate: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Forward passes in one step: the effective batch is `batch` times this."""
    epochs: Annotated[Count, FromData()] = 50
    """Maximum number of passes over the training windows. `"auto"`: 50; up to 300 where an epoch
    has less than 32 steps."""
    clip: PositiveOrInf | Literal["off"] = 1.0
    """Maximum norm of the gradient."""
    patience: Annotated[Count | Literal["off"], FromData()] = 10
    """Stop after this many validations without improvement. `"auto"`: 10; up to 60 where an epoch
    has less than 32 steps."""
    exploit_epochs: CountOrZero = 0
    """Epochs at a low learning rate after `patience` has run out, from the best weights so far and
    with a new optimizer state; 0 turns this off. They are added to `epochs`, without early
    stopping. The model has the best weights of both phases."""
    exploit_lr: PositiveFloat = 1e-5
    """Learning rate at the start of these epochs."""
    exploit_lr_min: NonNegative = 1e-7
    """Learning rate at the end of these epochs; it falls along a cosine."""
    min_delta: NonNegative = 0.0
    """An improvement is a validation loss lower than the best by more than this."""
    validate_every: Count = 1
    """Epochs from one validation to the next."""
    metric: Literal["loss", "mse", "mae"] = "loss"
    """Validation metric for early stopping and the best weights: the training loss, or an error of
    the point prediction in standardised units."""
    minutes: PositiveOrInf | None = None
    """Stop training after this time, also in mid-epoch; a run that is resumed with more minutes
    continues there. If the time ends before the epochs, warm-up and cosine follow the time, so that
    the learning rate reaches its final value when the time is up; the result then depends on the
    speed of the machine."""
    repeats: Annotated[int, Field(ge=1, le=MAX_MODELS)] = 1
    """Number of models to train, from the seeds `seed`, `seed + 1` and so on. The one with the
    lowest validation loss is the run's model; all of them form an ensemble."""
    state: Literal["windows", "carried"] = "windows"
    """LSTM and GRU: the initial state of a window, in training, scores and predictions.
    `"windows"`: zero. `"carried"`: the state after the rows before it; zero at the start of a
    series and after a gap. Training then reads each series in chunks of `data.context` rows,
    `batch` streams in parallel, and the gradient ends at the start of a chunk (truncated
    backpropagation through time)."""
    order_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the order of batches, if not `seed`. Repeats then see the same batches and differ
    only by initial weights and dropout."""
    init_from: str | None = None
    """A run of `slipstream pretrain` whose encoder this run starts from. Settings of `[model]` that
    are left out are taken from that run, and inputs are scaled as in it."""
    freeze_epochs: CountOrZero = 10
    """With `init_from`: epochs at the start in which the encoder is frozen."""
    encoder_lr: PositiveFloat = 0.3
    """With `init_from`: the encoder's learning rate afterwards, as a multiple of `lr`."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With `init_from`: factor of that rate from each layer of the encoder to the one below it; 1
    trains all layers at the same rate."""

    @property
    def max_epochs(self) -> int:
        """The largest number of epochs that training can take."""
        return self.epochs + (0 if self.patience == "off" else self.exploit_epochs)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if list(self.quantiles) != sorted(set(self.quantiles)):
            raise ValueError("train.quantiles must increase, as in [0.1, 0.5, 0.9]")
        if self.lr_min > self.lr:
            raise ValueError(
                f"train.lr_min = {self.lr_min:g} is above train.lr = {self.lr:g}; reduce it"
            )
        if self.exploit_epochs and self.exploit_lr_min > self.exploit_lr:
            raise ValueError(
                f"train.exploit_lr_min = {self.exploit_lr_min:g} is above train.exploit_lr = "
                f"{self.exploit_lr:g}; reduce it"
            )
        return self


class Augment(Section):
    """Random changes of training windows in every step; validation and test windows never change.
    Each kind has a strength (0 is off) and a probability per window."""

    jitter: Amount | ColumnAmounts | Amounts = 0.0
    """Noise on every value: its standard deviation, in scaled units. Or a table with the columns
    that get noise, `{ current = 0.02 }`: in standard deviations of the column over the training
    rows, however it is scaled. A list has one number per input, in scaled units."""
    jitter_chance: Chance = 0.5
    """Probability per window."""
    scaling: Amount = 0.0
    """Multiply every column by its own factor around 1: the factors' standard deviation. Targets
    that are also inputs follow."""
    scaling_chance: Chance = 0.5
    """Probability per window."""
    volatility: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Stretch deviations from the window's mean, in all columns alike: the standard deviation of
    the factor's logarithm. Targets that are also inputs follow."""
    volatility_chance: Chance = 0.5
    """Probability per window."""
    warp: Share = 0.0
    """Distort time, never backwards; first and last row stay: how far the speed may differ from
    1."""
    warp_chance: Chance = 0.5
    """Probability per window."""
    slice: Share = 0.0
    """Stretch the window's last rows to its whole length: the largest fraction cut off at its
    start."""
    slice_chance: Chance = 0.5
    """Probability per window."""
    mixup: Share = 0.0
    """Blend in another window of the batch, and its loss: the largest fraction."""
    mixup_chance: Chance = 0.5
    """Probability per window."""
    cutmix: Share = 0.0
    """Take a block of rows from another window of the batch, and a matching part of its loss: the
    largest fraction of rows."""
    cutmix_chance: Chance = 0.5
    """Probability per window."""

    cache: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Instead of augmenting in every step, write this many augmented copies of all training windows
    to disk once, and read one per epoch. Blends (`mixup`, `cutmix`) stay in the step. `slipstream
    bench ladder` measures which is faster."""

    @property
    def for_step(self) -> Augment:
        """The augmentation that remains in the step beside cached copies."""
        if not self.cache:
            return self
        return self.model_copy(update=dict.fromkeys(KINDS[:-2], 0.0))

    @property
    def for_cache(self) -> Augment:
        return self.model_copy(update=dict.fromkeys(KINDS[-2:], 0.0))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of augmentation that are on."""
        return tuple(kind for kind in KINDS if _is_on(getattr(self, kind)))


def _is_on(strength: float | ColumnAmounts | Amounts) -> bool:
    if isinstance(strength, dict):
        strength = tuple(strength.values())
    return any(strength) if isinstance(strength, tuple) else strength > 0


OLD_LAYERS = {"persistent": "cudnn", "standard": "cudnn", "off": "slipstream"}
"""Values of `engine.cudnn`, which is now `engine.rnn`"""


def upgrade_engine(settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return settings of `[engine]` by their names of today, and a note on each that is older."""
    current, notes = dict(settings), []
    if "cudnn" in current:
        old = current.pop("cudnn")
        new = OLD_LAYERS.get(old, old) if isinstance(old, str) else old
        if "rnn" in current and current["rnn"] != new:
            raise ValueError(
                "engine.cudnn is the old name of engine.rnn, and both are set; remove engine.cudnn"
            )
        current["rnn"] = new
        if old != "auto":  # the config of an older run spells out its defaults
            notes.append(
                f'engine.cudnn = "{old}" is now engine.rnn = "{new}"'
                + ("; the plan measures cuDNN's algorithms" if old == "standard" else "")
            )
    if "preset" in current:
        old = current.pop("preset")
        if old != "auto":
            notes.append(
                f'engine.preset = "{old}" has no effect: presets belong to slipstream bench now; '
                "set single settings of [engine] instead"
            )
    return current, tuple(notes)


def upgrade_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved plan by the names of today: its `rnn` was `cudnn` before version 0.2."""
    if "cudnn" not in plan:
        return dict(plan)
    library = "torch" if str(plan.get("device")) == "cpu" else "cudnn"
    names = {"persistent": library, "standard": "cudnn-standard", "off": "slipstream"}
    current = {key: value for key, value in plan.items() if key != "cudnn"}
    current["rnn"] = [names.get(layer, layer) for layer in plan["cudnn"]]
    reasons = plan.get("reasons", {})
    current["reasons"] = {"rnn" if key == "cudnn" else key: why for key, why in reasons.items()}
    return current


LAYER_WORDS = {
    "cudnn": "cuDNN persistent",
    "cudnn-standard": "cuDNN standard",
    "slipstream": "our own kernels",
    "torch": "PyTorch's layers",
}
"""The description of each implementation of recurrent layers, by its name in a plan"""


class Engine(Section):
    """How training runs; results are the same within rounding."""

    plan: Literal["cached", "measure", "off"] = "cached"
    """Choose by timing real steps: once per machine and shape, every time, or not at all (rules of
    thumb). Takes at most ten seconds or 5 % of the run."""
    device: Annotated[
        str, match_pattern(r"^(auto|cpu|cuda|cuda:\d+)$", '"auto", "cpu", "cuda", "cuda:1"')
    ] = "auto"
    """`"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Operands of matrix products; weights, optimizer state and loss stay fp32."""
    home: Literal["auto", "device", "host", "stream", "loader"] = "auto"
    """Where the series are: on the training device, in pinned host memory, on disk (Parquet or
    Arrow larger than memory), or behind a DataLoader over single windows, as in most scripts."""
    capture: bool | Literal["auto"] = "auto"
    """CUDA: record the whole training step once and replay it."""
    steps_per_graph: Annotated[int, Field(ge=1, le=10_000)] = 1
    """CUDA: training steps recorded into one graph, where the data are on the device."""
    rnn: Literal["auto", "cudnn", "slipstream", "torch"] = "auto"
    """What runs LSTM and GRU layers. `"cudnn"`: cuDNN, with the algorithm that the plan measures as
    the fastest; on a CPU, PyTorch's layers. `"slipstream"`: our own kernels; on CUDA for up to 512
    hidden units and Ampere and newer GPUs, on a CPU compiled by gcc or clang and computing in fp32.
    `"torch"`: PyTorch's layers, without cuDNN or our kernels. `"auto"` measures, and starts with
    our own kernels in runs that are long enough to pay for compiling them."""
    cudnn_benchmark: bool = False
    """CUDA: let cuDNN time its convolutions; recurrent models have none."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile for feed-forward and attention models; it does not affect recurrent layers."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole weight update, where the optimizer has one."""
    set_to_none: bool = True
    """Drop gradients between steps instead of filling them with zeros."""
    deterministic: bool = False
    """CUDA: use only kernels that give the same bits in every run, where torch has them."""
    recompute: bool = False
    """Recompute activations of recurrent and attention layers in the backward pass instead of
    storing them."""
    sync: bool = False
    """Synchronise with the device after every step, as loops with `.item()` do."""
    data_parallel: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Number of processes that train one model together, each on its own GPU, or on a CPU: each
    computes a part of every batch, and one all-reduce per step adds up the gradients. Pays only if
    a part of the batch still fills a GPU; for repeats and folds, `--workers` is faster."""
    threads: Annotated[int, Field(ge=1, le=1_024)] | Literal["auto"] = "auto"
    """CPU threads for one operation (torch, OMP and MKL alike)."""
    workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = "auto"
    """Homes stream and loader: number of reading processes."""
    prefetch: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = "auto"
    """Homes stream and loader: batches that each worker reads ahead."""
    persistent_workers: bool = True
    """Homes stream and loader: keep the workers from epoch to epoch."""
    pinned: bool = True
    """Homes host, stream and loader: use page-locked memory for copies to the device."""
    non_blocking: bool = True
    """Homes host, stream and loader: copy while the device computes."""
    buffer_rows: Count = 1_000_000
    """Home stream: rows that each worker holds and draws windows from."""
    async_checkpoints: bool = True
    """Write checkpoints in a background thread."""
    checkpoint_minutes: PositiveOrInf = 1.0
    """Longest time between two checkpoints; more follow validations, as long as they take at most
    one percent of the time."""
    log_every: Count = 50
    """Steps between two readings of the loss, the only synchronisations within an epoch."""
    monitor: bool = True
    """Sample GPU, CPU, memory and energy, at most once a second, in a side thread."""

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on settings that were given by an older name."""
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _accept_old_names(cls, settings: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(settings, Mapping):
            return validate(settings)
        current, notes = upgrade_engine(settings)
        engine = validate(current)
        if notes:
            engine.__dict__["notes"] = notes  # no field: neither compared nor written
        return engine


Value = Scalar | Scalars
MAX_VALUE = 1e15
"""The largest bound of a range: beyond it, floats no longer distinguish neighbouring values well"""
Choices = Annotated[tuple[Value, ...], Field(strict=False, min_length=1)]


class Range(Section):
    """Numbers from `low` to `high`, both included."""

    low: int | float
    high: int | float
    step: int | float | None = None
    """Step between values. Default: 1 for whole numbers, otherwise continuous."""
    log: bool = False
    """Sample on a logarithmic scale."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(math.isfinite(n) for n in (self.low, self.high, self.step or 1)):
            raise ValueError("low, high and step must be finite")
        if max(abs(self.low), abs(self.high)) > MAX_VALUE:
            raise ValueError(f"low and high must lie within -{MAX_VALUE:g} and {MAX_VALUE:g}")
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")
        if self.step is not None and self.step <= 0:
            raise ValueError(f"step = {self.step:g} should be greater than 0")
        if self.log and self.step is not None:
            raise ValueError("log and step cannot be combined; remove one of them")
        if self.log and self.low <= 0:
            raise ValueError(f"log = true needs low to be greater than 0; it is {self.low:g}")
        return self

    @property
    def is_integer(self) -> bool:
        return all(isinstance(n, int) for n in (self.low, self.high, self.step or 1))

    def contains(self, value: float) -> bool:
        """Whether a value is between the bounds and a whole number of steps from the lower one."""
        step = self.step or (1 if self.is_integer else None)
        steps = 0.0 if step is None else (value - self.low) / step
        return self.low <= value <= self.high and math.isclose(steps, round(steps), abs_tol=1e-9)


class Tune(Section):
    """A search over settings: `slipstream tune`."""

    space: dict[str, Range | Choices] = Field(default={})
    """Settings to search, by dotted name: `"train.lr" = { low = 1e-4, high = 1e-2, log = true }`,
    `"model.kind" = ["lstm", "gru"]`, `"model.hidden.0" = { low = 64, high = 256, step = 16 }` for
    one layer. Default: learning rate, decay, dropout, width and batch."""
    trials: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Number of trials."""
    minutes: PositiveOrInf | None = None
    """Time limit of the whole command: trials, retraining, tests and report. Trials in training are
    cut off, and fewer settings are retrained where the time is short."""
    sampler: Literal["tpe", "random", "cmaes", "grid", "gp"] = "tpe"
    """Optuna's sampler."""
    pruner: Literal["median", "hyperband", "halving", "wilcoxon", "none"] = "median"
    """Optuna's pruner; `"halving"` is successive halving, `"wilcoxon"` compares fold by fold and
    needs `folds`."""
    startup_trials: CountOrZero = 5
    """Pruner median: trials that run in full before any is pruned."""
    warmup_epochs: CountOrZero = 2
    """Pruner median: epochs in which no trial is pruned. Other pruners: the minimum epochs."""
    metric: Literal["loss", "mse", "mae"] = "loss"
    """Validation metric of a trial: the training loss, or an error in standardised units, which
    trials with different losses share."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The sampler's seed."""
    folds: Annotated[int, Field(ge=1, le=100)] | None = None
    """Number of folds of a trial: the validation block, and blocks of its length before it, each
    trained and scaled on earlier rows only. The trial's score is their mean. The device holds a
    copy of the series for each."""
    parallel: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] = "auto"
    """Trials in training at a time. With more, the search is faster, but the sampler knows fewer
    results when it proposes a trial."""
    retrain: Annotated[int, Field(ge=0, le=1_000)] = 5
    """Number of best trials to retrain from other seeds, together with the original settings."""
    retrain_seeds: Annotated[int, Field(ge=2, le=1_000)] = 3
    """Seeds of each retrained setting."""

    @model_validator(mode="before")
    @classmethod
    def _parse_space(cls, settings: Any) -> Any:
        """Check each entry of `space` by its form, so that an error can name it."""
        if not isinstance(settings, dict):
            return settings
        if settings.get("direction") == "minimize":  # runs of version 0.1 have this setting
            settings = {key: value for key, value in settings.items() if key != "direction"}
        if not isinstance(settings.get("space"), dict):
            return settings
        space = {name: _parse_entry(name, value) for name, value in settings["space"].items()}
        return settings | {"space": space}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pruner == "wilcoxon" and (self.folds or 1) < 2:
            raise ValueError('tune.pruner = "wilcoxon" needs tune.folds to be at least 2')
        return self


def _parse_entry(name: str, value: Any) -> Any:
    where = f'tune.space."{name}"'
    if isinstance(value, dict):
        try:
            return Range.model_validate(value)
        except ValidationError as error:
            problems = [str(problem.message) for problem in explain(error, Range)]
            unknown = [message for message in problems if "is not a setting" in message]
            raise ValueError(f"{where}: {'; '.join(unknown or problems)}") from None
    if isinstance(value, (Range, list, tuple)) and value:
        return value
    raise ValueError(
        f"{where} is {format_value(value)}; give a list of values, or a range as in "
        "{ low = 1, high = 8 }"
    )


PRETRAIN_OVERRIDE = OptionText("train.objective=masked", Command("pretrain"))
"""The override that turns any config into one of pre-training"""
DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"split": {"train": 0.9, "val": 0.1}},
    "train": {
        "optimizer": "adamw",
        "lr": 1e-3,
        "weight_decay": 1e-4,
        "schedule": "cosine",
        "lr_min": 1e-5,
        "epochs": 50,
        "batch": 512,
        "clip": 1.0,
        "patience": 5,
        "min_delta": 1e-3,
    },
}
"""Defaults of `slipstream pretrain`"""
RECURRENT_DEFAULTS = {"bidirectional": True, "layer_norm": True}
"""Further defaults for recurrent models"""
CLASS_SETTINGS = ("focal_gamma", "label_smoothing", "class_weights")
"""Settings of `[train]` that pre-training leaves out"""


class Pretrain(Section):
    """Masked pre-training, `slipstream pretrain`: an encoder learns to fill in hidden rows."""

    mask: Literal["patch", "block", "random"] = "patch"
    """Rows to hide: whole patches, one block, or single rows."""
    length: Count = 7
    """Rows of a patch. The offset of the grid of patches varies between windows, where the context
    leaves room."""
    ratio: Fraction = 0.15
    """Fraction of rows to hide, rounded to whole rows or patches: at least one, never all, the same
    number in every window."""
    variance: NonNegative = 0.0
    """Weight of a penalty against collapse, when the encoder maps all windows of a batch to the
    same vector: the mean of relu(1 - standard deviation) over its units. 0.1 is usual."""
    decoder: Width = 128
    """Hidden units of the decoder that maps the encoder's tokens to rows."""


def apply_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of pre-training to settings.

    Settings of classes are for the training that follows, and are left out.
    """
    result = dict(settings)
    train = result.get("train", {})
    if isinstance(train, dict):
        result["train"] = {
            key: value
            for key, value in train.items()
            if key not in CLASS_SETTINGS and not (key == "loss" and value in CLASS_LOSSES)
        }
    for name, values in DEFAULTS.items():
        section = result.get(name, {})
        if isinstance(section, dict):
            result[name] = values | section
    model = result.get("model", {})
    spec = SPECS.get(str(model.get("kind", "lstm"))) if isinstance(model, dict) else None
    if spec is not None and spec.is_recurrent:
        result["model"] = RECURRENT_DEFAULTS | model
    return result


def describe_recurrent(model: Model) -> list[str]:
    """Note the settings that pre-training changes for a recurrent model, and their consequences."""
    names = [name for name in RECURRENT_DEFAULTS if getattr(model, name)]
    if not (model.spec.is_recurrent and names):
        return []
    listed = " and ".join(f"model.{name} = true" for name in names)
    after = ""
    if model.bidirectional:
        after = (
            "; a model that reads in both directions cannot carry its state from row to row: set "
            "model.bidirectional = false for that"
        )
    return [
        f"pre-trains with {listed}, its defaults for LSTM and GRU; runs that start from the "
        f"encoder have them too{after}"
    ]


def refuse_unfit(pretrain: Pretrain, data: Data, model: Model, train: Train) -> None:
    """Raise a ValueError that names the setting which does not go with pre-training."""
    kind = model.kind
    if model.spec.flattens:
        raise ValueError(
            f'model.kind = "{kind}" has no sequence encoder to pre-train; use {format_encoders()}'
        )
    if model.is_custom:
        raise ValueError(
            f'model.kind = "{kind}" is your own class, which has no encoder to pre-train; use '
            f"{format_encoders()}"
        )
    fewest = 2 * (pretrain.length if pretrain.mask == "patch" else 1)
    if data.context < fewest:
        raise ValueError(
            f"data.context = {data.context} is less than the {fewest} rows that masking needs, as "
            "some rows must stay visible; increase it, or reduce pretrain.length"
        )
    fitting = [name for name in FORECAST_LOSSES if name != "quantile"]
    if train.loss not in fitting:
        raise ValueError(
            f'train.loss = "{train.loss}" does not work in pre-training; use '
            f'{", ".join(map(format_value, fitting[:-1]))} or "{fitting[-1]}"'
        )
    if train.repeats > 1:
        raise ValueError(
            "train.repeats does not apply to pre-training, which trains one encoder; remove it"
        )
    if train.init_from is not None:
        raise ValueError(
            "train.init_from does not apply to pre-training, which starts anew; remove it"
        )
