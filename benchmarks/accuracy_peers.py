"""The peers of `benchmarks/accuracy.py`: other libraries on the same windows and the same time.

A peer is a function from a problem, a seed and a clock to the predictions of all test windows
[N, H, C] in physical units, or a list of classes. Its libraries are imported when it runs.

Shapes: N windows, H rows ahead, C targets, F inputs.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from accuracy_sets import TRAIN, VAL, Floats, LabelledCases, Problem, Task, WindowIndex

Features = npt.NDArray[np.float32]
MAX_GBM_ROWS = 500_000
"""Training rows of gradient boosting: a row is one window, target and step ahead"""
GBM_CHUNK = 20_000
"""Windows whose features are built at a time"""
RECENT_LAGS = 24
MEAN_ROWS = (6, 24, 168)
ESTIMATE_ROWS = (10, 60, 300, 500)
SEASONS_BACK = 3
TREES_PER_ROUND, MAX_TREES = 25, 500
NUM_KERNELS = 10_000
"""Random convolutions, as in ROCKET's paper"""


@dataclass(frozen=True)
class Clock:
    """The time that a tool has, from its first import on."""

    began: float
    minutes: float
    use_gpu: bool

    @property
    def left_s(self) -> float:
        return self.began + 60 * self.minutes - time.perf_counter()


class Peer(NamedTuple):
    run: Callable[[Problem, int, Clock], Any]
    tasks: tuple[Task, ...]
    packages: tuple[str, ...] = ()
    """The modules that it needs"""
    random: bool = True
    """Whether its result depends on the seed"""


# Seasonal naive and AutoETS


def predict_seasonal(problem: Problem, _seed: int, _clock: Clock) -> Floats:
    """Repeat the rows of the last season."""
    period, horizon = problem.set.period, problem.set.horizon
    ahead = np.arange(1, horizon + 1)
    back = ahead - period * -(-ahead // period)  # at most 0: from the last known row
    windows = problem.test_windows
    predicted = np.empty((len(windows), horizon, len(problem.targets)))
    for number, series in enumerate(problem.series):
        owned = windows.series == number
        predicted[owned] = series.targets[windows.rows[owned][:, None] - 1 + back]
    return predicted


class LongTable(NamedTuple):
    """All series and targets as one long table: unique_id, ds (the row), y in deviations."""

    frame: Any
    mean: Floats
    """[series, C]"""
    deviation: Floats
    num_val: int
    num_test: int


def build_long_table(problem: Problem) -> LongTable:
    """Return the rows of all series, each scaled by its own training rows, without unused rows."""
    import pandas as pd

    parts, means, deviations = [], [], []
    for number, series in enumerate(problem.series):
        known = series.sets == TRAIN
        mean, deviation = series.targets[known].mean(axis=0), series.targets[known].std(axis=0)
        deviation = np.where(deviation > 0, deviation, 1.0)
        means.append(mean)
        deviations.append(deviation)
        used = np.flatnonzero(series.sets <= 2)
        for channel in range(series.targets.shape[1]):
            scaled = (series.targets[used, channel] - mean[channel]) / deviation[channel]
            # zero-padded, since both libraries sort the names as text
            name = f"{number:05}-{channel:03}"
            parts.append(pd.DataFrame({"unique_id": name, "ds": used, "y": scaled}))
    counts = [[int((series.sets == k).sum()) for k in (VAL, 2)] for series in problem.series]
    assert all(count == counts[0] for count in counts), "series have test sets of unequal size"
    return LongTable(pd.concat(parts), np.stack(means), np.stack(deviations), *counts[0])


def collect_long(problem: Problem, table: LongTable, found: Any, column: str) -> Floats:
    """Return the column of a cross-validation's result as [N, H, C] in physical units."""
    windows = problem.test_windows
    horizon, channels = problem.set.horizon, len(problem.targets)
    size = max(len(series.targets) for series in problem.series) + 1
    keys = windows.series * size + windows.rows
    ids = found["unique_id"].astype(str).to_numpy()
    parts = np.array([[int(part) for part in name.split("-")] for name in np.unique(ids)])
    owner, channel = parts[np.unique(ids, return_inverse=True)[1]].T
    first = found["cutoff"].to_numpy().astype(np.int64) + 1
    place = np.searchsorted(keys, owner * size + first)
    wanted = keys[np.minimum(place, len(keys) - 1)] == owner * size + first
    # others predict rows whose target was filled in
    found, first, place = found[wanted], first[wanted], place[wanted]
    owner, channel = owner[wanted], channel[wanted]
    assert len(found) == len(keys) * horizon * channels, f"{len(found)} predicted rows"
    step = found["ds"].to_numpy().astype(np.int64) - first
    predicted = np.full((len(keys), horizon, channels), np.nan)
    scaled = found[column].to_numpy().astype(float)
    predicted[place, step, channel] = (
        scaled * table.deviation[owner, channel] + table.mean[owner, channel]
    )
    truth = problem.gather_truth(windows)[place, step, channel]
    given = found["y"].to_numpy() * table.deviation[owner, channel] + table.mean[owner, channel]
    assert np.allclose(given, truth, rtol=1e-4, atol=1e-4 * np.abs(truth).max())
    return predicted


def predict_ets(problem: Problem, _seed: int, _clock: Clock) -> Floats:
    """Fit AutoETS to the rows before the test once; at each window it goes on with its states."""
    from statsforecast import StatsForecast
    from statsforecast.models import AutoETS

    table = build_long_table(problem)
    model = AutoETS(season_length=problem.set.period)
    forecast = StatsForecast(models=[model], freq=1, n_jobs=1)
    found = forecast.cross_validation(
        h=problem.set.horizon,
        df=table.frame,
        test_size=table.num_test,
        n_windows=None,
        step_size=1,
        refit=False,
    )
    return collect_long(problem, table, found.reset_index(), "AutoETS")


# neuralforecast


def install_ray_stand_in() -> None:
    """Put modules in the place of Ray, where it is absent: neuralforecast imports it for the search
    spaces of its Auto models, which Optuna searches here, and uses nothing else of it."""
    try:
        import ray.tune  # noqa: F401
    except ImportError:
        pass
    else:
        return

    class Sampler:
        pass

    class Uniform(Sampler):
        pass

    class LogUniform(Sampler):
        pass

    class Quantized(Sampler):
        def __init__(self, sampler: Sampler, q: float) -> None:
            self.sampler, self.q = sampler, q

        def get_sampler(self) -> Sampler:
            return self.sampler

    class Domain:
        default_sampler_cls: type[Sampler] = Uniform

        def __init__(self, lower: float = 0, upper: float = 1, sampler: Any = None) -> None:
            self.lower, self.upper = lower, upper
            self.sampler = sampler or self.default_sampler_cls()

    class FloatUniform(Uniform):
        pass

    class FloatLogUniform(LogUniform):
        pass

    class Float(Domain):
        _Uniform, _LogUniform = FloatUniform, FloatLogUniform
        default_sampler_cls = FloatUniform

    class IntegerUniform(Uniform):
        pass

    class Integer(Domain):
        default_sampler_cls = IntegerUniform

    class CategoricalUniform(Uniform):
        pass

    class Categorical(Domain):
        default_sampler_cls = CategoricalUniform

        def __init__(self, categories: list[Any]) -> None:
            super().__init__()
            self.categories = list(categories)

    class Unused:
        def __init__(self, *_arguments: Any, **_options: Any) -> None:
            pass

    def add_module(name: str, **content: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(content, __path__=[])
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        return module

    add_module("ray")
    add_module("ray.air", RunConfig=Unused)
    add_module(
        "ray.tune",
        choice=Categorical,
        uniform=lambda low, high: Float(low, high),
        loguniform=lambda low, high: Float(low, high, FloatLogUniform()),
        quniform=lambda lower, upper, q: Float(lower, upper, Quantized(FloatUniform(), q)),
        randint=lambda lower, upper: Integer(lower, upper),
    )
    add_module("ray.tune.integration")
    add_module("ray.tune.integration.pytorch_lightning", TuneReportCallback=Unused)
    add_module("ray.tune.search")
    add_module("ray.tune.search.basic_variant", BasicVariantGenerator=Unused)
    add_module(
        "ray.tune.search.sample",
        Uniform=Uniform,
        LogUniform=LogUniform,
        Quantized=Quantized,
        Float=Float,
        Integer=Integer,
        Categorical=Categorical,
    )


def run_neuralforecast(
    problem: Problem, make_model: Callable[[Any, dict[str, Any]], Any], clock: Clock
) -> Floats:
    """Train a model with neuralforecast and return its predictions of every test window.

    Each series is scaled by its training rows before, which neuralforecast leaves to the caller.
    """
    install_ray_stand_in()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    import neuralforecast.auto
    import neuralforecast.models
    from neuralforecast import NeuralForecast

    trainer = {
        "accelerator": "gpu" if clock.use_gpu else "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    table = build_long_table(problem)
    model = make_model(neuralforecast, trainer)
    forecast = NeuralForecast(models=[model], freq=1)
    found = forecast.cross_validation(
        df=table.frame,
        val_size=max(table.num_val, problem.set.horizon),
        test_size=table.num_test,
        step_size=1,
        n_windows=None,
    )
    return collect_long(problem, table, found.reset_index(), str(model))


def _limit_time(seconds: float) -> dict[str, float]:
    """Return Lightning's time limit; training stops after the step in which the time is up."""
    return {"seconds": max(seconds, 5.0)}


def make_neural_peer(name: str) -> Peer:
    """Return a model of neuralforecast as it comes: its default sizes and steps, cut off where the
    time is up; a sixth of the time is left for predictions."""

    def run(problem: Problem, seed: int, clock: Clock) -> Floats:
        def make_model(library: Any, trainer: dict[str, Any]) -> Any:
            return getattr(library.models, name)(
                h=problem.set.horizon,
                input_size=problem.set.context,
                random_seed=seed + 1,
                max_time=_limit_time(clock.left_s * 5 / 6),
                **trainer,
            )

        return run_neuralforecast(problem, make_model, clock)

    return Peer(run, ("forecast",), ("neuralforecast", "pytorch_lightning", "pandas"))


def make_auto_peer(name: str) -> Peer:
    """Return an Auto model of neuralforecast: its default search space, searched by Optuna for half
    of the time; no training takes more than a quarter of it, the last one included."""

    def run(problem: Problem, seed: int, clock: Clock) -> Floats:
        def make_model(library: Any, trainer: dict[str, Any]) -> Any:
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            auto = getattr(library.auto, name)
            suggest = auto.get_default_config(h=problem.set.horizon, backend="optuna")
            limit = _limit_time(clock.left_s / 4)

            def build_config(trial: Any) -> dict[str, Any]:
                config = dict(suggest(trial)) | trainer | {"max_time": limit}
                # Ray's quniform gives a float, which Lightning refuses
                if isinstance(config.get("max_steps"), float):
                    config["max_steps"] = int(config["max_steps"])
                for key in ("h", "loss", "valid_loss"):  # given by the Auto model itself
                    config.pop(key, None)
                return config

            return auto(
                h=problem.set.horizon,
                config=build_config,
                backend="optuna",
                search_alg=optuna.samplers.TPESampler(seed=seed),
                num_samples=10_000,
                time_budget=clock.left_s / 2,
            )

        return run_neuralforecast(problem, make_model, clock)

    return Peer(run, ("forecast",), ("neuralforecast", "pytorch_lightning", "pandas", "optuna"))


# Gradient boosting


class FeatureTable(NamedTuple):
    """Rows for gradient boosting: one per window, target and step ahead."""

    features: Features
    target: npt.NDArray[np.float32]
    """The value less the last known one, in deviations of its series"""


class ForecastFeatures:
    """Builds the features of windows: recent lags, means, the seasons before the predicted row, the
    newest row of further inputs, the step ahead, the phase and the target's number."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.horizon, self.period = problem.set.horizon, problem.set.period
        self.reach = max(RECENT_LAGS, *MEAN_ROWS, SEASONS_BACK * 7 * self.period)
        self.mean, self.deviation, self.padded, self.inputs = [], [], [], []
        for series in problem.series:
            known = series.targets[series.sets == TRAIN]
            deviation = known.std(axis=0)
            if problem.set.metrics[0] == "mase":  # errors count in seasonal differences
                deviation = np.abs(known[self.period :] - known[: -self.period]).mean(axis=0)
            self.mean.append(known.mean(axis=0))
            self.deviation.append(np.where(deviation > 0, deviation, 1.0))
            scaled = ((series.targets - self.mean[-1]) / self.deviation[-1]).astype(np.float32)
            # trees take missing values: rows before the first one are NaN
            self.padded.append(np.pad(scaled, ((self.reach, 0), (0, 0)), constant_values=np.nan))
            self.inputs.append(series.inputs.astype(np.float32))
        seasons = [self.period * k for k in range(1, SEASONS_BACK + 1)] if self.period > 1 else []
        seasons += [7 * self.period * k for k in (1, 2)] if self.period == 24 else []
        self.seasons = seasons

    def build(
        self, windows: WindowIndex, steps: npt.NDArray[np.int64] | None = None
    ) -> FeatureTable:
        """Return the features of windows: of all steps ahead, or of one each."""
        tables = [self._build_series(windows, steps, k) for k in np.unique(windows.series)]
        return FeatureTable(
            np.concatenate([table.features for table in tables]),
            np.concatenate([table.target for table in tables]),
        )

    def _build_series(
        self, windows: WindowIndex, steps: npt.NDArray[np.int64] | None, number: int
    ) -> FeatureTable:
        owned = windows.series == number
        last = windows.rows[owned] - 1 + self.reach  # the newest known row, in padded rows
        if steps is None:
            ahead = np.broadcast_to(np.arange(1, self.horizon + 1), (len(last), self.horizon))
        else:
            ahead = steps[owned][:, None]
        values = self.padded[number]
        base = values[last]  # [n, C]
        columns: list[Any] = []

        def add(column: Any) -> None:  # to [n, H, C]
            columns.append(np.broadcast_to(column, (*ahead.shape, base.shape[1])))

        for lag in range(1, RECENT_LAGS):
            add((values[last - lag] - base)[:, None])
        for rows in MEAN_ROWS:
            block = np.stack([values[last - k] for k in range(rows)])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # all missing
                add((np.nanmean(block, axis=0) - base)[:, None])
                add(np.nanstd(block, axis=0)[:, None])
        for season in self.seasons:
            back = ahead - season * -(-ahead // season)
            for shift in (-1, 0, 1):
                rows = np.minimum(last[:, None] + back + shift, last[:, None])
                add(values[np.maximum(rows, 0)] - base[:, None])
        for column in self.inputs[number][last - self.reach].T:
            add(column[:, None, None])
        add(base[:, None])
        add(ahead[..., None])
        row = last[:, None] - self.reach + ahead
        add((row % self.period)[..., None])
        add((row % (7 * self.period))[..., None])
        add(np.arange(base.shape[1]))
        features = np.stack([np.asarray(column, np.float32) for column in columns], axis=-1)
        future = np.minimum(last[:, None] + ahead, len(values) - 1)
        target = values[future] - base[:, None]
        return FeatureTable(features.reshape(-1, len(columns)), target.reshape(-1))

    def sample(self, set_index: int, num_rows: int, seed: int) -> FeatureTable:
        """Return the features of windows of a set, each with a random step ahead where all steps
        are too many."""
        draw = np.random.default_rng(seed)
        before = min(self.problem.set.context, 2 * max(self.period, 12))
        windows = self.problem.list_windows(set_index, context=before)
        channels = len(self.problem.targets)
        if len(windows) * self.horizon * channels <= num_rows:
            return self.build(windows)
        count = num_rows // channels
        chosen = draw.integers(len(windows), size=count)
        chosen.sort()
        steps = draw.integers(1, self.horizon + 1, size=count)
        return self.build(WindowIndex(windows.series[chosen], windows.rows[chosen]), steps)

    def predict(self, predict: Callable[[Features], Any]) -> Floats:
        """Return the predictions [N, H, C] of all test windows in physical units."""
        windows, channels = self.problem.test_windows, len(self.problem.targets)
        predicted = np.empty((len(windows), self.horizon, channels))
        size = max(GBM_CHUNK // (self.horizon * channels // 8 + 1), 1)
        for begin in range(0, len(windows), size):
            part = slice(begin, begin + size)
            chunk = WindowIndex(windows.series[part], windows.rows[part])
            change = np.asarray(predict(self.build(chunk).features), dtype=float)
            change = change.reshape(len(chunk), self.horizon, channels)
            for number in np.unique(chunk.series):
                owned = chunk.series == number
                base = self.padded[number][chunk.rows[owned] - 1 + self.reach].astype(float)
                scaled = change[owned] + base[:, None]
                where = np.flatnonzero(owned) + begin
                predicted[where] = scaled * self.deviation[number] + self.mean[number]
        return predicted


def build_estimate_features(inputs: Floats) -> Features:
    """Return the features [rows, ...] of every row of a series: its inputs, their differences,
    means and deviations over the rows before, as many as there are."""
    columns = [inputs]
    ends = np.arange(1, len(inputs) + 1)
    sums = np.vstack([np.zeros(inputs.shape[1]), np.cumsum(inputs, axis=0)])
    squares = np.vstack([np.zeros(inputs.shape[1]), np.cumsum(inputs**2, axis=0)])
    for rows in ESTIMATE_ROWS:
        begins = np.maximum(ends - rows, 0)
        count = (ends - begins)[:, None]
        mean = (sums[ends] - sums[begins]) / count
        spread = (squares[ends] - squares[begins]) / count - mean**2
        columns += [mean, np.sqrt(np.maximum(spread, 0)), inputs - inputs[begins]]
    return np.concatenate(columns, axis=1).astype(np.float32)


Fit = Callable[[Features, Any, Features, Any, bool, Callable[[], float]], Callable[[Features], Any]]
"""From training features and targets, validation features and targets, whether targets are classes,
and the seconds that are left, to a function that predicts"""


def run_boosting(problem: Problem, seed: int, clock: Clock, fit: Fit) -> Any:
    """Fit gradient boosting to the features of a problem and predict its test windows."""
    if problem.train_cases is not None:
        assert problem.test_cases is not None
        return _boost_cases(problem.train_cases, problem.test_cases, seed, clock, fit)
    if problem.set.task == "estimate":
        return _boost_estimate(problem, clock, fit)
    features = ForecastFeatures(problem)
    train = features.sample(TRAIN, MAX_GBM_ROWS, seed)
    val = features.sample(VAL, MAX_GBM_ROWS // 5, seed)
    predict = fit(*train, *val, False, lambda: clock.left_s)
    return features.predict(predict)


def _boost_estimate(problem: Problem, clock: Clock, fit: Fit) -> Floats:
    parts: dict[int, list[tuple[Features, Floats]]] = {TRAIN: [], VAL: []}
    features = [build_estimate_features(series.inputs) for series in problem.series]
    for series, table in zip(problem.series, features, strict=True):
        if int(series.sets[0]) in parts:
            parts[int(series.sets[0])].append((table, series.targets[:, 0]))
    joined = [
        np.concatenate(columns) for k in (TRAIN, VAL) for columns in zip(*parts[k], strict=True)
    ]
    predict = fit(*joined, False, lambda: clock.left_s)
    windows = problem.test_windows
    predicted = np.empty((len(windows), 1, 1))
    for number in np.unique(windows.series):
        owned = windows.series == number
        predicted[owned, 0, 0] = predict(features[number][windows.rows[owned]])
    return predicted


def pad_cases(cases: LabelledCases, length: int) -> Floats:
    """Return cases as [N, F, length]: shorter ones are repeated from their first row, as Slipstream
    pads them; of longer ones the last rows."""
    padded = [
        np.pad(values, ((max(length - len(values), 0), 0), (0, 0)), mode="edge")[-length:].T
        for values in cases.values
    ]
    return np.stack(padded)


def _boost_cases(
    train: LabelledCases, test: LabelledCases, seed: int, clock: Clock, fit: Fit
) -> list[str]:
    length = max(len(values) for values in train.values)
    features, new = (
        pad_cases(cases, length).reshape(len(cases.labels), -1).astype(np.float32)
        for cases in (train, test)
    )
    names, labels = np.unique(np.array(train.labels), return_inverse=True)
    held_out = np.zeros(len(labels), bool)
    for label in range(len(names)):  # a fifth of each class
        members = np.random.default_rng(seed).permutation(np.flatnonzero(labels == label))
        held_out[members[: max(len(members) // 5, 1)]] = True
    parts = features[~held_out], labels[~held_out], features[held_out], labels[held_out]
    predict = fit(*parts, True, lambda: clock.left_s)
    return [str(names[int(k)]) for k in predict(new)]


def boost_lightgbm(problem: Problem, seed: int, clock: Clock) -> Any:
    """LightGBM with lags: default trees, rate 0.05, as many as are best on the validation rows."""
    import lightgbm

    def fit(
        x: Features, y: Any, x_val: Features, y_val: Any, classes: bool, left: Callable[[], float]
    ) -> Callable[[Features], Any]:
        options: dict[str, Any] = {"learning_rate": 0.05, "seed": seed, "verbosity": -1}
        if problem.set.metrics[0] == "mase":  # judged by absolute errors
            options["objective"] = "l1"
        if classes:
            count = int(max(y.max(), y_val.max())) + 1
            options |= {"objective": "multiclass", "num_class": count, "min_data_in_leaf": 3}
            options |= {"min_data_in_bin": 1}
        until = left() * 0.25

        class TimeLimit:
            before_iteration, order = False, 40

            def __call__(self, env: Any) -> None:
                if left() < until:
                    raise lightgbm.callback.EarlyStopException(
                        env.iteration, env.evaluation_result_list
                    )

        data = lightgbm.Dataset(x, y)
        model = lightgbm.train(
            options,
            data,
            num_boost_round=200 if classes else 2_000,
            valid_sets=[lightgbm.Dataset(x_val, y_val, reference=data)],
            callbacks=[lightgbm.early_stopping(50, verbose=False), TimeLimit()],
        )
        if classes:
            return lambda new: np.asarray(model.predict(new)).argmax(axis=1)
        return lambda new: model.predict(new)

    return run_boosting(problem, seed, clock, fit)


def boost_sklearn(problem: Problem, seed: int, clock: Clock) -> Any:
    """Fit scikit-learn's histogram trees with lags: rate 0.05, in rounds of 25 trees until two
    rounds bring nothing on the validation rows, 500 trees are reached or the time is up."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.metrics import log_loss, mean_squared_error

    def fit(
        x: Features, y: Any, x_val: Features, y_val: Any, classes: bool, left: Callable[[], float]
    ) -> Callable[[Features], Any]:
        kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
        model = kind(
            learning_rate=0.05,
            early_stopping=False,
            warm_start=True,
            random_state=seed,
            **({"min_samples_leaf": 3} if classes else {}),
        )
        until, best, least, rounds_without = left() * 0.25, model, float("inf"), 0
        for trees in range(TREES_PER_ROUND, MAX_TREES + 1, TREES_PER_ROUND):
            model.set_params(max_iter=trees).fit(x, y)
            if classes:
                loss = log_loss(y_val, model.predict_proba(x_val), labels=model.classes_)
            else:
                loss = mean_squared_error(y_val, model.predict(x_val))
            rounds_without += 1
            if loss < least:
                best, least, rounds_without = copy.deepcopy(model), loss, 0
            if rounds_without == 2 or left() < until:
                break
        return lambda new: best.predict(new)

    return run_boosting(problem, seed, clock, fit)


# Random convolutions


class Kernel(NamedTuple):
    weights: npt.NDArray[np.float32]
    """[channels, length]"""
    channels: npt.NDArray[np.int64]
    bias: float
    dilation: int
    padding: int


def draw_kernels(num_channels: int, length: int, seed: int) -> Iterator[Kernel]:
    """Draw ROCKET's kernels: 7, 9 or 11 normal weights of mean 0, a uniform bias, a dilation on a
    logarithmic scale, padding at random, and a random subset of the channels."""
    draw = np.random.default_rng(seed)
    sizes = [size for size in (7, 9, 11) if size <= length] or [length]
    for _ in range(NUM_KERNELS):
        size = int(draw.choice(sizes))
        limit = min(num_channels, size)
        count = int(2 ** draw.uniform(0, np.log2(limit + 1)))
        channels = draw.choice(num_channels, count, replace=False)
        weights = draw.standard_normal((count, size)).astype(np.float32)
        weights -= weights.mean(axis=1, keepdims=True)
        dilation = int(2 ** draw.uniform(0, np.log2(max((length - 1) / max(size - 1, 1), 1))))
        padding = (size - 1) * dilation // 2 if draw.random() < 0.5 else 0
        yield Kernel(weights, channels, float(draw.uniform(-1, 1)), dilation, padding)


def transform(values: npt.NDArray[np.float32], kernels: list[Kernel]) -> Features:
    """Return two features of each kernel on cases [N, F, length]: the share of positive values of
    the convolution, and its maximum."""
    features = np.empty((len(values), 2 * len(kernels)), np.float32)
    for number, kernel in enumerate(kernels):
        pad = ((0, 0), (0, 0), (kernel.padding, kernel.padding))
        rows = np.pad(values[:, kernel.channels], pad)
        size = kernel.weights.shape[1]
        count = rows.shape[2] - (size - 1) * kernel.dilation
        out = np.full((len(values), count), kernel.bias, np.float32)
        for k in range(size):
            begin = k * kernel.dilation
            out += np.einsum("ncl,c->nl", rows[:, :, begin : begin + count], kernel.weights[:, k])
        features[:, 2 * number] = (out > 0).mean(axis=1)
        features[:, 2 * number + 1] = out.max(axis=1)
    return features


def classify_rocket(problem: Problem, seed: int, _clock: Clock) -> list[str]:
    """Classify by 10,000 random convolutions and scikit-learn's ridge classifier."""
    from sklearn.linear_model import RidgeClassifierCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    assert problem.train_cases is not None
    assert problem.test_cases is not None
    length = max(len(values) for values in problem.train_cases.values)
    train, test = (
        pad_cases(cases, length).astype(np.float32)
        for cases in (problem.train_cases, problem.test_cases)
    )
    center = train.mean(axis=(0, 2), keepdims=True)
    spread = train.std(axis=(0, 2), keepdims=True)
    train, test = (train - center) / spread, (test - center) / spread
    kernels = list(draw_kernels(train.shape[1], length, seed))
    model = make_pipeline(StandardScaler(), RidgeClassifierCV(alphas=np.logspace(-3, 3, 10)))
    model.fit(transform(train, kernels), problem.train_cases.labels)
    return [str(label) for label in model.predict(transform(test, kernels))]


PEERS = {
    "SeasonalNaive": Peer(predict_seasonal, ("forecast",), random=False),
    "AutoETS": Peer(predict_ets, ("forecast",), ("statsforecast", "pandas"), random=False),
    "LightGBM": Peer(boost_lightgbm, ("forecast", "estimate", "classify"), ("lightgbm",)),
    "HistGradientBoosting": Peer(boost_sklearn, ("forecast", "estimate", "classify"), ("sklearn",)),
    "DLinear": make_neural_peer("DLinear"),
    "NHITS": make_neural_peer("NHITS"),
    "PatchTST": make_neural_peer("PatchTST"),
    "LSTM": make_neural_peer("LSTM"),
    "AutoNHITS": make_auto_peer("AutoNHITS"),
    "AutoPatchTST": make_auto_peer("AutoPatchTST"),
    "ROCKET": Peer(classify_rocket, ("classify",), ("sklearn",)),
}
