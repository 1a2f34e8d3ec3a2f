"""A corpus of malformed and hostile tables: each is refused by name, or accepted as documented.

And the rule behind it, over tables that nobody thought of: whatever the bytes, there is either a
data set or an error of our own, soon, and in memory that goes with the file.
"""

from __future__ import annotations

import gzip
import io
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import UserError
from slipstream import config as configs
from slipstream.data import dataset as datasets

EXAMPLES = 60
ROWS = [[i, (i * 7) % 11 + 0.5, (i * 5) % 13] for i in range(80)]


def text(rows=None, header="time,a,b", end="\n", sep=","):
    rows = ROWS if rows is None else rows
    lines = [header, *(sep.join(map(str, row)) for row in rows)]
    return end.join(lines) + end


def changed(row, column, value):
    rows = [list(r) for r in ROWS]
    rows[row][column] = value
    return text(rows)


def without(row):
    return text([r for i, r in enumerate(ROWS) if i != row])


def load(path, **data):
    asked = {"path": str(path), "time": "time", "context": 8, "horizon": 2} | data
    return datasets.load_dataset(configs.load({"data": asked}))


def parquet(**columns):
    base = {"time": range(80), "a": [r[1] for r in ROWS], "b": [float(r[2]) for r in ROWS]}
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table(base | columns), sink)
    return sink.getvalue()


REFUSED = {
    "word in a number": (changed(9, 1, "high"), 'line 11, column "a": "high" is not a number'),
    "word in the last row": (changed(79, 1, "x"), "line 81"),
    "two decimal points": (changed(9, 1, "1.2.3"), "line 11"),
    "number with a unit": (changed(9, 1, "3 V"), "line 11"),
    "hexadecimal": (changed(9, 1, "0x1F"), "line 11"),
    "thousands separator": (changed(9, 1, '"1,234"'), "line 11"),
    "formula": (changed(9, 1, "=A1+B1"), "line 11"),
    "infinity": (changed(9, 1, "inf"), "is infinite"),
    "minus infinity": (changed(9, 1, "-Infinity"), "is infinite"),
    "too large for float32": (changed(9, 1, "1e39"), "a"),
    "too large for float64": (changed(9, 1, "1e999"), "a"),
    "empty cell": (changed(9, 1, ""), "is missing"),
    "NA": (changed(9, 1, "NA"), "is missing"),
    "NaN": (changed(9, 1, "nan"), "is missing"),
    "null": (changed(9, 1, "null"), "is missing"),
    "empty column": (text([[r[0], "", r[2]] for r in ROWS]), "has no values"),
    "constant column": (text([[r[0], 3, r[2]] for r in ROWS]), "in every training row"),
    "constant in training only": (
        text([[r[0], 3 if r[0] < 70 else r[0], r[2]] for r in ROWS]),
        "in every training row",
    ),
    "short row": (text().replace("\n9,", "\n9\n9.5,", 1), "has 1 cell where the header has"),
    "long row": (text().replace("\n9,", "\n9,1,2,3,4\n9.5,", 1), "cells"),
    "row of commas": (text() + ",,,,,\n", "cells"),
    "no file content": ("", "is empty"),
    "only newlines": ("\n\n\n", "is empty"),
    "only a byte order mark": ("\ufeff", "is empty"),
    "only a header": ("time,a,b\n", "no rows below the header"),
    "no header": (text(header="0,1,2"), "should name the columns"),
    "repeated header name": (text(header="time,a,a"), '2 columns are named "a"'),
    "one column only": ("time\n" + "".join(f"{i}\n" for i in range(80)), "no numeric column"),
    "same time twice": (changed(9, 0, 8), "the same time as"),
    "time goes back": (changed(9, 0, 2), "data.unsorted"),
    "time is missing": (changed(9, 0, ""), "the time is missing"),
    "time is a word": (changed(9, 0, "noon"), "is not a number"),
    "time is infinite": (changed(9, 0, "inf"), "time"),
    "dates and numbers mixed": (changed(9, 0, "2020-01-01"), "is not a number"),
    "impossible date": (
        text([[f"2020-02-{i % 28 + 1:02d} {i:02d}:00" for i in [r[0]]] + r[1:] for r in ROWS[:23]])
        + "2020-02-31 00:00,1,2\n",
        "line 25",
    ),
    "gap after every fourth row": (
        text([[r[0] + 9 * (r[0] // 4), *r[1:]] for r in ROWS]),
        "gaps in time break the series up",
    ),
    "too few rows": (text(ROWS[:7]), "rows"),
    "one row": (text(ROWS[:1]), "row"),
    "quote that never ends": (text() + '80,"1,2\n81,1,2\n', "line 82"),
    "latin-1": (text().encode() + b"80,\xe9,1\n", "is not UTF-8"),
    "utf-16": (text().encode("utf-16"), "UTF-16"),
    "utf-32": (text().encode("utf-32"), "UTF"),
    "zero bytes": (b"\0" * 4000, "t.csv"),
    "zero byte in a cell": (text().replace("9.5", "9\0.5", 1), "line"),
    "random bytes": (np.random.default_rng(0).bytes(4000), "t.csv"),
    "gzip": (gzip.compress(text().encode()), "gzip data"),
    "zip or Excel": (b"PK\x03\x04" + b"\0" * 100, "ZIP or Excel"),
    "old Excel": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 500, "t.csv"),
    "sqlite": (b"SQLite format 3\0" + b"\0" * 500, "t.csv"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n" + b"x" * 300, "t.csv"),
    "html": ("<html><body><table><tr><td>1</td></tr></table></body></html>\n", "t.csv"),
    "json": ('{"time": [1, 2], "a": [3, 4]}\n', "t.csv"),
    "parquet": (parquet(), "rename it to .parquet"),
    "pickle": (b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system", "t.csv"),
    "one endless line": ("9" * 200_000, "t.csv"),
    "ten thousand columns, no row": (",".join(f"c{i}" for i in range(10_000)) + "\n", "no rows"),
}
ACCEPTED = {
    "as it should be": text(),
    "windows line ends": text(end="\r\n"),
    "byte order mark": "\ufeff" + text(),
    "no newline at the end": text().rstrip("\n"),
    "blank lines at the end": text() + "\n\n\n",
    "tabs": text(header="time\ta\tb", sep="\t"),
    "semicolons": text(header="time;a;b", sep=";"),
    "semicolons and decimal commas": text(header="time;a;b", sep=";").replace(".", ","),
    "quoted cells": text().replace("9.5", '"9.5"'),
    "spaces around cells": text().replace(",", " , "),
    "a text column beside": text([[*r, "note"] for r in ROWS], header="time,a,b,c"),
    "scientific notation": text([[r[0], f"{r[1]:e}", r[2]] for r in ROWS]),
    "a gap in time": without(40),
    "a column without a name, which is left out": text(header="time,a,"),
    "emoji in a header": text(header="time,a,b \U0001f600"),
    "numbers that only differ after the comma": text(
        [[r[0], 1e6 + r[1] / 100, r[2]] for r in ROWS]
    ),
}
BINARY_REFUSED = {
    "a time of text": (parquet(time=["noon"] * 80), "time"),
    "nested lists": (parquet(a=[[1.0]] * 80), "a"),
    "structs": (parquet(a=[{"x": 1.0}] * 80), "a"),
    "binary": (parquet(a=[b"x"] * 80), "a"),
    "nulls": (parquet(a=[None, *range(79)]), "is missing"),
    "nan": (parquet(a=[float("nan"), *map(float, range(79))]), "is missing"),
    "infinite": (parquet(a=[float("inf"), *map(float, range(79))]), "is infinite"),
    "empty": (b"", "the file is empty"),
    "magic and nothing": (b"PAR1PAR1", "Parquet"),
    "lying footer": (b"PAR1" + b"x" * 50 + (2**31 - 1).to_bytes(4, "little") + b"PAR1", "Parquet"),
    "csv named parquet": (text().encode(), "Parquet"),
    "cut in half": (parquet()[: len(parquet()) // 2], "Parquet"),
}


def test_the_corpus_is_large_enough():
    assert len(REFUSED) + len(ACCEPTED) + len(BINARY_REFUSED) >= 60


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    content, said = REFUSED[name]
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        load(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(tmp_path, name):
    path = tmp_path / "t.csv"
    path.write_bytes(ACCEPTED[name].encode())
    found = load(path)
    assert found.index.num_rows >= 79
    assert found.signature.targets[0] == "a"


@pytest.mark.parametrize("name", BINARY_REFUSED)
def test_binary_refused(tmp_path, name):
    content, said = BINARY_REFUSED[name]
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(path, inputs=["a", "b"])
    assert said in str(caught.value)


def survives(path, content):
    """Load it; anything but a data set or a UserError goes up. Memory goes with the file."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        load(path)
    except UserError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 30e6 + 200 * len(content)


@given(st.binary(max_size=2000))
@settings(max_examples=EXAMPLES)
def test_any_bytes_as_csv(tmp_path_factory, content):
    survives(tmp_path_factory.getbasetemp() / "any.csv", content)


@given(st.data())
@settings(max_examples=EXAMPLES)
@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_bytes_changed_in_a_good_file(tmp_path_factory, kind, data):
    whole = bytearray(good(kind))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "zero"])):
            case "flip":
                whole[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del whole[at : at + data.draw(st.integers(1, 40))]
            case "insert":
                whole[at:at] = data.draw(st.binary(min_size=1, max_size=20))
            case "zero":
                end = min(at + 8, len(whole))
                whole[at:end] = bytes(end - at)
        if not whole:
            whole = bytearray(b"x")
    survives(tmp_path_factory.getbasetemp() / f"changed.{kind}", bytes(whole))


def good(kind):
    if kind == "csv":
        return text().encode()
    if kind == "parquet":
        return parquet()
    sink = io.BytesIO()
    table = pa.table({"time": range(80), "a": [r[1] for r in ROWS], "b": [r[2] for r in ROWS]})
    pa.feather.write_feather(table, sink, compression="uncompressed")
    return sink.getvalue()


@given(
    st.lists(
        st.lists(
            st.one_of(
                st.floats(allow_nan=True, allow_infinity=True).map(str),
                st.text(max_size=6),
                st.integers(-(10**40), 10**40).map(str),
            ),
            min_size=1,
            max_size=5,
        ),
        max_size=30,
    )
)
@settings(max_examples=EXAMPLES)
def test_any_cells(tmp_path_factory, rows):
    content = "time,a,b\n" + "\n".join(",".join(row) for row in rows)
    survives(tmp_path_factory.getbasetemp() / "cells.csv", content.encode("utf-8", "surrogatepass"))
