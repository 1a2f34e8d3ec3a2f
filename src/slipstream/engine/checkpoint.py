"""Weights on disk: safetensors and JSON, written aside and renamed. No pickle is ever read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import runs
from slipstream.config import Config, Signature
from slipstream.data.scaling import Scaler
from slipstream.errors import UserError
from slipstream.models import Forecaster, build
from slipstream.runs import Run


class Writer:
    """Writes checkpoints, in the background if asked to; the copies it writes are its own."""

    def __init__(self, run: Run, *, background: bool) -> None:
        self.run = run
        self._thread = ThreadPoolExecutor(max_workers=1) if background else None
        self._pending: list[Future[None]] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread:
            self._thread.shutdown()
        for write in self._pending:
            write.result()

    def save(
        self,
        *,
        step: int,
        weights: Mapping[str, Tensor],
        progress: dict[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Write checkpoints/step-N, unless it is there: weights, optimizer, progress."""
        files = {"weights.safetensors": _on_host(weights)}
        if optimizer is not None:
            files["optimizer.safetensors"] = _on_host(
                {
                    f"{index}.{name}": value
                    for index, values in optimizer.state_dict()["state"].items()
                    for name, value in values.items()
                    if isinstance(value, Tensor)
                }
            )
        self._do(lambda: _write(self.run, step, files, progress | {"step": step}))

    def keep_only(self, steps: set[int]) -> None:
        """Remove the checkpoints of all other steps."""
        self._do(lambda: _remove_others(self.run, {f"step-{step}" for step in steps}))

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread:
            self._pending.append(self._thread.submit(work))
        else:
            work()


def _write(
    run: Run, step: int, files: dict[str, dict[str, Tensor]], progress: dict[str, Any]
) -> None:
    folder = run.checkpoints / f"step-{step}"
    if folder.exists():
        return
    run.checkpoints.mkdir(exist_ok=True)
    with runs.replacing(folder) as temporary:
        temporary.mkdir()
        for name, tensors in files.items():
            save_file(tensors, temporary / name)
        runs.write_json(temporary / "progress.json", progress)


def _remove_others(run: Run, kept: set[str]) -> None:
    for folder in run.checkpoints.glob("step-*"):
        if folder.name not in kept:
            runs.remove(folder)


def save_model(
    run: Run, *, weights: Mapping[str, Tensor], signature: Signature, scaler: Scaler
) -> None:
    """Write model/: all that evaluate and predict need beside the config."""
    with runs.replacing(run.model) as temporary:
        temporary.mkdir()
        save_file(_on_host(weights), temporary / "weights.safetensors")
        runs.write_json(temporary / "signature.json", signature.model_dump())
        runs.write_json(temporary / "scaler.json", scaler.to_dict())


def load_model(
    run: Run, config: Config, device: torch.device
) -> tuple[Forecaster, Signature, Scaler]:
    """The trained model of a run."""
    signature = Signature.model_validate(runs.read_json(run.model / "signature.json"))
    scaler = Scaler.from_dict(runs.read_json(run.model / "scaler.json"))
    path = run.model / "weights.safetensors"
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as weights ({error})") from None
    model = build(config.model, signature)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path}: does not fit the run's config: {error}") from None
    return model.to(device), signature, scaler


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share no memory with the live tensors."""
    return {
        name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()
    }
