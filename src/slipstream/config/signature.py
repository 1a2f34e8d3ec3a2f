"""What a trained model eats and gives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.config.base import Names, Section


class Signature(Section):
    """Columns in the order that the weights expect, and the window's shape."""

    inputs: Names
    targets: Names
    static: Names
    shared: int
    """The last `shared` inputs are the first `shared` targets."""
    context: int
    horizon: int
    channels: Literal["together", "independent"]
    quantiles: Annotated[tuple[float, ...], Field(strict=False)]
    """Empty for a point prediction."""
    step: float | None
    """Usual time from row to row: seconds for timestamps, else in the time column's own unit."""
    classes: Names = ()
    """To classify: their names, numbered in this order. Empty where numbers are predicted."""
    decoder: int = 0
    """Of a pre-trained encoder: hidden units of what makes rows of its tokens. 0: of a model that
    predicts"""

    @property
    def masked(self) -> bool:
        """Whether this is an encoder's, which fills in masked rows of its inputs."""
        return self.decoder > 0

    @property
    def outputs(self) -> int:
        """Numbers for each predicted value: its quantiles, or how likely each class is."""
        return max(len(self.quantiles), len(self.classes), 1)

    @property
    def steps_out(self) -> int:
        """Predicted rows per window; an encoder's are all of it."""
        return self.context if self.masked else max(self.horizon, 1)

    @property
    def sequences_per_window(self) -> int:
        """Sequences that one window becomes: one, or one per target channel."""
        return len(self.targets) if self.channels == "independent" else 1

    @property
    def model_inputs(self) -> int:
        """Columns of one sequence."""
        return len(self.inputs) - self.sequences_per_window + 1

    @property
    def model_targets(self) -> int:
        return len(self.targets) // self.sequences_per_window

    @property
    def model_shared(self) -> int:
        """How many of the sequence's last columns are its first targets, in the same numbers: a
        class has no size that changes with its column's."""
        return 0 if self.classes else self.shared // self.sequences_per_window

    @property
    def lead(self) -> int:
        """Rows from a window's first row to its first target row."""
        if self.masked:
            return 0
        return self.context if self.horizon else self.context - 1
