"""A run of one model."""

from __future__ import annotations

import math
import time
from typing import Any

from slipstream import runs
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import loop, measure, monitor, recover, score
from slipstream.engine.job import Task
from slipstream.engine.plan import Plan
from slipstream.engine.state import Fit
from slipstream.errors import Interrupted
from slipstream.runs import Run
from slipstream.training import scoring, setup
from slipstream.training.setup import Result, Start, timed


def train(
    run: Run,
    settings: Config,
    dataset: Dataset,
    start: Start,
    seconds: dict[str, float],
    began: float,
) -> Result:
    """Train, score and write everything."""
    with monitor.Monitor(run, start.plan.device, on=settings.engine.monitor) as watching:
        asked = settings
        task, chosen = setup.prepared(run, settings, dataset, start, seconds)
        settings, model = task.config, task.model
        with chosen.flags():
            parameters = sum(p.numel() for p in model.parameters())
            _announce(task, chosen, parameters)
            fit = loop.fit(task, chosen, start.saved, watching)
            setup.keep_folder(run, settings, asked)
            seconds["set-up"] += fit.setup_s
            seconds |= {"training": fit.train_s, "validation": fit.validate_s}
            chosen = setup.as_it_ran(run, fit.plan, fit.failures)
            if fit.weights:
                setup.keep_model(run, fit.weights, dataset)
            if fit.signal_number:
                raise _interrupted(run, fit)
            with timed(seconds, "scoring"):
                run.append("scoring", what="the model")
                model.load_state_dict(fit.weights)
                model.eval()
                sums = scoring.score_model(task, chosen)
            with timed(seconds, "baselines"):
                run.append("scoring", what="the baselines")
                found = scoring.score_baselines(task)
            if chosen.device.type == "cuda":
                recover.free_memory()
    logged = list(runs.events(run))
    judged_by = scoring.judged_by(settings)
    with timed(seconds, "scoring"):
        scores = {which: score.figures(one, dataset) for which, one in sums.items()}
        told = scoring.by_set(scores)
        beside = {name: scoring.told_of_baseline(*one, dataset) for name, one in found.items()}
        tested = {name: one["test"] for name, (_, one) in found.items() if one}
        more, detail = score.kind_of(dataset).certainty(sums["test"], tested, dataset)
    figures: dict[str, Any] = {
        "run": str(run.folder),
        "name": settings.name,
        **told,
        "windows": dataset.count,
        "baselines": beside,
        "judged_by": judged_by,
        "beaten_by": scoring.beaten_by(told, beside, judged_by),
        **more,
        "steps": fit.progress.step,
        "epochs": fit.progress.epoch,
        "best_epoch": fit.progress.best_epoch,
        "stopped": fit.stopped,
        "parameters": parameters,
        "windows_per_s": fit.progress.epoch * dataset.count["train"] / fit.train_s,
        "plan": chosen.to_dict(),
        "monitor": monitor.summarize(logged),
        "estimate": monitor.judge(logged, steps=fit.progress.step, took_s=fit.train_s),
        "notes": [
            *dataset.notes,
            *(f"no {name} baseline: {one.what}" for name, (one, sums) in found.items() if not sums),
        ],
    }
    figures["seconds"] = time.perf_counter() - began
    figures["seconds_by_phase"] = seconds
    scores["test"] |= detail
    runs.write_json(run.folder / "metrics.json", figures | {"detail": scores})
    run.append("end", seconds=figures["seconds"])
    return Result(run.folder, figures["metrics"], beside, figures)


def _announce(task: Task, chosen: Plan, parameters: int) -> None:
    train, dataset = task.config.train, task.dataset
    assert train.batch != "auto"
    task.run.append(
        "start",
        run=str(task.run.folder),
        windows=dataset.count,
        series=len(dataset.layout.series),
        parameters=parameters,
        epochs=train.epochs,
        steps_per_epoch=-(-dataset.count["train"] // (train.batch * train.accumulate)),
        plan=chosen.to_dict(),
        **measure.expected(task, chosen),
        notes=dataset.notes,
    )


def _interrupted(run: Run, fit: Fit) -> Interrupted:
    at = fit.progress
    kept = f"the best weights, of epoch {at.best_epoch:g}, are in {run.model}"
    return Interrupted(
        f"stopped at step {at.step}, in epoch {math.ceil(at.epoch)}; "
        + (kept if fit.weights else "there was no validation yet")
        + f"; go on with: slipstream train --resume {run.folder}",
        signal_number=fit.signal_number,
    )
