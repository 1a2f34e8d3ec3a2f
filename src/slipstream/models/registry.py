"""From the kind of a model to the class of its network.

Every network is made with `(model, context=, inputs=, static=, outputs=)` and maps inputs
[T, B, F], static [B, K] or None, and noise or None to [B, outputs]. One that reads sequences is an
encoder where `outputs` is None: it has a `width` and returns its tokens, and `input_weights`
matches the names of the weights that meet the inputs. One whose spec says `can_pad` has
`unit_axes`, which `models.padding` reads.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from slipstream.config import Model


def load_network(model: Model) -> Any:
    """Import the class that the model's spec names."""
    module, _, name = model.spec.network.partition(":")
    return getattr(import_module(module), name)
