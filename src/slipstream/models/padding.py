"""Pad models of several widths to the widest, by units of zero weights, which stay zero.

In an LSTM, GRU, TCN and MLP such a unit outputs zero and gets no gradient, so a padded model
computes and learns what the model itself does.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.config import Model
from slipstream.models.kinds import Axis, load_kind


def find_widest(models: Sequence[Model]) -> Model:
    """Return the model whose every layer is as wide as the widest of these."""
    sizes = tuple(map(max, zip(*(model.sizes for model in models), strict=True)))
    hidden = sizes[0] if len(set(sizes)) == 1 else sizes
    return models[0].model_copy(update={"hidden": hidden})


def pad_weights(
    weights: Mapping[str, Tensor], model: Model, to: Model, tokens: int
) -> dict[str, Tensor]:
    """Return a model's weights in the shapes of a wider one; `tokens` is its sequence length."""
    if model.sizes == to.sizes:
        return dict(weights)
    padded = {}
    for name, weight in weights.items():
        grid, shape = _map_axes(name, weight.shape, model, to, tokens)
        padded[name] = weight.new_zeros(shape)
        padded[name][grid] = weight
    return padded


def unpad_weights(
    weights: Mapping[str, Tensor], model: Model, to: Model, tokens: int
) -> dict[str, Tensor]:
    """Undo `pad_weights`: return the part of a padded model's weights that is the model's own."""
    if model.sizes == to.sizes:
        return {name: weight.clone() for name, weight in weights.items()}
    unpadded = {}
    for name, weight in weights.items():
        grid, _ = _map_axes(name, weight.shape, model, to, tokens, padded=True)
        unpadded[name] = weight[grid].clone()
    return unpadded


def _map_axes(
    name: str, shape: Sequence[int], model: Model, to: Model, tokens: int, *, padded: bool = False
) -> tuple[tuple[Tensor, ...], list[int]]:
    """Return the indices of the model's own weights in the wider one, and the length of each axis
    there."""
    indices, lengths = [], []
    for axis, length in zip(_find_axes(name, model, tokens, len(shape)), shape, strict=True):
        if axis is None:
            indices.append(torch.arange(length))
            lengths.append(length)
            continue
        layer, blocks = axis
        size, wide = model.sizes[layer], to.sizes[layer]
        static = length - blocks * (wide if padded else size)  # static columns, after the units
        units = torch.arange(blocks)[:, None] * wide + torch.arange(size)
        indices.append(torch.cat([units.flatten(), blocks * wide + torch.arange(static)]))
        lengths.append(blocks * wide + static)
    return torch.meshgrid(*indices, indexing="ij"), lengths


def _find_axes(name: str, model: Model, tokens: int, dims: int) -> Sequence[Axis]:
    """Return the layer, if any, whose units lie along each axis of a weight."""
    if not (model.spec.can_pad and model.spec.has_hidden):
        return (None,) * dims
    end, ways = len(model.sizes) - 1, 2 if model.bidirectional else 1
    flat = model.spec.is_sequential and model.pool == "flatten"
    axes: tuple[Axis, ...]
    match name.split(".")[1:]:
        case ["head", "ahead", "row" | "out", *_]:
            axes = (None, None)
        case ["head", *_]:
            axes = (None, (end, ways * tokens if flat else ways))
        case ["pool", *_] | ["hidden", *_]:  # the second is a decoder's, on top of an encoder
            axes = (None, (end, ways))
        case [] | ["out", *_]:
            axes = (None, None)
        case of_network:
            axes = load_kind(model).get_unit_axes(of_network, model)
    return axes[:dims]
