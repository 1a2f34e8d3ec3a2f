"""Bad input: a clear error that names file, line or column, setting and fix; exit code 2; nothing
written."""

from __future__ import annotations

import gzip
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from slipstream.cli.commands import app
from tests.workbooks import write_workbook

ROWS = [[i, (i * 7) % 11, (i * 5) % 13] for i in range(60)]
SETTINGS = {
    "data.time": "time",
    "data.context": 8,
    "data.horizon": 2,
    "model.kind": "linear",
    "train.epochs": 1,
    "engine.device": "cpu",
    "engine.plan": "off",
}


def text(rows=None, header="time,a,b", end="\n"):
    rows = ROWS if rows is None else rows
    return header + end + "".join(",".join(map(str, row)) + end for row in rows)


def changed(row, column, value):
    rows = [list(r) for r in ROWS]
    rows[row][column] = value
    return text(rows)


def refused(tmp_path, content=None, name="table.csv", **settings):
    """Run `slipstream train`, expect a refusal and return what it said."""
    if content is not None:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    asked = {"out": tmp_path / "runs", "data.path": tmp_path / name} | SETTINGS
    asked |= {key.replace("__", "."): value for key, value in settings.items()}
    (tmp_path / "job.toml").write_text("")
    before = sorted(tmp_path.rglob("*"))
    arguments = ["train", str(tmp_path / "job.toml")]
    for key, value in asked.items():
        arguments += ["--set", f"{key}={value}"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2, found.output
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    assert sorted(tmp_path.rglob("*")) == before
    return found.stderr


def test_the_table_itself_is_fine(tmp_path):
    (tmp_path / "table.csv").write_text(text())
    arguments = ["train", "--quiet"]
    for key, value in (SETTINGS | {"out": tmp_path, "data.path": tmp_path / "table.csv"}).items():
        arguments += ["--set", f"{key}={value}"]
    (tmp_path / "job.toml").write_text("")
    found = CliRunner().invoke(app, [*arguments, str(tmp_path / "job.toml")])
    assert found.exit_code == 0, found.output


CONTENTS = {
    "text in a numeric column": (
        changed(10, 1, "oops"),
        'line 12, column "a": "oops" is not a number',
    ),
    "short row": (
        text().replace("\n7,5,9\n", "\n7,5\n"),
        "line 9: has 2 cells where the header has 3",
    ),
    "long row": (text().replace("\n7,5,9\n", "\n7,5,9,1\n"), "line 9: has 4 cells"),
    "empty": ("", "the file is empty"),
    "blank": ("\n \n\n", "the file is empty"),
    "header only": ("time,a,b\n", "has no rows below the header"),
    "no header": (text(header="0,1,2"), "line 1 should name the columns"),
    "not utf-8": (text().replace("time", "t").encode() + b"99,\xe9,1\n", "line 62: is not UTF-8"),
    "not utf-8 in the header": (b"t\xefme,a,b\n1,2,3\n", "line 1: is not UTF-8"),
    "utf-16": (
        text().encode("utf-16"),
        'UTF-16 text; set data.encoding = "utf-16", or save it as UTF-8',
    ),
    "gzip named csv": (gzip.compress(text().encode()), "gzip data; rename it to .csv.gz"),
    "parquet named csv": (b"PAR1 and so on", "rename it to .parquet"),
    "excel named csv": (b"PK\x03\x04 and so on", "a ZIP or Excel file"),
    "duplicate column": (text(header="time,a,a"), '2 columns are named "a"'),
    "duplicate time": (changed(10, 0, 9), 'line 12, column "time": the same time as'),
    "unsorted time": (changed(10, 0, 3), 'data.unsorted = "sort"'),
    "missing time": (changed(10, 0, ""), 'line 12, column "time": the time is missing'),
    "missing value": (changed(10, 1, ""), 'line 12, column "a": is missing'),
    "all missing": (
        text([[r[0], "", r[2]] for r in ROWS]),
        'column "a" (data.targets) has no values',
    ),
    "constant": (text([[r[0], 5, r[2]] for r in ROWS]), 'column "a" is 5 in every training row'),
    "infinite": (changed(10, 1, "inf"), 'line 12, column "a": is infinite'),
    "too short": (text(ROWS[:9]), "has 9 rows of the"),
    "no window in a split": (text(ROWS[:14]), "leaves no val window"),
    "gaps everywhere": (
        text([[r[0] + 10 * (r[0] // 5), *r[1:]] for r in ROWS]),
        "11 gaps in time break the series up",
    ),
    "only text": ("time,a,b\n1,x,y\n2,x,y\n", "has no numeric column to use as an input"),
    "no such time format": (changed(10, 0, "2020-01-01"), '"2020-01-01" is not a number'),
    "a quote that never ends": (text() + '60,"7,8\n61,1,1\n', "line 62"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_bad_table_is_named(tmp_path, name):
    content, said = CONTENTS[name]
    told = refused(tmp_path, content)
    assert said in told
    assert "table.csv" in told or "column" in told or "data." in told


PROTECTED = b"\xd0\xcf\x11\xe0" + b"\0" * 600 + "EncryptedPackage".encode("utf-16-le")
MATLAB = b"MATLAB 7.3 MAT-file".ljust(512) + b"\x89HDF\r\n\x1a\n"
OTHER_FORMATS = {
    "text as mat": ("t.mat", text(), "is a text file, not a MATLAB file; rename it to .csv"),
    "hdf5 as mat": ("t.mat", MATLAB[512:] + b"\0" * 99, "is an HDF5 file, but none of MATLAB's"),
    "damaged mat": ("t.mat", MATLAB + b"\0" * 99, "cannot be read as a MATLAB file"),
    "mat as csv": ("t.csv", b"MATLAB 5.0 MAT-file", "is a MAT file; rename it to .mat"),
    "text as xlsx": ("t.xlsx", text(), "is a text file, not a workbook; rename it to .csv"),
    "password": ("t.xlsx", PROTECTED, "is protected by a password; save it without one"),
    "damaged xlsx": ("t.xlsx", b"PK\x03\x04" + b"\0" * 99, "cannot be read as a workbook"),
    "empty sheet": ("t.xlsx", {"A": []}, 'sheet "A" is empty'),
    "several sheets": ("t.xlsx", {"A": ROWS, "B": ROWS}, "set data.sheet to one of them"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_a_bad_file_of_another_format_is_named(tmp_path, name):
    file, content, said = OTHER_FORMATS[name]
    if isinstance(content, dict):
        content = write_workbook(tmp_path / file, content).read_bytes()
    told = refused(tmp_path, content, file)
    assert said in told
    assert file in told


@pytest.mark.parametrize(("file", "library"), [("t.mat", "matio"), ("t.xlsx", "fastexcel")])
def test_a_format_without_its_library_is_named_with_the_command(
    tmp_path, monkeypatch, file, library
):
    monkeypatch.setitem(sys.modules, library, None)
    content = MATLAB if file == "t.mat" else b"PK\x03\x04\0"
    extra = {"t.mat": "matlab", "t.xlsx": "excel"}[file]
    assert f'pip install "slipstream[{extra}]"' in refused(tmp_path, content, file)


ASKED = {
    "missing file": ({"data__path": "nowhere.csv"}, "nowhere.csv: there is no such file"),
    "unknown ending": ({"data__path": "x.docx"}, 'unsupported format ".docx"'),
    "missing column": (
        {"data__targets": '["aa"]'},
        'no column "aa" (data.targets); did you mean "a"',
    ),
    "missing channel": (
        {"data__targets": '["aa"]', "data__channels": "independent"},
        'no column "aa" (data.targets); did you mean "a"',
    ),
    "missing time": ({"data__time": "tine"}, 'no column "tine" (data.time); did you mean "time"'),
    "missing id": ({"data__id": "station"}, 'no column "station" (data.id)'),
    "missing static": ({"data__static": '["z"]'}, 'no column "z" (data.static)'),
    "missing where": ({"data__where__z": 3}, 'no column "z" (data.where)'),
    "missing split column": (
        {"data__split": '{by="z", val=["x"], test=["y"]}'},
        'no column "z" (data.split.by)',
    ),
    "missing part of the time": (
        {"data__time": '["time", "clock"]'},
        'no column "clock" (data.time)',
    ),
    "unknown encoding": (
        {"data__encoding": "klingon"},
        'data.encoding = "klingon" is no encoding',
    ),
    "too many lines": ({"data__skip_rows": 99}, "empty below line 99 (data.skip_rows)"),
    "misspelt key": ({"train__epocs": 3}, 'did you mean "epochs"'),
    "misspelt section": ({"modle__kind": "gru"}, 'did you mean "model"'),
    "wrong type": ({"train__epochs": "many"}, 'train.epochs is "many"'),
    "noise on an unknown column": (
        {"augment__jitter": "{bb=0.1}"},
        'augment.jitter has "bb", which is not an input; did you mean "b"?',
    ),
    "negative noise": ({"augment__jitter": "{a=-0.1}"}, 'augment.jitter is {"a": -0.1}'),
    "noise for other inputs": ({"augment__jitter": "[0.1]"}, "augment.jitter lists 1 numbers"),
    "an empty range": ({"model__output_range": "[3, 3]"}, "model.output_range = [3, 3] is empty"),
    "an unknown activation": ({"model__activation": "relu6"}, 'model.activation is "relu6"'),
    "low rates that rise": (
        {"train__exploit_epochs": 2, "train__exploit_lr": 1e-9},
        "train.exploit_lr_min = 1e-07 is above train.exploit_lr = 1e-09",
    ),
    "out of range": ({"model__dropout": 1.5}, "model.dropout is 1.5"),
    "cuda": ({"engine__device": "cuda:77"}, 'engine.device is "cuda:77"'),
    "fp16 on a cpu": ({"engine__precision": "fp16"}, 'engine.precision is "fp16"'),
    "unwritable": ({"out": "/dev/null/runs"}, "out = '/dev/null/runs'"),
    "folders": ({"data__split": "{folders=true}"}, "needs data.path to be one folder"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_bad_request_is_named(tmp_path, name):
    settings, said = ASKED[name]
    assert said in refused(tmp_path, text(), **settings)


def test_a_folder_without_tables(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "contains no .csv" in refused(tmp_path, data__path=tmp_path / "empty")


def test_a_broken_parquet_file(tmp_path):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(pa.table({"time": [1], "a": [2.0]}), path)
    whole = path.read_bytes()
    assert "cannot be read as Parquet" in refused(tmp_path, whole[:-40], name="t.parquet")
    assert "cannot be read as Arrow" in refused(tmp_path, b"nonsense" * 9, name="t.arrow")


def test_files_that_differ_in_their_columns(tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "a.csv").write_text(text())
    (tmp_path / "cells" / "b.csv").write_text(text(header="time,a,c"))
    told = refused(tmp_path, data__path=tmp_path / "cells")
    assert 'b.csv: has no column "b"' in told


def test_no_data_at_all(tmp_path):
    (tmp_path / "job.toml").write_text("")
    found = CliRunner().invoke(app, ["train", str(tmp_path / "job.toml")])
    assert found.exit_code == 2
    assert "data.path is not set" in found.stderr


WRONG_STEPS = {
    'step = "fliter"': 'job.toml, line 9: data.prepare, step 2 is "fliter", which is no step; did',
    'step = "clip"\ncolums = ["a"]': 'colums is not a setting; did you mean "columns"?',
    'step = "formula"\nname = "x"\nvalue = "a.__class__"': "data.prepare, step 2 (formula): ",
    'step = "formula"\nname = "x"\nvalue = "aa + 1"': "table.csv: data.prepare, step 2 (formula)",
    'step = "filter"\nkind = "butterworth"\ncolumns = ["a"]\ncutoff_hz = 2': "half their rate",
}


@pytest.mark.parametrize("step", WRONG_STEPS)
def test_a_wrong_step_is_refused_with_its_number_and_the_fix(tmp_path, step):
    (tmp_path / "table.csv").write_text(text())
    steps = '[[data.prepare]]\nstep = "unit"\ncolumns = ["a"]\nunit = "V"\n[[data.prepare]]\n'
    job = f'out = "{tmp_path}/runs"\n[data]\npath = "table.csv"\ntime = "time"\n{steps}{step}\n'
    (tmp_path / "job.toml").write_text(job)
    found = CliRunner().invoke(app, ["train", str(tmp_path / "job.toml")])
    assert found.exit_code == 2
    assert WRONG_STEPS[step] in " ".join(found.stderr.split())
    assert not (tmp_path / "runs").exists()
