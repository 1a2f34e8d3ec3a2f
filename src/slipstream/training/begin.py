"""From a config, or an earlier run, to a trained model and its figures."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.engine import checkpoint, plan, state
from slipstream.engine import encoder as encoders
from slipstream.engine.encoder import Encoder, Match
from slipstream.engine.plan import Plan
from slipstream.errors import Interrupted, Resumable, UserError
from slipstream.models import build
from slipstream.runs import Event, Run
from slipstream.training import alone, encoding, together
from slipstream.training.setup import Result, Start, timed

MASKED = "train.objective=masked"
MAY_CHANGE = {
    *("name", "out", "data.path", "train.epochs", "train.patience", "train.minutes"),
    *("engine.device", "engine.log_every", "engine.checkpoint_minutes", "engine.plan"),
    *("engine.async_checkpoints", "engine.monitor"),
}
"""Settings that a resumed run may have otherwise than it began with"""


def train(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    resume: str | Path | None = None,
    force: bool = False,
) -> Result:
    """Train the model that `config` describes on its data, or on the given table.

    `watch` is shown every event of the run as it is logged. `resume` names a run to go on with,
    from its newest checkpoint, to the same end as if it had never stopped; `config` may then be
    left out. Other settings or other data are refused there unless `force` is given.
    """
    began = time.perf_counter()
    if resume is not None:
        earlier = runs.find(resume, watch)
        with runs.locked(earlier), _crashes_kept(earlier):
            source = config or earlier.folder / "config.toml"
            return _resumed(earlier, configs.load(source, overrides), data, force, began)
    if config is None:
        raise UserError("there is neither a config nor a run to resume")
    settings = configs.load(config, overrides)
    seconds: dict[str, float] = {}
    with timed(seconds, "data"):
        init, dataset = _data(settings, data)
    rules = _rules(settings, dataset)
    if together.wanted(settings):
        together.refuse(settings, dataset, rules)
    run = runs.create(settings.name, out=settings.out, watch=watch)
    with runs.locked(run), _crashes_kept(run):
        start = Start(dataset.fingerprint(), rules, init=init)
        return _run(run, settings, dataset, start, seconds, began)


def pretrain(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    resume: str | Path | None = None,
    force: bool = False,
) -> Result:
    """Pre-train an encoder on windows without labels; all arguments are as for `train`.

    It learns to fill in masked rows. `train.init_from` starts a model from the run's folder.
    """
    if config is not None:
        config = configs.load(config, (*overrides, MASKED))
        overrides = ()
    elif resume is not None:
        earlier = runs.find(resume)
        if not configs.load(earlier.folder / "config.toml").masked:
            raise UserError(
                f"{earlier.folder}: is not a pre-training run; go on with: slipstream train "
                f"--resume {earlier.folder}"
            )
    return train(config, data, overrides=overrides, watch=watch, resume=resume, force=force)


def _run(
    run: Run,
    settings: Config,
    dataset: Dataset,
    start: Start,
    seconds: dict[str, float],
    began: float,
) -> Result:
    if settings.masked:
        return encoding.pretrain(run, settings, dataset, start, seconds, began)
    if together.wanted(settings):
        return together.train(run, settings, dataset, start, seconds, began)
    return alone.train(run, settings, dataset, start, seconds, began)


def _resumed(run: Run, settings: Config, data: Any, force: bool, began: float) -> Result:
    was = configs.load(run.folder / "config.toml")
    changed = _refuse_changes(run, was, settings, force)
    saved, wrong = checkpoint.newest(run)
    if together.wanted(settings):
        if (run.folder / "metrics.json").exists():
            raise UserError(
                f"{run.folder}: is finished; models that were trained together end together, so "
                "start a new run to train longer"
            )
        at = {"step": saved.step, "lanes": together.where_it_stands(saved.facts)}
    else:
        progress = state.progress_of(saved)
        if (run.folder / "metrics.json").exists() and progress.epochs >= settings.train.epochs:
            raise UserError(
                f"{run.folder}: is finished, after {progress.epochs} epochs; to train it further, "
                "raise train.epochs"
            )
        at = {"step": progress.step, "epoch": progress.epoch}
    seconds: dict[str, float] = {}
    with timed(seconds, "data"):
        init, dataset = _data(settings, data)
    fingerprint = dataset.fingerprint()
    if fingerprint != saved.facts["data"] and not force:
        raise UserError(
            f"{run.folder}: the data are not those that it began with; start a new run, or pass "
            "--force"
        )
    then, now = Plan.from_dict(saved.facts["plan"]), _rules(settings, dataset)
    runs.cut_log(run, saved.facts["log_bytes"])
    for problem in wrong:
        run.append("fallback", what="an older checkpoint is used", why=problem)
    run.append("resume", **at, differs=_what_differs(then, now, changed))
    keep = then.device == now.device and not changed
    plan = then if keep else now
    start = Start(fingerprint, plan, settled=keep, saved=saved, init=init)
    return _run(run, settings, dataset, start, seconds, began)


def _data(settings: Config, data: Any) -> tuple[Match | None, Dataset]:
    """The encoder to start from, if any, and the windows, scaled as it knows them."""
    encoder = encoders.find(settings)
    if encoder is None:
        return None, datasets.load(settings, data)
    dataset = datasets.load(settings, data, known=encoder.scaler)
    with torch.random.fork_rng([]):
        model = build(settings.model, dataset.signature)
    init = encoders.match(encoder, settings, dataset.signature, model)
    notes = [
        f"starts from the encoder of {encoder.folder}: {len(init.weights)} weights matched, new "
        f"are {', '.join(init.told['new'])}; inputs are scaled as they were there"
    ]
    if data is None and _seen_before(encoder, settings, dataset):
        notes.append(
            "the encoder has seen rows of this run's test set, though not what is predicted there; "
            "pre-train it with the same data.split to keep them unseen"
        )
    return init, replace(dataset, notes=(*dataset.notes, *notes))


def _seen_before(encoder: Encoder, settings: Config, dataset: Dataset) -> bool:
    """Whether the encoder was pre-trained on rows that are tested here, as far as can be told."""
    theirs, mine = encoder.config.data, settings.data
    same = all(
        getattr(theirs, name) == getattr(mine, name) for name in ("paths", "ids", "where", "short")
    )
    alike = (theirs.split.by, theirs.split.folders) == (mine.split.by, mine.split.folders)
    return dataset.memory is not None and same and alike and datasets.shares_rows(dataset, theirs)


def _refuse_changes(run: Run, was: Config, settings: Config, force: bool) -> list[str]:
    """The settings that are changed and matter; a UserError where they may not be."""
    many = together.wanted(was) or together.wanted(settings)
    may_change = MAY_CHANGE - together.FIXED if many else MAY_CHANGE
    changed = [name for name in configs.differences(was, settings) if name not in may_change]
    if changed and (many or not force):
        way_out = "start a new run" if many else "start a new run, or pass --force"
        raise UserError(
            f"{run.folder}: cannot go on with other settings than it began with "
            f"({', '.join(changed)}); {way_out}"
        )
    return changed


def _rules(settings: Config, dataset: Dataset) -> Plan:
    streamed = dataset.stream is not None
    return plan.make(settings, data_bytes=dataset.data_bytes, streamed=streamed)


def _what_differs(then: Plan, now: Plan, changed: list[str]) -> str:
    """Why the resumed run will not be the unbroken one bit for bit; empty where it will."""
    told = [f"{name} was changed" for name in changed]
    if then.device.type != now.device.type:
        told.append(f"{now.device.type} instead of {then.device.type}")
    told += [
        f"{key} {now.hardware.get(key)} instead of {then.hardware.get(key)}"
        for key in ("gpu", "cpu", "torch")
        if then.hardware.get(key) != now.hardware.get(key)
    ]
    return "; ".join(told)


@contextmanager
def _crashes_kept(run: Run) -> Iterator[None]:
    """Leave the traceback of a fault of our own with the run, which can be resumed."""
    try:
        yield
    except (UserError, Interrupted, Resumable):
        raise
    except OSError as error:
        raise Resumable(
            f"the run had to stop: {error}; go on with: slipstream train --resume {run.folder}"
        ) from error
    except Exception:
        with suppress(OSError):
            runs.write_text(run.folder / "crash.txt", traceback.format_exc())
        raise
