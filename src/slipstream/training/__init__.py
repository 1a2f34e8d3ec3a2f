"""From a config to trained models and their figures."""

from slipstream.training.begin import train
from slipstream.training.setup import Result

__all__ = ["Result", "train"]
