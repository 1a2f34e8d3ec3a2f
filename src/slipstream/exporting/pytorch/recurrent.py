"""Operations that stand in for `nn.LSTM` and `nn.GRU` while a model is traced.

PyTorch computes the shapes of their results row by row: tracing 400 rows takes half a minute for
each layer. Ours know the shapes; the finished program has PyTorch's own operations again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

NAMESPACE = "slipstream_export"
SCHEMA = (
    "{name}(Tensor input, {states} hx, Tensor[] params, bool has_biases, int num_layers, "
    "float dropout, bool train, bool bidirectional, bool batch_first) -> ({results})"
)
KINDS = {"lstm": ("Tensor[]", "Tensor, Tensor, Tensor"), "gru": ("Tensor", "Tensor, Tensor")}
"""By the name of PyTorch's operation: the types of its states and of its results"""


@contextmanager
def stand_in_for_recurrent_layers() -> Iterator[None]:
    """Trace our operations in the place of PyTorch's."""
    _define_operations()
    with warnings.catch_warnings(), _RecurrentStandIns():
        # of the weights that nn.LSTM keeps in a list as well
        warnings.filterwarnings("ignore", message=r"The tensor attributes? .* assigned during")
        yield


def restore_recurrent_layers(program: ExportedProgram) -> ExportedProgram:
    """Put PyTorch's operations back."""
    own = getattr(torch.ops, NAMESPACE)
    originals = {getattr(own, name).default: getattr(torch.ops.aten, name).input for name in KINDS}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in originals:
            node.target = originals[node.target]
    program.graph_module.recompile()
    return program


class _RecurrentStandIns(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in KINDS and func is getattr(torch._VF, name) and not _is_packed(args):
            return getattr(getattr(torch.ops, NAMESPACE), name)(*args)
        return func(*args, **(kwargs or {}))


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Whether these are the arguments for a packed sequence, whose second is its lengths."""
    return not isinstance(args[3], bool)


@cache
def _define_operations() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, (states, results) in KINDS.items():
        library.define(SCHEMA.format(name=name, states=states, results=results))
        torch.library.register_fake(f"{NAMESPACE}::{name}", _make_results, lib=library)
    return library


def _make_results(input: Tensor, hx: Tensor | Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    """Return tensors of the shapes of the outputs and of each state."""
    states = [hx] if isinstance(hx, Tensor) else hx
    directions = 2 if rest[-2] else 1
    outputs = input.new_empty(*input.shape[:-1], states[0].shape[-1] * directions)
    return outputs, *(torch.empty_like(state) for state in states)
