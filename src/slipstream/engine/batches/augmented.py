"""Augmented copies of the training windows, written to disk once and read back in every epoch.

This pays where the disk is faster than the arithmetic of the step: `slipstream bench ladder`
measures it. The copies contain what changes a window by itself; blends of several windows stay in
the step. A folder of copies is named after the data and the settings, and its SHA-256 sums are
checked before use.

Shapes: N copies, W windows, C sequences of one window, T context rows, F inputs.
"""

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
from slipstream.config import Config
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Batch, Series
from slipstream.engine.batches.host import HostSource, TransferOptions
from slipstream.engine.batches.source import EpochSampler, MicroBatch, Program
from slipstream.errors import UserError
from slipstream.models import Noise
from slipstream.models.noise import augment
from slipstream.runs import Run

FORMAT_VERSION = 2
"""Copies of another version are written again"""
CHUNK = 1024
"""Windows augmented at a time; their noise depends on it"""


@dataclass(frozen=True)
class AugmentedCopies:
    """Windows on disk, mapped into memory."""

    inputs: Tensor
    """[N, W, C, T, F]"""
    targets: Tensor
    """[N, W, C, H, targets of a sequence]"""
    series: Series
    """On the host, for what is known beside the context"""
    starts: Tensor
    """[W]: the windows' first rows"""

    def gather(self, copy: int, index: Tensor) -> Batch:
        """Return some windows of a copy, as `windows.gather` does."""
        inputs, targets = self.inputs[copy][index], self.targets[copy][index]
        static = windows.gather_static(self.series, self.starts[index])
        if static is not None:
            static = static.repeat_interleave(self.series.sequences_per_window, dim=0)
        return Batch(inputs.flatten(0, 1).transpose(0, 1), static, targets.flatten(0, 1))

    def build_sampler(self, per_step: int, per_pass: int, seed: int | None) -> EpochSampler:
        """Build a sampler of window numbers instead of first rows, in the same order."""
        return EpochSampler(torch.arange(len(self.starts)), per_step, per_pass, seed)


def prepare_copies(config: Config, dataset: Dataset, run: Run) -> AugmentedCopies | None:
    """Return the copies that `augment.cache` requests, written where no intact ones are on disk."""
    settings = config.augment
    if not settings.cache or settings.for_step == settings:
        return None
    memory = dataset.memory
    if memory is None:
        raise UserError(
            "augment.cache writes copies of windows that are in memory, and these are streamed; "
            "set augment.cache = 0, or cut the data"
        )
    shapes = _compute_shapes(config, dataset)
    size = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    folder = runs.get_cache_folder() / "augmented" / _compute_key(config, dataset)
    intact = _is_intact(folder)
    what = "reading" if intact else "writing"
    run.append("cache", what=what, copies=settings.cache, bytes=size, folder=str(folder))
    if not intact:
        _write(config, dataset, folder, shapes, size)
    inputs, targets = (_map_file(folder / f"{name}.bin", shape) for name, shape in shapes.items())
    return AugmentedCopies(inputs, targets, memory.series, memory.starts["train"])


def _compute_shapes(config: Config, dataset: Dataset) -> dict[str, tuple[int, ...]]:
    signature, copies = dataset.signature, config.augment.cache
    lead = (copies, dataset.num_windows["train"], signature.sequences_per_window)
    return {
        "inputs": (*lead, signature.context, signature.model_inputs),
        "targets": (*lead, signature.steps_out, signature.model_targets),
    }


def _compute_key(config: Config, dataset: Dataset) -> str:
    """Hash everything that the copies depend on."""
    contents = {
        "data": dataset.compute_fingerprint(),
        "signature": dataset.signature.model_dump(),
        "augment": config.augment.model_dump(),
        "seed": config.seed,
        "making": FORMAT_VERSION,
    }
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:32]


def _is_intact(folder: Path) -> bool:
    """Return whether copies exist and match their checksums."""
    try:
        sums = runs.read_json(folder / MANIFEST)
        return bool(sums) and all(compute_sha256(folder / name) == sums[name] for name in sums)
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
            for batch in _augment_windows(config, dataset):
                inputs.write(batch.inputs.transpose(0, 1).contiguous().numpy().tobytes())
                targets.write(batch.targets.contiguous().numpy().tobytes())
        sums = {path.name: compute_sha256(path) for path in files.values()}
        runs.write_json(temporary / MANIFEST, sums)


def _augment_windows(config: Config, dataset: Dataset) -> Iterator[Batch]:
    """Yield the augmented windows of every copy, in order."""
    memory, signature = dataset.memory, dataset.signature
    assert memory is not None
    first = Noise(torch.tensor(config.seed), torch.tensor(0.0))
    layout = augment.make_layout(config.augment, signature, torch.device("cpu"))
    for copy in range(config.augment.cache):
        for number, starts in enumerate(memory.starts["train"].split(CHUNK)):
            batch = windows.gather(memory.series, starts)
            changed = augment.augment(
                config.augment.for_cache,
                first.for_pass(torch.tensor(-1 - copy), number).key,  # no step of a run is negative
                batch.inputs,
                batch.targets,
                layout=layout,
                shares=torch.ones(len(starts)),
            )
            yield Batch(changed.inputs, None, changed.targets)


def _map_file(path: Path, shape: tuple[int, ...]) -> Tensor:
    if not np.prod(shape):  # an encoder has no targets
        return torch.zeros(shape)
    # copy on write: torch wants memory that may be written, and the file must stay
    return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="c", shape=shape))


class AugmentedSource:
    """Reads copies in the memory of the CPU, on which the step runs."""

    def __init__(self, copies: AugmentedCopies, sampler: EpochSampler) -> None:
        self.copies, self.sampler, self.num_steps = copies, sampler, sampler.num_steps
        self._epoch = 0

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        self._epoch = epoch
        self._rows, self._weights = self.sampler.sample_epoch(epoch)

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        step, copy = int(cursor), self._epoch % len(self.copies.inputs)
        for rows, weights in zip(self._rows[step], self._weights[step], strict=True):
            yield MicroBatch(self.copies.gather(copy, rows), weights)

    def wrap_program(self, program: Program, cursor: Tensor | None = None) -> Program:
        return program

    def close(self) -> None:
        pass


class AugmentedHostSource(HostSource):
    """Reads copies on the host and copies them to the device while the current step runs."""

    def __init__(
        self, copies: AugmentedCopies, sampler: EpochSampler, how: TransferOptions
    ) -> None:
        self.copies, self._epoch = copies, 0
        super().__init__(copies.series, sampler, how)

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        self._epoch = epoch
        super().start_epoch(epoch, at=at)

    def gather(self, rows: Tensor) -> Batch:
        return self.copies.gather(self._epoch % len(self.copies.inputs), rows)
