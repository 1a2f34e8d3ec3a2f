"""How well an encoder fills in masked rows, beside what needs no learning; and whether its latents
have collapsed.

Shapes: T context rows, B windows, F inputs, C columns that are judged, M masked rows of a window,
D the encoder's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from slipstream import scoring
from slipstream.config import Pretrain
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series, WindowChunk
from slipstream.engine import objective, recovery, step
from slipstream.engine.plan import Plan
from slipstream.models.noise import masks
from slipstream.scoring import Tally, baselines
from slipstream.scoring.batch import ChunkLoader

MODEL = "model"
BASELINES = {
    "mean": "the column's mean over the training windows",
    "repeat": "the last row that is not masked",
    "interpolate": "a straight line across the mask",
}
COLLAPSED = 0.05
"""Deviation below which a unit of the latent says the same of every window"""
NUM_EXAMPLES = 6


class FilledWindows(NamedTuple):
    """Some windows, filled in."""

    inputs: Tensor
    """[T, B * fold, F]"""
    mask: Tensor
    """[T, B * fold]"""
    rows: dict[str, Tensor]
    """By the model and by each baseline, as the inputs"""
    distance: Tensor
    """[T, B * fold]: rows to the nearest one that is not masked"""
    tokens: Tensor
    """[T / patch, B * fold, D]"""


@dataclass(frozen=True)
class MaskFiller:
    """Fills in masked rows of windows, each with the mask that validation gives it."""

    model: nn.Module
    plan: Plan
    how: Pretrain
    mean: Tensor
    """[F]: of the sequences, over the training windows"""

    def __call__(self, series: Series, starts: Tensor) -> Iterator[FilledWindows]:
        """In one piece, or where memory is short in several."""
        try:
            yield self._filled(series, starts)
            return
        except recovery.MEMORY_ERRORS as error:
            if len(starts) == 1 or not recovery.is_out_of_memory(error):
                raise
        recovery.free_memory()
        for half in starts.chunk(2):
            yield from self(series, half)

    def _filled(self, series: Series, starts: Tensor) -> FilledWindows:
        inputs, _ = windows.gather_inputs(series, starts)
        inputs = inputs.to(self.plan.device)
        mask = masks.mask_windows(self.how, inputs, None)
        with objective.autocast(self.plan):
            rows, tokens = self.model(inputs, mask)
        seen = baselines.find_visible_rows(mask)
        filled = {
            MODEL: rows.float(),
            "mean": self.mean.expand_as(inputs),
            "repeat": baselines.fill_with_last_visible(inputs, seen),
            "interpolate": baselines.fill_by_interpolation(inputs, seen),
        }
        return FilledWindows(inputs, mask, filled, seen.distance, tokens.float())


def compute_training_mean(dataset: Dataset, pieces: ChunkLoader) -> Tensor:
    """Each column's mean over the training windows' first rows, as sequences have them, [F]."""
    total: Tensor | None = None
    for piece in pieces("train"):
        first = piece.series.inputs[piece.starts.to(piece.series.values.device)]
        found = first.double().sum(dim=0).cpu()
        total = found if total is None else total + found
    assert total is not None
    mean = total / dataset.num_windows["train"]
    own = len(mean) - dataset.signature.sequences_per_window
    if (
        dataset.signature.sequences_per_window > 1
    ):  # one sequence's own channel stands for all of them
        mean = torch.cat([mean[:own], mean[own:].mean()[None]])
    return mean.float()


@torch.inference_mode()
def score_masked_rows(
    fill: MaskFiller, dataset: Dataset, pieces: ChunkLoader
) -> tuple[dict[str, Any], pa.Table]:
    """Figures of the validation set's masked rows, and a few windows to look at."""
    signature, device = dataset.signature, fill.plan.device
    columns = signature.inputs if signature.sequences_per_window == 1 else signature.targets
    masked = masks.count_masked_rows(fill.how, signature.context)
    tallies = {
        name: scoring.start(
            size=[dataset.scaler.size[column] for column in columns],
            deviation=[dataset.scaler.deviation[column] for column in columns],
            steps=masked,
            series=len(dataset.index.series_names),
            device=device,
        )
        for name in (MODEL, *BASELINES)
    }
    far = {name: torch.zeros(2, signature.context, dtype=torch.float64) for name in tallies}
    latent, shown = LatentSums(), ExampleCollector(dataset)
    for piece in pieces("val"):
        for starts in piece.starts.split(step.EVAL_BATCH):
            for filled in fill(piece.series, starts.to(piece.series.values.device)):
                some = starts[: filled.inputs.shape[1] // signature.sequences_per_window]
                starts = starts[len(some) :]
                owner = piece.series_ids[
                    piece.series.find_series(some.to(piece.series.offsets.device)).cpu()
                ]
                _count(
                    tallies, far, filled, owner.to(device), signature.sequences_per_window, fill.how
                )
                latent.add(filled.tokens)
                shown.add(filled, some, piece)
    read = {
        name: scoring.read(tally, targets=columns, series=dataset.index.series_names)
        for name, tally in tallies.items()
    }
    figures = {name: _told(read[name], far[name]) for name in tallies}
    return {"figures": figures, "latent": latent.told()}, shown.table()


def _count(
    tallies: Mapping[str, Tally],
    far: Mapping[str, Tensor],
    filled: FilledWindows,
    owner: Tensor,
    fold: int,
    how: Pretrain,
) -> None:
    """Add the masked rows' errors to the sums."""
    places = masks.find_masked_rows(how, filled.mask)  # [M, B * fold]
    distance = filled.distance.gather(0, places)
    truth = _judged(filled.inputs, places, fold)
    for name, rows in filled.rows.items():
        given = _judged(rows, places, fold)
        tallies[name].add(given, truth, owner, None)
        squares = (given - truth).square().double()
        squares = (
            squares.transpose(1, 2).reshape(-1, len(places)) if fold > 1 else squares.mean(dim=2)
        )
        sums = torch.stack([torch.ones_like(squares), squares]).flatten(1).cpu()
        far[name].index_add_(1, distance.T.flatten().cpu() - 1, sums)


def _judged(rows: Tensor, places: Tensor, fold: int) -> Tensor:
    """The masked rows, [B, M, C]: all inputs, or every sequence's own channel."""
    found = masks.gather_rows(rows, places).transpose(0, 1)
    if fold == 1:
        return found
    own: Tensor = found[..., -1].unflatten(0, (-1, fold))
    return own.transpose(1, 2)


def _told(read: dict[str, Any], far: Tensor) -> dict[str, Any]:
    by_distance = [
        {"distance": i + 1, "mse": float(squares / count), "rows": int(count)}
        for i, (count, squares) in enumerate(zip(*far.tolist(), strict=True))
        if count
    ]
    wanted = {"overall", "scaled", "per_series"}
    return {name: read[name] for name in wanted} | {
        "per_column": read["per_target"],
        "by_distance": by_distance,
    }


class LatentSums:
    """How much each unit of the encoder differs from window to window, at the same token."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: Tensor | None = None
        """[2, T / patch, D]: values and squares"""

    def add(self, tokens: Tensor) -> None:
        tokens = tokens.double()
        found = torch.stack([tokens.sum(dim=1), tokens.square().sum(dim=1)])
        self.sums = found if self.sums is None else self.sums + found
        self.count += tokens.shape[1]

    def told(self) -> dict[str, Any]:
        assert self.sums is not None
        mean, squares = self.sums / self.count
        deviation = (squares - mean.square()).clamp(min=0.0).sqrt().mean(dim=0).cpu()
        return {
            "std": [round(value, 6) for value in deviation.tolist()],
            "mean_std": float(deviation.mean()),
            "collapsed": int((deviation < COLLAPSED).sum()),
            "units": len(deviation),
        }


class ExampleCollector:
    """A few windows of the set, evenly spread, in physical units."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.seen = dataset, 0
        count = dataset.num_windows["val"]
        each = min(NUM_EXAMPLES, count)
        self.wanted = {count * (2 * i + 1) // (2 * each) for i in range(each)}
        self.found: list[pa.Table] = []

    def add(self, filled: FilledWindows, starts: Tensor, piece: WindowChunk) -> None:
        for place in range(len(starts)):
            if self.seen + place in self.wanted:
                self.found.append(self._window(filled, place, int(starts[place]), piece))
        self.seen += len(starts)

    def _window(
        self, filled: FilledWindows, place: int, start: int, piece: WindowChunk
    ) -> pa.Table:
        signature, scaler = self.dataset.signature, self.dataset.scaler
        fold, rows = signature.sequences_per_window, signature.context
        first = start + piece.first_row
        offsets = self.dataset.index.offsets
        owner = int(np.searchsorted(offsets, first, side="right") - 1)
        columns: dict[str, Any] = {
            "window": np.full(rows, len(self.found), dtype=np.int32),
            "series": [self.dataset.index.series_names[owner]] * rows,
            "row": first - offsets[owner] + np.arange(rows),
        }
        names = signature.inputs if fold == 1 else signature.targets
        for i, name in enumerate(names):
            if name in columns:  # the places of rows, or what another one was filled in with
                continue
            sequence, column = (place, i) if fold == 1 else (place * fold + i, -1)
            for end, values in (("", filled.inputs), ("_filled", filled.rows[MODEL])):
                scaled = values[:, sequence, column].double().cpu().numpy()
                columns[name + end] = scaled * scaler.size[name] + scaler.shift[name]
            columns[f"{name}_masked"] = filled.mask[:, sequence].cpu().numpy()
        return pa.table(columns)

    def table(self) -> pa.Table:
        return pa.concat_tables(self.found)
