"""Augmented copies of the training windows, written to disk once and read back in every epoch.

For machines whose disk is faster than their step's arithmetic: the bench says whether it is. What
changes a window by itself is in the copies; blends of several windows stay in the step. A folder of
copies is named after the data and the settings, and held against its SHA-256 sums before use.

Shapes: N copies, W windows, C sequences of one window, T context rows, F inputs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream import runs
from slipstream.checksums import MANIFEST, compute_sha256
from slipstream.config import Config, Engine
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Batch, Series
from slipstream.engine import step
from slipstream.engine.batches.source import EpochSampler, HostSource, MicroBatch, Program
from slipstream.errors import UserError
from slipstream.models import Noise
from slipstream.models.noise import augment
from slipstream.runs import Run

MAKING = 2
"""Counts the ways in which copies have been made: those of another are made anew"""


@dataclass(frozen=True)
class AugmentedCopies:
    """Windows on disk, mapped into memory."""

    inputs: Tensor
    """[N, W, C, T, F]"""
    targets: Tensor
    """[N, W, C, H, targets of a sequence]"""
    series: Series
    """On the host, for static columns"""
    starts: Tensor
    """[W]: the windows' first rows"""

    def gather(self, copy: int, index: Tensor) -> Batch:
        """Some windows of a copy, as `windows.gather` gives them."""
        inputs, targets = self.inputs[copy][index], self.targets[copy][index]
        static = None
        if self.series.static is not None:
            owners = self.series.find_series(self.starts[index])
            static = self.series.static[owners].repeat_interleave(
                self.series.sequences_per_window, dim=0
            )
        return Batch(inputs.flatten(0, 1).transpose(0, 1), static, targets.flatten(0, 1))

    def build_sampler(self, effective: int, batch: int, seed: int | None) -> EpochSampler:
        """Over the windows' numbers instead of their first rows, in the same order."""
        return EpochSampler(torch.arange(len(self.starts)), effective, batch, seed)


def prepare_copies(config: Config, dataset: Dataset, run: Run) -> AugmentedCopies | None:
    """The copies that `augment.cache` asks for: those on disk if they are sound, else written."""
    how = config.augment
    if not how.cache or how.for_step == how:
        return None
    memory = dataset.memory
    if memory is None:
        raise UserError(
            "augment.cache writes copies of windows that are in memory, and these are streamed; "
            "set augment.cache = 0, or cut the data"
        )
    shapes = _shapes(config, dataset)
    size = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    folder = runs.get_cache_folder() / "augmented" / _key(config, dataset)
    told = {"copies": how.cache, "bytes": size, "folder": str(folder)}
    if not _sound(folder):
        run.append("cache", what="writing", **told)
        _write(config, dataset, folder, shapes, size)
    else:
        run.append("cache", what="reading", **told)
    inputs, targets = (_mapped(folder / f"{name}.bin", shape) for name, shape in shapes.items())
    return AugmentedCopies(inputs, targets, memory.series, memory.starts["train"])


def _shapes(config: Config, dataset: Dataset) -> dict[str, tuple[int, ...]]:
    signature, copies = dataset.signature, config.augment.cache
    lead = (copies, dataset.num_windows["train"], signature.sequences_per_window)
    return {
        "inputs": (*lead, signature.context, signature.model_inputs),
        "targets": (*lead, signature.steps_out, signature.model_targets),
    }


def _key(config: Config, dataset: Dataset) -> str:
    """What the copies depend on."""
    asked = {
        "data": dataset.compute_fingerprint(),
        "signature": dataset.signature.model_dump(),
        "augment": config.augment.model_dump(),
        "seed": config.seed,
        "making": MAKING,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


def _sound(folder: Path) -> bool:
    """Whether copies are there and as they were written."""
    try:
        sums = runs.read_json(folder / MANIFEST)
        return bool(sums) and all(
            compute_sha256(folder / name) == sum_ for name, sum_ in sums.items()
        )
    except (UserError, OSError):
        return False


def _write(
    config: Config, dataset: Dataset, folder: Path, shapes: dict[str, tuple[int, ...]], size: int
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if size > free:
        raise UserError(
            f"augment.cache = {config.augment.cache} needs {size / 1e9:.1f} GB in {folder.parent}, "
            f"which has {free / 1e9:.1f} GB free; lower it, or set SLIPSTREAM_CACHE to another disk"
        )
    with runs.replace_atomically(folder) as temporary:
        temporary.mkdir()
        files = {name: temporary / f"{name}.bin" for name in shapes}
        with files["inputs"].open("wb") as inputs, files["targets"].open("wb") as targets:
            for batch in _augmented(config, dataset):
                inputs.write(batch.inputs.transpose(0, 1).contiguous().numpy().tobytes())
                targets.write(batch.targets.contiguous().numpy().tobytes())
        sums = {path.name: compute_sha256(path) for path in files.values()}
        runs.write_json(temporary / MANIFEST, sums)


def _augmented(config: Config, dataset: Dataset) -> Iterator[Batch]:
    """Every window of every copy, changed, in order."""
    memory, signature = dataset.memory, dataset.signature
    assert memory is not None
    first = Noise(torch.tensor(config.seed), torch.tensor(0.0))
    for copy in range(config.augment.cache):
        for number, starts in enumerate(memory.starts["train"].split(step.EVAL_BATCH)):
            batch = windows.gather(memory.series, starts)
            changed = augment.augment(
                config.augment.for_cache,
                first.for_pass(torch.tensor(-1 - copy), number).key,  # no step of a run is negative
                batch.inputs,
                batch.targets,
                shared=signature.model_shared,
                shares=torch.ones(len(starts)),
                fold=signature.sequences_per_window,
            )
            yield Batch(changed.inputs, None, changed.targets)


def _mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    if not np.prod(shape):  # an encoder has no targets
        return torch.zeros(shape)
    # copy on write: torch wants memory that may be written, and the file must stay
    return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="c", shape=shape))


class AugmentedSource:
    """Copies read where the step runs."""

    def __init__(self, copies: AugmentedCopies, draw: EpochSampler) -> None:
        self.copies, self.order, self.num_steps = copies, draw, draw.num_steps
        self.epoch = 0

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        self.epoch = epoch
        self.rows, self.weights = self.order.sample_epoch(epoch)

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        here, copy = int(cursor), self.epoch % len(self.copies.inputs)
        for rows, weights in zip(self.rows[here], self.weights[here], strict=True):
            yield MicroBatch(self.copies.gather(copy, rows), weights)

    def wrap_program(self, program: Program) -> Program:
        return program

    def close(self) -> None:
        pass


class AugmentedHostSource(HostSource):
    """Copies read on the host and sent ahead, while the device is busy with the step before."""

    def __init__(
        self, copies: AugmentedCopies, draw: EpochSampler, device: torch.device, engine: Engine
    ) -> None:
        self.copies, self.epoch = copies, 0
        super().__init__(copies.series, draw, device, engine)

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        self.epoch = epoch
        super().start_epoch(epoch, at=at)

    def gather(self, rows: Tensor) -> Batch:
        return self.copies.gather(self.epoch % len(self.copies.inputs), rows)
