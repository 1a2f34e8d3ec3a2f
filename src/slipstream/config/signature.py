"""The inputs and outputs of a trained model."""

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
    """Hidden units of a pre-trained encoder's decoder; 0 for a model that predicts."""

    @property
    def masked(self) -> bool:
        """Whether the model is an encoder that fills in masked rows of its inputs."""
        return self.decoder > 0

    @property
    def outputs(self) -> int:
        """Numbers for each predicted value: its quantiles, or a probability per class."""
        return max(len(self.quantiles), len(self.classes), 1)

    @property
    def steps_out(self) -> int:
        """Predicted rows per window; an encoder predicts all of its rows."""
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
        """How many of the sequence's last columns are its first targets. Classes are never: their
        numbers do not scale with the column."""
        return 0 if self.classes else self.shared // self.sequences_per_window

    @property
    def lead(self) -> int:
        """Rows from a window's first row to its first target row."""
        if self.masked:
            return 0
        return self.context if self.horizon else self.context - 1
