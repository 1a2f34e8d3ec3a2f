"""Read and write checkpoints and models: safetensors and JSON with a manifest of SHA-256 sums.

A folder is written under a temporary name, flushed to disk and renamed. Every file is compared with
the manifest before it is parsed. No pickle is ever read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.storage import MANIFEST, compute_sha256, read_verified
from slipstream.config import Config, Engine, Signature
from slipstream.data.prepare.steps import Limits
from slipstream.data.scaler import Scaler
from slipstream.events import CheckpointSaved
from slipstream.models.files import (
    ORIGIN,
    PREPARE_FILE,
    SCALER_FILE,
    SIGNATURE_FILE,
    WEIGHTS_FILE,
    parse_description,
    parse_safetensors,
)
from slipstream.models.forecaster import MaskedAutoencoder, WindowPredictor, build
from slipstream.runs import Run

STATE_FILE = "state.json"
FORMAT = 2
"""Version of the checkpoint format; checkpoints of version 0.1 and early builds of 0.2 have none"""
SHARE_OF_TIME = 0.01
"""The share of the training time that checkpoints after validations may cost"""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A training state: tensors on the host, by file, and plain values."""

    step: int
    tensors: dict[str, Tensors]
    metadata: dict[str, Any]
    ready: torch.cuda.Event | None = None
    """Done when the tensors have arrived from the device"""


def copy_to_host(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy tensors to the host; copies from a GPU are still under way when this returns."""
    return {
        name: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).copy_(t, non_blocking=True)
        for name, t in ((name, tensor.detach()) for name, tensor in tensors.items())
    }


class CheckpointWriter:
    """Writes checkpoints, optionally in a background thread, and logs each when it is on disk.

    A full disk is a warning, and training continues. Any other error is raised at the next
    `collect`. Only the training thread logs, so the log length in a checkpoint ends with a line.
    """

    def __init__(self, run: Run, *, background: bool) -> None:
        self.run = run
        self._thread = ThreadPoolExecutor(max_workers=1) if background else None
        self._pending: deque[tuple[int, int, Future[str]]] = deque()
        """Step, best step and the result: why the checkpoint is not on disk, or empty"""

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread:
            self._thread.shutdown()
        try:
            self.collect()
        except Exception as error:
            if kind is None:
                raise
            # the run ends with another error, which would hide this one
            self.run.warn(f"{self.run.checkpoints}: a checkpoint failed ({error!r})")

    @property
    def busy(self) -> bool:
        self.collect()
        return bool(self._pending)

    def save(self, saved: Checkpoint, *, best_step: int) -> None:
        """Write checkpoints/step-N; retain only it, the newest before it and the best."""
        self.collect()
        problem: Future[str] = Future()
        if self._thread:
            problem = self._thread.submit(self._save, saved, best_step)
        else:
            problem.set_result(self._save(saved, best_step))
        self._pending.append((saved.step, best_step, problem))
        if not self._thread:
            self.collect()

    def collect(self) -> None:
        """Log the checkpoints that have been written since the last call."""
        while self._pending and self._pending[0][2].done():
            step, best_step, write = self._pending.popleft()
            if problem := write.result():
                self.run.warn(problem)
            else:
                self.run.append(CheckpointSaved(step=step, best_step=best_step))

    def _save(self, saved: Checkpoint, best_step: int) -> str:
        if saved.ready is not None:
            saved.ready.synchronize()
        try:
            write_checkpoint(self.run, saved)
            steps = sorted(step for step in list_steps(self.run) if step <= saved.step)
            for step in set(list_steps(self.run)) - {*steps[-2:], best_step}:
                runs.remove(self.run.checkpoints / f"step-{step}")
        except OSError as error:
            why = error.strerror or error
            return f"{self.run.checkpoints} cannot be written to ({why}); training goes on without"
        return ""


class CheckpointSchedule:
    """Saves the state at the config's interval, and after validations where that costs little."""

    def __init__(self, engine: Engine, writer: CheckpointWriter) -> None:
        self.writer = writer
        self.every_s = 60 * engine.checkpoint_minutes
        self.saved_at, self.cost_s = time.perf_counter(), 0.0
        self.last: object = None

    def is_due(self, *, validated: bool = False) -> bool:
        busy, since = self.writer.busy, time.perf_counter() - self.saved_at
        enough = self.cost_s / SHARE_OF_TIME if validated else self.every_s
        return since >= min(enough, self.every_s) and not busy

    def save(self, take: Callable[[], Checkpoint], *, point: object, best_step: int = 0) -> None:
        """Write what `take` returns, unless the last checkpoint is of the same point."""
        began = time.perf_counter()
        if point == self.last:
            return
        self.writer.collect()  # logs earlier ones before this one records the log's length
        self.last, checkpoint = point, take()
        self.writer.save(checkpoint, best_step=best_step)
        self.saved_at = time.perf_counter()
        self.cost_s = self.saved_at - began


def list_steps(run: Run) -> list[int]:
    """List the steps that have a checkpoint, oldest first."""
    names = [folder.name.removeprefix("step-") for folder in run.checkpoints.glob("step-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def write_checkpoint(run: Run, saved: Checkpoint) -> None:
    """Write checkpoints/step-N."""
    facts = {"format": FORMAT, "config": run.origin.get("config")} | saved.metadata
    run.checkpoints.mkdir(exist_ok=True)
    write_folder(run.checkpoints / f"step-{saved.step}", saved.tensors, {STATE_FILE: facts})


def write_folder(folder: Path, tensors: Mapping[str, Tensors], facts: Mapping[str, Any]) -> None:
    """Write a folder of tensors and JSON files with its manifest, atomically."""
    with runs.replace_atomically(folder) as temporary:
        temporary.mkdir()
        for name, content in tensors.items():
            _write_tensors(temporary / name, content)
        for name, value in facts.items():
            runs.write_json(temporary / name, value)
        sums = {path.name: compute_sha256(path) for path in sorted(temporary.iterdir())}
        runs.write_json(temporary / MANIFEST, sums)


def _write_tensors(path: Path, tensors: Tensors) -> None:
    try:
        safetensors.torch.save_file(tensors, path)
    except SafetensorError as error:  # an error of the disk, such as a full one
        code = re.search(r"(?:os error|code:) (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error), str(path)) from None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint."""
    files = read_verified(folder)
    tensors = {
        name: parse_tensors(content, folder / name)
        for name, content in files.items()
        if name.endswith(".safetensors")
    }
    facts = json.loads(files[STATE_FILE])
    return Checkpoint(int(folder.name.removeprefix("step-")), tensors, facts)


def read_newest(run: Run) -> tuple[Checkpoint, list[str]]:
    """Read the newest valid checkpoint; also return what is wrong with newer ones."""
    wrong: list[str] = []
    for step in reversed(list_steps(run)):
        try:
            checkpoint = read_checkpoint(run.checkpoints / f"step-{step}")
        except UserError as error:
            wrong.append(str(error))
            continue
        if checkpoint.metadata.get("format") != FORMAT:
            raise UserError(
                f"{run.folder}: was written by an earlier version of Slipstream; its model can be "
                "evaluated and used, but training cannot be resumed; start a new run"
            )
        return checkpoint, wrong
    if wrong:
        raise UserError(f"{run.folder}: no checkpoint can be trusted: {'; '.join(wrong)}")
    raise UserError(f"{run.folder}: has no checkpoint to resume from; start a new run")


def parse_tensors(content: bytes, path: Path) -> Tensors:
    return parse_safetensors(content, path, safetensors.torch.load)


def save_model(
    run: Run,
    weights: Mapping[str, Tensor],
    signature: Signature,
    scaler: Scaler,
    limits: Mapping[str, Limits] | None = None,
) -> None:
    """Write model/: everything that evaluate and predict need besides the config.

    `limits` are the ranges that steps of `data.prepare` were fitted to.
    """
    facts = {SIGNATURE_FILE: signature.model_dump(), SCALER_FILE: asdict(scaler)}
    if limits:
        facts[PREPARE_FILE] = {"limits": limits}
    if run.origin:
        facts[ORIGIN] = run.origin
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_folder(run.model, {WEIGHTS_FILE: host}, facts)


def count_parameters(run: Run) -> int:
    """Return the number of weights of a run's model."""
    path = run.model / WEIGHTS_FILE
    weights = parse_tensors(read_verified(run.model)[path.name], path)
    return sum(weight.numel() for weight in weights.values())


def load_model(
    run: Run, config: Config, device: torch.device
) -> tuple[WindowPredictor | MaskedAutoencoder, Signature, Scaler]:
    """Load the trained model of a run."""
    files = read_verified(run.model)
    signature, scaler = parse_description(files)
    path = run.model / WEIGHTS_FILE
    model = build(config.model, signature)
    try:
        model.load_state_dict(parse_tensors(files[path.name], path))
    except RuntimeError as error:
        raise UserError(f"{path}: does not fit the run's config: {error}") from None
    return model.to(device), signature, scaler
