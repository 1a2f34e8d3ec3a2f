"""Ensembles in C: a source for each model, and one that returns their weighted mean."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import slipstream
from slipstream.exporting.c.files import FLAGS, load_library
from slipstream.exporting.c.source import CLayout, CSettings, CSource, make_ensemble_source
from slipstream.exporting.formats import make_interface
from slipstream.inference import portable
from slipstream.training import train
from tests.conftest import close, slow, small_config, waves
from tests.exporting.c.programs import needs_compiler

pytestmark = needs_compiler
NEW = waves(60, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    pa.parquet.write_table(waves(160), path / "waves.parquet")
    return path


def join(folder: Path, *members: dict[str, Any], **shared: Any) -> Path:
    """Train the members and return their ensemble."""
    runs = []
    for sections in members:
        data = {"path": str(folder / "waves.parquet"), "targets": ["a", "b"]}
        data |= shared.get("data", {}) | sections.get("data", {})
        sections = {**shared, **sections, "data": data}
        sections["train"] = {"epochs": 1} | sections.get("train", {})
        runs.append(train(small_config(folder / "runs", **sections)).run)
    return slipstream.ensemble(runs, out=folder / "joined", quiet=True).run


@pytest.fixture(scope="module")
def ensemble(folder: Path) -> Path:
    """Members that differ in context, inputs, channels, targets' order, quantiles and networks."""
    quantiles = {"loss": "quantile", "quantiles": [0.1, 0.4, 0.8], "repeats": 2, "epochs": 2}
    channels = {"channels": "independent", "inputs": ["b", "a"], "context": 20}
    return join(
        folder,
        {"model": {"kind": "gru", "output_range": [9.0, 21.5]}},
        {"model": {"kind": "transformer", "patch": 4}, "data": channels},
        {"data": {"inputs": ["c"], "context": 12, "targets": ["b", "a"]}, "train": quantiles},
    )


def set_weights(monkeypatch: pytest.MonkeyPatch, *weights: float) -> None:
    """Give the members of an ensemble these weights, wherever it is loaded."""
    read = portable.read_mixture

    def change(run: Any) -> Any:
        content = read(run)
        if content is None:
            return None
        folds = [fold._replace(weights=list(weights)) for fold in content["folds"]]
        return content | {"folds": folds}

    monkeypatch.setattr(portable, "read_mixture", change)


@pytest.mark.parametrize("int8", [False, slow(True)])
@pytest.mark.parametrize("weights", [(0.5, 0.2, 0.3), (0.6, 0.0, 0.4), (0.0, 0.0, 1.0)], ids=str)
def test_an_ensemble_predicts_windows_and_rows(weights, int8, ensemble, tmp_path, monkeypatch):
    """Members without weight are left out, with the columns and rows that only they read."""
    set_weights(monkeypatch, *weights)
    out, used = tmp_path / "out", sum(weight > 0 for weight in weights)
    result = slipstream.export(ensemble, to="c", out=out, name="soc", int8=int8)
    assert result["selftest"].endswith("ok")
    assert "window" in result["selftest"]
    assert "rows" in result["selftest"]
    parts = ("", *(f"_{number}" for number in range(1, used + 1)))
    names = {f"soc{part}.{end}" for part in parts for end in "ch"}
    assert {path.name for path in out.iterdir()} == names | {"main.c", "export.json"}
    assert f"weighted mean of {used} model" in (out / "soc.h").read_text()
    context = {3: 20, 2: 16, 1: 12}[used]
    assert result["interface"]["inputs"]["rows"]["shape"] == [
        "batch",
        context,
        3 if used > 1 else 1,
    ]
    assert result["parity"]["others"]["soc_step"] == pytest.approx(result["parity"]["max_rel"])
    if not int8:
        assert result["parity"]["max_rel"] <= 1e-5


@pytest.mark.parametrize("weights", [(0.5, 0.2, 0.3), (0.0, 0.0, 1.0)], ids=str)
def test_a_stream_of_an_ensemble_predicts_what_predict_does(weights, ensemble, monkeypatch):
    """Also of one member alone, whose targets have another order and which has quantiles."""
    set_weights(monkeypatch, *weights)
    stream = slipstream.Stream(ensemble)
    found = [stream.push(row) for row in NEW.to_pylist()][-1]
    wanted = slipstream.predict(ensemble, NEW, quiet=True)
    assert found is not None
    for place, name in enumerate(("a", "b")):
        close(found.point[:, place], wanted[f"{name}_predicted"].to_pylist())


@pytest.mark.parametrize("missing", ["drop", "forward"])
def test_rows_are_prepared_once_and_predictions_filtered_together(missing, folder, tmp_path):
    steps = [
        {"step": "filter", "kind": "ema", "columns": ["a"], "rows": 4, "into": ["slow"]},
        {"step": "formula", "name": "power", "value": "b * lag(c, 1)"},
    ]
    data = {"horizon": 0, "prepare": steps, "targets": ["c"], "missing": missing}
    ensemble = join(
        folder,
        {"model": {"kind": "mlp"}, "data": {"inputs": ["a", "slow"]}},
        {"model": {"kind": "lstm"}, "data": {"inputs": ["power", "slow"], "context": 9}},
        data=data,
        predict={"filter": {"kind": "ema", "rows": 3}},
    )
    result = slipstream.export(ensemble, to="c", out=tmp_path / "out", name="soc")
    assert result["prepare"]["max_rel"] <= 1e-5
    assert result["prepare"]["rows"] == 160
    assert result["selftest"].endswith("ok")
    header = (tmp_path / "out" / "soc.h").read_text()
    assert "data.prepare, step 1 (filter); data.prepare, step 2" in header
    assert 'soc_step filters its predictions (predict.filter, "ema")' in header


def make_source(ensemble: Path, folder: Path) -> CSource:
    run = portable.load_portable(ensemble)
    interface = make_interface(run)
    settings = CSettings(double=interface.dtype == "float64")
    source = make_ensemble_source(run, interface, settings, half_widths=run.half_widths)
    for name, text in source.files.items():
        (folder / name).write_text(text)
    return source


def test_the_header_states_the_bytes_that_the_compiler_counts(ensemble, tmp_path, monkeypatch):
    set_weights(monkeypatch, 0.5, 0.2, 0.3)
    layout = make_source(ensemble, tmp_path).layout

    def check(name: str, member: CLayout, scratch: int) -> None:
        steps = f"typedef char state[sizeof(slip_state) == {member.sizes.state_bytes} ? 1 : -1];\n"
        (tmp_path / "check.c").write_text(
            f'#include "{name}.c"\n'
            f"typedef char shared[sizeof work == {scratch} ? 1 : -1];\n"
            + (steps if member.settings.has_steps else "")
        )
        subprocess.run(["cc", "-std=c99", "-fsyntax-only", "check.c"], cwd=tmp_path, check=True)

    own = layout.sizes.scratch_bytes
    for number, (member, _) in enumerate(layout.members, start=1):
        check(f"slip_{number}", member, member.sizes.scratch_bytes)
        own -= member.sizes.scratch_bytes
    check("slip", layout, own)
    files = [*layout.sources, "-shared", "-fPIC", "-o", "all.so", "-lm"]
    subprocess.run(["cc", *FLAGS, *files], cwd=tmp_path, check=True)


def test_bad_values_give_nan_and_leave_no_trace(ensemble, tmp_path, monkeypatch):
    set_weights(monkeypatch, 0.5, 0.2, 0.3)
    library = load_library(tmp_path, make_source(ensemble, tmp_path).layout)
    rows = np.stack([NEW[name].to_numpy() for name in "abc"], axis=1)
    wanted, codes = library.step(rows)
    assert codes.tolist() == [0] * 19 + [1] * (len(rows) - 19)
    for bad in (np.nan, np.inf):
        library.reset()
        found, codes = library.step(np.insert(rows, 30, [bad, 1.0, 1.0], axis=0))
        assert codes[30] == 0
        np.testing.assert_array_equal(np.delete(found, 30, axis=0)[19:], wanted[19:])
        window = rows[None, :20].copy()
        window[0, -1, 2] = bad
        out, codes = library.window(window)
        assert codes.tolist() == [0]
        assert np.isnan(out).all()
    library.reset()
    found, codes = library.step(np.insert(rows, 10, [3e38, 3e38, 3e38], axis=0))
    assert np.isfinite(found[codes == 1]).all()
    assert codes[-1] == 1
