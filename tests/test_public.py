"""The public names; a change here is a change for users."""

from __future__ import annotations

import inspect

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
