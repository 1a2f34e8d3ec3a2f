"""Runs whose network is the user's own class: only torch can run them."""

from __future__ import annotations

from slipstream.errors import UserError
from slipstream.inference.trained import TrainedRun
from slipstream.portable.model import PortableMember, PortableModel, PortableRun


def describe_custom(trained: TrainedRun) -> PortableRun:
    """Return a run without its weights: config, columns, scaling and intervals."""
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
