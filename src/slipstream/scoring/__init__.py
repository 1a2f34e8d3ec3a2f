"""How good predictions are: errors of numbers, and how well classes are told apart."""

from slipstream.scoring.regression_sums import NAMES, Tally, merged, read, start

__all__ = ["NAMES", "Tally", "merged", "read", "start"]
