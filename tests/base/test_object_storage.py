"""Paths in object storage, by `file://`: a folder of this machine that is read in the same way."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from slipstream import UserError
from slipstream import config as configs
from slipstream.base import storage
from slipstream.base.storage import ObjectPath, is_url, parse_path
from slipstream.data import columns
from slipstream.data.dataset import load_dataset
from slipstream.data.files import expand_path, read_file, read_files
from slipstream.tools.inspection import inspect_path
from tests.conftest import small_config, waves


def url(path: Path) -> str:
    return f"file://{path}"


def write_formats(folder: Path) -> dict[str, Path]:
    """One table in every format that is read from object storage."""
    table = waves(300)
    paths = {name: folder / f"t.{name}" for name in ("csv", "parquet", "feather", "csv.gz", "zip")}
    pa.csv.write_csv(table, paths["csv"])
    pa.parquet.write_table(table, paths["parquet"], row_group_size=50)
    pa.feather.write_feather(table, paths["feather"])
    paths["csv.gz"].write_bytes(gzip.compress(paths["csv"].read_bytes()))
    with zipfile.ZipFile(paths["zip"], "w") as archive:
        archive.write(paths["csv"], "t.csv")
    return paths


@pytest.mark.parametrize("name", ["csv", "parquet", "feather", "csv.gz", "zip"])
def test_every_format_gives_the_same_data_as_the_local_file(tmp_path, name):
    path = write_formats(tmp_path)[name]
    local = load_dataset(configs.load(small_config(), [f"data.path={path}"]))
    remote = load_dataset(configs.load(small_config(), [f"data.path={url(path)}"]))
    assert remote.compute_fingerprint() == local.compute_fingerprint()


def test_folders_lists_and_patterns_have_the_order_and_the_names_of_local_files(tmp_path):
    for name in ("b.csv", "a/c.csv", "a-1.csv", "a/d/e.csv", ".hidden/f.csv", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("t,a\n1,2\n")
    for pattern in ("", "/*.csv", "/a/**/*.csv", "/**/[ce].csv", "/a/?.csv", "/b.csv"):
        local = [table.name for table in read_files([f"{tmp_path}{pattern}"])]
        assert [table.name for table in read_files([f"{url(tmp_path)}{pattern}"])] == local
    both = [f"{url(tmp_path)}/b.csv", f"{url(tmp_path)}/a"]
    assert [table.name for table in read_files(both)] == ["b.csv", "c.csv", "d/e.csv"]


def test_errors_name_the_object_and_the_line(tmp_path):
    (tmp_path / "cell.csv").write_text("t,a\n1,1.5\n2,x\n")
    table = read_file(parse_path(url(tmp_path / "cell.csv")), name="cell.csv")
    with pytest.raises(UserError, match=r'^cell.csv, line 3, column "a": "x" is not a number'):
        columns.read_numbers(table, "a", "data.inputs")
    (tmp_path / "ragged.csv").write_text('t,a\n"1,1.5\n2,x\n')
    with pytest.raises(UserError, match=r"ragged.csv, line 2: the quote"):
        read_file(parse_path(url(tmp_path / "ragged.csv")), name="ragged.csv")
    (tmp_path / "bytes.csv").write_bytes(b"t,a\n1,\xff\n")
    with pytest.raises(UserError, match=f"^{url(tmp_path)}/bytes.csv, line 2: is not UTF-8"):
        read_file(parse_path(url(tmp_path / "bytes.csv")), name="bytes.csv")
    (tmp_path / "wrong.parquet").write_bytes(b"no Parquet" * 10)
    with pytest.raises(UserError, match=f"^{url(tmp_path)}/wrong.parquet: cannot be read as"):
        read_file(parse_path(url(tmp_path / "wrong.parquet")), name="wrong.parquet")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(UserError, match=r"empty.csv: the file is empty"):
        read_file(parse_path(url(tmp_path / "empty.csv")), name="empty.csv")


def test_a_missing_object_is_named_with_a_suggestion(tmp_path):
    (tmp_path / "cell.csv").write_text("t,a\n1,1.5\n")
    config = configs.load(small_config(), [f"data.path={url(tmp_path)}/cel.csv"])
    with pytest.raises(UserError, match=r'cel.csv: there is no such.*did you mean "cell.csv"'):
        load_dataset(config)
    with pytest.raises(UserError, match="there is no folder file://"):
        load_dataset(configs.load(config, [f"data.path={url(tmp_path)}/none/cell.csv"]))
    with pytest.raises(UserError, match="matches no file"):
        expand_path(parse_path(f"{url(tmp_path)}/*.parquet"))


def test_an_object_that_is_replaced_is_read_again(tmp_path):
    path = tmp_path / "cell.csv"
    path.write_text("t,a\n1,1.5\n")
    (first,) = read_files([url(path)])
    path.write_text("t,a\n1,2.5\n2,3.5\n")
    (second,) = read_files([url(path)])
    assert (first.num_rows, second.num_rows) == (1, 2)


def test_a_parquet_object_that_is_replaced_while_it_is_streamed_is_refused(tmp_path):
    path = write_formats(tmp_path)["parquet"]
    (table,) = read_files([url(path)])
    travelled = pickle.loads(pickle.dumps(table.reader))
    pa.parquet.write_table(waves(200), path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match="was replaced since the data were read"):
        travelled.path.open_unchanged()


def test_a_streamed_object_gives_the_windows_of_a_local_file(tmp_path):
    path = write_formats(tmp_path)["parquet"]
    chunks = []
    for where in (str(path), url(path)):
        config = configs.load(small_config(), [f"data.path={where}", "engine.home=stream"])
        dataset = load_dataset(config)
        assert dataset.stream is not None
        chunks.append(list(dataset.stream.iter_chunks("train", 100)))
    for local, remote in zip(*chunks, strict=True):
        assert np.array_equal(local.series.values, remote.series.values)


def test_copies_of_one_content_are_noted(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("t,a\n1,1.5\n")
    from slipstream.data.table import find_duplicates

    (note,) = find_duplicates(list(read_files([url(tmp_path)])))
    assert note == '"b.csv" has the same content as "a.csv", so its rows are used twice'


def test_a_path_with_credentials_is_refused_and_masked_everywhere(tmp_path):
    secret = "s3://AKIA123:hush@bucket/cell.csv"
    labels = {"labels": secret, "task": "classify"}
    join = {"prepare": [{"step": "join", "path": secret}]}
    for data in ({"path": secret}, {"path": [secret]}, labels, join):
        with pytest.raises(UserError) as caught:
            configs.load({"data": data})
        assert "s3://***@bucket/cell.csv: a path with credentials" in str(caught.value)
        assert "hush" not in str(caught.value)
        assert "AKIA" not in str(caught.value)
    with pytest.raises(UserError) as caught:
        configs.load(small_config(tmp_path), [f"data.path={secret}"])
    assert "hush" not in str(caught.value)
    with pytest.raises(
        UserError, match=r"write az://box/t.csv, and set AZURE_STORAGE_ACCOUNT to me"
    ):
        parse_path("abfs://box@me.dfs.core.windows.net/t.csv")


def test_a_token_of_azure_is_part_of_the_address_and_of_no_message(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "me")
    monkeypatch.delenv("AZURE_STORAGE_KEY", raising=False)
    for token in ("sv=2020&sig=hush", "?sv=2020&sig=hush"):  # as the portal and as tools write it
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", token)
        assert storage._configure_azure("box")["sas_token"] == "?sv=2020&sig=hush"
    reported = OSError(
        "GetProperties failed for 'https://me.blob.core.windows.net/box/t.csv?sig=hush&sv=2020'. "
        "Azure Error: [] Could not connect to server"
    )
    message = str(storage.explain(ObjectPath("az", "box/t.csv"), reported))
    assert "hush" not in message
    assert "windows.net/box/t.csv'. Azure Error: [] Could not connect" in message


def test_urls_survive_pathlib_and_configs():
    assert str(parse_path(Path("s3://bucket/a/b.csv"))) == "s3://bucket/a/b.csv"
    assert str(parse_path("gcs://bucket/a/")) == "gs://bucket/a"
    assert parse_path("abfss://box/t.csv") == ObjectPath("az", "box/t.csv")
    assert not is_url("runs/s3")
    assert not is_url("C:/data/t.csv")
    config = configs.load({"data": {"path": ["s3://bucket/a.csv", "gs://bucket/b.csv"]}})
    assert config.data.paths == ("s3://bucket/a.csv", "gs://bucket/b.csv")
    with pytest.raises(UserError, match="names no bucket"):
        parse_path("s3://")


def test_runs_are_not_trained_in_object_storage():
    with pytest.raises(UserError, match=r"^s3://b/runs: a run is trained in a folder .*--out"):
        configs.load(small_config(), ["out=s3://b/runs"])


def test_inspect_reads_objects(tmp_path):
    path = write_formats(tmp_path)["csv"]
    local, remote = inspect_path(str(path)), inspect_path(url(path))
    assert remote.survey.num_rows == local.survey.num_rows
    assert url(path) in remote.proposal.to_toml()


def test_local_jobs_do_not_import_the_file_systems():
    code = (
        "import sys, slipstream, slipstream.config, slipstream.base.storage as one;"
        "one.parse_path('runs/t.csv').exists(); assert 'pyarrow' not in sys.modules;"
        "import slipstream.data.files; assert 'pyarrow.fs' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
