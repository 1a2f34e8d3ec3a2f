"""From a config to trained models and their figures."""

from slipstream.training.begin import pretrain, train, trained
from slipstream.training.setup import Result

__all__ = ["Result", "pretrain", "train", "trained"]
