"""Networks that read one row at a time and carry their state on: LSTM, GRU and TCN.

A state is a dict of arrays, [B, D] or [rows, B, D]; a new series starts from zeros, as a window
does. B is 1, or one sequence per independent channel.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from slipstream.config import Model
from slipstream.data.scaler import scale_limits
from slipstream.errors import UserError
from slipstream.portable.model import PortableModel
from slipstream.portable.networks.arithmetic import (
    Array,
    apply_linear,
    normalize_layer,
    relu,
    sigmoid,
)
from slipstream.portable.networks.encoders import join_taps, pack_gates, step_lstm
from slipstream.portable.networks.heads import apply_head
from slipstream.portable.networks.windows import (
    finish_outputs,
    get_output_shape,
    split_channels,
)

State = dict[str, Array]


def explain_no_steps(model: Model) -> str | None:
    """Say why a model cannot carry a state from row to row; None where it can."""
    if not (model.spec.is_recurrent or model.kind == "tcn"):
        return f'model.kind = "{model.kind}" reads a window as a whole and has no state'
    if model.bidirectional:
        return "model.bidirectional = true reads every window backwards too"
    if model.pool != "last":
        return f'model.pool = "{model.pool}" needs all rows of a window'
    if model.patch > 1:
        return f"model.patch = {model.patch} makes one token of several rows"
    if model.normalize != "none":
        return f'model.normalize = "{model.normalize}" is computed from each window'
    return None


class RowEncoder(Protocol):
    """A network below its head, row after row."""

    def start(self, sequences: int) -> State:
        """Return the state before the first row."""

    def step(self, x: Array, state: State) -> Array:
        """Return the features [B, D] of a row [B, F], and write the new state to `state`."""


class RowNetwork:
    """A model that reads rows one by one."""

    def __init__(self, model: PortableModel) -> None:
        settings = model.config.model
        if reason := explain_no_steps(settings):
            raise UserError(f'a carried state is not possible: {reason}; use regime="window"')
        self.model, self.signature = model, model.signature
        self.limits = scale_limits(model.signature, model.scaler)
        self.sequences = model.signature.sequences_per_window
        self.shape = get_output_shape(model.signature)
        kinds: dict[str, type[RowLstm | RowGru | RowConvolution]] = {
            "lstm": RowLstm,
            "gru": RowGru,
            "tcn": RowConvolution,
        }
        self.encoder: RowEncoder = kinds[settings.kind](model.weights, settings)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """H, C, Q of a prediction."""
        steps, targets, outputs = self.shape
        return steps, targets if self.sequences == 1 else self.sequences, outputs

    def start(self) -> State:
        """Return the state at the start of a series."""
        return self.encoder.start(self.sequences)

    def step(self, row: Array, static: Array | None, state: State) -> Array:
        """Return the scaled prediction [H, C, Q] after a scaled row [F]; `state` changes.

        `static` [K] is what is known beside the rows.
        """
        return self.decode(self.encode(row, state), static)

    def encode(self, row: Array, state: State) -> Array:
        """Return the features [B, D] after a scaled row; `state` changes."""
        x = row[None]
        if self.sequences > 1:
            x = split_channels(x[None], self.sequences)[0]
        return self.encoder.step(x, state)

    def decode(self, features: Array, static: Array | None) -> Array:
        """Return the scaled prediction [H, C, Q] from the features of a row."""
        beside = None
        if static is not None:
            beside = np.broadcast_to(static, (self.sequences, len(static)))
        flat = apply_head(self.model.weights, self.signature, features, beside)
        out = flat.reshape(-1, *self.shape)
        out = out[0] if self.sequences == 1 else out[:, :, 0].swapaxes(0, 1)
        return finish_outputs(out, self.signature, self.limits)


class RowLstm:
    """LSTM layers."""

    def __init__(self, weights: dict[str, Array], model: Model) -> None:
        self.sizes, self.weights, self.has_norm = model.sizes, weights, model.layer_norm
        self.layers: list[tuple[Array, Array]] = []
        for depth in range(len(model.sizes)):
            along, across, bias = pack_gates(weights, f"core.layers.{depth}")
            self.layers.append((np.concatenate([along, across]), bias))

    def start(self, sequences: int) -> State:
        zeros = [np.zeros((sequences, size), dtype=np.float32) for size in self.sizes]
        return {
            f"{part}{depth}": zero.copy() for part in ("h", "c") for depth, zero in enumerate(zeros)
        }

    def step(self, x: Array, state: State) -> Array:
        for depth, (matrix, bias) in enumerate(self.layers):
            h, c = f"h{depth}", f"c{depth}"
            gates = np.concatenate((x, state[h]), axis=1) @ matrix
            gates += bias
            x, state[c] = step_lstm(gates, state[c])
            state[h] = x
            if self.has_norm:
                x = normalize_layer(self.weights, f"core.norms.{depth}", x)
        return x


class RowGru:
    """GRU layers."""

    def __init__(self, weights: dict[str, Array], model: Model) -> None:
        self.sizes, self.weights, self.has_norm = model.sizes, weights, model.layer_norm
        self.layers = [
            tuple(
                np.ascontiguousarray(weights[f"core.layers.{depth}.{part}_l0"].T)
                for part in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
            )
            for depth in range(len(model.sizes))
        ]

    def start(self, sequences: int) -> State:
        return {
            f"h{depth}": np.zeros((sequences, size), dtype=np.float32)
            for depth, size in enumerate(self.sizes)
        }

    def step(self, x: Array, state: State) -> Array:
        for depth, (of_x, bias_x, of_h, bias_h) in enumerate(self.layers):
            size, h = self.sizes[depth], state[f"h{depth}"]
            now, past = x @ of_x + bias_x, h @ of_h + bias_h
            both = sigmoid(now[:, : 2 * size] + past[:, : 2 * size])
            new = np.tanh(now[:, 2 * size :] + both[:, :size] * past[:, 2 * size :])
            x = state[f"h{depth}"] = new + both[:, size:] * (h - new)
            if self.has_norm:
                x = normalize_layer(self.weights, f"core.norms.{depth}", x)
        return x


class RowConvolution:
    """The residual blocks of a TCN; a state has the last rows that each convolution reads."""

    def __init__(self, weights: dict[str, Array], model: Model) -> None:
        self.weights, self.width, self.taps = weights, model.sizes[0], model.kernel_size
        self.convolutions = [
            (
                f"rows{depth}_{place}",
                2**depth,
                join_taps(weights[f"core.layers.{depth}.conv{place}.weight"]),
                weights[f"core.layers.{depth}.conv{place}.bias"],
            )
            for depth in range(len(model.sizes))
            for place in (1, 2)
        ]

    def start(self, sequences: int) -> State:
        return {
            name: np.zeros(((self.taps - 1) * dilation, sequences, self.width), dtype=np.float32)
            for name, dilation, _, _ in self.convolutions
        }

    def step(self, x: Array, state: State) -> Array:
        tokens = hidden = apply_linear(self.weights, "core.embed", x)
        for number, (name, dilation, matrix, bias) in enumerate(self.convolutions):
            rows = np.concatenate((state[name], hidden[None]))
            columns = np.concatenate(list(rows[::dilation]), axis=-1)
            state[name] = rows[1:]
            hidden = relu(columns @ matrix + bias)
            if number % 2:  # the second one of a block
                tokens = hidden = relu(tokens + hidden)
        return tokens
