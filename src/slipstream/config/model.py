"""The network."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from slipstream.config.base import Scalar, Scalars, Section, Sizes

OwnKind = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


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
    def is_custom(self) -> bool:
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
        if self.options and not self.is_custom:
            raise ValueError(f'model.options are for a class of your own, not "{self.kind}"')
        if self.bidirectional and self.kind not in ("lstm", "gru"):
            raise ValueError(f'model.bidirectional is for lstm and gru, not "{self.kind}"')
        if self.layer_norm and self.kind not in ("lstm", "gru"):
            raise ValueError(f'model.layer_norm is for lstm and gru, not "{self.kind}"')
        return self
