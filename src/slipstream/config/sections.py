"""Every setting: one frozen model per section. The text under a field is its documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from slipstream.config.augment import Augment
from slipstream.config.base import (
    CLASS_LOSSES,
    Fraction,
    Names,
    NonNegative,
    PositiveFloat,
    Scalar,
    Scalars,
    Section,
    Sizes,
    Weights,
)
from slipstream.config.pretraining import Pretrain, refuse_unfit, with_defaults
from slipstream.config.split import Split
from slipstream.config.tune import Tune

OwnKind = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
SIMULATED = "simulated:"
"""Paths that start so name an embedded data set instead of a file."""


class Data(Section):
    """Where the series are and how they become windows."""

    path: str | Names | None = None
    """A file, a folder or a list of files: CSV, Parquet or Arrow. A file is one series unless `id`
    names a column. `"simulated:cell"` and `"simulated:bars"` are embedded: a battery, a market."""
    task: Literal["regress", "classify"] = "regress"
    """What is asked of the model: numbers, or one of several classes (the target is then a column
    of integers or text, or comes from `labels`)."""
    time: str | None = None
    """The column that orders the rows and shows gaps: timestamps, dates or plain numbers."""
    time_format: str | None = None
    """How text in the time column reads, as for strptime (`"%d.%m.%Y %H:%M"`); ISO needs none."""
    id: str | Names | None = None
    """The column or columns that tell the series of a long table apart. Several files then make
    one table; `"file"` stands for a row's file."""
    where: dict[str, Scalar | Scalars] = Field(default={})
    """Keep only the rows whose column has this value, or one of these values."""
    inputs: Names | None = None
    """What the model reads. Default: every numeric column (without the targets where `horizon` is
    0)."""
    targets: Names | None = None
    """What the model predicts. Default when forecasting: every input. Must be named where `horizon`
    is 0. To classify, one column of integers or text; where it is empty, there is no window."""
    labels: str | None = None
    """To classify: a table beside the data instead of a target column, with the columns series
    (where there are several), start, end and label. start and end are times, or rows counted from
    0 where there is no `time`."""
    label_rows: Literal["end", "every"] = "end"
    """What a row of `labels` stands for: the one window that ends at its end, or every window whose
    target rows lie between its start and its end."""
    static: Names = ()
    """Numeric columns that are constant within a series; they join at the model's head."""
    ignore: Names = ()
    """Columns that are never inputs, for use with the default `inputs`."""
    context: PositiveInt = 96
    """Rows that the model sees."""
    horizon: Annotated[int, Field(ge=0)] = 24
    """Rows to forecast; 0 estimates the targets at the window's last row, which is the default to
    classify."""
    stride: PositiveInt = 1
    """Rows from one window to the next, in every set."""
    channels: Literal["together", "independent"] = "together"
    """`"independent"`: every target column is its own series through one model; inputs that are not
    targets are seen by all of them."""
    scale: Literal["standard", "minmax", "none"] = "standard"
    """How columns are scaled. Fitted on training rows only (of the first fold, where there are
    several)."""
    missing: Literal["error", "forward", "drop"] = "error"
    """Missing values: refuse them, repeat the last known value, or drop the row (no window crosses
    it)."""
    unsorted: Literal["error", "sort"] = "error"
    """Rows whose time runs backwards: refuse them, or sort each series by time."""
    gap_tolerance: PositiveFloat = 0.5
    """A time step that differs from the series' usual one by more than this share of it is a gap,
    and no window crosses it. `inf`: rows always follow each other."""
    short: Literal["error", "drop"] = "error"
    """Series with fewer rows than one window: refuse or drop."""
    period: PositiveInt | None = None
    """Rows of one season, for the seasonal baseline. Default: a day, week or year, by the time
    column's step."""
    split: Split = Split(train=0.7, val=0.1, test=0.2)
    """Shares of each series in time order, `{ rows = [a, b, c] }`, `{ by = "column", val = [...],
    test = [...] }`, `{ folders = true }` or `{ walk_forward = 6 }`. A window belongs to the set
    that holds its target rows; its context may reach back over the border. To classify, also shares
    of each class (`stratified`)."""

    @property
    def ids(self) -> tuple[str, ...]:
        return () if self.id is None else (self.id,) if isinstance(self.id, str) else self.id

    @property
    def paths(self) -> tuple[str, ...]:
        return (
            () if self.path is None else (self.path,) if isinstance(self.path, str) else self.path
        )

    @model_validator(mode="before")
    @classmethod
    def _at_the_last_row(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("task") == "classify":
            return {"horizon": 0} | settings
        return settings

    @model_validator(mode="after")
    def _classes(self) -> Self:
        if self.task == "regress":
            if self.labels is not None or self.split.stratified:
                named = "data.labels" if self.labels is not None else "data.split.stratified"
                raise ValueError(f'{named} is about classes; set data.task = "classify"')
        elif self.labels is not None and self.targets is not None:
            raise ValueError("data.labels says what the target is; take data.targets out")
        elif self.labels is None and (self.targets is None or len(self.targets) != 1):
            raise ValueError(
                'data.task = "classify" needs one column of labels, as in targets = ["state"], or '
                "a table of them (data.labels)"
            )
        elif self.labels is None and self.label_rows != "end":
            raise ValueError("data.label_rows goes with data.labels, which is not set")
        if self.task == "classify" and self.channels == "independent":
            raise ValueError('data.channels = "independent" forecasts numbers, not classes')
        if self.labels is not None and self.label_rows == "end" and self.stride > 1:
            raise ValueError(
                "data.labels says which windows there are, so data.stride has nothing to skip; "
                'take it out, or set data.label_rows = "every"'
            )
        return self

    @model_validator(mode="after")
    def _roles(self) -> Self:
        for key in ("inputs", "targets"):
            names = getattr(self, key)
            if names is not None and not names:
                raise ValueError(f"data.{key} is empty; name at least one column or leave it out")
            if names is not None and len(set(names)) < len(names):
                raise ValueError(f"data.{key} names a column twice")
        if self.horizon == 0 and self.targets is None and self.labels is None:
            raise ValueError("data.horizon is 0, so data.targets must name what to estimate")
        both = sorted(set(self.inputs or ()) & set(self.targets or ()))
        if self.horizon == 0 and both:
            raise ValueError(
                f'data.inputs has the target "{both[0]}": with data.horizon = 0 the model would '
                "read its own answer; take it out of data.inputs"
            )
        if self.horizon == 0 and self.channels == "independent":
            raise ValueError('data.channels = "independent" forecasts; it needs data.horizon > 0')
        if self.channels == "independent" and self.inputs and self.targets:
            lost = sorted(set(self.targets) - set(self.inputs))
            if lost:
                raise ValueError(
                    f'data.channels = "independent" reads every target; add "{lost[0]}" to '
                    "data.inputs"
                )
        return self


class Model(Section):
    """The network."""

    kind: Literal["lstm", "gru", "transformer", "mlp", "linear"] | OwnKind = "lstm"
    """Which network; `"nets:Mixer"` is your own class `Mixer` of the module `nets`."""
    options: dict[str, Scalar | Scalars] = Field(default={})
    """Keywords for a class of your own; other networks take none."""
    hidden: PositiveInt | Sizes = 128
    """Width of each layer, or a list with one width per layer."""
    layers: PositiveInt = 2
    """Number of layers; with a list in `hidden` it follows from that."""
    bidirectional: bool = False
    """LSTM and GRU: read the window in both directions."""
    layer_norm: bool = False
    """LSTM and GRU: normalize every layer's outputs over its units; a transformer always does."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of activations dropped between layers while training."""
    patch: PositiveInt = 1
    """Rows that make one token of lstm, gru, transformer: 16 means 16 times fewer time steps."""
    pool: Literal["last", "mean", "attention", "flatten"] = "last"
    """How a sequence becomes one vector (lstm, gru, transformer)."""
    normalize: Literal["none", "last", "window"] = "none"
    """Per window: subtract its last row, or its mean and divide by its deviation; undone on the
    output."""
    heads: PositiveInt = 4
    """Transformer: attention heads."""
    positions: Literal["learned", "sinusoidal"] = "learned"
    """Transformer: how tokens know their place."""
    expansion: PositiveInt = 2
    """Transformer: width of the feed-forward part, as a multiple of `hidden`."""

    @property
    def own(self) -> bool:
        """Whether it is the user's own class"""
        return ":" in self.kind

    @property
    def sizes(self) -> tuple[int, ...]:
        """One width per layer."""
        return (self.hidden,) * self.layers if isinstance(self.hidden, int) else self.hidden

    @model_validator(mode="before")
    @classmethod
    def _count_layers(cls, settings: Any) -> Any:
        widths = settings.get("hidden") if isinstance(settings, dict) else None
        if isinstance(widths, (list, tuple)) and "layers" not in settings:
            return settings | {"layers": len(widths)}
        return settings

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.sizes) != self.layers:
            raise ValueError(
                f"model.layers is {self.layers} but model.hidden lists {len(self.sizes)} widths"
            )
        if self.kind == "transformer":
            if len(set(self.sizes)) > 1:
                raise ValueError("a transformer has one width; give model.hidden as one number")
            if self.sizes[0] % self.heads:
                raise ValueError(
                    f"model.hidden = {self.sizes[0]} does not divide by model.heads = {self.heads}"
                )
        if self.options and not self.own:
            raise ValueError(f'model.options are for a class of your own, not "{self.kind}"')
        if self.bidirectional and self.kind not in ("lstm", "gru"):
            raise ValueError(f'model.bidirectional is for lstm and gru, not "{self.kind}"')
        if self.layer_norm and self.kind not in ("lstm", "gru"):
            raise ValueError(f'model.layer_norm is for lstm and gru, not "{self.kind}"')
        return self


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
    """Stop training after this time."""
    repeats: PositiveInt = 1
    """Models to train at once, from the seeds `seed`, `seed + 1` and so on. The one with the lowest
    validation loss is the run's model; all of them are kept as an ensemble."""
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


PRESETS: dict[str, dict[str, Any]] = {
    "auto": {},
    "classic": {
        "plan": "off",
        "home": "loader",
        "capture": False,
        "compile": False,
        "fused": False,
        "cudnn_benchmark": True,
        "sync": True,
    },
    "baseline": {
        "plan": "off",
        "precision": "fp32",
        "home": "loader",
        "capture": False,
        "compile": False,
        "fused": False,
        "sync": True,
        "workers": 0,
        "pinned": False,
        "non_blocking": False,
    },
}


class Engine(Section):
    """How it runs. Results do not depend on it, beyond rounding."""

    preset: Literal["auto", "classic", "baseline"] = "auto"
    """Defaults for this section: ours; `"classic"`, the usual advice (DataLoader workers, pinned
    memory, fp16, cuDNN benchmark); `"baseline"`, the naive loop (DataLoader, fp32, waiting for
    every step). Single settings still win."""
    plan: Literal["cached", "measure", "off"] = "cached"
    """Choose by timing real steps: once per machine and shape, every time, or not at all (rules of
    thumb). Takes at most ten seconds or a twentieth of the run."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:\d+)$")] = "auto"
    """`"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Operands of matrix products; weights, optimizer state and loss stay fp32."""
    home: Literal["auto", "device", "host", "stream", "loader"] = "auto"
    """Where the series live: on the device that trains, in pinned host memory, on disk (Parquet or
    Arrow larger than memory), or behind a DataLoader over single windows, as most scripts do."""
    capture: bool | Literal["auto"] = "auto"
    """CUDA: record the whole training step once and replay it."""
    steps_per_graph: PositiveInt = 1
    """CUDA: training steps recorded into one graph."""
    cudnn: Literal["auto", "persistent", "standard", "off"] = "auto"
    """CUDA, recurrent models: the algorithm that PyTorch prefers for small layers, or the other;
    `"off"`: our own kernels, for up to 128 hidden units on cards since Ampere."""
    cudnn_benchmark: bool = False
    """CUDA: let cuDNN time its convolutions; recurrent models have none."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile for feed-forward and attention models; recurrent layers stay out of it."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole weight update, where the optimizer has one."""
    set_to_none: bool = True
    """Drop gradients between steps instead of filling them with zeros."""
    deterministic: bool = False
    """CUDA: only kernels that repeat the same bits from run to run, where torch has them."""
    recompute: bool = False
    """Keep no activations of recurrent and attention layers; compute them again going backward."""
    sync: bool = False
    """Wait for the device after every step, as loops with `.item()` do."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads for one operation (torch, OMP and MKL alike)."""
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Homes stream and loader: processes that read."""
    prefetch: PositiveInt | Literal["auto"] = "auto"
    """Homes stream and loader: batches that each worker reads ahead."""
    persistent_workers: bool = True
    """Homes stream and loader: keep the workers from epoch to epoch."""
    pinned: bool = True
    """Homes host, stream and loader: page-locked memory for what is copied to the device."""
    non_blocking: bool = True
    """Homes host, stream and loader: copy while the device computes."""
    buffer_rows: PositiveInt = 1_000_000
    """Home stream: rows that each worker holds and draws windows from."""
    async_checkpoints: bool = True
    """Write checkpoints while training goes on."""
    checkpoint_minutes: PositiveFloat = 1.0
    """Longest time between two checkpoints; after validations there are more, as long as they take
    no more than a hundredth of the time."""
    log_every: PositiveInt = 50
    """Steps between two readings of the loss, the only times the host waits within an epoch."""
    monitor: bool = True
    """Sample GPU, CPU, memory and energy, at most once a second, in a thread of its own."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and isinstance(settings.get("preset"), str):
            return PRESETS.get(settings["preset"], {}) | settings
        return settings


def _as_dict(section: Any) -> dict[str, Any] | None:
    """What was given of a section; None where it is nothing that has settings."""
    if isinstance(section, Section):
        return section.model_dump(exclude_unset=True)
    return section if isinstance(section, dict) else None


class Config(Section):
    """Everything one run is asked to do."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Start of the run folder's name; by default the config file's."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes the weights' start, the batch order and dropout."""
    out: str = "runs"
    """Folder that the run's folder is made in."""
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    pretrain: Pretrain = Pretrain()
    augment: Augment = Augment()
    engine: Engine = Engine()
    tune: Tune = Tune()

    @property
    def masked(self) -> bool:
        """Whether an encoder is pre-trained"""
        return self.train.objective == "masked"

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, settings: Any) -> Any:
        """Pre-training has defaults of its own, and so have classes: a loss."""
        if not isinstance(settings, dict):
            return settings
        data, train = (_as_dict(settings.get(name, {})) for name in ("data", "train"))
        if train is not None and train.get("objective") == "masked":
            return with_defaults(settings)
        if data is None or train is None or data.get("task") != "classify" or "loss" in train:
            return settings
        return settings | {"train": train | {"loss": "cross_entropy"}}

    @model_validator(mode="after")
    def _task(self) -> Self:
        if self.masked:
            refuse_unfit(self)
            return self
        classify, train = self.data.task == "classify", self.train
        if classify != (train.loss in CLASS_LOSSES):
            fit = CLASS_LOSSES if classify else ("mse", "mae", "huber", "quantile")
            raise ValueError(
                f'train.loss = "{train.loss}" does not go with data.task = "{self.data.task}"; '
                f"choose one of {', '.join(fit)}"
            )
        for section in ("train", "tune"):
            if classify and getattr(self, section).metric != "loss":
                raise ValueError(f"{section}.metric is an error of numbers; take it out")
        for name in ("label_smoothing", "class_weights"):
            if not classify and getattr(train, name) != Train.model_fields[name].default:
                raise ValueError(f'train.{name} is about classes; set data.task = "classify"')
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        sequence = self.model.kind in ("lstm", "gru", "transformer")
        if sequence and self.data.context % self.model.patch:
            below = self.data.context // self.model.patch * self.model.patch
            raise ValueError(
                f"data.context = {self.data.context} is not a multiple of model.patch = "
                f"{self.model.patch}; use {below or self.model.patch} or {below + self.model.patch}"
            )
        if self.augment.cache and self.engine.home in ("loader", "stream"):
            raise ValueError(
                f'augment.cache has copies of its own to read; engine.home = "{self.engine.home}" '
                "does not go with it: leave engine.home and engine.preset as they are"
            )
        if self.seed + self.train.repeats > 2**63:
            raise ValueError(
                f"seed = {self.seed} is too large for train.repeats = {self.train.repeats} seeds "
                "from there on; lower it"
            )
        return self
