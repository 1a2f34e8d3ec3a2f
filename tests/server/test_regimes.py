"""Streams beyond plain windows over HTTP: filters, steps of `data.prepare`, carried state."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import slipstream
from tests.conftest import close, mostly_slow, small_config, waves
from tests.server.servers import Server, start_server

STEPS = [
    {"step": "filter", "kind": "ema", "columns": ["b"], "rows": 4, "into": "slow"},
    {"step": "formula", "name": "change", "value": "b - lag(b, 2)"},
]
ESTIMATE = {"targets": ["c"], "inputs": ["a", "b"], "horizon": 0}
PREPARED = {"targets": ["c"], "inputs": ["a", "slow", "change"], "horizon": 0, "prepare": STEPS}
SMOOTH = {"filter": {"kind": "moving_average", "rows": 4}}
CASES: dict[str, Any] = {
    "filtered": {"data": ESTIMATE, "predict": SMOOTH},
    "forecast": {"data": {"targets": ["a"]}, "predict": SMOOTH, "train": {"repeats": 2}},
    "prepared": {"data": PREPARED, "predict": SMOOTH},
    "carried": {"data": ESTIMATE},
}


@pytest.fixture(scope="module", params=mostly_slow(CASES, "forecast"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The name of a case, its run and a server of it."""
    folder = tmp_path_factory.mktemp(request.param)
    config = small_config(folder, **CASES[request.param])
    run = slipstream.train(config, waves(400), quiet=True).run
    options = ("--carried",) if request.param == "carried" else ()
    with start_server(run, *options) as server:
        yield request.param, run, server


def make_table() -> pa.Table:
    """Rows with a gap after the 25th."""
    time = np.concatenate([np.arange(25), np.arange(30, 65)])
    return waves(60, seed=7).set_column(0, "time", pa.array(time))


def predict_alone(name: str, run: Path, table: pa.Table) -> dict[str, list[Any]]:
    """What the rows give without a server."""
    if name != "carried":
        return slipstream.predict(run, table, every=True).to_pydict()
    stream = slipstream.Stream(run, regime="carried", gaps="reset")
    every = [stream.push(row) for row in table.to_pylist()]
    return {"c_predicted": [one.value for one in every], "row": list(range(60))}


def push_parts(server: Server, name: str, table: pa.Table, parts: tuple[int, ...]):
    """Send a table in parts and return all predictions."""
    edges = (0, *parts, table.num_rows)
    every = []
    for begin, end in itertools.pairwise(edges):
        rows = table.slice(begin, end - begin).to_pylist()
        answer = server.push(name, rows, params={"every": "true", "row": begin})
        assert answer.status_code == 200, answer.text
        every += answer.json()["predictions"]
    return every


@pytest.mark.filterwarnings("ignore")
def test_a_stream_gives_what_the_whole_series_gives(case):
    name, run, server = case
    table = make_table()
    expected = predict_alone(name, run, table)
    numbers = [key for key, values in expected.items() if key.endswith(("predicted", "80", "95"))]
    for number, parts in enumerate([(), (1, 2, 20, 24, 25, 26, 40, 59), (30,)]):
        every = push_parts(server, f"parts-{number}", table, parts)
        for key in numbers:
            close([row[key] for row in every], expected[key])
        if name in ("filtered", "forecast"):  # steps may leave out rows, which a stream counts
            assert [row["row"] for row in every] == expected["row"]
        if name in ("filtered", "prepared"):  # a stream does not know when later rows will come
            assert [row["time"] for row in every] == expected["time"]


@pytest.mark.filterwarnings("ignore")
def test_a_table_gives_what_predict_gives(case):
    _, run, server = case
    table = make_table()
    expected = slipstream.predict(run, table).to_pydict()
    answer = server.predict({"columns": table.to_pydict()}).json()["predictions"]
    for key, values in expected.items():
        if isinstance(values[0], float):
            close([row[key] for row in answer], values)


def test_a_bad_row_leaves_the_stream_as_it_was(case):
    _, _, server = case
    rows = waves(40, seed=8).to_pylist()
    server.push("refusing", rows[:30])
    for wrong, status in (([rows[29]], 409), ([rows[30], {"time": 31}], 422)):
        answer = server.push("refusing", wrong)
        assert answer.status_code == status, answer.text
    after = server.push("refusing", rows[30:], params={"row": 30}).json()["predictions"]
    server.push("accepting", rows[:30])
    assert server.push("accepting", rows[30:]).json()["predictions"] == [
        {**row, "series": "accepting"} for row in after
    ]
