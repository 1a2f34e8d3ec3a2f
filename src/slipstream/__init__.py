"""Slipstream trains sequence models on time series as fast as the hardware allows.

    slipstream.train("job.toml")             train a model, with baselines beside it
    slipstream.evaluate(result, "new.csv")   score it on its test set or on new data
    slipstream.predict(result, "new.csv")    forecast, or estimate at every row
    slipstream.report(result)                write its report.html
    slipstream.tune("job.toml")              search for better settings
    slipstream.pretrain("bars.toml")         pre-train an encoder on unlabelled data
    slipstream.probe("a.toml", "b.toml")     test whether pre-training helps

`help(slipstream.train)` describes each function; docs/api.md has all of them on one page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from slipstream import events
    from slipstream.api.evaluation import Evaluation
    from slipstream.api.inference import evaluate, predict, report
    from slipstream.api.results import Probe, Result, Study
    from slipstream.api.training import pretrain, probe, train, tune
    from slipstream.config import Config
    from slipstream.errors import Interrupted, UserError

__version__ = "0.2.0.dev0"
__all__ = [
    "Config",
    "Evaluation",
    "Interrupted",
    "Probe",
    "Result",
    "Study",
    "UserError",
    "evaluate",
    "events",
    "predict",
    "pretrain",
    "probe",
    "report",
    "train",
    "tune",
]

_MODULES = {
    "Config": "config",
    "Evaluation": "api.evaluation",
    "Interrupted": "errors",
    "Probe": "api.results",
    "Result": "api.results",
    "Study": "api.results",
    "UserError": "errors",
    "evaluate": "api.inference",
    "predict": "api.inference",
    "pretrain": "api.training",
    "probe": "api.training",
    "report": "api.inference",
    "train": "api.training",
    "tune": "api.training",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: importing torch takes seconds, and not every use needs
    it."""
    from importlib import import_module

    if name == "events":
        return import_module("slipstream.events")
    if name not in _MODULES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
