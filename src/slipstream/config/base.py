"""Types and the base class of all sections, and the hash of large seeds."""

import ast
import hashlib
import inspect
import itertools
import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from slipstream.base.errors import Text


def _parse_infinity(value: Any) -> Any:
    """Return infinity for the text "inf", because JSON has no such number, and any other value
    unchanged."""
    return math.inf if isinstance(value, str) and value == "inf" else value


Names = Annotated[tuple[str, ...], Field(strict=False)]
Scalar = str | int | float | bool
Scalars = Annotated[tuple[Scalar, ...], Field(strict=False)]
Marks = Annotated[tuple[str | int | float, ...], Field(strict=False)]
MAX_COUNT = 1_000_000_000
"""The largest number of rows or epochs that is accepted: more than anybody has, and small enough to
compute with"""
MAX_WIDTH, MAX_LAYERS = 65_536, 1_000
MAX_MODELS = 10_000
"""The most models that a run trains: repeats, folds, retrained trials"""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Sizes = Annotated[tuple[Width, ...], Field(strict=False, min_length=1, max_length=MAX_LAYERS)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveOrInf = Annotated[float, BeforeValidator(_parse_infinity), Field(gt=0)]
Weights = Annotated[tuple[PositiveFloat, ...], Field(strict=False, min_length=2)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Interval = Annotated[tuple[Finite, Finite], Field(strict=False)]
"""The lower and the upper bound"""

PATTERN_WORDS: dict[str, str] = {}
"""The description of each pattern's texts, for messages"""


def match_pattern(pattern: str, words: str) -> Any:
    """Return the field of a text that matches a pattern, which `words` describe to the user."""
    PATTERN_WORDS[pattern] = words
    return Field(pattern=pattern)


CLASS_LOSSES = ("cross_entropy", "focal")
AUTO = "auto"


@dataclass(frozen=True)
class FromData:
    """Marks a setting that `data.defaults` resolves from the data where it is left out or "auto".

    Both mean the same: a section drops "auto", so that the setting is not in `model_fields_set`.
    Until it is resolved it has the field's default, a value that always works.
    """

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        plain = handler(schema)
        return {"anyOf": [{"const": AUTO, "type": "string"}, *plain.get("anyOf", (plain,))]}


def to_plain(value: Any) -> Any:
    """Return a path as text and a number of numpy as Python's; other values unchanged."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(entry) for entry in value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        ser_json_inf_nan="constants",  # null would not come back as a number
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_paths(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        settings = {name: to_plain(value) for name, value in settings.items()}
        return drop_auto(settings, list_from_data(cls))


@cache
def list_from_data(section: type[Section]) -> tuple[str, ...]:
    """Return the settings of a section that are resolved from the data where they are "auto"."""
    return tuple(
        name
        for name, field in section.model_fields.items()
        if any(isinstance(mark, FromData) for mark in field.metadata)
    )


def drop_auto(settings: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of a section without those of `names` that are "auto"."""
    return {
        name: value
        for name, value in settings.items()
        if not (name in names and isinstance(value, str) and value == AUTO)
    }


def read_descriptions(section: type[Any]) -> dict[str, str]:
    """Return the texts under the fields of a section, or of an event, by the fields' names.

    Pydantic would read the source of every section for them at import, which takes 0.1 s.
    """
    result: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if base.__module__.partition(".")[0] == "slipstream":
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(body, ast.ClassDef)
            for field, text in itertools.pairwise(body.body):
                match field, text:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(words))),
                    ):
                        result[name] = inspect.cleandoc(words)
    return result


class OptionText(str):
    """A `section.key=value` from the command line; messages name its option."""

    option: Text

    def __new__(cls, text: str, option: Text = "--set") -> Self:
        self = super().__new__(cls, text)
        self.option = option
        return self


GENERATOR_BITS = 32
"""Torch's CPU generator takes 64 bits and starts from the lower 32 of them."""


def hash_seed(seed: int) -> int:
    """Return a seed that the generators tell apart: itself where it has 32 bits, else a hash."""
    if seed < 2**GENERATOR_BITS:
        return seed
    digest = hashlib.sha256(str(seed).encode()).digest()
    return int.from_bytes(digest[: GENERATOR_BITS // 8], "little")
