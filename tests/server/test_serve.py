"""The server over HTTP: it answers as `slipstream predict` does."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

import slipstream
from tests.conftest import close, slow, small_config, waves
from tests.server.servers import ARROW, JSON, Server, post_all, start_server, to_csv, to_ipc

CONTEXT = 16


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    estimate = {"targets": ["c"], "inputs": ["a", "b"], "horizon": 0}
    configs = {
        "estimate": small_config(folder, data=estimate, train={"repeats": 2}),
        "forecast": small_config(folder, data={"targets": ["a"]}),
    }
    table = waves(400)
    return {
        name: slipstream.train(config, table, quiet=True).run for name, config in configs.items()
    }


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[Server]:
    with start_server(runs["estimate"]) as started:
        yield started


@pytest.fixture(scope="module")
def forecaster(runs: dict[str, Path]) -> Iterator[Server]:
    with start_server(runs["forecast"]) as started:
        yield started


def assert_equal(answer: list[dict[str, Any]], table: pa.Table) -> None:
    """Compare rows with a table of predictions: numbers to what float32 holds."""
    assert [list(row) for row in answer] == [table.column_names] * table.num_rows
    for name in table.column_names:
        values = [row[name] for row in answer]
        if pa.types.is_floating(table.schema.field(name).type):
            close(values, table[name].to_pylist())
        elif name != "series":
            assert values == table[name].to_pylist()


@pytest.mark.parametrize("shape", ["columns", "rows", "list"])
def test_json_is_answered_as_predict_does(runs, server, shape):
    table = waves(40, seed=3)
    body = {"columns": {"columns": table.to_pydict()}, "rows": {"rows": table.to_pylist()}}
    answer = server.predict(body.get(shape, table.to_pylist()))
    assert answer.status_code == 200
    content = answer.json()
    assert content["notes"] == []
    expected = slipstream.predict(runs["estimate"], table)
    assert content["model"] == expected.schema.metadata[b"model"].decode()
    assert_equal(content["predictions"], expected)


@pytest.mark.parametrize("accept", ["text/csv", ARROW, "application/json;q=0.5, text/csv"])
@pytest.mark.parametrize("kind", ["text/csv", ARROW, "application/vnd.apache.arrow.file"])
def test_csv_and_arrow_are_answered_as_predict_does(runs, server, kind, accept):
    table = waves(40, seed=3)
    body = to_csv(table) if kind == "text/csv" else to_ipc(table, compression="zstd")
    if kind.endswith("file"):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        body = sink.getvalue().to_pybytes()
    headers = {"Content-Type": kind, "Accept": accept}
    answer = server.client.post("/predict", content=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/csv" if "csv" in accept else ARROW)
    if "csv" in accept:
        read = pyarrow.csv.read_csv(io.BytesIO(answer.content))
    else:
        read = pa.ipc.open_stream(answer.content).read_all()
    assert_equal(read.to_pylist(), slipstream.predict(runs["estimate"], table))


@pytest.mark.parametrize("every", [False, True])
def test_a_forecast_is_answered_as_predict_does(runs, forecaster, every):
    table = waves(30, seed=4)
    body, options = {"columns": table.to_pydict()}, {"every": str(every).lower()}
    answer = forecaster.predict(body, params=options)
    expected = slipstream.predict(runs["forecast"], table, every=every)
    assert_equal(answer.json()["predictions"], expected)


def test_a_request_gets_the_message_of_predict(runs, server):
    wrong = {
        "columns": waves(40).drop_columns(["b"]),
        "order": waves(40).take(list(range(39, -1, -1))),
        "missing": waves(40).set_column(1, "a", pa.array([None, *range(39)], pa.float64())),
        "step": waves(40).set_column(0, "time", pa.array(np.arange(40) * 7)),
        "short": waves(5),
        "text": waves(40).set_column(1, "a", pa.array(["x"] * 40)),
    }
    for table in wrong.values():
        with pytest.raises(slipstream.UserError) as error:
            slipstream.predict(runs["estimate"], table)
        answer = server.predict({"columns": table.to_pydict()})
        assert answer.status_code == 422
        assert answer.json()["error"].partition(";")[0] == str(error.value).partition(";")[0]


def test_notes_say_what_is_suspicious(server):
    table = waves(40).set_column(1, "a", pa.array(np.linspace(900, 950, 40)))
    notes = server.predict({"columns": table.to_pydict()}).json()["notes"]
    assert "far outside of what training saw" in notes[0]


def test_a_stream_gives_what_predict_gives_for_all_of_its_rows(runs, server):
    table = waves(40, seed=5)
    rows, predictions = table.to_pylist(), []
    for begin, end in ((0, 5), (5, 6), (6, 25), (25, 26), (26, 40)):
        answer = server.push("whole", rows[begin:end])
        assert answer.status_code == 200
        content = answer.json()
        assert content["rows"] == end
        assert content["missing_rows"] == max(CONTEXT - 1 - end, 0)
        predictions += content["predictions"]
    assert_equal(predictions, slipstream.predict(runs["estimate"], table))
    shown = server.client.get("/streams/whole").json()
    assert shown == {"stream": "whole", "rows": 40, "missing_rows": 0}


def test_a_stream_forecasts_from_its_last_row(runs, forecaster):
    table = waves(30, seed=6)
    forecaster.push("last", table.slice(0, 20).to_pylist())
    answer = forecaster.push("last", table.slice(20).to_pylist()).json()
    assert_equal(answer["predictions"], slipstream.predict(runs["forecast"], table))
    more = forecaster.push("every", table.to_pylist(), params={"every": "true"}).json()
    assert_equal(more["predictions"], slipstream.predict(runs["forecast"], table, every=True))


def test_a_gap_makes_a_stream_begin_anew(runs, server):
    time = np.concatenate([np.arange(20), np.arange(25, 45)])
    table = waves(40, seed=7).set_column(0, "time", pa.array(time))
    predictions, notes = [], []
    for begin in range(0, 40, 4):
        content = server.push("gap", table.slice(begin, 4).to_pylist()).json()
        predictions += content["predictions"]
        notes += content["notes"]
    assert_equal(predictions, slipstream.predict(runs["estimate"], table))
    assert re.match("row 20: its step in time is not the 1 ", notes[0])
    assert len(notes) == 1


def test_rows_that_a_stream_refuses_leave_it_as_it_was(server):
    rows = waves(24, seed=8).to_pylist()
    server.push("refusing", rows[:20])
    refused = {
        409: [[rows[19]], [rows[20], rows[20]], [rows[21], rows[20]]],
        422: [[{**rows[20], "a": None}], [{"time": 20, "a": 1.0}], [{**rows[20], "a": 1e300}]],
        400: ['[{"a": NaN}]', "{"],
    }
    for status, bodies in refused.items():
        for body in bodies:
            content = body if isinstance(body, str) else json.dumps(body)
            answer = server.client.post("/streams/refusing", content=content, headers=JSON)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]
    answer = server.push("refusing", rows[20:], params={"row": 20})
    alone = server.push("accepting", rows)
    assert answer.json()["predictions"] == [
        {**row, "series": "refusing"} for row in alone.json()["predictions"][-4:]
    ]


def test_rows_are_refused_where_the_stream_has_another_number_of_them(server):
    rows = waves(4).to_pylist()
    assert server.push("counted", rows[:3], params={"row": 0}).status_code == 200
    again = server.push("counted", rows[:3], params={"row": 0})
    assert again.status_code == 409
    assert again.json()["rows"] == 3
    assert server.push("unknown", rows, params={"row": 9}).status_code == 409
    assert server.client.get("/streams/unknown").status_code == 404


def test_a_stream_can_be_removed(server):
    server.push("removed", waves(3).to_pylist())
    assert server.client.delete("/streams/removed").status_code == 204
    for method in ("GET", "DELETE"):
        answer = server.client.request(method, "/streams/removed")
        assert answer.status_code == 404
        assert 'no stream "removed"' in answer.json()["error"]


@pytest.mark.parametrize("count", [100, slow(1000)])
def test_interleaved_streams_give_exactly_what_they_give_alone(server, count):
    tables = [waves(CONTEXT + 1, seed=seed).to_pylist() for seed in range(8)]
    url, streams = str(server.client.base_url), range(count)
    for part in (slice(0, -1), slice(-1, None)):
        requests = [(f"/streams/of-{count}-{i}", tables[i % 8][part]) for i in streams]
        together = [one["predictions"] for one in asyncio.run(post_all(url, requests))]
        for i, rows in enumerate(tables):
            (alone,) = server.push(f"alone-{count}-{i}", rows[part]).json()["predictions"]
            value = alone["c_predicted"]
            assert all(one["c_predicted"] == value for (one,) in together[i::8])
    metrics = server.client.get("/metrics").text
    numbers = {
        name: int(re.search(rf"^slipstream_{name} (\d+)", metrics, re.MULTILINE)[1])
        for name in ("batch_windows_count", "windows_total", "streams")
    }
    assert numbers["batch_windows_count"] < numbers["windows_total"]
    assert numbers["streams"] >= count


def test_there_is_no_torch_in_the_process(server):
    libraries = Path(f"/proc/{server.process.pid}/maps")
    if not libraries.exists():
        pytest.skip("this system does not list the libraries of a process")
    assert "torch" not in libraries.read_text()


def test_health_metrics_and_schema_describe_the_server(server):
    assert server.client.get("/health").json()["status"] == "ok"
    metrics = server.client.get("/metrics")
    assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in metrics.text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'slipstream_\w+(\{.*"\})? [0-9.e+-]+', line) for line in lines)
    schema = server.client.get("/schema").json()
    assert schema["openapi"] == "3.1.0"
    table = schema["components"]["schemas"]["Table"]["oneOf"][2]["items"]
    assert set(table["required"]) == {"time", "a", "b"}
    assert {"/predict", "/streams/{id}"} < set(schema["paths"])
