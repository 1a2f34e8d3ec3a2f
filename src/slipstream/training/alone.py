"""A run of one model."""

from __future__ import annotations

import math
from typing import Any

from slipstream import runs
from slipstream.engine import loop, measure, monitor, recover, score
from slipstream.engine.job import Task
from slipstream.engine.plan import Plan
from slipstream.engine.state import Fit
from slipstream.errors import Interrupted
from slipstream.runs import Run
from slipstream.training import scoring, setup
from slipstream.training.setup import Begun, Result, timed


def train(begun: Begun) -> Result:
    """Train, score and write everything."""
    run, dataset, seconds = begun.run, begun.dataset, begun.seconds
    with setup.watched(begun) as watching:
        task, chosen = setup.prepared(begun)
        settings = task.config
        with chosen.flags():
            fit, chosen = fitted(begun, task, chosen, watching)
            with timed(seconds, "scoring"):
                run.append("scoring", what="the model")
                sums = scoring.score_model(task, chosen)
            with timed(seconds, "baselines"):
                run.append("scoring", what="the baselines")
                found = scoring.score_baselines(task)
            if chosen.device.type == "cuda":
                recover.free_memory()
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
        **how_it_went(task, fit, chosen),
        "notes": [
            *dataset.notes,
            *(f"no {name} baseline: {one.what}" for name, (one, sums) in found.items() if not sums),
        ],
    }
    scores["test"] |= detail
    return setup.ended(begun, figures, scores)


def fitted(begun: Begun, task: Task, chosen: Plan, watching: monitor.Monitor) -> tuple[Fit, Plan]:
    """Train; the model then has its best weights, which are kept, and the plan is as it ran."""
    run, model, seconds = begun.run, task.model, begun.seconds
    _announce(task, chosen)
    with setup.seeded(task.config.seed, chosen.device):  # a user's own class may draw
        fit = loop.fit(task, chosen, begun.start.saved, watching)
    setup.keep_folder(run, task.config, begun.settings)
    seconds["set-up"] += fit.setup_s
    seconds |= {"training": fit.train_s, "validation": fit.validate_s}
    chosen = setup.as_it_ran(run, fit.plan, fit.failures)
    if fit.weights:
        setup.keep_model(run, fit.weights, task.dataset)
    if fit.signal_number:
        raise _interrupted(run, fit)
    model.load_state_dict(fit.weights)
    model.eval()
    return fit, chosen


def how_it_went(task: Task, fit: Fit, chosen: Plan) -> dict[str, Any]:
    """What a summary tells of the training itself."""
    logged = list(runs.events(task.run))
    return {
        "steps": fit.progress.step,
        "epochs": fit.progress.epoch,
        "best_epoch": fit.progress.best_epoch,
        "stopped": fit.stopped,
        "parameters": _num_parameters(task),
        "windows_per_s": fit.progress.epoch * task.dataset.count["train"] / fit.train_s,
        "plan": chosen.to_dict(),
        **({"init_from": task.init.told} if task.init else {}),
        "monitor": monitor.summarize(logged),
        "estimate": monitor.judge(logged, steps=fit.progress.step, took_s=fit.train_s),
    }


def _num_parameters(task: Task) -> int:
    return sum(p.numel() for p in task.model.parameters())


def _announce(task: Task, chosen: Plan) -> None:
    train, dataset = task.config.train, task.dataset
    assert train.batch != "auto"
    task.run.append(
        "start",
        run=str(task.run.folder),
        windows=dataset.count,
        series=len(dataset.layout.series),
        parameters=_num_parameters(task),
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
