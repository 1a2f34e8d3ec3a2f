"""A served model with a scale for each series answers as `predict` does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import slipstream
from tests.conftest import close, small_config, waves
from tests.server.servers import start_server


def make_table(names: str, rows: int) -> pa.Table:
    """Series of very different size."""
    parts = []
    for number, name in enumerate(names):
        part = waves(rows, columns=2, seed=number).to_pandas()
        part[["a", "b"]] *= 100.0**number
        part.insert(0, "id", name)
        parts.append(pa.Table.from_pandas(part, preserve_index=False))
    return pa.concat_tables(parts)


@pytest.mark.filterwarnings("ignore")
def test_tables_and_streams_are_scaled_by_series(tmp_path):
    data = {"id": "id", "context": 8, "scale_by": "series", "targets": ["a"]}
    config = small_config(tmp_path, data=data, train={"epochs": 1, "repeats": 2})
    run = slipstream.train(config, make_table("xyz", 90), quiet=True).run
    table = make_table("xnz", 24)  # "n" is new
    wanted = slipstream.predict(run, table, every=True)
    columns = [name for name in wanted.column_names if name.startswith("a_")]
    assert len(columns) > 1  # with intervals
    with start_server(run) as server:
        rows = table.to_pylist()
        answer = server.predict(rows, params={"every": "true"})
        assert answer.status_code == 200, answer.text
        predictions = answer.json()["predictions"]
        for column in columns:
            got = np.array([row[column] for row in predictions])
            close(got, np.array(wanted[column].to_pylist()))
        for name in "xnz":
            own = [row for row in rows if row["id"] == name]
            sent = [{key: row[key] for key in ("time", "a", "b")} for row in own]
            got = []
            for begin in (0, 5, 20):
                part = sent[begin : {0: 5, 5: 20, 20: 24}[begin]]
                answer = server.push(name, part, params={"every": "true"})
                assert answer.status_code == 200, answer.text
                got += answer.json()["predictions"]
            mask = np.array([series == name for series in wanted["series"].to_pylist()])
            for column in columns:
                expected = np.array(wanted[column].to_pylist())[mask]
                close(np.array([row[column] for row in got]), expected)
