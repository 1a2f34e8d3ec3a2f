"""A network of the user's own, by the name of its class: `model.kind = "nets:Mixer"`.

The class is made with the keywords `context`, `inputs`, `static` and `outputs` (rows of a window,
its columns, constant columns, and numbers to give for one window) and with those of
`[model.options]`. Its `forward(inputs, static)` takes [T, B, inputs] and [B, static] or None, and
gives [B, outputs]. Where `data.future` names columns, the class is made with `horizon` and `future`
too (rows to predict, columns known of them), and its forward takes [B, horizon, future] as a third
argument.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import Model
from slipstream.errors import UserError
from slipstream.models import permission
from slipstream.models.layers import split_future
from slipstream.models.noise.rng import Noise

_checked: set[tuple[Any, ...]] = set()
"""Classes and shapes whose outputs were checked"""


def format_class_path(kind: type[nn.Module]) -> str:
    """Return the `model.kind` of a class."""
    if "." in kind.__qualname__:
        raise UserError(
            f"{kind.__qualname__} is defined inside something else, where no other process finds "
            "it; define it at the top of a module"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def import_class(kind: str) -> type[nn.Module]:
    """Import the class, if that is allowed; the working folder is searched too."""
    permission.check_permission(kind)
    module, _, name = kind.partition(":")
    here = str(Path.cwd())
    known = here in sys.path or "" in sys.path
    if not known:
        sys.path.append(here)
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f'model.kind = "{kind}": {error}; the module must be installed, or in {here}'
        ) from None
    finally:
        if not known:
            sys.path.remove(here)
    if not hasattr(imported, name):
        raise UserError(f'model.kind = "{kind}": {module} has no {name}')
    network = getattr(imported, name)
    if not (isinstance(network, type) and issubclass(network, nn.Module)):
        raise UserError(f'model.kind = "{kind}": {name} is not a torch.nn.Module')
    return network


class CustomNetwork(nn.Module):
    """The user's network where ours would be."""

    recompute = False

    def __init__(self, model: Model, *, future: tuple[int, int], **shape: int) -> None:
        super().__init__()
        kind = import_class(model.kind)
        self.future = future
        if future[0]:
            shape["static"] -= future[0] * future[1]
            shape |= {"horizon": future[0], "future": future[1]}
        try:
            self.inner = kind(**shape, **model.options)
        except TypeError as error:
            keywords = ", ".join([*shape, *model.options])
            raise UserError(
                f'model.kind = "{model.kind}": cannot be made with {keywords}: {error}'
            ) from None
        key = (kind, *shape.values(), *sorted((k, str(v)) for k, v in model.options.items()))
        if key not in _checked:
            self._check_outputs(model.kind, **shape)
            _checked.add(key)

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        if static is None or not self.future[0]:
            out: Tensor = self.inner(inputs, static)
        else:
            fixed, future = split_future(static, self.future)
            out = self.inner(inputs, fixed if fixed.shape[-1] else None, future)
        return out

    @torch.no_grad()
    def _check_outputs(
        self, kind: str, context: int, inputs: int, static: int, outputs: int, **_: int
    ) -> None:
        """Refuse a class whose outputs have another shape."""
        before = self.inner.training
        self.inner.eval()
        width = static + self.future[0] * self.future[1]
        with torch.random.fork_rng([]):
            out = self(torch.zeros(context, 2, inputs), torch.zeros(2, width) if width else None)
        self.inner.train(before)
        if not isinstance(out, Tensor) or tuple(out.shape) != (2, outputs):
            shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise UserError(
                f'model.kind = "{kind}": of inputs [{context}, 2, {inputs}] (rows, windows, '
                f"columns) it gives {shape}; it has to give [2, {outputs}]"
            )


def list_buffers(module: nn.Module) -> list[str]:
    """Name what a module keeps beside its weights, such as a batch norm's running means."""
    weights = {name for name, _ in module.named_parameters()}
    return [name for name in module.state_dict() if name not in weights]
