"""Join finished runs into one that predicts by their weighted mean."""

from slipstream.ensembling.api import ensemble

__all__ = ["ensemble"]
