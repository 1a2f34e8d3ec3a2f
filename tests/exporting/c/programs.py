"""Compiles the C code of random models and calls it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.exporting.c.files import CLibrary, load_library, make_runner
from slipstream.exporting.c.source import CLayout, CSettings, CSource, make_source
from slipstream.exporting.formats import make_interface
from slipstream.exporting.verification import Differences
from tests.exporting.random_models import RandomRun

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"
)


def write_source(run: RandomRun, folder: Path, **settings: Any) -> CSource:
    """Write NAME.c and NAME.h of a random model."""
    double = make_interface(run.portable).dtype == "float64"
    source = make_source(
        run.portable.members[0].models,
        CSettings(**{"double": double, **settings}),
        half_widths=run.portable.half_widths,
    )
    for name, text in source.files.items():
        (folder / name).write_text(text)
    return source


def compile_run(run: RandomRun, **settings: Any) -> tuple[CLibrary, CLayout]:
    """Compile the code of a random model."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_source(run, Path(folder), **settings)
        return load_library(Path(folder), source.layout), source.layout


def compare_windows(run: RandomRun, library: CLibrary, *, steps: bool = False) -> float:
    """The largest relative difference from PyTorch, for windows at once or row by row."""
    interface = make_interface(run.portable)
    windows = run.draw_windows(3, interface.context)
    predict = library.predict_by_steps if steps else library.predict
    differences = Differences(interface, run.scaler)
    differences.add(make_runner(predict, library, interface)(windows), run.predict(windows))
    return differences.max_rel


def run_steps(library: CLibrary, rows: Any) -> Any:
    """The prediction after the last of some rows [N, inputs], from a reset on."""
    library.reset()
    out, complete = library.step(rows)
    assert complete[-1]
    assert np.isfinite(out[-1]).all()
    return out[-1]
