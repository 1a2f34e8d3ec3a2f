"""Damaged files of every format: each is read, or refused as a user's mistake.

    python -m tests.data.damaged [files] [seed] [kind ...]

Nothing in a file may end the process, so tests start this as one.
"""

from __future__ import annotations

import gzip
import io
import random
import re
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import scipy.io
import scipy.sparse

from slipstream.base.errors import UserError
from slipstream.data import columns, files
from slipstream.data.formats import isolated
from slipstream.data.formats.reader import ReadOptions
from tests.workbooks import write_workbook

ROWS = 24
LENGTHS = [0, 1, 2, 255, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1]
NUMBERS = [b"-1", b"0", b"1e999", b"4294967296", b"99999999999999", b"1048577", b"ZZZ"]
TIME = np.arange(ROWS) * 0.5


def _make_values() -> dict[str, Any]:
    """Values of every kind that a MATLAB file may hold."""
    cells = np.empty((2, 2), dtype=object)
    cells[:] = [[1.0, "text"], [np.arange(3), np.array([[{"a": 1}]], dtype=object)]]
    many = np.empty((1, 3), dtype=[("V", object), ("kind", object)])
    for i in range(3):
        many[0, i] = (np.arange(3.0 + i), "rest")
    return {
        "meas": {"t": TIME, "V": TIME / 3, "step": np.array([["a"], ["bc"]] * 12, dtype=object)},
        "cycles": many,
        "cells": cells,
        "names": np.array(["one ", "two ", "tree"]),
        "sparse": scipy.sparse.csc_matrix(np.eye(4, 3)),
        "on": TIME > 3,
        "whole": np.arange(ROWS, dtype=np.int16),
        "wave": np.exp(1j * TIME),
        "empty": np.empty((0, 0)),
    }


def _save_objects(path: Path, version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it sets an option of pandas
        import matio
        import pandas as pd

        times = pd.date_range("2024-03-01", periods=ROWS, freq="15min").to_numpy()
        frame = pd.DataFrame({"t": times, "V": TIME, "s": list("abcd") * (ROWS // 4)})
        matio.save_to_mat(str(path), {"flat": frame}, version=version)


def _save_arrow(path: Path) -> None:
    table = _make_table()
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


def _make_table() -> pa.Table:
    texts = pa.array(["x", "yz", None] * (ROWS // 3))
    return pa.table(
        {"t": TIME, "s": texts, "d": texts.dictionary_encode(), "on": TIME > 3, "i": range(ROWS)}
    )


def _write_text() -> bytes:
    return b"t,a,b\n" + b"".join(b"%d,%d.5,%d\n" % (i, i % 7, i % 5) for i in range(ROWS))


def _save_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("t.csv", _write_text())


SHEET = [["t", "V", "note"], *([i, 3 + i / 7, "x"] for i in range(ROWS))]
PLAIN = {"t": TIME, "V": TIME / 3, "s": scipy.sparse.csc_matrix(np.eye(4, 3)), "name": "cell"}
KINDS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "mat4": ("t.mat", lambda path: scipy.io.savemat(path, PLAIN, format="4")),
    "mat5": ("t.mat", lambda path: scipy.io.savemat(path, _make_values())),
    "mat5 compressed": (
        "t.mat",
        lambda path: scipy.io.savemat(path, _make_values(), do_compression=True),
    ),
    "mat5 objects": ("t.mat", lambda path: _save_objects(path, "v7")),
    "mat7.3": ("t.mat", lambda path: _save_objects(path, "v7.3")),
    "xlsx": ("t.xlsx", lambda path: write_workbook(path, {"Data": SHEET})),
    "arrow": ("t.arrow", _save_arrow),
    "parquet": ("t.parquet", lambda path: pa.parquet.write_table(_make_table(), path)),
    "csv": ("t.csv", lambda path: path.write_bytes(_write_text())),
    "gzip": ("t.csv.gz", lambda path: path.write_bytes(gzip.compress(_write_text()))),
    "zip": ("t.zip", _save_zip),
}
"""By kind: a file's name, and how a sound one is written"""


def damage(content: bytes, draw: random.Random) -> bytes:
    """Cut a file short, flip bits, or write other lengths into it."""
    if draw.random() < 0.15:
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 4, 16])):
        at = draw.randrange(len(changed))
        match draw.randrange(5):
            case 0 | 1:
                changed[at] ^= 1 << draw.randrange(8)
            case 2:
                changed[at] = draw.choice([0, 127, 128, 255])
            case _:
                size = draw.choice([1, 2, 4, 8])
                number = draw.choice(LENGTHS).to_bytes(8, draw.choice(["little", "big"]))
                part = number[:size] if number[0] else number[-size:]
                at -= at % size
                changed[at : at + size] = part
    return bytes(changed)


def damage_inside(content: bytes, draw: random.Random) -> bytes:
    """Damage a part of a workbook, which then is packed soundly."""
    archive = zipfile.ZipFile(io.BytesIO(content))
    target, packed = draw.choice(archive.namelist()), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as copy:
        for name in archive.namelist():
            part = bytearray(archive.read(name))
            for _ in range(draw.randint(1, 4) if name == target else 0):
                at, kind = draw.randrange(len(part)), draw.randrange(4)
                numbers = [one.span() for one in re.finditer(rb"\d+", bytes(part))]
                if kind == 0 and numbers:
                    begin, end = draw.choice(numbers)
                    part[begin:end] = draw.choice(NUMBERS)
                elif kind == 1:
                    del part[at : at + draw.randint(1, 30)]
                elif kind == 2:
                    part[at] = draw.randrange(256)
                else:
                    part[at:at] = draw.choice([b"<a>", b"</row>", b"\0", b"&bad;"])
            copy.writestr(name, bytes(part))
    return packed.getvalue()


def read_whole(path: Path, options: ReadOptions) -> int:
    """Read every value of a file; return the number of rows."""
    table = files.read_file(path, name=path.name, options=options)
    for name in table.column_names:
        columns.read_column(table, name, "data.inputs").to_pylist()
    return table.num_rows


def fuzz(count: int, seed: int, kind: str, folder: Path) -> Counter[str]:
    """Damage a file of a kind so many times, and count what became of it."""
    draw = random.Random(f"{seed} {kind}")
    name, save = KINDS[kind]
    save(folder / name)
    sound = (folder / name).read_bytes()
    options = ReadOptions(variable="meas" if kind in ("mat5", "mat5 compressed") else None)
    counts: Counter[str] = Counter()
    for number in range(count):
        inside = kind == "xlsx" and draw.random() < 0.7
        content = damage_inside(sound, draw) if inside else damage(sound, draw)
        path = folder / f"{number}-{name}"
        path.write_bytes(content)
        try:
            read_whole(path, options)
            counts["read"] += 1
        except UserError as error:
            counts["refused" if str(path.name) in str(error) else "refused without a name"] += 1
        except Exception:
            sys.stderr.write(f"{kind}, file {number}, seed {seed}: {traceback.format_exc()}\n")
            counts["failed"] += 1
        path.unlink()
    return counts


def main(arguments: list[str]) -> int:
    """Damage files of the kinds that are named, or of all; return how many were neither read nor
    refused."""
    count, seed = (int(text) for text in (arguments + ["200", "0"][len(arguments) :])[:2])
    isolated.START_S = 60
    failed = 0
    for kind in arguments[2:] or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            counts = fuzz(count, seed, kind, Path(folder))
        sys.stdout.write(f"{kind}: {dict(counts)}\n")
        failed += counts["failed"] + counts["refused without a name"]
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
