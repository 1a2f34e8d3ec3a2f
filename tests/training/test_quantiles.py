"""Quantiles: in order wherever they leave the product, with a point prediction between them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import slipstream
from slipstream import Stream
from slipstream.cli.commands import app
from slipstream.inference.portable import load_portable
from slipstream.reporting.wording import describe_quantiles
from slipstream.server.api import build_app
from tests.conftest import merged, small_config, waves
from tests.exporting.carried_runs import ESTIMATE, train_carried

LEVELS = [0.1, 0.25, 0.75, 0.9]
NAMES = ["a_q10", "a_q25", "a_q75", "a_q90"]
UNTRAINED = {
    "train": {"loss": "quantile", "quantiles": LEVELS, "epochs": 1, "lr": 1e-9, "lr_min": 0},
    "data": {"targets": ["a"], "context": 8},
}
"""The quantiles of random weights cross wherever they can"""
CASES: dict[str, dict[str, Any]] = {
    "single": {},
    "repeats": {"train": {"repeats": 2}},
    "folds": {"data": {"split": {"walk_forward": 2}}, "model": {"kind": "linear"}},
    "filtered": {"predict": {"filter": {"kind": "butterworth", "rows": 5}}},
    "channels": {"data": {"channels": "independent", "targets": ["a", "b"]}},
    "estimate": {"data": {"horizon": 0, "inputs": ["b", "c"]}, "model": {"kind": "gru"}},
}


@pytest.fixture(scope="module", params=CASES)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantiles")
    pq.write_table(waves(700), folder / "rows.parquet")
    sections = merged(
        merged(UNTRAINED, CASES[request.param]), {"data": {"path": str(folder / "rows.parquet")}}
    )
    return slipstream.train(small_config(folder, **sections), quiet=True)


def check_order(table: pa.Table) -> None:
    values = np.stack([np.asarray(table[name], dtype=float) for name in NAMES])
    assert (np.diff(values, axis=0) >= 0).all()
    point = np.asarray(table["a_predicted"], dtype=float)
    np.testing.assert_allclose(point, values[1:3].mean(axis=0), rtol=1e-6)


def test_the_networks_own_quantiles_cross(run):
    """Else the other tests would test nothing."""
    model, signature = slipstream.load(run.run), load_portable(run.run).signature
    rows = torch.randn(signature.context, 50, signature.model_inputs)
    with torch.inference_mode():
        raw = model.module(rows, None)
    assert bool((raw.diff(dim=-1) < 0).any())


def test_predictions_are_in_order_with_the_mean_of_the_middle_two(run):
    check_order(pq.read_table(run.run / "predictions.parquet"))
    check_order(slipstream.predict(run, waves(60), every=True))


@pytest.mark.parametrize("regime", ["window", "carried"])
def test_streams_are_in_order(run, regime):
    config = run.config
    if regime == "carried" and config.model.kind == "linear":
        pytest.skip("a linear model has no state")
    stream = Stream(run.run, regime=regime)
    every = [stream.push(row) for row in waves(40).to_pylist()]
    rows = [one.to_dict() for one in every if one is not None]
    check_order(pa.table({name: np.concatenate([row[name] for row in rows]) for name in rows[0]}))


def test_a_server_answers_in_order(run):
    rows = waves(40).to_pydict()

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(run.run))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/predict", json={"columns": rows})

    answer = asyncio.run(ask())
    assert answer.status_code == 200, answer.text
    check_order(pa.Table.from_pylist(answer.json()["predictions"]))


def test_a_carried_run_is_in_order(tmp_path):
    settings = {"loss": "quantile", "quantiles": LEVELS, "epochs": 1, "lr": 1e-9, "lr_min": 0}
    run = train_carried(tmp_path, **merged(ESTIMATE, {"train": settings}))
    table = pq.read_table(tmp_path / "two.parquet")
    names = [f"c{name[1:]}" for name in NAMES]
    predicted = slipstream.predict(run, table)
    values = np.stack([np.asarray(predicted[name]) for name in names])
    assert (np.diff(values, axis=0) >= 0).all()


def test_an_ensemble_is_in_order(tmp_path):
    pq.write_table(waves(400), tmp_path / "rows.parquet")
    runs = [
        slipstream.train(
            small_config(
                tmp_path / "runs",
                **merged(
                    UNTRAINED, {"seed": seed, "data": {"path": str(tmp_path / "rows.parquet")}}
                ),
            ),
            quiet=True,
        )
        for seed in (0, 1)
    ]
    joined = slipstream.ensemble(runs, out=tmp_path / "joined", quiet=True)
    check_order(pq.read_table(joined.run / "predictions.parquet"))
    check_order(slipstream.predict(joined, waves(60), every=True))
    assert {"pinball", "crps", "coverage", "width"} <= set(joined.summary["metrics"]["test"])


def test_a_run_states_its_pinball_loss_coverage_and_point(run, capsys):
    table = pq.read_table(run.run / "predictions.parquet")
    summary = run.summary
    used = summary["ensemble"] if summary.get("uses") == "ensemble" else summary
    single = summary["metrics"]["test"]
    truth = np.asarray(table["a"])
    quantiles = np.stack([np.asarray(table[name]) for name in NAMES], axis=1)
    if run.config.data.channels != "independent":
        inside = (quantiles[:, 0] <= truth) & (truth <= quantiles[:, -1])
        assert single["coverage"] == pytest.approx(inside.mean(), abs=1e-3)
        error = truth[:, None] - quantiles
        pinball = np.maximum(np.array(LEVELS) * error, (np.array(LEVELS) - 1) * error).mean()
        assert single["pinball"] == pytest.approx(pinball, rel=1e-5)
        assert single["crps"] == pytest.approx(2 * pinball / np.abs(truth).mean(), rel=1e-4)
        width = (quantiles[:, -1] - quantiles[:, 0]).mean()
        assert single["width"] == pytest.approx(width, rel=1e-4)
    assert "pinball" in summary["baselines"]["ridge"]["metrics"]["test"]
    assert summary["quantiles"] == LEVELS
    line = describe_quantiles(summary)
    assert (
        f"{100 * used['metrics']['test']['coverage']:.1f} % of the true values lie between" in line
    )
    assert line.endswith("those of 0.1 and 0.9, which should hold 80 %")
    assert line in Path(slipstream.report(run.run)).read_text(encoding="utf-8")
    (note,) = (note for note in summary["notes"] if note.startswith("train.quantiles"))
    assert note.endswith("is the mean of those of 0.25 and 0.75")
    with pytest.raises(SystemExit) as end:
        app(["evaluate", str(run.run)])
    assert end.value.code in (0, None)
    assert "quantiles: pinball loss" in capsys.readouterr().out
