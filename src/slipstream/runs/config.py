"""A run's config.toml: signed when it is written, and compared with what was trained when read."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from slipstream import config as configs
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.runs.folder import Run

SUM = "# SHA-256 of the lines above: "
"""Begins the last line; whoever edits a run's config by hand leaves it as it was"""
CHANGEABLE_ON_RESUME = {
    *("name", "out", "data.path", "data.labels", "train.epochs", "train.patience", "train.minutes"),
    *("engine.device", "engine.log_every", "engine.checkpoint_minutes", "engine.plan"),
    *("engine.async_checkpoints", "engine.monitor"),
}
"""Settings that a resumed run may have otherwise than it began with"""


def format_config(config: Config) -> str:
    """A config as TOML, with its sum in a last line."""
    text = configs.to_toml(config)
    return f"{text}{SUM}{_sum(text)}\n"


def load_config(
    run: Run, overrides: Iterable[str] = (), *, origin: Mapping[str, Any] | None = None
) -> Config:
    """The run's settings with some overridden, if they are those that `origin` was trained with.

    `origin` is what a checkpoint or a model says of itself. Where Slipstream itself has rewritten
    the config since, to resume the run, what a resumed run may change may differ. A UserError
    names what was changed by other hands. Runs of version 0.1 have neither a sum nor an origin.
    """
    path = run.folder / "config.toml"
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    body, given, told = text.rpartition(SUM)
    intact = given != "" and told == f"{_sum(body)}\n"
    trained_with = (origin or {}).get("config")
    if trained_with is not None:
        _refuse_changes(run, text, trained_with, CHANGEABLE_ON_RESUME if intact else ())
    elif given and not intact:
        raise UserError(f"{path}: was changed since the run began; {_way_out(run)}")
    return configs.load(path, overrides)


def _refuse_changes(run: Run, now: str, then: str, may_change: Iterable[str]) -> None:
    path = run.folder / "config.toml"
    try:
        mine, theirs = _flat(tomllib.loads(now)), _flat(tomllib.loads(then))
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: was damaged since the run was trained: it is not valid TOML ({error}); "
            "restore it from a copy"
        ) from None
    changed = [
        f"{name} is {mine.get(name, 'left out')}, was {theirs.get(name, 'left out')}"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name) and name not in may_change
    ]
    if changed:
        raise UserError(
            f"{path}: was changed since the run was trained ({'; '.join(changed)}); {_way_out(run)}"
        )


def _way_out(run: Run) -> str:
    return (
        "undo that, and pass other settings with --set, or train a new run: slipstream train "
        f"{run.folder / 'config.toml'}"
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names; values as their text, so that nan equals itself and 1 is
    neither 1.0 nor true."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = repr(value)
    return found


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).hexdigest()
