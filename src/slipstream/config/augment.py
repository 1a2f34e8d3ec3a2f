"""How training windows are changed before the model sees them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slipstream.config.base import NonNegative, Section

Share = Annotated[float, Field(ge=0, lt=1)]
Chance = Annotated[float, Field(gt=0, le=1)]
KINDS = ("jitter", "scaling", "volatility", "warp", "slice", "mixup", "cutmix")


class Augment(Section):
    """Training windows, changed at random in every step; those of validation and test never. Each
    kind has a strength, and 0 is off, and a chance of meeting a window."""

    jitter: NonNegative = 0.0
    """Noise on every value: its deviation, in scaled units."""
    jitter_chance: Chance = 0.5
    """Share of windows that get it."""
    scaling: NonNegative = 0.0
    """Every column times its own factor around 1: the factors' deviation. Targets that are inputs
    too follow."""
    scaling_chance: Chance = 0.5
    """Share of windows that get it."""
    volatility: NonNegative = 0.0
    """Moves about the window's mean made larger or smaller, in all columns alike: the deviation of
    the factor's logarithm. Targets that are inputs too follow."""
    volatility_chance: Chance = 0.5
    """Share of windows that get it."""
    warp: Share = 0.0
    """Time that runs faster here and slower there, never backwards; first and last row stay. How
    far its speed may leave 1."""
    warp_chance: Chance = 0.5
    """Share of windows that get it."""
    slice: Share = 0.0
    """The window's last rows, stretched to its whole length: the largest share that is cut off at
    its start."""
    slice_chance: Chance = 0.5
    """Share of windows that get it."""
    mixup: Share = 0.0
    """Another window of the batch blended in, and its loss too: the largest share."""
    mixup_chance: Chance = 0.5
    """Share of windows that get it."""
    cutmix: Share = 0.0
    """A stretch of rows taken from another window of the batch, and as much of its loss: the
    largest share of rows."""
    cutmix_chance: Chance = 0.5
    """Share of windows that get it."""

    cache: Annotated[int, Field(ge=0)] = 0
    """Instead of in every step: write so many augmented copies of all training windows to disk
    once, and read them back, one in each epoch. Blends (`mixup`, `cutmix`) stay in the step.
    `slipstream bench ladder` says which is faster."""

    @property
    def for_step(self) -> Augment:
        """What is left to do where there are copies"""
        if not self.cache:
            return self
        return self.model_copy(update=dict.fromkeys(KINDS[:-2], 0.0))

    @property
    def for_cache(self) -> Augment:
        return self.model_copy(update=dict.fromkeys(KINDS[-2:], 0.0))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that are on"""
        return tuple(kind for kind in KINDS if getattr(self, kind) > 0)
