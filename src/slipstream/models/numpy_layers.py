"""The layers that several networks share, in numpy: trained models predict without torch.

Shapes: T rows or tokens, B sequences, F inputs, D the width of a layer, K numbers beside the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.config import Model, Signature

Array = npt.NDArray[np.float32]
Weights = dict[str, Array]
"""Weights by their names in the safetensors file"""
Shape = tuple[int, ...]
NORM_EPSILON = 1e-5
"""Added to the variance of a layer before it is divided by"""
SMALLEST_VARIANCE = 1e-5
"""Added to the variance of a window before it is divided by"""
ROW_UNITS = 64
"""The number of hidden units in the head's network for rows known ahead"""
LEAK = np.float32(0.01)
HALF, ONE = np.float32(0.5), np.float32(1)


def apply_linear(weights: Weights, name: str, x: Array) -> Array:
    """Apply the linear layer of this name."""
    return np.asarray(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])


def normalize_layer(weights: Weights, name: str, x: Array) -> Array:
    """Normalize over the last axis, then scale and shift by the weights of this name."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    normal = centred / np.sqrt(variance + np.float32(NORM_EPSILON))
    return np.asarray(normal * weights[f"{name}.weight"] + weights[f"{name}.bias"])


def sigmoid(x: Array) -> Array:
    return np.asarray(HALF * np.tanh(HALF * x) + HALF)


def softmax(x: npt.NDArray[Any], axis: int = -1) -> npt.NDArray[Any]:
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis=axis, keepdims=True))


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0))


def gelu(x: Array) -> Array:
    from scipy import special  # takes a while to import

    return np.asarray(x * HALF * (ONE + special.erf(x * np.float32(np.sqrt(0.5)))))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": relu,
    "gelu": gelu,
    "silu": lambda x: x * sigmoid(x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, np.float32(0)))),
    "leaky_relu": lambda x: np.where(x > 0, x, LEAK * x),
    "tanh": np.tanh,
}


def list_linear(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    """Return the shapes of the weights of a linear layer, by name."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def list_norm(name: str, width: int) -> dict[str, Shape]:
    """Return the shapes of the weights of a layer norm, by name."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def to_patches(inputs: Array, patch: int) -> Array:
    """Return tokens of `patch` rows each: [T, B, F] to [T / patch, B, patch * F]."""
    if patch == 1:
        return inputs
    time, batch, features = inputs.shape
    rows = inputs.reshape(time // patch, patch, batch, features)
    return rows.swapaxes(1, 2).reshape(time // patch, batch, patch * features)


def flatten_rows(sequence: Array) -> Array:
    """Return the rows of each sequence as one: [T, B, D] to [B, T * D]."""
    return np.ascontiguousarray(sequence.swapaxes(0, 1)).reshape(sequence.shape[1], -1)


def pool_tokens(weights: Weights, model: Model, tokens: Array) -> Array:
    """Return one vector per sequence, [B, D]."""
    if model.pool == "attention":
        shares = softmax(apply_linear(weights, "core.pool.score", tokens), axis=0)
        return np.asarray((shares * tokens).sum(axis=0))
    if model.pool == "mean":
        return np.asarray(tokens.mean(axis=0))
    if model.pool == "flatten":
        return flatten_rows(tokens)
    if model.bidirectional:  # the backward direction ends at the first token
        width = tokens.shape[-1] // 2
        return np.concatenate([tokens[-1, :, :width], tokens[0, :, width:]], axis=-1)
    return np.asarray(tokens[-1])


def apply_head(
    weights: Weights, signature: Signature, features: Array, static: Array | None
) -> Array:
    """Return the outputs of each sequence, flat, from features [B, D] and static [B, K]."""
    joined = features if static is None else np.concatenate([features, static], axis=-1)
    out = apply_linear(weights, "core.head.linear", joined)
    if static is None or "core.head.ahead.row.weight" not in weights:
        return out
    rows, columns = signature.future_shape
    fixed, ahead = np.split(static, [static.shape[-1] - rows * columns], axis=-1)
    window = apply_linear(
        weights, "core.head.ahead.window", np.concatenate([features, fixed], axis=-1)
    )
    row = apply_linear(weights, "core.head.ahead.row", ahead.reshape(-1, rows, columns))
    added = apply_linear(weights, "core.head.ahead.out", relu(row + window[:, None]))
    return out + added.reshape(len(out), -1)
