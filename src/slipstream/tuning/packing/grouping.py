"""Decides which trials share a pack.

The lanes of a pack run one program. They may differ in width and batch size by padding, which costs
time: a step takes as long as if all lanes were as wide as the widest, and a lane with half the
batch size takes twice the steps. A separate pack costs time too, because a step has a minimum
duration, however few lanes it has. `group_trials` estimates both and merges packs while that saves
time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.config import Config
from slipstream.engine.lanes.capacity import MAY_DIFFER
from slipstream.tuning.packing.trial import TrialRun

ON_CHIP = 128
"""Hidden units whose weights fit into one processor of a GPU"""
FLOOR_MS = {"cuda": (3e-3, 4e-5), "cpu": (0.0, 0.0)}
"""The minimum time of a step per context row and layer: a constant, and a part per hidden unit"""
OVERLAP = 0.5
"""The part of it that remains when other packs train at the same time"""
FLOPS_PER_MS = {"cuda": 1.5e11, "cpu": 2e7}
"""Throughput of lanes that fill the device. Measured on an H200, as are the constants above."""


MAX_WASTE = 2.0
"""Computations of a trial in a pack of another shape, as a multiple of its own"""


class PackShape(NamedTuple):
    """The program, batch size and layer widths of a pack."""

    program: str
    """Every setting that the lanes of a pack share, as JSON"""
    batch: int
    widths: tuple[int, ...]

    def merge(self, other: PackShape) -> PackShape | None:
        """Return the smallest shape into which lanes of both fit, or None if there is none."""
        if self.program != other.program or len(self.widths) != len(other.widths):
            return None
        widths = tuple(map(max, self.widths, other.widths))
        return PackShape(self.program, max(self.batch, other.batch), widths)


def get_pack_shape(config: Config, device: str) -> PackShape:
    common: dict[str, Any] = {}
    for section, values in config.model_dump(exclude={"tune"}).items():
        if isinstance(values, dict):
            common |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            common[section] = values
    common = {name: value for name, value in common.items() if name not in MAY_DIFFER}
    widths = config.model.sizes
    if not config.model.can_pad:
        common["model.hidden"] = widths
    elif config.model.spec.has_hidden:
        widths = tuple(_round_width(width, device) for width in widths)
    batch = config.train.batch
    assert batch != "auto"
    return PackShape(json.dumps(common, sort_keys=True, default=str), batch, widths)


def get_trial_shape(trial: TrialRun, device: str) -> PackShape:
    """Return the shape of a pack for this trial alone, computed once: it is compared often."""
    if device not in trial.shapes:
        trial.shapes[device] = get_pack_shape(trial.config, device)
    shape: PackShape = trial.shapes[device]
    return shape


def _round_width(width: int, device: str) -> int:
    """Round up to a power of two, as the kernels do anyway; on a CPU also to three quarters of one,
    and on a GPU to multiples of 64 where the weights do not fit on one processor."""
    if device == "cuda" and width > ON_CHIP:
        return -(-width // 64) * 64
    power = max(16, 1 << (width - 1).bit_length())
    return power * 3 // 4 if device == "cpu" and width <= power * 3 // 4 else power


def can_join(trial: TrialRun, pack: PackShape, device: str) -> bool:
    """Whether a trial of another shape may take a place that is empty in a running pack on a GPU,
    which costs at most `MAX_WASTE` times as much as a pack of its own shape."""
    own = get_trial_shape(trial, device)
    if device != "cuda" or own.merge(pack) != pack:
        return False
    return _count_flops(pack) * pack.batch <= MAX_WASTE * _count_flops(own) * own.batch


@dataclass
class TrialGroup:
    """Trials that train as one pack."""

    shape: PackShape
    trials: list[TrialRun]


def group_trials(waiting: Sequence[TrialRun], device: str, num_windows: int) -> list[TrialGroup]:
    """Group all trials, the largest group first; `num_windows` is the length of an epoch."""
    exact: dict[PackShape, TrialGroup] = {}
    for trial in waiting:
        shape = get_trial_shape(trial, device)
        exact.setdefault(shape, TrialGroup(shape, [])).trials.append(trial)
    groups = list(exact.values())
    while merged := _merge_best(groups, device, num_windows):
        groups = merged
    return sorted(groups, key=lambda group: -len(group.trials))


def _merge_best(groups: list[TrialGroup], device: str, num_windows: int) -> list[TrialGroup]:
    """Merge the two groups whose union saves most time; return [] if no union saves any."""
    best_saving: float = 0.0
    best_merge: list[TrialGroup] = []
    costs = [_estimate_ms(group, device, num_windows) for group in groups]
    for i, one in enumerate(groups):
        for j, other in enumerate(groups[:i]):
            shape = one.shape.merge(other.shape)
            if shape is None:
                continue
            union = TrialGroup(shape, [*other.trials, *one.trials])
            saving = costs[i] + costs[j] - _estimate_ms(union, device, num_windows)
            if saving > best_saving:
                rest = [group for group in groups if group not in (one, other)]
                best_saving, best_merge = saving, [*rest, union]
    return best_merge


def _estimate_ms(group: TrialGroup, device: str, num_windows: int) -> float:
    """Estimate the time that one epoch of every trial takes in one pack."""
    config = group.trials[0].config
    rows = config.data.context // config.model.patch
    constant, per_unit = FLOOR_MS[device]
    floor = OVERLAP * rows * sum(constant + per_unit * width for width in group.shape.widths)
    lane = 3 * _count_flops(group.shape) * rows * group.shape.batch / FLOPS_PER_MS[device]
    steps_left = sorted(-(-num_windows // int(one.config.train.batch)) for one in group.trials)
    total, done = 0.0, 0
    for ended, steps in enumerate(steps_left):  # a pack gets cheaper as its lanes end
        total += (steps - done) * (floor + lane * (len(steps_left) - ended))
        done = steps
    return total


def _count_flops(shape: PackShape) -> int:
    """Count the operations of a recurrent forward pass, per row and window."""
    before, flops = 16, 0
    for width in shape.widths:
        flops += 8 * width * (before + width)
        before = width
    return flops
