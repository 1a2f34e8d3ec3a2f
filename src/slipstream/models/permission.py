"""Permission to import a class of the user's own.

`model.kind = "nets:Mixer"` imports a module, and importing runs it. A config that the user passes
to a command grants permission. A run's folder may come from anybody, and so may the config in it: a
class that only this one names is imported only if the user allows it.
"""

import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream.config import Config
from slipstream.errors import UserError

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
    """The custom classes that a config names, including those of a search space."""
    entry = config.tune.space.get(KIND, ())
    choices = entry if isinstance(entry, (list, tuple)) else ()
    return {kind for kind in (config.model.kind, *map(str, choices)) if ":" in kind}


def _format_refusal(kind: str) -> str:
    module = kind.partition(":")[0]
    files = list_module_files(module)
    what = " and ".join(files) if files else f'the module "{module}", which is not found here'
    return (
        f'{KIND} = "{kind}" would run {what}; a run may come from anybody, so look at that first: '
        "if you trust it, pass --allow-code (in Python allow_code=True), or the config that you "
        "trained with"
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
    """As `importlib.util.find_spec`, which imports the packages around a module."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())]) if path is None else None
