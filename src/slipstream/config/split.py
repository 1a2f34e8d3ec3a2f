"""How rows are divided into training, validation and test."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from slipstream.config.base import Fraction, Scalars, Section


class Split(Section):
    """Which rows are for training, validation and test. Give one of the four forms."""

    train: Fraction | Scalars | None = None
    """Share of each series, from its start (0.7); or, beside `by`, the values that train (default:
    the rest)."""
    val: Fraction | Scalars | None = None
    """Share of each series after the training rows; or, beside `by`, the values that validate."""
    test: Fraction | Scalars | None = None
    """Share of each series after the validation rows; or, beside `by`, the values that test."""
    rows: Annotated[tuple[PositiveInt, ...], Field(strict=False)] | None = None
    """Training, validation and test rows of each series, in that order; what follows is unused."""
    by: str | None = None
    """A column whose value says which set a row belongs to; `"series"` takes the series' name."""
    folders: bool = False
    """The folders train/, val/ and test/ below `data.path` hold the sets."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        shares = (self.train, self.val, self.test)
        if sum((self.rows is not None, self.by is not None, self.folders)) > 1:
            raise ValueError("give one of train/val/test shares, rows, by, or folders, not several")
        if self.by is not None:
            if isinstance(self.val, float) or isinstance(self.test, float):
                raise ValueError(f'beside by = "{self.by}", val and test are lists of its values')
            if not self.val or not self.test:
                raise ValueError(f'beside by = "{self.by}", name the values of both val and test')
        elif self.rows is not None or self.folders:
            if any(share is not None for share in shares):
                raise ValueError("train, val and test go with shares or with by, nothing else")
            if self.rows is not None and len(self.rows) != 3:
                raise ValueError("rows takes three counts: training, validation, test")
        else:
            fractions = [share for share in shares if isinstance(share, float)]
            if len(fractions) != 3:
                raise ValueError("give all of train, val and test as shares of each series")
            if sum(fractions) > 1 + 1e-9:
                raise ValueError(f"the shares add up to {sum(fractions):g}, which is more than 1")
        return self
