"""The layers of the networks in numpy, and the shapes of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import UserError
from slipstream.config import Model, Signature
from slipstream.models.files import Weights

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


Shape = tuple[int, ...]
GATES = {"lstm": 4, "gru": 3}
ROW_UNITS = 64
"""Hidden units of the layer that reads rows known ahead"""


def list_shapes(model: Model, signature: Signature) -> dict[str, Shape]:
    """Return the shape of every weight of a model that predicts, by its name."""
    if model.spec.is_recurrent:
        names, width = _list_recurrent(model, signature)
    elif model.kind == "tcn":
        names, width = _list_convolution(model, signature)
    elif model.kind == "transformer":
        names, width = _list_transformer(model, signature)
    else:
        names, width = _list_flat(model, signature)
    if model.spec.is_sequential:
        if model.pool == "attention":
            names |= _list_linear("core.pool.score", width, 1)
        width *= signature.context // model.patch if model.pool == "flatten" else 1
    outputs = signature.steps_out * signature.model_targets * signature.outputs
    names |= _list_linear("core.head.linear", width + signature.static_width, outputs)
    rows, columns = signature.future_shape
    if rows and model.spec.has_hidden:
        beside = signature.static_width - rows * columns
        names |= _list_linear("core.head.ahead.window", width + beside, ROW_UNITS)
        names |= _list_linear("core.head.ahead.row", columns, ROW_UNITS)
        names |= _list_linear("core.head.ahead.out", ROW_UNITS, outputs // rows)
    return names


def verify_shapes(weights: Weights, model: Model, signature: Signature, path: Path) -> None:
    """Refuse weights that are not those of the config."""
    wanted = list_shapes(model, signature)
    for name, shape in wanted.items():
        if name not in weights:
            raise UserError(f'{path}: does not fit the run\'s config: "{name}" is missing')
        if weights[name].shape != shape:
            raise UserError(
                f'{path}: does not fit the run\'s config: "{name}" has the shape '
                f"{weights[name].shape}, not {shape}"
            )
    for name in weights.keys() - wanted.keys():
        raise UserError(f'{path}: does not fit the run\'s config: "{name}" is not expected')


def _list_linear(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _list_norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _list_recurrent(model: Model, signature: Signature) -> tuple[dict[str, Shape], int]:
    names: dict[str, Shape] = {}
    width, gates = signature.model_inputs * model.patch, GATES[model.kind]
    directions = ("_l0", "_l0_reverse") if model.bidirectional else ("_l0",)
    for depth, size in enumerate(model.sizes):
        layer = f"core.layers.{depth}"
        for suffix in directions:
            names[f"{layer}.weight_ih{suffix}"] = (gates * size, width)
            names[f"{layer}.weight_hh{suffix}"] = (gates * size, size)
            names[f"{layer}.bias_ih{suffix}"] = names[f"{layer}.bias_hh{suffix}"] = (gates * size,)
        width = size * len(directions)
        if model.layer_norm:
            names |= _list_norm(f"core.norms.{depth}", width)
    return names, width


def _list_convolution(model: Model, signature: Signature) -> tuple[dict[str, Shape], int]:
    width = model.sizes[0]
    names = _list_linear("core.embed", signature.model_inputs * model.patch, width)
    for depth in range(len(model.sizes)):
        for conv in ("conv1", "conv2"):
            names[f"core.layers.{depth}.{conv}.weight"] = (width, width, model.kernel_size)
            names[f"core.layers.{depth}.{conv}.bias"] = (width,)
    return names, width


def _list_transformer(model: Model, signature: Signature) -> tuple[dict[str, Shape], int]:
    width, inner = model.sizes[0], model.sizes[0] * model.expansion
    names = _list_linear("core.embed", signature.model_inputs * model.patch, width)
    if model.positions == "learned":
        names["core.positions"] = (signature.context // model.patch, 1, width)
    for name in _iter_layers(model):
        names[f"{name}.self_attn.in_proj_weight"] = (3 * width, width)
        names[f"{name}.self_attn.in_proj_bias"] = (3 * width,)
        names |= _list_linear(f"{name}.self_attn.out_proj", width, width)
        names |= _list_linear(f"{name}.linear1", width, inner)
        names |= _list_linear(f"{name}.linear2", inner, width)
        names |= _list_norm(f"{name}.norm1", width) | _list_norm(f"{name}.norm2", width)
    return names | _list_norm("core.norm", width), width


def _iter_layers(model: Model) -> Iterator[str]:
    return (f"core.layers.{depth}" for depth in range(len(model.sizes)))


def _list_flat(model: Model, signature: Signature) -> tuple[dict[str, Shape], int]:
    names: dict[str, Shape] = {}
    width = signature.context * signature.model_inputs
    for depth, size in enumerate(model.sizes if model.spec.has_hidden else ()):
        names |= _list_linear(f"core.body.{3 * depth}", width, size)
        width = size
    return names, width


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
