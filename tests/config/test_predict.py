"""The section [predict]: which filters there are, and what they do not go with."""

import pytest

from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.config import Config

EMA = {"kind": "ema", "rows": 5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "ema"}, "needs rows"),
        ({"kind": "butterworth"}, "needs either rows or cutoff_hz"),
        ({"kind": "butterworth", "rows": 9, "cutoff_hz": 0.1}, "needs either rows or cutoff_hz"),
        ({"kind": "butterworth", "rows": 2}, "takes from 3 to"),
        ({"kind": "butterworth", "rows": 9, "order": 11}, "takes at most 10"),
        ({"kind": "savgol", "rows": 2}, "takes from 3 to 1,001"),
        ({"kind": "savgol", "rows": 20, "order": 6}, "takes at most 5"),
        ({"kind": "moving_average", "rows": 20_000}, "from 1 to 10,000"),
        ({"kind": "moving_average", "rows": 5, "order": 1}, "order does not apply"),
        ({"kind": "ema", "rows": 5, "cutoff_hz": 1.0}, "takes rows, not cutoff_hz"),
        ({"kind": "kalman", "rows": 5}, "moving_average"),
        ({"kind": "ema", "rows": 5, "length": 3}, "predict.filter.length is not a setting"),
        ("ema", "needs rows"),
    ],
)
def test_a_filter_that_is_none_is_refused_with_the_setting(settings, message):
    with pytest.raises(UserError, match=r"predict\.filter") as error:
        configs.load({"predict": {"filter": settings}})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("sections", "settings", "message"),
    [
        ({"data": {"stride": 4}}, EMA, "data.stride is 4"),
        (
            {"data": {"task": "classify", "targets": ["y"]}},
            {"kind": "savgol", "rows": 5},
            "could make a probability negative",
        ),
        ({}, {"kind": "butterworth", "cutoff_hz": 0.1}, "needs data.time"),
    ],
)
def test_a_filter_is_refused_beside_settings_that_leave_it_no_meaning(sections, settings, message):
    with pytest.raises(UserError, match=message):
        configs.load(sections | {"predict": {"filter": settings}})


def test_an_average_of_probabilities_is_accepted():
    Config(data={"task": "classify", "targets": ("y",)}, predict={"filter": EMA})


def test_a_text_removes_a_filter_that_a_file_sets(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[predict]\nfilter = { kind = "ema", rows = 5 }\n')
    assert configs.load(path).predict.filter.rows == 5
    assert configs.load(path, ["predict.filter=none"]).predict.filter.kind == "none"
    assert configs.load(path, ["predict.filter.rows=9"]).predict.filter.rows == 9


def test_a_config_with_a_filter_survives_being_written(tmp_path):
    config = Config(predict={"filter": EMA})
    path = tmp_path / "again.toml"
    path.write_text(configs.to_toml(config))
    assert configs.load(path).predict == config.predict
