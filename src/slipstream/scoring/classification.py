"""Metrics of predicted classes.

Counts are exact and stay on the device. What needs every answer (AUC, calibration, the bootstrap,
the worst mistakes) is computed on the host at the end, from all answers or, of very many, from an
even sample. Shapes: B windows, H predicted rows, Q classes, S series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.base import statistics
from slipstream.base.statistics import PairedComparison, compare_predictors
from slipstream.data.dataset import Dataset
from slipstream.data.predictions import list_class_columns
from slipstream.runs.summary import ClassComparison, SetDetail
from slipstream.scoring import answers
from slipstream.scoring.answers import Array, ClassAnswers
from slipstream.scoring.batch import HalfWidths, PredictionBatch, add_by_group

NAMES = ("accuracy", "balanced_accuracy", "f1_macro", "log_loss", "auc", "ece")
HEADLINE = "log_loss"
AGAINST_MAJORITY = ("log_loss", "balanced_accuracy")
MAX_RETAINED = 20_000_000
"""The number of probabilities retained of one set; of more, an even sample of windows is
retained"""
HITS, LABELS, GUESSES = range(3)
MAX_WORST, MAX_PLOTTED = 20, 6
"""The number of wrong windows that are listed, and of those listed with their inputs"""
MAX_INPUTS, MAX_ROWS = 6, 240
"""The largest number of columns and rows of the listed inputs"""


@dataclass(frozen=True)
class ClassCounts:
    """Running counts of the answers over one set of windows, and the answers themselves."""

    classes: tuple[str, ...]
    series: tuple[str, ...]
    confusion: Tensor
    """[Q, Q]: labels down, guesses across"""
    by_step: Tensor
    """[H, 3, Q]: hits, labels and guesses"""
    by_series: Tensor
    """[S, 3, Q]"""
    loss_by_step: Tensor
    """[H] float64: summed"""
    loss_by_series: Tensor
    """[S]"""
    stride: int
    """Every `stride`-th window is retained"""
    retained: list[ClassAnswers] = field(default_factory=list)
    """The retained answers, on the host because those of many models may exceed a GPU's memory"""

    @classmethod
    def zeros(
        cls,
        classes: Sequence[str],
        *,
        steps: int,
        series: Sequence[str],
        num_windows: int,
        device: torch.device,
    ) -> ClassCounts:
        """Return empty counts."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            classes=tuple(classes),
            series=tuple(series),
            confusion=zeros(len(classes), len(classes)),
            by_step=zeros(steps, 3, len(classes)),
            by_series=zeros(len(series), 3, len(classes)),
            loss_by_step=zeros(steps, dtype=torch.float64),
            loss_by_series=zeros(len(series), dtype=torch.float64),
            stride=max(-(-num_windows * steps * len(classes) // MAX_RETAINED), 1),
        )

    def update(self, batch: PredictionBatch) -> None:
        """Add a batch of logits."""
        assert batch.truth is not None
        series = batch.find_series()
        starts = batch.starts.to(series.device) + batch.chunk.first_row
        logits, labels = batch.prediction[:, :, 0], batch.truth[..., 0].long()
        self.add(logits, labels, starts, series, batch.runs)

    def add(
        self,
        logits: Tensor,
        labels: Tensor,
        starts: Tensor,
        series: Tensor,
        runs: Sequence[int] | None = None,
    ) -> None:
        """Add logits [B, H, Q], labels [B, H], and the windows' first rows and series, [B], which
        come in `runs`."""
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        guess, size = log_probs.argmax(dim=-1), log_probs.shape[-1]
        loss = -log_probs.gather(-1, labels[..., None])[..., 0].double()
        unit, hit = torch.ones_like(labels), (guess == labels).long()
        self.confusion.view(-1).index_add_(0, (labels * size + guess).flatten(), unit.flatten())
        step = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
        for counts, group in ((self.by_step, step), (self.by_series, series[:, None])):
            flat, first = counts.view(-1), group.expand_as(labels) * 3 * size
            flat.index_add_(0, (first + HITS * size + labels).flatten(), hit.flatten())
            flat.index_add_(0, (first + LABELS * size + labels).flatten(), unit.flatten())
            flat.index_add_(0, (first + GUESSES * size + guess).flatten(), unit.flatten())
        self.loss_by_step.add_(loss.sum(dim=0))
        add_by_group(self.loss_by_series, series, loss.sum(dim=1), runs)
        tensors = (log_probs, labels, starts, series)
        self.retained.append(ClassAnswers(*(t[:: self.stride].cpu().numpy() for t in tensors)))

    def merge(self, later: Sequence[ClassCounts]) -> ClassCounts:
        """Return the counts over this set and later ones of the same classes and series."""
        parts = (self, *later)
        merged: dict[str, Any] = {
            name: torch.stack([getattr(counts, name) for counts in parts]).sum(dim=0)
            for name in ("confusion", "by_step", "by_series", "loss_by_step", "loss_by_series")
        }
        merged["retained"] = [part for counts in parts for part in counts.retained]
        return replace(self, **merged, stride=max(counts.stride for counts in parts))

    def join_answers(self) -> ClassAnswers:
        """Return the retained answers."""
        return answers.join_answers(self.retained)

    def compute(self) -> SetDetail:
        """Return the metrics: overall, per class, per predicted row and per series."""
        retained, confusion = self.join_answers(), self.confusion.cpu().numpy()
        auc, bins = answers.compute_auc(retained), answers.compute_reliability(retained)
        by_class = _compute_by_class(_count_hits(confusion))
        by_step, by_series = self.by_step.cpu().numpy(), self.by_series.cpu().numpy()
        step_loss, series_loss = self.loss_by_step.tolist(), self.loss_by_series.tolist()
        areas = {"auc": answers.average_auc(auc), "ece": answers.compute_ece(bins)}
        return {
            "overall": self.compute_overall() | areas,
            "confusion": confusion.tolist(),
            "per_class": {
                name: {key: float(values[i]) for key, values in by_class.items()}
                | {"auc": float(auc[i]), "count": int(confusion[i].sum())}
                for i, name in enumerate(self.classes)
            },
            "reliability": bins,
            "per_step": [_compute_overall(by_step[h], loss) for h, loss in enumerate(step_loss)],
            "per_series": {
                name: _compute_overall(by_series[s], series_loss[s])
                for s, name in enumerate(self.series)
                if by_series[s, LABELS].any()
            },
        }

    def compute_overall(self) -> dict[str, float]:
        """Return the metrics that follow from the counts alone, which is fast."""
        counts = _count_hits(self.confusion.cpu().numpy())
        return _compute_overall(counts, sum(self.loss_by_step.tolist()))


def _count_hits(confusion: Array) -> Array:
    """Return hits, labels and guesses, [3, Q]."""
    return np.stack([np.diagonal(confusion), confusion.sum(axis=1), confusion.sum(axis=0)])


def _compute_overall(counts: Array, loss: float) -> dict[str, float]:
    """Return metrics from hits, labels and guesses [3, Q] and the summed loss."""
    by_class, total = _compute_by_class(counts), counts[LABELS].sum()
    labelled, named = counts[LABELS] > 0, (counts[LABELS] + counts[GUESSES]) > 0
    return {
        "accuracy": float(counts[HITS].sum() / total),
        "balanced_accuracy": float(by_class["recall"][labelled].mean()),
        "f1_macro": float(by_class["f1"][named].mean()),
        "log_loss": loss / float(total),
    }


def _compute_by_class(counts: Array) -> dict[str, Array]:
    """Return precision, recall and F1, [Q]; 0 for a class without guesses or labels."""
    hits, labels, guesses = counts.astype(np.float64)
    return {
        "precision": hits / np.maximum(guesses, 1),
        "recall": hits / np.maximum(labels, 1),
        "f1": 2 * hits / np.maximum(labels + guesses, 1),
    }


def start_sums(dataset: Dataset, device: torch.device) -> ClassCounts:
    """Return empty counts for the data set's classes."""
    return ClassCounts.zeros(
        dataset.signature.classes,
        steps=dataset.signature.steps_out,
        series=dataset.index.series_names,
        num_windows=max(dataset.num_windows.values()),
        device=device,
    )


def build_columns(
    batch: PredictionBatch, dataset: Dataset, _: HalfWidths | None
) -> Iterator[tuple[str, Any]]:
    """Return the label where it is known, the likeliest class, and the probability of each."""
    probs = torch.softmax(batch.prediction[:, :, 0].float(), dim=-1).flatten(0, 1).cpu().numpy()
    truth = None if batch.truth is None else batch.truth.flatten().cpu().numpy()
    return list_class_columns(probs, dataset.signature.classes, truth)


def compare_with(
    model: ClassCounts, references: Mapping[str, ClassCounts], *, context: int
) -> PairedComparison:
    """Compare the answers of a model with those of the references, window by window."""
    model_units = answers.count_units(model.join_answers())
    units = {
        name: answers.count_units(counts.join_answers()) for name, counts in references.items()
    }
    return compare_predictors(model_units, units, answers.COMPARED, context=context)


def describe_test(
    model: ClassCounts, references: Mapping[str, ClassCounts], dataset: Dataset
) -> tuple[ClassComparison, SetDetail]:
    """Return the intervals, each predictor's difference from the majority class, and the worst
    windows."""
    counts = {"model": model, **references}
    retained = model.join_answers()
    context, majority = dataset.signature.context, {"majority": counts["majority"]}
    resampled = answers.bootstrap(retained, context=context)
    against = {
        name: compare_with(predictor_counts, majority, context=context).differences
        for name, predictor_counts in counts.items()
        if name != "majority"
    }
    summary: ClassComparison = {
        "classes": list(dataset.signature.classes),
        "intervals": {
            "test": {key: resampled.get_interval(key) for key in NAMES},
            "level": statistics.LEVEL,
            "how": resampled.how,
        },
        "against_majority": {
            name: {key: by_metric[key]["majority"] for key in AGAINST_MAJORITY}
            for name, by_metric in against.items()
        },
    }
    return summary, {"worst": list(_describe_worst(retained, dataset))}


def _describe_worst(retained: ClassAnswers, dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yield the wrong windows with the least likely labels, the first few with their inputs."""
    signature, index = dataset.signature, dataset.index
    time = dataset.memory.time if dataset.memory else None
    to_time = (lambda us: str(np.datetime64(int(us), "us"))) if index.has_dates else float
    worst = answers.find_worst(retained, min_distance=signature.context, limit=MAX_WORST)
    for rank, (window, step) in enumerate(worst):
        start, series = int(retained.starts[window]), int(retained.series[window])
        probs = np.exp(retained.log_probs[window, step].astype(np.float64))
        label, guess = int(retained.labels[window, step]), int(probs.argmax())
        row = start + signature.lead + step
        yield {
            "series": index.series_names[series],
            "row": row - int(index.offsets[series]),
            "time": None if time is None else to_time(time[row]),
            "step": step + 1 if signature.horizon else None,
            "label": signature.classes[label],
            "predicted": signature.classes[guess],
            "p_label": float(probs[label]),
            "p_predicted": float(probs[guess]),
            "inputs": _read_inputs(dataset, start) if rank < MAX_PLOTTED else None,
        }


def _read_inputs(dataset: Dataset, start: int) -> dict[str, list[float]] | None:
    """Return a window's first inputs in physical units, thinned if there are very many rows."""
    if dataset.memory is None:
        return None
    signature, scaler = dataset.signature, dataset.scaler
    stride = -(-signature.context // MAX_ROWS)
    rows = slice(start + (signature.context - 1) % stride, start + signature.context, stride)
    series = dataset.memory.series
    places = torch.arange(len(series.inputs))[rows]
    inputs = slice(0, len(signature.inputs))
    values = series.to_table_scale(series.inputs[rows].double(), places, inputs)
    return {
        name: (values[:, i] * scaler.size[name] + scaler.shift[name]).tolist()
        for i, name in enumerate(signature.inputs[:MAX_INPUTS])
    }
