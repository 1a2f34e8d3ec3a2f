"""From a config to trained models and their figures."""

from typing import Any

from slipstream.training import run
from slipstream.training.request import FinishedRun, TrainRequest
from slipstream.training.run import train_or_resume

__all__ = ["FinishedRun", "TrainRequest", "train", "train_or_resume"]


def train(*arguments: Any, **options: Any) -> FinishedRun:
    """Train or resume a run, from the fields of a `TrainRequest`, as in train(config, data)."""
    return run.train(TrainRequest(*arguments, **options))
