"""What `slipstream auto` proposes for raw files, and what it refuses before any training."""

from __future__ import annotations

import datetime
import zipfile

import numpy as np
import pytest
import scipy.io

from slipstream.base.errors import UserError
from slipstream.data.dataset import load_dataset
from slipstream.tools.inspection import Aim, propose_config
from tests.conftest import real_file
from tests.workbooks import write_workbook

START = datetime.datetime(2022, 1, 1)
RNG = np.random.default_rng(0)


def make_load(rows, level=0.0):
    """An hourly load with a daily season."""
    return 50 + level + 10 * np.sin(np.arange(rows) / 24 * 2 * np.pi) + RNG.normal(0, 1, rows)


def make_times(rows, form="%Y-%m-%d %H:%M"):
    return [(START + datetime.timedelta(hours=i)).strftime(form) for i in range(rows)]


def write_table(path, columns, *, mark=","):
    rows = zip(*columns.values(), strict=True)
    lines = [mark.join(columns), *(mark.join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def propose(path, *targets, horizon=None, overrides=()):
    """Return the proposed settings of the data, after they were read, and the lines shown."""
    config, findings = propose_config(str(path), Aim(targets, horizon), overrides)
    dataset = load_dataset(config) if config.data.context else None
    assert dataset is None or all(dataset.num_windows.values())
    return config.data, findings.describe_choice(config)


def test_a_folder_of_matlab_structs_is_estimated_on_whole_series(tmp_path):
    for cell in range(8):
        current = RNG.normal(0, 1, 400).cumsum()
        soc = 0.9 - np.cumsum(np.abs(current)) / np.abs(current).sum() * 0.8
        charge = 3 * soc + cell  # tells the target, up to an offset of each file
        columns = {"Time": np.arange(400.0), "Voltage": 3 + soc + 0.1 * current}
        columns |= {"Current": current, "Ah": charge, "SOC": soc}
        struct = {name: values[:, None] for name, values in columns.items()}
        scipy.io.savemat(tmp_path / f"cell_{cell}.mat", {"meas": struct})
    data, lines = propose(tmp_path)
    assert (data.targets, data.horizon, data.time) == (("SOC",), 0, "Time")
    assert data.inputs == ("Voltage", "Current")
    assert data.split.by == "series"
    assert "8 series, one per file" in lines[0]
    assert "not used: Ah (tells the target of the same row)" in lines[3]
    with pytest.raises(UserError, match='has no column "soc"; did you mean "SOC"'):
        propose(tmp_path, "soc")


def write_download(path, rows=600):
    """A ZIP archive with semicolons, decimal commas, two columns of time, and -200 for missing."""
    load, heat = make_load(rows), make_load(rows, 20)
    load[RNG.random(rows) < 0.02] = -200
    text = "Date;Time;CO(GT);T;;\n"
    for day, clock, a, b in zip(
        make_times(rows, "%d/%m/%Y"), make_times(rows, "%H.%M.%S"), load, heat, strict=True
    ):
        text += f"{day};{clock};" + f"{a:.1f};{b:.1f};;\n".replace(".", ",")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("AirQuality.csv", text)
    return path


def test_codes_for_missing_values_are_asked_about(tmp_path):
    path = write_download(tmp_path / "air quality.zip")
    with pytest.raises(UserError, match="which column is to be predicted"):
        propose(path)
    with pytest.raises(UserError) as refused:
        propose(path, "CO(GT)")
    assert "are -200, all others" in str(refused.value)
    assert "--set 'data.na=[-200]'" in refused.value.message.render("terminal")
    assert 'overrides={"data.na": [-200]}' in refused.value.message.render("python")
    data, lines = propose(path, "CO(GT)", overrides=["data.na=[-200]"])
    assert (data.time, data.na) == (("Date", "Time"), (-200,))
    assert data.time_format == "%d/%m/%Y %H.%M.%S"
    assert "forecasts CO(GT), 15 rows ahead" in lines[1]
    assert propose(path, "CO(GT)", overrides=["data.na=[]"])[0].na == ()


def make_sheet(rows=300):
    load = make_load(rows)
    hours = [START + datetime.timedelta(hours=i) for i in range(rows)]
    return [
        ["Timestamp", "Load"],
        *([when, value] for when, value in zip(hours, load, strict=True)),
    ]


def test_titles_and_cover_sheets_of_a_workbook_are_passed_over(tmp_path):
    titles = [["Plant report"], ["by SCADA", "v1.2"], []]
    path = write_workbook(tmp_path / "titles.xlsx", {"Data": titles + make_sheet()})
    data, _ = propose(path)
    assert (data.time, data.targets) == ("Timestamp", ("Load",))
    sheets = {"Info": [["Plant", "A"], ["Author", "B"]], "Data": make_sheet()}
    data, lines = propose(write_workbook(tmp_path / "info.xlsx", sheets))
    assert (data.sheet, data.targets) == ("Data", ("Load",))
    assert "300 rows, one series" in lines[0]
    sheets = {"Cover": [["Only a title"]], "Jan": make_sheet(), "Feb": make_sheet()}
    data, lines = propose(write_workbook(tmp_path / "cover.xlsx", sheets))
    assert data.targets == ("Load",)
    assert "2 series, one per sheet" in lines[0]


def test_series_of_a_long_table_that_two_columns_tell_apart(tmp_path):
    rows = [
        (START.date() + datetime.timedelta(days=day), store, item, 5 + day % 7 + store, 1.5)
        for day in range(140)
        for store in range(3)
        for item in "AB"
    ]
    names = ("date", "store", "family", "sales", "price")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    columns["price"] = RNG.normal(2, 0.1, len(rows)).round(3)
    data, lines = propose(write_table(tmp_path / "sales.csv", columns))
    assert (data.ids, data.targets) == (("store", "family"), ("sales",))
    assert data.inputs == ("sales", "price")
    assert "6 series, by store, family; time: date" in lines[0]


def test_series_of_a_table_without_times(tmp_path):
    series = np.repeat([f"H{i}" for i in range(5)], 120)
    counted = np.tile(np.arange(1, 121), 5)
    columns = {"unique_id": series, "ds": counted, "y": make_load(600).round(3)}
    data, lines = propose(write_table(tmp_path / "long.csv", columns))
    assert (data.id, data.time, data.inputs) == ("unique_id", "ds", ("y",))
    assert "5 series, by unique_id; time: ds, counts the rows of each series" in lines[0]


def test_columns_that_count_on_are_series(tmp_path):
    columns = {"": make_times(300)}
    columns |= {f"MT_{i:03d}": make_load(300, i).round(3) for i in range(1, 6)}
    data, lines = propose(write_table(tmp_path / "meters.txt", columns, mark=";"))
    assert data.layout == "columns"
    assert "5 series, one per column" in lines[0]
    assert "forecasts each series, 7 rows ahead" in lines[1]
    one, _ = propose(tmp_path / "meters.txt", "MT_003")
    assert (one.layout, one.targets) == ("long", ("MT_003",))
    cities = {"time": make_times(300)}
    cities |= {name: make_load(300).round(3) for name in ("Berlin", "Hamburg", "Munich")}
    path = write_table(tmp_path / "cities.csv", cities)
    with pytest.raises(
        UserError, match=r"every column is a series of its own, add --set data\.layout"
    ):
        propose(path)
    assert propose(path, overrides=["data.layout=columns"])[0].layout == "columns"


def make_cases(count=60, rows=40):
    """Sines of three frequencies, a class each, in an order that says nothing."""
    kinds = RNG.integers(3, size=count)
    waves = [np.sin(np.arange(rows) * (0.1 + 0.1 * kind)) for kind in kinds]
    return kinds, (np.stack(waves) + RNG.normal(0, 0.2, (count, rows))).round(4)


@pytest.mark.parametrize("times", [False, True])
def test_classes_of_whole_series_in_a_long_table(tmp_path, times):
    kinds, waves = make_cases()
    columns = {"id": np.repeat(np.arange(60), 40), "time": np.tile(np.arange(40) / 50, 60)}
    if not times:
        del columns["time"]
    columns |= {"x": waves.ravel(), "y": waves[:, ::-1].ravel()}
    columns["label"] = np.repeat(np.array(["rest", "wave", "turn"])[kinds], 40)
    data, lines = propose(write_table(tmp_path / "gestures.csv", columns))
    assert (data.task, data.id, data.targets) == ("classify", "id", ("label",))
    assert data.inputs == ("x", "y")
    assert "60 series, by id" in lines[0]
    assert "classifies each series by label, from the whole series of x, y" in lines[1]
    assert "whole series" in lines[2]


@pytest.mark.parametrize("place", ["first", "last"])
def test_classes_of_whole_series_in_a_wide_table(tmp_path, place):
    kinds, waves = make_cases()
    values = {f"t{i}": waves[:, i] for i in range(40)}
    label = {"label": np.array(list("abc"))[kinds]}
    columns = label | values if place == "first" else values | label
    data, lines = propose(write_table(tmp_path / "cases.csv", {"id": range(60)} | columns))
    assert (data.layout, data.task, data.targets) == ("wide", "classify", ("label",))
    assert data.id == "id"
    assert data.values == ("t0:" if place == "first" else "t0:t39")
    assert "60 series, one per row" in lines[0]


def test_classes_of_rows_stay_classes_of_rows(tmp_path):
    columns = {"time": np.arange(900) / 50, "acc_x": make_load(900), "acc_y": make_load(900)}
    columns["activity"] = np.repeat(["sit", "walk", "run"] * 10, 30)
    data, lines = propose(write_table(tmp_path / "activity.csv", columns))
    assert (data.task, data.targets) == ("classify", ("activity",))
    assert "classifies each row by activity, from 96 rows" in lines[1]
    del columns["activity"]
    columns["acc_z"] = make_load(900)
    with pytest.raises(UserError, match="which column is to be predicted"):
        propose(write_table(tmp_path / "axes.csv", columns))


def test_archives_are_split_as_their_files_are_named():
    folder = real_file("archive/ItalyPowerDemand_TRAIN.ts").parent
    data, _ = propose(folder / "ItalyPowerDemand*")
    assert data.split.by == "file"
    assert data.split.test == ("ItalyPowerDemand_TEST.ts",)
    with pytest.raises(UserError, match=r"holds files of several kinds \(.ts, .tsv\)"):
        propose(folder)
    with pytest.raises(UserError, match="holds several archives"):
        propose(folder / "*.ts")


def test_a_date_that_two_formats_fit_stops_it(tmp_path):
    clocks = [f"03/04/2022 {i // 4:02d}:{i % 4 * 15:02d}" for i in range(96)]
    path = write_table(tmp_path / "day.csv", {"date": clocks, "load": make_load(96)})
    with pytest.raises(UserError, match=r"day and month may be swapped.*data.accept="):
        propose(path)
    data, _ = propose(path, overrides=["data.time_format=%m/%d/%Y %H:%M"])
    assert (data.time_format, data.undecided) == ("%m/%d/%Y %H:%M", {})
    data, _ = propose(path, overrides=['data.accept=["date format"]'])
    assert data.accept == ("date format",)


def test_mistakes_are_named_before_any_training(tmp_path):
    columns = {"time": make_times(200), "load": make_load(200)}
    columns["comment"] = [f"note {i}" for i in range(200)]
    path = write_table(tmp_path / "load.csv", columns)
    with pytest.raises(UserError, match=r'"comment" is text with 200 different values.*load'):
        propose(path, "comment")
    with pytest.raises(UserError, match='"comment" is text: classes are predicted alone'):
        propose(path, "load", "comment")
    with pytest.raises(UserError, match='"time" is the time of the rows'):
        propose(path, "time")
    with pytest.raises(UserError, match=r"500, but a series has 200 rows.*at most 20 rows"):
        propose(path, horizon=500)
    with pytest.raises(UserError, match="did you mean"):
        propose(path, "lod")
    write_table(tmp_path / "other.csv", {"day": range(200), "price": make_load(200)})
    with pytest.raises(UserError, match=r"its files have different columns: load\.csv has"):
        propose(tmp_path)
    with pytest.raises(UserError, match=r'other\.csv has no column "load", which 1 of 2 files'):
        propose(tmp_path, "load")
