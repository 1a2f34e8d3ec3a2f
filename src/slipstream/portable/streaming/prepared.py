"""What steps of `data.prepare` have made of a series so far; empty where a run has none."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slipstream.data.series import Floats, Times

Version = str
"""A column's name, and how many steps have written it, as in "current#1" """


@dataclass(frozen=True)
class PreparedRow:
    """What steps have made of the rows of a series so far; never changed in place."""

    inputs: Floats
    """Those of the newest row, in the order of the model; NaN where one is missing"""
    waits: bool = True
    """Whether steps look back further than the series goes, so that the row does not count"""
    count: int = 0
    """Rows of the series"""
    past: dict[Version, Floats] = field(default_factory=dict)
    """The last values of columns that a step looks back to"""
    times: Times = field(default_factory=lambda: np.empty(0))
    filters: dict[Version, Floats] = field(default_factory=dict)
    """Of filters with a state: the first and the last known value, then the state"""
    known: frozenset[str] = frozenset()
    """The columns that have had a value"""
