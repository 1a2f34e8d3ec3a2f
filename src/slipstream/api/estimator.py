"""`slipstream.Forecaster`: an estimator in the manner of scikit-learn."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import numpy as np

from slipstream import config as configs
from slipstream import runs
from slipstream.api import tables, training
from slipstream.api.results import Result
from slipstream.api.tables import EstimatorError, SeriesPlaces
from slipstream.base.errors import UserError
from slipstream.base.statistics import HIGHER_IS_BETTER
from slipstream.base.text import find_nearest
from slipstream.config import Config
from slipstream.config.prepare import ResampleStep
from slipstream.data.predictions import PREDICTED, name_columns, name_probability

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from slipstream.api.inference import Evaluation
    from slipstream.api.model import TrainedModel
    from slipstream.events import Event

    Array = npt.NDArray[Any]

P = ParamSpec("P")
T = TypeVar("T")
SECTIONS = ("data", "model", "train", "augment", "engine")
"""Sections whose settings an estimator takes by their own names, which are all different"""
SPLIT = {"train": 0.8, "val": 0.1, "test": 0.1}
"""Of the rows passed to `fit`; scikit-learn holds rows of its own back for testing"""
SCORES = {
    "mean_absolute_error": "mae",
    "mean_squared_error": "mse",
    "root_mean_squared_error": "rmse",
    "max_error": "max_error",
    "r2": "r2",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced_accuracy",
    "f1_macro": "f1_macro",
    "roc_auc": "auc",
    "log_loss": "log_loss",
}
"""By scikit-learn's name without neg_: a metric of `evaluate`"""


def _raise_value_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Raise mistakes as ValueErrors, which is what scikit-learn and its users expect."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except EstimatorError:
            raise
        except UserError as error:
            raise EstimatorError(str(error)) from error

    return call


class Forecaster:
    """A forecaster, or an estimator of one column from others, for use with scikit-learn.

    It has the methods of scikit-learn's estimators, so that `clone`, `cross_val_score` with
    `TimeSeriesSplit`, `GridSearchCV` and pipelines work with it; scikit-learn itself is not needed.
    Settings are keyword arguments: `context`, `horizon`, `targets`, `kind`, `hidden`, `epochs`,
    `lr` and all others of `[data]`, `[model]`, `[train]`, `[augment]` and `[engine]`, as in
    docs/settings.md; `train__lr` names the section too.

    Every `fit` is a run. Its folder is a temporary one, which is removed with the estimator, or a
    new one in `out` if that is set. The order of rows matters, so use cross-validation that keeps
    it.

    Args:
        config: A TOML file, a mapping or a `Config` that the settings are added to.
        quiet: Show no progress.
        settings: Settings by name.

    Attributes:
        result_: The `Result` of the fitted run: metrics, history, plan, report.
        model_: The `TrainedModel` that `predict` uses, with the `torch.nn.Module`.
        feature_names_in_: The columns passed to `fit`.
        n_features_in_: The number of columns passed to `fit`.
        target_names_: The columns that are predicted.
        classes_: The classes, with `task="classify"`.
        fit: A function of a table, or of X and y. With y, the columns of X estimate y at the same
            row (`horizon` 0) unless `horizon` is set; without, `targets` are columns of the table.
            y may be a column of X; it is then an input only if `horizon` is set. Unless `split` is
            set, the last tenth of the rows is the test set and the tenth before it the validation
            set. `on_event` is called with every event, as by `slipstream.train`.
        predict: A function of a table. With `horizon` 0 it returns one value per row: the context
            of a series' first rows is padded with its first row, and values after a gap are NaN
            until the context is full. Otherwise it returns the forecast of the rows that follow, in
            order of the series. One target is a vector, several are a matrix. `result_.predict`
            returns a table with times and intervals instead, for rows with a full context.
        predict_proba: A function of a table: the probability of each class.
        score: A function of a table, or of X and y: the coefficient of determination R² over all
            windows, as a mean over the targets; for classes the accuracy.
        scorer: A function of a metric's name, such as "mae" or "neg_mean_absolute_error", that
            returns an object to pass as `scoring`. A plain name, with which scikit-learn compares y
            with `predict`, works only with a separate y and `horizon` 0.
        get_params: A function that returns the settings.
        set_params: A function that changes settings.

    Example:
        model = slipstream.Forecaster(targets="OT", context=96, horizon=24, epochs=10)
        model.fit(train_frame).predict(test_frame)
        cross_val_score(model, frame, cv=TimeSeriesSplit(3))
        cross_val_score(model, frame, cv=TimeSeriesSplit(3), scoring=model.scorer("mae"))
    """

    result_: Result
    model_: TrainedModel
    feature_names_in_: Array
    n_features_in_: int
    target_names_: tuple[str, ...]

    def __init__(
        self,
        config: Config | str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        quiet: bool = True,
        **settings: Any,
    ) -> None:
        self.config = config
        self.quiet = quiet
        for name, value in settings.items():
            _find_setting(name)
            setattr(self, name, value)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the settings by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if not (name.startswith("_") or name.endswith("_"))
        }

    def set_params(self, **settings: Any) -> Self:
        """Change settings; return the estimator."""
        for name, value in settings.items():
            if name not in ("config", "quiet"):
                _find_setting(name)
            setattr(self, name, value)
        return self

    @_raise_value_errors
    def fit(
        self, X: Any, y: Any = None, *, on_event: Callable[[Event], None] | None = None
    ) -> Self:
        """Train on a table, or on inputs X and targets y; return the estimator."""
        table = tables.read_inputs(X, names=None, time=self._get("data", "time"))
        if table.num_rows < 2:
            raise EstimatorError(f"n_samples={table.num_rows}: too few rows to train on")
        features = table.column_names
        settings, classes = self._build_settings(), None
        data = settings["data"]
        if y is not None:
            columns = tables.read_targets(y, table.num_rows, are_classes=self._classifies)
            data.setdefault("horizon", 0)
            if "inputs" not in data:
                data["inputs"] = _list_inputs(features, data, () if data["horizon"] else columns)
                index = set(features) - set(map(str, getattr(X, "columns", features)))
                for name in data["inputs"]:
                    tables.refuse_dates(table, name, is_index=name in index)
            data["targets"] = list(columns)
            table = tables.add_columns(table, columns)
            classes = np.unique(next(iter(columns.values()))) if self._classifies else None
        folder = None if "out" in settings else TemporaryRuns()
        settings |= {} if folder is None else {"out": str(folder.path)}
        result = training.train(settings, table, quiet=self.quiet, on_event=on_event)
        self._adopt(result, folder)
        self.feature_names_in_ = np.array(features, dtype=object)
        self.n_features_in_ = len(features)
        if self._classifies:
            names = self.result_.summary["classes"]
            known = {str(value): value for value in ([] if classes is None else classes)}
            self.classes_ = np.array([known.get(name, name) for name in names])
        return self

    def _adopt(self, result: Result, folder: TemporaryRuns | None) -> None:
        """Take over a fitted run; a temporary folder stays for as long as one of these does."""
        self.result_, self._folder = result, folder
        self.model_ = result.model()
        self.target_names_ = tuple(_read_targets(result))
        for holder in (self.result_, self.model_):
            object.__setattr__(holder, "_folder", folder)

    @_raise_value_errors
    def predict(self, X: Any) -> Array:
        """Return estimates for every row, or the forecast of the rows that follow."""
        if self._classifies:
            values = self._predict(X, [PREDICTED])[:, 0]
            known = {str(value): value for value in self.classes_}
            return np.array([known.get(value) for value in values])
        values = self._predict(X)
        return values[:, 0] if values.shape[1] == 1 else values

    @property
    def predict_proba(self) -> Callable[[Any], Array]:
        """A function that returns the probability of each of `classes_`, which only classes
        have."""
        if not self._classifies:
            raise AttributeError('predict_proba needs classes: set task="classify"')
        return self._predict_proba

    @_raise_value_errors
    def _predict_proba(self, X: Any) -> Array:
        self._require_fit()
        return self._predict(X, [name_probability(str(name)) for name in self.classes_])

    @_raise_value_errors
    def score(self, X: Any, y: Any = None) -> float:
        """Return R², the mean over the targets, or the accuracy of classes; of all windows."""
        scores = self._evaluate(X, y)
        if self._classifies:
            return float(scores.metrics["accuracy"])
        return float(np.mean([target["r2"] for target in scores.detail["per_target"].values()]))

    @staticmethod
    def scorer(metric: str) -> Callable[..., float]:
        """Return a function to pass as `scoring`, which scores forecasts and estimates alike,
        wherever the targets are: in X, or beside it as y. `metric` is one of Slipstream's, such as
        "mae", or scikit-learn's name of it, such as "neg_mean_absolute_error"."""
        key = metric.removeprefix("neg_")
        key = SCORES.get(key, key)
        known = {*SCORES, *SCORES.values()}
        if key not in known:
            nearest = find_nearest(metric.removeprefix("neg_"), known)
            hint = f'; did you mean "{nearest}"?' if nearest else ""
            raise EstimatorError(f'"{metric}" is no metric{hint}; there are {", ".join(SCORES)}')

        def score(estimator: Forecaster, X: Any, y: Any = None) -> float:
            metrics = estimator._evaluate(X, y).metrics
            if key not in metrics:
                raise EstimatorError(
                    f'"{metric}" is no metric here; there are {", ".join(metrics)}'
                )
            return metrics[key] if key in HIGHER_IS_BETTER else -metrics[key]

        return score

    def __repr__(self) -> str:
        listed = {name: value for name, value in self.get_params().items() if name != "quiet"}
        if listed["config"] is None:
            del listed["config"]
        return f"Forecaster({', '.join(f'{name}={value!r}' for name, value in listed.items())})"

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "result_")

    def __sklearn_tags__(self) -> Any:
        """Describe the estimator to scikit-learn, which calls this."""
        from sklearn.utils import ClassifierTags, RegressorTags, Tags, TargetTags

        classifies = self._classifies
        kind = "classifier" if classifies else "regressor"
        target = TargetTags(required=False, multi_output=not classifies)
        tags = Tags(estimator_type=kind, target_tags=target)
        if classifies:
            tags.classifier_tags = ClassifierTags(poor_score=True)
        else:
            tags.regressor_tags = RegressorTags(poor_score=True)
        return tags

    @property
    def _classifies(self) -> bool:
        return bool(self._get("data", "task") == "classify")

    def _get(self, section: str, key: str) -> Any:
        """Return a setting; None where it is not set."""
        return self._build_settings().get(section, {}).get(key)

    def _build_settings(self) -> dict[str, Any]:
        """Return the settings of the config and of this object, section by section."""
        base = (
            {}
            if self.config is None
            else configs.load(_to_source(self.config)).model_dump(exclude_unset=True)
        )
        settings: dict[str, Any] = {"name": "forecaster", **base}
        settings["data"] = {"split": SPLIT} | settings.get("data", {})
        for name, value in self.get_params().items():
            if name in ("config", "quiet"):
                continue
            section, key = _find_setting(name)
            if not section:
                settings[key] = value
                continue
            if key == "targets" and isinstance(value, str):
                value = [value]
            settings[section] = {**settings.get(section, {}), key: value}
        return settings

    @_raise_value_errors
    def _evaluate(self, X: Any, y: Any) -> Evaluation:
        """Return the metrics on all windows of a table."""
        table = self._read(X)
        if y is not None:
            columns = tables.read_targets(y, table.num_rows, are_classes=self._classifies)
            values = columns.values()
            table = tables.add_columns(table, dict(zip(self.target_names_, values, strict=True)))
        return self.result_.evaluate(table)

    def _predict(self, X: Any, names: Sequence[str] | None = None) -> Array:
        """Return columns of predictions, by default those of the targets: a forecast row by row,
        or an estimate for every row of `X`, those of the first rows from a padded context."""
        table, data = self._read(X), self.result_.config.data
        if names is None:
            names = [name_columns(target).predicted for target in self.target_names_]
        if data.horizon:
            return tables.take_columns(self._call(table), names)
        if any(isinstance(step, ResampleStep) for step in data.prepare):
            raise EstimatorError(
                "data.prepare resamples the rows, so that there is no estimate for every row of X; "
                "result_.predict returns those of the new rows, with their times"
            )
        series = tables.find_series(table, data)
        values = tables.place_rows(self._call(table), names, series, table.num_rows)
        for places in series:
            self._fill_start(table, places, names, values)
            for row, repeated in places.repeated:
                values[repeated] = values[row]
        return values

    def _fill_start(
        self, table: pa.Table, series: SeriesPlaces, names: Sequence[str], values: Array
    ) -> None:
        """Write the estimates of a series' first rows, which have no full context: that of each is
        padded with the first row."""
        known = np.array([value is not None and value == value for value in values[series.rows, 0]])
        missing = int(known.argmax()) if known.any() else len(known)
        if not missing:
            return
        count = max(missing, self.model_.context)
        step = self.model_.step or 1.0
        data = self.result_.config.data
        padded = tables.pad_start(table, series.rows, count, data.time_column, step)
        filled = self._call(padded)
        numbers = filled["row"].to_numpy() - count
        inside = (numbers >= 0) & (numbers < missing)
        values[series.rows[numbers[inside]]] = tables.take_columns(filled, names)[inside]

    def _call(self, table: pa.Table) -> pa.Table:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes on the data, which result_.predict raises
            return self.model_.predict(table)

    def _require_fit(self) -> None:
        if not hasattr(self, "result_"):
            raise _make_not_fitted("this Forecaster is not fitted yet; call fit first")

    def _read(self, X: Any) -> pa.Table:
        self._require_fit()
        names = self.feature_names_in_.tolist()
        return tables.read_inputs(X, names=names, time=self.result_.config.data.time_column)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: of a temporary run, its files."""
        state = dict(vars(self))
        folder = state.pop("_folder", None)
        if folder is not None:
            del state["model_"]
            state["result_"] = self.result_.run.name, self.result_.summary, folder.read()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(self.result_ if hasattr(self, "result_") else None, tuple):
            name, summary, files = state["result_"]
            folder = TemporaryRuns(files)
            self._adopt(Result(folder.path / name, summary), folder)
        elif "result_" in state:
            self._folder = None


class TemporaryRuns:
    """A folder for runs that is removed when nothing refers to this object any more."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="slipstream-"))
        self._remove = weakref.finalize(self, _remove_own, self.path, os.getpid())
        for name, content in (files or {}).items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(content)

    def read(self) -> dict[str, bytes]:
        """Return the content of every file, by its name."""
        files = (file for file in sorted(self.path.rglob("*")) if file.is_file())
        return {file.relative_to(self.path).as_posix(): file.read_bytes() for file in files}


def _remove_own(folder: Path, process: int) -> None:
    """Remove a folder, unless this is a fork of the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _to_source(config: Any) -> Any:
    return Path(config) if isinstance(config, os.PathLike) else config


def _find_setting(name: str) -> tuple[str, str]:
    """Return the section and the key of a setting: `lr` and `train__lr` are train.lr."""
    section, separator, key = name.partition("__")
    if separator:
        sections = [section] if section in Config.model_fields else []
    else:
        key = name
        if name in Config.model_fields and name not in SECTIONS:
            return "", name
        sections = [section for section in SECTIONS if name in _list_keys(section)]
    if not sections or key not in _list_keys(sections[0]):
        known = [key for section in SECTIONS for key in _list_keys(section)]
        nearest = find_nearest(key, _list_keys(sections[0]) if sections else known)
        hint = f'did you mean "{nearest}"?' if nearest else "docs/settings.md lists them"
        raise EstimatorError(
            f"Invalid parameter {name!r} for estimator Forecaster: it is not a setting of "
            f"{', '.join(SECTIONS)}; {hint}"
        )
    return sections[0], key


def _list_keys(section: str) -> Sequence[str]:
    kind: Any = Config.model_fields[section].annotation
    return tuple(getattr(kind, "model_fields", ()))


def _list_inputs(
    features: Sequence[str], data: Mapping[str, Any], targets: Collection[str]
) -> list[str]:
    """Return the columns of X that have no other role."""
    taken = {data.get("time"), *data.get("static", ()), *data.get("ignore", ()), *targets}
    ids = data.get("id") or ()
    taken |= {ids} if isinstance(ids, str) else set(ids)
    return [name for name in features if name not in taken]


def _read_targets(result: Result) -> Sequence[str]:
    """Return the names of the targets, in the order of the config where it names them."""
    signature = runs.read_json(result.run / "model" / "signature.json")
    return result.config.data.targets or tuple(signature["targets"])


def _make_not_fitted(message: str) -> Exception:
    """Return scikit-learn's error for this where scikit-learn is loaded."""
    exceptions = sys.modules.get("sklearn.exceptions")
    return exceptions.NotFittedError(message) if exceptions else EstimatorError(message)
