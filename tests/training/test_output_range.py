"""`model.output_range`: nothing that leaves the product lies beyond it, and training sees none of
it."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

import slipstream
from slipstream import runs
from tests.conftest import small_config, waves
from tests.logs import read_lines

LOW, HIGH = 9.8, 10.3
"""Within the range of column `a`"""
QUICK = {"kind": "linear"}


def train(folder, *, limited=True, **sections):
    model = QUICK | ({"output_range": [LOW, HIGH]} if limited else {})
    data = {"targets": ["a"]} | sections.pop("data", {})
    config = small_config(folder, model=model, data=data, **sections)
    return slipstream.train(config, waves(), quiet=True)


def predicted(table):
    return [name for name in table.column_names if name.startswith("a_")]


def check(table):
    names = predicted(table)
    values = np.stack([table[name].to_numpy() for name in names])
    assert values.min() == LOW
    assert values.max() == HIGH
    return names


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    return train(tmp_path_factory.mktemp("limited"))


@pytest.fixture(scope="module")
def quantiles(tmp_path_factory):
    how = {"train": {"loss": "quantile", "repeats": 2}}
    return train(tmp_path_factory.mktemp("quantiles"), **how)


def test_predictions_stay_within_it_and_scores_are_theirs(limited):
    written = pq.read_table(limited.run / "predictions.parquet")
    assert check(written) == ["a_predicted"]
    errors = written["a_predicted"].to_numpy() - written["a"].to_numpy()
    assert limited.summary["metrics"]["test"]["mae"] == pytest.approx(np.abs(errors).mean())


def test_training_sees_none_of_it(limited, tmp_path):
    free = train(tmp_path, limited=False)
    keys = ("train_loss", "val_loss", "best")
    epochs = [
        [
            [event[key] for key in keys]
            for event in read_lines(runs.open_run(one.run))
            if event["event"] == "epoch"
        ]
        for one in (limited, free)
    ]
    assert epochs[0] == epochs[1]
    assert pq.read_table(free.run / "predictions.parquet")["a_predicted"].to_numpy().max() > HIGH


def test_new_predictions_and_evaluations_are_limited_alike(limited):
    check(slipstream.predict(limited.run, waves(seed=3), every=True))
    check(slipstream.load(limited.run).predict(waves(seed=3), every=True))
    truth = waves()["a"].to_numpy()
    furthest = max(truth.max() - LOW, HIGH - truth.min())
    assert slipstream.evaluate(limited.run, waves(), quiet=True).metrics["max_error"] <= furthest


def test_quantiles_intervals_and_the_mean_of_repeats_are_limited(quantiles):
    names = check(pq.read_table(quantiles.run / "predictions.parquet"))
    assert {"a_q10", "a_q90", "a_lo95", "a_hi95"} <= set(names)
    check(slipstream.predict(quantiles.run, waves(seed=3), every=True, ensemble=True))


def test_an_ensemble_of_runs_is_limited(limited, tmp_path):
    other = train(tmp_path / "other", seed=5)
    joined = slipstream.ensemble([limited.run, other.run], data=waves(), quiet=True, out=tmp_path)
    check(pq.read_table(joined.run / "predictions.parquet"))


def test_every_independent_channel_has_its_own_scaled_limits(tmp_path):
    """Columns a, b and c lie around 10, 20 and 30."""
    model = QUICK | {"output_range": [10.0, 30.0]}
    config = small_config(tmp_path, model=model, data={"channels": "independent"})
    table = pq.read_table(slipstream.train(config, waves(), quiet=True).run / "predictions.parquet")
    assert table["a_predicted"].to_numpy().min() == 10
    assert 10 < table["b_predicted"].to_numpy().min() < table["b_predicted"].to_numpy().max() < 30
    assert table["c_predicted"].to_numpy().max() == 30
