"""Ensembles of runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.base import statistics
from slipstream.base.errors import UserError
from slipstream.base.run_names import ENSEMBLE_FILE, UNTESTED_FILE
from slipstream.config import Config, Data, Signature
from slipstream.data import predictions
from slipstream.data.dataset import Dataset
from slipstream.data.folds import Fold
from slipstream.data.series import Flags
from slipstream.data.splits import SETS
from slipstream.data.table import open_table_writer
from slipstream.data.windows import Series
from slipstream.engine import checkpoint, recovery
from slipstream.events import End, Event, Scoring
from slipstream.inference import portable
from slipstream.inference.mixture import MemberErrors, match_rows
from slipstream.inference.portable import FoldMixture, load_changed_config
from slipstream.inference.trained import (
    Member,
    bind_members,
    has_changed,
    load_member,
    load_own_sets,
    note_left_out,
)
from slipstream.models import files
from slipstream.runs import Run
from slipstream.runs.lanes import ENSEMBLE, LANES_FOLDER, MODEL, read_lanes
from slipstream.runs.summary import (
    Baselines,
    BaselineScores,
    FoldSummary,
    MemberDescription,
    MemberSummary,
    RunSummary,
    SetDetail,
)
from slipstream.scoring import ensemble as ensembles
from slipstream.scoring import summary as summaries
from slipstream.scoring.baselines import (
    SHORTENED,
    fit_baselines,
    list_baselines,
    save_baselines,
    shorten,
)
from slipstream.scoring.batch import Baseline, ChunkLoader, HalfWidths, PredictionBatch, Predictor
from slipstream.scoring.ensemble import MeanScores
from slipstream.scoring.predict import (
    accumulate_side_by_side,
    build_tables,
    make_window_filter,
    predict_side_by_side,
)
from slipstream.scoring.summary import BaselineSums, merge_sums, summarize_sums
from slipstream.training.overview import summarize_data
from slipstream.training.request import FinishedRun
from slipstream.training.trained_lanes import LoadedData

SAME_SETTINGS = (
    *("data.split", "data.where", "data.id", "data.task", "data.label_rows"),
    "predict.filter",
)
TOLERANCE = 1e-5
"""By how much a target may differ, relative to its size: scaled values are in single precision"""


def refuse_disagreement(members: Sequence[Member]) -> None:
    """Refuse members that predict something else than the first, or split their data otherwise."""
    first = members[0]
    for member in members[1:]:
        signature, member_signature = first.trained.signature, member.trained.signature
        facts: list[tuple[str, Any, Any]] = [
            ("targets", sorted(signature.targets), sorted(member_signature.targets)),
            ("data.horizon", signature.horizon, member_signature.horizon),
            ("classes", list(signature.classes), list(member_signature.classes)),
        ]
        differing = configs.list_differences(first.config, member.config)
        for name in SAME_SETTINGS:
            if name in differing:
                section, _, key = name.partition(".")
                values = (getattr(getattr(run.config, section), key) for run in (first, member))
                facts.append((name, *map(_format_setting, values)))
        for name, wanted, found in facts:
            if wanted != found:
                raise UserError(
                    f"{member.run.folder}: {name} {_be(name)} {found}, but {wanted} in "
                    f"{first.run.folder}; an ensemble needs the same"
                )
        if len(member.trained.folds) != len(first.trained.folds):
            raise UserError(
                f"{member.run.folder}: holds the models of {len(member.trained.folds)} folds, but "
                f"{first.run.folder} those of {len(first.trained.folds)}"
            )


def _be(name: str) -> str:
    return "are" if name in ("targets", "classes") else "is"


def _format_setting(value: Any) -> Any:
    return value.model_dump(exclude_defaults=True) if hasattr(value, "model_dump") else value


def refuse_other_data(members: Sequence[Member], datasets: Sequence[Dataset]) -> None:
    """Refuse data that changed since a member was trained, or that differ between members."""
    for member, dataset in zip(members, datasets, strict=True):
        if has_changed(member.run, member.config, dataset):
            raise UserError(
                f"{member.run.folder}: its data have changed since training (their fingerprint "
                "differs); train it again on the data as they are now"
            )
        if len(dataset.folds) > len(member.trained.folds):
            raise UserError(
                f"{member.run.folder}: holds the model of one fold; set tune.retrain to have them "
                "all"
            )
    for pair, next_pair in pairwise(zip(members, datasets, strict=True)):
        if pair[1].memory is not next_pair[1].memory:
            _compare_series(*pair, *next_pair)
            _compare_targets(*pair, *next_pair)


def _compare_series(first: Member, data: Dataset, member: Member, member_data: Dataset) -> None:
    """Refuse series that one member alone has, unless the other's windows are too long for
    them."""
    for owner, has, lacking, lacks in (
        (first, data, member, member_data),
        (member, member_data, first, data),
    ):
        rows = dict(zip(has.index.series_names, np.diff(has.index.offsets), strict=True))
        shortest = lacks.signature.lead + lacks.signature.steps_out
        for name in sorted(rows.keys() - set(lacks.index.series_names)):
            if rows[name] >= shortest:
                raise UserError(
                    f'{lacking.run.folder}: was not trained on series "{name}", as '
                    f"{owner.run.folder} was; an ensemble needs the same data"
                )


def _compare_targets(first: Member, data: Dataset, member: Member, member_data: Dataset) -> None:
    """Refuse targets that differ in a row which both have."""
    assert data.memory is not None
    assert member_data.memory is not None
    rows = match_rows(data, member_data)
    common = np.flatnonzero((rows >= 0) & ~_mark_unknown(data) & ~_mark_unknown(member_data)[rows])
    if not len(common):
        raise UserError(
            f"{member.run.folder}: its data and those of {first.run.folder} have no row in common, "
            "by series and time; an ensemble needs the same data"
        )
    for name in data.signature.targets:
        wanted = _read_target(data, name)[common]
        found = _read_target(member_data, name)[rows[common]]
        size = 1.0 if data.signature.classes else data.scaler.size[name]
        wrong = np.flatnonzero(~np.isclose(wanted, found, rtol=TOLERANCE, atol=TOLERANCE * size))
        if len(wrong):
            position = int(common[wrong[0]])
            owner = int(np.searchsorted(data.index.offsets, position, side="right")) - 1
            row = position - int(data.index.offsets[owner])
            raise UserError(
                f'{member.run.folder}: target "{name}" is {found[wrong[0]]:g} in row {row} of '
                f'series "{data.index.series_names[owner]}", but {wanted[wrong[0]]:g} in '
                f"{first.run.folder}; {len(wrong):,} of {len(common):,} rows differ, and an "
                "ensemble needs the same data"
            )


def _mark_unknown(dataset: Dataset) -> Flags:
    """Mark the rows without a target: as an input, what is missing may be filled in there."""
    unknown = np.zeros(dataset.index.num_rows, dtype=bool)
    for begin, end in dataset.index.unknown:
        unknown[begin:end] = True
    return unknown


def _read_target(dataset: Dataset, name: str) -> Any:
    """Return a target in physical units; of classes, their numbers."""
    assert dataset.memory is not None
    series, place = dataset.memory.series, dataset.signature.targets.index(name)
    place += series.values.shape[1] - series.num_targets
    columns, rows = slice(place, place + 1), torch.arange(len(series.values))
    column = series.to_table_scale(series.values[:, columns].double(), rows, columns)
    values = column[:, 0].numpy()
    if dataset.signature.classes:
        return values
    return values * dataset.scaler.size[name] + dataset.scaler.shift[name]


Write = Callable[[pa.Table], None]


class JointFold(NamedTuple):
    """One fold, or all windows of a run without folds."""

    number: int
    label: str | None
    dataset: Dataset
    """With the windows that all members have"""
    reference: Dataset
    """With all windows of the reference, which the baselines are fitted to"""
    predictors: list[Predictor]


@dataclass(frozen=True)
class FoldScores:
    """The sums over one fold's windows; in each list the mean comes last."""

    fold: JointFold
    mixture: FoldMixture
    train: list[Any]
    scores: MeanScores
    baselines: BaselineSums
    train_stride: int
    """Of so many training windows one is scored"""

    @property
    def sums(self) -> dict[str, list[Any]]:
        """By set: of each member and of the ensemble"""
        return {"train": self.train, "val": self.scores.val, "test": self.scores.test}


def list_folds(
    dataset: Dataset, reference_data: Dataset, predictors: Sequence[list[Predictor]]
) -> list[JointFold]:
    """List the folds of the joint data set, with the members' predictors of each."""
    if not dataset.folds:
        return [JointFold(1, None, dataset, reference_data, predictors[-1])]
    return [
        JointFold(
            number + 1,
            fold.label,
            dataset.select_fold(fold),
            reference_data.select_fold(reference_data.folds[number]),
            predictors[number],
        )
        for number, fold in enumerate(dataset.folds)
    ]


MIN_TRAIN_WINDOWS, TRAIN_SHARE = 2_000, 0.25
"""Training windows of an ensemble from a search that are scored, where there are so many, or this
share of those that are judged by, if that is more: they only show how much was learned by heart"""


class KnownParts(NamedTuple):
    """What an ensemble need not compute, because a search has."""

    weights: Sequence[float]
    """The members' weights"""
    best: int
    """The member with the lowest validation error"""
    baselines: Mapping[str, Baseline]
    """Fitted to training windows of the reference; others are fitted"""


def choose_train_stride(dataset: Dataset) -> int:
    """Return of how many training windows one is scored where a search has a time limit."""
    judged = dataset.num_windows["val"] + dataset.num_windows["test"]
    scored = max(int(TRAIN_SHARE * judged), MIN_TRAIN_WINDOWS)
    return max(dataset.num_windows["train"] // scored, 1)


def score_folds(
    run: Run, config: Config, folds: Sequence[JointFold], series: Series, known: KnownParts | None
) -> list[FoldScores]:
    """Score every fold, and write the ensemble's predictions for the test sets."""
    with open_table_writer(run.folder / summaries.PREDICTIONS) as write:
        return [_score_fold(fold, len(folds) > 1, series, config, write, known) for fold in folds]


def _fit_mixture(
    dataset: Dataset, predictors: Sequence[Predictor], load_chunks: ChunkLoader, metric: str
) -> tuple[list[float], int]:
    """Return the members' weights, fitted to the validation set, and the member that is the best
    there."""
    errors = MemberErrors(dataset, len(predictors))

    def collect() -> Any:
        for row in predict_side_by_side(predictors, load_chunks, "val"):
            errors.add(row)
            yield row

    alone = [summarize_sums({"val": sums}) for sums in accumulate_side_by_side(collect(), dataset)]
    values = [summaries.get_metric(sums, "val", metric) for sums in alone]
    best = 0
    for place, value in enumerate(values):
        best = place if statistics.is_better(value, values[best], metric) else best
    return errors.fit(metric), best


def _score_fold(
    fold: JointFold,
    numbered: bool,
    series: Series,
    config: Config,
    write: Write,
    known: KnownParts | None,
) -> FoldScores:
    dataset, predictors = fold.dataset, fold.predictors
    metric = summaries.get_comparison_metric(config)
    window_filter = make_window_filter(config, dataset)
    stride = 1 if known is None else choose_train_stride(dataset)
    load_chunks = _make_loader(_thin_training(dataset, stride), series)
    if known is None:
        weights, best = _fit_mixture(dataset, predictors, load_chunks, metric)
    else:
        weights, best = list(known.weights), known.best
    positions = {MODEL: best, ENSEMBLE: len(predictors) if len(predictors) > 1 else 0}

    def write_row(row: list[PredictionBatch], half_widths: dict[str, HalfWidths]) -> None:
        for table in build_tables(row[-1], dataset, half_widths[ENSEMBLE]):
            if numbered:
                numbers = pa.array([fold.number] * table.num_rows, pa.int32())
                table = table.add_column(1, predictions.FOLD, numbers)
            write(table)

    mixing = ensembles.Mixing(weights, window_filter)
    scores = ensembles.score_with_mean(
        predictors, dataset, load_chunks, positions, write_row, mixing
    )
    signature = dataset.signature
    rows = ensembles.predict_with_mean(predictors, load_chunks, "train", signature, weights)
    if window_filter:
        rows = summaries.join_unfiltered(rows, window_filter, [])
    train = accumulate_side_by_side(rows, dataset)
    found = {} if known is None else dict(known.baselines)
    found |= fit_baselines(fold.reference, _make_loader(fold.reference, series), without=found)
    fitted = {name: found[name] for name in list_baselines(dataset)}
    reach = ensembles.to_reach(scores.half_widths, dataset.scaler, signature.targets)
    mixture = FoldMixture(fold.label, weights, best, reach)
    baselines = summaries.score_baselines(dataset, load_chunks, fitted)
    return FoldScores(fold, mixture, train, scores, baselines, stride)


def _thin_training(dataset: Dataset, stride: int) -> Dataset:
    """Return the data set with one in so many training windows."""
    if stride == 1:
        return dataset
    assert dataset.memory is not None
    starts = dataset.memory.starts
    return dataset.select_fold(Fold("", {**starts, "train": starts["train"][::stride]}))


def _make_loader(dataset: Dataset, series: Series) -> ChunkLoader:
    return lambda subset: dataset.iter_chunks(subset, series, rows=0, with_time=True)


def summarize_ensemble(
    run: Run,
    config: Config,
    dataset: Dataset,
    members: Sequence[Member],
    folds: Sequence[FoldScores],
) -> tuple[RunSummary, dict[str, SetDetail]]:
    """Return the ensemble's summary, of all folds together, and the metrics in detail."""

    def merge(position: int) -> dict[str, Any]:
        sets = folds[-1].sums
        return {
            subset: merge_sums([fold.sums[subset][position] for fold in folds]) for subset in sets
        }

    baselines = summaries.merge_baselines([fold.baselines for fold in folds])
    scores, detail = summaries.summarize_scores(run, config, dataset, merge(-1), baselines)
    intervals = ensembles.score_intervals([fold.scores.intervals[ENSEMBLE] for fold in folds])
    weights = folds[-1].mixture.weights
    unfiltered = [fold.scores.unfiltered.get(ENSEMBLE, {}) for fold in folds]
    without = {
        subset: merge_sums([fold[subset] for fold in unfiltered]) for subset in unfiltered[-1]
    }
    summary: RunSummary = {
        **scores,
        **summaries.summarize_filter(config, dataset, without),
        "members": [
            {**describe_member(member), "weight": weight, **summarize_sums(merge(position))}
            for position, (member, weight) in enumerate(zip(members, weights, strict=True))
        ],
        "folds": [_summarize_fold(fold, members) for fold in folds] if len(folds) > 1 else None,
        **cast(RunSummary, intervals),
        "notes": [
            *dataset.notes,
            *summaries.list_missing_baselines(baselines),
            *_describe_training(folds[-1]),
        ],
    }
    return summary, detail


def _describe_training(scored: FoldScores) -> list[str]:
    if scored.train_stride == 1:
        return []
    return [f"the training errors are those of one training window in {scored.train_stride}"]


def describe_member(member: Member) -> MemberDescription:
    """Return what a member is."""
    signature = member.trained.signature
    return {
        "name": member.name,
        "run": str(member.run.folder),
        "kind": member.config.model.kind,
        "what": member.trained.description,
        "context": signature.context,
        "inputs": len(signature.inputs),
    }


def _summarize_fold(scored: FoldScores, members: Sequence[Member]) -> FoldSummary:
    """Return the metrics, weights and baselines of one fold."""
    names = [member.name for member in members]
    baselines: Baselines = {
        name: cast(BaselineScores, summarize_sums(sums)) if sums else None
        for name, (_, sums) in scored.baselines.items()
    }
    return {
        "fold": scored.fold.number,
        "label": scored.fold.label,
        "windows": scored.fold.dataset.num_windows,
        "weights": dict(zip(names, scored.mixture.weights, strict=True)),
        **cast(
            FoldSummary,
            summarize_sums({subset: sums[-1] for subset, sums in scored.sums.items()}),
        ),
        **cast(FoldSummary, ensembles.score_intervals([scored.scores.intervals[ENSEMBLE]])),
        "baselines": baselines,
    }


COMMENT = """\
# An ensemble of {count} runs. These are the settings of the member "{name}", whose
# windows it predicts; those of each member are in members/.
"""


@recovery.explain_out_of_memory()
def ensemble(
    members: Sequence[str | Path],
    data: Any = None,
    *,
    name: str = "ensemble",
    out: str | Path | None = None,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    allow_code: bool = False,
) -> FinishedRun:
    """Join finished runs; `slipstream.ensemble` documents the arguments."""
    began = time.perf_counter()
    loaded = _load_members(members, overrides, allow_code)
    refuse_disagreement(loaded)
    for member in loaded:
        runs.require_data(member.run, member.config, data, runs.SAME_ROWS)
    datasets = load_own_sets(loaded, data)
    refuse_other_data(loaded, datasets)
    reference = max(range(len(loaded)), key=lambda i: loaded[i].trained.signature.context)
    first = loaded[reference]
    settings = {"name": name} | ({} if out is None else {"out": str(out)})
    config = configs.replace_settings(first.config, {"out": loaded[0].config.out, **settings})
    comment = COMMENT.format(count=len(loaded), name=first.name)
    results: list[RunSummary] = []

    def fill(run: Run) -> None:
        copy_members(run, loaded)
        results.append(_build(run, config, loaded, datasets, reference))

    summary = _write_run(config, comment, fill, results, None, watch, began)
    return FinishedRun(Path(summary["run"]), summary)


def _write_run(
    config: Config,
    comment: str,
    fill: Callable[[Run], None],
    results: Sequence[RunSummary],
    folder: Path | None,
    watch: Callable[[Event], None] | None,
    began: float,
) -> RunSummary:
    """Create the folder of an ensemble, which `fill` fills and summarizes into `results`; return
    the summary."""
    created = runs.create_locked(
        config.name,
        out=config.out,
        files={"config.toml": runs.format_config(config, comment)},
        folder=folder,
        watch=watch,
        fill=fill,
    )
    with created as run:
        (result,) = results
        detail = result.pop("detail")
        result |= {"run": str(run.folder), "seconds": time.perf_counter() - began}
        runs.write_metrics(run, result | {"detail": detail})
        run.append(End(seconds=result["seconds"]))
    return result


def _load_members(
    members: Sequence[str | Path], overrides: tuple[str, ...], allow_code: bool
) -> list[Member]:
    """Load the members' models; refuse runs that are not finished, and what is no list of runs."""
    if len(members) < 2:
        raise UserError("an ensemble needs two runs or more; name each of them")
    opened: dict[Path, Run] = {}
    names: dict[str, int] = {}
    loaded = []
    for member in members:
        run = runs.open_run(member)
        if untested := runs.describe_untested(run.folder):
            raise UserError(f"{run.folder}: is {untested}; an ensemble needs tested runs")
        if (run.folder / ENSEMBLE_FILE).exists():
            raise UserError(f"{run.folder}: is an ensemble itself; name its members instead")
        model_run, _ = runs.find_model_run(run)
        if not (run.folder / "metrics.json").exists():
            raise UserError(
                f"{run.folder}: is not finished, so it cannot be a member; resume it first"
            )
        if model_run.folder in opened:
            raise UserError(f"{run.folder}: is named twice; a member counts by its weight")
        opened[model_run.folder] = run
        count = names[run.folder.name] = names.get(run.folder.name, 0) + 1
        label = run.folder.name + (f" ({count})" if count > 1 else "")
        config = load_changed_config(model_run, overrides)
        if config.predict != load_changed_config(model_run, ()).predict:
            raise UserError(
                "predict.filter of an ensemble is that of its members; change it when the ensemble "
                "is used: evaluate and predict take it"
            )
        options: dict[str, Any] = {"overrides": overrides, "allow_code": allow_code}
        loaded.append(load_member(model_run, label, config, **options))
    return loaded


def _build(
    run: Run,
    config: Config,
    members: Sequence[Member],
    datasets: Sequence[Dataset],
    reference: int,
    known: KnownParts | None = None,
) -> RunSummary:
    """Fill the folder with the predictions and the baselines of its members; return the summary."""
    first = members[reference]
    dataset, predictors = bind_members(members, datasets, reference)
    dataset = note_left_out(members, datasets, dataset, reference, SETS)
    with first.plan.flags():
        run.append(Scoring(what=f"{len(members)} runs and the baselines"))
        assert dataset.memory is not None
        series = dataset.memory.series.to(first.plan.device)
        folds = list_folds(dataset, datasets[reference], predictors)
        scored = score_folds(run, config, folds, series, known)
    parameters = sum(checkpoint.count_parameters(member.run) for member in members)
    if len(members) == 1:
        _save_alone(run, first, scored)
    else:
        _save_mixture(run, reference, members, scored)
    summaries.save_scored_baselines(run, [fold.baselines for fold in scored])
    runs.write_json(run.folder / "plan.json", first.plan.to_dict())
    summary, detail = summarize_ensemble(run, config, dataset, members, scored)
    if len(members) == 1:
        del summary["members"]
    return {
        **summary,
        "parameters": parameters,
        "plan": first.plan.to_dict(),
        "data": summarize_data(dataset, config),
        **runs.describe_origin(),
        "detail": detail,
    }


def _save_mixture(
    run: Run, reference: int, members: Sequence[Member], scored: Sequence[FoldScores]
) -> None:
    described = [
        {**describe_member(member), "data": _read_fingerprint(member)} for member in members
    ]
    portable.save_mixture(run, reference, described, [fold.mixture for fold in scored])


def _save_alone(run: Run, member: Member, scored: Sequence[FoldScores]) -> None:
    """Make the folder that of an ordinary run of one model, with its intervals."""
    shutil.move(member.run.model, run.model)
    shutil.rmtree(run.folder / portable.MEMBERS)
    (fold,) = scored
    model, signature, scaler = checkpoint.load_model(run, member.config, torch.device("cpu"))
    widths = fold.scores.half_widths
    record = ensembles.FoldRecord(None, [model.state_dict()], 0, {MODEL: widths[MODEL]})
    ensembles.save_lanes(run, [record], scaler, signature.targets, MODEL)


def _read_fingerprint(member: Member) -> str | None:
    return files.read_origin(member.run).get("data")


def copy_members(run: Run, members: Sequence[Member]) -> None:
    """Copy what evaluate and predict need of each member."""
    for number, member in enumerate(members, start=1):
        to = run.folder / portable.MEMBERS / str(number)
        to.mkdir(parents=True)
        shutil.copyfile(member.run.folder / "config.toml", to / "config.toml")
        for name in (member.run.model.name, LANES_FOLDER):
            if (member.run.folder / name).exists():
                shutil.copytree(member.run.folder / name, to / name)


class NewMember(NamedTuple):
    """A member that is no run yet."""

    name: str
    config: Config
    weights: Mapping[str, Tensor]
    weight: float


class FittedBaselines(NamedTuple):
    """Baselines that a search has fitted to the windows of a `[data]`."""

    data: Data
    baselines: dict[str, Baseline]


def build_from_weights(
    folder: Path,
    name: str,
    members: Sequence[NewMember],
    data: Sequence[LoadedData],
    fitted: Sequence[FittedBaselines],
    *,
    best: int,
    watch: Callable[[Event], None] | None,
) -> RunSummary:
    """Write an ensemble of models that a search has trained, and return its summary.

    `data` are those of each member, `best` is the member with the lowest validation error.
    """
    began = time.perf_counter()
    reference = choose_reference([member.config for member in members], fitted)
    first = members[reference]
    config = configs.replace_settings(first.config, {"name": name})
    comment = COMMENT.format(count=len(members), name=first.name)
    results: list[RunSummary] = []
    baselines = _select_baselines(fitted, config.data, data[reference].dataset.signature)
    known = KnownParts([member.weight for member in members], best, baselines)

    def fill(run: Run) -> None:
        loaded = []
        for number, (member, own) in enumerate(zip(members, data, strict=True), start=1):
            place = _write_member(run.folder / portable.MEMBERS / str(number), member, own)
            options: dict[str, Any] = {"overrides": (), "allow_code": True}
            loaded.append(load_member(place, member.name, member.config, **options))
        datasets = [own.dataset for own in data]
        results.append(_build(run, config, loaded, datasets, reference, known))

    return _write_run(config, comment, fill, results, folder, watch, began)


def choose_reference(configs: Sequence[Config], fitted: Sequence[FittedBaselines]) -> int:
    """Return the member whose windows and columns the baselines read: one for which they are
    fitted, with the longest windows, and that can be trained again."""

    def rank(config: Config) -> tuple[bool, int, bool]:
        known = {name for own in list_usable(fitted, config.data) for name in own.baselines}
        return "gbm" in known, int(config.data.context), not config.model.spec.is_fitted

    return max(range(len(configs)), key=lambda number: rank(configs[number]))


def list_usable(fitted: Sequence[FittedBaselines], data: Data) -> list[FittedBaselines]:
    """List the baselines that were fitted to these data, to windows as long or shorter, the longest
    first."""

    def is_usable(own: Data) -> bool:
        same = own.model_copy(update={"context": data.context}) == data
        return same and int(own.context) <= int(data.context)

    usable = [own for own in fitted if is_usable(own.data)]
    return sorted(usable, key=lambda own: -int(own.data.context))


def find_fitted(fitted: Sequence[FittedBaselines], data: Data, name: str) -> FittedBaselines | None:
    """Find the fit of a baseline that serves these data: to windows as long, or else, where it can,
    to the newest rows of them."""
    for own in list_usable(fitted, data):
        if name in own.baselines and (own.data.context == data.context or name in SHORTENED):
            return own
    return None


def _select_baselines(
    fitted: Sequence[FittedBaselines], data: Data, signature: Signature
) -> dict[str, Baseline]:
    """Return the baselines that serve these data."""
    found: dict[str, Baseline] = {}
    for name in {name for own in fitted for name in own.baselines}:
        own = find_fitted(fitted, data, name)
        if own is None:
            continue
        found[name], context = own.baselines[name], int(own.data.context)
        if context < signature.context:
            found[name] = shorten(name, found[name], context, signature)
    return found


def build_refit(
    folder: Path,
    tested: Run,
    members: Mapping[int, tuple[NewMember, LoadedData]],
    expected: str,
    *,
    watch: Callable[[Event], None] | None,
) -> None:
    """Write a copy of a tested run in which `members`, by number from 1, were trained on all rows.

    It has the intervals of the tested run, and no metrics: `expected` names the run whose test
    error it is expected to have.
    """
    began, content = time.perf_counter(), portable.read_mixture(tested)
    (first, _), *_ = members.values()
    reference = 1 if content is None else content["reference"] + 1
    # a baseline that was fitted again may have other sizes
    own = members[reference][0].config if reference in members else runs.load_config(tested)
    config = configs.replace_settings(own, {"name": first.config.name})
    comment = UNTESTED_COMMENT.format(expected=expected)

    def fill(run: Run) -> None:
        runs.write_json(run.folder / UNTESTED_FILE, {"expected": expected})
        shutil.copyfile(tested.folder / "plan.json", run.folder / "plan.json")
        save_baselines(run, [{}])  # those of the tested run read other scales
        if content is None:
            _write_refit_model(run, tested, *members[1])
            return
        shutil.copytree(tested.folder / portable.MEMBERS, run.folder / portable.MEMBERS)
        described = runs.read_json(tested.folder / ENSEMBLE_FILE)
        for number, (member, data) in members.items():
            inner = run.folder / portable.MEMBERS / str(number)
            shutil.rmtree(inner)
            _write_member(inner, member, data, whole=True)
            described["members"][number - 1]["data"] = data.fingerprint
        runs.write_json(run.folder / ENSEMBLE_FILE, described)

    created = runs.create_locked(
        config.name,
        out=config.out,
        files={"config.toml": runs.format_config(config, comment)},
        folder=folder,
        watch=watch,
        fill=fill,
    )
    with created as run:
        text = runs.describe_untested(run.folder)
        summary: RunSummary = {
            "run": str(run.folder),
            "name": config.name,
            "untested": text,
            "windows": {
                "train": max(data.dataset.num_windows["train"] for _, data in members.values())
            },
            "notes": [text],
            "plan": runs.read_json(run.folder / "plan.json"),
            "seconds": time.perf_counter() - began,
        }
        if content is not None:
            shares = zip(content["members"], content["folds"][-1].weights, strict=True)
            described = [{**member, "weight": weight} for member, weight in shares]
            summary["members"] = cast(list[MemberSummary], described)
        summary |= cast(RunSummary, runs.describe_origin())
        runs.write_metrics(run, summary)


UNTESTED_COMMENT = """\
# Trained on the rows of all sets, so that none is left to test it on. The tested run:
# {expected}
"""


def _write_refit_model(run: Run, tested: Run, member: NewMember, data: LoadedData) -> None:
    """Write a single model with the intervals of the tested run."""
    signature, scaler = data.dataset.signature, data.dataset.scaler
    text = (run.folder / "config.toml").read_text(encoding="utf-8")
    _save_weights(Run(run.folder, origin={"config": text}), member, data, whole=True)
    lanes = read_lanes(tested, signature, ensemble=None)
    if lanes is None:
        return
    widths = ensembles.to_half_widths(lanes.folds[-1].reach, scaler, signature.targets)
    record = ensembles.FoldRecord(None, [dict(member.weights)], 0, {MODEL: widths})
    ensembles.save_lanes(run, [record], scaler, signature.targets, MODEL)


def _write_member(folder: Path, member: NewMember, data: LoadedData, *, whole: bool = False) -> Run:
    """Write what evaluate and predict need of a member; `whole` where all rows trained it."""
    folder.mkdir(parents=True)
    text = runs.format_config(member.config)
    (folder / "config.toml").write_text(text, encoding="utf-8")
    run = Run(folder, origin={"config": text})
    _save_weights(run, member, data, whole=whole)
    return run


def _save_weights(run: Run, member: NewMember, data: LoadedData, *, whole: bool) -> None:
    """Write model/ with its origin."""
    dataset = data.dataset
    run.origin.update(data=data.fingerprint, streamed=False, left_out=dataset.left_out)
    run.origin.update({files.WHOLE: True} if whole else {})
    checkpoint.save_model(run, member.weights, dataset.signature, dataset.scaler, dataset.limits)
