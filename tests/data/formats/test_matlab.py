"""MATLAB files: structs, vectors, tables and what is no table, in every version."""

from __future__ import annotations

import resource
import struct
import sys
import warnings
import zlib

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse

from slipstream import UserError
from slipstream.data import columns
from slipstream.data.files import read_file
from slipstream.data.formats import isolated
from slipstream.data.formats.matlab import read_mat_file
from slipstream.data.formats.reader import ReadOptions
from slipstream.data.roles import find_roles
from tests.conftest import small_config
from tests.data import damaged

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it sets an option of pandas
    import matio

ROWS = 6
MEAS = {
    "Voltage": np.linspace(3, 4, ROWS)[:, None],
    "Current": np.arange(ROWS)[None, :] / 7,  # lies where the other stands
    "on": np.array([[True, False, True, True, False, True]]),
    "step": np.array(
        [["rest"], ["charge"], ["rest"], ["rest"], ["charge"], ["rest"]], dtype=object
    ),
    "cell": {"T": np.full((ROWS, 2), 25.5), "limits": np.array([[2.5, 4.2]])},
    "Fs": 10.0,
    "operator": "Bob",
    "spectrum": np.ones((ROWS, 1)) * 1j,
}
VERSIONS = ["v4", "v5", "v7.3"]


def save(tmp_path, values, version, name="t.mat"):
    path = tmp_path / name
    if version == "v7.3":
        matio.save_to_mat(str(path), values, version="v7.3")
    else:
        scipy.io.savemat(path, values, format=version[1:])
    return path


def read(path, **options):
    return read_file(path, name=path.name, options=ReadOptions(**options))


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_the_equally_long_fields_of_a_struct_are_columns(tmp_path, version):
    table = read(save(tmp_path, {"meas": MEAS, "info": "test 7"}, version))
    assert table.column_names == (
        *("Voltage", "Current", "on", "step", "cell.T_1", "cell.T_2", "Fs", "operator"),
    )
    for name in ("Voltage", "Current"):
        values = columns.read_numbers(table, name, "x")
        np.testing.assert_array_equal(values, np.ravel(MEAS[name]))
    assert columns.read_codes(table, "step", "x")[1] == ["rest", "charge"]
    assert columns.read_numbers(table, "on", "x").tolist() == [1, 0, 1, 1, 0, 1]
    assert columns.read_numbers(table, "Fs", "x").tolist() == [10] * ROWS
    (file,) = table.files
    assert file.format == f"MATLAB {version[1:]}, variable meas"
    assert file.scalars == ("Fs", "operator")
    assert file.notes[0] == (
        f"left out: cell.limits (1 x 2 float64), spectrum ({ROWS} x 1 complex128), info (text)"
    )
    assert "one value for all rows" in file.notes[1]


def test_single_values_are_inputs_only_by_name(tmp_path):
    table = read(save(tmp_path, {"meas": MEAS}, "v5"))
    data = small_config(data={"time": None}).data
    roles, notes = find_roles(table, data)
    assert roles.inputs == ("Voltage", "Current", "on", "cell.T_1", "cell.T_2")
    assert notes == ["not used as inputs: step"]
    named = data.model_copy(update={"inputs": ("Voltage", "Fs")})
    assert find_roles(table, named)[0].inputs == ("Voltage", "Fs")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_vectors_of_a_file_without_a_struct_are_columns(tmp_path, version):
    vectors = {"t": np.arange(4.0), "V": np.arange(4.0)[:, None] / 3, "M": np.ones((3, 4)) * 2.0}
    table = read(save(tmp_path, vectors, version))
    assert sorted(table.column_names) == ["M_1", "M_2", "M_3", "V", "t"]
    np.testing.assert_array_equal(columns.read_numbers(table, "V", "x"), np.arange(4) / 3)
    assert table.files[0].format == f"MATLAB {version[1:]}"


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_a_variable_is_named_by_a_path(tmp_path, version):
    cycles = np.empty((1, 2), dtype=[("V", object), ("kind", object)])
    cycles[0, 0] = (np.arange(3.0), "charge")
    cycles[0, 1] = (np.arange(4.0), "rest")
    path = save(tmp_path, {"log": {"cycle": cycles, "Fs": 1.0}, "X": np.eye(3, 2)}, version)
    table = read(path, variable="log.cycle(2)")
    assert table.num_rows == 4
    assert table.column_names == ("V", "kind")
    assert read(path, variable="X").column_names == ("X_1", "X_2")
    with pytest.raises(UserError, match=r'has no "log.cycle\(3\)" .*log \(struct with cycle'):
        read(path, variable="log.cycle(3)")
    with pytest.raises(
        UserError, match=r'"log" \(data.variable\) has no columns.*1 x 2 struct with'
    ):
        read(path, variable="log")
    with pytest.raises(UserError, match=r'has no "meas" \(data.variable\); .*X \(3 x 2'):
        read(path, variable="meas")


def test_an_array_of_structs_with_one_value_each_is_a_table(tmp_path):
    rows = np.empty((1, 3), dtype=[("V", object), ("kind", object)])
    for i, kind in enumerate(("rest", "charge", "rest")):
        rows[0, i] = (3.5 + i, kind)
    table = read(save(tmp_path, {"rows": rows}, "v5"))
    assert columns.read_numbers(table, "V", "x").tolist() == [3.5, 4.5, 5.5]
    assert columns.read_codes(table, "kind", "x")[0].tolist() == [0, 1, 0]


def test_several_tables_are_refused_with_a_list(tmp_path):
    values = {"a": {"V": np.arange(3.0)}, "b": {"V": np.arange(4.0)}, "note": "x"}
    with pytest.raises(
        UserError, match=r'set data.variable .*"a"; it holds a \(struct with V\), b '
    ):
        read(save(tmp_path, values, "v5"))
    with pytest.raises(UserError, match=r"set data.variable .*it holds a \(1 x 1 float64\)"):
        read(save(tmp_path, {"a": 1.0}, "v5"))
    with pytest.raises(UserError, match="it holds no variable"):
        read(save(tmp_path, {}, "v5"))


@pytest.mark.parametrize("version", ["v7", "v7.3"])
def test_tables_timetables_and_datetimes_are_read(tmp_path, version):
    times = pd.date_range("2024-03-01", periods=4, freq="15min", name="Time")
    frame = pd.DataFrame({"V": [1.5, 2, np.nan, 4]}, index=times)
    flat = pd.DataFrame({"t": times.to_numpy(), "V": [1.5, 2, np.nan, 4], "s": list("abca")})
    path = tmp_path / "t.mat"
    matio.save_to_mat(str(path), {"log": frame, "flat": flat}, version=version)
    log = read(path, variable="log")
    assert log.column_names == ("Time", "V")
    got = columns.read_times(log, "Time", None).astype("datetime64[us]")
    np.testing.assert_array_equal(got, times.to_numpy().astype("datetime64[us]"))
    np.testing.assert_array_equal(columns.read_numbers(log, "V", "x"), [1.5, 2, np.nan, 4])
    table = read(path, variable="flat")
    assert columns.read_codes(table, "s", "x")[0].tolist() == [0, 1, 2, 0]
    np.testing.assert_array_equal(columns.read_times(table, "t", None).astype("M8[us]"), got)


def test_what_is_no_matlab_file_is_named(tmp_path):
    path = tmp_path / "t.mat"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(
        UserError, match=r"t.mat: is a text file, not a MATLAB file; rename it to .csv"
    ):
        read(path)
    path.write_bytes(b"PK\x03\x04" + b"\0" * 50)
    with pytest.raises(UserError, match=r"is a ZIP or Excel file.* rename it to .zip or .xlsx"):
        read(path)
    path.write_bytes(bytes(range(1, 200)) * 3 + b"\0")
    with pytest.raises(UserError, match=r"t.mat: cannot be read as a MATLAB file: "):
        read(path)
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(3)
    with pytest.raises(
        UserError, match=r"is an HDF5 file, but none of MATLAB's; save it in MATLAB"
    ):
        read(path)
    whole = save(tmp_path, {"meas": MEAS}, "v5").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"t.mat: cannot be read as a MATLAB file: "):
        read(path)


def test_a_missing_extra_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matio", None)
    path = tmp_path / "t.mat"
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(512) + b"\x89HDF\r\n\x1a\n" + b"\0" * 99)
    with pytest.raises(
        UserError, match=r't.mat: is a MATLAB 7.3 .*pip install "slipstream\[matlab\]"'
    ):
        read(path)


def find_differences(expected, got, where=""):
    """Where two values differ that were read from one file, by scipy and by us."""
    if hasattr(got, "toarray"):
        return [] if np.array_equal(expected.toarray(), got.toarray()) else [where]
    if (expected.shape, expected.dtype.names) != (got.shape, got.dtype.names):
        return [f"{where}: {expected.shape} {expected.dtype} {got.shape} {got.dtype}"]
    pairs = list(zip(expected.ravel(), got.ravel(), strict=True))
    if got.dtype.names:
        names = got.dtype.names
        inner = ((a[name], b[name], f"{where}.{name}") for a, b in pairs for name in names)
        return [one for found in inner for one in find_differences(*found)]
    if got.dtype.kind == "O":
        return [one for a, b in pairs for one in find_differences(a, b, f"{where}{{}}")]
    return [] if expected.tolist() == got.tolist() else [f"{where}: {expected} {got}"]


@pytest.mark.parametrize("kind", ["mat4", "mat5", "mat5 compressed"])
def test_values_of_every_kind_are_those_that_scipy_reads(tmp_path, kind):
    path = tmp_path / "t.mat"
    damaged.KINDS[kind][1](path)
    expected = scipy.io.loadmat(path)
    got = read_mat_file(path, kind[3]).values
    assert got.keys() == {name for name in expected if not name.startswith("__")}
    assert [one for name in got for one in find_differences(expected[name], got[name], name)] == []


def swap_words(content):
    """A file of one matrix of doubles in the byte order of the other kind of machine."""
    head, body = content[:124], content[128:]
    words = np.frombuffer(body[:40], "<u4").astype(">u4").tobytes()
    name = body[40:48]  # a short element: type, length, text
    short = np.frombuffer(name[:4], "<u4").astype(">u4").tobytes() + name[4:]
    tag = np.frombuffer(body[48:56], "<u4").astype(">u4").tobytes()
    return (
        head
        + b"\1\0MI"
        + words
        + short
        + tag
        + np.frombuffer(body[56:], "<f8").byteswap().tobytes()
    )


def test_files_of_big_endian_machines_are_read(tmp_path):
    path = tmp_path / "t.mat"
    scipy.io.savemat(path, {"abc": np.arange(12.0).reshape(6, 2)})
    path.write_bytes(swap_words(path.read_bytes()))
    np.testing.assert_array_equal(scipy.io.loadmat(path)["abc"], np.arange(12.0).reshape(6, 2))
    assert columns.read_numbers(read(path), "abc_2", "x").tolist() == [1, 3, 5, 7, 9, 11]


def test_a_damaged_file_that_ends_scipy_is_refused(tmp_path):
    """The type of some numbers has one more bit: scipy follows it out of its table of types."""
    path = tmp_path / "t.mat"
    scipy.io.savemat(path, {"t": np.arange(28.0)[:, None], "a": np.arange(28.0)[:, None] / 3})
    content = bytearray(path.read_bytes())
    at = content.rindex(b"\x09\0\0\0\xe0\0\0\0")
    content[at + 1] = 0x1A
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value) == (
        f'{path}: cannot be read as a MATLAB file: variable "a": numbers have the unknown type '
        "6665; save it again in MATLAB, or export it as CSV or Parquet"
    )


def make_element(kind, content):
    return struct.pack("<II", kind, len(content)) + content + b"\0" * (-len(content) % 8)


def make_matrix(kind, shape, *parts, name=b"x", flags=0):
    """A value as MATLAB stores it."""
    head = make_element(6, struct.pack("<II", kind | flags, 0))
    dims = make_element(5, struct.pack(f"<{len(shape)}i", *shape))
    return make_element(14, head + dims + make_element(1, name) + b"".join(parts))


def nest(depth):
    value = make_matrix(6, (1, 1), make_element(9, struct.pack("<d", 1)), name=b"")
    for _ in range(depth):
        value = make_matrix(1, (1, 1), value, name=b"")
    return make_matrix(1, (1, 1), value)


HUGE = {
    "cells": (make_matrix(1, (2**31 - 1, 2**31 - 1)), "values are announced where 0 bytes"),
    "no cells": (make_matrix(1, (0, *(2**31 - 1,) * 3)), "a value has 0 x 2,147,483,647 x"),
    "numbers": (make_matrix(6, (2**30, 2**30), make_element(9, b"")), "but there are 0"),
    "text": (make_matrix(4, (2**20, 2**20), make_element(4, b"ab")), "but there are 1"),
    "depth": (nest(3000), "values lie more than 50 deep"),
    "dimensions": (make_matrix(6, (1,) * 100, make_element(9, b"\0" * 8)), "100 dimensions"),
    "sparse": (
        make_matrix(5, (9, 2), *(make_element(5, struct.pack("<3i", 0, 2, 2**30)),) * 2),
        "announced where 0 are left",
    ),
    "claim": (make_element(15, zlib.compress(struct.pack("<II", 14, 2**32 - 1))), "claim to hold"),
}


@pytest.mark.parametrize("name", HUGE)
def test_lengths_beyond_the_file_are_refused_before_anything_is_made(tmp_path, name):
    content, said = HUGE[name]
    path = tmp_path / "t.mat"
    path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=said):
        read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_large_sparse_matrix_is_left_out_and_not_unpacked(tmp_path):
    wide = scipy.sparse.csc_matrix(([1.0], ([3], [5])), shape=(2**20, 2**20))
    path = tmp_path / "t.mat"
    scipy.io.savemat(path, {"V": np.arange(4.0), "wide": wide}, do_compression=True)
    table = read(path)
    assert table.column_names == ("V",)
    assert table.files[0].notes == ("left out: wide (1048576 x 1048576 float64)",)


@pytest.fixture
def own_library(tmp_path, monkeypatch):
    """A folder whose matio.py another process imports in place of mat-io."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    isolated.close_children()
    yield tmp_path / "matio.py"
    isolated.close_children()


def test_what_a_library_prints_becomes_a_note(tmp_path, own_library, capfd):
    own_library.write_text(
        "import logging, os, sys\nimport numpy as np\n"
        "def load_from_mat(path, **_):\n"
        "    os.write(2, b'HDF5-DIAG: an old library\\n')\n"
        "    logging.getLogger('matio').warning('an unknown class')\n"
        "    return {'V': np.arange(3.0)}\n"
    )
    path = tmp_path / "t.mat"
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(512) + b"\x89HDF\r\n\x1a\n")
    table = read(path)
    assert columns.read_numbers(table, "V", "x").tolist() == [0, 1, 2]
    assert table.files[0].notes == (
        "the library that reads the file reports: an unknown class",
        "the library that reads the file reports: HDF5-DIAG: an old library",
    )
    assert capfd.readouterr() == ("", "")


def test_a_library_that_crashes_ends_another_process(tmp_path, own_library):
    """As HDF5 may, in a damaged file of version 7.3."""
    own_library.write_text(
        "import os\n"
        "def load_from_mat(path, **_):\n"
        "    os.write(1, b'HDF5: infinite loop closing library')\n"
        "    os.abort()\n"
    )
    path = tmp_path / "t.mat"
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(512) + b"\x89HDF\r\n\x1a\n")
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path}: cannot be read as a MATLAB file: the process that reads it ended by SIGABRT: "
        "HDF5: infinite loop closing library; the file is damaged or needs too much memory: save "
        "it again, or export it as CSV"
    )
