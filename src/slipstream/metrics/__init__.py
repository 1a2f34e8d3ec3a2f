"""How good predictions are: errors of numbers, and how well classes are told apart."""

from slipstream.metrics.numbers import NAMES, Tally, merged, read, start

__all__ = ["NAMES", "Tally", "merged", "read", "start"]
