"""Files that can be trusted: safetensors and JSON beside a manifest of their SHA-256 sums.

A folder is written aside, flushed to disk and renamed. On the way back every file is held against
the manifest before anything is made of it. No pickle is ever read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from slipstream import runs
from slipstream.checksums import MANIFEST, compute_sha256, read_verified
from slipstream.config import Config, Engine, Signature
from slipstream.data.scaler import Scaler
from slipstream.errors import UserError
from slipstream.models import Forecaster, MaskedAutoencoder, build
from slipstream.runs import Run

STATE_FILE = "state.json"
FORMAT = 2
"""Of checkpoints: what version 0.1 and the first builds of 0.2 wrote had none"""
SHARE_OF_TIME = 0.01
"""What checkpoints after validations may take of it; see `CheckpointSchedule`"""
ORIGIN = "origin.json"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A state on its way to disk or back: tensors on the host, by file, and plain values."""

    step: int
    tensors: dict[str, Tensors]
    metadata: dict[str, Any]
    ready: torch.cuda.Event | None = None
    """Reached when the tensors have arrived from the device"""


def copy_to_host(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copies that share no memory with the live tensors; from a GPU they are still on their way."""
    return {name: _copied(tensor.detach()) for name, tensor in tensors.items()}


def _copied(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


class Write(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    best_step: int
    trouble: Future[str]
    """Why it is not on disk; empty where it is"""


class CheckpointWriter:
    """Writes checkpoints, in the background if asked to, and logs each when it is on disk.

    A full disk is reported, and training goes on. Anything else is a fault, raised at the next
    look at what was written. Only the thread that trains logs, so a checkpoint's length of the log
    is that of whole lines.
    """

    def __init__(self, run: Run, *, background: bool) -> None:
        self.run = run
        self._thread = ThreadPoolExecutor(max_workers=1) if background else None
        self._pending: deque[Write] = deque()

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
            # the run already ends with another error, which hides this one
            self.run.warn(f"{self.run.checkpoints}: a checkpoint failed ({error!r})")

    @property
    def busy(self) -> bool:
        self.collect()
        return bool(self._pending)

    def save(self, saved: Checkpoint, *, best_step: int) -> None:
        """Write checkpoints/step-N, then drop all but it, the newest before it and the best."""
        self.collect()
        trouble: Future[str] = Future()
        if self._thread:
            trouble = self._thread.submit(self._save, saved, best_step)
        else:
            trouble.set_result(self._save(saved, best_step))
        self._pending.append(Write(saved.step, best_step, trouble))
        if not self._thread:
            self.collect()

    def collect(self) -> None:
        """Log the checkpoints that have been written since the last call."""
        while self._pending and self._pending[0].trouble.done():
            write = self._pending.popleft()
            trouble = write.trouble.result()
            if trouble:
                self.run.warn(trouble)
            else:
                self.run.append("checkpoint", step=write.step, best_step=write.best_step)

    def _save(self, saved: Checkpoint, best_step: int) -> str:
        if saved.ready is not None:
            saved.ready.synchronize()
        folder = self.run.checkpoints / f"step-{saved.step}"
        facts = {"format": FORMAT, "config": self.run.origin.get("config")} | saved.metadata
        try:
            self.run.checkpoints.mkdir(exist_ok=True)
            write_folder(folder, saved.tensors, {STATE_FILE: facts})
            steps = sorted(step for step in list_steps(self.run) if step <= saved.step)
            for step in set(list_steps(self.run)) - {*steps[-2:], best_step}:
                runs.remove(self.run.checkpoints / f"step-{step}")
        except OSError as error:
            why = error.strerror or error
            return f"{self.run.checkpoints} cannot be written to ({why}); training goes on without"
        return ""


class CheckpointSchedule:
    """Saves the state as often as the config wants it, and after validations as far as that costs
    little."""

    def __init__(self, engine: Engine, writer: CheckpointWriter) -> None:
        self.writer = writer
        self.every_s = 60 * engine.checkpoint_minutes
        self.saved_at, self.cost_s = time.perf_counter(), 0.0
        self.last: object = None

    def is_due(self, *, validated: bool = False) -> bool:
        busy, since = self.writer.busy, time.perf_counter() - self.saved_at
        enough = self.cost_s / SHARE_OF_TIME if validated else self.every_s
        return since >= min(enough, self.every_s) and not busy

    def save(self, take: Callable[[], Checkpoint], *, at: object, best_step: int = 0) -> None:
        """Write what `take` returns, unless that was done `at` the same point before."""
        began = time.perf_counter()
        if at == self.last:
            return
        self.writer.collect()  # logs what is on disk before this one notes the log's length
        self.last, checkpoint = at, take()
        self.writer.save(checkpoint, best_step=best_step)
        self.saved_at = time.perf_counter()
        self.cost_s = self.saved_at - began


def list_steps(run: Run) -> list[int]:
    """Steps that have a checkpoint, oldest first."""
    names = [folder.name.removeprefix("step-") for folder in run.checkpoints.glob("step-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def write_folder(folder: Path, tensors: Mapping[str, Tensors], facts: Mapping[str, Any]) -> None:
    """Write a folder of tensors and JSON files with its manifest, whole or not at all."""
    with runs.replace_atomically(folder) as temporary:
        temporary.mkdir()
        for name, found in tensors.items():
            _write_tensors(temporary / name, found)
        for name, value in facts.items():
            runs.write_json(temporary / name, value)
        sums = {path.name: compute_sha256(path) for path in sorted(temporary.iterdir())}
        runs.write_json(temporary / MANIFEST, sums)


def _write_tensors(path: Path, tensors: Tensors) -> None:
    try:
        safetensors.torch.save_file(tensors, path)
    except SafetensorError as error:  # a full disk is no fault of the tensors
        code = re.search(r"(?:os error|code:) (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error), str(path)) from None


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint, verified."""
    files = read_verified(folder)
    tensors = {
        name: parse_tensors(content, folder / name)
        for name, content in files.items()
        if name.endswith(".safetensors")
    }
    facts = json.loads(files[STATE_FILE])
    return Checkpoint(int(folder.name.removeprefix("step-")), tensors, facts)


def read_newest(run: Run) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that verifies, and what is wrong with those after it."""
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
    raise UserError(f"{run.folder}: holds no checkpoint to go on from; train it anew")


def parse_tensors(content: bytes, path: Path) -> Tensors:
    try:
        found: Tensors = safetensors.torch.load(content)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from None
    return found


def save_model(
    run: Run, weights: Mapping[str, Tensor], signature: Signature, scaler: Scaler
) -> None:
    """Write model/: all that evaluate and predict need beside the config."""
    facts = {"signature.json": signature.model_dump(), "scaler.json": asdict(scaler)}
    if run.origin:
        facts[ORIGIN] = run.origin
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_folder(run.model, {"weights.safetensors": host}, facts)


def load_run_config(run: Run, overrides: Iterable[str] = ()) -> Config:
    """The run's config with some settings overridden, if its model was trained with it."""
    return runs.load_config(run, overrides, origin=read_origin(run))


def read_origin(run: Run) -> dict[str, Any]:
    """What a run's model was trained with: `config`, the text of config.toml, and `data`, their
    fingerprint. Version 0.1 wrote nothing of it down."""
    found: dict[str, Any] = json.loads(read_verified(run.model).get(ORIGIN, b"{}"))
    return found


def load_model(
    run: Run, config: Config, device: torch.device
) -> tuple[Forecaster | MaskedAutoencoder, Signature, Scaler]:
    """The trained model of a run."""
    files = read_verified(run.model)
    signature = Signature.model_validate_json(files["signature.json"])
    scaler = Scaler(**json.loads(files["scaler.json"]))
    path = run.model / "weights.safetensors"
    model = build(config.model, signature)
    try:
        model.load_state_dict(parse_tensors(files[path.name], path))
    except RuntimeError as error:
        raise UserError(f"{path}: does not fit the run's config: {error}") from None
    return model.to(device), signature, scaler
