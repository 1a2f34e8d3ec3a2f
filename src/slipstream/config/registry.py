"""The kinds of model: one `ModelSpec` each, with all that other packages know about a kind.

A new kind is one module in `slipstream.models` and one entry of `SPECS`; see docs/add-a-model.md.
`network` is a path and not a class, since a config is read without torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What is true of every model of a kind, whatever its settings."""

    network: str
    """Path of the network's class, `module:Class`"""
    is_recurrent: bool = False
    """Its layers are `nn.LSTM` or `nn.GRU`: cuDNN, oneDNN or our kernels run them step by step"""
    is_sequential: bool = False
    """It reads a window as tokens: `model.patch` and `model.pool` apply, layers can be recomputed
    in the backward pass, and its encoder can be pre-trained"""
    is_custom: bool = False
    """The user's own class: Slipstream knows its inputs and outputs only"""
    has_hidden: bool = True
    """`model.hidden`, `model.layers` and `model.dropout` apply"""
    has_one_width: bool = False
    """All of its layers are equally wide"""
    can_pad: bool = True
    """Units of zero weights change nothing, so models of several widths can train in one pack"""
    knows_positions: bool = False
    """Its encoder has weights for each place in the context"""
    settings: tuple[str, ...] = ()
    """Settings of `[model]` that it has beside the common ones; they shape its encoder"""
    width_divisor: str | None = None
    """The setting that `model.hidden` has to be a multiple of"""
    search: tuple[str, ...] = ()
    """Integer settings that a search without a space varies, beside width and dropout"""
    calls_per_layer: int = 1
    """GPU kernels of a layer that follow each other, roughly; of a recurrent one, per token"""
    onednn_on_arm: bool = False
    """oneDNN has a layer of this kind that is the fastest on Arm while it is small"""

    @property
    def flattens(self) -> bool:
        """Whether it reads a window as one row."""
        return not (self.is_sequential or self.is_custom)

    @property
    def encoder_settings(self) -> tuple[str, ...]:
        """The settings of `[model]` that an encoder cannot change after pre-training."""
        if not self.is_sequential:
            return ()
        return ("hidden", "layers", *self.settings, "patch", "normalize")

    def count_calls(self, tokens: int) -> int:
        """GPU kernels of a layer that follow each other, roughly."""
        return self.calls_per_layer * (tokens if self.is_recurrent else 1)


SPECS = {
    "lstm": ModelSpec(
        network="slipstream.models.rnn:Recurrent",
        is_recurrent=True,
        is_sequential=True,
        settings=("bidirectional", "layer_norm"),
        onednn_on_arm=True,
    ),
    "gru": ModelSpec(
        network="slipstream.models.rnn:Recurrent",
        is_recurrent=True,
        is_sequential=True,
        settings=("bidirectional", "layer_norm"),
    ),
    "transformer": ModelSpec(
        network="slipstream.models.transformer:Transformer",
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
        is_sequential=True,
        has_one_width=True,
        settings=("kernel_size",),
        search=("kernel_size",),
        calls_per_layer=12,
    ),
    "mlp": ModelSpec(network="slipstream.models.mlp:FeedForward"),
    "linear": ModelSpec(network="slipstream.models.mlp:FeedForward", has_hidden=False),
}
CUSTOM = ModelSpec(
    network="slipstream.models.custom:CustomNetwork",
    is_custom=True,
    has_hidden=False,
    can_pad=False,
    settings=("options",),
)
"""Of `model.kind = "nets:Mixer"`"""


def list_kinds(setting: str) -> list[str]:
    """The kinds that a setting of `[model]` is for."""
    return [kind for kind, spec in SPECS.items() if setting in spec.settings]


def format_encoders() -> str:
    """The kinds that can be pre-trained, for messages."""
    *kinds, last = (f'"{kind}"' for kind, spec in SPECS.items() if spec.is_sequential)
    return f"{', '.join(kinds)} or {last}"
