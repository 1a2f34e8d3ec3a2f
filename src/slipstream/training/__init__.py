"""From a config to trained models and their figures."""

from slipstream.training.result import FinishedRun
from slipstream.training.start import pretrain, train, train_or_resume

__all__ = ["FinishedRun", "pretrain", "train", "train_or_resume"]
