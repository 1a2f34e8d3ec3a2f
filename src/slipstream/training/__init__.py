"""From a config to trained models and their figures."""

from slipstream.training.begin import MASKED, pretrain, train, trained
from slipstream.training.setup import Result

__all__ = ["MASKED", "Result", "pretrain", "train", "trained"]
