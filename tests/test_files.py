"""Files as they come: the settings that read them are stored with the run and used again."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet
import pytest

import slipstream
from slipstream import UserError
from tests.conftest import small_config

BLOCK = "Sensor export\nPlant: Größe 7\n"


def write_export(path, rows, first=0):
    """A file as a logger writes it: a block, units, date and time apart, -200 for missing."""
    lines = [BLOCK + "Date;Time;gas;heat;;", ";;mg/m^3;°C;;"]
    for i in range(first, first + rows):
        gas = "-200" if i % 17 == 3 else f"{10 + 3 * np.sin(i / 5):.3f}".replace(".", ",")
        lines.append(f"{1 + i // 24:02}/01/2004;{i % 24:02}.00.00;{gas};{i % 24},5;;")
    path.write_bytes(("\n".join([*lines, ";;;;;", ""])).encode("cp1252"))


SETTINGS = {
    "time": ["Date", "Time"],
    "time_format": "%d/%m/%Y %H.%M.%S",
    "na": [-200],
    "encoding": "cp1252",
    "missing": "forward",
    "targets": ["gas"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    write_export(folder / "train.csv", 400)
    write_export(folder / "new.csv", 60, first=400)
    config = small_config(folder, data=SETTINGS | {"path": str(folder / "train.csv")})
    return folder, slipstream.train(config)


def test_an_export_is_used_as_it_is(run):
    _, result = run
    summary = json.loads((result.run / "metrics.json").read_text())
    data = summary["data"]
    assert data["time"] == "Date Time"
    assert data["step"] == 3600
    assert data["columns"]["gas"]["missing"] == 24
    assert data["columns"]["gas"]["unit"] == "mg/m^3"
    (file,) = data["files"]
    assert file["format"] == "CSV, semicolons, decimal comma, cp1252"
    assert (file["name"], file["rows"], file["columns"]) == ("train.csv", 400, 4)
    assert len(file["notes"]) == 4
    assert "errors in mg/m^3" in slipstream.report(result.run).read_text()
    start = json.loads((result.run / "events.jsonl").read_text().splitlines()[0])
    assert start["files"] == data["files"]


@pytest.mark.filterwarnings('ignore:"(new|train).csv"')
def test_new_files_are_read_by_the_settings_of_the_run(run):
    folder, result = run
    predicted = slipstream.predict(result.run, folder / "new.csv")
    assert str(predicted["time"][0]).startswith("2004-01-20 04:00")
    first = slipstream.predict(result.run, folder / "train.csv", every=True)
    stored = pyarrow.parquet.read_table(result.run / "predictions.parquet")
    keys = list(zip(*(stored[name].to_pylist() for name in ("time", "step")), strict=True))
    pairs = zip(*(first[name].to_pylist() for name in ("time", "step")), strict=True)
    by_key = dict(zip(pairs, first["gas_predicted"].to_pylist(), strict=True))
    wanted = [by_key[key] for key in keys]
    np.testing.assert_allclose(stored["gas_predicted"].to_numpy(), wanted, rtol=1e-6)
    scores = slipstream.evaluate(result.run, folder / "new.csv")
    assert scores["windows"] > 20


@pytest.mark.filterwarnings("ignore:.data.. repeated")
def test_a_table_in_memory_has_the_same_marks_and_times(run):
    _, result = run
    rows = {"Date": ["20/01/2004"] * 24, "Time": [f"{hour:02}.00.00" for hour in range(24)]}
    rows |= {"gas": [10.0] * 23 + [-200.0], "heat": [5.0] * 24}
    filled = rows | {"gas": [10.0] * 24}
    predicted = [slipstream.predict(result.run, table)["gas_predicted"] for table in (rows, filled)]
    assert predicted[0] == predicted[1]  # the last value is repeated
    with pytest.raises(UserError, match=r'has no column "Time" \(data.time\)'):
        slipstream.predict(result.run, {name: rows[name] for name in ("Date", "gas", "heat")})


def test_columns_named_like_reserved_words_are_columns(tmp_path):
    rows = "".join(f"{i},{i % 7},{i % 5}\n" for i in range(200))
    (tmp_path / "t.csv").write_text("time,file,series\n" + rows)
    config = small_config(
        tmp_path, data={"path": str(tmp_path / "t.csv"), "targets": ["file"]}, train={"epochs": 1}
    )
    result = slipstream.train(config)
    assert set(result.config.data.targets) == {"file"}
    summary = json.loads((result.run / "metrics.json").read_text())
    assert list(summary["data"]["columns"]) == ["series", "file"]
