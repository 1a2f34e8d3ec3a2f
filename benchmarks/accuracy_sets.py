"""The data sets of `benchmarks/accuracy.py`: configs for Slipstream, arrays for the peers, the test
windows of both, and the scores.

A set is described twice, on purpose: by a Slipstream config that holds facts about the data only
(path, targets, horizon, split), and by arrays that this module reads on its own.
`align_predictions` asserts that the windows and the true values of a run's predictions are those of
the arrays, so that all tools are scored by one function on the same rows.

Shapes: N windows, H rows ahead (1 where a window's last row is estimated), C targets, F inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from slipstream import runs
from slipstream.data.predictions import LABEL, PREDICTED, PREDICTIONS, ROW, SERIES, STEP
from slipstream.data.simulated import cell

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Task = Literal["forecast", "estimate", "classify"]
TRAIN, VAL, TEST, UNUSED = range(4)
HIGHER_IS_BETTER = frozenset({"accuracy", "balanced_accuracy"})
TRUTH_TOLERANCE = 1e-5
"""Runs keep scaled values as float32: their truths differ by this share of a target's deviation"""
MIN_COVERED = 0.9
"""The share of an estimate's test windows that a tool must predict: its context may be longer"""
ETTH1_COLUMNS = ["HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"]
M4_PERIOD, M4_HORIZON = 24, 48
SIMULATION_SEED = 37
"""Another one than that of the embedded data"""
DEMAND_STATIONS, DEMAND_ROWS = 20, 2_530


class SeriesRows(NamedTuple):
    """The rows of one series."""

    name: str
    """As in the predictions of a run"""
    targets: Floats
    """[rows, C]"""
    inputs: Floats
    """[rows, F]: further inputs, without the targets of a forecast"""
    sets: npt.NDArray[np.int8]
    """[rows]: TRAIN, VAL, TEST or UNUSED"""
    first_row: int = 0
    """The number of the first row in the file"""
    known: npt.NDArray[np.bool_] | None = None
    """[rows]: whether the targets were measured; no window predicts a row that was filled in"""


class WindowIndex(NamedTuple):
    """Windows, by their series and first predicted row (of an estimate, the last row)."""

    series: Ints
    rows: Ints

    def __len__(self) -> int:
        return len(self.rows)


class LabelledCases(NamedTuple):
    """Whole series and their classes."""

    names: list[str]
    """As in the predictions of a run; empty for training cases"""
    values: list[Floats]
    """[rows, F] each, of unequal lengths"""
    labels: list[str]


@dataclass(frozen=True)
class Problem:
    """A set as arrays."""

    set: AccuracySet
    series: list[SeriesRows] = field(default_factory=list)
    targets: tuple[str, ...] = ()
    """The names of the columns of `SeriesRows.targets`"""
    train_cases: LabelledCases | None = None
    test_cases: LabelledCases | None = None

    def list_windows(self, set_index: int, *, context: int = 0) -> WindowIndex:
        """Return the windows whose predicted rows are all in a set and known, with so many rows
        before the first of them (an estimate's context ends with its own row)."""
        steps = max(self.set.horizon, 1)
        before = context if self.set.horizon else max(self.set.context, context) - 1
        owners, starts = [], []
        for number, series in enumerate(self.series):
            in_set = series.sets == set_index
            in_set = in_set if series.known is None else in_set & series.known
            inside = np.convolve(in_set.astype(int), np.ones(steps, int), "valid") == steps
            rows = np.flatnonzero(inside)
            rows = rows[rows >= before]
            owners.append(np.full(len(rows), number))
            starts.append(rows)
        return WindowIndex(np.concatenate(owners), np.concatenate(starts))

    @property
    def test_windows(self) -> WindowIndex:
        return self.list_windows(TEST)

    @property
    def num_test_windows(self) -> int:
        return len(self.test_cases.labels if self.test_cases else self.test_windows)

    def gather_truth(self, windows: WindowIndex) -> Floats:
        """Return the true values [N, H, C] of windows."""
        steps = np.arange(max(self.set.horizon, 1))
        truth = np.empty((len(windows), len(steps), self.series[0].targets.shape[1]))
        for number, series in enumerate(self.series):
            owned = windows.series == number
            truth[owned] = series.targets[windows.rows[owned][:, None] + steps]
        return truth

    def fit_scale(self) -> tuple[Floats, Floats]:
        """Return the mean and the deviation [C] of the training rows of all series."""
        rows = np.concatenate([series.targets[series.sets == TRAIN] for series in self.series])
        return rows.mean(axis=0), rows.std(axis=0)


Scorer = Callable[[Problem, WindowIndex, Floats], dict[str, float]]


@dataclass(frozen=True)
class AccuracySet:
    """A data set, its task and its test."""

    name: str
    what: str
    task: Task
    build_data: Callable[[Path, Path], dict[str, Any]]
    """From the folder of the data and that of derived files to the section [data] of a config"""
    read: Callable[[AccuracySet, Path, Path], Problem]
    metrics: tuple[str, str]
    """The first one ranks the tools"""
    horizon: int = 0
    context: int = 96
    """Rows that the peers see; of an estimate also the rows that its test windows have at least"""
    period: int = 1
    score_windows: Scorer | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    """Figures of others for the first metric on the same test"""

    def load(self, data: Path, work: Path) -> Problem:
        """Read the set as arrays."""
        problem = self.read(self, data, work)
        return replace(problem, targets=tuple(self.build_data(data, work)["targets"]))

    def build_config(self, data: Path, work: Path, **sections: Any) -> dict[str, Any]:
        """Return a Slipstream config with nothing but the data, and these sections."""
        return {"name": self.name, "data": self.build_data(data, work)} | sections


# Scores


def score_scaled(problem: Problem, windows: WindowIndex, predicted: Floats) -> dict[str, float]:
    """Return the squared and absolute errors of predictions [N, H, C] in training deviations."""
    _, deviation = problem.fit_scale()
    error = (predicted - problem.gather_truth(windows)) / deviation
    return {"mse": float((error**2).mean()), "mae": float(np.abs(error).mean())}


def score_m4(problem: Problem, windows: WindowIndex, predicted: Floats) -> dict[str, float]:
    """Return MASE and sMAPE as in the competition: the mean over series, one window each; errors
    are relative to the seasonal differences of all rows before the test."""
    truth = problem.gather_truth(windows)[..., 0]
    error = np.abs(predicted[..., 0] - truth)
    size = np.abs(predicted[..., 0]) + np.abs(truth)
    percent = 200 * np.divide(error, size, out=np.zeros_like(error), where=size > 0)
    scales = []
    for number, row in zip(windows.series, windows.rows, strict=True):
        known = problem.series[number].targets[:row, 0]
        scales.append(np.abs(known[M4_PERIOD:] - known[:-M4_PERIOD]).mean())
    return {
        "mase": float((error.mean(axis=1) / np.array(scales)).mean()),
        "smape": float(percent.mean()),
    }


def score_percent(problem: Problem, windows: WindowIndex, predicted: Floats) -> dict[str, float]:
    """Return the mean absolute and the root mean square error in percentage points of the state of
    charge."""
    unit = 1.0 if problem.set.name == "cells" else 100.0
    error = unit * (predicted - problem.gather_truth(windows))
    return {"mae": float(np.abs(error).mean()), "rmse": float(np.sqrt((error**2).mean()))}


def score_classes(problem: Problem, predicted: list[str]) -> dict[str, float]:
    """Return the share of right cases, and its mean over classes."""
    assert problem.test_cases is not None
    truth = np.array(problem.test_cases.labels)
    right = np.array(predicted) == truth
    by_class = [float(right[truth == label].mean()) for label in np.unique(truth)]
    return {"accuracy": float(right.mean()), "balanced_accuracy": float(np.mean(by_class))}


def score(problem: Problem, predicted: Any) -> tuple[dict[str, float], int]:
    """Return the metrics of the predictions of all test windows, and the number of windows scored.

    `predicted` are numbers [N, H, C] in physical units or a list of N classes. Only estimates may
    lack windows (NaN), up to a tenth: those before the first whole context.
    """
    if problem.test_cases is not None:
        assert len(predicted) == len(problem.test_cases.labels)
        return score_classes(problem, list(predicted)), len(predicted)
    windows = problem.test_windows
    predicted = np.asarray(predicted, dtype=np.float64)
    expected = len(windows), max(problem.set.horizon, 1), len(problem.targets)
    assert predicted.shape == expected, f"predictions are {predicted.shape}, not {expected}"
    known = np.isfinite(predicted).all(axis=(1, 2))
    share = float(known.mean())
    if problem.set.task == "estimate" and MIN_COVERED <= share < 1:
        windows = WindowIndex(windows.series[known], windows.rows[known])
        predicted = predicted[known]
    elif share < 1:
        raise ValueError(f"{100 * (1 - share):.1f} % of the test windows have no prediction")
    assert problem.set.score_windows is not None
    return problem.set.score_windows(problem, windows, predicted), len(windows)


# Predictions of a run


def read_run(problem: Problem, folder: Path) -> Any:
    """Return the test predictions of a run's model in the order of the problem's windows."""
    run, _ = runs.find_model_run(runs.Run(folder))
    table = pa.parquet.read_table(run.folder / PREDICTIONS)
    return align_predictions(problem, table)


def align_predictions(problem: Problem, table: pa.Table) -> Any:
    """Return predictions in the order of the problem's test windows, as `score` takes them.

    Asserts that the table has these windows, and the same true values. Estimates may have more
    windows, or fewer ones (NaN): their number depends on the context.
    """
    names = table[SERIES].cast(pa.string()).to_pylist()
    if problem.test_cases is not None:
        return _align_classes(problem.test_cases, names, table)
    windows, steps = problem.test_windows, max(problem.set.horizon, 1)
    numbers = {series.name: number for number, series in enumerate(problem.series)}
    owners = np.array([numbers[name] for name in names], dtype=np.int64)
    first_rows = np.array([series.first_row for series in problem.series])
    rows = table[ROW].to_numpy() - first_rows[owners]
    step = table[STEP].to_numpy() - 1 if problem.set.horizon else np.zeros(len(rows), np.int64)
    size = max(len(series.targets) for series in problem.series) + 1
    keys = windows.series * size + windows.rows
    found = owners * size + rows - step
    place = np.searchsorted(keys, found)
    known = keys[np.minimum(place, len(keys) - 1)] == found
    if problem.set.horizon:
        assert known.all(), f"{np.count_nonzero(~known)} predicted rows are not of a test window"
        count, expected = len(found), len(keys) * steps
        assert count == expected, f"{count} predicted rows; the test windows have {expected}"
    truth = problem.gather_truth(windows)
    _, deviation = problem.fit_scale()
    predicted = np.full(truth.shape, np.nan)
    for channel, target in enumerate(problem.targets):
        beside = truth[place[known], step[known], channel]
        error = np.abs(table[target].to_numpy()[known] - beside).max()
        allowed = TRUTH_TOLERANCE * (deviation[channel] + np.abs(beside).max())
        assert error <= allowed, f"true values of {target} differ by up to {error:g}"
        values = table[f"{target}_{PREDICTED}"].to_numpy()
        predicted[place[known], step[known], channel] = values[known]
    return predicted


def _align_classes(cases: LabelledCases, names: list[str], table: pa.Table) -> list[str]:
    labels, predicted = (table[name].cast(pa.string()).to_pylist() for name in (LABEL, PREDICTED))
    assert sorted(names) == sorted(cases.names), "the test cases differ"
    assert dict(zip(names, labels, strict=True)) == dict(
        zip(cases.names, cases.labels, strict=True)
    ), "the true classes differ"
    by_name = dict(zip(names, predicted, strict=True))
    return [by_name[name] for name in cases.names]


# Readers


def split_shares(num_rows: int, train: float = 0.7, val: float = 0.1) -> npt.NDArray[np.int8]:
    """Return the set of each row for shares in time order; borders are rounded."""
    sets = np.full(num_rows, TEST, np.int8)
    sets[: round(num_rows * (train + val))] = VAL
    sets[: round(num_rows * train)] = TRAIN
    return sets


def split_counts(num_rows: int, *counts: int) -> npt.NDArray[np.int8]:
    """Return the set of each row for numbers of training, validation and test rows."""
    sets = np.full(num_rows, UNUSED, np.int8)
    borders = np.cumsum([0, *counts])
    for number, (begin, end) in enumerate(pairwise(borders)):
        sets[begin:end] = number
    return sets


def read_columns(path: Path, names: list[str]) -> Floats:
    """Return columns of a CSV file as [rows, columns], NaN where a value is missing."""
    table = pa.csv.read_csv(path)
    return np.stack(
        [table[name].cast(pa.float64()).to_numpy(zero_copy_only=False) for name in names], axis=1
    )


def _read_etth1(accuracy_set: AccuracySet, data: Path, _work: Path) -> Problem:
    values = read_columns(data / "ETTh1.csv", ETTH1_COLUMNS)
    sets = split_counts(len(values), 8640, 2880, 2880)
    if accuracy_set.name == "etth1-96":
        inputs = values[:, :0]
    else:
        values, inputs = values[:, -1:], values[:, :-1]
    return Problem(accuracy_set, [SeriesRows("ETTh1.csv", values, inputs, sets)])


def _read_pm25(accuracy_set: AccuracySet, data: Path, _work: Path) -> Problem:
    names = ["pm2.5", "month", "day", "hour", "DEWP", "TEMP", "PRES", "Iws", "Is", "Ir"]
    values = read_columns(data / "beijing_pm25.csv", names)
    known = np.isfinite(values[:, 0])
    first = int(np.argmax(known))
    last_known = np.maximum.accumulate(np.where(known, np.arange(len(values)), 0))
    values[:, 0] = values[last_known, 0]
    values, known = values[first:], known[first:]
    sets = split_shares(len(values))
    rows = SeriesRows("beijing_pm25.csv", values[:, :1], values[:, 1:], sets, first, known)
    return Problem(accuracy_set, [rows])


def _read_sp500(accuracy_set: AccuracySet, data: Path, _work: Path) -> Problem:
    names = ["close", "open", "high", "low", "adjclose", "volume"]
    values = read_columns(data / "sp500_2000.csv", names)
    sets = split_shares(len(values))
    rows = SeriesRows("sp500_2000.csv", values[:, :1], values[:, 1:], sets)
    return Problem(accuracy_set, [rows])


def _read_illness(accuracy_set: AccuracySet, data: Path, _work: Path) -> Problem:
    names = ["OT", "% WEIGHTED ILI", "%UNWEIGHTED ILI", "AGE 0-4", "AGE 5-24", "ILITOTAL"]
    values = read_columns(data / "illness.csv", [*names, "NUM. OF PROVIDERS"])
    sets = split_shares(len(values))
    rows = SeriesRows("illness.csv", values[:, :1], values[:, 1:], sets)
    return Problem(accuracy_set, [rows])


def read_m4(data: Path) -> dict[str, Floats]:
    """Return the rows of each hourly series, the 48 to forecast last."""
    series: dict[str, list[float]] = {}
    for name in ("m4_hourly_train.csv", "m4_hourly_test.csv"):
        lines = (data / name).read_text(encoding="utf-8").splitlines()[1:]
        for line in lines:
            cells = [cell.strip('"') for cell in line.split(",")]
            values = [float(cell) for cell in cells[1:] if cell not in ("", "NA")]
            series.setdefault(cells[0], []).extend(values)
    return {name: np.array(values) for name, values in series.items()}


def _split_m4(num_rows: int) -> npt.NDArray[np.int8]:
    return split_counts(num_rows, num_rows - 2 * M4_HORIZON, M4_HORIZON, M4_HORIZON)


def _read_m4(accuracy_set: AccuracySet, data: Path, _work: Path) -> Problem:
    series = [
        SeriesRows(name, values[:, None], values[:, None][:, :0], _split_m4(len(values)))
        for name, values in read_m4(data).items()
    ]
    return Problem(accuracy_set, series)


LG_INPUTS = ["voltage_V", "current_A", "temperature_degC"]
LG_TEST, LG_VAL = ("Mixed4", "Mixed5", "Mixed6"), ("Mixed3",)
LG_TRAIN = ("LA92", "US06", "Mixed1", "Mixed2", "Mixed7", "Mixed8")
"""Without Cap_1C, which was recorded every ten seconds"""


def _read_lg(accuracy_set: AccuracySet, data: Path, _work: Path) -> Problem:
    table = pa.parquet.read_table(data / "lg_hg2_1hz.parquet", filters=[("ambient_degC", "=", 25)])
    series = []
    for profile in (*LG_TRAIN, *LG_VAL, *LG_TEST):
        rows = table.filter(pa.compute.equal(table["profile"], profile))
        set_index = TEST if profile in LG_TEST else VAL if profile in LG_VAL else TRAIN
        inputs = np.stack([rows[name].to_numpy().astype(float) for name in LG_INPUTS], axis=1)
        targets = rows["soc"].to_numpy().astype(float)[:, None]
        name = f"{rows['test_id'][0].as_py()}/{profile}"
        series.append(
            SeriesRows(name, targets, inputs, np.full(len(inputs), set_index, dtype=np.int8))
        )
    return Problem(accuracy_set, series)


def _read_cells(accuracy_set: AccuracySet, _data: Path, work: Path) -> Problem:
    table, series = pa.parquet.read_table(_write_cells(work)), []
    names = table["cell"].to_pylist()
    sets = {"train": TRAIN, "val": VAL, "test": TEST}
    for name in dict.fromkeys(names):
        rows = table.filter(pa.compute.equal(table["cell"], name))
        inputs = np.stack([rows[column].to_numpy().astype(float) for column in LG_INPUTS], axis=1)
        targets = rows["soc_percent"].to_numpy().astype(float)[:, None]
        set_index = sets[rows["set"][0].as_py()]
        series.append(
            SeriesRows(str(name), targets, inputs, np.full(len(inputs), set_index, dtype=np.int8))
        )
    return Problem(accuracy_set, series)


DEMAND_INPUTS = ["hour_sin", "hour_cos", "week_sin", "week_cos", "warmth", "rain", "holiday"]


def _read_demand(accuracy_set: AccuracySet, _data: Path, work: Path) -> Problem:
    table, series = pa.parquet.read_table(_write_demand(work)), []
    for number in range(DEMAND_STATIONS):
        rows = table.filter(pa.compute.equal(table["station"], number))
        inputs = np.stack([rows[name].to_numpy() for name in DEMAND_INPUTS], axis=1)
        targets = rows["demand"].to_numpy()[:, None]
        series.append(SeriesRows(str(number), targets, inputs, split_shares(len(inputs))))
    return Problem(accuracy_set, series)


def read_archive(path: Path) -> tuple[list[Floats], list[str]]:
    """Return the cases [rows, F] of a `.ts` file, and their classes."""
    text = path.read_text(encoding="utf-8")
    lines = text[text.lower().index("@data") :].splitlines()[1:]
    values, labels = [], []
    for line in filter(None, map(str.strip, lines)):
        *columns, label = line.split(":")
        values.append(
            np.array([[float(cell) for cell in column.split(",")] for column in columns]).T
        )
        labels.append(label)
    return values, labels


def _read_classes(accuracy_set: AccuracySet, data: Path, _work: Path) -> Problem:
    cases = []
    for part in ("TRAIN", "TEST"):
        path = data / "archive" / f"{accuracy_set.name}_{part}.ts"
        values, labels = read_archive(path)
        names = [f"{path.name}/{number}" for number in range(1, len(labels) + 1)]
        cases.append(LabelledCases(names, values, labels))
    return Problem(accuracy_set, train_cases=cases[0], test_cases=cases[1])


# Derived files: a long table of M4 with its sets, and simulated data


def _write_m4(data: Path, work: Path) -> Path:
    path = work / "m4_hourly.parquet"
    if not path.exists():
        columns: dict[str, list[Any]] = {"id": [], "hour": [], "value": [], "set": []}
        for name, values in read_m4(data).items():
            columns["id"] += [name] * len(values)
            columns["hour"] += range(len(values))
            columns["value"] += values.tolist()
            columns["set"] += [("train", "val", "test")[k] for k in _split_m4(len(values))]
        _write_table(pa.table(columns), path)
    return path


def _write_cells(work: Path) -> Path:
    path = work / "cells.parquet"
    if not path.exists():
        _write_table(cell.simulate(SIMULATION_SEED), path)
    return path


def _write_demand(work: Path) -> Path:
    path = work / "demand.parquet"
    if not path.exists():
        from search import simulate_demand  # the job of benchmarks/search.py, of other stations

        table = simulate_demand(DEMAND_ROWS, stations=DEMAND_STATIONS, seed=SIMULATION_SEED)
        _write_table(table, path)
    return path


def _write_table(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with runs.replace_atomically(path) as temporary:
        pa.parquet.write_table(table, temporary)


# The sets


def _build_etth1(targets: list[str], horizon: int) -> Callable[[Path, Path], dict[str, Any]]:
    return lambda data, _: {
        "path": str(data / "ETTh1.csv"),
        "time": "date",
        "targets": targets,
        "horizon": horizon,
        "split": {"rows": [8640, 2880, 2880]},
    }


SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}


def _build_archive(name: str) -> Callable[[Path, Path], dict[str, Any]]:
    return lambda data, _: {
        "path": [str(data / "archive" / f"{name}_{part}.ts") for part in ("TRAIN", "TEST")],
        "task": "classify",
        "targets": ["label"],
        "context": "all",
        "split": {"by": "file", "test": ["*_TEST*"], "val": 0.2},
    }


def _make_archive_set(name: str, what: str, published: Mapping[str, float]) -> AccuracySet:
    return AccuracySet(
        name=name,
        what=what,
        task="classify",
        build_data=_build_archive(name),
        read=_read_classes,
        metrics=("accuracy", "balanced_accuracy"),
        published=published,
    )


SETS = {
    accuracy_set.name: accuracy_set
    for accuracy_set in (
        AccuracySet(
            name="etth1-96",
            what="ETTh1, 96 hours ahead, all 7 columns",
            task="forecast",
            build_data=_build_etth1(ETTH1_COLUMNS, 96),
            read=_read_etth1,
            metrics=("mse", "mae"),
            horizon=96,
            context=336,
            period=24,
            score_windows=score_scaled,
            published={
                "DUET (published)": 0.352,
                "PatchTST (published)": 0.370,
                "NLinear (published)": 0.374,
                "DLinear (published)": 0.375,
                "FEDformer (published)": 0.376,
            },
        ),
        AccuracySet(
            name="etth1-24",
            what="ETTh1, oil temperature 24 hours ahead",
            task="forecast",
            build_data=_build_etth1(["OT"], 24),
            read=_read_etth1,
            metrics=("mse", "mae"),
            horizon=24,
            context=168,
            period=24,
            score_windows=score_scaled,
        ),
        AccuracySet(
            name="pm25",
            what="Beijing PM2.5, 24 hours ahead",
            task="forecast",
            build_data=lambda data, _: {
                "path": str(data / "beijing_pm25.csv"),
                "time": "No",
                "targets": ["pm2.5"],
                "ignore": ["year"],
                "missing": "forward",
                "horizon": 24,
                "period": 24,
                "split": SHARES,
            },
            read=_read_pm25,
            metrics=("mse", "mae"),
            horizon=24,
            context=168,
            period=24,
            score_windows=score_scaled,
        ),
        AccuracySet(
            name="sp500",
            what="S&P 500, close 5 days ahead",
            task="forecast",
            build_data=lambda data, _: {
                "path": str(data / "sp500_2000.csv"),
                "time": "date",
                "targets": ["close"],
                "gap_tolerance": float("inf"),
                "horizon": 5,
                "split": SHARES,
            },
            read=_read_sp500,
            metrics=("mse", "mae"),
            horizon=5,
            context=60,
            score_windows=score_scaled,
        ),
        AccuracySet(
            name="illness",
            what="influenza-like illness, 24 weeks ahead",
            task="forecast",
            build_data=lambda data, _: {
                "path": str(data / "illness.csv"),
                "time": "date",
                "targets": ["OT"],
                "horizon": 24,
                "split": SHARES,
            },
            read=_read_illness,
            metrics=("mse", "mae"),
            horizon=24,
            context=104,
            period=52,
            score_windows=score_scaled,
        ),
        AccuracySet(
            name="m4-hourly",
            what="M4 competition, 414 hourly series, 48 hours ahead",
            task="forecast",
            build_data=lambda data, work: {
                "path": str(_write_m4(data, work)),
                "id": "id",
                "time": "hour",
                "targets": ["value"],
                "horizon": M4_HORIZON,
                "period": M4_PERIOD,
                "split": {"by": "set", "val": ["val"], "test": ["test"]},
            },
            read=_read_m4,
            metrics=("mase", "smape"),
            horizon=M4_HORIZON,
            context=168,
            period=M4_PERIOD,
            score_windows=score_m4,
            published={"AutoARIMA (published)": 0.92},
        ),
        AccuracySet(
            name="demand",
            what="simulated demand of 20 stations, 24 hours ahead",
            task="forecast",
            build_data=lambda _, work: {
                "path": str(_write_demand(work)),
                "id": "station",
                "time": "hour",
                "inputs": ["demand", *DEMAND_INPUTS],
                "targets": ["demand"],
                "horizon": 24,
                "period": 24,
                "split": SHARES,
            },
            read=_read_demand,
            metrics=("mse", "mae"),
            horizon=24,
            context=168,
            period=24,
            score_windows=score_scaled,
        ),
        AccuracySet(
            name="lg",
            what="LG 18650HG2 at 25 °C, state of charge, percentage points",
            task="estimate",
            build_data=lambda data, _: {
                "path": str(data / "lg_hg2_1hz.parquet"),
                "time": "time_s",
                "id": ["test_id", "profile"],
                "inputs": LG_INPUTS,
                "targets": ["soc"],
                "context": 300,
                "horizon": 0,
                "where": {"ambient_degC": 25, "profile": [*LG_TRAIN, *LG_VAL, *LG_TEST]},
                "split": {"by": "profile", "val": [*LG_VAL], "test": [*LG_TEST]},
            },
            read=_read_lg,
            metrics=("mae", "rmse"),
            context=300,
            score_windows=score_percent,
            published={"LSTM (published)": 1.56},
        ),
        AccuracySet(
            name="cells",
            what="simulated cells, state of charge, percentage points",
            task="estimate",
            build_data=lambda _, work: {
                "path": str(_write_cells(work)),
                "time": "time_s",
                "id": "cell",
                "inputs": LG_INPUTS,
                "targets": ["soc_percent"],
                "context": 120,
                "horizon": 0,
                "split": {"by": "set", "val": ["val"], "test": ["test"]},
            },
            read=_read_cells,
            metrics=("mae", "rmse"),
            context=120,
            score_windows=score_percent,
        ),
        _make_archive_set(
            "ItalyPowerDemand",
            "half of the year by the demand of a day",
            {"ROCKET (published)": 0.970, "InceptionTime (published)": 0.965},
        ),
        _make_archive_set(
            "ArrowHead",
            "type of an arrowhead by its outline",
            {"ROCKET (published)": 0.814, "InceptionTime (published)": 0.846},
        ),
        _make_archive_set("JapaneseVowels", "speaker by 12 coefficients of a vowel", {}),
    )
}
