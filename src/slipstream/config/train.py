"""How the weights are fitted."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from slipstream.config.base import Fraction, NonNegative, PositiveFloat, Section, Weights


class Train(Section):
    """How the weights are fitted."""

    objective: Literal["predict", "masked"] = "predict"
    """What is learnt: to predict the targets, or, as `slipstream pretrain` sets it, to fill in
    masked rows of the inputs."""
    loss: Literal["mse", "mae", "huber", "quantile", "cross_entropy", "focal"] = "mse"
    """What is minimised, on scaled values. To classify: `"cross_entropy"`, the default there, or
    `"focal"`."""
    quantiles: Annotated[tuple[Fraction, ...], Field(strict=False, min_length=1)] = (0.1, 0.5, 0.9)
    """Levels for the quantile loss; the middle one is the point prediction."""
    huber_delta: PositiveFloat = 1.0
    """Where the Huber loss turns from square to straight, in scaled units."""
    focal_gamma: NonNegative = 2.0
    """How much less the focal loss counts what is told apart already; 0 is cross-entropy."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """To classify: the share of each label that is spread over all classes."""
    class_weights: Literal["none", "balanced"] | Weights = "none"
    """To classify: what a class counts in the loss; `"balanced"` counts rare ones more, by the
    training windows (of the first fold, where there are several), or a list, in the classes' order.
    It shifts the probabilities too."""
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop"] = "adamw"
    """Which optimizer."""
    lr: PositiveFloat = 1e-3
    """Learning rate, before the schedule."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd."""
    weight_decay: NonNegative = 1e-4
    """Weight decay (decoupled in adamw)."""
    schedule: Literal["constant", "step", "plateau", "cosine", "restarts"] = "cosine"
    """How the learning rate falls over the run."""
    warmup_epochs: NonNegative = 0.0
    """Epochs over which the learning rate rises from zero."""
    lr_min: NonNegative = 0.0
    """Where cosine and restarts end, and the floor of plateau."""
    step_epochs: PositiveInt = 5
    """step: epochs between two cuts."""
    step_factor: Fraction = 0.5
    """step: what one cut leaves."""
    plateau_patience: PositiveInt = 5
    """plateau: validations without improvement before a cut."""
    plateau_factor: Fraction = 0.5
    """plateau: what one cut leaves."""
    restart_epochs: PositiveInt = 10
    """restarts: length of the first cycle."""
    restart_growth: PositiveInt = 2
    """restarts: how much longer each cycle is than the one before."""
    batch: PositiveInt | Literal["auto"] = 256
    """Windows in one forward pass; `"auto"` takes the most that fit and make training faster."""
    accumulate: PositiveInt = 1
    """Forward passes in one step: the effective batch is `batch` times this."""
    epochs: PositiveInt = 50
    """Passes over the training windows, at most."""
    clip: PositiveFloat | Literal["off"] = 1.0
    """Largest norm of the gradient."""
    patience: PositiveInt | Literal["off"] = 10
    """Stop after this many validations without improvement."""
    min_delta: NonNegative = 0.0
    """An improvement is a validation loss lower than the best by more than this."""
    validate_every: PositiveInt = 1
    """Epochs from one validation to the next."""
    metric: Literal["loss", "mse", "mae"] = "loss"
    """What a validation is judged by, for early stopping and the best weights: the training loss,
    or an error of the point prediction in standardised units."""
    minutes: PositiveFloat | None = None
    """Stop training after this time, in mid-epoch too; a resumed run with more goes on there."""
    repeats: PositiveInt = 1
    """Models to train at once, from the seeds `seed`, `seed + 1` and so on. The one with the lowest
    validation loss is the run's model; all of them are kept as an ensemble."""
    order_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the order of batches, where it should not be `seed`. Models trained at once then see
    the same batches, which a CPU reads once for all of them, and differ by their first weights and
    dropout alone."""
    init_from: str | None = None
    """A run of `slipstream pretrain`, whose encoder this one starts from. What `[model]` does not
    say is taken from there, and inputs are scaled as they were there."""
    freeze_epochs: Annotated[int, Field(ge=0)] = 10
    """With `init_from`: epochs at first in which the encoder stays as it is."""
    encoder_lr: PositiveFloat = 0.3
    """With `init_from`: the encoder's learning rate after that, as a multiple of `lr`."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With `init_from`: what is left of that rate from each layer of the encoder to the one below
    it; 1 trains all alike."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if list(self.quantiles) != sorted(set(self.quantiles)):
            raise ValueError("train.quantiles must rise, each level once")
        if self.lr_min > self.lr:
            raise ValueError(f"train.lr_min = {self.lr_min:g} is above train.lr = {self.lr:g}")
        return self
