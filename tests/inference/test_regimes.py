"""Errors row by row, the paired comparison, the warm-up, and which regime is chosen."""

from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.inference.evaluate import (
    ErrorRatio,
    RowErrors,
    SeriesPositions,
    choose_regime,
    compare_errors,
    measure_warm_up,
    tabulate_rows,
)

COSTS = (12_000, 100)


def make_places(num_series, rows=100):
    offsets = np.arange(num_series + 1) * rows
    index = SimpleNamespace(segments=offsets[:-1], offsets=offsets)
    return SeriesPositions(SimpleNamespace(index=index))


def make_errors(values):
    return RowErrors(np.arange(len(values)), {"mae": values, "mse": values**2})


def test_ranges_of_rows_double_and_cover_every_row_once():
    errors = make_errors(np.ones(200))
    table = tabulate_rows({"carried": errors}, make_places(2), ("mae", "mse"))
    assert [(e["from"], e["to"]) for e in table][:5] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15)]
    assert table[-1]["to"] == 99
    assert sum(entry["carried"]["rows"] for entry in table) == 200


def test_a_mean_square_is_shown_as_its_root():
    (entry,) = tabulate_rows({"carried": make_errors(np.full(1, 3.0))}, make_places(1), ("mse",))
    assert entry["carried"]["rmse"] == 3.0


@pytest.mark.parametrize("num_series", [2, 12])
def test_an_error_that_is_larger_everywhere_has_an_interval_above_one(num_series):
    places, draw = make_places(num_series), np.random.default_rng(0)
    window = draw.gamma(2.0, size=100 * num_series)
    ratio = compare_errors(make_errors(1.3 * window), make_errors(window), "mae", places, 10)
    assert ratio.value == pytest.approx(1.3)
    assert ratio.interval == pytest.approx([1.3, 1.3])
    assert ("12 series" if num_series == 12 else "from 2 series") in ratio.how


def test_series_that_disagree_widen_the_interval():
    places = make_places(6)
    window = np.ones(600)
    carried = np.repeat([0.5, 1.5, 0.6, 1.4, 0.7, 1.3], 100)
    ratio = compare_errors(make_errors(carried), make_errors(window), "mae", places, 10)
    assert ratio.interval is not None
    assert ratio.interval[0] < 0.9 < 1.1 < ratio.interval[1]


def test_too_few_rows_have_no_interval():
    errors = make_errors(np.ones(30))
    assert compare_errors(errors, errors, "mae", make_places(1), 10).interval is None


def test_the_warm_up_ends_where_the_error_stays_near_the_later_one():
    counts = np.arange(100)
    errors = make_errors(np.where(counts < 16, 5.0, 1.0))
    table = tabulate_rows({"carried": errors}, make_places(1), ("mae",))
    warm_up = measure_warm_up(table, 32, "carried", "mae")
    assert warm_up["rows"] == 16
    assert warm_up["settled"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("value", "interval", "use", "words"),
    [
        (0.8, [0.7, 0.9], "carried", "20.0 % lower"),
        (1.02, [1.01, 1.03], "carried", "2.0 % higher than that of windows (95 %: +1.0 to +3.0 %)"),
        (1.0, [1.0, 1.0], "carried", "its error is that of windows"),
        (1.2, [1.1, 1.3], "window", "20.0 % higher"),
        (1.02, [0.9, 1.1], "window", "may be more than 5 % higher"),
        (1.2, [1.1, 1.5], "window", "is more than 5 % higher"),
        (0.9, None, "window", "too few rows"),
    ],
)
def test_the_cheaper_regime_is_chosen_unless_it_may_cost_accuracy(value, interval, use, words):
    choice = choose_regime(ErrorRatio(value, interval, ""), COSTS)
    assert choice["use"] == use
    assert words in choice["reason"]
