"""Streams of the server that take raw rows and answer once per resampled row."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import slipstream
from tests.conftest import small_config
from tests.inference.resampled import make_rows, make_settings
from tests.server.servers import start_server

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    def train_case(case, **data):
        settings = make_settings(case)
        settings["data"] |= data
        config = small_config(tmp_path_factory.mktemp("runs"), **settings)
        return slipstream.train(config, make_rows(case)).run

    return train_case


def send(server, table, begin, end, **options):
    rows = {"columns": table.slice(begin, end - begin).to_pydict()}
    answer = server.push("s", rows, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("case", ["mean", "steps", "classes", "quantiles"])
def test_a_stream_answers_once_per_new_row_and_goes_on_after_a_restart(case, train, tmp_path):
    # a table knows the times of rows after a gap, a stream that forecasts does not
    run, table = train(case), make_rows(case, 600, seed=3, rough=case != "quantiles")
    wanted = slipstream.predict(run, table, every=True).to_pylist()
    state = ("--state", str(tmp_path / "streams.zip"))
    cuts = [0, 3, 4, 57, 199, 300, 301, 443, 600]
    answered = []
    with start_server(run, *state) as server:
        for begin, end in pairwise(cuts[:5]):
            answered.append(send(server, table, begin, end, params={"every": "true"}))
        server.stop()
    with start_server(run, *state) as server:
        for begin, end in pairwise(cuts[4:]):
            answered.append(send(server, table, begin, end, params={"every": "true"}))
        refused = server.push("s", {"columns": table.slice(500, 5).to_pydict()})
        assert refused.status_code == 409
        assert "earlier than the last row of the stream" in refused.json()["error"]
    got = [row for answer in answered for row in answer["predictions"]]
    assert answered[-1]["rows"] == 600
    assert len(got) == len(wanted)
    for left, right in zip(got, wanted, strict=True):
        assert left["row"] == right["row"]
        assert left["time"] == pytest.approx(right["time"])
        for name in set(left) - {"series", "row", "time", "step"}:
            if isinstance(left[name], float):
                assert left[name] == pytest.approx(right[name], rel=1e-5, abs=1e-5)
            else:
                assert left[name] == right[name]


def test_a_forecast_is_that_of_the_newest_complete_row(train):
    run, table = train("forecast"), make_rows("forecast", 600, seed=3, rough=False)
    with start_server(run) as server:
        first = send(server, table, 0, 205)
        again = send(server, table, 205, 207)
        later = send(server, table, 207, 230)
    assert [row["step"] for row in first["predictions"]] == [1, 2, 3]
    assert again["predictions"] == []  # no row is complete
    assert later["predictions"][0]["time"] > first["predictions"][0]["time"]
    wanted = slipstream.predict(run, table.slice(0, 230)).to_pylist()
    for left, right in zip(later["predictions"], wanted, strict=True):
        assert left["time"] == pytest.approx(right["time"])
        assert left["a_predicted"] == pytest.approx(right["a_predicted"], rel=1e-5)


def test_rows_of_one_time_are_merged_over_requests(train):
    run = train("mean", duplicates="mean", prepare=[])
    times = np.repeat(np.arange(40), 2) * 0.1
    table = make_rows("mean", 80, seed=1, rough=False).set_column(0, "time", [times])
    wanted = slipstream.predict(run, table, every=True).to_pylist()
    found = {}
    with start_server(run) as server:
        for begin, end in [(0, 31), (31, 33), (33, 80)]:
            answer = send(server, table, begin, end)
            found |= {row["row"]: row for row in answer["predictions"]}
    assert list(found) == [row["row"] for row in wanted]
    for row in wanted:
        assert found[row["row"]]["time"] == row["time"]
        assert found[row["row"]]["a_predicted"] == pytest.approx(row["a_predicted"], rel=1e-5)
