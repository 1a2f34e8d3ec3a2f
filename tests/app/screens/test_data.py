"""What the data screen answers: tables, columns, plots of any part, series, bad files."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.app.conftest import Site, start_site

ROWS = 50_000
MARKUP = "<script>alert(1)</script>"


def ask(site: Site, what: str, **query: object):
    """Ask until the task is done."""
    path = f"/api/data/{what}?{urlencode(query)}"
    while (answer := site.get(path)).status == 202:
        assert 0 <= answer.json["progress"] <= 1
        time.sleep(0.02)
    return answer


def make_columns() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(ROWS).cumsum()
    values[1000:2000] = np.nan
    seconds = np.arange(ROWS)
    seconds[30_000:] += 5_000
    times = np.datetime64("2024-01-01", "us") + seconds.astype("timedelta64[s]")
    return {"time": times, "load": values, "twice": -2 * values, MARKUP: seconds % 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("data")
    columns = make_columns()
    pq.write_table(pa.table(columns), folder / "large.parquet", row_group_size=7_000)
    rows = [
        f"2024-01-01 {hour:02d}:00;{cell};{hour},5;{'' if hour == 3 else hour}"
        for cell in ("a", "b")
        for hour in range(20)
    ]
    (folder / "cells.csv").write_text("\n".join(["time;cell;u;i", *rows]) + "\n")
    turns = [
        f"{hour},{cell},{10 * hour + at}" for hour in range(30) for at, cell in enumerate("xy")
    ]
    (folder / "turns.csv").write_text("\n".join(["time,cell,u", *turns]) + "\n")
    (folder / "bad.csv").write_text("a,b\n1,2\n3,4,5\n")
    (folder / "latin.csv").write_bytes("größe,b\n1,2\n3,4\n".encode("cp1252"))
    (folder / "parts").mkdir()
    for name in ("one", "two"):
        lines = "\n".join(f"{row},{row * row}" for row in range(10))
        (folder / "parts" / f"{name}.csv").write_text(f"time,y\n{lines}\n")
    return folder


@pytest.fixture(scope="module")
def site(folder):
    site, stop = start_site(folder)
    yield site
    stop()


def open_file(site: Site, file: str, **query: object):
    answer = ask(site, "table", file=file, **query)
    assert answer.status == 200, answer.text
    return answer.json


def test_the_files_and_folders_are_listed_and_names_are_escaped(site):
    page = site.get("/data").text
    assert "large.parquet" in page
    assert '"parts"' in page
    (site.workspace.folder / f"{MARKUP.replace('/', '')}.csv").write_text("a\n1\n")
    assert "<script>alert" not in site.get("/data").text
    assert "<script>alert" not in site.get(f"/data?{urlencode({'file': MARKUP})}").text


def test_a_table_has_rows_columns_and_a_time(site):
    table = open_file(site, "large.parquet")
    assert table["rows"] == ROWS
    assert [one["type"] for one in table["columns"]] == ["time", "number", "number", "number"]
    assert table["columns"][3]["name"] == MARKUP
    assert table["time"]["columns"] == ["time"]


@pytest.mark.parametrize("begin", [0, 12_345, ROWS - 2, ROWS + 5])
def test_any_page_of_rows_is_shown_as_the_file_has_it(site, begin):
    open_file(site, "large.parquet")
    page = ask(site, "rows", file="large.parquet", begin=begin, count=3).json
    columns = make_columns()
    first = min(begin, ROWS - 1)
    assert page["begin"] == first
    assert [row[3] for row in page["rows"]] == [str(one) for one in columns[MARKUP][first:][:3]]
    open_file(site, "cells.csv")
    cells = ask(site, "rows", file="cells.csv", begin=3, count=1).json
    assert cells["rows"] == [["2024-01-01 03:00", "a", "3,5", ""]]


def test_a_column_tells_its_range_missing_values_and_histogram(site):
    open_file(site, "large.parquet")
    facts = ask(site, "column", file="large.parquet", column=1).json
    values = make_columns()["load"]
    assert facts["missing"] == 1000
    assert facts["low"] == np.nanmin(values)
    assert facts["high"] == np.nanmax(values)
    assert facts["mean"] == pytest.approx(np.nanmean(values))
    counts, _ = np.histogram(values[~np.isnan(values)], bins=len(facts["histogram"]))
    assert sum(facts["histogram"]) == counts.sum() == ROWS - 1000
    assert np.abs(counts - facts["histogram"]).max() <= 2  # values at the borders of bins


def test_a_column_of_text_tells_its_values(site):
    open_file(site, "cells.csv")
    facts = ask(site, "column", file="cells.csv", column=1).json
    assert facts["texts"] == [["a", 20], ["b", 20]]
    assert not facts["plot"]
    numbers = ask(site, "column", file="cells.csv", column=2).json
    assert (numbers["low"], numbers["high"]) == (0.5, 19.5)
    assert ask(site, "column", file="cells.csv", column=3).json["missing"] == 2


def test_the_time_tells_its_step_and_gaps(site):
    open_file(site, "large.parquet")
    time_facts = ask(site, "column", file="large.parquet", column="time").json
    assert time_facts["step"] == 1.0
    assert time_facts["gaps"] == 1
    (gap,) = time_facts["longest"]
    assert (gap["row"], gap["length"]) == (30_000, 5_001.0)
    assert time_facts["ordered"]


@pytest.mark.parametrize(
    ("begin", "end"), [(None, None), (0, 20_000), (123, 40_321), (40_000, 40_200), (49_999, 90_000)]
)
def test_a_plot_has_the_extremes_of_exactly_its_rows(site, begin, end):
    open_file(site, "large.parquet")
    bounds = {} if begin is None else {"begin": begin, "end": end}
    plot = ask(site, "plot", file="large.parquet", column=1, width=200, **bounds).json
    values = make_columns()["load"]
    first = 0 if begin is None else max(begin - 1, 0)
    part = values[first : ROWS if end is None else end + 1]
    low = [value for value in plot["low"] if value is not None]
    high = low if plot["high"] is None else [one for one in plot["high"] if one is not None]
    assert min(low) == np.nanmin(part)
    assert max(high) == np.nanmax(part)
    assert len(plot["x"]) <= 400
    assert plot["x"][0] == first
    assert plot["rows"] == len(part)
    if plot["high"] is None:
        assert np.array_equal(np.array(plot["low"], dtype=float), part, equal_nan=True)


def test_every_stretch_of_a_plot_has_the_extremes_of_its_rows(site):
    open_file(site, "large.parquet")
    plot = ask(site, "plot", file="large.parquet", column=1, width=150, begin=77, end=44_444).json
    values = make_columns()["load"]
    starts = [int(x) for x in plot["x"]]
    for at, (begin, end) in enumerate(zip(starts, [*starts[1:], 44_445], strict=True)):
        part = values[begin:end]
        expected = None if np.isnan(part).all() else np.nanmin(part)
        assert plot["low"][at] == expected


def test_a_plot_over_time_is_cut_at_gaps(site):
    open_file(site, "large.parquet")
    query = {"file": "large.parquet", "column": 2, "axis": "time", "width": 100}
    whole = ask(site, "plot", **query).json
    assert whole["last"] - whole["first"] == ROWS - 1 + 5_000
    gap = whole["first"] + 30_000
    part = ask(site, "plot", **query, begin=gap - 20, end=gap + 5_020).json
    assert part["low"].count(None) == 1
    assert part["rows"] == 42


def test_series_one_after_the_other_and_in_turns_are_told_apart(site):
    for file, first, second in (("cells.csv", 0.5, 0.5), ("turns.csv", 0, 1)):
        open_file(site, file)
        known = ask(site, "series", file=file).json
        assert known["by"] == ["cell"]
        assert known["mixed"] is (file == "turns.csv")
        query = {"file": file, "column": 2, "axis": "time"}
        plots = [ask(site, "plot", **query, series=number).json for number in range(2)]
        assert [plot["low"][0] for plot in plots] == [first, second]
        assert [plot["rows"] for plot in plots] == [one["rows"] for one in known["series"]]
        assert ask(site, "plot", **query, series=2).status == 400


def test_files_of_a_folder_are_series(site):
    assert open_file(site, "parts")["rows"] == 20
    known = ask(site, "series", file="parts").json
    assert [one["name"] for one in known["series"]] == ["one.csv", "two.csv"]
    plot = ask(site, "plot", file="parts", column=1, axis="time", series=1).json
    assert plot["low"] == [row * row for row in range(10)]


def test_correlations_are_those_of_rows_that_have_both(site):
    open_file(site, "large.parquet")
    answer = ask(site, "correlations", file="large.parquet").json
    columns = make_columns()
    known = ~np.isnan(columns["load"])
    expected = np.corrcoef(columns["load"][known], columns[MARKUP][known])[0, 1]
    assert answer["columns"] == [1, 2, 3]
    assert answer["values"][0][1] == pytest.approx(-1)
    assert answer["values"][0][2] == pytest.approx(expected, abs=1e-9)


def test_findings_are_those_of_the_command(site):
    open_file(site, "cells.csv")
    findings = ask(site, "findings", file="cells.csv").json
    assert findings["config"]["data"]["id"] == "cell"
    assert "[data]" in findings["toml"]


def test_a_bad_file_is_shown_with_the_message_of_the_command(site):
    answer = ask(site, "table", file="bad.csv")
    assert answer.status == 400
    assert answer.json["error"].startswith("bad.csv, line 3: has 3 cells where the header has 2")
    assert site.get("/data?file=bad.csv").status == 200
    (site.workspace.folder / "broken.parquet").write_bytes(b"PAR1 and no more")
    assert "cannot be read as Parquet" in ask(site, "table", file="broken.parquet").json["error"]
    assert open_file(site, "cells.csv")["rows"] == 40


def test_the_settings_of_reading_are_those_of_the_command(site):
    problem = ask(site, "table", file="latin.csv")
    assert "data.encoding" in problem.json["error"]
    table = open_file(site, "latin.csv", encoding="cp1252")
    assert table["columns"][0]["name"] == "größe"
    assert "data.encoding=cp1252" in site.get("/data?file=latin.csv&encoding=cp1252").text
    assert ask(site, "table", file="latin.csv", encoding="nonsense").status == 400


def test_a_file_that_changes_is_read_again(site):
    path = site.workspace.folder / "changing.csv"
    path.write_text("a,b\n1,2\n")
    assert open_file(site, "changing.csv")["rows"] == 1
    path.write_text("a,b\n1,2\n3,4\n")
    assert ask(site, "rows", file="changing.csv").status == 400
    assert open_file(site, "changing.csv")["rows"] == 2


@pytest.mark.parametrize(
    "file",
    ["", ".", "..", "../x.csv", "/etc/passwd", ".slipstream", "a\0b", "x" * 10_000, "no.csv"],
)
def test_nothing_outside_the_folder_is_read(site, file):
    assert ask(site, "table", file=file).status == 404


@pytest.mark.parametrize(
    "query",
    [
        {"column": 99},
        {"column": "x"},
        {"column": -1},
        {"column": 1, "begin": "nan"},
        {"column": 1, "begin": "x", "end": 1},
        {"column": 1, "axis": "<b>"},
        {"column": 1, "width": "9" * 100},
        {"column": 1, "series": "-1"},
    ],
)
def test_wrong_questions_are_answered_as_such(site, query):
    open_file(site, "cells.csv")
    answer = ask(site, "plot", file="cells.csv", **query)
    assert answer.status in (200, 400)
    assert answer.status == 400 or "width" in query
