"""What every section is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

Names = Annotated[tuple[str, ...], Field(strict=False)]
Scalar = str | int | float | bool
Scalars = Annotated[tuple[Scalar, ...], Field(strict=False)]
Sizes = Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Weights = Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=2)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

CLASS_LOSSES = ("cross_entropy", "focal")


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # null would not come back as a number
    )
