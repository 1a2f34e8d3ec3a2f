"""How well classes are told apart, accumulated on the device over every window.

Counts are exact. What needs every answer (AUC, calibration, resampling, the most wrong) is worked
out on the host in the end, from all of them or, of very many, from an even sample.

Shapes: B windows, H predicted rows, Q classes, S series.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.scoring import bootstrap
from slipstream.scoring.bootstrap import Answers, Array

NAMES = ("accuracy", "balanced_accuracy", "f1_macro", "log_loss", "auc", "ece")
MOST_KEPT = 20_000_000
"""Probabilities that are kept of one set; of more, those of an even sample of windows"""
HITS, LABELS, GUESSES = range(3)


class Kept(NamedTuple):
    """Some windows' answers, on the host: those of many models may be more than a GPU holds."""

    likely: Tensor
    """[B, H, Q]: logarithms of the probabilities"""
    number: Tensor
    """[B, H]: the labels"""
    start: Tensor
    """[B]: first rows, among all"""
    owner: Tensor
    """[B]: which series"""


@dataclass(frozen=True)
class ClassTally:
    """Running counts of one set's answers, and the answers themselves."""

    confusion: Tensor
    """[Q, Q]: labels down, guesses across"""
    by_place: Tensor
    """[H, 3, Q]: hits, labels and guesses"""
    by_series: Tensor
    """[S, 3, Q]"""
    loss_by_place: Tensor
    """[H] float64: summed"""
    loss_by_series: Tensor
    """[S]"""
    every: int
    """One window in so many is kept"""
    kept: list[Kept] = field(default_factory=list)

    def add(self, logits: Tensor, number: Tensor, start: Tensor, series: Tensor) -> None:
        """Take in logits [B, H, Q], labels [B, H], and windows' first rows and series, [B]."""
        likely = torch.log_softmax(logits.float(), dim=-1)
        guess, places, size = likely.argmax(dim=-1), number.shape[1], likely.shape[-1]
        loss = -likely.gather(-1, number[..., None])[..., 0].double()
        one = torch.ones_like(number)
        self.confusion.view(-1).index_add_(0, (number * size + guess).flatten(), one.flatten())
        place = torch.arange(places, device=number.device).expand_as(number)
        owner = series[:, None].expand_as(number)
        for sums, group in ((self.by_place, place), (self.by_series, owner)):
            flat = sums.view(-1)
            first = group * 3 * size
            hit = (guess == number).long()
            flat.index_add_(0, (first + HITS * size + number).flatten(), hit.flatten())
            flat.index_add_(0, (first + LABELS * size + number).flatten(), one.flatten())
            flat.index_add_(0, (first + GUESSES * size + guess).flatten(), one.flatten())
        self.loss_by_place.add_(loss.sum(dim=0))
        self.loss_by_series.index_add_(0, series, loss.sum(dim=1))
        some = slice(None, None, self.every)
        given = likely[some], number[some], start[some], series[some]
        self.kept.append(Kept(*(tensor.cpu() for tensor in given)))


def start(
    *, classes: int, steps: int, series: int, windows: int, device: torch.device
) -> ClassTally:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return ClassTally(
        confusion=zeros(classes, classes),
        by_place=zeros(steps, 3, classes),
        by_series=zeros(series, 3, classes),
        loss_by_place=zeros(steps, dtype=torch.float64),
        loss_by_series=zeros(series, dtype=torch.float64),
        every=max(-(-windows * steps * classes // MOST_KEPT), 1),
    )


def merged(tallies: Sequence[ClassTally]) -> ClassTally:
    """The counts over several sets of the same classes and series."""
    counts = ("confusion", "by_place", "by_series", "loss_by_place", "loss_by_series")
    summed = {
        name: torch.stack([getattr(tally, name) for tally in tallies]).sum(dim=0) for name in counts
    }
    return replace(
        tallies[0],
        **summed,
        every=max(tally.every for tally in tallies),
        kept=[kept for tally in tallies for kept in tally.kept],
    )


def read_answers(tally: ClassTally) -> Answers:
    """What was kept."""

    def joined(name: str) -> Array:
        return torch.cat([getattr(kept, name) for kept in tally.kept]).numpy()

    return Answers(joined("likely"), joined("number"), joined("start"), joined("owner"))


def read(tally: ClassTally, *, classes: tuple[str, ...], series: tuple[str, ...]) -> dict[str, Any]:
    """Everything the counts say: overall, per class, per predicted row and per series."""
    found, confusion = read_answers(tally), tally.confusion.cpu().numpy()
    areas, bins = bootstrap.areas(found), bootstrap.reliability(found)
    by_class = _by_class(_counts(confusion))
    by_place, by_series = tally.by_place.cpu().numpy(), tally.by_series.cpu().numpy()
    place_loss, series_loss = tally.loss_by_place.tolist(), tally.loss_by_series.tolist()
    overall = counted(tally)
    overall["auc"] = bootstrap.mean_area(areas)
    overall["ece"] = bootstrap.expected_error(bins)
    return {
        "overall": {name: overall[name] for name in NAMES},
        "confusion": confusion.tolist(),
        "per_class": {
            name: {key: float(values[i]) for key, values in by_class.items()}
            | {"auc": float(areas[i]), "count": int(confusion[i].sum())}
            for i, name in enumerate(classes)
        },
        "reliability": bins,
        "per_step": [_overall(by_place[h], loss) for h, loss in enumerate(place_loss)],
        "per_series": {
            name: _overall(by_series[s], series_loss[s])
            for s, name in enumerate(series)
            if by_series[s, LABELS].any()
        },
    }


def counted(tally: ClassTally) -> dict[str, float]:
    """What counts alone say of all answers, which takes no time."""
    counts = _counts(tally.confusion.cpu().numpy())
    return _overall(counts, sum(tally.loss_by_place.tolist()))


def _counts(confusion: Array) -> Array:
    """Hits, labels and guesses, [3, Q]."""
    return np.stack([np.diagonal(confusion), confusion.sum(axis=1), confusion.sum(axis=0)])


def _overall(counts: Array, loss: float) -> dict[str, float]:
    """From hits, labels and guesses [3, Q], and the summed loss."""
    by_class, total = _by_class(counts), counts[LABELS].sum()
    labelled, named = counts[LABELS] > 0, (counts[LABELS] + counts[GUESSES]) > 0
    return {
        "accuracy": float(counts[HITS].sum() / total),
        "balanced_accuracy": float(by_class["recall"][labelled].mean()),
        "f1_macro": float(by_class["f1"][named].mean()),
        "log_loss": loss / float(total),
    }


def _by_class(counts: Array) -> dict[str, Array]:
    """Recall and precision are 0 where there is nothing to find or nothing was guessed."""
    hits, labels, guesses = counts.astype(np.float64)
    return {
        "precision": hits / np.maximum(guesses, 1),
        "recall": hits / np.maximum(labels, 1),
        "f1": 2 * hits / np.maximum(labels + guesses, 1),
    }
