"""Predictions in numpy: whole windows, or row after row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.base.errors import UserError
from slipstream.config import Model, Signature
from slipstream.data.scaler import Scaler, scale_limits
from slipstream.data.series import Floats
from slipstream.inference.portable import PortableModel
from slipstream.inference.rows import PhysicalWindows
from slipstream.models.kinds import RowState, load_kind
from slipstream.models.numpy_layers import (
    SMALLEST_VARIANCE,
    Array,
    apply_head,
    log_softmax,
    pool_tokens,
    softmax,
)

MAX_NUMBERS = 1 << 22
"""Numbers of a layer's activations that are in memory at a time, roughly"""


def predict_windows(models: Sequence[PortableModel], windows: PhysicalWindows) -> Array:
    """Return the mean of the scaled predictions of a run's models, for any number of windows."""
    first = models[0]
    rows, static = scale_windows(windows, first.signature, first.scaler)
    wide = max(first.config.model.sizes) * len(first.signature.targets) * rows.shape[1]
    at_once = max(1, MAX_NUMBERS // wide)
    parts = [
        average(
            [
                predict_scaled(
                    model,
                    rows[begin : begin + at_once],
                    None if static is None else static[begin : begin + at_once],
                )
                for model in models
            ],
            classes=bool(first.signature.classes),
        )
        for begin in range(0, len(rows), at_once)
    ]
    return np.concatenate(parts)


def scale_windows(
    windows: PhysicalWindows, signature: Signature, scaler: Scaler
) -> tuple[Array, Array | None]:
    """Return the scaled context rows [N, T, F], and static and future numbers [N, K]."""
    rows = _scale(windows.rows, signature.inputs, scaler)
    beside = []
    if windows.static is not None:
        beside.append(_scale(windows.static, signature.static, scaler))
    if windows.future is not None:
        ahead = _scale(windows.future, signature.future, scaler)
        beside.append(ahead.reshape(len(ahead), -1))
    return rows, np.concatenate(beside, axis=-1) if beside else None


def _scale(values: np.ndarray, names: Sequence[str], scaler: Scaler) -> Array:
    """Scale the columns along the last axis."""
    scaled = np.empty(values.shape, dtype=np.float32)
    for i, name in enumerate(names):
        scaler.apply(name, values[..., i], scaled[..., i])
    return scaled


def predict_scaled(model: PortableModel, rows: Array, static: Array | None) -> Array:
    """Return scaled predictions [N, H, C, Q] for scaled rows [N, T, F] and static [N, K]."""
    signature = model.signature
    inputs = rows.swapaxes(0, 1)
    count = signature.sequences_per_window
    if count > 1:
        inputs = split_channels(inputs, count)
        static = None if static is None else static.repeat(count, axis=0)
    out = _forward(model, inputs, static)
    if count > 1:
        out = out[:, :, 0].reshape(-1, count, *out.shape[1:2], *out.shape[3:]).swapaxes(1, 2)
    return finish_outputs(out, signature, scale_limits(signature, model.scaler))


def split_channels(inputs: Array, count: int) -> Array:
    """Turn [T, N, others + C] into [T, N * C, others + 1], the own channel last."""
    channels = inputs[..., inputs.shape[-1] - count :, None]
    further = inputs[..., None, : inputs.shape[-1] - count]
    shared = np.broadcast_to(further, (*channels.shape[:-1], further.shape[-1]))
    joined = np.concatenate([shared, channels], axis=-1)
    return joined.reshape(len(inputs), -1, joined.shape[-1])


def _forward(model: PortableModel, inputs: Array, static: Array | None) -> Array:
    """Return the predictions of sequences [T, B, F], with each window's normalization undone."""
    signature, settings = model.signature, model.config.model
    known = len(signature.future)
    centre = spread = None
    if settings.normalize != "none":
        centre = inputs[-1].copy()
        centre[..., :known] = 0
        inputs = inputs - centre
    if centre is not None and settings.normalize == "window":
        mean = inputs.mean(axis=0)  # of differences, as in WindowPredictor
        spread = np.sqrt(np.square(inputs - mean).mean(axis=0) + np.float32(SMALLEST_VARIANCE))
        mean[..., :known], spread[..., :known] = 0, 1
        inputs, centre = (inputs - mean) / spread, centre + mean
    out = compute_outputs(model, inputs, static)
    shared = signature.model_shared
    if centre is None or not shared:
        return out
    restored = out[:, :, :shared]
    if spread is not None:
        restored = restored * spread[:, None, -shared:, None]
    restored = restored + centre[:, None, -shared:, None]
    return np.concatenate([restored, out[:, :, shared:]], axis=2)


def compute_outputs(model: PortableModel, inputs: Array, static: Array | None) -> Array:
    """Return the network's raw outputs [B, H, C, Q] for sequences [T, B, F]."""
    weights, settings, signature = model.weights, model.config.model, model.signature
    kind = load_kind(settings)
    features = kind.encode(weights, settings, np.ascontiguousarray(inputs))
    if settings.spec.is_sequential:
        features = pool_tokens(weights, settings, features)
    outputs = kind.apply_head(weights, settings, signature, features, static)
    return shape_outputs(outputs, signature)


def shape_outputs(flat: Array, signature: Signature) -> Array:
    """Turn [B, H * C * Q] into [B, H, C, Q]."""
    return flat.reshape(-1, *get_output_shape(signature))


def get_output_shape(signature: Signature) -> tuple[int, int, int]:
    """Return H, C, Q of one sequence."""
    return signature.steps_out, signature.model_targets, signature.outputs


def finish_outputs(out: Array, signature: Signature, limits: tuple[Array, Array] | None) -> Array:
    """Return scaled outputs [..., Q] in their final form: quantiles in order, within the limits."""
    if signature.quantiles:
        out = np.sort(out, axis=-1)
    return out if limits is None else out.clip(*limits)


def average(
    predictions: Sequence[Array], *, classes: bool, weights: Sequence[float] | None = None
) -> Array:
    """Return the mean of several models' predictions; for classes, the logarithm of the mean
    probability."""
    if len(predictions) == 1:
        return predictions[0]
    factors = weights or [1 / len(predictions)] * len(predictions)
    used = [(values, factor) for values, factor in zip(predictions, factors, strict=True) if factor]
    if classes:
        parts = [np.exp(log_softmax(logits)) * np.float32(factor) for logits, factor in used]
        return np.asarray(np.log(np.maximum(sum(parts), np.finfo(np.float32).tiny)))
    return np.asarray(sum(values * np.float32(factor) for values, factor in used), dtype=np.float32)


def restore_outputs(outputs: Sequence[Array], signature: Signature, scaler: Scaler) -> Floats:
    """Return the mean of several models' scaled predictions [..., H, C, Q] in physical units, or
    the probabilities of classes [..., H, Q]."""
    scaled = average(outputs, classes=bool(signature.classes)).astype(np.float64)
    if signature.classes:
        return softmax(scaled[..., 0, :])
    size, shift = (
        np.array([[by[name]] for name in signature.targets]) for by in (scaler.size, scaler.shift)
    )
    values: Floats = scaled * size + shift
    limits = signature.output_range
    return values if limits is None else np.clip(values, *limits)


def explain_no_steps(model: Model) -> str | None:
    """Say why a model cannot carry a state from row to row; None where it can."""
    if not model.spec.carries_state:
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
        row_encoder = load_kind(settings).row_encoder
        assert row_encoder is not None  # explain_no_steps refuses kinds without one
        self.encoder = row_encoder(model.weights, settings)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """H, C, Q of a prediction."""
        steps, targets, outputs = self.shape
        return steps, targets if self.sequences == 1 else self.sequences, outputs

    def start(self) -> RowState:
        """Return the state at the start of a series."""
        return self.encoder.start(self.sequences)

    def step(self, row: Array, static: Array | None, state: RowState) -> Array:
        """Return the scaled prediction [H, C, Q] after a scaled row [F]; `state` changes.

        `static` [K] is what is known beside the rows.
        """
        return self.decode(self.encode(row, state), static)

    def encode(self, row: Array, state: RowState) -> Array:
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
