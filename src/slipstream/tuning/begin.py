"""From a config, or an earlier search, to the best settings and a model of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from slipstream import config as configs
from slipstream import hardware, runs
from slipstream.config import Config
from slipstream.engine import monitor
from slipstream.engine.packing import MOST_PLACES
from slipstream.errors import Interrupted, Resumable, UserError
from slipstream.models import consent, own
from slipstream.runs import Event, Run
from slipstream.tuning import crew as crews
from slipstream.tuning import retraining, shared, work
from slipstream.tuning import space as spaces
from slipstream.tuning.retraining import Again
from slipstream.tuning.search import STATES
from slipstream.tuning.shelf import Shelf
from slipstream.tuning.study import NOTES, Board, best_of, importances, num_trials, told

LEAST_PARALLEL = 8
"""Trials at a time, if not told otherwise; on a CPU also the most, unless it has more cores"""


@dataclass(frozen=True)
class Study:
    """What a search found. `summary` is what `slipstream tune --json` prints."""

    run: Path
    best: Config
    """The chosen settings"""
    summary: dict[str, Any]
    study: optuna.Study
    """Optuna's own"""


def tune(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    resume: str | Path | None = None,
    storage: str | None = None,
    workers: int | Literal["auto"] | None = None,
    on: Literal["ray"] | None = None,
    model: type[nn.Module] | None = None,
    allow_code: bool = False,
) -> Study:
    """Search the space of `config.tune` for the settings with the lowest validation loss.

    `watch` is shown every event. `resume` names a search to go on with: finished trials are kept,
    those under way continue from their pack's checkpoint. `storage` names a database that several
    of these share (`sqlite:///...`, `postgresql://...`); else the study is in the run's folder.
    `workers` is how many processes search, `"auto"` one for each GPU; without it one, or as many
    as the search that is resumed had. `on="ray"` starts them on a Ray cluster. `model` is a
    network of your own, and `allow_code` lets a resumed search import those that its config names,
    as in `slipstream.train`.
    """
    began = time.perf_counter()
    if model is not None:
        overrides = (*overrides, f"model.kind={own.named(model)}")
    if resume is not None:
        run = runs.find(resume, watch)
        consent.require(run.folder, config, overrides=overrides, allow_code=allow_code)
        settings = configs.load(config or run.folder / "config.toml", overrides)
        was = configs.load(run.folder / "config.toml")
        changed = [
            name for name in configs.differences(was, settings) if name not in shared.MAY_DIFFER
        ]
        if changed:
            raise UserError(
                f"{run.folder}: cannot go on with other settings than it began with "
                f"({', '.join(changed)}); start a new search"
            )
        if any(event.get("event") == "start" for event in runs.events(run)):  # no search says that
            raise UserError(
                f"{run.folder}: is a training run, not a search; go on with: slipstream train "
                f"--resume {run.folder}"
            )
    else:
        if config is None:
            raise UserError("there is neither a config nor a search to resume")
        settings = configs.load(config, overrides)
        consent.allow(settings)
    refuse(settings)
    space = spaces.of(settings)
    going_on = None if resume is None else run
    crew = crews.of(settings, data, resumed=going_on, storage=storage, workers=workers, on=on)
    shelf = Shelf(settings, data)
    first = shelf.get(settings)  # whatever is wrong with the data is said before a folder is made
    if resume is None:
        run = runs.create(settings.name, out=settings.out, watch=watch)
        runs.write_text(run.folder / "config.toml", configs.to_toml(settings))
    device = first.series.values.device
    parallel = parallel_of(settings, device.type, crew.count)
    with runs.locked(run):
        board = crew.board(run)
        if storage is not None:
            shared.join(board.study, settings, first.fingerprint)
        run.append(
            "search" if resume is None else "resume",
            run=str(run.folder),
            trials=num_trials(settings.tune, space),
            parallel=crew.count * parallel,
            space=list(space),
            windows=first.dataset.count,
            device=str(device),
            done=len(shared.counted(board.trials(*STATES))),
            **crew.told(),
        )
        go_on = f"go on with: slipstream tune --resume {run.folder}"
        go_on += "" if storage is None else " --storage URL"
        try:
            with monitor.Monitor(run, device, on=settings.engine.monitor):
                if not _searched(run, settings):
                    crew.search(
                        run,
                        board,
                        shelf,
                        parallel=parallel,
                        spent_s=_spent(run),
                        resumed=resume is not None,
                    )
                return _concluded(run, settings, board, shelf, data, watch, began)
        except Interrupted as stop:
            done = len(shared.counted(board.trials(*STATES)))
            raise Interrupted(
                f"stopped with {done} of {settings.tune.trials} trials done; {go_on}",
                signal_number=stop.signal_number,
            ) from None
        except Resumable as error:
            raise Resumable(f"{error}; {go_on}") from None
        except StorageInternalError as error:
            raise Resumable(f"{work.unanswered(crew.url(run), error)}; {go_on}") from None


def refuse(settings: Config) -> None:
    """A UserError names what does not go with a search."""
    for name, found, fix in (
        ("train.repeats", settings.train.repeats > 1, "set tune.retrain_seeds instead"),
        ("train.minutes", settings.train.minutes is not None, "set tune.minutes instead"),
        ("train.batch", settings.train.batch == "auto", "a search needs a number"),
        (
            "train.objective",
            settings.masked,
            "pre-train first, then set train.init_from",
        ),
        ("augment.cache", settings.augment.cache > 0, "take it out"),
        ("engine.sync", settings.engine.sync, "take it out"),
    ):
        if found:
            raise UserError(f"{name} does not go with a search; {fix}")


def parallel_of(settings: Config, device: str, workers: int = 1) -> int:
    """Trials that a worker has under way at a time: of all workers together half of all, so that
    the sampler knows how these went when it draws the others; of many trials, as many as a pack has
    places. A CPU trains more than it has cores hardly faster."""
    asked = settings.tune.parallel
    if asked != "auto":
        return -(-asked // workers)
    together = max(settings.tune.trials // 2, LEAST_PARALLEL)
    most = MOST_PLACES if device == "cuda" else max(LEAST_PARALLEL, hardware.available_cores())
    return min(-(-together // workers), most)


def _searched(run: Run, settings: Config) -> bool:
    """Whether there is nothing left to try; more can be asked for when it goes on."""
    asked = work.asked(settings)
    return any(
        event["event"] == "searched" and event["asked"] == asked for event in runs.events(run)
    )


def _spent(run: Run) -> float:
    """Seconds that earlier parts of a search took."""
    found, last = 0.0, 0.0
    for event in runs.events(run):
        if event["event"] in ("search", "resume"):
            found, last = found + last, 0.0
        last = max(last, event["at_s"])
    return found


def _concluded(
    run: Run,
    settings: Config,
    board: Board,
    shelf: Shelf,
    data: Any,
    watch: Callable[[Event], None] | None,
    began: float,
) -> Study:
    trials = shared.counted(board.trials())
    best = best_of(trials)
    if best is None:
        reasons = {trial.user_attrs.get(NOTES, {}).get("stopped") for trial in trials}
        why = "; ".join(sorted(filter(None, reasons))[:3])
        raise UserError(
            f"no trial ran to its end ({why or 'none began'}); mend tune.space or tune.minutes"
        )
    chosen = spaces.applied(settings, board.space, best.params)
    again: list[Again] = []
    tested: dict[str, dict[str, Any]] = {}
    if settings.tune.retrain:
        done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        ranked = sorted(done, key=lambda trial: (trial.value, trial.number))
        again = retraining.choose(
            run, settings, ranked[: settings.tune.retrain], board.space, shelf
        )
        chosen = again[0].config
        tested = retraining.test(run, settings, chosen, data, watch)
    runs.write_text(run.folder / "best.toml", configs.to_toml(chosen, only_set=True))
    summary = summarize(run, settings, trials, again, tested)
    summary["space"] = spaces.told(board.space)
    summary["importances"] = importances(board.study)
    summary["seconds"] = time.perf_counter() - began
    runs.write_json(run.folder / "trials.json", [told(trial, STATES) for trial in trials])
    runs.write_json(run.folder / "metrics.json", summary)
    run.append("end", seconds=summary["seconds"])
    return Study(run.folder, chosen, summary, board.study)


def summarize(
    run: Run,
    settings: Config,
    trials: list[FrozenTrial],
    again: list[Again],
    tested: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    best = best_of(trials)
    assert best is not None
    params = {trial.number: trial.params for trial in trials}  # numbers may have gaps
    searched = [event for event in runs.events(run) if event["event"] == "searched"][-1]
    counts = dict.fromkeys(STATES.values(), 0)
    for trial in trials:
        if trial.state in STATES:
            counts[STATES[trial.state]] += 1
    found: dict[str, Any] = {
        "run": str(run.folder),
        "name": settings.name,
        "metric": settings.tune.metric,
        "trials": counts,
        "best": {"trial": best.number, "value": best.value, "params": best.params},
        "best_config": str(run.folder / "best.toml"),
        "search_s": searched["seconds"],
        "trials_per_hour": 3600 * sum(counts.values()) / max(searched["seconds"], 1e-9),
        "optuna_s": searched["optuna_s"],
        "optuna_share": searched["optuna_s"] / max(searched["seconds"], 1e-9),
        "packs": searched["packs"],
        "retrained": [
            {
                "trial": None if one.trial == retraining.DEFAULT else one.trial,
                "what": "default" if one.trial == retraining.DEFAULT else f"trial {one.trial}",
                "params": params.get(one.trial),
                "losses": one.losses,
                "mean": one.mean,
                "sd": _sd(one.losses),
                "chosen": one is again[0],
            }
            for one in again
        ],
        "test": {
            name: {
                key: summary.get(key)
                for key in ("run", "metrics", "scaled", "spread", "baselines", "beaten_by")
            }
            for name, summary in tested.items()
        },
        "comparison": None,
    }
    if tested:
        found["comparison"] = retraining.compare(tested["best"], tested["default"])
    return found


def _sd(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.stdev(finite) if len(finite) > 1 else None
