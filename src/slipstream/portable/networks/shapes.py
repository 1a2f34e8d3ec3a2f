"""The names and shapes of a network's weights, by its config and signature."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.config import Model, Signature
from slipstream.errors import UserError
from slipstream.portable.files import Weights

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
