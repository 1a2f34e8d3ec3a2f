"""Score a trained model: window by window, or as a stream of rows."""

from slipstream.evaluation.api import evaluate

__all__ = ["evaluate"]
