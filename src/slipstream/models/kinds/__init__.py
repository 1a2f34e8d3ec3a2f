"""One class for each kind of network, with its mathematics outside PyTorch.

A `Kind` knows the shapes of the weights, computes predictions in numpy (a window at once, or row
after row), adds its layers to an ONNX graph and to C source, and says where units of zero weights
pad it. `config.model.SPECS` names the class, and the PyTorch module that it computes the same as.
Nothing here imports torch: servers and devices without it load these modules.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from slipstream.config import Model, Signature
from slipstream.models.numpy_layers import Array, Shape, Weights, apply_head

if TYPE_CHECKING:
    from slipstream.models.c_code import CLayers, ConstArrays, NetworkShape
    from slipstream.models.onnx_graph import OnnxNetwork

Axis = tuple[int, int] | None
"""The layer whose units lie along an axis of a weight, and how many times they are repeated; None
for other axes"""
RowState = dict[str, Array]
"""The state of a network after the rows so far, by name"""


class RowEncoder(Protocol):
    """A network below its head that reads row after row."""

    def __init__(self, weights: Weights, model: Model) -> None: ...

    def start(self, sequences: int) -> RowState:
        """Return the state before the first row."""

    def step(self, x: Array, state: RowState) -> Array:
        """Return the features [B, D] of a row [B, F], and write the new state to `state`."""


class GraphState(NamedTuple):
    """A tensor that an ONNX graph of one row takes and returns."""

    name: str
    shape: Shape
    """The shape for one sequence"""


class Kind(ABC):
    """A kind of network outside PyTorch.

    The abstract methods are what every kind has. Those that raise are called only for kinds that
    say that they have them: by `ModelSpec.can_pad` or a `row_encoder`.
    """

    input_weights: ClassVar[re.Pattern[str] | None] = None
    """Matches the names of the weights that meet the inputs: a fine-tuned encoder permutes their
    columns; None where there is no encoder to pre-train"""
    added_weights: ClassVar[frozenset[str]] = frozenset()
    """Names of weights of several axes that are added, not multiplied"""
    row_encoder: ClassVar[type[RowEncoder] | None] = None
    """The class that computes row after row; None where windows are read as a whole"""
    c_template: ClassVar[str]
    """The C code of its layers: `NAME.c.j2` and `NAME_types.c.j2` in exporting/c/templates"""

    @abstractmethod
    def list_shapes(self, model: Model, signature: Signature) -> dict[str, Shape]:
        """Return the shapes of the weights below pool and head, by name."""

    @abstractmethod
    def get_width(self, model: Model, signature: Signature) -> int:
        """Return the width of a token, or of the features where windows are not read as tokens."""

    def get_unit_axes(self, name: Sequence[str], model: Model) -> tuple[Axis, ...]:
        """Return the axes along which a weight has units, for padding; kinds with
        `ModelSpec.can_pad` have it. The name is split at its dots and comes without "core"."""
        raise NotImplementedError

    def count_constant_products(self, model: Model, signature: Signature, tokens: int) -> int:
        """Return the multiply-adds of a sequence of so many tokens that no weight takes part in:
        between tokens, or with constants."""
        return 0

    @abstractmethod
    def encode(self, weights: Weights, model: Model, inputs: Array) -> Array:
        """Return the tokens [T / patch, B, D] of inputs [T, B, F] in numpy; features [B, D] where
        windows are not read as tokens."""

    def apply_head(
        self,
        weights: Weights,
        model: Model,
        signature: Signature,
        features: Array,
        static: Array | None,
    ) -> Array:
        """Return the outputs of each sequence, flat, in numpy: from the pooled tokens or features
        [B, D] and static [B, K]."""
        return apply_head(weights, signature, features, static)

    @abstractmethod
    def add_to_graph(self, network: OnnxNetwork, rows: str) -> str:
        """Add the layers to an ONNX graph: from rows [T, B, F] to what `encode` returns."""

    def add_head_to_graph(self, network: OnnxNetwork, features: str, static: str | None) -> str:
        """Add the head to an ONNX graph, as `apply_head`."""
        return network.apply_head(features, static)

    def list_graph_states(self, model: Model) -> Iterator[GraphState]:
        """Yield the states of a graph of one row; kinds with a `row_encoder` have it."""
        raise NotImplementedError

    def add_step_to_graph(self, network: OnnxNetwork, row: str, prefix: str) -> str:
        """Add the layers for one row [1, B, F], and return its features [B, D].

        Reads `state_{prefix}{name}` and writes `new_state_{prefix}{name}` of every state.
        """
        raise NotImplementedError

    @abstractmethod
    def describe_c(self, shape: NetworkShape) -> CLayers:
        """Return the sizes and the memory that the template's code names."""

    @abstractmethod
    def add_c_weights(
        self, arrays: ConstArrays, shape: NetworkShape, read: Callable[[str], Any], prefix: str
    ) -> list[str]:
        """Add the weights to the constant arrays of the source, and return the initializers of the
        members of `network` before its pool and head. `read` takes names without "core."."""


def load_kind(model: Model) -> Kind:
    """Import the class that the model's spec names; a user's own class has none."""
    path = model.spec.kind
    assert path is not None, f"{model.kind} is the user's own class"
    return _load(path)


@cache
def _load(path: str) -> Kind:
    module, _, name = path.partition(":")
    kind: Kind = getattr(import_module(module), name)()
    return kind
