"""Files as they come: the settings that read them are stored with the run and used again."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import scipy.io
import torch

import slipstream
from slipstream import UserError
from slipstream.data.dataset import load_dataset
from tests.conftest import small_config
from tests.workbooks import write_workbook

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


def write_recording(folder):
    """One recording as a lab saves it: version 5 and 7.3 of MATLAB, a workbook and a CSV file."""
    import matio

    draw = np.random.default_rng(0)
    meas = {
        "time": np.arange(300) * 0.1,
        "voltage": 3.7 + np.cumsum(draw.standard_normal(300)) / 97,
        "current": draw.standard_normal(300) / 3,
        "soc": np.linspace(100, 20, 300) + draw.standard_normal(300) / 7,
    }
    tall = {name: values[:, None] for name, values in meas.items()}
    flat = {name: values[None, :] for name, values in meas.items()}
    scipy.io.savemat(folder / "v5.mat", {"meas": tall | {"Fs": 10.0}, "info": "cell 7"})
    matio.save_to_mat(str(folder / "v73.mat"), {"meas": flat | {"Fs": 10.0}}, version="v7.3")
    rows = [list(map(float, row)) for row in zip(*meas.values(), strict=True)]
    title, units = ["Cell 7"], ["s", "V", "A", "%"]
    write_workbook(folder / "t.xlsx", {"Data": [title, list(meas), units, *rows], "Notes": []})
    lines = [",".join(map(repr, row)) for row in rows]
    (folder / "t.csv").write_text("\n".join([",".join(meas), ",".join(units), *lines, ""]))
    return ["v5.mat", "v73.mat", "t.xlsx", "t.csv"]


@pytest.mark.filterwarnings("ignore:The 'future.infer_string' option")
def test_one_recording_gives_the_same_windows_in_every_format(tmp_path):
    data = {"time": "time", "targets": ["soc"], "context": 16, "horizon": 0}
    names = write_recording(tmp_path)
    sets = {}
    for name in names:
        config = small_config(tmp_path, data=data | {"path": str(tmp_path / name)})
        sets[name] = load_dataset(config)
    first = sets["v5.mat"]
    assert first.signature.inputs == ("voltage", "current")
    assert first.index.num_rows == 300
    for dataset in sets.values():
        assert dataset.compute_fingerprint() == first.compute_fingerprint()
        assert dataset.signature == first.signature
        assert torch.equal(dataset.memory.series.values, first.memory.series.values)
        assert torch.equal(dataset.memory.starts["test"], first.memory.starts["test"])
        assert (dataset.memory.time == first.memory.time).all()


@pytest.mark.filterwarnings("ignore:The 'future.infer_string' option")
@pytest.mark.parametrize("ids", [None, "file"])
def test_a_folder_mixes_formats(tmp_path, ids):
    names = sorted(write_recording(tmp_path))
    (tmp_path / "~$t.xlsx").write_bytes(b"what Excel leaves beside an open workbook")
    settings = {"path": str(tmp_path), "id": ids, "ignore": ["Fs", "info"]}
    if ids:  # the files make one table, so they need the same columns
        for name in ("v5.mat", "v73.mat"):
            (tmp_path / name).unlink()
            names.remove(name)
        pyarrow.parquet.write_table(
            pyarrow.csv.read_csv(
                tmp_path / "t.csv", pyarrow.csv.ReadOptions(skip_rows_after_names=1)
            ),
            tmp_path / "u.parquet",
        )
        names.append("u.parquet")
    dataset = load_dataset(small_config(tmp_path, data=settings | {"targets": ["soc"]}))
    assert dataset.index.series_names == tuple(names)
    assert [file.name for file in dataset.files] == names
    values = dataset.memory.series.values
    for number in range(1, len(names)):
        assert torch.equal(values[:300], values[300 * number : 300 * (number + 1)])


def test_sheets_are_series_with_labels_by_name(tmp_path):
    rows = [[float(i), i % 7 / 3] for i in range(60)]
    sheets = {"Cell 1": [["time", "a"], *rows], "Cell 2": [["time", "a"], *rows[:59]]}
    write_workbook(tmp_path / "t.xlsx", sheets)
    ends = range(5, 59)
    labels = [[f"Cell {1 + i % 2}", i, i, "xy"[i // 4 % 2]] for i in ends]
    labels += [[f"Cell {2 - i % 2}", i, i, "no label"] for i in ends]
    table = {"labels": [["series", "start", "end", "label"], *labels[: len(ends)]]}
    write_workbook(tmp_path / "labels.xlsx", table)
    settings = {"path": str(tmp_path / "t.xlsx"), "sheet": "*", "time": "time", "context": 4}
    settings |= {"task": "classify", "labels": str(tmp_path / "labels.xlsx")}
    dataset = load_dataset(small_config(tmp_path, data=settings | {"horizon": 0}))
    assert dataset.index.series_names == ("t.xlsx/Cell 1", "t.xlsx/Cell 2")
    assert dataset.signature.classes == ("x", "y")
    table["labels"] += labels[len(ends) :]
    write_workbook(tmp_path / "labels.xlsx", table)
    with pytest.raises(UserError, match=r'labels.xlsx, row 56, column "label": is empty'):
        load_dataset(small_config(tmp_path, data=settings | {"na": ["no label"], "horizon": 0}))


def test_a_stream_joins_times_and_knows_marks(tmp_path):
    day, hour = np.divmod(np.arange(400), 24)
    table = pyarrow.table(
        {"month": day * 0 + 1, "day": day + 1, "hour": hour, "a": np.sin(day * 24.0 + hour)}
    )
    table = table.append_column("b", pyarrow.array(np.where(hour == 5, -200.0, hour)))
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    settings = {"path": str(tmp_path / "t.parquet"), "time": ["month", "day", "hour"], "na": [-200]}
    settings |= {"time_format": "%m %d %H", "inputs": ["a"], "targets": ["b"], "horizon": 0}
    memory, streamed = (
        load_dataset(small_config(tmp_path, data=settings, engine={"home": home}))
        for home in ("host", "stream")
    )
    assert streamed.stream is not None
    assert streamed.num_windows == memory.num_windows
    assert streamed.index.step == memory.index.step == 3600
    assert streamed.left_out == memory.left_out
    assert sum(memory.left_out.values()) > 10
