"""A run's context: its folder, config, data and plan, and once it is built, its model.

`training` makes one for each run and hands it down to the engine and the scores. Measuring, the
bench and tests make contexts of their own, whose run is nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.base.phases import PhaseTimer
from slipstream.config import Config
from slipstream.config.base import hash_seed
from slipstream.data import labels
from slipstream.data.dataset import Dataset
from slipstream.data.defaults import Choice
from slipstream.data.series import Ints
from slipstream.data.windows import Series
from slipstream.engine import carried
from slipstream.engine.batches import AugmentedCopies, BatchShare, prepare_copies
from slipstream.engine.carried import ChunkGrid
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.lanes import Lane
from slipstream.engine.parallel import Ranks
from slipstream.engine.plan import PackChoice, Plan
from slipstream.events import EncoderLoaded, format_event
from slipstream.models.forecaster import build
from slipstream.runs import Run
from slipstream.workers.resources import Bundle


@dataclass(frozen=True)
class EncoderMatch:
    """The weights of a pre-trained encoder that a model starts from."""

    weights: dict[str, Tensor]
    """By the model's own names"""
    event: EncoderLoaded
    """The encoder's folder, and the names of weights that matched, are new or are unused"""

    def summarize(self) -> dict[str, Any]:
        """Return the entry of metrics.json."""
        line = format_event(self.event)
        return {key: value for key, value in line.items() if key != "event"}


@dataclass(frozen=True)
class RunContext:
    """Everything that is known of a run before its first step."""

    run: Run
    """The folder, and the log in it"""
    config: Config
    """Once the model is built, with the values that the data and measuring gave"""
    dataset: Dataset
    plan: Plan
    choices: Mapping[str, Choice] = field(default_factory=dict)
    """What the data have decided of the config, by the settings' dotted names"""
    requested: Config | None = None
    """The config before the model was built"""
    is_plan_final: bool = False
    """Whether the plan is taken as it is, not as rules of thumb to measure from"""
    content: str | Future[str] = ""
    """The data's fingerprint, or where it is being computed"""
    init: EncoderMatch | None = None
    """The encoder that `train.init_from` names"""
    checkpoint: Checkpoint | None = None
    """The checkpoint that training resumes from, where the run is resumed"""
    ranks: Ranks | None = None
    """The processes that train the model together, where there are several"""
    num_workers: int = 1
    """Processes that train the lanes"""
    bundle: Bundle | None = None
    """The resources of a Ray cluster that each worker gets; None: workers are on this machine"""
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    started_at: float = field(default_factory=lambda: time.perf_counter())
    """By `time.perf_counter`"""
    spent_s: float = 0.0
    """The duration of the run before it was resumed"""
    network: nn.Module | None = None
    """The model, once it is built, on the plan's device"""
    series: Series | None = None
    """Where the plan's home wants them; None where they are streamed, or before the model is
    built"""
    copies: AugmentedCopies | None = None
    """Augmented training windows on disk, in place of the series'"""
    lanes: list[Lane] = field(default_factory=list)
    """The models that are trained, once they are planned"""
    packing: PackChoice = field(default_factory=PackChoice)
    """How many lanes train at a time, and how"""

    @property
    def model(self) -> nn.Module:
        assert self.network is not None, "the model is not built yet"
        return self.network

    @property
    def fingerprint(self) -> str:
        """The hash of the data's content; waits for it."""
        return self.content if isinstance(self.content, str) else self.content.result()

    @property
    def init_weights(self) -> Mapping[str, Tensor]:
        """The weights of a pre-trained encoder that the model starts from, if there is one"""
        return self.init.weights if self.init else {}

    @property
    def is_spread(self) -> bool:
        """Whether workers train the lanes, each a share of them"""
        return self.config.trains_lanes and (self.num_workers > 1 or self.bundle is not None)

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

    def summarize_packing(self) -> dict[str, Any]:
        """Return what plan.json and the log say of how many lanes train at a time."""
        return self.packing.summarize(len(self.lanes))

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def build_lane(self) -> Lane:
        """Return the only lane of a run of one model."""
        memory = self.dataset.memory
        starts = {} if memory is None else {name: memory.starts[name] for name in ("train", "val")}
        return Lane(self.config, starts, init=self.init_weights)

    def for_lane(self, lane: Lane) -> RunContext:
        """Return the context with a lane's config and windows, and the same model."""
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


def build_model(context: RunContext) -> RunContext:
    """Build the model, from a pre-trained encoder if there is one; put it and the data where the
    plan says."""
    dataset, plan = context.dataset, context.plan
    config = resolve_settings(context.config, dataset)
    model = build(config.model, dataset.signature)
    if context.init_weights:
        model.load_state_dict(context.init_weights, strict=False)
    series = None if dataset.memory is None else dataset.memory.series
    if series is not None and plan.home == "device":
        series = series.to(plan.device)
    model.to(plan.device)
    copies = prepare_copies(config, dataset, context.run)
    requested = context.requested or context.config
    return replace(
        context, config=config, requested=requested, network=model, series=series, copies=copies
    )


def resolve_settings(config: Config, dataset: Dataset) -> Config:
    """Replace balanced class weights, and noise by column, by the numbers that they are for this
    data."""
    train, augment, scaler = config.train, config.augment, dataset.scaler
    if train.class_weights != "balanced" and not isinstance(augment.jitter, dict):
        return config
    if train.class_weights == "balanced":
        weights = labels.balance_weights(dataset.count_classes())
        train = train.model_copy(update={"class_weights": weights})
    if isinstance(augment.jitter, dict):
        jitter = tuple(
            augment.jitter.get(name, 0.0) * scaler.deviation[name] / scaler.size[name]
            for name in dataset.signature.inputs
        )
        augment = augment.model_copy(update={"jitter": jitter})
    return config.model_copy(update={"train": train, "augment": augment})
