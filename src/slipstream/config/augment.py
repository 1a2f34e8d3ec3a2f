"""The settings of augmentation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slipstream.config.base import NonNegative, Section

Share = Annotated[float, Field(ge=0, lt=1)]
Chance = Annotated[float, Field(gt=0, le=1)]
KINDS = ("jitter", "scaling", "volatility", "warp", "slice", "mixup", "cutmix")


class Augment(Section):
    """Random changes of training windows in every step; validation and test windows never change.
    Each kind has a strength (0 is off) and a probability per window."""

    jitter: NonNegative = 0.0
    """Noise on every value: its standard deviation, in scaled units."""
    jitter_chance: Chance = 0.5
    """Probability per window."""
    scaling: NonNegative = 0.0
    """Multiply every column by its own factor around 1: the factors' standard deviation. Targets
    that are also inputs follow."""
    scaling_chance: Chance = 0.5
    """Probability per window."""
    volatility: NonNegative = 0.0
    """Stretch deviations from the window's mean, in all columns alike: the standard deviation of
    the factor's logarithm. Targets that are also inputs follow."""
    volatility_chance: Chance = 0.5
    """Probability per window."""
    warp: Share = 0.0
    """Distort time, never backwards; first and last row stay: how far the speed may differ from
    1."""
    warp_chance: Chance = 0.5
    """Probability per window."""
    slice: Share = 0.0
    """Stretch the window's last rows to its whole length: the largest fraction cut off at its
    start."""
    slice_chance: Chance = 0.5
    """Probability per window."""
    mixup: Share = 0.0
    """Blend in another window of the batch, and its loss: the largest fraction."""
    mixup_chance: Chance = 0.5
    """Probability per window."""
    cutmix: Share = 0.0
    """Take a block of rows from another window of the batch, and a matching part of its loss: the
    largest fraction of rows."""
    cutmix_chance: Chance = 0.5
    """Probability per window."""

    cache: Annotated[int, Field(ge=0)] = 0
    """Instead of augmenting in every step, write this many augmented copies of all training windows
    to disk once, and read one per epoch. Blends (`mixup`, `cutmix`) stay in the step. `slipstream
    bench ladder` measures which is faster."""

    @property
    def for_step(self) -> Augment:
        """The augmentation that remains in the step beside cached copies."""
        if not self.cache:
            return self
        return self.model_copy(update=dict.fromkeys(KINDS[:-2], 0.0))

    @property
    def for_cache(self) -> Augment:
        return self.model_copy(update=dict.fromkeys(KINDS[-2:], 0.0))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are on."""
        return tuple(kind for kind in KINDS if getattr(self, kind) > 0)
