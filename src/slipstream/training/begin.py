"""From a config, or an earlier run, to a trained model and its figures."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import checkpoint, plan, recover, state
from slipstream.engine.checkpoint import Saved
from slipstream.engine.plan import Plan
from slipstream.engine.state import Progress
from slipstream.errors import Interrupted, Resumable, UserError
from slipstream.models import consent, own
from slipstream.runs import NO_ROOM, Event, Run
from slipstream.training import alone, encoding, reading, together
from slipstream.training.setup import Begun, Result, Start, timed


def train(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    resume: str | Path | None = None,
    force: bool = False,
    folder: Path | None = None,
    model: type[nn.Module] | None = None,
    allow_code: bool = False,
) -> Result:
    """Train the model that `config` describes on its data, or on the given table.

    `watch` is shown every event of the run as it is logged. `resume` names a run to go on with,
    from its newest checkpoint (or from its beginning, if it has none yet), to the same end as if it
    had never stopped; `config` may then be left out. Other settings or other data are refused there
    unless `force` is given. `folder` is where the run is made, if not in a new one under `out`.
    `model` is a network of your own, as `model.kind` may name it: see `slipstream.models.own`. A
    resumed run whose config names such a network needs its own `config` here, `model`, or
    `allow_code`: it may come from anybody.
    """
    began = time.perf_counter()
    if model is not None:
        overrides = (*overrides, f"model.kind={own.named(model)}")
    if resume is not None:
        earlier = runs.find(resume, watch)
        consent.require(earlier.folder, config, overrides=overrides, allow_code=allow_code)
        if any(event["event"] == "search" for event in runs.events(earlier)):
            raise UserError(
                f"{earlier.folder}: is a search; go on with: slipstream tune --resume "
                f"{earlier.folder}"
            )
        with runs.locked(earlier), _crashes_kept(earlier):
            return _resumed(earlier, config, overrides, data, force, began)
    if config is None:
        raise UserError("there is neither a config nor a run to resume")
    settings = configs.load(config, overrides)
    consent.allow(settings)
    seconds: dict[str, float] = {}
    with timed(seconds, "data"):
        init, dataset = reading.load(settings, data)
    rules = _rules(settings, dataset)
    if together.wanted(settings):
        together.refuse(settings, dataset, rules)
    start = Start(dataset.fingerprint(), rules, init=init)
    files = {"config.toml": runs.config_text(settings)}
    made = runs.creating(settings.name, out=settings.out, files=files, folder=folder, watch=watch)
    with made as run, _crashes_kept(run):
        return _run(Begun(run, settings, dataset, start, seconds, began))


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
        config = configs.load(config, (*overrides, configs.MASKED))
        overrides = ()
    elif resume is not None:
        earlier = runs.find(resume)
        if not runs.load_config(earlier).masked:
            raise UserError(
                f"{earlier.folder}: is not a pre-training run; go on with: slipstream train "
                f"--resume {earlier.folder}"
            )
    return train(config, data, overrides=overrides, watch=watch, resume=resume, force=force)


def trained(
    folder: Path, config: Config, data: Any, watch: Callable[[Event], None] | None
) -> dict[str, Any]:
    """The summary of the run in `folder`: one that is done stands, one that was broken off goes on.
    Where there is none, or one of other settings, it is trained now."""
    if (folder / "config.toml").exists() and _is_run_of(folder, config):
        if (folder / "metrics.json").exists():
            return runs.read_metrics(folder)
        return train(None, data, resume=folder, watch=watch).summary
    runs.remove(folder)
    return train(config, data, folder=folder, watch=watch).summary


def _is_run_of(folder: Path, config: Config) -> bool:
    """Whether a run has these settings; where it is and how it is run does not matter."""
    was = runs.load_config(Run(folder))
    spared = {"name", "out", "data.path", "data.labels"}
    if config.train.batch == "auto":
        spared.add("train.batch")
    changed = set(configs.differences(was, config)) - spared
    return not any(not name.startswith("engine.") for name in changed)


@recover.explain_full_memory()
def _run(begun: Begun) -> Result:
    if begun.settings.masked:
        return encoding.pretrain(begun)
    if together.wanted(begun.settings):
        return together.train(begun)
    return alone.train(begun)


def _resumed(
    run: Run,
    config: Config | str | Path | Mapping[str, Any] | None,
    overrides: tuple[str, ...],
    data: Any,
    force: bool,
    began: float,
) -> Result:
    saved, wrong = _newest(run)
    was = runs.load_config(run, origin=saved.facts if saved else None)
    settings = configs.load(was if config is None else config, overrides)
    if settings.train.batch == "auto" and was.train.batch != "auto":  # measured when it began
        settings = configs.changed(settings, {"train.batch": was.train.batch})
    changed = _refuse_changes(run, was, settings, force)
    at = _where_it_stands(run, settings, saved)
    seconds: dict[str, float] = {}
    with timed(seconds, "data"):
        init, dataset = reading.load(settings, data)
    fingerprint, now = dataset.fingerprint(), _rules(settings, dataset)
    if saved is None:
        if together.wanted(settings):
            together.refuse(settings, dataset, now)
        runs.cut_log(run, 0)
        run.append("resume", **at, differs="")
        start = Start(fingerprint, now, init=init)
        return _run(Begun(run, settings, dataset, start, seconds, began))
    if fingerprint != saved.facts["data"] and not force:
        why = "the data are not those that it began with"
        if "config" not in saved.facts:  # version 0.1 bound its checkpoints to nothing but the data
            why += ", or an earlier version began it, which rounded them otherwise"
        raise UserError(f"{run.folder}: {why}; start a new run, or pass --force")
    then = Plan.from_dict(saved.facts["plan"])
    runs.cut_log(run, saved.facts["log_bytes"])
    for problem in wrong:
        run.append("fallback", what="an older checkpoint is used", why=problem)
    run.append("resume", **at, differs=_what_differs(then, now, changed))
    keep = then.device == now.device and not changed
    plan = then if keep else now
    start = Start(fingerprint, plan, settled=keep, saved=saved, init=init)
    return _run(Begun(run, settings, dataset, start, seconds, began))


def _newest(run: Run) -> tuple[Saved | None, list[str]]:
    """The checkpoint to go on from; None where the run was stopped before it had written one."""
    had_one = any(event["event"] == "checkpoint" for event in runs.events(run))
    if checkpoint.numbered(run) or had_one or (run.folder / "metrics.json").exists():
        return checkpoint.newest(run)
    return None, []


def _where_it_stands(run: Run, settings: Config, saved: Saved | None) -> dict[str, Any]:
    """What a resumed run tells of its start; a UserError where nothing is left to do."""
    finished = (run.folder / "metrics.json").exists()
    if together.wanted(settings):
        if finished and saved and together.is_finished(saved.facts):
            raise UserError(
                f"{run.folder}: is finished; models that were trained together end together, so "
                "start a new run to train longer"
            )
        lanes = together.where_it_stands(saved.facts) if saved else "no lane done"
        return {"step": saved.step if saved else 0, "lanes": lanes}
    progress = state.progress_of(saved) if saved else Progress()
    if finished and progress.epochs >= settings.train.epochs:
        raise UserError(
            f"{run.folder}: is finished, after {progress.epochs} epochs; to train it further, "
            "raise train.epochs"
        )
    return {"step": progress.step, "epoch": progress.epoch}


def _refuse_changes(run: Run, was: Config, settings: Config, force: bool) -> list[str]:
    """The settings that are changed and matter; a UserError where they may not be."""
    many = together.wanted(was) or together.wanted(settings)
    may_change = runs.MAY_CHANGE - together.FIXED if many else runs.MAY_CHANGE
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
        room = "make room and " if error.errno in NO_ROOM else ""
        raise Resumable(
            f"the run had to stop: {error}; {room}go on with: slipstream train --resume "
            f"{run.folder}"
        ) from error
    except Exception:
        with suppress(OSError):
            runs.write_text(run.folder / "crash.txt", traceback.format_exc())
        raise
