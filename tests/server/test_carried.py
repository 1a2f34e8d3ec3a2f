"""A server of a run with `train.state = "carried"`: streams and tables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import slipstream
from slipstream.server.api import build_app
from tests.conftest import close
from tests.exporting.carried_runs import ESTIMATE, train_carried

FORECAST = {"future": ["a"], "static": ["k"], "targets": ["c"]}
CASES: dict[str, Any] = {
    "estimate": {**ESTIMATE, "predict": {"filter": {"kind": "moving_average", "rows": 4}}},
    "forecast": {"data": FORECAST, "train": {"repeats": 2}},
    "channels": {"data": {"channels": "independent"}},
    "quantiles": {**ESTIMATE, "train": {"loss": "quantile", "quantiles": [0.1, 0.5, 0.9]}},
}


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_carried(tmp_path_factory.mktemp(request.param), **CASES[request.param])


def ask(run: Path, requests: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    """What a client gets from the application of a run."""

    async def connect() -> Any:
        transport = httpx.ASGITransport(app=build_app(run))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await requests(client)

    return asyncio.run(connect())


def read_table(run: Path) -> pa.Table:
    """Two series, of which the second has a gap."""
    return pq.read_table(run.parent.parent / "two.parquet")


@pytest.mark.filterwarnings("ignore:left out windows")
@pytest.mark.parametrize("every", [False, True])
def test_a_table_gives_what_predict_gives(run, every):
    table = read_table(run)
    every = every or run.parent.parent.name.startswith("forecast")  # nothing is known past the end
    expected = slipstream.predict(run, table, every=every)

    async def predict(client: httpx.AsyncClient) -> httpx.Response:
        options = {"every": str(every).lower()}
        return await client.post("/predict", json={"columns": table.to_pydict()}, params=options)

    answer = ask(run, predict)
    assert answer.status_code == 200, answer.text
    rows = answer.json()["predictions"]
    assert [row["row"] for row in rows] == expected["row"].to_pylist()
    for name in expected.column_names:
        if pa.types.is_floating(expected.schema.field(name).type):
            close([row[name] for row in rows], expected[name].to_pylist())


def test_a_stream_gives_what_predict_gives(tmp_path):
    run = train_carried(tmp_path, **ESTIMATE)
    table = read_table(run).slice(0, 160)
    rows = table.drop_columns("id").to_pylist()
    answer = ask(run, lambda client: client.post("/streams/one", json=rows))
    assert answer.status_code == 200, answer.text
    values = [row["c_predicted"] for row in answer.json()["predictions"]]
    expected = slipstream.predict(run, table)["c_predicted"].to_pylist()
    close(values[-len(expected) :], expected)


AHEAD = {"prepare": [{"step": "formula", "name": "known", "value": "2 * a"}], "future": ["known"]}


@pytest.mark.parametrize("data", [FORECAST, {"targets": ["c"], **AHEAD}])
@pytest.mark.parametrize("state", ["windows", "carried"])
def test_a_stream_that_knows_nothing_ahead_is_refused_in_words_of_http(tmp_path, data, state):
    run = train_carried(tmp_path, data=data, train={"state": state})
    rows = read_table(run).slice(0, 40).drop_columns("id").to_pylist()
    answer = ask(run, lambda client: client.post("/streams/one", json=rows))
    assert answer.status_code == 422
    said = answer.json()["error"]
    assert "data.future" in said
    assert "send tables that end with the rows to predict to /predict" in said
    assert "future=" not in said
