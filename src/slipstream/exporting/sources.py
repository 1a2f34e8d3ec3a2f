"""Load the run that is exported, in torch and without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.run_names import ENSEMBLE_FILE, OUT
from slipstream.base.storage import MANIFEST, compute_sha256, read_verified
from slipstream.config import Config, Engine
from slipstream.config.data import SIMULATED
from slipstream.inference.portable import (
    MEMBERS,
    PortableMember,
    PortableModel,
    PortableRun,
    load_portable,
)
from slipstream.inference.trained import TrainedRun
from slipstream.models.files import ORIGIN, load_run_config
from slipstream.runs.lanes import ENSEMBLE, LANE_METADATA, LANES_FOLDER, MODEL

POSITIONS = "core.positions"


def load_source(run: str | Path, trained: TrainedRun, ensemble: bool | None) -> PortableRun:
    """Return the run without torch; that of the user's own class without its weights."""
    if any(member.config.model.is_custom for member in trained.members):
        return _describe_custom(trained)
    portable = load_portable(run, ensemble=ensemble)
    members = [
        replace(
            member,
            models=tuple(map(_add_positions, member.models, loaded.trained.models)),
        )
        for member, loaded in zip(portable.members, trained.members, strict=True)
    ]
    return replace(portable, members=tuple(members))


def _add_positions(model: PortableModel, network: nn.Module) -> PortableModel:
    """Add the table of sinusoidal positions as torch computes it: a last digit of a frequency is
    several of an angle, a thousand tokens later."""
    buffers = dict(network.named_buffers())
    if POSITIONS not in buffers:
        return model
    table = buffers[POSITIONS].cpu().numpy().astype(np.float32)
    return replace(model, weights=model.weights | {POSITIONS: table})


def _describe_custom(trained: TrainedRun) -> PortableRun:
    """Return config, columns, scaling and intervals of a run."""
    if trained.mixtures:
        raise UserError(
            f"{trained.run.folder}: a member's network is a class of yours, and an ensemble with "
            "one cannot be exported; export the members by themselves"
        )
    member = trained.first
    signature, scaler = member.trained.signature, member.trained.scaler
    widths = None
    if (half_widths := member.trained.folds[-1].half_widths) is not None:
        sizes = [scaler.size[name] for name in signature.targets]
        widths = {level: one.double().numpy() * sizes for level, one in half_widths.items()}
    model = PortableModel(member.config, signature, scaler, {})
    described = PortableMember(
        member.name, member.run, (model,), member.trained.describe_on_new_data(), widths
    )
    what = trained.describe(on_folds=False)
    return PortableRun(trained.run, trained.owner, (described,), (1.0,), widths, 0, what, hashes={})


def write_standalone(run: PortableRun, folder: Path) -> None:
    """Write the run's model, or its members with their weights, into a folder."""
    if not run.is_ensemble:
        _write_member(run.members[0], folder)
        return
    config = strip_config(runs.load_config(run.run))
    (folder / "config.toml").write_text(runs.format_config(config), encoding="utf-8")
    content = runs.read_json(run.run.folder / ENSEMBLE_FILE)
    for member in content["members"]:
        member["run"] = Path(member["run"]).name
    if list(run.weights) != content["folds"][-1]["weights"]:  # the best member was chosen
        for fold in content["folds"]:
            fold["weights"] = [float(number == fold["best"]) for number in range(len(run.members))]
            fold["reach"][ENSEMBLE] = fold["reach"][MODEL]
    runs.write_json(folder / ENSEMBLE_FILE, content)
    for number, one in enumerate(run.members, start=1):
        inner = folder / MEMBERS / str(number)
        inner.mkdir(parents=True)
        _write_member(one, inner)


def strip_config(config: Config) -> Config:
    """Return a config without what only its own machine knows: folders and devices."""
    steps = tuple(
        step.model_copy(update={"path": _shorten(path)}) if (path := _get_path(step)) else step
        for step in config.data.prepare
    )
    paths = {"path": config.data.path, "labels": config.data.labels}
    data = {name: _shorten(value) for name, value in paths.items()} | {"prepare": steps}
    return config.model_copy(
        update={
            "out": OUT,
            "data": config.data.model_copy(update=data),
            "train": config.train.model_copy(update={"init_from": None}),
            "engine": Engine(),
        }
    )


def _get_path(step: Any) -> str | None:
    return getattr(step, "path", None)


def _shorten(path: Any) -> Any:
    """Return a path's last part; of several paths, that of each."""
    if isinstance(path, str):
        return path if path.startswith(SIMULATED) else Path(path).name
    return tuple(map(_shorten, path)) if path else path


def _write_member(member: PortableMember, folder: Path) -> None:
    run = member.run
    text = runs.format_config(strip_config(load_run_config(run)))
    (folder / "config.toml").write_text(text, encoding="utf-8")
    files = read_verified(run.model)
    origin = json.loads(files.get(ORIGIN, b"{}")) | {"config": text}
    files[ORIGIN] = runs.to_json(origin).encode()
    _write_verified(folder / run.model.name, files)
    if (lanes := run.folder / LANES_FOLDER).exists():
        files = read_verified(lanes)
        metadata = json.loads(files[LANE_METADATA])
        if len(metadata["folds"][-1]["lanes"]) > 1:
            metadata["uses"] = ENSEMBLE if len(member.models) > 1 else MODEL
        files[LANE_METADATA] = runs.to_json(metadata).encode()
        _write_verified(folder / LANES_FOLDER, files)


def _write_verified(folder: Path, files: dict[str, bytes]) -> None:
    """Write a folder with its manifest."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sums = {name: compute_sha256(folder / name) for name in sorted(files)}
    runs.write_json(folder / MANIFEST, sums)
