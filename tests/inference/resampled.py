"""Runs whose rows are resampled from 10 Hz, and raw rows for them."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa

from tests.conftest import merged

BEGIN = datetime.datetime(2026, 1, 1, 0, 0, 0, 250_000)
EVERY = {"step": "resample", "every": 1}
FILTERS = [
    {"step": "filter", "kind": "ema", "columns": ["b"], "rows": 4, "into": "slow"},
    {"step": "filter", "kind": "butterworth", "columns": ["c"], "cutoff_hz": 0.1, "into": "low"},
    {"step": "formula", "name": "change", "value": "b - lag(b, 2)"},
    {"step": "filter", "kind": "median", "columns": ["change"], "rows": 3},
]
MADE = ["b", "c", "slow", "low", "change"]
QUICK = {
    "data": {"context": 8, "horizon": 0, "targets": ["a"], "inputs": ["b", "c"]},
    "model": {"kind": "gru", "hidden": 6},
    "train": {"epochs": 1, "lr": 0.02},
}
CASES = {
    "mean": {"data": {"prepare": [EVERY]}},
    "steps": {"data": {"inputs": MADE, "prepare": [EVERY, *FILTERS]}},
    "last": {"data": {"inputs": MADE, "prepare": [EVERY | {"method": "last"}, *FILTERS]}},
    "forecast": {"data": {"inputs": ["a", "b"], "horizon": 3, "prepare": [EVERY]}},
    "quantiles": {
        "data": {"inputs": ["a", "b"], "horizon": 2, "prepare": [EVERY]},
        "train": {"loss": "quantile", "quantiles": [0.1, 0.5, 0.9]},
    },
    "carried": {"data": {"prepare": [EVERY, FILTERS[0]]}, "train": {"state": "carried"}},
    "padded": {"data": {"prepare": [EVERY, {"step": "pad"}]}},
    "forward": {"data": {"missing": "forward", "prepare": [EVERY]}},
    "series": {"data": {"id": "cell", "static": ["size"], "prepare": [EVERY]}},
    "classes": {
        "data": {"task": "classify", "targets": ["state"], "prepare": [EVERY]},
    },
    "filtered": {
        "data": {"prepare": [EVERY]},
        "predict": {"filter": {"kind": "moving_average", "rows": 3}},
    },
    "before": {
        "data": {
            "inputs": ["b", "c", "d"],
            "prepare": [
                {"step": "unit", "columns": ["b"], "factor": 0.5, "unit": "V"},
                {"step": "formula", "name": "d", "value": "mean(c, 5)"},
                {"step": "clip", "columns": ["b"], "low": 9.0},
                EVERY,
                {"step": "clip", "columns": ["c"], "high": 31.0},
            ],
        }
    },
    "dated": {
        "data": {
            "inputs": ["b", "a"],
            "horizon": 2,
            "future": ["hour_sin", "hour_cos"],
            "prepare": [
                EVERY | {"every": "1s"},
                {"step": "calendar", "features": ["hour"]},
            ],
        }
    },
    "bars": {
        "data": {
            "inputs": ["open", "high", "low", "close", "b"],
            "targets": ["close"],
            "horizon": 1,
            "prepare": [EVERY | {"method": "ohlc", "price": "a", "volume": "b"}],
        }
    },
}


def make_rows(case, num_rows=3000, seed=0, *, rough=True):
    """Raw rows at about 10 Hz: with jitter, repeated times, a short hole and a gap if `rough`."""
    draw = np.random.default_rng(seed)
    steps = np.full(num_rows, 0.1)
    steps[0] = 0.25
    if rough:
        steps += draw.choice([0.0, 0.0, 0.02, -0.03], num_rows)
        if case != "before":  # which needs data.duplicates, as resample is not the first step
            steps[[50, 333]] = 0.0
        steps[num_rows // 3] = 2.35  # is filled
        if case != "dated":  # predict leaves out the last windows before a gap: rows ahead lack
            steps[num_rows // 2] = 20.0  # is a gap
    time = np.round(np.cumsum(steps), 6)
    table = {"time": time}
    for i, name in enumerate("abc"):
        wave = np.sin(2 * np.pi * time / (12 + 5 * i)) + 0.1 * draw.standard_normal(num_rows)
        table[name] = 10 * (i + 1) + (i + 1) * wave
    if case == "forward":
        table["b"][100:160] = np.nan
    if case == "dated":
        table["time"] = [
            BEGIN + datetime.timedelta(microseconds=round(1e6 * seconds)) for seconds in time
        ]
    if case == "series":
        half = num_rows // 2
        table["cell"] = ["x"] * half + ["y"] * (num_rows - half)
        table["size"] = [1.0] * half + [2.0] * (num_rows - half)
    if case == "classes":
        table["state"] = np.where(table["b"] > 20.0, "high", "low").tolist()
    return pa.table(table)


def make_settings(case):
    settings = merged(QUICK, CASES[case])
    if case in ("mean", "carried"):
        settings = merged(settings, {"model": {"kind": "lstm"}})
    return settings
