"""`slipstream.Forecaster`: an estimator in the manner of scikit-learn."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import numpy as np

from slipstream import config as configs
from slipstream import runs
from slipstream.api import tables, training
from slipstream.api.tables import EstimatorError
from slipstream.config import Config
from slipstream.data.prediction_columns import PREDICTED, name_columns, name_probability
from slipstream.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from slipstream.api.model import TrainedModel
    from slipstream.api.results import Result
    from slipstream.events import Event

    Array = npt.NDArray[Any]

P = ParamSpec("P")
T = TypeVar("T")
SECTIONS = ("data", "model", "train", "augment", "engine")
"""Sections whose settings an estimator takes by their own names, which are all different"""
SPLIT = {"train": 0.8, "val": 0.1, "test": 0.1}
"""Of the rows passed to `fit`; scikit-learn holds rows of its own back for testing"""


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

    Every `fit` is a run with its own folder in `out`, which the fitted estimator reads its model
    from. Rows are taken in their order, so use cross-validation that keeps it.

    Args:
        config: A TOML file, a mapping or a `Config` that the settings are added to.
        quiet: Show no progress.
        settings: Settings by name.

    Attributes:
        result_: The `Result` of the fitted run: metrics, history, plan, report.
        model_: The `TrainedModel` that `predict` uses, with the `torch.nn.Module`.
        feature_names_in_: The columns passed to `fit`.
        n_features_in_: Their number.
        target_names_: The columns that are predicted.
        classes_: The classes, with `task="classify"`.
        fit: A function of a table, or of X and y. With y, the columns of X estimate y at the same
            row (`horizon` 0) unless `horizon` is set; without, `targets` are columns of the table.
            The last tenth of the rows tests the model, the tenth before stops the training, unless
            `split` is set. `on_event` is called with every event, as by `slipstream.train`.
        predict: A function of a table: with `horizon` 0 one value per row, NaN where fewer than
            `context` rows lie behind it; else the forecast of the rows that follow, in order of
            the series. One column is a vector, several are a matrix. `result_.predict` returns a
            table with times and intervals instead.
        predict_proba: A function of a table: the probability of each class.
        score: A function of a table, or of X and y: the coefficient of determination R² of all
            windows, the mean of the targets; for classes the accuracy.
        get_params: A function that returns the settings.
        set_params: A function that changes settings.

    Example:
        model = slipstream.Forecaster(targets="OT", context=96, horizon=24, epochs=10)
        model.fit(train_frame).predict(test_frame)
        cross_val_score(model, frame, cv=TimeSeriesSplit(3))
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
            data.setdefault("inputs", _list_inputs(features, data))
            data["targets"] = list(columns)
            table = tables.add_columns(table, columns)
            classes = np.unique(next(iter(columns.values()))) if self._classifies else None
        self.result_ = training.train(settings, table, quiet=self.quiet, on_event=on_event)
        self.model_ = self.result_.model()
        self.target_names_ = tuple(_read_targets(self.result_))
        self.feature_names_in_ = np.array(features, dtype=object)
        self.n_features_in_ = len(features)
        if self._classifies:
            names = self.result_.summary["classes"]
            known = {str(value): value for value in ([] if classes is None else classes)}
            self.classes_ = np.array([known.get(name, name) for name in names])
        return self

    @_raise_value_errors
    def predict(self, X: Any) -> Array:
        """Return estimates for every row, or the forecast of the rows that follow."""
        table, num_rows = self._predict(X)
        if self._classifies:
            known = {str(value): value for value in self.classes_}
            values = tables.place_rows(table, [PREDICTED], num_rows=num_rows)[:, 0]
            return np.array([known.get(value) for value in values])
        names = [name_columns(target).predicted for target in self.target_names_]
        values = tables.place_rows(table, names, num_rows=num_rows)
        return values[:, 0] if len(names) == 1 else values

    @property
    def predict_proba(self) -> Callable[[Any], Array]:
        """A function that returns the probability of each of `classes_`, which only classes
        have."""
        if not self._classifies:
            raise AttributeError('predict_proba needs classes: set task="classify"')
        return self._predict_proba

    @_raise_value_errors
    def _predict_proba(self, X: Any) -> Array:
        table, num_rows = self._predict(X)
        names = [name_probability(str(name)) for name in self.classes_]
        return tables.place_rows(table, names, num_rows=num_rows)

    @_raise_value_errors
    def score(self, X: Any, y: Any = None) -> float:
        """Return R², the mean over the targets, or the accuracy of classes; of all windows."""
        table = self._read(X)
        if y is not None:
            columns = tables.read_targets(y, table.num_rows, are_classes=self._classifies)
            values = columns.values()
            table = tables.add_columns(table, dict(zip(self.target_names_, values, strict=True)))
        scores = self.result_.evaluate(table)
        if self._classifies:
            return float(scores.metrics["accuracy"])
        return float(np.mean([one["r2"] for one in scores.detail["per_target"].values()]))

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

    def _predict(self, X: Any) -> tuple[pa.Table, int | None]:
        """Return the table of predictions, and the rows of `X` where they are estimates of them."""
        table = self._read(X)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes on the data, which result_.predict raises
            predictions = self.model_.predict(table)
        is_estimate = self.result_.config.data.horizon == 0
        return predictions, table.num_rows if is_estimate else None

    def _read(self, X: Any) -> pa.Table:
        if not hasattr(self, "result_"):
            raise _make_not_fitted("this Forecaster is not fitted yet; call fit first")
        names = self.feature_names_in_.tolist()
        return tables.read_inputs(X, names=names, time=self.result_.config.data.time_column)


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
        sections = [one for one in SECTIONS if name in _list_keys(one)]
    if not sections or key not in _list_keys(sections[0]):
        raise EstimatorError(
            f"Invalid parameter {name!r} for estimator Forecaster: it is not a setting of "
            f"{', '.join(SECTIONS)}; docs/settings.md lists them"
        )
    return sections[0], key


def _list_keys(section: str) -> Sequence[str]:
    kind: Any = Config.model_fields[section].annotation
    return tuple(getattr(kind, "model_fields", ()))


def _list_inputs(features: Sequence[str], data: Mapping[str, Any]) -> list[str]:
    """Return the columns of X that have no other role."""
    others = {data.get("time"), *data.get("static", ()), *data.get("ignore", ())}
    ids = data.get("id") or ()
    others |= {ids} if isinstance(ids, str) else set(ids)
    return [name for name in features if name not in others]


def _read_targets(result: Result) -> Sequence[str]:
    """Return the names of the targets, in the order of the config where it names them."""
    signature = runs.read_json(result.run / "model" / "signature.json")
    return result.config.data.targets or tuple(signature["targets"])


def _make_not_fitted(message: str) -> Exception:
    """Return scikit-learn's error for this where scikit-learn is loaded."""
    exceptions = sys.modules.get("sklearn.exceptions")
    return exceptions.NotFittedError(message) if exceptions else EstimatorError(message)
