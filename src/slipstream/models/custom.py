"""A network of the user's own, by the name of its class: `model.kind = "nets:Mixer"`.

The class is made with the keywords `context`, `inputs`, `static` and `outputs` (rows of a window,
its columns, constant columns, and numbers to give for one window) and with those of
`[model.options]`. Its `forward(inputs, static)` takes [T, B, inputs] and [B, static] or None, and
gives [B, outputs]. Where `data.future` names columns, the class is made with `horizon` and `future`
too (rows to predict, columns known of them), and its forward takes [B, horizon, future] as a third
argument.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream import config as configs
from slipstream.base.errors import Message, UserError, Wording
from slipstream.config import Config, Model
from slipstream.models.layers import split_future
from slipstream.models.noise import Noise

KIND = "model.kind"
_allowed: set[str] = set()
"""Classes that the user has named or allowed in this process"""


def allow_classes(config: Config) -> None:
    """Allow the classes that the user's own config names."""
    _allowed.update(_list_classes(config))


def require_permission(
    run: Path,
    config: Config | str | Path | Mapping[str, Any] | None = None,
    *,
    overrides: Iterable[str] = (),
    allow_code: bool = False,
) -> None:
    """Refuse a run with a class that the user has not allowed, nor named in `config` or
    `overrides`."""
    overrides = tuple(overrides)
    path = run / "config.toml"
    try:
        settings = configs.load(path if config is None else config, overrides)
    except UserError:
        return  # whoever reads it next says what is wrong; nothing is imported before
    if allow_code or config is not None:
        allow_classes(settings)
    elif any(text.partition("=")[0].strip() == KIND for text in overrides):
        _allowed.add(settings.model.kind)
    for kind in sorted(_list_classes(settings) - _allowed):
        raise UserError(f"{path}: {_format_refusal(kind)}")


def check_permission(kind: str) -> None:
    """Refuse a class that is not allowed."""
    if kind not in _allowed:
        raise UserError(_format_refusal(kind))


def _list_classes(config: Config) -> set[str]:
    """Return the custom classes that a config names, including those of a search space."""
    entry = config.tune.space.get(KIND, ())
    choices = entry if isinstance(entry, (list, tuple)) else ()
    return {kind for kind in (config.model.kind, *map(str, choices)) if ":" in kind}


def _format_refusal(kind: str) -> Message:
    module = kind.partition(":")[0]
    files = list_module_files(module)
    content = " and ".join(files) if files else f'the module "{module}", which is not found here'
    return (
        f'{KIND} = "{kind}" would run {content}; a run may come from anybody, so look at '
        "that first: if you trust it, pass "
        + Wording("--allow-code (in Python allow_code=True)", "allow_code=True")
        + ", or the config that you trained with"
    )


def list_module_files(module: str) -> list[str]:
    """List the files that importing a module would run, its packages' first; run none of them."""
    files: list[str] = []
    names, path = module.split("."), None
    for count in range(1, len(names) + 1):
        spec = _find_spec(".".join(names[:count]), path)
        if spec is None:
            return []
        if spec.has_location and spec.origin:
            files.append(spec.origin)
        path = list(spec.submodule_search_locations or ())
    return files


def _find_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Find a module's spec without importing the packages around it, as `importlib.util.find_spec`
    would."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())]) if path is None else None


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
    check_permission(kind)
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
    """A user's own network with the interface of Slipstream's networks."""

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
    """Return the names of a module's buffers, such as a batch norm's running means."""
    weights = {name for name, _ in module.named_parameters()}
    return [name for name in module.state_dict() if name not in weights]
