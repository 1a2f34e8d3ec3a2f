"""The public names; a change here is a change for users."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import slipstream


def test_public_names():
    assert sorted(slipstream.__all__) == [
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


@pytest.mark.parametrize("name", slipstream.__all__)
def test_every_public_name_stays_what_it_is(name):
    first = getattr(slipstream, name)
    assert callable(first)
    assert getattr(slipstream, name) is first


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = slipstream.trian


def test_signatures_of_the_verbs():
    def of(function):
        return list(inspect.signature(function).parameters)

    expected = ["config", "data", "overrides", "watch", "resume", "force"]
    assert of(slipstream.train) == [*expected, "folder", "model", "allow_code"]
    assert of(slipstream.pretrain) == expected
    more = ["resample", "ensemble", "overrides", "allow_code"]
    assert of(slipstream.evaluate) == ["run", "data", "on", *more]
    assert of(slipstream.predict) == ["run", "data", "every", *more]
    assert of(slipstream.report) == ["run", "out"]


@pytest.mark.parametrize("name", slipstream.__all__)
def test_help_of_a_public_name_says_what_it_takes_and_shows_an_example(name):
    value = getattr(slipstream, name)
    text = inspect.getdoc(value)
    assert "Example:\n" in text
    if not inspect.isclass(value):
        for parameter in inspect.signature(value).parameters:
            assert f"\n    {parameter}: " in text
        assert "\nReturns:\n" in text
        assert "\nRaises:\n" in text


def test_a_result_prints_its_metrics_and_the_baselines():
    metrics = {"test": {"mae": 0.123456, "rmse": 2.0, "r2": None}}
    baselines = {
        "ridge": {"metrics": {"test": {"mae": 1.0, "rmse": 3.0, "r2": 0.5}}},
        "repeat": None,
    }
    result = slipstream.Result(Path("runs/a"), metrics, baselines, {"metrics": metrics})
    assert repr(result) == (
        "Result of runs/a (test set)\n"
        "          MAE  RMSE   R²\n"
        "model  0.1235     2    –\n"
        "ridge       1     3  0.5"
    )
    assert "<td>model</td><td>0.1235</td><td>2</td><td>–</td>" in result._repr_html_()


def test_a_result_of_classes_prints_their_metrics():
    metrics = {"test": {"log_loss": 0.7, "balanced_accuracy": 0.5, "accuracy": 0.6}}
    summary = {"classes": ["a", "b"], "ensemble": {"metrics": metrics}}
    text = repr(slipstream.Result(Path("runs/a"), metrics, {}, summary))
    assert "log-loss  balanced accuracy  accuracy" in text
    assert text.splitlines()[-1].startswith("ensemble")
