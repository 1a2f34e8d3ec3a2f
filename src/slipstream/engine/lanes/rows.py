"""A lane's rows of numbers in a pack, and the model's weights by name.

A pack lays out the weights of every lane in one vector of P numbers, padded to the widest model.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.config import Model, Signature
from slipstream.engine.lanes import gradients
from slipstream.engine.lanes.gradients import Layout
from slipstream.engine.lanes.lane import Lane
from slipstream.models import build, padding

VECTORS = ("best", "live.weights", "live.first", "live.second")
"""Rows in the layout of the weights"""
EPOCH_ROWS = ("good.", "losses")
"""What only the rest of an epoch needs"""


def build_layout(model: Model, signature: Signature) -> Layout:
    """Lay out the weights of such a model."""
    with torch.random.fork_rng([]):
        return gradients.build_layout(build(model, signature))


def read_weights(
    row: Tensor, layout: Layout, lane: Lane, model: Model, signature: Signature
) -> dict[str, Tensor]:
    """Return a lane's own weights by name, from its row in a pack of `model`'s width."""
    views = gradients.view_weights(row[None], layout)
    padded = {name: view[0].detach() for name, view in views.items()}
    tokens = signature.context // model.patch
    return padding.unpad_weights(padded, lane.config.model, model, tokens)


def narrow_rows(
    rows: Mapping[str, Tensor], layout: Layout, lane: Lane, model: Model, signature: Signature
) -> dict[str, Tensor]:
    """Return the rows of a lane that has ended as they are in a pack of its own width."""
    own_rows = {name: row for name, row in rows.items() if not name.startswith(EPOCH_ROWS)}
    if lane.config.model.sizes == model.sizes:
        return own_rows
    own = build_layout(lane.config.model, signature)
    for name in VECTORS:
        weights = read_weights(own_rows[name], layout, lane, model, signature)
        parts = [part for entry in own for part in _pad(weights[entry.name], entry.padding)]
        own_rows[name] = torch.cat(parts)
    return own_rows


def _pad(weight: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    return weight.flatten(), weight.new_zeros(padding)
