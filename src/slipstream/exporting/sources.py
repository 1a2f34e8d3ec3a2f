"""Load the run that is exported, in torch and without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from slipstream.errors import UserError
from slipstream.inference.trained import TrainedRun
from slipstream.portable.model import PortableMember, PortableModel, PortableRun, load_portable

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
