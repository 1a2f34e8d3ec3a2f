"""How rows are divided into training, validation and test."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from slipstream.config.base import Fraction, Scalars, Section

WALKING_SHARES = {"val": 0.1, "test": 0.2}
"""What `walk_forward` sets aside of each series unless told: the same as the default split."""


class Split(Section):
    """Which rows are for training, validation and test. Give one of the six forms."""

    train: Fraction | Scalars | None = None
    """Share of each series, from its start (0.7); or, beside `by`, the values that train (default:
    the rest)."""
    val: Fraction | Scalars | None = None
    """Share of each series after the training rows; or, beside `by`, the values that validate.
    Beside `walk_forward`, every fold's share (default 0.1)."""
    test: Fraction | Scalars | None = None
    """Share of each series after the validation rows, which only pre-training does without; or,
    beside `by`, the values that test. Beside `walk_forward`, the share of all test blocks together
    (default 0.2)."""
    rows: Annotated[tuple[PositiveInt, ...], Field(strict=False)] | None = None
    """Training, validation and test rows of each series, in that order; what follows is unused."""
    by: str | None = None
    """A column whose value says which set a row belongs to; `"series"` takes the series' name where
    no column has that name."""
    folders: bool = False
    """The folders train/, val/ and test/ below `data.path` hold the sets."""
    stratified: bool = False
    """Beside shares, to classify: cut each class by itself, so that every set has its part of all
    classes. Windows that share rows with a later set are left out. Classes that come at other times
    are then learnt at one time and tested at another: no forecast would have known that."""
    walk_forward: PositiveInt | None = None
    """Folds. The end of each series is cut into so many test blocks of one length, one after the
    other; each fold trains on what comes before its block and validates on the last of that."""
    window: Literal["expanding", "rolling"] = "expanding"
    """Beside `walk_forward`: train on everything before the validation rows, or on the last of it,
    as many rows as the first fold has (context included)."""
    purge: Annotated[int, Field(ge=0)] = 0
    """Beside `walk_forward`: rows left out between training and validation, and between validation
    and test. Sets never share target rows as it is; raise it where a label is made of the rows
    after it: 5 for the return over the next 5 rows."""
    embargo: Annotated[int, Field(ge=0)] = 0
    """Beside `walk_forward`: rows after each test block that later folds do not train on."""

    @model_validator(mode="before")
    @classmethod
    def _walking_shares(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("walk_forward") is not None:
            return WALKING_SHARES | settings
        return settings

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = [form is not None for form in (self.rows, self.by, self.walk_forward)]
        if sum((*forms, self.folders)) > 1:
            raise ValueError(
                "data.split: give one of train/val/test shares, rows, by, folders, or "
                "walk_forward, not several"
            )
        if self.stratified and any((*forms, self.folders)):
            raise ValueError("data.split.stratified goes with shares: train, val and test")
        if self.walk_forward is not None:
            self._check_walk()
            return self
        for name in ("window", "purge", "embargo"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"data.split.{name} goes with walk_forward, which is not set; for a single "
                    "split, set walk_forward = 1"
                )
        self._check_sets()
        return self

    def _given(self) -> list[Any]:
        return [share for share in (self.train, self.val, self.test) if share is not None]

    def _check_walk(self) -> None:
        if self.train is not None:
            raise ValueError(
                "data.split.walk_forward trains on all rows that val and test leave; take train "
                f"out, as in split = {{ walk_forward = {self.walk_forward} }}"
            )
        val, test = self.val, self.test
        if not (isinstance(val, float) and isinstance(test, float)):
            raise ValueError("beside data.split.walk_forward, val and test are shares, as in 0.1")
        if val + test > 1 - 1e-9:
            raise ValueError(
                f"data.split: val = {val:g} and test = {test:g} leave walk_forward no rows to "
                "train on; lower them"
            )

    def _check_sets(self) -> None:
        shares = (self.train, self.val, self.test)
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
            if self.train is None or self.val is None or len(fractions) != len(self._given()):
                raise ValueError("give all of train, val and test as shares of each series")
            if sum(fractions) > 1 + 1e-9:
                raise ValueError(f"the shares add up to {sum(fractions):g}, which is more than 1")
