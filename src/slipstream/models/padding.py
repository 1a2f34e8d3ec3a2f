"""Models of several widths in the shape of the widest: units of zero weights, which stay zero.

Such a unit gives nothing and gets no gradient, in LSTM, GRU and MLP; so a padded model computes and
learns what the model itself does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.config import Model

Axis = tuple[int, int] | None
"""A layer whose units lie along it, and how often over; None where no width shows"""


def find_widest(models: Sequence[Model]) -> Model:
    """The model whose every layer is as wide as the widest of these."""
    sizes = tuple(map(max, zip(*(model.sizes for model in models), strict=True)))
    hidden = sizes[0] if len(set(sizes)) == 1 else sizes
    return models[0].model_copy(update={"hidden": hidden})


def pad_weights(
    weights: Mapping[str, Tensor], model: Model, to: Model, tokens: int
) -> dict[str, Tensor]:
    """A model's weights in the shapes of a wider one; `tokens` are the steps of its sequence."""
    padded = {}
    for name, weight in weights.items():
        places = _places(name, weight.shape, model, to, tokens)
        shape = [length for _, length in places]
        padded[name] = weight.new_zeros(shape)
        padded[name][_grid(places)] = weight
    return padded


def unpad_weights(
    weights: Mapping[str, Tensor], model: Model, to: Model, tokens: int
) -> dict[str, Tensor]:
    """The way back: what is `model`'s own among a padded model's weights."""
    return {
        name: weight[_grid(_places(name, weight.shape, model, to, tokens, padded=True))].clone()
        for name, weight in weights.items()
    }


def _grid(places: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, ...]:
    return torch.meshgrid(*(index for index, _ in places), indexing="ij")


def _places(
    name: str, shape: Sequence[int], model: Model, to: Model, tokens: int, *, padded: bool = False
) -> list[tuple[Tensor, int]]:
    """By axis: where the model's own places are in the wider one, and how long that is."""
    found = []
    for axis, length in zip(_axes(name, model, tokens, len(shape)), shape, strict=True):
        if axis is None:
            found.append((torch.arange(length), length))
            continue
        layer, blocks = axis
        size, wide = model.sizes[layer], to.sizes[layer]
        rest = length - blocks * (wide if padded else size)  # static columns, after the units
        units = torch.arange(blocks)[:, None] * wide + torch.arange(size)
        index = torch.cat([units.flatten(), blocks * wide + torch.arange(rest)])
        found.append((index, blocks * wide + rest))
    return found


def _axes(name: str, model: Model, tokens: int, dims: int) -> Sequence[Axis]:
    """What lies along each axis of one of the weights."""
    if model.kind in ("linear", "transformer") or model.is_custom:
        return (None,) * dims
    ways = 2 if model.bidirectional else 1
    end = len(model.sizes) - 1
    match name.split(".")[1:]:
        case ["layers", number, kind]:
            layer, gates = int(number), 4 if model.kind == "lstm" else 3
            below = (layer - 1, ways) if layer else None
            across = (layer, 1) if kind.startswith("weight_hh") else below
            return ((layer, gates), across)[:dims]
        case ["body", number, _]:
            layer = int(number) // 3
            return ((layer, 1), (layer - 1, 1) if layer else None)[:dims]
        case ["norms", *_]:  # such models differ in no width: zeros would count as units
            return (None,) * dims
        case ["pool", *_]:
            return (None, (end, ways))[:dims]
        case ["head", *_]:
            flat = model.kind != "mlp" and model.pool == "flatten"
            return (None, (end, ways * tokens if flat else ways))[:dims]
        case ["hidden", *_]:  # a decoder's, on top of an encoder
            return (None, (end, ways))[:dims]
        case [] | ["out", *_]:
            return (None,) * dims
        case _:
            raise AssertionError(f"no widths are known for {name}")
