"""The whole config of a run, section by section. The text under a field is its documentation."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.base.errors import Option, Setting
from slipstream.base.text import holds_secret
from slipstream.config.base import (
    CLASS_LOSSES,
    Count,
    PositiveFloat,
    Section,
    drop_auto,
    list_from_data,
    match_pattern,
)
from slipstream.config.data import Data
from slipstream.config.errors import format_value
from slipstream.config.model import Model
from slipstream.config.prepare import MAX_FILTER_ORDER, check_filter
from slipstream.config.train import (
    FORECAST_LOSSES,
    Augment,
    Engine,
    Pretrain,
    Train,
    Tune,
    apply_defaults,
    refuse_unfit,
)

UNCARRIED: dict[str, tuple[Any, ...]] = {
    "model.bidirectional": (False,),
    "model.pool": ("last",),
    "model.patch": (1,),
    "data.scale_by": ("global", "series"),
    "model.normalize": ("none",),
    "data.split.stratified": (False,),
    "engine.home": ("auto", "device"),
    "engine.rnn": ("auto", "cudnn", "torch"),
    "engine.recompute": (False,),
}
"""The accepted values of settings where a state is carried"""
NAME_WORDS = (
    "made of letters, digits, dots, underscores and hyphens, and begin with a letter or digit"
)


def _to_dict(section: Any, kind: type[Section]) -> dict[str, Any] | None:
    """Return the settings that a section sets, without those that are "auto"; None for a value that
    is no section."""
    if isinstance(section, Section):
        return section.model_dump(exclude_unset=True)
    return drop_auto(section, list_from_data(kind)) if isinstance(section, dict) else None


class PredictFilter(Section):
    """A causal filter along the predictions of consecutive windows."""

    kind: Literal["none", "moving_average", "ema", "savgol", "butterworth"] = "none"
    """Moving or exponential average, Savitzky-Golay, Butterworth low-pass. Class probabilities take
    one of the averages."""
    rows: Count | None = None
    """Length in rows: the window, the span of an exponential average, or the period of the cut-off
    of a Butterworth filter."""
    cutoff_hz: PositiveFloat | None = None
    """Cut-off frequency of a Butterworth filter, instead of `rows`; needs `data.time`."""
    order: Count | None = None
    """Order of a Butterworth filter, or degree of the Savitzky-Golay polynomial (default 2)."""

    @model_validator(mode="before")
    @classmethod
    def _accept_kind(cls, settings: Any) -> Any:
        return {"kind": settings} if isinstance(settings, str) else settings

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind != "none":
            try:
                check_filter(self.kind, self.rows, self.cutoff_hz, self.order, MAX_FILTER_ROWS)
            except ValueError as error:
                raise ValueError(f"predict.filter: {error}") from None
        return self


MAX_FILTER_ROWS = {
    "moving_average": 10_000,
    "ema": 1_000_000,
    "savgol": 1001,
    "butterworth": 1_000_000,
}
"""The longest filters of predictions, by kind. They are shorter than filters of columns, because
every number of a prediction keeps that many past values"""


class Predict(Section):
    """Post-processing of predictions; it can be changed on a trained run."""

    filter: PredictFilter = PredictFilter()
    """A filter, as in `{ kind = "ema", rows = 10 }`; `"none"` removes it."""


class Follow(Section):
    """Send the log of a run to a tracker, from a separate process."""

    to: Literal["none", "tensorboard", "mlflow", "wandb"] = "none"
    """Tracker; each needs the extra of its name."""
    out: str | None = None
    """TensorBoard: the folder (default `tensorboard`). MLflow: the server's address (default:
    MLFLOW_TRACKING_URI). Weights & Biases: the folder of its files."""
    project: str = "slipstream"
    """MLflow's experiment, or the project of Weights & Biases."""

    @model_validator(mode="after")
    def _check_out(self) -> Self:
        if self.out is not None and "://" in self.out and holds_secret(self.out):
            raise ValueError(
                "follow.out: holds a password, which the run's folder and the tracker would show; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
        if self.to in ("tensorboard", "wandb") and "://" in (self.out or ""):
            raise ValueError(f"follow.out: is an address; {self.to} takes a folder of this machine")
        return self


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
    predict: Predict = Predict()
    follow: Follow = Follow()

    @property
    def masked(self) -> bool:
        """Whether an encoder is pre-trained."""
        return self.train.objective == "masked"

    @property
    def trains_lanes(self) -> bool:
        """Whether a run trains several models, or folds, and reports each of them."""
        walks = self.data.split.walk_forward is not None
        return not self.masked and (self.train.repeats > 1 or walks)

    @property
    def order_seed(self) -> int:
        """Seed of the order of batches."""
        return self.seed if self.train.order_seed is None else self.train.order_seed

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, settings: Any) -> Any:
        """Add the defaults of pre-training, the loss of classification, and the normalization that
        scales windows."""
        if not isinstance(settings, dict):
            return settings
        data = _to_dict(settings.get("data", {}), Data)
        model = _to_dict(settings.get("model", {}), Model)
        train = _to_dict(settings.get("train", {}), Train)
        if data is not None and model is not None and data.get("scale_by") == "window":
            settings = settings | {"model": {"normalize": "window"} | model}
        if train is not None and train.get("objective") == "masked":
            return apply_defaults(settings | {"train": train})
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
            fit = CLASS_LOSSES if classify else FORECAST_LOSSES
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
                    f"train.{name} is for classification; set "
                    + Setting({"data.task": "classify"})
                    + ", or remove it"
                )
        return self

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        """Refuse what scales windows or series in two ways."""
        scale_by, model = self.data.scale_by, self.model
        if scale_by == "window" and model.normalize != "window" and self.train.state != "carried":
            raise ValueError(
                f'data.scale_by = "window" scales by the mean and deviation of each window, but '
                f'model.normalize is "{model.normalize}"; remove it, or set '
                + Setting({"data.scale_by": "series"})
            )
        if scale_by == "window" and "jitter" in self.augment.kinds:
            raise ValueError(
                'augment.jitter does not work with data.scale_by = "window": noise is in units of '
                "the whole table; remove it, or set " + Setting({"data.scale_by": "series"})
            )
        if scale_by == "series" and model.output_range is not None and self.data.horizon:
            raise ValueError(
                'model.output_range does not work with data.scale_by = "series", in whose units it '
                "differs from series to series; remove it, or set "
                + Setting({"data.scale_by": "window"})
            )
        return self

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        """Refuse a carried state where a row's output depends on more than the rows before it, or
        where steps would not read each series in order."""
        if self.train.state != "carried":
            return self
        setting, way_out = 'train.state = "carried"', 'or set train.state = "windows"'
        if self.masked or not self.model.spec.is_recurrent:
            obstacle = "pre-training" if self.masked else f'model.kind = "{self.model.kind}"'
            raise ValueError(
                f"{setting} does not work with {obstacle}: an LSTM or a GRU that predicts carries "
                f"its state on; {way_out}"
            )
        for name, accepted in UNCARRIED.items():
            value: Any = self
            for part in name.split("."):
                value = getattr(value, part)
            if value not in accepted:
                fit = " or ".join(map(format_value, accepted))
                raise ValueError(
                    f"{setting} does not work with {name} = {format_value(value)}; use {fit}, "
                    f"{way_out}"
                )
        if self.augment.kinds:
            raise ValueError(
                f"{setting} does not work with augment.{self.augment.kinds[0]}, which changes "
                f"single windows; remove it, {way_out}"
            )
        if self.train.batch == "auto":
            raise ValueError(
                f'{setting} does not work with train.batch = "auto"; give the number of pieces '
                f"to read side by side, such as 32, {way_out}"
            )
        return self

    @model_validator(mode="after")
    def _check_parallel(self) -> Self:
        """Refuse settings that do not work with one model over several processes."""
        if self.engine.data_parallel == 1:
            return self
        setting = f"engine.data_parallel = {self.engine.data_parallel}"
        way_out = "or set engine.data_parallel = 1"
        walks = self.data.split.walk_forward is not None
        if self.trains_lanes:
            obstacle = (
                "data.split.walk_forward" if walks else f"train.repeats = {self.train.repeats}"
            )
            raise ValueError(
                f"{setting} is for one model, and {obstacle} trains several, which are faster side "
                "by side: train with " + Option("workers") + f", {way_out}"
            )
        if self.train.state == "carried":
            raise ValueError(
                f'{setting} does not work with train.state = "carried": states would travel from '
                "process to process; "
                + "set "
                + Setting({"train.state": "windows"})
                + f", {way_out}"
            )
        if self.engine.home == "stream":
            raise ValueError(
                f'{setting} does not work with engine.home = "stream": every process holds the '
                f"series; remove engine.home, {way_out}"
            )
        if self.engine.device.startswith("cuda:"):
            raise ValueError(
                f'{setting} needs several GPUs, and engine.device = "{self.engine.device}" names '
                "one; set " + Setting({"engine.device": "cuda"}) + ", " + f"{way_out}"
            )
        return self

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        is_given = "context" in self.data.model_fields_set  # else it is made to fit
        if is_given and self.model.spec.is_sequential and self.data.context % self.model.patch:
            patch = self.model.patch
            below = self.data.context // patch * patch
            fit = f"{below} or {below + patch}" if below else str(patch)
            raise ValueError(
                f"data.context = {self.data.context} is not a multiple of model.patch = {patch}; "
                f"use {fit}"
            )
        if self.augment.cache and self.engine.home in ("loader", "stream"):
            raise ValueError(
                f'augment.cache does not work with engine.home = "{self.engine.home}"; remove '
                "engine.home, or set augment.cache = 0"
            )
        self._check_filter()
        if not self.out or "\0" in self.out:
            raise ValueError("out is empty or contains a NUL character; name a folder")
        if self.seed + self.train.repeats > 2**63:
            raise ValueError(
                f"seed = {self.seed} is too large: train.repeats = {self.train.repeats} seeds "
                "follow it; reduce it"
            )
        return self

    def _check_filter(self) -> None:
        filter_, data = self.predict.filter, self.data
        if filter_.kind == "none" or self.masked:
            return
        setting = f'predict.filter.kind = "{filter_.kind}"'
        if data.stride > 1:
            raise ValueError(
                f"{setting} needs consecutive windows, but data.stride is {data.stride}; set "
                + Setting({"data.stride": 1})
                + ', or predict.filter = "none"'
            )
        if data.task == "classify" and filter_.kind in MAX_FILTER_ORDER:
            raise ValueError(
                f'{setting} could make a probability negative; use "moving_average" or "ema"'
            )
        if filter_.cutoff_hz is not None and data.time_column is None:
            raise ValueError(
                "predict.filter.cutoff_hz needs data.time; set it, or predict.filter.rows, the "
                "period of the cut-off"
            )
