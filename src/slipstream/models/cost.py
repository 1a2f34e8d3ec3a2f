"""How many weights and multiply-adds a model has, counted from the shapes of its weights, and how
long a step of training takes, roughly."""

import math

from slipstream.config import Model, Signature
from slipstream.models.numpy_networks import list_shapes

AHEAD = ("core.head.ahead.row", "core.head.ahead.out")
"""Layers that every row known ahead goes through"""


def count_parameters(model: Model, signature: Signature) -> int | None:
    """Return the number of weights of a model that is not built yet; None for a user's own class.

    Of an encoder to pre-train, its decoder included, roughly.
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
    total = 0
    for name, shape in list_shapes(model, signature).items():
        if len(shape) < 2 or name == "core.positions":
            continue
        times = signature.horizon if name.startswith(AHEAD) else tokens
        once = name.startswith("core.head.") and not name.startswith(AHEAD)
        total += math.prod(shape) * (1 if once else times)
    if model.kind == "transformer":  # scores of all pairs of tokens, and their sums
        total += 2 * tokens**2 * sum(model.sizes)
    return total * signature.sequences_per_window


def guess_step_s(model: Model, *, weights: int, context: int, windows: int, cores: int) -> float:
    """Guess very roughly how many seconds an optimizer step over so many sequences takes, from
    multiplications and kernel calls; `cores` is 0 for a GPU."""
    tokens = 1 if model.spec.flattens else context // model.patch
    calls = model.spec.count_calls(tokens) * len(model.sizes)
    speed = 5e9 * cores if cores else 1e13
    step_s = 1e-3 + 3e-4 * calls if cores else 1e-4 + 5e-6 * calls  # of the smallest model
    return 6 * weights * tokens * windows / speed + step_s
