"""The shapes of a model's weights, the numbers of weights and multiply-adds, and a rough guess of
the time of a training step."""

from __future__ import annotations

import math
from pathlib import Path

from slipstream.base.errors import UserError
from slipstream.config import Model, Signature
from slipstream.models.kinds import load_kind
from slipstream.models.numpy_layers import ROW_UNITS, Shape, Weights, list_linear

AHEAD = ("core.head.ahead.row", "core.head.ahead.out")
"""The layers that read each row known ahead"""


def list_shapes(model: Model, signature: Signature) -> dict[str, Shape]:
    """Return the shape of every weight of a model that predicts, by its name."""
    shapes = load_kind(model).list_shapes(model, signature)
    return shapes if model.spec.is_fitted else shapes | _list_head(model, signature)


def _list_head(model: Model, signature: Signature) -> dict[str, Shape]:
    """Return the shapes of the weights of pool and head."""
    names: dict[str, Shape] = {}
    width = load_kind(model).get_width(model, signature)
    if model.spec.is_sequential:
        if model.pool == "attention":
            names |= list_linear("core.pool.score", width, 1)
        width *= signature.context // model.patch if model.pool == "flatten" else 1
    outputs = signature.steps_out * signature.model_targets * signature.outputs
    names |= list_linear("core.head.linear", width + signature.static_width, outputs)
    rows, columns = signature.future_shape
    if rows and model.spec.has_hidden:
        beside = signature.static_width - rows * columns
        names |= list_linear("core.head.ahead.window", width + beside, ROW_UNITS)
        names |= list_linear("core.head.ahead.row", columns, ROW_UNITS)
        names |= list_linear("core.head.ahead.out", ROW_UNITS, outputs // rows)
    return names


def verify_shapes(weights: Weights, model: Model, signature: Signature, path: Path) -> None:
    """Refuse weights whose names or shapes differ from those of the config."""
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


def count_parameters(model: Model, signature: Signature) -> int | None:
    """Return the number of weights of a model that is not built yet; None for a user's own class.

    For an encoder to pre-train, the number is approximate and includes the decoder.
    """
    if model.is_custom:
        return None
    if signature.masked:
        columns = signature.model_inputs * model.patch
        plain = signature.model_copy(update={"decoder": 0, "horizon": 1, "targets": ("x",)})
        return count_weights(model, plain) + signature.decoder * (max(model.sizes) + columns)
    return count_weights(model, signature)


def count_weights(model: Model, signature: Signature) -> int:
    return sum(math.prod(shape) for shape in list_shapes(model, signature).values())


def count_multiply_adds(model: Model, signature: Signature, *, carried: bool = False) -> int | None:
    """Return the multiply-adds of the matrix products of one prediction: of a whole window, or of
    one more row where the state is carried on. None for a user's own class.

    Activations, normalization and scaling are not counted; they take a few per unit.
    """
    if model.is_custom:
        return None
    tokens = 1
    if model.spec.is_sequential and not carried:
        tokens = signature.context // model.patch
    token, head = count_products(model, signature)
    constant = load_kind(model).count_constant_products(model, signature, tokens)
    total = tokens * token + head + constant
    return total * signature.sequences_per_window


def count_products(model: Model, signature: Signature) -> tuple[int, int]:
    """Return the multiply-adds with weights, for each token and for the head of one sequence."""
    token = head = 0
    for name, shape in list_shapes(model, signature).items():
        if len(shape) < 2 or name in load_kind(model).added_weights:
            continue
        size = math.prod(shape)
        if name.startswith(AHEAD):
            head += size * signature.horizon
        elif name.startswith("core.head."):
            head += size
        else:
            token += size
    return token, head


def guess_step_s(model: Model, *, weights: int, context: int, windows: int, cores: int) -> float:
    """Guess very roughly how many seconds an optimizer step over so many sequences takes, from
    multiplications and kernel calls; `cores` is 0 for a GPU."""
    tokens = 1 if model.spec.flattens else context // model.patch
    calls = model.spec.count_calls(tokens) * len(model.sizes) * model.num_stacks
    speed = 5e9 * cores if cores else 1e13
    step_s = 1e-3 + 3e-4 * calls if cores else 1e-4 + 5e-6 * calls  # of the smallest model
    return 6 * weights * tokens * windows / speed + step_s
