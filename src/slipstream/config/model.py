"""The settings of the network, and the kinds of it: one `ModelSpec` each.

A new kind is an entry of `SPECS`, a PyTorch module in `slipstream.models` and a class in
`slipstream.models.kinds`; see docs/add-a-model.md. The spec has what configs, plans and messages
need. It names both classes by their paths, since a config is read without torch and numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.config.base import (
    MAX_LAYERS,
    Count,
    FromData,
    Interval,
    Scalar,
    Scalars,
    Section,
    Sizes,
    Width,
    match_pattern,
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The properties of a kind of model, whatever its settings."""

    network: str
    """Path of its PyTorch module's class, `module:Class`"""
    kind: str | None = None
    """Path of its `slipstream.models.kinds.Kind`: shapes, numpy, ONNX, C and padding; None for the
    user's own class"""
    is_recurrent: bool = False
    """Its layers are `nn.LSTM` or `nn.GRU`: cuDNN, oneDNN or our kernels run them step by step"""
    is_sequential: bool = False
    """It reads a window as tokens: `model.patch` and `model.pool` apply, layers can be recomputed
    in the backward pass, and its encoder can be pre-trained"""
    carries_state: bool = False
    """Its tokens depend on earlier rows only, so that it can go on from row to row"""
    is_custom: bool = False
    """The user's own class: Slipstream knows its inputs and outputs only"""
    has_hidden: bool = True
    """`model.hidden`, `model.layers` and `model.dropout` apply"""
    has_one_width: bool = False
    """All of its layers are equally wide"""
    can_pad: bool = True
    """Units of zero weights change nothing, so models of several widths can train in one pack"""
    takes_steps: bool = False
    """Its network is made with `steps`, the number of rows that it predicts"""
    knows_positions: bool = False
    """Its encoder has weights for each position in the context"""
    settings: tuple[str, ...] = ()
    """Settings of `[model]` that it has beside the common ones; they shape its encoder"""
    width_divisor: str | None = None
    """The setting that `model.hidden` has to be a multiple of"""
    search: tuple[str, ...] = ()
    """Integer settings that a search without a space varies, beside width and dropout"""
    calls_per_layer: int = 1
    """The rough number of consecutive GPU kernels of a layer; for a recurrent layer, per token"""
    onednn_on_arm: bool = False
    """oneDNN has a layer of this kind that is the fastest on Arm while it is small"""
    is_fitted: bool = False
    """A baseline that is a member of an ensemble: it is fitted, never trained, and has no head of
    the common kind"""
    has_thresholds: bool = False
    """Its outputs jump where a number passes a threshold: rows have to be exact to the last
    digit"""

    @property
    def flattens(self) -> bool:
        """Whether the model reads a window as one row."""
        return not (self.is_sequential or self.is_custom)

    @property
    def encoder_settings(self) -> tuple[str, ...]:
        """The settings of `[model]` that an encoder cannot change after pre-training."""
        if not self.is_sequential:
            return ()
        return ("hidden", "layers", *self.settings, "patch", "normalize")

    def count_calls(self, tokens: int) -> int:
        """Return the rough number of consecutive GPU kernels of a layer."""
        return self.calls_per_layer * (tokens if self.is_recurrent else 1)


RECURRENT = ModelSpec(
    network="slipstream.models.rnn:Recurrent",
    is_recurrent=True,
    is_sequential=True,
    carries_state=True,
    settings=("bidirectional", "layer_norm"),
)
FEED_FORWARD = ModelSpec(
    network="slipstream.models.mlp:FeedForward",
    kind="slipstream.models.kinds.mlp:FeedForwardKind",
)
SPECS = {
    "lstm": replace(
        RECURRENT, kind="slipstream.models.kinds.recurrent:LstmKind", onednn_on_arm=True
    ),
    "gru": replace(RECURRENT, kind="slipstream.models.kinds.recurrent:GruKind"),
    "transformer": ModelSpec(
        network="slipstream.models.transformer:Transformer",
        kind="slipstream.models.kinds.transformer:TransformerKind",
        is_sequential=True,
        has_one_width=True,
        can_pad=False,
        knows_positions=True,
        settings=("heads", "positions", "expansion"),
        width_divisor="heads",
        calls_per_layer=16,
    ),
    "tcn": ModelSpec(
        network="slipstream.models.tcn:TCN",
        kind="slipstream.models.kinds.tcn:ConvolutionKind",
        is_sequential=True,
        carries_state=True,
        has_one_width=True,
        settings=("kernel_size",),
        search=("kernel_size",),
        calls_per_layer=12,
    ),
    "nhits": ModelSpec(
        network="slipstream.models.nhits:NHiTS",
        kind="slipstream.models.kinds.nhits:NHiTSKind",
        takes_steps=True,
        settings=("activation", "stacks"),
        search=("stacks",),
        calls_per_layer=3,
    ),
    "mlp": replace(FEED_FORWARD, settings=("activation",)),
    "linear": replace(FEED_FORWARD, has_hidden=False),
}
FITTED = ModelSpec(
    network="",
    is_fitted=True,
    has_hidden=False,
    can_pad=False,
    takes_steps=True,
    settings=("options",),
)
FITTED_SPECS = {
    "gbm": replace(
        FITTED,
        network="slipstream.models.boosting:BoostedTrees",
        kind="slipstream.models.kinds.boosting:BoostingKind",
        has_thresholds=True,
    ),
    "rocket": replace(
        FITTED,
        network="slipstream.models.convolutions:RandomConvolutions",
        kind="slipstream.models.kinds.convolutions:RandomConvolutionsKind",
        has_thresholds=True,
    ),
    "logistic": replace(
        FITTED,
        network="slipstream.models.logistic:LogisticRegression",
        kind="slipstream.models.kinds.logistic:LogisticKind",
    ),
}
"""Baselines that `slipstream auto` may answer with; `model.options` has their sizes"""
CUSTOM = ModelSpec(
    network="slipstream.models.custom:CustomNetwork",
    is_custom=True,
    has_hidden=False,
    can_pad=False,
    settings=("options",),
)
"""The spec of a user's own class, `model.kind = "nets:Mixer"`"""


def list_kinds(setting: str) -> list[str]:
    """Return the kinds that a setting of `[model]` is for."""
    return [kind for kind, spec in SPECS.items() if setting in spec.settings]


def format_encoders() -> str:
    """Format the kinds that can be pre-trained, for messages."""
    *kinds, last = (f'"{kind}"' for kind, spec in SPECS.items() if spec.is_sequential)
    return f"{', '.join(kinds)} or {last}"


def explain_fitted(kind: str) -> str:
    """Return the error of a config that is to train a baseline."""
    return (
        f'model.kind = "{kind}" is a baseline, which every run fits beside its network and '
        f"slipstream auto may answer with; it is not trained. Choose {', '.join(SPECS)}"
    )


if TYPE_CHECKING:
    KnownKind = str
else:
    KnownKind = Literal[tuple(SPECS)]
FittedKind = Annotated[str, match_pattern(rf"^({'|'.join(FITTED_SPECS)})$", "")]
CustomKind = Annotated[
    str, match_pattern(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", 'your own class, as in "module:Class"')
]


class Model(Section):
    """The network."""

    kind: KnownKind | FittedKind | CustomKind = "lstm"
    """The network; `"nets:Mixer"` is your own class `Mixer` of the module `nets`."""
    options: dict[str, Scalar | Scalars] = Field(default={})
    """Keyword arguments for your own class."""
    hidden: Width | Sizes = 128
    """Width of each layer, or a list with one width per layer."""
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] = 2
    """Number of layers; leave it out if `hidden` is a list."""
    bidirectional: bool = False
    """LSTM and GRU: read the window in both directions."""
    layer_norm: bool = False
    """LSTM and GRU: normalize every layer's outputs over its units; a transformer always does."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of activations dropped between layers during training."""
    patch: Annotated[Count, FromData()] = 1
    """Rows per token, for every kind but nhits, mlp and linear: 16 means 16 times fewer time steps.
    `"auto"`: for forecasts from 48 rows and more, up to 16; where whole series of as many rows are
    windows (`data.context = "all"`), up to 8; otherwise 1."""
    pool: Annotated[Literal["last", "mean", "attention", "flatten"], FromData()] = "last"
    """How a sequence is reduced to one vector, for every kind but nhits, mlp and linear. `"auto"`:
    `"flatten"` for forecasts from patches; otherwise `"last"`."""
    normalize: Annotated[Literal["none", "last", "window"], FromData()] = "none"
    """Per window: `"last"` subtracts the last row; `"window"` subtracts the mean and divides by the
    standard deviation. Undone on the output. `"auto"`: for forecasts of columns that are inputs,
    `"last"` where the last row predicts the next ones better than the mean of a window does, and
    `"window"` elsewhere; otherwise `"none"`."""
    heads: Annotated[int, Field(ge=1, le=1_024)] = 4
    """Transformer: attention heads."""
    positions: Literal["learned", "sinusoidal"] = "learned"
    """Transformer: position encoding."""
    expansion: Annotated[int, Field(ge=1, le=64)] = 2
    """Transformer: width of the feed-forward part, as a multiple of `hidden`."""
    activation: Literal["relu", "gelu", "silu", "elu", "leaky_relu", "tanh"] = "relu"
    """MLP and N-HiTS: the function after each hidden layer."""
    stacks: Annotated[int, Field(ge=1, le=8)] = 3
    """N-HiTS: stacks, each an MLP of `layers` layers. The last one reads all rows of the window and
    predicts every row; each one before it reads means of 4 times as many rows, and predicts one of
    as many: 16, 4 and 1."""
    kernel_size: Annotated[int, Field(ge=1, le=1_024)] = 3
    """TCN: tokens that a convolution reads. Layer n reads them 2^n tokens apart, so that the last
    token sees `1 + 2 * (kernel_size - 1) * (2^layers - 1)` of them."""

    output_range: Interval | None = None
    """Limits of the predictions, lowest and highest, in the units of the data: `[0, 100]`.
    Predictions are clipped to them, in scores, predictions, quantiles and intervals. The loss uses
    the unclipped output, so that its gradient does not vanish there."""

    @property
    def spec(self) -> ModelSpec:
        """The properties of this kind of model."""
        return CUSTOM if self.is_custom else SPECS.get(self.kind) or FITTED_SPECS[self.kind]

    @property
    def is_custom(self) -> bool:
        """Whether the model is a user's own class."""
        return ":" in self.kind

    @property
    def can_pad(self) -> bool:
        """Whether a pack can hold models like this one of several widths."""
        return self.spec.can_pad and not self.layer_norm

    @property
    def sizes(self) -> tuple[int, ...]:
        """One width per layer."""
        return (self.hidden,) * self.layers if isinstance(self.hidden, int) else self.hidden

    @property
    def num_stacks(self) -> int:
        """How many times the network has its layers."""
        return self.stacks if "stacks" in self.spec.settings else 1

    @model_validator(mode="before")
    @classmethod
    def _set_layers(cls, settings: Any) -> Any:
        widths = settings.get("hidden") if isinstance(settings, dict) else None
        if isinstance(widths, (list, tuple)) and widths and "layers" not in settings:
            return settings | {"layers": len(widths)}
        return settings

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.sizes) != self.layers:
            raise ValueError(
                f"model.layers is {self.layers}, but model.hidden lists {len(self.sizes)} widths; "
                "remove model.layers"
            )
        if self.spec.has_one_width and len(set(self.sizes)) > 1:
            raise ValueError(
                f'the layers of model.kind = "{self.kind}" have one width; give model.hidden as '
                "one number"
            )
        if self.output_range is not None and self.output_range[0] >= self.output_range[1]:
            low, high = self.output_range
            raise ValueError(
                f"model.output_range = [{low:g}, {high:g}] is empty; give the lowest prediction "
                "first, then the highest"
            )
        divisor = self.spec.width_divisor
        if divisor and self.sizes[0] % getattr(self, divisor):
            raise ValueError(
                f"model.hidden = {self.sizes[0]} is not a multiple of model.{divisor} = "
                f"{getattr(self, divisor)}; change one of them"
            )
        if self.options and "options" not in self.spec.settings:
            raise ValueError(
                f'model.options is for your own class (model.kind = "module:Class"), not for '
                f'"{self.kind}"'
            )
        if self.spec.is_fitted and not self.options:
            raise ValueError(explain_fitted(self.kind))
        for setting in ("bidirectional", "layer_norm"):
            if getattr(self, setting) and setting not in self.spec.settings:
                kinds = " and ".join(list_kinds(setting))
                raise ValueError(f'model.{setting} is for {kinds}, not "{self.kind}"')
        return self
