"""Loss, optimizer, schedule and stopping; augmentation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from slipstream.config.base import (
    MAX_MODELS,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    PositiveFloat,
    PositiveOrInf,
    Section,
    Weights,
)

Share = Annotated[float, Field(ge=0, lt=1)]
Chance = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1_000)]
ColumnAmounts = dict[str, Amount]
Amounts = Annotated[tuple[Amount, ...], Field(strict=False, min_length=1)]
KINDS = ("jitter", "scaling", "volatility", "warp", "slice", "mixup", "cutmix")


class Train(Section):
    """Loss, optimizer, schedule and stopping."""

    objective: Literal["predict", "masked"] = "predict"
    """`"predict"` learns the targets; `"masked"`, set by `slipstream pretrain`, learns to fill in
    masked rows of the inputs."""
    loss: Literal["mse", "mae", "huber", "quantile", "cross_entropy", "focal"] = "mse"
    """The loss, on scaled values. For classes: `"cross_entropy"` (the default there) or
    `"focal"`."""
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
    lr: PositiveFloat = 1e-3
    """Learning rate, before the schedule."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd."""
    weight_decay: Annotated[float, Field(ge=0, le=1_000)] = 1e-4
    """Weight decay (decoupled in adamw)."""
    schedule: Literal["constant", "step", "plateau", "cosine", "restarts"] = "cosine"
    """Schedule of the learning rate."""
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
    """Windows in one forward pass; `"auto"` doubles it as long as it fits into memory and
    throughput grows."""
    accumulate: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Forward passes in one step: the effective batch is `batch` times this."""
    epochs: Count = 50
    """Maximum number of passes over the training windows."""
    clip: PositiveOrInf | Literal["off"] = 1.0
    """Maximum norm of the gradient."""
    patience: Count | Literal["off"] = 10
    """Stop after this many validations without improvement."""
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
        """The most epochs that training can take."""
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
        """The kinds that are on."""
        return tuple(kind for kind in KINDS if _is_on(getattr(self, kind)))


def _is_on(strength: float | ColumnAmounts | Amounts) -> bool:
    if isinstance(strength, dict):
        strength = tuple(strength.values())
    return any(strength) if isinstance(strength, tuple) else strength > 0
