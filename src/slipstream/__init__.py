"""Slipstream trains sequence models on time series as fast as the hardware allows.

    slipstream.inspect("data/")              look at files, and propose a config
    slipstream.prepare("job.toml")           the rows that training sees, with their sets
    slipstream.train("job.toml")             train a model, with baselines beside it
    slipstream.train_share("job.toml", ...)  train a part of its folds and repeats
    slipstream.evaluate(result, "new.csv")   score it on its test set or on new data
    slipstream.predict(result, "new.csv")    forecast, or estimate at every row
    slipstream.export(result, out="model")   write it as ONNX, verified
    slipstream.Stream(result)                predict row after row, without torch
    slipstream.load(result)                  load the network itself, with its scaler
    slipstream.report(result)                write its report.html
    slipstream.follow(result.run, "mlflow")  send its curves to a tracker
    slipstream.event_schema()                the JSON schema of events.jsonl
    slipstream.ensemble([result, other])     join runs into one that predicts by their mean
    slipstream.tune("job.toml")              search for better settings
    slipstream.auto("load.csv", targets="y") the best model that five minutes can buy
    slipstream.Forecaster(targets="OT")      an estimator in the manner of scikit-learn
    slipstream.pretrain("bars.toml")         pre-train an encoder on unlabelled data
    slipstream.probe("a.toml", "b.toml")     test whether pre-training helps
    slipstream.list_runs()                   list the runs of a folder as a table
    slipstream.show_run("last")              describe one run
    slipstream.compare_runs("a", "b")        compare settings, metrics and curves of runs
    slipstream.best_run()                    find the run with the lowest test error
    slipstream.copy_run("a", "s3://b/runs")  copy a run to object storage, or back
    slipstream.remove_runs("a")              remove runs
    slipstream.prune_runs(keep_best=5)       remove all but the best runs

`help(slipstream.train)` describes each function; docs/api.md has all of them on one page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from slipstream import events
    from slipstream.api.estimator import Forecaster
    from slipstream.api.inference import (
        Evaluation,
        StreamEvaluation,
        evaluate,
        export,
        load,
        predict,
        report,
    )
    from slipstream.api.inspection import Inspection, inspect, prepare
    from slipstream.api.model import TrainedModel
    from slipstream.api.results import Probe, Result, Study
    from slipstream.api.training import auto, ensemble, pretrain, probe, train, train_share, tune
    from slipstream.base.errors import Interrupted, UserError
    from slipstream.config import Config
    from slipstream.events.parsing import event_schema
    from slipstream.inference.stream import Stream, StreamPrediction
    from slipstream.reporting.copies import copy_run
    from slipstream.reporting.run_rows import RunRow
    from slipstream.reporting.runs import (
        Comparison,
        best_run,
        compare_runs,
        list_runs,
        prune_runs,
        remove_runs,
        show_run,
    )
    from slipstream.reporting.tracking.follower import follow

__version__ = "0.2.0.dev0"
__all__ = [
    "Comparison",
    "Config",
    "Evaluation",
    "Forecaster",
    "Inspection",
    "Interrupted",
    "Probe",
    "Result",
    "RunRow",
    "Stream",
    "StreamEvaluation",
    "StreamPrediction",
    "Study",
    "TrainedModel",
    "UserError",
    "auto",
    "best_run",
    "compare_runs",
    "copy_run",
    "ensemble",
    "evaluate",
    "event_schema",
    "events",
    "export",
    "follow",
    "inspect",
    "list_runs",
    "load",
    "predict",
    "prepare",
    "pretrain",
    "probe",
    "prune_runs",
    "remove_runs",
    "report",
    "show_run",
    "train",
    "train_share",
    "tune",
]

_MODULES = {
    "Comparison": "reporting.runs",
    "Config": "config",
    "Evaluation": "api.inference",
    "Forecaster": "api.estimator",
    "Inspection": "api.inspection",
    "Interrupted": "base.errors",
    "Probe": "api.results",
    "Result": "api.results",
    "RunRow": "reporting.run_rows",
    "Stream": "inference.stream",
    "StreamEvaluation": "api.inference",
    "StreamPrediction": "inference.stream",
    "Study": "api.results",
    "TrainedModel": "api.model",
    "UserError": "base.errors",
    "auto": "api.training",
    "best_run": "reporting.runs",
    "compare_runs": "reporting.runs",
    "copy_run": "reporting.copies",
    "ensemble": "api.training",
    "evaluate": "api.inference",
    "event_schema": "events.parsing",
    "export": "api.inference",
    "follow": "reporting.tracking.follower",
    "inspect": "api.inspection",
    "list_runs": "reporting.runs",
    "load": "api.inference",
    "predict": "api.inference",
    "prepare": "api.inspection",
    "pretrain": "api.training",
    "probe": "api.training",
    "prune_runs": "reporting.runs",
    "remove_runs": "reporting.runs",
    "report": "api.inference",
    "show_run": "reporting.runs",
    "train": "api.training",
    "train_share": "api.training",
    "tune": "api.training",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: importing torch takes seconds, and not every use needs
    it."""
    from importlib import import_module
    from inspect import isfunction

    if name == "events":
        return import_module("slipstream.events")
    if name not in _MODULES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    value = getattr(import_module(f"slipstream.{_MODULES[name]}"), name)
    if isfunction(value) and not _MODULES[name].startswith("api."):  # a command's function as it is
        from slipstream.api.progress import name_arguments

        value = globals()[name] = name_arguments(value)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
