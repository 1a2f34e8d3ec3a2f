"""How files are read: what the settings say about their content."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:  # a process that reads workbooks starts in half the time without the settings
    from slipstream.config import Data

MIXED = "mixed"
"""The decimal mark of a file in which some numbers have a comma and others a point"""


class ReadOptions(NamedTuple):
    """The settings that every file is read by, in training and for new data alike."""

    decimal: str | None = None
    """The decimal mark of numbers that are text"""
    na: tuple[str | int | float, ...] = ()
    encoding: str | None = None
    skip_rows: int | None = None
    sheets: tuple[str, ...] = ()
    variable: str | None = None

    @classmethod
    def from_data(cls, data: Data) -> Self:
        return cls(data.decimal, data.na, data.encoding, data.skip_rows, data.sheets, data.variable)

    def for_side_table(self) -> Self:
        """Return the options of a file beside the data: its rows, sheets and variables differ."""
        return self._replace(skip_rows=None, sheets=(), variable=None)
