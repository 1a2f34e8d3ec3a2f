"""The settings of a search."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from slipstream.config.base import CountOrZero, PositiveOrInf, Scalar, Scalars, Section
from slipstream.config.explanation import explain, format_value

Value = Scalar | Scalars
MAX_VALUE = 1e15
"""Of a range: beyond it, neighbours are no longer told apart as numbers"""
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
            problems = [problem.message for problem in explain(error, Range)]
            unknown = [message for message in problems if "is not a setting" in message]
            raise ValueError(f"{where}: {'; '.join(unknown or problems)}") from None
    if isinstance(value, (Range, list, tuple)) and value:
        return value
    raise ValueError(
        f"{where} is {format_value(value)}; give a list of values, or a range as in "
        "{ low = 1, high = 8 }"
    )
