"""The settings of a search."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator

from slipstream.config.base import PositiveFloat, Scalar, Scalars, Section

Value = Scalar | Scalars
Choices = Annotated[tuple[Value, ...], Field(strict=False, min_length=1)]


class Range(Section):
    """Numbers from `low` to `high`, both included."""

    low: int | float
    high: int | float
    step: int | float | None = None
    """From one number to the next. Default: 1 between whole numbers, else any number."""
    log: bool = False
    """As many tries from 0.001 to 0.01 as from 0.01 to 0.1."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")
        if self.step is not None and self.step <= 0:
            raise ValueError(f"step = {self.step:g} leads nowhere; give a positive one")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude each other; take one of them out")
        if self.log and self.low <= 0:
            raise ValueError(f"log = true needs low > 0, not {self.low:g}")
        return self

    @property
    def is_integer(self) -> bool:
        return all(isinstance(n, int) for n in (self.low, self.high, self.step or 1))


class Tune(Section):
    """A search over settings: `slipstream tune`."""

    space: dict[str, Range | Choices] = Field(default={})
    """What is tried, by dotted name: `"train.lr" = { low = 1e-4, high = 1e-2, log = true }`,
    `"model.kind" = ["lstm", "gru"]`, `"model.hidden.0" = { low = 64, high = 256, step = 16 }` for
    one layer. Default: learning rate, decay, dropout, width and batch."""
    trials: PositiveInt = 64
    """Models to try."""
    minutes: PositiveFloat | None = None
    """Time after which no trial begins, and those that train are stopped."""
    sampler: Literal["tpe", "random", "cmaes", "grid", "gp"] = "tpe"
    """Optuna's way to choose what to try next."""
    pruner: Literal["median", "hyperband", "halving", "wilcoxon", "none"] = "median"
    """Optuna's way to end hopeless trials early; `"halving"` is successive halving, `"wilcoxon"`
    compares fold by fold and needs `folds`."""
    startup_trials: Annotated[int, Field(ge=0)] = 5
    """Pruner median: trials that run in full before any is ended."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 2
    """Pruner median: epochs in which no trial is ended. The others' least epochs."""
    metric: Literal["loss", "mse", "mae"] = "loss"
    """What trials are judged by, on validation windows: the training loss, or an error in
    standardised units, which trials with different losses have in common."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes what the sampler draws."""
    folds: PositiveInt | None = None
    """Score a trial by so many folds: the validation block, and blocks of its length before it,
    each with only earlier rows to train on, and scaled by those. A trial's score is the mean over
    them. The device holds a copy of the series for each."""
    parallel: PositiveInt | Literal["auto"] = "auto"
    """Trials under way at a time. More of them train faster, and know less of each other."""
    retrain: Annotated[int, Field(ge=0)] = 5
    """The best so many are trained again from other seeds, beside the settings without a search."""
    retrain_seeds: Annotated[int, Field(ge=2)] = 3
    """Seeds of each."""

    @model_validator(mode="before")
    @classmethod
    def _entries(cls, settings: Any) -> Any:
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
    def _fits(self) -> Self:
        if self.pruner == "wilcoxon" and (self.folds or 1) < 2:
            raise ValueError('tune.pruner = "wilcoxon" compares fold by fold; set tune.folds')
        return self


def _parse_entry(name: str, value: Any) -> Any:
    where = f'tune.space."{name}"'
    if isinstance(value, dict):
        try:
            return Range.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{first['loc'][0]}: {first['msg']}" if first["loc"] else first["ctx"]["error"]
            raise ValueError(f"{where}: {what}; a range has low, high, step and log") from None
    if isinstance(value, (Range, list, tuple)) and value:
        return value
    raise ValueError(
        f"{where} is {value!r}; give a list of values, or a range as in {{ low = 1, high = 8 }}"
    )
