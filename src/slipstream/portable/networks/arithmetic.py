"""Functions of arrays that several networks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
NORM_EPSILON = 1e-5
"""What is added to a variance before it is divided by"""
LEAK = np.float32(0.01)
HALF, ONE = np.float32(0.5), np.float32(1)


def apply_linear(weights: dict[str, Array], name: str, x: Array) -> Array:
    """Apply the linear layer of this name."""
    return np.asarray(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])


def normalize_layer(weights: dict[str, Array], name: str, x: Array) -> Array:
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
