"""The whole config of a run, section by section. The text under a field is its documentation."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from slipstream.config.base import CLASS_LOSSES, Section, match_pattern
from slipstream.config.data import Data
from slipstream.config.engine import Engine
from slipstream.config.explanation import format_value
from slipstream.config.model import Model
from slipstream.config.pretraining import Pretrain, apply_defaults, refuse_unfit
from slipstream.config.train import Augment, Train
from slipstream.config.tune import Tune

NAME_WORDS = (
    "made of letters, digits, dots, underscores and hyphens, and begin with a letter or digit"
)


def _to_dict(section: Any) -> dict[str, Any] | None:
    """Return the settings that a section sets; None for a value that is no section."""
    if isinstance(section, Section):
        return section.model_dump(exclude_unset=True)
    return section if isinstance(section, dict) else None


class Config(Section):
    """The settings of one run, section by section; frozen and validated.

    docs/settings.md lists every section and field. Unknown keys are refused with the nearest known
    one.

    Example:
        config = slipstream.Config(data={"path": "ETTh1.csv"}, model={"kind": "gru"})
        config.train.lr
    """

    name: Annotated[str, match_pattern(r"^[A-Za-z0-9][A-Za-z0-9._-]*$", NAME_WORDS)] = "run"
    """Start of the run folder's name; by default the name of the config file."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes the initial weights, the order of batches and dropout."""
    out: str = "runs"
    """Folder in which the run folder is created."""
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    pretrain: Pretrain = Pretrain()
    augment: Augment = Augment()
    engine: Engine = Engine()
    tune: Tune = Tune()

    @property
    def masked(self) -> bool:
        """Whether an encoder is pre-trained."""
        return self.train.objective == "masked"

    @property
    def order_seed(self) -> int:
        """Seed of the order of batches."""
        return self.seed if self.train.order_seed is None else self.train.order_seed

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, settings: Any) -> Any:
        """Add the defaults of pre-training, and the loss of classification."""
        if not isinstance(settings, dict):
            return settings
        data, train = (_to_dict(settings.get(name, {})) for name in ("data", "train"))
        if train is not None and train.get("objective") == "masked":
            return apply_defaults(settings)
        if data is None or train is None or data.get("task") != "classify" or "loss" in train:
            return settings
        return settings | {"train": train | {"loss": "cross_entropy"}}

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        if self.masked:
            refuse_unfit(self.pretrain, self.data, self.model, self.train)
            return self
        classify, train = self.data.task == "classify", self.train
        if classify != (train.loss in CLASS_LOSSES):
            fit = CLASS_LOSSES if classify else ("mse", "mae", "huber", "quantile")
            raise ValueError(
                f'train.loss = "{train.loss}" does not work with data.task = "{self.data.task}"; '
                f"use one of {', '.join(map(format_value, fit))}"
            )
        for section in ("train", "tune"):
            if classify and getattr(self, section).metric != "loss":
                raise ValueError(
                    f'{section}.metric = "{getattr(self, section).metric}" is for forecasts, not '
                    "for classification; remove it"
                )
        for name in ("label_smoothing", "class_weights"):
            if not classify and getattr(train, name) != Train.model_fields[name].default:
                raise ValueError(
                    f'train.{name} is for classification; set data.task = "classify", or remove it'
                )
        return self

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        if self.model.spec.is_sequential and self.data.context % self.model.patch:
            below = self.data.context // self.model.patch * self.model.patch
            raise ValueError(
                f"data.context = {self.data.context} is not a multiple of model.patch = "
                f"{self.model.patch}; use {below or self.model.patch} or {below + self.model.patch}"
            )
        if self.augment.cache and self.engine.home in ("loader", "stream"):
            raise ValueError(
                f'augment.cache does not work with engine.home = "{self.engine.home}"; remove '
                "engine.home and engine.preset, or set augment.cache = 0"
            )
        if not self.out or "\0" in self.out:
            raise ValueError("out is empty or contains a NUL character; name a folder")
        if self.seed + self.train.repeats > 2**63:
            raise ValueError(
                f"seed = {self.seed} is too large: train.repeats = {self.train.repeats} seeds "
                "follow it; reduce it"
            )
        return self
