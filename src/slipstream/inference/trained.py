"""Load a run for predictions, a model or an ensemble of runs, together with its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Option, UserError
from slipstream.config import Config, Signature
from slipstream.data import dataset as datasets
from slipstream.data import windows
from slipstream.data.dataset import Dataset, HostSeries
from slipstream.data.prepare.chain import Replay
from slipstream.data.scaler import Scaler
from slipstream.data.windows import Series
from slipstream.engine.plan import Plan
from slipstream.engine.planning import make_plan
from slipstream.inference import portable
from slipstream.inference.mixture import describe_left_out, join_datasets
from slipstream.inference.portable import FoldMixture, load_changed_config
from slipstream.inference.rows import read_new_rows
from slipstream.models import custom, files
from slipstream.models.files import read_limits
from slipstream.models.losses import select_point
from slipstream.runs import Run
from slipstream.runs.lanes import ENSEMBLE, MODEL
from slipstream.scoring.baselines import fit_baselines, load_baselines
from slipstream.scoring.batch import Baseline, ChunkLoader, Predictor
from slipstream.scoring.ensemble import (
    FoldPredictor,
    RunPredictors,
    average_predictors,
    load_predictors,
    to_half_widths,
)


def read_own_data(
    config: Config,
    trained: RunPredictors,
    replay: Replay,
    table: Any = None,
    *,
    whole: bool = False,
) -> Dataset:
    """Load the data of a run, or the table that it was trained on; `whole` where it was trained on
    the rows of all sets."""
    # a run that started from an encoder has the encoder's scaler, which is not fitted again
    known = trained.scaler.select(trained.signature.inputs) if config.train.init_from else None
    return datasets.load_dataset(config, table, known=known, replay=replay, whole=whole)


def verify_own_data(
    run: Run, config: Config, trained: RunPredictors, dataset: Dataset, table: Any = None
) -> Dataset:
    """Refuse data that the model's scaler or classes no longer fit, and note other changes."""
    signature, scaler = trained.signature, trained.scaler
    if dataset.signature.classes != signature.classes:
        raise UserError(
            "the data of this run have changed since training: the classes now are "
            f"{', '.join(dataset.signature.classes[:20])}, then "
            f"{', '.join(signature.classes[:20])}; to score the model on them as new data, "
            "pass them with " + Option("data")
        )
    if any(dataset.left_out.values()) and "left_out" not in files.read_origin(run):
        note = (
            "windows without a target are left out, which was not so when this run was trained: "
            "its sets are not quite those of training"
        )
        replay = Replay(files.read_limits(run))
        dataset = datasets.load_dataset(config, table, known=scaler, replay=replay)
        return replace(dataset, notes=(*dataset.notes, note))
    for name, shift in scaler.shift.items():
        now = dataset.scaler.shift.get(name, math.nan), dataset.scaler.size.get(name, math.nan)
        was = shift, scaler.size[name]
        if not all(
            math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6 * scaler.size[name])
            for a, b in zip(now, was, strict=True)
        ):
            raise UserError(
                f'the data of this run have changed since training: column "{name}" now has '
                f"centre {now[0]:g} and size {now[1]:g}, then {was[0]:g} and {was[1]:g}; to score "
                "the model on them as new data, pass them with " + Option("data")
            )
    if not scaler.scales_alike(dataset.scaler):
        raise UserError(
            "the data of this run have changed since training: its series are others, or have "
            'another scale (data.scale_by = "series"); to score the model on them as new data, '
            "pass them with " + Option("data")
        )
    if has_changed(run, config, dataset):
        note = (
            "the data of this run have changed since training, though its inputs are scaled as "
            "they were; these metrics are of the data as they are now"
        )
        return replace(dataset, notes=(*dataset.notes, note))
    return dataset


def has_changed(run: Run, config: Config, dataset: Dataset) -> bool:
    """Return whether the data's fingerprint differs from the training data's; False where the two
    are not comparable, because windows or streaming differ."""
    origin = files.read_origin(run)
    changed = configs.list_differences(files.load_run_config(run), config)
    same_windows = not any(
        name.startswith("data.") and name not in ("data.path", "data.labels") for name in changed
    )
    same_kind = origin.get("streamed") == (dataset.stream is not None)
    return same_windows and same_kind and origin["data"] != dataset.compute_fingerprint()


def load_new_data(
    config: Config,
    signature: Signature,
    scaler: Scaler,
    source: Any,
    *,
    targets: bool,
    resample: bool = False,
    replay: Replay | None = None,
) -> Dataset:
    """Load new data, a path or a table, as one set named "all"; see `read_new_rows`."""
    rows = read_new_rows(
        config, signature, scaler, source, targets=targets, resample=resample, replay=replay
    )
    series = windows.build_series(*rows.scaled, rows.index.offsets, signature, rows.index.segments)
    return Dataset(
        signature=signature,
        scaler=scaler,
        index=rows.index,
        num_windows={"all": len(rows.starts)},
        left_out={"all": rows.left_out},
        period=config.data.period or rows.index.infer_period(),
        notes=rows.notes,
        memory=HostSeries(series, {"all": torch.from_numpy(rows.starts)}, rows.raw.time),
    )


@dataclass(frozen=True)
class Member:
    """A trained run; an ordinary run is the only member of itself."""

    name: str
    run: Run
    config: Config
    plan: Plan
    trained: RunPredictors

    def load_new(
        self,
        data: Any,
        *,
        targets: bool,
        resample: bool,
        joins: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Load new data; `joins` are tables to join instead of the config's."""
        trained = self.trained
        return load_new_data(
            self.config,
            trained.signature,
            trained.scaler,
            data,
            targets=targets,
            resample=resample,
            replay=Replay(read_limits(self.run), joins or {}),
        )


def load_member(
    run: Run,
    name: str,
    config: Config,
    *,
    overrides: Collection[str],
    ensemble: bool | None = None,
    allow_code: bool,
) -> Member:
    """Load a run's model or the ensemble of its repeats."""
    plan = make_plan(config, data_bytes=0, training=False)
    custom.require_permission(run.folder, overrides=overrides, allow_code=allow_code)
    return Member(name, run, config, plan, load_predictors(run, config, plan, ensemble=ensemble))


def load_own_sets(members: Sequence[Member], table: Any = None) -> list[Dataset]:
    """Load the training data of each member; members with the same settings share one data set."""
    loaded: dict[str, Dataset] = {}
    result = []
    for member in members:
        trained, key = member.trained, member.config.data.model_dump_json()
        whole = bool(files.read_origin(member.run).get(files.WHOLE))
        key += files.WHOLE * whole
        if member.config.train.init_from:  # scaled as its encoder's data were
            key = str(member.run.folder)
        if key not in loaded:
            replay = Replay(read_limits(member.run))
            loaded[key] = read_own_data(member.config, trained, replay, table, whole=whole)
        outputs = {name: getattr(trained.signature, name) for name in ("quantiles", "output_range")}
        signature = loaded[key].signature.model_copy(update=outputs)
        dataset = replace(loaded[key], signature=signature)
        if dataset.memory is None and len(members) > 1:
            raise UserError(
                f"{member.run.folder}: its data are streamed, but an ensemble needs them in "
                "memory; pass " + Option("set", "engine.home=host")
            )
        result.append(verify_own_data(member.run, member.config, trained, dataset, table))
    return result


class BoundRun(NamedTuple):
    """The predictors of a run for the windows of one data set."""

    dataset: Dataset
    folds: list[FoldPredictor]
    """One predictor for every fold; the last one is for new data"""
    members: list[list[Predictor]]
    """By fold, the predictors of an ensemble's members"""


@dataclass(frozen=True)
class TrainedRun:
    """A run that predicts: one member, or the weighted members of an ensemble."""

    run: Run
    owner: str
    """The relation of the model to the run, such as a search's best trial; "" for its own model"""
    members: list[Member]
    reference: int = 0
    """The member that defines the windows and the scaling of the predictions"""
    mixtures: tuple[FoldMixture, ...] = ()
    """The weights of an ensemble in every fold; empty for a single run"""
    uses: str = ENSEMBLE

    @property
    def first(self) -> Member:
        """The reference member."""
        return self.members[self.reference]

    def describe(self, *, on_folds: bool) -> str:
        """Describe the predictor, for new data or fold by fold."""
        if not self.mixtures:
            trained = self.first.trained
            by_fold = f"{trained.description}, fold by fold"
            predictor = by_fold if on_folds else trained.describe_on_new_data()
            return runs.describe_model(predictor, self.owner)
        rule = "weighted mean" if self.uses == ENSEMBLE else "best"
        text = f"the {rule} of {len(self.members)} models" + (", fold by fold" if on_folds else "")
        return runs.describe_model(text, self.untested)

    @property
    def untested(self) -> str:
        """Whose error the run is expected to have where it was trained on all rows; else empty."""
        return runs.describe_untested(self.run.folder)

    def bind(self, datasets: Sequence[Dataset], sets: Sequence[str]) -> BoundRun:
        """Combine the run with each member's data; an ensemble predicts the windows that all
        members have."""
        if not self.mixtures:
            return BoundRun(datasets[0], self.first.trained.folds, [])
        dataset, members = bind_members(self.members, datasets, self.reference)
        dataset = note_left_out(self.members, datasets, dataset, self.reference, sets)
        scaler, targets = self.first.trained.scaler, dataset.signature.targets
        folds = []
        for mixed, predictors in zip(self.mixtures, members, strict=True):
            half_widths = to_half_widths(mixed.reach[self.uses], scaler, targets)
            predict = predictors[mixed.best]
            if self.uses == ENSEMBLE:
                predict = average_predictors(predictors, dataset.signature, mixed.weights)
            folds.append(FoldPredictor(predict, half_widths))
        return BoundRun(dataset, folds, members)


def load_trained(
    run: str | Path,
    *,
    overrides: Collection[str],
    own_data: bool = False,
    targets: bool = False,
    ensemble: bool | None,
    allow_code: bool,
) -> TrainedRun:
    """Load a run; `ensemble` chooses between the mean and the best of repeats or members."""

    def load(member: Run, name: str, ensemble: bool | None = None) -> Member:
        config = load_changed_config(member, overrides, own_data=own_data, targets=targets)
        options: dict[str, Any] = {"overrides": overrides, "allow_code": allow_code}
        return load_member(member, name, config, ensemble=ensemble, **options)

    opened, owner = runs.find_model_run(runs.open_run(run))
    content = portable.read_mixture(opened)
    if content is None:
        return TrainedRun(opened, owner, [load(opened, opened.folder.name, ensemble)])
    folder = opened.folder / portable.MEMBERS
    members = [
        load(Run(folder / str(number)), entry["name"])
        for number, entry in enumerate(content["members"], start=1)
    ]
    uses = MODEL if ensemble is False else ENSEMBLE
    return TrainedRun(opened, owner, members, content["reference"], tuple(content["folds"]), uses)


def note_left_out(
    members: Sequence[Member],
    datasets: Sequence[Dataset],
    joint: Dataset,
    reference: int,
    sets: Sequence[str],
) -> Dataset:
    """Return the data set with the notes of all members, and notes on left out windows."""
    notes = list(datasets[reference].notes)
    for member, dataset in zip(members, datasets, strict=True):
        notes += [f"{member.name}: {note}" for note in dataset.notes if note not in notes]
    notes += describe_left_out(datasets[reference], joint, sets)
    return replace(joint, notes=tuple(notes))


def bind_members(
    members: Sequence[Member], datasets: Sequence[Dataset], reference: int
) -> tuple[Dataset, list[list[Predictor]]]:
    """Return the reference's data set with the windows that all members have, and by fold the
    members' predictors for these windows, in the reference's scaling."""
    dataset, starts = join_datasets(datasets, reference)
    quantiles = {member.trained.signature.quantiles for member in members}
    ranges = {member.trained.signature.output_range for member in members}
    common = {
        "quantiles": quantiles.pop() if len(quantiles) == 1 else (),
        "output_range": ranges.pop() if len(ranges) == 1 else None,
    }
    signature = dataset.signature.model_copy(update=common)
    dataset = replace(dataset, signature=signature)
    device = members[reference].plan.device
    placed: dict[int, Series] = {}
    folds: list[list[Predictor]] = [[] for _ in members[reference].trained.folds]
    for member, member_data, lookup in zip(members, datasets, starts, strict=True):
        assert member_data.memory is not None
        series = member_data.memory.series
        placed.setdefault(id(series), series.to(member.plan.device))
        convert = _make_converter(member_data, dataset)
        for fold, predictors in zip(member.trained.folds, folds, strict=True):
            source = _MemberWindows(placed[id(series)], lookup.to(device))
            predictors.append(_translate(fold.predict, source, convert))
    return dataset, folds


Converter = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""From a member's predictions, the scales of its windows and those of the same windows of the joint
data set (`Series.find_target_scales`) to predictions of the joint data set"""


class _MemberWindows(NamedTuple):
    """A member's own series, and where its windows start."""

    series: Series
    starts: Tensor
    """The member's window start for each row where the reference's window starts"""


def _translate(predict: Predictor, source: _MemberWindows, convert: Converter) -> Predictor:
    """Return the predictor for windows of the reference."""

    def predict_joint(series: Series, starts: Tensor) -> Tensor:
        member_starts = source.starts[starts].to(source.series.values.device)
        raw = predict(source.series, member_starts).to(starts.device)
        scales = source.series.find_target_scales(member_starts), series.find_target_scales(starts)
        return convert(raw, *scales)

    return predict_joint


def _make_converter(member_data: Dataset, joint: Dataset) -> Converter:
    """Return a function from a member's predictions to those of the joint data set: the order of
    targets, their scaling, quantiles and channels."""
    of, to = member_data.signature, joint.signature
    if to.classes:
        return lambda raw, _, __: raw  # numbered alike, and never independent channels
    order = [of.targets.index(name) for name in to.targets]
    sizes = [member_data.scaler.size[name] / joint.scaler.size[name] for name in to.targets]
    shifts = [
        (member_data.scaler.shift[name] - joint.scaler.shift[name]) / joint.scaler.size[name]
        for name in to.targets
    ]
    same_scale = all(size == 1 and not shift for size, shift in zip(sizes, shifts, strict=True))

    def convert(raw: Tensor, scales: Tensor | None, joint_scales: Tensor | None) -> Tensor:
        values = windows.merge_channels(raw, of.sequences_per_window)
        if scales is not None:
            factor, offset = scales[..., None].to(values.device)
            values = values * factor + offset
        if of.quantiles != to.quantiles:
            values = select_point(values, of.quantiles)[..., None]
        values = values[:, :, order]
        if not same_scale:
            values = values * values.new_tensor(sizes)[:, None]
            values = values + values.new_tensor(shifts)[:, None]
        if joint_scales is not None:
            factor, offset = joint_scales[..., None].to(values.device)
            values = (values - offset) / factor
        return windows.separate_channels(values, to.sequences_per_window)

    return convert


def find_baselines(
    trained: TrainedRun,
    folds: Sequence[Dataset],
    loaders: Sequence[ChunkLoader],
    device: torch.device,
) -> tuple[list[dict[str, Baseline]], list[str]]:
    """Return the baselines for each of these folds, and notes on missing ones.

    Stopped runs and runs of version 0.1 have saved no baselines. These are fitted to the folds if
    the folds are the run's own data, else to the run's data if it can be read.
    """
    saved = load_baselines(trained.run, folds[-1].signature, device)
    if saved is not None:
        return saved[-len(folds) :], []
    if "train" in folds[-1].num_windows:
        pairs = zip(folds, loaders, strict=True)
        return [fit_baselines(fold, load) for fold, load in pairs], []
    try:
        (dataset,) = load_own_sets([trained.first])
    except UserError as error:
        return [{}], [f"no baselines: the run has saved none, and its data are needed ({error})"]
    last = dataset.select_fold(dataset.folds[-1]) if dataset.folds else dataset
    series = None if last.memory is None else last.memory.series.to(device)
    rows = trained.first.config.engine.buffer_rows
    return [fit_baselines(last, lambda set_name: last.iter_chunks(set_name, series, rows=rows))], []
