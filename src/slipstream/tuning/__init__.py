"""A search over settings: Optuna decides what is tried, lanes train it."""

from slipstream.tuning.begin import Study, tune

__all__ = ["Study", "tune"]
