"""From a sequence of tokens to the outputs of each sequence."""

from __future__ import annotations

import numpy as np

from slipstream.config import Model, Signature
from slipstream.portable.networks.arithmetic import Array, apply_linear, relu, softmax


def flatten_rows(sequence: Array) -> Array:
    """[T, B, D] to [B, T * D]."""
    return np.ascontiguousarray(sequence.swapaxes(0, 1)).reshape(sequence.shape[1], -1)


def pool_tokens(weights: dict[str, Array], model: Model, tokens: Array) -> Array:
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
    weights: dict[str, Array], signature: Signature, features: Array, static: Array | None
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
