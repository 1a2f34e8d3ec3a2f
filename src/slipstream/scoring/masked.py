"""Score an encoder by the masked rows that it fills in, beside simple ways to fill them in.

Shapes: T context rows, B windows, F inputs, C columns that are scored, M masked rows of a window,
D the encoder's width. With independent channels a window is several sequences, side by side.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from slipstream.base.statistics import PairedComparison
from slipstream.config import Pretrain
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.table import open_table_writer
from slipstream.data.windows import Series, WindowChunk
from slipstream.engine import objective
from slipstream.engine.context import RunContext
from slipstream.engine.plan import Plan
from slipstream.engine.step import EVAL_BATCH
from slipstream.events import Scoring
from slipstream.models import noise
from slipstream.runs.summary import BaselineScores, LatentSummary, RunSummary, SetDetail
from slipstream.scoring import regression, summary
from slipstream.scoring.batch import ChunkLoader
from slipstream.scoring.predict import split_if_full
from slipstream.scoring.regression import RegressionSums

MODEL = "model"
BASELINES = {
    "mean": "the column's mean over the training windows",
    "repeat": "the last row that is not masked",
    "interpolate": "a straight line across the mask",
}
COLLAPSED = 0.05
"""A unit of the latent with a smaller deviation is the same for every window"""
NUM_EXAMPLES = 6
"""The number of windows that are saved as examples"""
EXAMPLES = "reconstructions.parquet"


class VisibleRows(NamedTuple):
    """For each row of windows, [T, B], the nearest rows that are not masked."""

    before: Tensor
    """The nearest visible row at or before the row; -1 where there is none"""
    after: Tensor
    """The nearest visible row at or after the row; T where there is none"""
    distance: Tensor
    """The distance to the nearer of the two rows; 0 for a visible row"""


def find_visible_rows(mask: Tensor) -> VisibleRows:
    """Find the rows that masked rows [T, B] can be filled in from."""
    rows = len(mask)
    row = torch.arange(rows, device=mask.device)[:, None].expand_as(mask)
    before = row.masked_fill(mask, -1).cummax(dim=0).values
    after = row.masked_fill(mask, rows).flip(0).cummin(dim=0).values.flip(0)
    back = (row - before).masked_fill(before < 0, rows)
    ahead = (after - row).masked_fill(after == rows, rows)
    return VisibleRows(before, after, torch.minimum(back, ahead))


def fill_with_last_visible(inputs: Tensor, visible: VisibleRows) -> Tensor:
    """Return each row [T, B, F] replaced by the last visible one; rows before the first visible row
    by that row."""
    return _gather(inputs, torch.where(visible.before < 0, visible.after, visible.before))


def fill_by_interpolation(inputs: Tensor, visible: VisibleRows) -> Tensor:
    """Return each row interpolated linearly between the visible rows around it."""
    rows = len(inputs)
    left = torch.where(visible.before < 0, visible.after, visible.before)
    right = torch.where(visible.after == rows, visible.before, visible.after)
    row = torch.arange(rows, device=inputs.device)[:, None]
    share = (row - left) / (right - left).clamp(min=1)
    first, second = _gather(inputs, left), _gather(inputs, right)
    return first + (second - first) * share[..., None]


def _gather(inputs: Tensor, index: Tensor) -> Tensor:
    return inputs.gather(0, index[..., None].expand_as(inputs))


class FilledWindows(NamedTuple):
    """Windows with their masked rows filled in."""

    starts: Tensor
    """[B]"""
    inputs: Tensor
    """[T, sequences, F]"""
    mask: Tensor
    """[T, sequences]"""
    rows: dict[str, Tensor]
    """The rows as filled in by the model and by each baseline, in the shape of the inputs"""
    distance: Tensor
    """[T, sequences]: distance to the nearest visible row"""
    tokens: Tensor
    """[T / patch, sequences, D]"""


@dataclass(frozen=True)
class MaskFiller:
    """Fills in the masked rows of windows; each window has a fixed mask, as in validation."""

    model: nn.Module
    plan: Plan
    pretrain: Pretrain
    mean: Tensor
    """[F]: mean of the sequences over the training windows"""

    def fill(self, series: Series, starts: Tensor) -> FilledWindows:
        inputs, _ = windows.gather_inputs(series, starts)
        inputs = inputs.to(self.plan.device)
        mask = noise.mask_windows(self.pretrain, inputs, None)
        with objective.autocast(self.plan):
            rows, tokens = self.model(inputs, mask)
        visible = find_visible_rows(mask)
        filled = {
            MODEL: rows.float(),
            "mean": self.mean.expand_as(inputs),
            "repeat": fill_with_last_visible(inputs, visible),
            "interpolate": fill_by_interpolation(inputs, visible),
        }
        return FilledWindows(starts, inputs, mask, filled, visible.distance, tokens.float())

    def fill_chunk(self, chunk: WindowChunk) -> Iterator[FilledWindows]:
        """Fill in every window of the chunk, in smaller batches where memory is short."""
        for batch_starts in chunk.starts.split(EVAL_BATCH):
            starts = batch_starts.to(chunk.series.values.device)
            yield from split_if_full(lambda part: self.fill(chunk.series, part), starts)


def compute_training_mean(dataset: Dataset, load_chunks: ChunkLoader) -> Tensor:
    """Return each column's mean over the training windows' first rows, as sequences have them."""
    total = torch.zeros((), dtype=torch.float64)
    for chunk in load_chunks("train"):
        first = chunk.series.inputs[chunk.starts.to(chunk.series.values.device)]
        total = total + first.double().sum(dim=0).cpu()
    mean = total / dataset.num_windows["train"]
    channels = dataset.signature.sequences_per_window
    if channels > 1:  # one sequence's own channel stands for all of them
        shared = len(mean) - channels
        mean = torch.cat([mean[:shared], mean[shared:].mean()[None]])
    return mean.float()


class MaskedScores(NamedTuple):
    """The scores of filled-in rows."""

    metrics: dict[str, SetDetail]
    """The metrics of the model and of each baseline"""
    comparison: PairedComparison
    """The comparison of the model with the baselines"""
    latent: LatentSummary
    examples: pa.Table
    """A table of a few windows"""


@torch.inference_mode()
def score_masked_rows(
    filler: MaskFiller, dataset: Dataset, load_chunks: ChunkLoader
) -> MaskedScores:
    """Score the validation set's masked rows by the model and by each baseline."""
    scores = {name: MaskedSums(filler, dataset) for name in (MODEL, *BASELINES)}
    latent, examples = LatentSums(), ExampleCollector(dataset)
    for chunk in load_chunks("val"):
        for filled in filler.fill_chunk(chunk):
            local = chunk.series.find_series(filled.starts).cpu()
            series = chunk.series_ids[local].to(filler.plan.device)
            starts = filled.starts.to(series.device) + chunk.first_row
            for name, sums in scores.items():
                sums.update(filled, filled.rows[name], starts, series, chunk.series)
            latent.update(filled.tokens)
            examples.add(filled, chunk)
    metrics = {name: sums.compute() for name, sums in scores.items()}
    model, *baseline_sums = (sums.sums for sums in scores.values())
    comparison = regression.compare_with(
        model, dict(zip(BASELINES, baseline_sums, strict=True)), context=dataset.signature.context
    )
    return MaskedScores(metrics, comparison, latent.compute(), examples.to_table())


class MaskedSums:
    """Sums of the errors of masked rows, also by their distance to the nearest visible row."""

    def __init__(self, filler: MaskFiller, dataset: Dataset) -> None:
        signature = dataset.signature
        self.pretrain, self.channels = filler.pretrain, signature.sequences_per_window
        self.sums = RegressionSums.zeros(
            signature.inputs if self.channels == 1 else signature.targets,
            dataset.scaler,
            steps=noise.count_masked_rows(filler.pretrain, signature.context),
            series=dataset.index.series_names,
            device=filler.plan.device,
        )
        self.by_distance = torch.zeros(2, signature.context, dtype=torch.float64)
        """Number and squared errors of the masked rows, by distance"""

    def update(
        self, filled: FilledWindows, rows: Tensor, starts: Tensor, series: Tensor, source: Series
    ) -> None:
        """Add the errors of masked rows as they are in `rows`, of windows of `source`."""
        masked_rows = noise.find_masked_rows(self.pretrain, filled.mask)  # [M, sequences]
        point, truth = (self._select(values, masked_rows) for values in (rows, filled.inputs))
        scales = find_column_scales(source, filled.starts, len(self.sums.columns))
        if scales is None:
            self.sums.add(point, truth, starts, series)
        else:
            factor, offset = scales.to(point.device)
            self.sums.add(point * factor + offset, truth * factor + offset, starts, series)
        squares = (point - truth).square().double()
        independent = self.channels > 1
        squares = squares.transpose(1, 2).flatten(0, 1) if independent else squares.mean(dim=2)
        terms = torch.stack([torch.ones_like(squares), squares]).flatten(1).cpu()
        distance = filled.distance.gather(0, masked_rows).T.flatten().cpu()
        self.by_distance.index_add_(1, distance - 1, terms)

    def _select(self, rows: Tensor, masked_rows: Tensor) -> Tensor:
        """Return the masked rows, [B, M, C]: all inputs, or every sequence's own channel."""
        selected = noise.gather_rows(rows, masked_rows).transpose(0, 1)
        if self.channels == 1:
            return selected
        channels: Tensor = selected[..., -1].unflatten(0, (-1, self.channels))
        return channels.transpose(1, 2)

    def compute(self) -> SetDetail:
        metrics = self.sums.compute()
        counts, squares = self.by_distance.tolist()
        return {
            "overall": metrics["overall"],
            "scaled": metrics["scaled"],
            "per_series": metrics["per_series"],
            "per_column": metrics["per_target"],
            "by_distance": [
                {"distance": i + 1, "mse": squares[i] / count, "rows": int(count)}
                for i, count in enumerate(counts)
                if count
            ],
        }


def find_column_scales(series: Series, starts: Tensor, count: int) -> Tensor | None:
    """Return the factor and the offset of each window's last `count` columns, [2, B, 1, count],
    to the scale of the whole table; None where all series have that scale."""
    if series.scales is None:
        return None
    scales = series.scales[..., series.num_inputs - count : series.num_inputs]
    return scales[:, series.find_series(starts), None]


class LatentSums:
    """Sums for the spread of each unit of the encoder over windows, at the same token."""

    def __init__(self) -> None:
        self.count = 0
        self.sums = torch.zeros((), dtype=torch.float64)
        """[2, T / patch, D]: values and squares"""

    def update(self, tokens: Tensor) -> None:
        tokens = tokens.double()
        self.sums = self.sums + torch.stack([tokens.sum(dim=1), tokens.square().sum(dim=1)])
        self.count += tokens.shape[1]

    def compute(self) -> LatentSummary:
        mean, squares = self.sums / self.count
        deviation = (squares - mean.square()).clamp(min=0.0).sqrt().mean(dim=0).cpu()
        return {
            "std": [round(value, 6) for value in deviation.tolist()],
            "mean_std": float(deviation.mean()),
            "collapsed": int((deviation < COLLAPSED).sum()),
            "units": len(deviation),
        }


class ExampleCollector:
    """Takes a few windows of the validation set, evenly spread, in physical units."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.num_seen = dataset, 0
        count = dataset.num_windows["val"]
        num_examples = min(NUM_EXAMPLES, count)
        self.wanted = {count * (2 * i + 1) // (2 * num_examples) for i in range(num_examples)}
        self.tables: list[pa.Table] = []

    def add(self, filled: FilledWindows, chunk: WindowChunk) -> None:
        for number in range(len(filled.starts)):
            if self.num_seen + number in self.wanted:
                self.tables.append(self._build_window(filled, number, chunk))
        self.num_seen += len(filled.starts)

    def _build_window(self, filled: FilledWindows, number: int, chunk: WindowChunk) -> pa.Table:
        signature, scaler, index = self.dataset.signature, self.dataset.scaler, self.dataset.index
        channels, rows = signature.sequences_per_window, signature.context
        first = int(filled.starts[number]) + chunk.first_row
        owner = int(np.searchsorted(index.offsets, first, side="right") - 1)
        columns: dict[str, Any] = {
            "window": np.full(rows, len(self.tables), dtype=np.int32),
            "series": [index.series_names[owner]] * rows,
            "row": first - index.offsets[owner] + np.arange(rows),
        }
        names = signature.inputs if channels == 1 else signature.targets
        scales = find_column_scales(chunk.series, filled.starts[number : number + 1], len(names))
        for i, name in enumerate(names):
            # "window", "series" or "row", or the filled-in values of another column
            if name in columns:
                continue
            sequence, column = (number, i) if channels == 1 else (number * channels + i, -1)
            for suffix, values in (("", filled.inputs), ("_filled", filled.rows[MODEL])):
                scaled = values[:, sequence, column].double().cpu().numpy()
                if scales is not None:
                    factor, offset = scales[:, 0, 0, i].tolist()
                    scaled = scaled * factor + offset
                columns[name + suffix] = scaled * scaler.size[name] + scaler.shift[name]
            columns[f"{name}_masked"] = filled.mask[:, sequence].cpu().numpy()
        return pa.table(columns)

    def to_table(self) -> pa.Table:
        return pa.concat_tables(self.tables)


def score_encoder(
    context: RunContext, weights: Mapping[str, Tensor]
) -> tuple[RunSummary, dict[str, SetDetail]]:
    """Score the rows that an encoder with these weights fills in, and write a few of them; return
    the run's summary, as far as its scores go, and the metrics in detail.

    The test rows, if the split names any, are not read.
    """
    run, config, dataset, plan = context.run, context.config, context.dataset, context.plan
    run.append(Scoring(what="the encoder"))
    load_chunks = summary.make_chunk_loader(context)
    mean = compute_training_mean(dataset, load_chunks).to(plan.device)
    filler = MaskFiller(summary.restore_model(context, weights), plan, config.pretrain, mean)
    scored = score_masked_rows(filler, dataset, load_chunks)
    with open_table_writer(run.folder / EXAMPLES) as write:
        write(scored.examples)
    metric = summary.get_comparison_metric(config)
    detail = scored.metrics
    scores = {name: summary.group_by_set({"val": metrics}) for name, metrics in detail.items()}
    return {
        "run": str(run.folder),
        "name": config.name,
        "objective": config.train.objective,
        **cast(RunSummary, scores[MODEL]),
        "windows": dataset.num_windows,
        "windows_without_target": dataset.left_out,
        "baselines": {
            name: {"what": description, **cast(BaselineScores, scores[name])}
            for name, description in BASELINES.items()
        },
        "judged_by": metric,
        **cast(RunSummary, summary.summarize_comparison(scored.comparison, metric)),
        "latent": scored.latent,
        "notes": list(dataset.notes),
    }, detail
