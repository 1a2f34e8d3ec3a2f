"""The sets, scores and tables of `benchmarks/accuracy.py` and `benchmarks/portfolio.py`."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import slipstream
from slipstream import config as configs
from tests.conftest import REAL, close, mostly_slow, real_file
from tests.tools.bench.scripts import load

load("search")
sets, peers = load("accuracy_sets"), load("accuracy_peers")
accuracy, portfolio = load("accuracy"), load("portfolio")
FILES = {
    "etth1-96": "ETTh1.csv",
    "etth1-24": "ETTh1.csv",
    "pm25": "beijing_pm25.csv",
    "sp500": "sp500_2000.csv",
    "illness": "illness.csv",
    "m4-hourly": "m4_hourly_test.csv",
    "lg": "lg_hg2_1hz.parquet",
    "ItalyPowerDemand": "archive/ItalyPowerDemand_TEST.ts",
    "ArrowHead": "archive/ArrowHead_TEST.ts",
    "JapaneseVowels": "archive/JapaneseVowels_TEST.ts",
}
"""A file that each set needs; simulated ones need none"""
MODEL = {"kind": "linear", "normalize": "last"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


def load_problem(name: str, work: Path) -> Any:
    if name in FILES:
        real_file(FILES[name])
    return sets.SETS[name].load(REAL, work)


def train(problem: Any, work: Path, out: Path) -> Any:
    """Train a small model on a set for one epoch."""
    sections: dict[str, Any] = {"train": {"epochs": 1, "lr": 1e-4, "batch": 512}}
    sections |= {"model": MODEL, "engine": {"device": "cpu"}, "out": str(out)}
    return slipstream.train(problem.set.build_config(REAL, work, **sections), quiet=True)


@pytest.mark.parametrize("name", mostly_slow(sets.SETS, "illness", "cells", "ItalyPowerDemand"))
def test_scores_are_those_of_the_run_itself(name: str, work: Path, tmp_path: Path) -> None:
    problem = load_problem(name, work)
    result = train(problem, work, tmp_path)
    metrics, num_windows = sets.score(problem, sets.read_run(problem, Path(result)))
    assert num_windows == problem.num_test_windows == result.summary["windows"]["test"]
    main, second = problem.set.metrics
    if main != "mase":  # a run's is relative to its training rows, the competition's to all rows
        close(metrics[main], portfolio.read_metric(result.summary, "test", problem.set), rel=1e-4)
    if main != "mse":
        unit = 100.0 if name == "lg" else 1.0
        close(metrics[second], unit * result.metrics["test"][second], rel=1e-4)


def tabulate(problem: Any) -> pa.Table:
    """Return predictions of the test windows that are right."""
    windows, truth = problem.test_windows, problem.gather_truth(problem.test_windows)
    steps = truth.shape[1]
    rows = windows.rows[:, None] + np.arange(steps)
    names = np.array([series.name for series in problem.series])
    columns = {
        "series": np.repeat(names[windows.series], steps),
        "row": rows.ravel(),
        "step": np.tile(np.arange(1, steps + 1), len(windows)),
    }
    for channel, target in enumerate(problem.targets):
        columns[target] = truth[..., channel].ravel()
        columns[f"{target}_predicted"] = truth[..., channel].ravel()
    return pa.table(columns)


def replace_column(table: pa.Table, name: str, change: float) -> pa.Table:
    number = table.column_names.index(name)
    return table.set_column(number, name, pa.compute.add(table[name], change))


def test_predictions_may_come_in_any_order() -> None:
    problem = make_problem()
    table = tabulate(problem)
    order = np.random.default_rng(0).permutation(table.num_rows)
    predicted = sets.align_predictions(problem, table.take(order))
    assert sets.score(problem, predicted) == ({"mse": 0.0, "mae": 0.0}, problem.num_test_windows)


def test_other_windows_and_other_truths_are_refused() -> None:
    problem = make_problem()
    table = tabulate(problem)
    with pytest.raises(AssertionError, match="predicted rows; the test windows have"):
        sets.align_predictions(problem, table.slice(6))
    with pytest.raises(AssertionError, match="not of a test window"):
        sets.align_predictions(problem, replace_column(table, "row", 1))
    with pytest.raises(AssertionError, match=r"true values of b differ by up to 0\.5"):
        sets.align_predictions(problem, replace_column(table, "b", 0.5))


def test_a_window_without_a_prediction_is_refused() -> None:
    problem = make_problem()
    predicted = problem.gather_truth(problem.test_windows)
    predicted[0, 2, 1] = np.nan
    with pytest.raises(ValueError, match="of the test windows have no prediction"):
        sets.score(problem, predicted)


def make_problem(rows: int = 600, **settings: Any) -> Any:
    """A forecast of two series of two targets and one further input."""
    options: dict[str, Any] = {"horizon": 6, "context": 24, "period": 12} | settings
    described = sets.AccuracySet(
        name="illness",
        what="",
        task="forecast",
        build_data=lambda *_: {},
        read=lambda *_: None,
        metrics=("mse", "mae"),
        score_windows=sets.score_scaled,
        **options,
    )
    draw = np.random.default_rng(0)
    series = [
        sets.SeriesRows(
            str(k),
            np.cumsum(draw.standard_normal((rows, 2)), axis=0),
            draw.standard_normal((rows, 1)),
            sets.split_shares(rows),
        )
        for k in range(2)
    ]
    return sets.Problem(described, series, ("a", "b"))


def test_windows_are_those_of_a_loop() -> None:
    problem = make_problem()
    expected = [
        (number, row)
        for number, series in enumerate(problem.series)
        for row in range(len(series.sets) - 5)
        if (series.sets[row : row + 6] == sets.TEST).all()
    ]
    windows = problem.test_windows
    assert list(zip(windows.series, windows.rows, strict=True)) == expected
    number, row = expected[-1]
    assert (problem.gather_truth(windows)[-1] == problem.series[number].targets[row:]).all()


def test_no_window_predicts_a_row_that_was_filled_in() -> None:
    problem = make_problem()
    known = np.ones(600, bool)
    known[550] = False
    problem.series[1] = problem.series[1]._replace(known=known)
    windows = problem.test_windows
    rows = windows.rows[windows.series == 1]
    assert set(range(480, 595)) - set(rows.tolist()) == set(range(545, 551))


def test_seasonal_naive_repeats_the_last_season() -> None:
    problem = make_problem(horizon=14)
    predicted = peers.predict_seasonal(problem, 0, None)
    windows = problem.test_windows
    values, row = problem.series[0].targets, windows.rows[3]
    expected = [values[row - 12 + step % 12] for step in range(14)]
    assert (predicted[3] == np.stack(expected)).all()


@pytest.mark.parametrize("period", [1, 12, 24])
def test_features_of_a_forecast_do_not_depend_on_later_rows(period: int) -> None:
    problem = make_problem(period=period)
    row = int(problem.test_windows.rows[7])
    windows = sets.WindowIndex(np.array([0, 1]), np.array([row, row]))
    before = peers.ForecastFeatures(problem).build(windows)
    for series in problem.series:
        series.targets[row:] += 100
        series.inputs[row:] += 100
    after = peers.ForecastFeatures(problem).build(windows)
    np.testing.assert_array_equal(before.features, after.features)
    assert (before.target != after.target).all()
    assert len(before.target) == 2 * 6 * 2


def test_forecast_features_undo_themselves() -> None:
    """A model that knows the change returns the truth, in the order of the windows."""
    problem = make_problem()
    features = peers.ForecastFeatures(problem)
    targets = features.build(problem.test_windows).target
    position = 0

    def tell(rows: Any) -> Any:
        nonlocal position
        position += len(rows)
        return targets[position - len(rows) : position]

    close(features.predict(tell), problem.gather_truth(problem.test_windows), rel=1e-4)


def test_features_of_an_estimate_do_not_depend_on_later_rows() -> None:
    inputs = np.random.default_rng(0).standard_normal((700, 2))
    before = peers.build_estimate_features(inputs)[650]
    inputs[651:] += 5
    np.testing.assert_allclose(peers.build_estimate_features(inputs)[650], before, atol=1e-6)


def test_random_convolutions_are_those_of_a_loop() -> None:
    draw = np.random.default_rng(1)
    values = draw.standard_normal((3, 2, 30)).astype(np.float32)
    kernels = list(islice(peers.draw_kernels(2, 30, 0), 20))
    features = peers.transform(values, kernels)
    for number, kernel in enumerate(kernels):
        rows = np.pad(values[1], ((0, 0), (kernel.padding, kernel.padding)))[kernel.channels]
        reach = (kernel.weights.shape[1] - 1) * kernel.dilation
        out = [
            kernel.bias
            + float((rows[:, t : t + reach + 1 : kernel.dilation] * kernel.weights).sum())
            for t in range(rows.shape[1] - reach)
        ]
        close(features[1, 2 * number], np.mean(np.array(out) > 0))
        close(features[1, 2 * number + 1], max(out), rel=1e-4)


MEASUREMENTS = [
    ("illness", "slipstream-auto", {"mse": [0.8, 0.82], "mae": [0.7, 0.7]}, ""),
    ("illness", "LightGBM", {"mse": [0.9, 0.94], "mae": [0.6, 0.6]}, ""),
    ("illness", "AutoETS", {}, "not finished after 105 s"),
    ("illness", "NHITS", {}, "absent: neuralforecast"),
    ("ArrowHead", "slipstream-auto", {"accuracy": [0.8], "balanced_accuracy": [0.8]}, ""),
    ("ArrowHead", "LightGBM", {"accuracy": [0.9], "balanced_accuracy": [0.7]}, ""),
]


def list_measurements() -> list[Any]:
    found = []
    for set_name, tool, metrics, problem in MEASUREMENTS:
        count = max((len(values) for values in metrics.values()), default=1)
        for seed in range(count):
            scores = {name: values[seed] for name, values in metrics.items()}
            seconds = None if problem else 10.0 + seed
            found.append(
                accuracy.Measurement(
                    set_name, tool, seed, 2.0, scores, seconds, 170, problem=problem
                )
            )
    return found


def test_the_table_has_means_ranks_and_reasons() -> None:
    tools = ["slipstream-auto", "AutoETS", "LightGBM", "NHITS"]
    rows = accuracy.build_rows(list_measurements(), ["illness", "ArrowHead"], tools)
    table, second, seconds, compared, _ = accuracy.build_tables(
        rows, ["illness", "ArrowHead"], tools
    )
    assert table.headings[1:3] == ["illness, mse", "ArrowHead, accuracy"]
    cells = {line[0]: line[1:] for line in table.cells}
    assert cells["slipstream-auto"] == ["**0.8100 ± 0.01**", "0.8000", "10", "1.50 (2 sets)"]
    assert cells["LightGBM"] == ["0.9200 ± 0.03", "**0.9000**", "10", "1.50 (2 sets)"]
    assert cells["AutoETS"] == ["failed (1)", "", "", "3.50 (1 sets)"]
    assert cells["NHITS"] == ["failed (2)", "", "", ""]
    assert cells["InceptionTime (published)"] == ["", "0.846", "", ""]
    assert "1. AutoETS, illness: not finished after 105 s" in table.note
    assert dict(zip(second.headings, second.cells[0], strict=True))["mean rank"] == "1.50 (2 sets)"
    assert [line[1] for line in seconds.cells] == ["10", "", "10", ""]
    assert compared.cells == [
        ["illness", "0.81", "LightGBM: 0.92", "-12.0 %", "better"],
        ["ArrowHead", "0.8", "LightGBM: 0.9", "+11.1 %", "worse"],
    ]
    assert "within noise on 1 of 2 sets" in accuracy.write_headline(rows, 2.0)


def test_a_repeated_command_measures_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / accuracy.MEASUREMENTS
    for measurement in list_measurements():
        accuracy.append_measurement(path, measurement)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"set_name": "illn')  # a kill cut it off
    extra = accuracy.Measurement("illness", "SeasonalNaive", 0, 2.0, {"mse": 1.0, "mae": 1.0}, 1.0)
    accuracy.append_measurement(path, extra)
    known = accuracy.read_measurements(path)
    assert list(known.values()) == [*list_measurements(), extra]
    done = [accuracy.is_done(measurement, retry=False) for measurement in known.values()]
    again = [accuracy.is_done(measurement, retry=True) for measurement in known.values()]
    assert [known.key[1] for known, flag in zip(known.values(), done, strict=True) if not flag] == [
        "NHITS"
    ]
    assert sum(done) - sum(again) == 1  # AutoETS


def test_the_command_writes_a_record(work: Path, tmp_path: Path) -> None:
    arguments = ["--sets", "demand", "--tools", "SeasonalNaive", "--device", "cpu"]
    options = accuracy.parse_options([*arguments, "--out", str(tmp_path / "record")])
    options.work = work
    options.data = REAL
    accuracy.run_all(options)
    result = accuracy.summarize(options, 1.0)
    assert [row.problem for row in result.rows] == [""]
    assert result.rows[0].extra["windows"] == 9660
    text = (tmp_path / "record" / "summary.md").read_text(encoding="utf-8")
    assert text.startswith("# SeasonalNaive has the best mean rank")
    count = len((tmp_path / "record" / accuracy.MEASUREMENTS).read_text().splitlines())
    accuracy.run_all(options)
    assert len((tmp_path / "record" / accuracy.MEASUREMENTS).read_text().splitlines()) == count


def test_the_first_recipes_are_valid_configs_on_simulated_sets(work: Path) -> None:
    problems = [load_problem(name, work) for name in ("demand", "cells")]
    for problem in problems:
        recipes = list(islice(portfolio.list_recipes(problem.set.task), 150))
        assert len(set(recipes)) == len({recipe.name for recipe in recipes}) == 150
        built = [
            portfolio.build_config(recipe, problem, REAL, work, "cpu", 1.0) for recipe in recipes
        ]
        assert sum(config is not None for config in built) > 75
        for config in filter(None, built):
            assert configs.load(config).train.repeats == 3


def make_result(set_name: str, kind: str, val: float) -> Any:
    recipe = portfolio.asdict(portfolio.Recipe(kind))
    return portfolio.RecipeResult(set_name, recipe, [val, val], [val, val], val, val, 1.0, 1.0)


def test_a_portfolio_has_a_good_recipe_for_every_set() -> None:
    """`mlp` is the best on average, `gru` on one set, `lstm` on none."""
    found = [
        make_result("illness", kind, val) for kind, val in zip("abc", (1, 2, 1.5), strict=True)
    ]
    found += [make_result("sp500", kind, val) for kind, val in zip("abc", (3, 1, 1.2), strict=True)]
    chosen = portfolio.choose_portfolio(found, 12)
    assert [name for name, _ in chosen] == ["c", "a", "b"]
    close([value for _, value in chosen], [0.35, 0.1, 0.0])
    table = portfolio.build_tables(found)
    assert [line.title for line in table] == ["Portfolio: forecast", "illness", "sp500"]


def test_a_recipe_is_measured_with_its_validation_and_test_scores(
    work: Path, tmp_path: Path
) -> None:
    problem = load_problem("cells", work)
    recipe = portfolio.Recipe("linear", span=0.5)
    config = portfolio.build_config(recipe, problem, REAL, work, "cpu", 1.0)
    config["train"] |= {"epochs": 1, "batch": 1024}
    result = portfolio.measure(recipe, problem, config, tmp_path / "runs")
    assert result.problem == ""
    assert len(result.val) == len(result.test) == 3
    assert result.joined_test <= max(result.test)
    options = argparse.Namespace(out=tmp_path / "record", device="cpu", by="val")
    (tmp_path / "record").mkdir()
    line = portfolio.json.dumps(portfolio.asdict(result))
    (tmp_path / "record" / portfolio.MEASUREMENTS).write_text(line + "\n", encoding="utf-8")
    assert portfolio.summarize(options, 1.0).headline == "1 recipes on 1 sets, 3 seeds each"
