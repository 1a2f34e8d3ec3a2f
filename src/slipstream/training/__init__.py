"""From a config to trained models and their figures."""

from slipstream.training.result import Result
from slipstream.training.start import pretrain, train, train_or_resume

__all__ = ["Result", "pretrain", "train", "train_or_resume"]
