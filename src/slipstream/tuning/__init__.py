"""A search over settings: Optuna decides what is tried, lanes train it."""

from slipstream.tuning.begin import tune
from slipstream.tuning.conclusion import Study

__all__ = ["Study", "tune"]
