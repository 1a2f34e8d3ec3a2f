"""Slipstream trains sequence models on time series as fast as the hardware allows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.errors import Interrupted, UserError
    from slipstream.evaluation import evaluate
    from slipstream.prediction import predict
    from slipstream.probing import Probe, probe
    from slipstream.reporting.page import report
    from slipstream.training import Result, pretrain, train
    from slipstream.tuning import Study, tune

__version__ = "0.2.0.dev0"
__all__ = [
    "Config",
    "Interrupted",
    "Probe",
    "Result",
    "Study",
    "UserError",
    "evaluate",
    "predict",
    "pretrain",
    "probe",
    "report",
    "train",
    "tune",
]

_MODULES = {
    "Config": "config",
    "Interrupted": "errors",
    "Probe": "probing",
    "Result": "training",
    "Study": "tuning",
    "UserError": "errors",
    "evaluate": "evaluation",
    "predict": "prediction",
    "pretrain": "training",
    "probe": "probing",
    "report": "reporting.page",
    "train": "training",
    "tune": "tuning",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: importing torch takes seconds, and not every use needs
    it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
