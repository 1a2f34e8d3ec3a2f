"""A server of a run with `train.state = "carried"`: streams, and no tables."""

from __future__ import annotations

import asyncio

import httpx
import pyarrow.parquet as pq

import slipstream
from slipstream.serving.api import build_app
from tests.conftest import close
from tests.exporting.carried_runs import ESTIMATE, train_carried


def test_streams_give_what_predict_gives_and_tables_are_refused(tmp_path):
    run = train_carried(tmp_path, **ESTIMATE)
    table = pq.read_table(tmp_path / "two.parquet").slice(0, 160)
    rows = table.drop_columns("id").to_pylist()

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(app=build_app(run))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            pushed = await client.post("/streams/one", json=rows)
            return pushed, await client.post("/predict", json=table.to_pylist())

    pushed, refused = asyncio.run(ask())
    assert pushed.status_code == 200, pushed.text
    values = [row["c_predicted"] for row in pushed.json()["predictions"]]
    expected = slipstream.predict(run, table)["c_predicted"].to_pylist()
    close(values[-len(expected) :], expected)
    assert refused.status_code == 422
    assert "/streams/{id}" in refused.text
