"""Each kind's tokens [T / patch, B, D] from inputs [T, B, F]."""

from __future__ import annotations

import math

import numpy as np

from slipstream.config import Model
from slipstream.portable.networks.arithmetic import (
    ACTIVATIONS,
    HALF,
    ONE,
    Array,
    apply_linear,
    gelu,
    normalize_layer,
    relu,
    sigmoid,
    softmax,
)
from slipstream.portable.networks.heads import flatten_rows


def to_patches(inputs: Array, patch: int) -> Array:
    """[T, B, F] to [T / patch, B, patch * F]: each token holds `patch` rows."""
    if patch == 1:
        return inputs
    time, batch, features = inputs.shape
    rows = inputs.reshape(time // patch, patch, batch, features)
    return rows.swapaxes(1, 2).reshape(time // patch, batch, patch * features)


def encode_recurrent(weights: dict[str, Array], model: Model, inputs: Array) -> Array:
    """Run the layers of an LSTM or a GRU."""
    sequence = to_patches(inputs, model.patch)
    run = _run_lstm if model.kind == "lstm" else _run_gru
    for depth in range(len(model.sizes)):
        forward = run(weights, f"core.layers.{depth}", "_l0", sequence)
        if model.bidirectional:
            backward = run(weights, f"core.layers.{depth}", "_l0_reverse", sequence[::-1])[::-1]
            forward = np.concatenate([forward, backward], axis=-1)
        sequence = forward
        if model.layer_norm:
            sequence = normalize_layer(weights, f"core.norms.{depth}", sequence)
    return sequence


def _run_lstm(weights: dict[str, Array], name: str, suffix: str, sequence: Array) -> Array:
    along, across, bias = pack_gates(weights, name, suffix)
    products = sequence @ along + bias
    width = len(across)
    h = c = np.zeros((sequence.shape[1], width), dtype=np.float32)
    out = np.empty((*sequence.shape[:2], width), dtype=np.float32)
    for t, product in enumerate(products):
        gates = h @ across
        gates += product
        h, c = step_lstm(gates, c)
        out[t] = h
    return out


def pack_gates(
    weights: dict[str, Array], name: str, suffix: str = "_l0"
) -> tuple[Array, Array, Array]:
    """Return the matrices of an LSTM layer for its inputs and its state, and the bias.

    The gates come in the order input, forget, output, new. What a sigmoid is taken of is halved, so
    that one tanh computes all of them: sigmoid(x) = tanh(x / 2) / 2 + 1 / 2.
    """
    bias = weights[f"{name}.bias_ih{suffix}"] + weights[f"{name}.bias_hh{suffix}"]
    size = len(bias) // 4
    order = np.r_[0 : 2 * size, 3 * size : 4 * size, 2 * size : 3 * size]
    factor = np.where(np.arange(len(bias)) < 3 * size, HALF, ONE)
    matrices = (weights[f"{name}.weight_{part}{suffix}"][order].T for part in ("ih", "hh"))
    along, across = (np.ascontiguousarray(matrix * factor) for matrix in matrices)
    return along, across, bias[order] * factor


def step_lstm(gates: Array, cell: Array) -> tuple[Array, Array]:
    """Return the new state and cell from packed gates [B, 4 * D], which are overwritten."""
    size = cell.shape[1]
    np.tanh(gates, out=gates)
    shares = gates[:, : 3 * size]
    shares *= HALF
    shares += HALF
    new = shares[:, size : 2 * size] * cell
    new += shares[:, :size] * gates[:, 3 * size :]
    h = np.tanh(new)
    h *= shares[:, 2 * size :]
    return h, new


def _run_gru(weights: dict[str, Array], name: str, suffix: str, sequence: Array) -> Array:
    across, of_h = weights[f"{name}.weight_hh{suffix}"].T, weights[f"{name}.bias_hh{suffix}"]
    products = (
        sequence @ weights[f"{name}.weight_ih{suffix}"].T + weights[f"{name}.bias_ih{suffix}"]
    )
    width = len(across)
    h = np.zeros((sequence.shape[1], width), dtype=np.float32)
    out = np.empty((*sequence.shape[:2], width), dtype=np.float32)
    for t, product in enumerate(products):
        past = h @ across + of_h
        both = sigmoid(product[:, : 2 * width] + past[:, : 2 * width])
        reset, update = both[:, :width], both[:, width:]
        new = np.tanh(product[:, 2 * width :] + reset * past[:, 2 * width :])
        h = new + update * (h - new)
        out[t] = h
    return out


def encode_convolution(weights: dict[str, Array], model: Model, inputs: Array) -> Array:
    """Run the residual blocks of a TCN."""
    tokens = apply_linear(weights, "core.embed", to_patches(inputs, model.patch))
    for depth in range(len(model.sizes)):
        hidden = tokens
        for conv in ("conv1", "conv2"):
            name = f"core.layers.{depth}.{conv}"
            columns = _stack_taps(hidden, model.kernel_size, 2**depth)
            out = columns @ join_taps(weights[f"{name}.weight"]) + weights[f"{name}.bias"]
            hidden = relu(out)
        tokens = relu(tokens + hidden)
    return tokens


def join_taps(weight: Array) -> Array:
    """Return a convolution's weight [N, D, taps] as the matrix of a product, [taps * D, N]."""
    return np.ascontiguousarray(weight.transpose(2, 1, 0)).reshape(-1, weight.shape[0])


def _stack_taps(tokens: Array, taps: int, dilation: int) -> Array:
    """[T, B, D] to [T, B, taps * D]: the rows that each row's output reads, the oldest first."""
    reach = (taps - 1) * dilation
    padded = np.concatenate([np.zeros((reach, *tokens.shape[1:]), dtype=np.float32), tokens])
    parts = [padded[k * dilation : k * dilation + len(tokens)] for k in range(taps)]
    return np.concatenate(parts, axis=-1)


def encode_transformer(weights: dict[str, Array], model: Model, inputs: Array) -> Array:
    """Run a pre-norm transformer over patches."""
    tokens = apply_linear(weights, "core.embed", to_patches(inputs, model.patch))
    positions = weights.get("core.positions")
    tokens = tokens + (make_positions(*tokens.shape[::2]) if positions is None else positions)
    for depth in range(len(model.sizes)):
        name = f"core.layers.{depth}"
        normal = normalize_layer(weights, f"{name}.norm1", tokens)
        tokens = tokens + _attend(weights, f"{name}.self_attn", normal, model.heads)
        normal = normalize_layer(weights, f"{name}.norm2", tokens)
        inner = gelu(apply_linear(weights, f"{name}.linear1", normal))
        tokens = tokens + apply_linear(weights, f"{name}.linear2", inner)
    return normalize_layer(weights, "core.norm", tokens)


def _attend(weights: dict[str, Array], name: str, tokens: Array, heads: int) -> Array:
    """Multi-head attention of a sequence [T, B, D] to itself."""
    time, batch, width = tokens.shape
    joined = tokens @ weights[f"{name}.in_proj_weight"].T + weights[f"{name}.in_proj_bias"]
    split = joined.reshape(time, batch, 3, heads, width // heads).transpose(2, 1, 3, 0, 4)
    q, k, v = split[0], split[1], split[2]
    scores = (q * np.float32(1 / math.sqrt(width // heads))) @ k.swapaxes(-1, -2)
    mixed = softmax(scores) @ v
    joined = mixed.transpose(2, 0, 1, 3).reshape(time, batch, width)
    return apply_linear(weights, f"{name}.out_proj", joined)


def make_positions(tokens: int, width: int) -> Array:
    """[tokens, 1, width]: sines and cosines of falling frequency."""
    powers = np.arange(0, width, 2, dtype=np.float32) * np.float32(-math.log(10_000.0))
    rates = np.exp(powers / np.float32(width))
    angles = np.arange(tokens, dtype=np.float32)[:, None] * rates
    table = np.zeros((tokens, 1, width), dtype=np.float32)
    table[:, 0, 0::2] = np.sin(angles)
    table[:, 0, 1::2] = np.cos(angles)[:, : width // 2]
    return table


def encode_flat(weights: dict[str, Array], model: Model, inputs: Array) -> Array:
    """Return the features [B, D] of an MLP, or of a linear model: the window itself."""
    hidden = flatten_rows(inputs)
    for depth in range(len(model.sizes) if model.spec.has_hidden else 0):
        hidden = ACTIVATIONS[model.activation](
            apply_linear(weights, f"core.body.{3 * depth}", hidden)
        )
    return hidden
