"""What is trained: a config, a model and its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn

from slipstream.config import Config
from slipstream.config.base import hash_seed
from slipstream.data.dataset import Dataset
from slipstream.data.labels import selection
from slipstream.data.series import Ints
from slipstream.data.windows import Series
from slipstream.engine.batches.augmented import AugmentedCopies, prepare_copies
from slipstream.engine.batches.source import BatchShare
from slipstream.engine.carried import batches as carried
from slipstream.engine.carried.batches import ChunkGrid
from slipstream.engine.lanes.lane import Lane
from slipstream.engine.parallel.ranks import Ranks
from slipstream.engine.plan import Plan
from slipstream.models import build
from slipstream.runs import Run


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, on which data, and the run that records it."""

    config: Config
    model: nn.Module
    dataset: Dataset
    series: Series | None
    """Where the plan's home wants them; None where they are streamed"""
    run: Run
    fingerprint: str = ""
    """Of the data's content"""
    init: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights of a pre-trained encoder that the model starts from"""
    copies: AugmentedCopies | None = None
    """Augmented training windows on disk, in place of the series'"""
    ranks: Ranks | None = None
    """The processes that train the model together, where there are several"""

    @property
    def is_carried(self) -> bool:
        """Whether steps go on with the states of the ones before."""
        return self.config.train.state == "carried"

    @property
    def windows_per_step(self) -> int:
        """Windows of one optimizer step, or pieces of series side by side."""
        train = self.config.train
        assert train.batch != "auto"
        return train.batch * train.accumulate

    def share_batch(self) -> BatchShare | None:
        """Return what this process computes of every batch, where several train together."""
        batch = self.config.train.batch
        assert batch != "auto"
        return BatchShare(self.ranks.rank, self.ranks.size, batch) if self.ranks else None

    @property
    def num_validated(self) -> int:
        """Validation windows of this process"""
        whole = self.dataset.num_windows["val"]
        return whole if self.ranks is None else len(self.select_validation_windows())

    def select_validation_windows(self) -> Tensor:
        """Return the first rows of the validation windows, or of this process's share of them."""
        assert self.dataset.memory is not None
        starts, ranks = self.dataset.memory.starts["val"], self.ranks
        if ranks is None:
            return starts
        share = -(-len(starts) // ranks.size)
        return starts[ranks.rank * share : (ranks.rank + 1) * share]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of one epoch."""
        if self.is_carried:
            return self.training_grid.num_steps
        return -(-self.dataset.num_windows["train"] // self.windows_per_step)

    @cached_property
    def target_rows(self) -> Ints:
        """The rows after which training predicts, where the state is carried on."""
        assert self.dataset.memory is not None
        starts, data = self.dataset.memory.starts["train"].numpy(), self.config.data
        index, signature = self.dataset.index, self.dataset.signature
        return carried.find_target_rows(starts, index, signature, data.stride)

    @cached_property
    def training_grid(self) -> ChunkGrid:
        """The chunks of the training rows, where the state is carried on."""
        context = self.config.data.context
        pieces = carried.find_pieces(self.target_rows, self.dataset.index.segments, context)
        return carried.divide_evenly(pieces, context, self.windows_per_step, self.config.order_seed)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def build_lane(self) -> Lane:
        """The task as the only lane of a program."""
        memory = self.dataset.memory
        starts = {} if memory is None else {name: memory.starts[name] for name in ("train", "val")}
        return Lane(self.config, starts, init=self.init)

    def for_lane(self, lane: Lane) -> TrainingTask:
        """The task with a lane's config and windows, and the same model."""
        memory, dataset = self.dataset.memory, self.dataset
        if memory is not None and lane.starts:
            counts = {name: len(starts) for name, starts in lane.starts.items()}
            dataset = replace(
                dataset,
                memory=replace(memory, starts=memory.starts | lane.starts),
                num_windows=dataset.num_windows | counts,
            )
        copies = self.copies
        if copies is not None and lane.config is not self.config:
            copies = prepare_copies(lane.config, dataset, self.run)
        return replace(self, config=lane.config, dataset=dataset, copies=copies)


@contextmanager
def seed_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators; the caller's are restored at the end."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(hash_seed(seed))
        yield


def build_task(
    config: Config,
    dataset: Dataset,
    plan: Plan,
    run: Run,
    *,
    fingerprint: str = "",
    init: Mapping[str, Tensor] = MappingProxyType({}),
    ranks: Ranks | None = None,
) -> TrainingTask:
    """Build the model, from `init` as far as it goes; put it and the data where the plan says."""
    config = resolve_settings(config, dataset)
    model = build(config.model, dataset.signature)
    if init:
        model.load_state_dict(init, strict=False)
    series = None if dataset.memory is None else dataset.memory.series
    if series is not None and plan.home == "device":
        series = series.to(plan.device)
    model.to(plan.device)
    copies = prepare_copies(config, dataset, run)
    return TrainingTask(config, model, dataset, series, run, fingerprint, init, copies, ranks)


def resolve_settings(config: Config, dataset: Dataset) -> Config:
    """Replace balanced class weights, and noise by column, by the numbers that they are for this
    data."""
    train, augment, scaler = config.train, config.augment, dataset.scaler
    if train.class_weights != "balanced" and not isinstance(augment.jitter, dict):
        return config
    if train.class_weights == "balanced":
        weights = selection.balance_weights(dataset.count_classes())
        train = train.model_copy(update={"class_weights": weights})
    if isinstance(augment.jitter, dict):
        jitter = tuple(
            augment.jitter.get(name, 0.0) * scaler.deviation[name] / scaler.size[name]
            for name in dataset.signature.inputs
        )
        augment = augment.model_copy(update={"jitter": jitter})
    return config.model_copy(update={"train": train, "augment": augment})
