from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from slipstream import UserError
from slipstream import config as configs
from slipstream.base.phases import listen_to_progress
from slipstream.data import columns, compression
from slipstream.data.dataset import load_dataset
from slipstream.data.files import expand_path, list_files, read_file, read_files
from slipstream.tools.inspection import inspect_path
from tests.conftest import real_file

TEXT = "t,a\n1,1.5\n2,2.5\n3,x\n"


def write_gzip(path, content=TEXT):
    with gzip.open(path, "wt") as file:
        file.write(content)
    return path


def write_zip(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), content)
    return path


def refuse(path):
    with pytest.raises(UserError) as caught:
        read_file(path, name=path.name)
    return str(caught.value)


def test_compressed_text_is_read_and_errors_name_the_file_inside_and_the_line(tmp_path):
    packed = write_gzip(tmp_path / "cell.csv.gz")
    archive = write_zip(tmp_path / "cell.zip", sub__cell_csv=TEXT, notes_md="", MACOSX="")
    for path, name in ((packed, "cell.csv.gz"), (archive, "cell.zip/sub/cell.csv")):
        table = read_file(path, name=path.name)
        assert columns.read_numbers(table, "t", "x").tolist() == [1, 2, 3]
        with pytest.raises(UserError, match=f'^{name}, line 4, column "a": "x" is not a number'):
            columns.read_numbers(table, "a", "data.inputs")


@pytest.mark.parametrize("kind", ["gz", "zip"])
def test_a_compressed_parquet_file_can_be_streamed(tmp_path, kind):
    buffer = io.BytesIO()
    table = pa.table({"t": np.arange(300), "y": np.sin(np.arange(300) / 5)})
    pa.parquet.write_table(table, buffer, row_group_size=50)
    if kind == "gz":
        path = tmp_path / "t.parquet.gz"
        path.write_bytes(gzip.compress(buffer.getvalue()))
    else:
        path = write_zip(tmp_path / "t.zip", t_parquet=buffer.getvalue())
    data = {"path": str(path), "time": "t", "context": 8, "horizon": 2}
    streamed = load_dataset(configs.load({"data": data, "engine": {"home": "stream"}}))
    whole = load_dataset(configs.load({"data": data}))
    assert streamed.stream is not None
    assert streamed.num_windows == whole.num_windows
    assert streamed.scaler == whole.scaler


def test_what_cannot_be_unpacked_is_refused_with_the_reason(tmp_path):
    content = write_gzip(tmp_path / "good.csv.gz").read_bytes()
    for name, damaged in {
        "cut.csv.gz": content[:-12],
        "flipped.csv.gz": content[:-6] + b"\xff" + content[-5:],
        "no.zip": b"a,b\n1,2\n",
    }.items():
        (tmp_path / name).write_bytes(damaged)
        assert f"{name}: cannot be unpacked (" in refuse(tmp_path / name)
    (tmp_path / "plain.csv.gz").write_text(TEXT)
    assert "plain.csv.gz: is not gzip data" in refuse(tmp_path / "plain.csv.gz")
    (tmp_path / "x.gz").write_bytes(content)
    assert "rename it, as in x.csv.gz" in refuse(tmp_path / "x.gz")
    two = write_zip(tmp_path / "two.zip", a_csv=TEXT, b_csv=TEXT)  # as a file of a folder
    assert "contains 2 tables (a.csv, b.csv); unpack it and set data.path" in refuse(two)
    none = write_zip(tmp_path / "none.zip", a_md=TEXT)
    assert "none.zip: contains no .csv" in refuse(none)
    empty = write_gzip(tmp_path / "empty.csv.gz", "")
    assert refuse(empty) == f"{empty}: the file is empty"


def test_of_an_archive_the_table_is_read_without_texts_about_it(tmp_path):
    downloads = {
        "plain": {"a_csv": TEXT},
        "readme": {"readme_txt": "About", "License_txt": "Free", "a_csv": TEXT},
        "formats": {"a_xlsx": "no workbook", "a_csv": TEXT},
        "any content": {"index_dat": "\0", "a_csv": TEXT, "names_md": "About"},
        "data": {"a_data": TEXT, "a_names": "About", "README_txt": "About"},
        "description": {"a_description_txt": "About it, all", "a_csv": TEXT},
        "named like one": {"readme_csv": TEXT},
    }
    expected = read_file(write_zip(tmp_path / "a.zip", a_csv=TEXT), name="a.zip")
    for number, members in enumerate(downloads.values()):
        path = write_zip(tmp_path / f"{number}.zip", **members)
        source = read_file(path, name=path.name)
        assert source.column_names == expected.column_names
        assert source.num_rows == expected.num_rows


def test_an_archive_of_several_tables_is_read_like_a_folder(tmp_path):
    tables = {"a_csv": TEXT, "in__b_csv": TEXT.replace("2.5", "7.5"), "readme_txt": "About"}
    path = write_zip(tmp_path / "all.zip", **tables)
    folder = tmp_path / "all"
    folder.mkdir()
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    unpacked, plain = (list(read_files([str(one)])) for one in (path, folder))
    assert [table.name for table in unpacked] == [table.name for table in plain]
    for one, other in zip(unpacked, plain, strict=True):
        assert one.column_names == other.column_names
        assert one.read_column("a").equals(other.read_column("a"))
    again, files = expand_path(path)
    assert (again, files) == expand_path(path)  # unpacked once
    findings = inspect_path(str(path))
    assert [file.name for file in findings.survey.files] == ["a.csv", "in/b.csv"]


def test_errors_about_a_file_of_an_archive_name_both(tmp_path):
    path = write_zip(tmp_path / "all.zip", a_csv=TEXT, b_csv="t,a\n1,2,3\n")
    with pytest.raises(UserError, match=r"b.csv, line 2: has 3 cells"):
        list(read_files([str(path)]))
    path = write_zip(tmp_path / "two.zip", a_csv=TEXT, b_csv=b"PAR1" * 8)
    with pytest.raises(UserError) as caught:
        list(read_files([str(path)]))
    assert str(caught.value).startswith(f"{path}/b.csv: is Parquet data")


def test_an_archive_of_classes_is_its_cases_in_one_format(tmp_path):
    train = real_file("archive/ItalyPowerDemand_TRAIN.ts")
    path = tmp_path / "ItalyPowerDemand.zip"
    with zipfile.ZipFile(path, "w") as packed:
        for part in ("TRAIN", "TEST"):
            name = f"ItalyPowerDemand_{part}"
            packed.write(train.with_name(f"{name}.ts"), f"{name}.ts")
            packed.writestr(f"{name}.txt", "1.0 2.0\n1.0 3.0\n")
        packed.writestr("ItalyPowerDemand.txt", "About the data")
    data = inspect_path(str(path)).proposal.config["data"]
    assert (data["task"], data["layout"], data["context"]) == ("classify", "wide", "all")
    assert data["split"] == {"by": "file", "test": ["ItalyPowerDemand_TEST.ts"], "val": 0.2}


def test_of_a_folder_texts_about_the_tables_and_other_content_are_skipped(tmp_path):
    (tmp_path / "readme.txt").write_text("About the data")
    (tmp_path / "a.dat").write_bytes(b"\0\1")
    (tmp_path / "a.dat.gz").write_bytes(b"\0\1")
    assert [file.name for file in list_files(tmp_path)] == ["a.dat"]
    (tmp_path / "b.csv").write_text(TEXT)
    assert [file.name for file in list_files(tmp_path)] == ["b.csv"]
    (tmp_path / "b.csv").rename(tmp_path / "b.txt")
    assert [file.name for file in list_files(tmp_path)] == ["b.txt"]


def test_a_folder_takes_compressed_files_but_no_copies_of_its_files(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(TEXT)
    write_gzip(tmp_path / "a.csv.gz")
    write_gzip(tmp_path / "c.csv.gz")
    write_zip(tmp_path / "all.zip", a_csv=TEXT, b_csv=TEXT)
    names = [table.name for table in read_files([str(tmp_path)])]
    assert names == ["a.csv", "b.csv", "c.csv.gz"]


def test_a_pattern_names_the_files_that_match(tmp_path):
    for name in ("x/a.csv", "x/b.csv", "y/c.csv", "y/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TEXT)
    for pattern, expected in {
        "x/*.csv": ["a.csv", "b.csv"],
        "x/[a].csv": ["a.csv"],
        "**/*": ["x/a.csv", "x/b.csv", "y/c.csv"],
        "?/c.*": ["y/c.csv"],
    }.items():
        names = [table.name for table in read_files([str(tmp_path / pattern)])]
        assert names == expected, pattern
    with pytest.raises(UserError, match=r"\*\.parquet: matches no file that ends in \.csv"):
        list(read_files([str(tmp_path / "*.parquet")]))
    shutil.move(tmp_path / "x/a.csv", tmp_path / "x/[odd].csv")
    assert [table.name for table in read_files([str(tmp_path / "x/[odd].csv")])] == ["[odd].csv"]


def test_a_pattern_is_looked_for_beside_the_config(tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "a.csv").write_text(TEXT)
    (tmp_path / "job.toml").write_text('[data]\npath = "cells/*.csv"\n')
    assert configs.load(tmp_path / "job.toml").data.path == str(tmp_path / "cells/*.csv")


def test_unpacked_files_are_removed_when_the_process_ends(tmp_path):
    path = write_gzip(tmp_path / "a.csv.gz")
    (tmp_path / "temporary").mkdir()
    code = (
        "import sys, os, tempfile; from pathlib import Path; "
        "from slipstream.data.compression import unpack; "
        "one, two = (unpack(Path(sys.argv[1])) for _ in range(2)); "
        "assert one == two; assert os.listdir(tempfile.gettempdir())"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    subprocess.run([sys.executable, "-c", code, path], check=True, env=environment)
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("kind", ["gz", "zip"])
def test_a_file_that_is_made_to_fill_a_disk_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(compression, "ANY_RATIO_BYTES", 1 << 20)
    content = "t,a\n" + "1,2\n" * 2_000_000
    if kind == "gz":
        path = write_gzip(tmp_path / "bomb.csv.gz", content)
    else:
        path = tmp_path / "bomb.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("bomb.csv", content)
    said = refuse(path)
    assert f"{path}: unpacks to more than 200 times its size of 0.0 MB" in said
    assert "unpack it yourself" in said
    assert not list(compression._make_folder().rglob("bomb.csv"))


def test_more_than_the_disk_holds_is_refused_before_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "MAX_DISK_SHARE", 1e-12)
    for path in (
        write_gzip(tmp_path / "a.csv.gz", TEXT * 100),
        write_zip(tmp_path / "a.zip", a_csv=TEXT * 100),
    ):
        assert f"{path}: unpacks to" in (said := refuse(path))
        assert "set TMPDIR to another folder, or unpack it yourself" in said


def test_progress_of_unpacking_is_reported(tmp_path):
    path = write_gzip(tmp_path / "a.csv.gz", "t,a\n" + "1,2.5\n" * 500_000)
    reports = []
    with listen_to_progress(lambda text, share: reports.append((text, share))):
        read_file(path, name=path.name)
    shares = [share for text, share in reports if text == "unpacking a.csv.gz"]
    assert len(shares) > 1
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] <= 1
    assert reports[-1] == ("", None)


def test_what_a_killed_process_has_unpacked_is_removed_by_the_next_one(tmp_path):
    path = write_gzip(tmp_path / "a.csv.gz")
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = (
        "import sys, os, signal; from pathlib import Path; "
        "from slipstream.data.compression import unpack; "
        "unpack(Path(sys.argv[1])); print('unpacked', flush=True); {}"
    )
    environment = os.environ | {"TMPDIR": str(folder)}

    def start(then):
        command = [sys.executable, "-c", code.replace("{}", then), path]
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    with start("sys.stdin.read()") as alive, start("sys.stdin.read()") as killed:
        for process in (alive, killed):
            assert process.stdout.readline() == b"unpacked\n"
        killed.kill()
        killed.wait()
        assert len(list(folder.iterdir())) == 2
        with start("os.kill(os.getpid(), signal.SIGKILL)") as third:
            third.wait()
        (folder / "slipstream-unpacked-link").symlink_to(tmp_path)
        left = [one for one in folder.iterdir() if not one.is_symlink()]
        assert len(left) == 2  # of the one that lives, and of the third
        with start("") as fourth:
            fourth.communicate()
        assert fourth.returncode == 0
        assert len(list(folder.iterdir())) == 2
        alive.stdin.close()
    assert [one.name for one in folder.iterdir()] == ["slipstream-unpacked-link"]
    assert path.exists()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "x.csv")
    os.mkfifo(tmp_path / "x.csv.gz")
    (tmp_path / "device.csv").symlink_to("/dev/zero")
    for name in ("x.csv", "x.csv.gz", "device.csv"):
        said = refuse(tmp_path / name)
        assert f"{name}: is a FIFO, a socket or a device, not a regular file (data.path)" in said
        with pytest.raises(UserError, match="not a regular file"):
            inspect_path(str(tmp_path / name))
    (tmp_path / "a.csv").write_text(TEXT)
    assert [table.name for table in read_files([str(tmp_path)])] == ["a.csv"]
