"""The figures of lanes: of each, of the best, of all as an ensemble, and over folds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from slipstream.data import outputs
from slipstream.data.dataset import Dataset
from slipstream.data.folds import Fold
from slipstream.data.splits import SETS
from slipstream.engine import ensemble, score
from slipstream.engine.chunk import Chunk
from slipstream.engine.ensemble import ENSEMBLE, MODEL, Covered, Errors, Kept, Reach
from slipstream.engine.job import Task
from slipstream.engine.lanestate import LaneFit
from slipstream.engine.plan import Plan
from slipstream.errors import Diverged, UserError
from slipstream.training import scoring
from slipstream.training.scoring import Beside


class Group(NamedTuple):
    """The lanes of one fold; of a run without folds, all of them."""

    number: int
    """Of the fold, from 1"""
    fold: Fold | None
    fits: list[LaneFit]

    @property
    def sound(self) -> list[LaneFit]:
        """Those that have a model"""
        return [fit for fit in self.fits if fit.weights]

    def task(self, task: Task) -> Task:
        """The same task with this fold's windows."""
        return task if self.fold is None else replace(task, dataset=task.dataset.only(self.fold))


def grouped(fits: Sequence[LaneFit], dataset: Dataset, repeats: int) -> list[Group]:
    """By fold. A lane that never began is in none."""
    folds: list[Fold | None] = [*dataset.folds] or [None]
    groups = [Group(number, fold, []) for number, fold in enumerate(folds, start=1)]
    for fit in fits:
        groups[fit.number // repeats].fits.append(fit)
    return groups


def best(fits: Sequence[LaneFit]) -> LaneFit | None:
    """The one with the lowest validation loss."""
    sound = [fit for fit in fits if fit.weights]
    return min(sound, key=lambda fit: fit.progress.best_loss, default=None)


def refuse_failed(groups: Sequence[Group]) -> None:
    for group in groups:
        if not group.fits:
            raise UserError(
                f"train.minutes had passed before a model of fold {group.number} began; raise it"
            )
        if not group.sound:
            where = f" of fold {group.number}" if group.fold else ""
            raise Diverged(
                f"no validation loss{where} was finite, from any seed; lower train.lr, set "
                'train.clip, or set engine.precision = "fp32"'
            )


def windows(dataset: Dataset) -> dict[str, int]:
    """Windows by set, of all folds together."""
    counts = [fold.count for fold in dataset.folds] or [dataset.count]
    return {name: sum(count[name] for count in counts) for name in SETS}


@dataclass(frozen=True)
class Scored:
    """The sums over one group's windows."""

    best: int
    """Which of its lanes is the model"""
    lanes: dict[str, list[Any]]
    """val and test: of each lane that has a model"""
    model: dict[str, Any]
    """Every set"""
    ensemble: dict[str, Any]
    """val and test; empty where there is one lane"""
    reach: dict[str, Reach]
    covered: dict[str, Covered]
    baselines: Beside


def score_all(task: Task, chosen: Plan, groups: Sequence[Group]) -> list[Scored]:
    """Every group's sums; the models' test predictions are written on the way."""
    with scoring.writing(task.run.folder / "predictions.parquet") as write:
        return [_score(group.task(task), chosen, group, write) for group in groups]


def _score(task: Task, chosen: Plan, group: Group, write: Callable[[pa.Table], None]) -> Scored:
    dataset, fits = task.dataset, group.sound
    signature, pieces = dataset.signature, scoring.pieces(task, with_time=True)
    predictors = [ensemble.predictor(f.weights, task.config, signature, chosen) for f in fits]
    model = min(range(len(fits)), key=lambda i: fits[i].progress.best_loss)
    who = {MODEL: model} | ({ENSEMBLE: len(fits)} if len(fits) > 1 else {})
    # a class has no interval: its probability says how sure it is
    who_errs = {} if signature.classes else who
    errors = {name: Errors(dataset.count["val"], signature) for name in who_errs}

    def validated() -> Iterator[list[Chunk]]:
        for beside in ensemble.side_by_side(predictors, pieces, "val", signature):
            for name, index in who_errs.items():
                errors[name].add(beside[index])
            yield beside

    val = score.tallies(validated(), dataset, signature.quantiles)
    reach = {name: errors[name].reach() if name in errors else {} for name in who}
    covered = {name: Covered(reach[name], signature.quantiles) for name in who}

    def tested() -> Iterator[list[Chunk]]:
        for beside in ensemble.side_by_side(predictors, pieces, "test", signature):
            for name, index in who_errs.items():
                covered[name].add(beside[index])
            table = score.as_table(beside[model], dataset, reach[MODEL])
            if group.fold is not None:
                numbers = pa.array([group.number] * table.num_rows, pa.int32())
                table = table.add_column(1, outputs.FOLD, numbers)
            write(table)
            yield beside

    test = score.tallies(tested(), dataset, signature.quantiles)
    trained = ([chunk] for chunk in score.chunks(predictors[model], pieces("train")))
    (train,) = score.tallies(trained, dataset, signature.quantiles)
    return Scored(
        best=model,
        lanes={"val": val[: len(fits)], "test": test[: len(fits)]},
        model={"train": train, "val": val[model], "test": test[model]},
        ensemble={"val": val[-1], "test": test[-1]} if ENSEMBLE in who else {},
        reach=reach,
        covered=covered,
        baselines={},
    )


def with_baselines(task: Task, groups: Sequence[Group], scored: Sequence[Scored]) -> list[Scored]:
    """Each group's baselines beside it, fitted on its own training windows."""
    return [
        replace(one, baselines=scoring.score_baselines(group.task(task)))
        for group, one in zip(groups, scored, strict=True)
    ]


def keep(task: Task, groups: Sequence[Group], scored: Sequence[Scored], uses: str) -> None:
    """Write lanes/."""
    kept = [
        Kept(
            label=group.fold.label if group.fold else None,
            weights=[fit.weights for fit in group.sound],
            best=one.best,
            reach=one.reach,
        )
        for group, one in zip(groups, scored, strict=True)
    ]
    dataset = task.dataset
    ensemble.save(task.run, kept, dataset.scaler, dataset.signature.targets, uses)


def summary(
    task: Task, groups: Sequence[Group], scored: Sequence[Scored]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was found, of all groups together, and the details."""
    dataset, settings = task.dataset, task.config
    kind = scoring.judged_by(settings)
    merged = score.kind_of(dataset).merged
    model = {name: merged([one.model[name] for one in scored]) for name in SETS}
    detail = {name: score.figures(sums, dataset) for name, sums in model.items()}
    mine = scoring.by_set(detail)
    pooled = _pooled_baselines(dataset, scored)
    beside = {name: scoring.told_of_baseline(*one, dataset) for name, one in pooled.items()}
    ensembles = _pooled_ensemble(dataset, scored)
    together = _told_of_ensemble(dataset, scored, ensembles) if ensembles else None
    better = together is not None and (
        scoring.judged(together, "val", kind) < scoring.judged(mine, "val", kind)
    )
    tested = {name: sums["test"] for name, (_, sums) in pooled.items() if sums}
    if ensembles:
        tested[ENSEMBLE] = ensembles["test"]
    more, in_detail = score.kind_of(dataset).certainty(model["test"], tested, dataset)
    detail["test"] |= in_detail
    found: dict[str, Any] = {
        "run": str(task.run.folder),
        "name": settings.name,
        **mine,
        "windows": windows(dataset),
        "baselines": beside,
        "judged_by": kind,
        "beaten_by": scoring.beaten_by(mine, beside, kind),
        **more,
        "lanes": [
            told
            for group, one in zip(groups, scored, strict=True)
            for told in _lanes(dataset, group, one)
        ],
        **_spreads(task, groups, scored),
        "folds": [
            _fold(dataset, group, one)
            for group, one in zip(groups, scored, strict=True)
            if group.fold
        ]
        or None,
        "ensemble": together,
        "uses": ENSEMBLE if better else MODEL,
        "coverage": ensemble.coverage([one.covered[MODEL] for one in scored]),
        "notes": [*dataset.notes, *_notes(groups, scored)],
    }
    return found, detail


def _overall(sums: dict[str, Any], dataset: Dataset) -> dict[str, Any]:
    return scoring.by_set({which: score.figures(one, dataset) for which, one in sums.items()})


def _pooled_baselines(dataset: Dataset, scored: Sequence[Scored]) -> Beside:
    """Of all groups together."""
    merged = score.kind_of(dataset).merged
    return {
        name: (
            baseline,
            {which: merged([one.baselines[name][1][which] for one in scored]) for which in sums},
        )
        for name, (baseline, sums) in scored[-1].baselines.items()
    }


def _pooled_ensemble(dataset: Dataset, scored: Sequence[Scored]) -> dict[str, Any]:
    """Of all groups together; nothing where one of them has none."""
    if not all(one.ensemble for one in scored):
        return {}
    merged = score.kind_of(dataset).merged
    return {which: merged([one.ensemble[which] for one in scored]) for which in ("val", "test")}


def _told_of_ensemble(
    dataset: Dataset, scored: Sequence[Scored], pooled: dict[str, Any]
) -> dict[str, Any]:
    covered = ensemble.coverage([one.covered[ENSEMBLE] for one in scored])
    return _overall(pooled, dataset) | {"coverage": covered}


def _lanes(dataset: Dataset, group: Group, one: Scored) -> Iterator[dict[str, Any]]:
    sound = group.sound
    for fit in group.fits:
        told: dict[str, Any] = {
            "lane": fit.number,
            "seed": fit.lane.config.seed,
            "fold": group.number if group.fold else None,
            "label": group.fold.label if group.fold else None,
            "best": fit is sound[one.best],
            "val_loss": fit.progress.best_loss,
            "best_epoch": fit.progress.best_epoch,
            "epochs": fit.progress.epoch,
            "steps": fit.progress.step,
            "stopped": fit.stopped,
            "metrics": None,
        }
        if not dataset.signature.classes:
            told["scaled"] = None
        if fit.weights:
            sums = {which: tallies[sound.index(fit)] for which, tallies in one.lanes.items()}
            told |= _overall(sums, dataset)
        yield told


def _fold(dataset: Dataset, group: Group, one: Scored) -> dict[str, Any]:
    assert group.fold is not None
    return {
        "fold": group.number,
        "label": group.fold.label,
        "windows": group.fold.count,
        **_overall(one.model, dataset),
        "ensemble": _overall(one.ensemble, dataset) if one.ensemble else None,
        "coverage": ensemble.coverage([one.covered[MODEL]]),
        "baselines": {
            name: _overall(sums, dataset) if sums else None
            for name, (_, sums) in one.baselines.items()
        },
    }


def _spreads(
    task: Task, groups: Sequence[Group], scored: Sequence[Scored]
) -> dict[str, dict[str, dict[str, float]] | None]:
    """How each test metric, and each in standardised units where there are such, varies over the
    repeats; each repeat is scored on all folds together."""
    repeats = []
    for seed in range(task.config.seed, task.config.seed + task.config.train.repeats):
        mine = [
            one.lanes["test"][place]
            for group, one in zip(groups, scored, strict=True)
            for place, fit in enumerate(group.sound)
            if fit.lane.config.seed == seed
        ]
        if len(mine) == len(groups):
            merged = score.kind_of(task.dataset).merged(mine)
            repeats.append(score.figures(merged, task.dataset))
    sections = {"spread": "overall"}
    if not task.dataset.signature.classes:
        sections |= {"scaled_spread": "scaled"}
    return {
        key: {name: _over([one[section][name] for one in repeats]) for name in repeats[0][section]}
        if len(repeats) > 1
        else None
        for key, section in sections.items()
    }


def _over(values: list[float]) -> dict[str, float]:
    """Nothing is known where one of them means nothing, as R² of a constant truth does."""
    if any(math.isnan(value) for value in values):
        return dict.fromkeys(("mean", "sd", "min", "max"), math.nan) | {"n": len(values)}
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def _notes(groups: Sequence[Group], scored: Sequence[Scored]) -> Iterator[str]:
    for name, (baseline, sums) in scored[-1].baselines.items():
        if not sums:
            yield f"no {name} baseline: {baseline.what}"
    for group in groups:
        for fit in group.fits:
            if not fit.weights:
                where = f" of fold {group.number}" if group.fold else ""
                yield f"seed {fit.lane.config.seed}{where} has no model: {fit.stopped}"
