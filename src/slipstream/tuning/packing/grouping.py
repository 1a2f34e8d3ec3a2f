"""Which candidates share a pack.

Lanes of a pack have one program, and differ in width and batch by padding, which costs: a step of
the pack takes as long as if all lanes were as wide as the widest, and a lane of half the batch
takes twice the steps. A pack of its own costs as well, because a step has a least time, however few
lanes it has. Both are guessed here, and whatever is cheaper in sum is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.config import Config
from slipstream.engine.lanes.lane import MAY_DIFFER
from slipstream.tuning.packing.trial import TrialRun

ON_CHIP = 128
"""Hidden units whose weights one processor of a GPU holds"""
FLOOR_MS = {"cuda": (3e-3, 4e-5), "cpu": (0.0, 0.0)}
"""The least time of a step, per row of context and layer: so much, and so much per unit of width"""
OVERLAP = 0.5
"""What is left of it beside other packs"""
FLOPS_PER_MS = {"cuda": 1.5e11, "cpu": 2e7}
"""What lanes are computed at, where they fill the device. All as seen on an H200."""


class PackShape(NamedTuple):
    """What a pack is made for."""

    program: str
    """Every setting that lanes of one pack have in common"""
    batch: int
    widths: tuple[int, ...]

    def covers(self, other: PackShape) -> bool:
        """Whether the other's lanes fit into such a pack."""
        return (
            self.program == other.program
            and self.batch >= other.batch
            and len(self.widths) == len(other.widths)
            and all(a >= b for a, b in zip(self.widths, other.widths, strict=True))
        )

    def merge(self, other: PackShape) -> PackShape:
        """The least that takes both."""
        widths = tuple(map(max, zip(self.widths, other.widths, strict=True)))
        return PackShape(self.program, max(self.batch, other.batch), widths)


def get_pack_shape(config: Config, device: str) -> PackShape:
    settings = config.model_dump()
    settings.pop("tune")
    common: dict[str, Any] = {}
    for section, values in settings.items():
        inner = values.items() if isinstance(values, dict) else [("", values)]
        for key, value in inner:
            name = f"{section}.{key}" if key else section
            if name not in MAY_DIFFER:
                common[name] = value
    sizes = config.model.sizes
    if not config.model.can_pad:
        common["model.hidden"] = sizes
    elif config.model.spec.has_hidden:
        sizes = tuple(_rounded(size, device) for size in sizes)
    batch = config.train.batch
    assert batch != "auto"
    return PackShape(json.dumps(common, sort_keys=True, default=str), batch, sizes)


def _rounded(size: int, device: str) -> int:
    """Up to a power of two, as our kernels compute anyway; on a CPU also to half as much more, and
    on a GPU to multiples of 64 where weights do not fit on one processor."""
    if device == "cuda" and size > ON_CHIP:
        return -(-size // 64) * 64
    power = max(16, 1 << (size - 1).bit_length())
    return power * 3 // 4 if device == "cpu" and size <= power * 3 // 4 else power


@dataclass
class TrialGroup:
    """Candidates that train as one pack."""

    shape: PackShape
    trials: list[TrialRun]


def group_trials(waiting: Sequence[TrialRun], device: str, windows: int) -> list[TrialGroup]:
    """All candidates in groups, the largest group first; `windows` are those of an epoch."""
    exact: dict[PackShape, TrialGroup] = {}
    for one in waiting:
        shape = get_pack_shape(one.config, device)
        exact.setdefault(shape, TrialGroup(shape, [])).trials.append(one)
    found = list(exact.values())
    while merged := _merge(found, device, windows):
        found = merged
    return sorted(found, key=lambda group: -len(group.trials))


def _merge(groups: list[TrialGroup], device: str, windows: int) -> list[TrialGroup]:
    """The groups with those two together whose union saves most; none where nothing does."""
    best: tuple[float, int, int] | None = None
    costs = [_cost(group.shape, group.trials, device, windows) for group in groups]
    for i, one in enumerate(groups):
        for j, other in enumerate(groups[:i]):
            if one.shape.program != other.shape.program:
                continue
            if len(one.shape.widths) != len(other.shape.widths):
                continue
            union = one.shape.merge(other.shape)
            both = _cost(union, [*one.trials, *other.trials], device, windows)
            saved = costs[i] + costs[j] - both
            if saved > 0 and (best is None or saved > best[0]):
                best = saved, i, j
    if best is None:
        return []
    _, i, j = best
    one, other = groups[i], groups[j]
    joined = TrialGroup(one.shape.merge(other.shape), [*other.trials, *one.trials])
    return [*(group for at, group in enumerate(groups) if at not in (i, j)), joined]


def _cost(shape: PackShape, members: Iterable[TrialRun], device: str, windows: int) -> float:
    """Milliseconds that an epoch of every member takes in one pack."""
    every = list(members)
    config = every[0].config
    rows = config.data.context // config.model.patch
    before, work = 16, 0
    for width in shape.widths:
        work += 8 * width * (before + width)
        before = width
    least, by_width = FLOOR_MS[device]
    floor = OVERLAP * rows * sum(least + by_width * width for width in shape.widths)
    lane = 3 * work * rows * shape.batch / FLOPS_PER_MS[device]
    left = sorted(-(-windows // int(one.config.train.batch)) for one in every)
    total, done = 0.0, 0
    for at, steps in enumerate(left):  # as lanes end, the pack gets cheaper
        total += (steps - done) * (floor + lane * (len(left) - at))
        done = steps
    return total
