"""A run's config.toml: written with a checksum, and compared with the trained config when read."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.base.errors import Command, Message, Option, Text, UserError, Wording
from slipstream.runs.folder import Run

if TYPE_CHECKING:
    from slipstream.config import Config

CHECKSUM = "# SHA-256 of the lines above: "
"""Start of the last line, which an edit by hand leaves unchanged"""
FILTERED, LIMITED = "filtered", "limited"
SMOOTHING = re.compile(r"\b(?:mean|median|ema)\s*\(")
"""Functions of formulas that smooth a column"""
CHANGEABLE_ON_RESUME = {
    *("name", "out", "data.path", "data.labels", "train.epochs", "train.patience", "train.minutes"),
    *("train.exploit_epochs", "train.exploit_lr", "train.exploit_lr_min"),
    *(
        "engine.data_parallel",
        "engine.device",
        "engine.log_every",
        "engine.checkpoint_minutes",
        "engine.plan",
    ),
    *("engine.async_checkpoints", "engine.monitor", "follow.to", "follow.out", "follow.project"),
}
"""Settings that may change when a run is resumed"""
SAME_ROWS = Wording(
    "pass the same rows again: --set data.path=FILE (in Python data=TABLE)", "pass data=TABLE"
)
"""The fix for a run on data from Python, where the same data have to be passed again"""


def format_config(config: Config, comment: str = "") -> str:
    """Format a config as TOML below a comment, with its checksum in the last line."""
    from slipstream import config as configs  # which `slipstream runs` does without

    text = comment + configs.to_toml(config)
    return f"{text}{CHECKSUM}{_compute_sum(text)}\n"


def is_intact(text: str) -> bool | None:
    """Return whether the text of a config.toml is unchanged since it was written; None where it has
    no checksum, as in version 0.1."""
    body, separator, checksum = text.rpartition(CHECKSUM)
    return checksum == f"{_compute_sum(body)}\n" if separator else None


def load_config(
    run: Run, overrides: Iterable[str] = (), *, origin: Mapping[str, Any] | None = None
) -> Config:
    """Load the run's config with overrides, if it is the one that `origin` was trained with.

    `origin` is the metadata of a checkpoint or a model. Where Slipstream has rewritten the config
    to resume the run, settings that may change on resume may differ. A UserError names settings
    that were edited otherwise. Runs of version 0.1 have neither a checksum nor an origin.
    """
    from slipstream import config as configs

    path = run.folder / "config.toml"
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    intact = is_intact(text)
    trained_with = (origin or {}).get("config")
    if trained_with is not None:
        _refuse_changes(run, text, trained_with, CHANGEABLE_ON_RESUME if intact else ())
    elif intact is False:
        raise UserError(f"{path}: was changed since the run began", fix=_suggest_fix(run))
    return configs.load(path, overrides)


def _refuse_changes(run: Run, now: str, then: str, may_change: Iterable[str]) -> None:
    path = run.folder / "config.toml"
    try:
        current, trained = _format_settings(now), _format_settings(then)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: was damaged since the run was trained: it is not valid TOML ({error}); "
            "restore it from a copy"
        ) from None
    changed = [
        f"{name} is {current.get(name, 'left out')}, was {trained.get(name, 'left out')}"
        for name in sorted(current.keys() | trained.keys())
        if current.get(name) != trained.get(name) and name not in may_change
    ]
    if changed:
        raise UserError(
            f"{path}: was changed since the run was trained ({'; '.join(changed)})",
            fix=_suggest_fix(run),
        )


def _suggest_fix(run: Run) -> Message:
    return (
        "undo that, and pass other settings with "
        + Option("set")
        + ", or train a new run: "
        + Command("train", run.folder / "config.toml")
    )


def require_data(run: Run, config: Config, data: Any, fix: Text) -> None:
    """Refuse a run that was trained on a table from Python, unless its data are passed again."""
    if data is None and not config.data.paths:
        raise UserError(
            f"{run.folder}: was trained on a table that was passed from Python, not on files that "
            "could be read again",
            fix=fix,
        )


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name: `model.hidden` and so on."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def read_settings(run: Run) -> dict[str, Any]:
    """Return the settings that a run's config.toml states, by dotted name; a UserError says what is
    wrong with the file. It is not compared with what the run was trained with."""
    path = run.folder / "config.toml"
    try:
        return flatten_settings(tomllib.loads(path.read_bytes().decode("utf-8")))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor TOML, or nested too deeply
        raise UserError(
            f"{path}: is damaged: it is not valid TOML ({error}); restore it from a copy"
        ) from None


class ChangedTarget(NamedTuple):
    """A target that a step of `data.prepare` makes easier to predict than the file's values."""

    number: int
    """The number of the step, from 1"""
    step: str
    target: str
    change: str
    """`FILTERED` or `LIMITED`"""

    def describe(self) -> str:
        """Describe what the change means for the scores."""
        name = f'data.prepare, step {self.number} ({self.step}): the target "{self.target}" is '
        if self.change == FILTERED:
            return (
                f"{name}filtered, which makes it easier to predict: the scores are about the "
                "filtered values, not about those of the file, and cannot be compared with scores "
                "on them; to filter an input alone, write it to another column (into)"
            )
        return (
            f"{name}limited to a range: the scores do not count how far the values of the file go "
            "beyond it, and cannot be compared with scores on them"
        )


def list_changed_targets(data: Mapping[str, Any]) -> list[ChangedTarget]:
    """List the targets that steps of `data.prepare` smooth or limit, by the settings of `[data]`.

    Without `data.targets`, every input is a target.
    """
    steps, targets = data.get("prepare"), data.get("targets")
    changed = []
    for number, step in enumerate(steps if isinstance(steps, (list, tuple)) else (), start=1):
        values = step if isinstance(step, Mapping) else step.model_dump()
        kind = str(values.get("step"))
        columns = _to_list(values.get("columns"))
        if kind == "filter":
            change, written = FILTERED, _to_list(values.get("into")) or columns
        elif kind in ("clip", "outliers"):
            change, written = LIMITED, columns
        elif kind == "formula" and SMOOTHING.search(str(values.get("value"))):
            change, written = FILTERED, _to_list(values.get("name")) if targets else []
        else:
            continue
        names = written if targets is None else [name for name in written if name in targets]
        changed += [ChangedTarget(number, kind, str(name), change) for name in names]
    return changed


def _to_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or ())


def _format_settings(text: str) -> dict[str, str]:
    """Return a config's settings as text, by their current names, for comparison: nan equals
    itself, and 1 differs from 1.0."""
    from slipstream.config.train import upgrade_engine

    settings = tomllib.loads(text)
    if isinstance(settings.get("engine"), dict):
        settings["engine"], _ = upgrade_engine(settings["engine"])
    return {name: repr(value) for name, value in flatten_settings(settings).items()}


def _compute_sum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).hexdigest()
