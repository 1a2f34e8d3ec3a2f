from __future__ import annotations

import pytest
import torch

from slipstream.scoring import baselines
from slipstream.training import train
from tests.conftest import real_file, small_config

generator = torch.Generator().manual_seed(0)
PAST = torch.randn(12, 5, 2, generator=generator)


def test_repeat_is_the_last_row():
    found = baselines.predict_repeat(PAST, 3)
    for window in range(5):
        for step in range(3):
            assert torch.equal(found[window, step], PAST[-1, window])


@pytest.mark.parametrize("period", [1, 4, 12])
def test_seasonal_is_one_season_ago(period):
    found = baselines.predict_seasonal(PAST, 7, period)
    for step in range(7):
        assert torch.equal(found[:, step], PAST[12 - period + step % period])


def test_ridge_reaches_the_known_figure_on_etth1(tmp_path):
    config = small_config(
        tmp_path,
        data={
            "path": str(real_file("ETTh1.csv")),
            "time": "date",
            "channels": "independent",
            "context": 336,
            "horizon": 96,
            "split": {"rows": [8640, 2880, 2880]},
        },
        model={"kind": "linear"},
        train={"epochs": 1, "batch": 1024},
        engine={"threads": 2},
    )
    summary = train(config).summary
    assert summary["windows"] == {"train": 8209, "val": 2785, "test": 2785}
    found = {name: beside["scaled"]["test"] for name, beside in summary["baselines"].items()}
    assert found["ridge"]["mse"] == pytest.approx(0.3702, abs=0.005)
    assert found["ridge"]["mae"] == pytest.approx(0.3914, abs=0.005)
    assert found["repeat"]["mse"] == pytest.approx(1.2944, abs=0.001)
