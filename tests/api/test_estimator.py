"""The estimator, with scikit-learn's own checks and tools."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import slipstream
from slipstream.api.estimator import SECTIONS, SPLIT
from slipstream.config import Config
from tests.conftest import waves

SMALL = {"kind": "mlp", "hidden": 8, "layers": 1, "epochs": 2, "batch": 32}
SMALL |= {"device": "cpu", "threads": 1, "plan": "off", "monitor": False}
NOT_APPLICABLE = {
    "check_no_attributes_set_in_init": "the many settings are keywords, not named one by one in "
    "the signature; each is an attribute, as a parameter has to be",
    "check_do_not_raise_errors_in_init_or_set_params": "it sets a parameter named settings, and "
    "unknown names are refused as soon as they are set",
}
NOT_FOR_CLASSES = {
    "check_supervised_y_2d": "a label column of shape (n, 1) is one column, which needs no warning",
}
SKIPPED = "check_array_api_input"
"""It needs SCIPY_ARRAY_API in the environment; arrays of other libraries are not claimed"""


def make_estimator(**settings):
    return slipstream.Forecaster(**(SMALL | settings))


def list_checks(task):
    estimator = make_estimator(context=1, horizon=0, task=task)
    with warnings.catch_warnings():  # that it does not inherit from scikit-learn's class
        warnings.simplefilter("ignore")
        checks = list(estimator_checks_generator(estimator, legacy=True))
    for number, (one, check) in enumerate(checks):
        name = getattr(check, "func", check).__name__
        if name != SKIPPED:
            yield pytest.param(one, check, id=f"{task}-{number}-{name}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("estimator", "check"), [*list_checks("regress"), *list_checks("classify")]
)
def test_scikit_learns_checks_pass(estimator, check, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the runs are
    name = getattr(check, "func", check).__name__
    exempt = NOT_APPLICABLE | (NOT_FOR_CLASSES if estimator.task == "classify" else {})
    if name in exempt:
        with pytest.raises((AssertionError, ValueError)):
            check(estimator)
    else:
        check(estimator)


@pytest.fixture(scope="module")
def frame():
    return waves(300).to_pandas()


@pytest.fixture(scope="module")
def fitted(frame, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    model = make_estimator(targets="a", time="time", context=8, horizon=3, out=out)
    return model.fit(frame)


def test_a_fitted_estimator_forecasts_the_rows_that_follow(fitted, frame):
    forecast = fitted.predict(frame)
    table = fitted.result_.predict(frame)
    assert forecast.shape == (3,)
    assert forecast.tolist() == table["a_predicted"].to_pylist()


def test_an_estimate_has_one_value_per_row_and_none_without_a_context(frame, tmp_path):
    inputs, target = frame[["a", "b"]], frame["c"]
    model = make_estimator(context=8, out=tmp_path).fit(inputs, target)
    estimates = model.predict(inputs)
    assert model.result_.config.data.horizon == 0
    assert estimates.shape == (300,)
    assert np.isnan(estimates[:7]).all()
    assert np.isfinite(estimates[7:]).all()
    assert list(model.feature_names_in_) == ["a", "b"]
    assert model.target_names_ == ("c",)
    by_array = make_estimator(context=8, out=tmp_path).fit(inputs.to_numpy(), target.to_numpy())
    np.testing.assert_allclose(by_array.predict(inputs.to_numpy()), estimates)
    errors = (target - estimates)[7:]
    expected = 1 - (errors**2).sum() / ((target[7:] - target[7:].mean()) ** 2).sum()
    assert model.score(inputs, target) == pytest.approx(expected, rel=1e-4)


def test_the_score_is_that_of_an_evaluation(fitted, frame):
    assert fitted.score(frame) == pytest.approx(
        slipstream.evaluate(fitted.result_, frame).detail["per_target"]["a"]["r2"]
    )


def test_it_can_be_cloned_changed_and_pickled(fitted, frame):
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(frame)
    assert copy.set_params(train__lr=0.5, context=4).get_params()["train__lr"] == 0.5
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(frame), fitted.predict(frame))


def test_it_is_cross_validated_over_time(frame, tmp_path):
    model = make_estimator(targets="a", time="time", context=8, horizon=2, out=tmp_path)
    scores = cross_val_score(model, frame, cv=TimeSeriesSplit(2))
    assert scores.shape == (2,)
    assert np.isfinite(scores).all()
    assert len(list(tmp_path.iterdir())) == 2  # a run for each fold


@pytest.mark.slow
def test_it_is_searched_and_part_of_a_pipeline(frame, tmp_path):
    pipeline = make_pipeline(StandardScaler(), make_estimator(context=4, out=tmp_path))
    grid = {"forecaster__lr": [1e-3, 1e-2]}
    search = GridSearchCV(pipeline, grid, cv=TimeSeriesSplit(2)).fit(frame[["a", "b"]], frame["c"])
    assert search.best_params_["forecaster__lr"] in grid["forecaster__lr"]
    assert search.predict(frame[["a", "b"]]).shape == (300,)


def test_classes_are_predicted_with_probabilities(frame, tmp_path):
    inputs, labels = frame[["a", "b"]], np.where(frame["a"] > 10, 7, 3)
    model = make_estimator(task="classify", context=4, out=tmp_path).fit(inputs, labels)
    assert model.classes_.tolist() == [3, 7]
    guesses, probabilities = model.predict(inputs), model.predict_proba(inputs)
    assert set(guesses[3:]) <= {3, 7}
    np.testing.assert_allclose(probabilities[3:].sum(axis=1), 1, rtol=1e-5)
    assert 0 <= model.score(inputs, labels) <= 1


def test_settings_have_names_of_their_own():
    keys = Counter(
        key for name in SECTIONS for key in Config.model_fields[name].annotation.model_fields
    )
    assert max(keys.values()) == 1
    assert sum(SPLIT.values()) == pytest.approx(1)


def test_a_misspelt_setting_is_refused(frame):
    with pytest.raises(ValueError, match="Invalid parameter 'epoch'"):
        make_estimator().set_params(epoch=3)
    with pytest.raises(slipstream.UserError, match="Invalid parameter 'epoch'"):
        slipstream.Forecaster(epoch=3).fit(frame)


def test_a_pandas_frame_with_dates_as_its_index_is_accepted(frame, tmp_path):
    dated = frame[["a", "b"]].set_index(pd.date_range("2026-01-01", periods=300, freq="h"))
    model = make_estimator(targets=["a", "b"], time="when", context=8, horizon=2, out=tmp_path)
    assert model.fit(dated).predict(dated).shape == (2, 2)
    first = model.result_.predict(dated)["time"].to_pylist()[0]
    assert first == dated.index[-1] + pd.Timedelta("1h")


def test_scikit_learn_is_not_imported():
    code = "import sys, slipstream; slipstream.Forecaster(); assert 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
