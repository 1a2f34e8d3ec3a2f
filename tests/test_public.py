"""The public names; a change here is a change for users."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import pytest

import slipstream

PUBLIC = [
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


def test_public_names():
    assert sorted(slipstream.__all__) == PUBLIC


def test_tab_completion_offers_the_public_names_and_nothing_else():
    code = "import slipstream; print(*dir(slipstream))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == PUBLIC


def test_help_lists_every_public_function():
    text = pydoc.plain(pydoc.render_doc(slipstream))
    for name in PUBLIC:
        value = getattr(slipstream, name)
        if inspect.isfunction(value):
            assert f"\n    {name}(" in text
            assert f"slipstream.{name}" in slipstream.__doc__
    assert "import_module" not in text


@pytest.mark.parametrize("name", slipstream.__all__)
def test_every_public_name_stays_what_it_is(name):
    first = getattr(slipstream, name)
    assert callable(first) or inspect.ismodule(first)
    assert getattr(slipstream, name) is first


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = slipstream.trian


def test_signatures_of_the_verbs():
    def of(function):
        return list(inspect.signature(function).parameters)

    job = ["config", "data", "columns", "overrides"]
    shown = ["quiet", "on_event", "resume"]
    more = ["force", "folder", "model", "allow_code", "workers", "on"]
    assert of(slipstream.train) == [*job, "init_from", *shown, *more]
    assert of(slipstream.pretrain) == [*job, *shown, "force", "folder"]
    more = ["folder", "storage", "workers", "on", "model", "allow_code"]
    assert of(slipstream.tune) == [*job, "init_from", *shown, *more]
    more = ["resample", "ensemble", "joins", "overrides", "quiet", "allow_code"]
    scored = ["run", "data", "columns", "on", *more, "stream", "predictions"]
    assert of(slipstream.evaluate) == scored
    assert of(slipstream.predict) == ["run", "data", "columns", "every", *more]
    assert of(slipstream.report) == ["run", "out"]


@pytest.mark.parametrize("name", slipstream.__all__)
def test_help_of_a_public_name_says_what_it_takes_and_shows_an_example(name):
    value = getattr(slipstream, name)
    text = inspect.getdoc(value)
    assert "Example:\n" in text
    if inspect.isfunction(value):
        for parameter in inspect.signature(value).parameters:
            assert f"\n    {parameter}: " in text
        assert "\nReturns:\n" in text
        assert "\nRaises:\n" in text
