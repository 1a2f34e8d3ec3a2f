"""Arguments of the public functions: what may be passed, and what is said about anything else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.base.errors import UserError

Overrides = str | Iterable[str] | Mapping[str, Any]


class Job(NamedTuple):
    """What is trained: a config, a table in the place of its files, and settings on top."""

    config: Any
    data: Any
    overrides: tuple[str, ...]


def prepare_job(
    verb: str,
    config: Any,
    data: Any,
    *,
    columns: Sequence[str] | None = None,
    overrides: Overrides = (),
    init_from: str | os.PathLike[str] | None = None,
) -> Job:
    """Check the arguments of `slipstream.<verb>` and bring them into one form."""
    config = check_config(verb, config, data)
    more = parse_overrides(overrides)
    if init_from is not None:
        more = (*more, format_override("train.init_from", init_from))
    if isinstance(data, (str, os.PathLike)):
        return Job(config, None, (*more, format_override("data.path", data)))
    return Job(config, name_columns(data, columns), more)


def check_config(verb: str, config: Any, data: Any) -> Any:
    """Return a config, a path or a mapping; a UserError says what is wrong with anything else."""
    from slipstream.config import Config

    if _is_table(config) and (data is None or not _is_table(data)):
        raise UserError(
            f"the first argument of {verb} is the config, the second the data: slipstream.{verb}("
            f"config, data); the first one here is {_describe(config)}"
        )
    if config is None or isinstance(config, (Config, Mapping)):
        return config
    if isinstance(config, (str, os.PathLike)):
        return Path(config)
    raise UserError(
        f"config is {_describe(config)}; pass a TOML file, a mapping of sections such as "
        '{"data": {"path": "job.csv"}}, or a slipstream.Config'
    )


def is_config(value: Any) -> bool:
    """Whether a value is a config, or the path of one, and no table or data file."""
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value).endswith(".toml")
    return value is not None and not _is_table(value)


def _is_table(value: Any) -> bool:
    """Whether a value holds data; a mapping does where it has columns and no section."""
    from slipstream.config import Config

    if isinstance(value, Mapping):
        return bool(value) and not set(value) & set(Config.model_fields)
    return any(
        hasattr(value, name) for name in ("__arrow_c_stream__", "__dataframe__", "__array__")
    ) or hasattr(value, "collect_schema")


def parse_overrides(overrides: Overrides) -> tuple[str, ...]:
    """Return settings as texts; they may be one text, several, or a mapping."""
    if isinstance(overrides, str):
        return (overrides,)
    if isinstance(overrides, Mapping):
        return tuple(format_override(name, value) for name, value in overrides.items())
    if isinstance(overrides, Iterable):
        texts = tuple(overrides)
        if all(isinstance(text, str) for text in texts):
            return texts
    raise UserError(
        f'overrides is {_describe(overrides)}; pass a text such as "train.lr=1e-4", a list of '
        'them, or a mapping such as {"train.lr": 1e-4}'
    )


def format_override(name: str, value: Any) -> str:
    """Format a setting as text."""
    import tomli_w

    from slipstream.config.base import to_plain

    value = to_plain(value)
    try:
        return f"{name}={tomli_w.dumps({'value': value}).removeprefix('value = ').strip()}"
    except TypeError:
        raise UserError(
            f"overrides: {name} is {_describe(value)}; pass a number, a text, true or false, or a "
            "list of these"
        ) from None


def name_columns(data: Any, columns: Sequence[str] | None) -> Any:
    """Return a table; `columns` names the columns of an array."""
    if columns is None:
        return data
    import numpy as np

    if hasattr(data, "columns") or isinstance(data, Mapping) or not hasattr(data, "__array__"):
        raise UserError(f"columns names those of an array, and data is {_describe(data)}")
    array = np.asarray(data)
    array = array[:, None] if array.ndim == 1 else array
    names = [columns] if isinstance(columns, str) else [str(name) for name in columns]
    if array.ndim != 2 or array.shape[1] != len(names):
        shape = " x ".join(map(str, array.shape))
        raise UserError(
            f"columns has {len(names)} names, and data is an array of {shape}; pass rows x "
            "columns, and a name for every column"
        )
    if len(set(names)) < len(names):
        raise UserError("columns has a name twice; name each column once")
    return {name: array[:, place] for place, name in enumerate(names)}


def check_run(run: Any) -> Path:
    """Return a run folder from a path or a result."""
    if isinstance(run, (str, os.PathLike)):
        return Path(run)
    raise UserError(
        f"the first argument is {_describe(run)}; pass a run folder, or the result of train"
    )


def _describe(value: Any) -> str:
    """Name a value's type, with its article."""
    if value is None:
        return "None"
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    name = kind.__name__ if module == "builtins" else f"{module}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
