"""The estimator, with scikit-learn's own checks and tools."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import tempfile
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
from tests.conftest import mostly_slow, waves

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


def test_an_estimate_has_one_value_per_row_from_a_padded_context_at_first(frame, tmp_path):
    inputs, target = frame[["a", "b"]], frame["c"]
    model = make_estimator(context=8, out=tmp_path).fit(inputs, target)
    estimates = model.predict(inputs)
    assert model.result_.config.data.horizon == 0
    assert estimates.shape == (300,)
    table = model.result_.predict(inputs)
    assert table["row"].to_pylist() == list(range(7, 300))
    np.testing.assert_array_equal(estimates[7:], table["c_predicted"])
    padded = pd.concat([inputs.iloc[[0]]] * 7 + [inputs.iloc[:7]])
    first = model.result_.predict(padded)["c_predicted"].to_numpy()
    np.testing.assert_allclose(estimates[:7], first, rtol=1e-6)
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


SCORED = {
    "y beside X": ({"context": 8}, ["a", "b"], True),
    "y inside X": ({"context": 8}, ["a", "b", "c"], True),
    "y inside X, with times": ({"context": 8, "time": "time"}, ["time", "a", "b", "c"], True),
    "no y": ({"targets": "c", "time": "time", "context": 8, "horizon": 0}, None, False),
    "forecast, y inside X": (
        {"targets": "c", "time": "time", "context": 8, "horizon": 2},
        None,
        True,
    ),
    "forecast, no y": ({"targets": "c", "time": "time", "context": 8, "horizon": 2}, None, False),
}


@pytest.mark.parametrize("name", mostly_slow(SCORED, "y beside X", "forecast, no y"))
def test_every_kind_of_table_is_scored_by_a_metric(frame, name):
    settings, columns, has_y = SCORED[name]
    inputs = frame if columns is None else frame[columns]
    estimator, folds = make_estimator(**settings), TimeSeriesSplit(2)
    y = frame["c"] if has_y else None
    scorer = estimator.scorer("neg_mean_absolute_error")
    scores = cross_val_score(estimator, inputs, y, cv=folds, scoring=scorer)
    assert np.isfinite(scores).all()
    assert (scores < 0).all()
    if has_y and not settings.get("horizon"):  # what predict returns is beside y
        by_name = cross_val_score(
            estimator, inputs, y, cv=folds, scoring="neg_mean_absolute_error", error_score="raise"
        )
        assert np.isfinite(by_name).all()
    fitted = estimator.fit(inputs, y)
    if name == "y inside X":
        assert fitted.result_.config.data.inputs == ("a", "b")
    assert -scorer(fitted, inputs, y) == pytest.approx(
        fitted.result_.evaluate(frame).metrics["mae"], rel=1e-5
    )


def test_a_metric_that_is_none_gets_a_suggestion(frame):
    with pytest.raises(ValueError, match='did you mean "mean_absolute_error"'):
        slipstream.Forecaster.scorer("neg_mean_absolut_error")
    fitted = make_estimator(context=4).fit(frame[["a"]], frame["c"])
    with pytest.raises(ValueError, match='"accuracy" is no metric here; there are mae'):
        fitted.scorer("accuracy")(fitted, frame[["a"]], frame["c"])


def test_y_with_other_values_than_the_column_of_its_name_is_refused(frame):
    with pytest.raises(ValueError, match='X has a column "c" with other values than y'):
        make_estimator(context=4).fit(frame, frame["c"] + 1)


def test_a_fit_leaves_no_folder_behind(frame, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    grid = {"lr": [1e-3, 1e-2]}
    search = GridSearchCV(make_estimator(context=4), grid, cv=TimeSeriesSplit(2))
    search.fit(frame[["a", "b"]], frame["c"])
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
    assert len(list((tmp_path / "temporary").iterdir())) == 1  # of the best one
    best = search.best_estimator_
    copy = pickle.loads(pickle.dumps(best))
    result = best.result_
    before = best.predict(frame[["a", "b"]])
    del search, best
    gc.collect()
    assert result.predict(frame[["a", "b"]]).num_rows  # a result keeps its run
    del result
    gc.collect()
    np.testing.assert_array_equal(copy.predict(frame[["a", "b"]]), before)
    assert copy.score(frame[["a", "b"]], frame["c"])
    del copy
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


def test_series_and_order_are_those_of_the_table(frame, tmp_path):
    two = pd.concat([frame.assign(id="x"), frame.assign(id="y", c=frame["c"] + 5)])
    mixed = two.sample(frac=1, random_state=0)
    settings = {"time": "time", "id": "id", "context": 8, "unsorted": "sort", "targets": "c"}
    model = make_estimator(**settings, horizon=0, inputs=["a", "b"], out=tmp_path).fit(mixed)
    values = pd.Series(model.predict(mixed), index=pd.MultiIndex.from_frame(mixed[["id", "time"]]))
    table = model.result_.predict(mixed).to_pandas()
    for series, time, value in zip(
        table["series"], table["time"], table["c_predicted"], strict=True
    ):
        assert values[series, time] == value
    assert np.isfinite(values).all()


def test_steps_that_look_back_keep_rows_in_place(frame, tmp_path):
    step = {"step": "formula", "name": "change", "value": "a - lag(a, 3)"}
    settings = {"context": 8, "inputs": ["b", "change"], "targets": "c", "horizon": 0}
    model = make_estimator(**settings, prepare=[step], time="time", out=tmp_path).fit(frame)
    table = model.result_.predict(frame)
    assert table["row"][0].as_py() == 10
    values = model.predict(frame)
    np.testing.assert_array_equal(values[10:], table["c_predicted"])
    assert np.isfinite(values).all()


def test_rows_that_are_resampled_are_no_rows_of_the_table(frame, tmp_path):
    dated = frame.assign(time=pd.date_range("2026-01-01", periods=300, freq="h"))
    settings = {"context": 8, "inputs": ["a", "b"], "targets": "c", "horizon": 0, "time": "time"}
    step = {"step": "resample", "every": "2h"}
    model = make_estimator(**settings, prepare=[step], out=tmp_path).fit(dated)
    with pytest.raises(ValueError, match=r"resamples the rows.*result_\.predict"):
        model.predict(dated)


def test_dates_in_inputs_say_what_they_are_for(frame):
    dates = pd.date_range("2026-01-01", periods=300, freq="h")
    inputs, target = frame[["a", "b"]].set_index(dates), frame["c"].set_axis(dates)
    with pytest.raises(ValueError, match=r'an index of dates.*time="time".*reset_index\(drop=True'):
        make_estimator(context=8).fit(inputs, target)
    with pytest.raises(ValueError, match=r'a column of dates, "when", .*set time="when"'):
        make_estimator(context=8).fit(frame[["a", "b"]].assign(when=dates), frame["c"])
    model = make_estimator(context=8, time="time").fit(inputs, target.to_frame())
    assert model.target_names_ == ("c",)
    assert model.result_.config.data.inputs == ("a", "b")
    assert np.isfinite(model.predict(inputs)).all()


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


def test_a_misspelt_setting_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match=r"Invalid parameter 'epoch'.*did you mean .epochs."):
        make_estimator().set_params(epoch=3)
    with pytest.raises(slipstream.UserError, match=r"Invalid parameter 'contxt'.*.context."):
        slipstream.Forecaster(contxt=3)
    with pytest.raises(ValueError, match=r"'train__lrr'.*did you mean .lr."):
        slipstream.Forecaster(train__lrr=3)


def test_a_pandas_frame_with_dates_as_its_index_is_accepted(frame, tmp_path):
    dated = frame[["a", "b"]].set_index(pd.date_range("2026-01-01", periods=300, freq="h"))
    model = make_estimator(targets=["a", "b"], time="when", context=8, horizon=2, out=tmp_path)
    assert model.fit(dated).predict(dated).shape == (2, 2)
    first = model.result_.predict(dated)["time"].to_pylist()[0]
    assert first == dated.index[-1] + pd.Timedelta("1h")


@pytest.mark.slow
def test_scikit_learn_is_not_imported():
    code = "import sys, slipstream; slipstream.Forecaster(); assert 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
