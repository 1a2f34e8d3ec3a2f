"""The errors of every candidate on the validation blocks, and the ensemble selected from them.

Greedy selection with replacement (Caruana et al. 2004): starting from the best candidates, the
one whose addition lowers the mean error most is added again and again; how often each was added
is its weight. A weighted mean of predictions has the weighted mean of their errors, so errors are
all that is kept; for classes it is the probability of the true class.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.base import machine
from slipstream.config import Signature
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series, WindowChunk
from slipstream.scoring.batch import PredictionBatch, Predictor
from slipstream.scoring.predict import predict_batches

MAX_MEMBERS = 8
"""The members of an ensemble at most"""
MAX_ROUNDS = 24
"""Additions of the greedy selection"""
FIRST_MEMBERS = 2
"""The best candidates that a selection starts from: one alone may be the luckiest"""
MAX_KEPT = 48
"""Candidates whose errors are kept: those with the lowest errors"""
MEMORY_SHARE = 0.25
"""The share of the device's free memory that kept errors may take"""
MAX_NUMBERS = {"cuda": 1_000_000, "cpu": 100_000}
"""Errors of one candidate and block that a selection reads: more take time and change nothing"""
NUMBERS_AT_ONCE = 4_000_000
"""Numbers that a selection computes at a time"""
MIN_PROBABILITY = 1e-7
"""The lowest probability that a true class counts with"""
NEWEST_WEIGHT = 2.0
"""The weight of the newest validation block, relative to that of the oldest"""
MIN_GAIN, MIN_LEARNT_GAIN, MIN_FEW_GAIN = 2e-3, -0.01, -0.1
"""The relative gain out of sample from which an ensemble is taken instead of one model. Of numbers,
the second one where that model has learnt something: the ensemble that is tested there was selected
by fewer windows and has one model of each candidate. The third one where few separate windows
judge: the best of many candidates, each stopped early on these, is that much better by luck"""
NUM_PARTS = 4
"""The parts of a validation block whose losses tell how much these vary"""
MIN_TESTS = 6
"""Parts of all validation blocks that a selection is tested on in turn"""
FEW_SEPARATE, MAX_LOSS_RATIO = 30, 1.35
"""Windows without a common row below which candidates whose loss is more than so many times the
lowest are no members; others are none for the sake of equal weights"""
TRIVIAL = ("repeat", "seasonal")
"""Baselines without weights. Where more windows judge, candidates that are so much worse than the
best are no members if they are also worse than the better one of these"""
EVEN_WINDOWS, MIN_EVEN = 30, 0.1
"""The share of equal weights in an ensemble is that of so many windows among these and the windows
without a common row that judge; a smaller share than the second number is none"""


class Block(NamedTuple):
    """The windows of one validation block whose errors are kept."""

    anchors: Tensor
    """The first target row of each window, in the rows of the table"""
    weight: float


class Advantage(NamedTuple):
    """How much better an ensemble is than a candidate."""

    gain: float
    """The difference of their losses, relative to the candidate's"""
    certainty: float
    """The difference in its standard errors"""


class Combination(NamedTuple):
    """Candidates with their weights, and how good they are together."""

    weights: dict[str, float]
    """By candidate, in descending order"""
    loss: float
    """On the validation blocks, which it was selected by"""
    single_loss: float
    """Of the best candidate alone there"""
    gain: float
    """Relative to the best candidate alone, on validation windows that neither was selected by"""
    advantages: Mapping[str, Advantage] = MappingProxyType({})
    """Over each candidate, on validation windows that the ensemble was not selected by"""

    min_gain: float = MIN_GAIN
    """The gain from which on the ensemble is taken"""
    rival: str | None = None
    """The baseline that the ensemble is hardly better than, and that has a share for it"""

    @property
    def is_better(self) -> bool:
        """Whether the ensemble is better than its best member where it was not selected, or as good
        as far as these windows tell."""
        return len(self.weights) > 1 and self.gain > self.min_gain


@dataclass
class Library:
    """The candidates' errors by validation block, the oldest block first."""

    blocks: list[Block]
    metric: str
    """"mse", "mae", "quantile" or "classes": what makes a loss of errors"""
    quantiles: tuple[float, ...] = ()
    errors: dict[str, list[Tensor | None]] = field(default_factory=dict)
    """By candidate and block: [numbers], or for quantiles [numbers, Q]"""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """By candidate and block; kept where the errors are not"""
    steps: int = 1
    """Rows that a window predicts"""

    @cached_property
    def num_separate(self) -> int:
        """The number of windows of all blocks that predict no row in common"""
        count = 0
        for block in self.blocks:
            rows, position = block.anchors.sort().values, 0
            while position < len(rows):
                count += 1
                position = int(torch.searchsorted(rows, rows[position] + self.steps))
        return count

    @property
    def weights(self) -> list[float]:
        total = sum(block.weight for block in self.blocks)
        return [block.weight / total for block in self.blocks]

    def add(self, name: str, number: int, errors: Tensor) -> None:
        """Keep the errors of a candidate on one block."""
        self.errors.setdefault(name, [None] * len(self.blocks))[number] = errors
        losses = self.losses.setdefault(name, [math.nan] * len(self.blocks))
        losses[number] = float(self._reduce(errors))
        if all(map(math.isfinite, losses)):
            self._drop_worst()

    def _drop_worst(self) -> None:
        """Forget the errors of candidates that are not among the best."""
        ranked = [name for name in self.rank() if name in self.errors]
        for name in ranked[MAX_KEPT:]:
            del self.errors[name]

    def forget(self, name: str) -> None:
        """Forget a candidate altogether."""
        self.errors.pop(name, None)
        self.losses.pop(name, None)

    def compute_loss(self, name: str) -> float:
        """Return the mean over the blocks, the newest counting most."""
        return math.fsum(map(operator.mul, self.weights, self.losses[name]))

    def rank(self) -> list[str]:
        """Return the candidates that every block has, the best first."""
        complete = [name for name, losses in self.losses.items() if all(map(math.isfinite, losses))]
        return sorted(complete, key=self.compute_loss)

    def compute_noise(self, first: str, second: str) -> float:
        """Return the standard error of the difference of two candidates' losses, over blocks and
        parts of blocks."""
        if first not in self.errors or second not in self.errors:
            return 0.0
        differences = []
        for left, right in zip(self.errors[first], self.errors[second], strict=True):
            assert left is not None
            assert right is not None
            pairs = zip(left.tensor_split(NUM_PARTS), right.tensor_split(NUM_PARTS), strict=True)
            differences += [
                float(self._reduce(part) - self._reduce(second_part))
                for part, second_part in pairs
                if len(part)
            ]
        count = len(differences)
        mean = math.fsum(differences) / count
        variance = math.fsum((value - mean) ** 2 for value in differences) / max(count - 1, 1)
        return math.sqrt(variance / count)

    def list_close(self, names: Sequence[str], most: float) -> list[str]:
        """List those of some classifiers whose wrong answers are not more than those of the best of
        them by more than so many standard errors; a probability below a half counts as wrong."""
        wrong = {
            name: torch.cat([part for part in self.errors[name] if part is not None]) <= 0.5
            for name in self.rank()
            if self.metric == "classes" and name in names and name in self.errors
        }
        if not wrong:
            return []
        least = min(wrong.values(), key=lambda flags: int(flags.sum()))
        close = []
        for name, flags in wrong.items():
            differences = flags.double() - least.double()
            noise = differences.std(correction=0) / math.sqrt(len(differences))
            if float(differences.mean()) <= most * float(noise):
                close.append(name)
        return close

    def _reduce(self, errors: Tensor) -> Tensor:
        """Return the loss of errors, [..., numbers] or with quantiles [..., numbers, Q]."""
        match self.metric:
            case "mse":
                return errors.square().mean(dim=-1)
            case "mae":
                return errors.abs().mean(dim=-1)
            case "classes":
                return -errors.clamp(min=MIN_PROBABILITY).log().mean(dim=-1)
        levels = errors.new_tensor(self.quantiles)  # an error is prediction - truth
        return torch.maximum(-levels * errors, (1 - levels) * errors).mean(dim=(-1, -2))

    def combine(
        self, names: Sequence[str] | None = None, *, max_members: int = MAX_MEMBERS
    ) -> Combination | None:
        """Select the ensemble of the kept candidates, and test the selection out of sample; None
        without any."""
        kept = self._list_kept(names)
        if not kept:
            return None
        blocks = self._stack(kept)
        chosen, loss = self._select(blocks, self.weights, len(kept), max_members)
        shares = self._shrink(chosen, self._list_fair(kept), max_members)
        ordered = sorted(shares.items(), key=lambda pair: -pair[1])
        weights = {kept[position]: share for position, share in ordered}
        gain, found = self._test_selection(blocks, len(kept), max_members)
        advantages = dict(zip(kept, found, strict=True)) if found else {}
        single_loss = self.compute_loss(kept[0])
        return Combination(
            weights, loss, single_loss, gain, advantages, self._get_min_gain(kept[0])
        )

    def _get_min_gain(self, best: str) -> float:
        """Return the gain from which on an ensemble is taken instead of the best candidate."""
        if self.metric == "classes":
            return MIN_GAIN
        if self.num_separate < FEW_SEPARATE:
            return MIN_FEW_GAIN
        return MIN_GAIN if best in TRIVIAL else MIN_LEARNT_GAIN

    def list_members(self) -> list[str]:
        """List the candidates that the ensemble would have now."""
        if not (kept := self._list_kept()):
            return []
        chosen, _ = self._select(self._stack(kept), self.weights, len(kept), MAX_MEMBERS)
        return [
            kept[position] for position in self._shrink(chosen, self._list_fair(kept), MAX_MEMBERS)
        ]

    def _list_fair(self, kept: Sequence[str]) -> list[int]:
        """List the positions of the candidates that are not far worse than the best one."""
        losses = [self.compute_loss(name) for name in kept]
        return [place for place, loss in enumerate(losses) if loss <= MAX_LOSS_RATIO * min(losses)]

    def _shrink(
        self, chosen: Mapping[int, int], ranked: Iterable[int], max_members: int
    ) -> dict[int, float]:
        """Return the weights of a selection, from how often each candidate was added. Few separate
        windows hardly tell weights: these are mixed with equal weights of the members and of the
        best other candidates."""
        total = sum(chosen.values())
        equal = (
            0.0 if self.metric == "classes" else EVEN_WINDOWS / (EVEN_WINDOWS + self.num_separate)
        )
        if equal < MIN_EVEN:
            return {position: count / total for position, count in chosen.items()}
        members = list(islice(dict.fromkeys([*chosen, *ranked]), max_members))
        return {
            position: (1 - equal) * chosen.get(position, 0) / total + equal / len(members)
            for position in members
        }

    def _list_kept(self, names: Sequence[str] | None = None) -> list[str]:
        """List the candidates whose errors are kept, or those of them with these names, the best
        first. Where few separate windows judge, far worse ones are left out: their errors may
        cancel those of others by chance. Where many judge, those are left out that are also worse
        than a baseline that learns nothing: what they have learnt does not hold on new rows."""
        wanted = self.errors if names is None else self.errors.keys() & set(names)
        kept = [name for name in self.rank() if name in wanted]
        if not kept:
            return kept
        limit = MAX_LOSS_RATIO * self.compute_loss(kept[0])
        if self.num_separate >= FEW_SEPARATE:
            trivial = [self.compute_loss(name) for name in TRIVIAL if name in wanted]
            limit = max(limit, min(trivial)) if trivial else math.inf
        return [name for name in kept if self.compute_loss(name) <= limit]

    def _stack(self, names: Sequence[str]) -> list[Tensor]:
        """Return the errors of these candidates by block, [candidates, numbers, ...]; of more
        numbers than a selection needs, an even sample."""
        blocks = []
        for number in range(len(self.blocks)):
            parts = [self.errors[name][number] for name in names]
            first = parts[0]
            assert first is not None
            stride = -(-first.numel() // MAX_NUMBERS[first.device.type])
            stride += stride > 1 and stride % 2 == 0  # an odd one meets every step ahead
            blocks.append(torch.stack([part[::stride] for part in parts if part is not None]))
        return blocks

    def _select(
        self, blocks: Sequence[Tensor], weights: Sequence[float], count: int, max_members: int
    ) -> tuple[dict[int, int], float]:
        """Return how often each candidate was added, and the loss of the mean."""

        def compute(sums: Sequence[Tensor], size: int) -> Tensor:
            pairs = zip(weights, sums, strict=True)
            return torch.stack([weight * self._reduce(part / size) for weight, part in pairs]).sum(
                0
            )

        numbers = sum(part[0].numel() for part in blocks)
        step = max(NUMBERS_AT_ONCE // max(numbers, 1), 1)
        groups = [slice(first, first + step) for first in range(0, count, step)]
        alone = compute(blocks, 1)
        start = alone.argsort()[: min(FIRST_MEMBERS, count)].tolist()
        best: tuple[dict[int, int], float] = ({start[0]: 1}, float(alone[start[0]]))
        chosen = dict.fromkeys(start, 1)
        sums = [part[start].sum(dim=0) for part in blocks]
        for size in range(len(start), MAX_ROUNDS + 1):
            loss = float(compute([part[None] for part in sums], size))
            if loss < best[1]:
                best = (dict(chosen), loss)
            trial = torch.cat(
                [
                    compute(
                        [total + part[group] for total, part in zip(sums, blocks, strict=True)],
                        size + 1,
                    )
                    for group in groups
                ]
            )
            if len(chosen) >= max_members:
                allowed = torch.full_like(trial, math.inf)
                allowed[list(chosen)] = 0.0
                trial = trial + allowed
            position = int(trial.argmin())
            chosen[position] = chosen.get(position, 0) + 1
            sums = [total + part[position] for total, part in zip(sums, blocks, strict=True)]
        return best

    def _test_selection(
        self, blocks: Sequence[Tensor], count: int, max_members: int
    ) -> tuple[float, list[Advantage]]:
        """Return the relative gain of an ensemble over one model, both selected without the part of
        a block that they are compared on, and its advantage over each candidate there."""
        num_parts = -(-MIN_TESTS // len(blocks))
        parts = [
            (part, weight / num_parts)
            for block, weight in zip(blocks, self.weights, strict=True)
            for part in block.tensor_split(num_parts, dim=1)
            if part.shape[1]
        ]
        if count < 2 or len(parts) < 2:
            return 0.0, []
        shares = torch.tensor([weight for _, weight in parts], dtype=torch.float64)
        alone = torch.stack([self._reduce(part).double().cpu() for part, _ in parts])
        together, single = torch.zeros(2, len(parts), dtype=torch.float64).unbind()
        for held, (test, _) in enumerate(parts):
            rest = [number for number in range(len(parts)) if number != held]
            weights = [float(shares[number]) for number in rest]
            chosen, _ = self._select([parts[n][0] for n in rest], weights, count, max_members)
            losses = shares[rest] @ alone[rest]
            ranked = losses.argsort().tolist()
            fair = [place for place in ranked if losses[place] <= MAX_LOSS_RATIO * losses.min()]
            mixed = self._shrink(chosen, fair, max_members)
            mean = sum(share * test[position] for position, share in mixed.items())
            assert isinstance(mean, Tensor)
            together[held] = float(self._reduce(mean))
            single[held] = alone[held, ranked[0]]
        shares /= shares.sum()
        differences = alone - together[:, None]  # [parts, candidates]
        means = shares @ differences
        variances = shares @ (differences - means).square() / max(len(parts) - 1, 1)
        errors, losses = variances.sqrt().clamp(min=1e-12), shares @ alone
        advantages = [
            Advantage(float(mean / loss) if loss > 0 else 0.0, float(mean / error))
            for mean, loss, error in zip(means, losses, errors, strict=True)
        ]
        best_loss = float(shares @ single)
        gain = (best_loss - float(shares @ together)) / best_loss if best_loss > 0 else 0.0
        return gain, advantages


def make_library(
    blocks: Sequence[Tensor], dataset: Dataset, metric: str, device: torch.device
) -> Library:
    """Return an empty library; `blocks` are the first target rows of the validation windows that
    every candidate has. Where the errors of all kept candidates would take too much memory, the
    oldest windows of each block are left out."""
    signature = dataset.signature
    if signature.classes:
        metric = "classes"
    elif signature.quantiles:
        metric = "quantile"
    numbers = (
        signature.steps_out * max(len(signature.targets), 1) * max(len(signature.quantiles), 1)
    )
    free = get_free_memory(device)
    most = max(int(MEMORY_SHARE * free / (4 * numbers * MAX_KEPT * len(blocks))), 1)
    shares = torch.linspace(1.0, NEWEST_WEIGHT, len(blocks)).tolist()
    newest = [anchors.sort().values[-most:] for anchors in blocks]
    kept = [Block(anchors, share) for anchors, share in zip(newest, shares, strict=True)]
    return Library(kept, metric, tuple(signature.quantiles), steps=signature.steps_out)


def get_free_memory(device: torch.device) -> int:
    """Return the free memory of a device, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return machine.get_available_memory()


class BlockWindows(NamedTuple):
    """The windows of one block in the rows of a data set's copy on the device."""

    series: Series
    starts: Tensor
    """The first context rows of validation windows"""
    first_row: int
    """Of the copy of the table that they are in"""


def find_block_starts(windows: BlockWindows, anchors: Tensor, signature: Signature) -> Tensor:
    """Return the starts of the windows with these first target rows."""
    starts = windows.starts.sort().values
    wanted = anchors.to(starts.device) - signature.lead + windows.first_row
    places = torch.searchsorted(starts, wanted).clamp(max=len(starts) - 1)
    if not bool((starts[places] == wanted).all()):
        raise ValueError("a candidate lacks validation windows that others have")
    return wanted


class ErrorUnits(NamedTuple):
    """The units that errors are kept in."""

    sizes: Tensor | None
    """[C]: of a standard deviation, in scaled units; None for classes"""
    naive: Tensor | None = None
    """[S, C]: the error of a naive forecast of each series, in scaled units, where each series
    counts the same (MASE)"""


def compute_errors(
    predict: Predictor,
    windows: BlockWindows,
    starts: Tensor,
    dataset: Dataset,
    units: ErrorUnits,
) -> Tensor:
    """Return the errors of a predictor on windows as a library keeps them."""
    ids = torch.arange(len(windows.series.offsets) - 1)
    chunk = WindowChunk(windows.series, starts, 0, ids, None)
    signature = dataset.signature
    parts = [_read(batch, signature, units) for batch in predict_batches(predict, [chunk])]
    return torch.cat(parts)


def _read(batch: PredictionBatch, signature: Signature, units: ErrorUnits) -> Tensor:
    assert batch.truth is not None
    device = batch.prediction.device
    sizes = None if units.sizes is None else units.sizes.to(device)
    if signature.classes:
        likely = torch.softmax(batch.prediction.float(), dim=-1)
        return likely.gather(-1, batch.truth.long()[..., None]).flatten()
    if signature.quantiles:
        errors = batch.prediction - batch.truth[..., None]
        errors = errors if batch.factor is None else errors / batch.factor[..., None]
        return (errors if sizes is None else errors * sizes[:, None]).flatten(0, 2)
    if units.naive is not None:
        naive = torch.where(units.naive > 0, units.naive, math.inf).to(device)
        series = batch.find_series() % len(naive)  # every fold has a copy of all series
        return (batch._replace(factor=None).errors(()) / naive[series, None]).float().flatten()
    errors = batch.errors(())
    return (errors if sizes is None else errors * sizes).flatten()
