"""Files without a config: what they hold, what is suspicious, and a config that trains."""

from __future__ import annotations

import gzip
import io
import json
import math
import zipfile
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import slipstream
from slipstream import UserError, runs
from slipstream import config as configs
from slipstream.base.phases import listen_to_progress
from slipstream.data.dataset import load_dataset
from slipstream.data.formats import csv
from slipstream.tools import inspection
from slipstream.tools.inspection import inspect_path, parse_options
from tests.conftest import waves
from tests.workbooks import write_workbook

ROWS = 400


def write_csv(path, columns, *, delimiter=","):
    lines = [delimiter.join(columns)]
    lines += [delimiter.join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def make_columns(rows=ROWS, **more):
    draw = np.random.default_rng(0)
    start = np.datetime64("2024-01-01T00:00")
    columns = {
        "date": [str(start + np.timedelta64(15 * i, "m")).replace("T", " ") for i in range(rows)],
        "voltage_V": draw.normal(size=rows).round(4).tolist(),
        "load": draw.normal(size=rows).round(4).tolist(),
    }
    return columns | more


def inspected(path):
    found = inspect_path(path)
    config = configs.load(found.proposal.config)
    return found, {one["name"]: one for one in found.to_dict()["columns"]}, config


def messages(found, column):
    return " | ".join(one.message for one in found.problems if one.column == column)


def test_a_table_of_loads_becomes_a_config_that_loads(tmp_path):
    path = write_csv(tmp_path / "load.csv", make_columns(site=["a"] * ROWS))
    found, columns, config = inspected(path)
    assert (columns["voltage_V"]["type"], columns["voltage_V"]["unit"]) == ("number", "V")
    assert columns["date"]["role"] == "time"
    assert (columns["date"]["first"], columns["date"]["step"]) == ("2024-01-01 00:00:00", 900.0)
    assert columns["site"]["constant"]
    assert len(columns["load"]["course"]) == 32
    assert (config.data.time, config.data.targets) == ("date", ("load",))
    assert load_dataset(config).num_windows["test"] > 0
    assert found.to_dict()["files"][0]["rows"] == ROWS


@pytest.mark.parametrize("large", [False, True])
def test_what_is_suspicious_is_named_with_the_setting(tmp_path, monkeypatch, large):
    if large:  # read block by block
        monkeypatch.setattr(csv, "LARGE_BYTES", 0)
    columns = make_columns()
    load = columns["load"]
    coded = [-200 if i % 40 == 3 else one for i, one in enumerate(load)]
    marked = ["bad" if i % 50 == 7 else one for i, one in enumerate(load)]
    columns |= {
        "row": range(ROWS),
        "coded": coded,
        "marked": marked,
        "gappy": ["" if i % 10 == 0 else one for i, one in enumerate(load)],
        "fixed": [3] * ROWS,
        "late": [0] * 350 + [1] * 50,
        "copy": load,
        "empty": [""] * ROWS,
        "place": ["north" if i % 3 else "south" for i in range(ROWS)],
    }
    found, facts, config = inspected(write_csv(tmp_path / "t.csv", columns))
    assert "counts the rows" in messages(found, "row")
    assert "2.5 % of the values are -200" in messages(found, "coded")
    assert '"bad"' in messages(found, "marked")
    assert "10 % of the values are missing" in messages(found, "gappy")
    assert "the same value in every row" in messages(found, "fixed")
    assert "the first 70 % of the rows" in messages(found, "late")
    assert 'the same values as "load"' in messages(found, "copy")
    assert messages(found, "empty") == "holds no value"
    assert "text, 2 different values" in messages(found, "place")
    assert config.data.na == (-200, "bad")
    assert config.data.inputs == ("voltage_V", "load", "coded", "marked", "gappy")
    assert config.data.missing == "forward"
    assert facts["gappy"]["missing"] == pytest.approx(0.1)
    assert load_dataset(config).num_windows["train"] > 0


def test_dates_and_times_of_day_in_two_columns(tmp_path):
    columns = make_columns()
    days, hours = zip(*(one.split() for one in columns.pop("date")), strict=True)
    german = [".".join(day.split("-")[::-1]) for day in days]
    columns = {"Date": german, "Time": [f"{hour}:00" for hour in hours]} | columns
    found, _, config = inspected(write_csv(tmp_path / "t.csv", columns, delimiter=";"))
    assert config.data.time == ("Date", "Time")
    assert config.data.time_format == "%d.%m.%Y %H:%M:%S"
    assert found.survey.order.step == 900
    assert load_dataset(config).signature.step == 900


def test_headers_units_and_decimal_commas_of_a_logger(tmp_path):
    rows = "".join(f"{i},0;{i % 7},5;{i % 11},25\n" for i in range(ROWS))
    path = tmp_path / "cell.csv"
    path.write_text(f"Logger 7\nSerial;42\n\nTime;Voltage;Current\ns;V;mA\n{rows}")
    found, columns, config = inspected(str(path))
    assert [columns[name]["unit"] for name in ("Voltage", "Current")] == ["V", "mA"]
    assert columns["Current"]["high"] == 10.25
    assert "above the names" in messages(found, None)
    assert config.data.time == "Time"
    assert load_dataset(config).num_windows["train"] > 0


def make_series(rows=120):
    """Series that two columns tell apart together, each with a clock of its own."""
    tables = []
    for cell in ("A", "B"):
        for test in ("drive", "rest"):
            table = waves(rows, seed=len(tables))
            table = table.append_column("cell", pa.array([cell] * rows))
            tables.append(table.append_column("test", pa.array([test] * rows)))
    return pa.concat_tables(tables)


def test_the_columns_that_tell_series_apart(tmp_path):
    pa.parquet.write_table(make_series(), tmp_path / "t.parquet")
    found, columns, config = inspected(str(tmp_path / "t.parquet"))
    assert config.data.ids == ("cell", "test")
    assert config.data.time == "time"
    assert columns["cell"]["role"] == "id"
    assert found.to_dict()["series"] == "4 series, by cell, test"
    assert len(load_dataset(config).index.series_names) == 4


def test_series_whose_rows_take_turns(tmp_path):
    table = make_series().sort_by([("time", "ascending")]).drop_columns(["test"])
    names = pa.array(["ABCD"[i % 4] for i in range(table.num_rows)])
    table = table.set_column(table.column_names.index("cell"), "cell", names)
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    _, _, config = inspected(str(tmp_path / "t.parquet"))
    assert config.data.id == "cell"
    assert len(load_dataset(config).index.series_names) == 4


@pytest.mark.parametrize("large_bytes", [csv.LARGE_BYTES, 0])
def test_a_file_without_names_is_trained_and_predicted(tmp_path, monkeypatch, large_bytes):
    """Packed, with spaces between its cells; of a large file, blocks are inspected."""
    monkeypatch.setattr(csv, "LARGE_BYTES", large_bytes)
    table = waves(200).drop(["time"])
    lines = [" ".join(f"{value:9.4f}" for value in row.values()) for row in table.to_pylist()]
    with gzip.open(tmp_path / "t.txt.gz", "wt") as file:
        file.write("\n".join(lines))
    found, columns, config = inspected(str(tmp_path / "t.txt.gz"))
    assert list(columns) == ["V1", "V2", "V3"]
    assert config.data.names == "none"
    assert 'names = "none"  # the first line has values' in found.proposal.to_toml()
    assert config.data.inputs == ("V1", "V2", "V3")
    small = {"data.context": 8, "data.horizon": 2, "train.epochs": 1, "out": str(tmp_path)}
    result = slipstream.train(found.proposal.config, overrides=small, quiet=True)
    new = tmp_path / "new.txt"
    new.write_text("\n".join(lines[:20]))
    assert slipstream.predict(result, new)["row"].to_pylist() == [20, 21]


@pytest.mark.parametrize("lengths", [(60, 90, 75), (75, 75, 75)])
def test_series_without_names_are_told_apart_by_a_counter(tmp_path, lengths):
    """Where all are as long, the columns may be days and hours."""
    draw = np.random.default_rng(0)
    rows = [
        f"{unit} {count} {draw.standard_normal():.4f} {length - count}.0"
        for unit, length in enumerate(lengths, start=1)
        for count in range(1, length + 1)
    ]
    (tmp_path / "t.txt").write_text("\n".join(rows))
    _, columns, config = inspected(str(tmp_path / "t.txt"))
    is_uneven = len(set(lengths)) > 1
    assert (config.data.id, config.data.time) == (("V1", "V2") if is_uneven else (None, None))
    assert columns["V1"]["role"] == ("id" if is_uneven else "input")
    assert load_dataset(config).num_windows["train"] > 0


def test_disorder_and_gaps_of_the_time(tmp_path):
    columns = make_columns()
    dates = columns["date"]
    columns["date"] = [*dates[:200], dates[50], *dates[201:]]
    found, _, config = inspected(write_csv(tmp_path / "t.csv", columns))
    assert "1 row with the time of another row (data.duplicates)" in messages(found, "date")
    assert (config.data.time, config.data.unsorted) == ("date", "sort")
    assert config.data.duplicates == "mean"
    assert load_dataset(config).num_windows["train"] > 0
    columns["date"] = [*dates[:200], *(one.replace("2024", "2025") for one in dates[200:])]
    found, _, config = inspected(write_csv(tmp_path / "u.csv", columns))
    assert messages(found, "date") == "1 gap: more than 1.5 times the usual step of 15 minutes"
    assert (config.data.time, config.data.gap_tolerance) == ("date", 0.5)


def test_a_folder_of_files_and_a_copy_among_them(tmp_path):
    for name in ("a.csv", "b.csv"):
        write_csv(tmp_path / name, make_columns())
    found, _, config = inspected(str(tmp_path))
    assert "b.csv: the same content as a.csv" in messages(found, None)
    assert found.to_dict()["series"] == "2 series, one per file"
    assert len(load_dataset(config).index.series_names) == 2


def test_a_workbook_of_several_sheets(tmp_path):
    rows = [["time", "current_A", "soc"], *([row, row % 13, row % 7] for row in range(200))]
    write_workbook(tmp_path / "cells.xlsx", {"cells": rows, "more": rows})
    _, columns, config = inspected(str(tmp_path / "cells.xlsx"))
    assert (config.data.sheet, config.data.targets) == ("*", ("soc",))
    assert columns["current_A"]["unit"] == "A"
    assert len(load_dataset(config).index.series_names) == 2


def test_memory_stays_small_while_a_large_file_is_read(tmp_path, monkeypatch):
    """Every batch is let go before the next one comes."""
    monkeypatch.setattr(csv, "LARGE_BYTES", 0)
    monkeypatch.setattr(csv, "STREAM_BYTES", 1 << 16)
    buffer = io.BytesIO()
    pa.csv.write_csv(waves(150_000), buffer)
    (tmp_path / "t.csv").write_bytes(buffer.getvalue())
    before, most = pa.total_allocated_bytes(), 0
    (table,) = inspection.open_tables(str(tmp_path / "t.csv"))
    count = 0
    for batch in table.batches:
        most, count = max(most, pa.total_allocated_bytes() - before), count + len(batch["a"])
    assert count == 150_000
    assert most < len(buffer.getvalue()) / 2


def test_how_files_are_read_can_be_set_and_stays_in_the_config(tmp_path):
    text = "Zeit;Größe °C\n" + "".join(f"{i};{i % 7},5\n" for i in range(ROWS))
    (tmp_path / "t.csv").write_bytes(text.encode("cp1252"))
    assert inspect_path(str(tmp_path / "t.csv")).proposal.data["encoding"] == "cp1252"
    with pytest.raises(UserError, match=r"data.encoding"):
        inspect_path(str(tmp_path / "t.csv"), ["data.encoding=utf-8"])
    found = inspect_path(str(tmp_path / "t.csv"), ["data.encoding=cp1252"])
    config = configs.load(found.proposal.config)
    assert (config.data.encoding, config.data.targets) == ("cp1252", ("Größe °C",))
    assert load_dataset(config).num_windows["train"] > 0
    with pytest.raises(UserError, match=r"train.lr does not change how files are read"):
        inspect_path(str(tmp_path / "t.csv"), ["train.lr=1"])


def test_what_cannot_be_read_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.csv: there is no such file"):
        inspect_path(str(tmp_path / "nowhere.csv"))
    (tmp_path / "t.csv").write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(UserError, match=r"t.csv, line 3: has 3 cells"):
        inspect_path(str(tmp_path / "t.csv"))


@pytest.mark.slow
def test_simulated_data_can_be_inspected():
    _, columns, config = inspected("simulated:cell")
    assert config.data.targets is not None
    assert all(columns[name]["role"] == "target" for name in config.data.targets)


@pytest.mark.parametrize("overrides", [(), ("data.encoding=cp1252", "data.decimal=.")])
def test_packed_text_is_read_in_batches_like_the_same_text(tmp_path, monkeypatch, overrides):
    """A small archive may hold a large table."""
    monkeypatch.setattr(csv, "LARGE_BYTES", 10_000)
    monkeypatch.setattr(csv, "STREAM_BYTES", 20_000)
    path = tmp_path / "load.csv"
    write_csv(path, make_columns(3000))
    with zipfile.ZipFile(tmp_path / "load.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "load.csv")
    with gzip.open(tmp_path / "load.csv.gz", "wb") as file:
        file.write(path.read_bytes())
    options, _ = parse_options(overrides)
    batches = []
    for name in ("load.csv", "load.zip", "load.csv.gz"):
        (table,) = inspection.open_tables(str(tmp_path / name), options)
        batches.append([batch["load"].to_pylist() for batch in table.batches])
    assert len(batches[0]) > 3
    assert batches[0] == batches[1] == batches[2]
    found = [
        inspect_path(str(tmp_path / name), overrides).to_dict() for name in ("load.csv", "load.zip")
    ]
    assert found[0]["columns"] == found[1]["columns"]


def test_errors_in_packed_text_name_the_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(csv, "LARGE_BYTES", 100)
    text = "a,b\n" + "1,2\n" * 100 + "3\n"
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("t.csv", text)
    with pytest.raises(UserError, match=r"^t.zip/t.csv, line 102: has 1 cell where the header"):
        inspect_path(str(tmp_path / "t.zip"))
    with gzip.open(tmp_path / "t.csv.gz", "wb") as file:
        file.write(b"a,b\n" + b"1,2\n" * 100 + b"3,\xe9\n")
    with pytest.raises(UserError, match=rf"^{tmp_path}/t.csv.gz, line 102: is not UTF-8"):
        inspect_path(str(tmp_path / "t.csv.gz"), ["data.encoding=utf-8"])


def test_the_decimal_mark_may_come_late_in_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(csv, "LARGE_BYTES", 10_000)
    monkeypatch.setattr(csv, "STREAM_BYTES", 20_000)
    rows = [f"{i};{i % 9}" for i in range(5000)] + [f"{i};{i % 9},5" for i in range(5000, 6000)]
    (tmp_path / "t.csv").write_text("t;a\n" + "\n".join(rows) + "\n")
    _, columns, _ = inspected(str(tmp_path / "t.csv"))
    assert (columns["a"]["type"], columns["a"]["high"]) == ("number", 8.5)


def test_a_number_with_another_decimal_mark_is_no_code_for_missing(tmp_path):
    rows = [f"{i}\t{i * 7 % 11}.25\t{'2,89' if i == 50 else 200 + i % 7}" for i in range(90)]
    (tmp_path / "t.tsv").write_text("t\ta\tb\n" + "\n".join(rows) + "\n")
    found, _, config = inspected(str(tmp_path / "t.tsv"))
    assert messages(found, "b") == (
        '1 cell is no number ("2,89"): write all numbers with one decimal mark and no separators '
        "between thousands"
    )
    assert config.data.na == ()
    assert config.data.inputs == ("a",)


def test_reading_many_files_is_reported_and_stays_in_order(tmp_path):
    for i in range(5):
        sheet = [["t", "V"], *([k, k / (i + 1)] for k in range(20 + i))]
        write_workbook(tmp_path / f"{i}.xlsx", {"Data": sheet})
        write_csv(tmp_path / f"{i}.csv", {"t": range(30 + i), "V": range(30 + i)})
    reports = []
    with listen_to_progress(lambda text, share: reports.append((text, share))):
        found = inspect_path(str(tmp_path))
    assert [(one.name, one.num_rows) for one in found.survey.files] == [
        (f"{i}.{kind}", rows + i) for i in range(5) for kind, rows in (("csv", 30), ("xlsx", 20))
    ]
    assert [text for text, _ in reports[:-1]] == [
        f"reading {one.name} ({i} of 10)" for i, one in enumerate(found.survey.files, start=1)
    ]
    shares = [share for _, share in reports[:-1]]
    assert shares == sorted(shares)
    assert reports[-1] == ("", None)


def test_a_proposal_with_an_infinite_tolerance_survives_json(tmp_path):
    days = [str(np.datetime64("2024-01-01") + i * 7 // 5) for i in range(ROWS)]  # without weekends
    found, _, config = inspected(write_csv(tmp_path / "w.csv", make_columns(date=days)))
    assert config.data.gap_tolerance == math.inf
    values = json.loads(runs.to_json(found.to_dict()))["config"]
    assert values["data"]["gap_tolerance"] == "inf"
    assert configs.load(configs.from_json_values(values)) == config
    assert configs.load(values) == config
    assert slipstream.inspect(str(tmp_path / "w.csv")).config["data"]["gap_tolerance"] == math.inf


def make_days(rows, days=20):
    """Columns whose days run backwards, the hours of each forwards."""
    columns = make_columns(rows)
    per_day = rows // days
    order = [day * per_day + i for day in reversed(range(days)) for i in range(per_day)]
    return {name: [values[i] for i in order] for name, values in columns.items()}, columns


@pytest.mark.parametrize(
    "form", ["%Y-%m-%d %H:%M", "%d.%m.%Y %H:%M", "%m/%d/%Y %I:%M %p", "%d/%m/%Y %H:%M"]
)
@pytest.mark.parametrize("order", ["days backwards", "descending", "shuffled"])
def test_an_unsorted_file_is_sorted_with_its_time_format(tmp_path, order, form):
    sorted_ = make_columns()
    columns, _ = make_days(ROWS)
    if order != "days backwards":
        places = list(range(ROWS))[::-1]
        if order == "shuffled":
            places = np.random.default_rng(1).permutation(ROWS).tolist()
        columns = {name: [values[i] for i in places] for name, values in sorted_.items()}
    for one in (columns, sorted_):
        moments = [datetime.fromisoformat(text) for text in one["date"]]
        one["date"] = [moment.strftime(form) for moment in moments]
    found, described, config = inspected(write_csv(tmp_path / "t.csv", columns))
    assert (config.data.time, config.data.unsorted) == ("date", "sort")
    assert config.data.time_format == (None if form.startswith("%Y") else form)
    assert (described["date"]["step"], described["date"]["gaps"]) == (900.0, 0)
    assert 'sort them by time (data.unsorted = "sort")' in messages(found, "date")
    path = write_csv(tmp_path / "sorted.csv", sorted_)
    data = {"time": "date", "time_format": config.data.time_format, "unsorted": "error"}
    other = configs.replace_settings(config, data=data | {"path": path})
    one, two = (load_dataset(each).compute_fingerprint() for each in (config, other))
    assert one == two


def test_a_time_in_numbers_may_run_backwards(tmp_path):
    columns = make_columns()
    del columns["date"]
    for name, numbers in {
        "seconds": range(ROWS, 0, -1),
        "time_s": np.random.default_rng(0).permutation(ROWS) / 10,
    }.items():
        _, _, config = inspected(write_csv(tmp_path / "t.csv", {name: list(numbers)} | columns))
        assert (config.data.time, config.data.unsorted) == (name, "sort")
    values = np.random.default_rng(0).normal(size=ROWS).tolist()
    _, _, config = inspected(write_csv(tmp_path / "t.csv", {"response_time": values} | columns))
    assert config.data.time is None
    assert "response_time" in config.data.inputs


def test_day_and_month_that_may_be_swapped_are_told(tmp_path):
    columns = make_columns(40)
    months = [f"01/{1 + i % 12:02d}/{2000 + i // 12}" for i in range(40)]
    found, _, config = inspected(write_csv(tmp_path / "t.csv", columns | {"date": months}))
    assert config.data.time_format == "%d/%m/%Y"
    assert '# time_format = "%m/%d/%Y"  # less likely: ' in found.to_dict()["toml"]
    days = [str(np.datetime64("2024-01-01") + i) for i in range(40)]
    days = [f"{day[5:7]}/{day[8:]}/{day[:4]}" for day in days]
    found, _, config = inspected(write_csv(tmp_path / "t.csv", columns | {"date": days}))
    assert config.data.time_format == "%m/%d/%Y"
    assert messages(found, "date") == ""


def test_a_time_with_cells_that_are_none_is_left_out_with_a_reason(tmp_path):
    columns = make_columns()
    columns["date"][300] = "unknown"
    found, _, config = inspected(write_csv(tmp_path / "t.csv", columns))
    assert config.data.time is None
    assert "1 cell cannot be read as a time, so that data.time is left out" in messages(
        found, "date"
    )
    assert '# time = "date"  # left out: 1 cell cannot be read' in found.to_dict()["toml"]
