"""Refuse members of an ensemble that do not predict the same, or were not trained on the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from slipstream import config as configs
from slipstream.data.dataset import Dataset
from slipstream.data.series import Flags
from slipstream.errors import UserError
from slipstream.inference.alignment import match_rows
from slipstream.inference.own_data import has_changed
from slipstream.inference.trained import Member

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
        one, other = first.trained.signature, member.trained.signature
        facts: list[tuple[str, Any, Any]] = [
            ("targets", sorted(one.targets), sorted(other.targets)),
            ("data.horizon", one.horizon, other.horizon),
            ("classes", list(one.classes), list(other.classes)),
        ]
        differing = configs.list_differences(first.config, member.config)
        for name in SAME_SETTINGS:
            if name in differing:
                section, _, key = name.partition(".")
                values = (getattr(getattr(run.config, section), key) for run in (first, member))
                facts.append((name, *map(_format_setting, values)))
        for name, mine, theirs in facts:
            if mine != theirs:
                raise UserError(
                    f"{member.run.folder}: {name} {_be(name)} {theirs}, but {mine} in "
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
    for one, other in pairwise(zip(members, datasets, strict=True)):
        if one[1].memory is not other[1].memory:
            _compare_series(*one, *other)
            _compare_targets(*one, *other)


def _compare_series(first: Member, one: Dataset, member: Member, other: Dataset) -> None:
    """Refuse series that only one has, unless they are too short for the other's windows."""
    for owner, has, lacking, lacks in ((first, one, member, other), (member, other, first, one)):
        rows = dict(zip(has.index.series_names, np.diff(has.index.offsets), strict=True))
        shortest = lacks.signature.lead + lacks.signature.steps_out
        for name in sorted(rows.keys() - set(lacks.index.series_names)):
            if rows[name] >= shortest:
                raise UserError(
                    f'{lacking.run.folder}: was not trained on series "{name}", as '
                    f"{owner.run.folder} was; an ensemble needs the same data"
                )


def _compare_targets(first: Member, one: Dataset, member: Member, other: Dataset) -> None:
    """Refuse targets that differ in a row which both have."""
    assert one.memory is not None
    assert other.memory is not None
    rows = match_rows(one, other)
    both = np.flatnonzero((rows >= 0) & ~_mark_unknown(one) & ~_mark_unknown(other)[rows])
    if not len(both):
        raise UserError(
            f"{member.run.folder}: its data and those of {first.run.folder} have no row in common, "
            "by series and time; an ensemble needs the same data"
        )
    for name in one.signature.targets:
        mine, theirs = (
            _read_target(data, name)[some] for data, some in ((one, both), (other, rows[both]))
        )
        size = 1.0 if one.signature.classes else one.scaler.size[name]
        wrong = np.flatnonzero(~np.isclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE * size))
        if len(wrong):
            at = int(both[wrong[0]])
            owner = int(np.searchsorted(one.index.offsets, at, side="right")) - 1
            row = at - int(one.index.offsets[owner])
            raise UserError(
                f'{member.run.folder}: target "{name}" is {theirs[wrong[0]]:g} in row {row} of '
                f'series "{one.index.series_names[owner]}", but {mine[wrong[0]]:g} in '
                f"{first.run.folder}; {len(wrong):,} of {len(both):,} rows differ, and an ensemble "
                "needs the same data"
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
    column = dataset.memory.series.targets[:, dataset.signature.targets.index(name)]
    values = column.double().numpy()
    if dataset.signature.classes:
        return values
    return values * dataset.scaler.size[name] + dataset.scaler.shift[name]
