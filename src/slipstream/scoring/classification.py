"""What is told of predicted classes, and the baselines majority and logistic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from slipstream.data import prediction_columns, windows
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series
from slipstream.engine import step
from slipstream.scoring import baselines as simple
from slipstream.scoring import bootstrap
from slipstream.scoring import class_counts as metrics
from slipstream.scoring.batch import Baseline, ChunkLoader, PredictionBatch
from slipstream.scoring.bootstrap import Answers
from slipstream.scoring.class_counts import ClassTally

HEADLINE = "log_loss"
LOGISTIC_WORK, LOGISTIC_PASSES = 2e11, 2000
"""Multiplications that fitting the logistic regression may take, and for each weight and window;
where all windows need more, it sees fewer."""
LOGISTIC_NUMBERS = 2e7
"""Features that it may hold at once"""
LEAST_LIKELY = 1e-7
"""What a class that training never saw is given by the majority baseline"""
COMPARED = ("log_loss", "balanced_accuracy")
MOST_WRONG, MOST_DRAWN = 20, 6
MOST_INPUTS, MOST_ROWS = 6, 240


def begin(dataset: Dataset, chunk: PredictionBatch) -> ClassTally:
    assert chunk.truth is not None
    signature = dataset.signature
    return metrics.start(
        classes=len(signature.classes),
        steps=signature.steps_out,
        series=len(dataset.index.series_names),
        windows=max(dataset.num_windows.values()),
        device=chunk.truth.device,
    )


def add(sums: ClassTally, chunk: PredictionBatch, owner: Tensor, _: tuple[float, ...]) -> None:
    assert chunk.truth is not None
    start = chunk.starts.to(owner.device) + chunk.chunk.first_row
    sums.add(chunk.prediction[:, :, 0], chunk.truth[..., 0].long(), start, owner)


def merged(sums: Sequence[ClassTally]) -> ClassTally:
    return metrics.merged(sums)


def read(sums: ClassTally, dataset: Dataset) -> dict[str, Any]:
    classes, series = dataset.signature.classes, dataset.index.series_names
    return metrics.read(sums, classes=classes, series=series)


def columns(
    chunk: PredictionBatch, dataset: Dataset, _: Mapping[str, Tensor] | None
) -> Iterator[tuple[str, Any]]:
    """The label where it is known, the likeliest class, and the probability of each."""
    names = dataset.signature.classes
    likely = torch.softmax(chunk.prediction[:, :, 0].float(), dim=-1).flatten(0, 1).cpu().numpy()
    if chunk.truth is not None:
        yield prediction_columns.LABEL, _named(chunk.truth.flatten().long().cpu().numpy(), names)
    yield prediction_columns.PREDICTED, _named(likely.argmax(axis=1), names)
    for i, name in enumerate(names):
        yield prediction_columns.name_probability(name), likely[:, i]


def _named(numbers: Any, names: tuple[str, ...]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(numbers.astype(np.int32), list(names)).cast(pa.string())


def certainty(
    test: ClassTally, beside: Mapping[str, ClassTally], dataset: Dataset
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Intervals, how far each is from the majority class, and the most wrong windows."""
    everybody = {"model": test, **beside}
    found = {name: metrics.read_answers(sums) for name, sums in everybody.items()}
    drawn = bootstrap.resampled(found, rows=dataset.signature.context)
    overall = {name: metrics.counted(sums) for name, sums in everybody.items()}
    against = {
        name: {
            key: {
                "difference": overall[name][key] - overall["majority"][key],
                "interval": drawn.interval(name, key, beyond="majority"),
            }
            for key in COMPARED
        }
        for name in overall
        if name != "majority"
    }
    summary = {
        "classes": list(dataset.signature.classes),
        "intervals": {
            "test": {key: drawn.interval("model", key) for key in metrics.NAMES},
            "level": bootstrap.LEVEL,
            "how": drawn.how,
            "enough": drawn.enough,
        },
        "against_majority": against,
    }
    return summary, {"worst": list(_worst(found["model"], dataset))}


def _worst(found: Answers, dataset: Dataset) -> Iterator[dict[str, Any]]:
    """The windows whose label was held least likely; the first of them with what they hold."""
    signature, layout = dataset.signature, dataset.index
    picked = bootstrap.worst(found, apart=signature.context, most=MOST_WRONG)
    for place, (window, at) in enumerate(picked):
        start, owner = int(found.start[window]), int(found.owner[window])
        likely = np.exp(found.likely[window, at].astype(np.float64))
        label, guess = int(found.number[window, at]), int(likely.argmax())
        row = start + signature.lead + at
        time = dataset.memory.time if dataset.memory else None
        yield {
            "series": layout.series_names[owner],
            "row": row - int(layout.offsets[owner]),
            "time": None if time is None else _moment(time[row], dated=layout.has_dates),
            "step": at + 1 if signature.horizon else None,
            "label": signature.classes[label],
            "predicted": signature.classes[guess],
            "p_label": float(likely[label]),
            "p_predicted": float(likely[guess]),
            "inputs": _inputs(dataset, start) if place < MOST_DRAWN else None,
        }


def _moment(time: Any, *, dated: bool) -> str | float:
    return str(np.datetime64(int(time), "us")) if dated else float(time)


def _inputs(dataset: Dataset, start: int) -> dict[str, list[float]] | None:
    """A window's first inputs in physical units, thinned where there are very many rows."""
    if dataset.memory is None:
        return None
    signature, scaler = dataset.signature, dataset.scaler
    every = -(-signature.context // MOST_ROWS)
    rows = slice(start + (signature.context - 1) % every, start + signature.context, every)
    values = dataset.memory.series.inputs[rows].double()
    return {
        name: (values[:, i] * scaler.size[name] + scaler.shift[name]).tolist()
        for i, name in enumerate(signature.inputs[:MOST_INPUTS])
    }


def baselines(dataset: Dataset, pieces: ChunkLoader) -> dict[str, Baseline]:
    counts = torch.zeros(len(dataset.signature.classes), dtype=torch.int64)
    for _, numbers in _batches(pieces, "train", 1):
        counts += torch.bincount(numbers.flatten().cpu(), minlength=len(counts))
    return {"majority": _majority(dataset, counts), "logistic": _logistic(dataset, pieces)}


def _majority(dataset: Dataset, counts: Tensor) -> Baseline:
    likely = (counts / counts.sum()).clamp(min=LEAST_LIKELY).log().float()
    most = dataset.signature.classes[int(counts.argmax())]
    steps = dataset.signature.steps_out
    return Baseline(
        f'always "{most}", each class as likely as in training',
        lambda _, starts: likely.to(starts.device).expand(len(starts), steps, 1, -1),
    )


def _logistic(dataset: Dataset, pieces: ChunkLoader) -> Baseline:
    signature = dataset.signature
    features = len(simple.STATISTICS) * len(signature.inputs) + len(signature.static)
    outputs = signature.steps_out * len(signature.classes)
    work = LOGISTIC_WORK / (LOGISTIC_PASSES * features * outputs)
    most = max(int(min(work, LOGISTIC_NUMBERS / features)), step.EVAL_BATCH)
    every = -(-dataset.num_windows["train"] // most)
    fitted = simple.fit_logistic(
        (_joined(_batches(pieces, which, every)) for which in ("train", "val")),
        classes=len(signature.classes),
    )

    def predict(series: Series, starts: Tensor) -> Tensor:
        found = simple.compute_statistics(*windows.gather_inputs(series, starts))
        return fitted.predict(found).view(len(starts), signature.steps_out, 1, -1)

    seen = "every training window" if every == 1 else f"one training window in {every}"
    return Baseline(f"logistic regression on the window's statistics, from {seen}", predict)


def _batches(pieces: ChunkLoader, which: str, every: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Statistics [B, D] and labels [B, H] of a set's windows, or of one in so many."""
    for piece in pieces(which):
        for some in piece.starts[::every].split(step.EVAL_BATCH):
            here = some.to(piece.series.values.device)
            batch = windows.gather(piece.series, here)
            yield (
                simple.compute_statistics(batch.inputs, batch.static),
                batch.targets[..., 0].long(),
            )


def _joined(batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    features, numbers = zip(*batches, strict=True)
    return torch.cat(features), torch.cat(numbers)
