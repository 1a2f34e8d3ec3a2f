"""What steps take from a trained model, or from the user, in place of the config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Limits = dict[str, tuple[float, float]]
"""The lowest and the highest value of each column"""


@dataclass(frozen=True)
class Replay:
    """What steps do not find out themselves."""

    limits: Mapping[str, Limits] = field(default_factory=dict)
    """The ranges that outliers steps were fitted to, by the step's number"""
    joins: Mapping[str, Any] = field(default_factory=dict)
    """Other tables or paths to join, by the file's name or the prefix of its columns"""
