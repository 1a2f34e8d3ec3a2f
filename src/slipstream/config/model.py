"""The network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from slipstream.config.base import Scalar, Scalars, Section, Sizes
from slipstream.config.registry import CUSTOM, SPECS, ModelSpec, list_kinds

if TYPE_CHECKING:
    KnownKind = str
else:
    KnownKind = Literal[tuple(SPECS)]
CustomKind = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Model(Section):
    """The network."""

    kind: KnownKind | CustomKind = "lstm"
    """The network; `"nets:Mixer"` is your own class `Mixer` of the module `nets`."""
    options: dict[str, Scalar | Scalars] = Field(default={})
    """Keyword arguments for your own class."""
    hidden: PositiveInt | Sizes = 128
    """Width of each layer, or a list with one width per layer."""
    layers: PositiveInt = 2
    """Number of layers; with a list in `hidden` it follows from that."""
    bidirectional: bool = False
    """LSTM and GRU: read the window in both directions."""
    layer_norm: bool = False
    """LSTM and GRU: normalize every layer's outputs over its units; a transformer always does."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of activations dropped between layers during training."""
    patch: PositiveInt = 1
    """Rows that make one token, of every kind but mlp and linear: 16 means 16 times fewer time
    steps."""
    pool: Literal["last", "mean", "attention", "flatten"] = "last"
    """How a sequence becomes one vector, of every kind but mlp and linear."""
    normalize: Literal["none", "last", "window"] = "none"
    """Per window: subtract its last row, or its mean and divide by its deviation; undone on the
    output."""
    heads: PositiveInt = 4
    """Transformer: attention heads."""
    positions: Literal["learned", "sinusoidal"] = "learned"
    """Transformer: position encoding."""
    expansion: PositiveInt = 2
    """Transformer: width of the feed-forward part, as a multiple of `hidden`."""
    kernel_size: PositiveInt = 3
    """TCN: tokens that a convolution reads. Layer n reads them 2^n tokens apart, so that the last
    token sees `1 + 2 * (kernel_size - 1) * (2^layers - 1)` of them."""

    @property
    def spec(self) -> ModelSpec:
        """What is true of every model of this kind."""
        return CUSTOM if self.is_custom else SPECS[self.kind]

    @property
    def is_custom(self) -> bool:
        """Whether it is the user's own class."""
        return ":" in self.kind

    @property
    def can_pad(self) -> bool:
        """Whether a pack can hold models like this one of several widths."""
        return self.spec.can_pad and not self.layer_norm

    @property
    def sizes(self) -> tuple[int, ...]:
        """One width per layer."""
        return (self.hidden,) * self.layers if isinstance(self.hidden, int) else self.hidden

    @model_validator(mode="before")
    @classmethod
    def _set_layers(cls, settings: Any) -> Any:
        widths = settings.get("hidden") if isinstance(settings, dict) else None
        if isinstance(widths, (list, tuple)) and "layers" not in settings:
            return settings | {"layers": len(widths)}
        return settings

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.sizes) != self.layers:
            raise ValueError(
                f"model.layers is {self.layers} but model.hidden lists {len(self.sizes)} widths"
            )
        if self.spec.has_one_width and len(set(self.sizes)) > 1:
            raise ValueError(f"a {self.kind} has one width; give model.hidden as one number")
        divisor = self.spec.width_divisor
        if divisor and self.sizes[0] % getattr(self, divisor):
            raise ValueError(
                f"model.hidden = {self.sizes[0]} does not divide by model.{divisor} = "
                f"{getattr(self, divisor)}"
            )
        if self.options and not self.is_custom:
            raise ValueError(f'model.options are for a class of your own, not "{self.kind}"')
        for setting in ("bidirectional", "layer_norm"):
            if getattr(self, setting) and setting not in self.spec.settings:
                kinds = " and ".join(list_kinds(setting))
                raise ValueError(f'model.{setting} is for {kinds}, not "{self.kind}"')
        return self
