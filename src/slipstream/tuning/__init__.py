"""A search over settings: Optuna decides what is tried, lanes train it."""

from slipstream.tuning.api import tune
from slipstream.tuning.summary import Study

__all__ = ["Study", "tune"]
