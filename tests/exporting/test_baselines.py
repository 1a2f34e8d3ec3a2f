"""Baselines as members of an ensemble are networks: every format computes what PyTorch computes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import slipstream
from slipstream import config as configs
from slipstream.engine.planning import make_plan
from slipstream.exporting.formats import make_interface
from slipstream.exporting.verification import (
    Differences,
    iter_reference,
    load_verification_data,
)
from slipstream.inference.networks import predict_windows, restore_outputs
from slipstream.inference.portable import load_portable
from slipstream.inference.trained import load_trained
from slipstream.scoring import boosting
from slipstream.scoring.ensemble import build_predictor
from slipstream.search.candidates import replace_model
from tests.conftest import close, merged, real_file, slow, small_config, waves
from tests.exporting.c.programs import needs_compiler
from tests.fitted import build_run, fit
from tests.labelled import CLASSIFY, states

FORECAST: dict[str, Any] = {"context": 24, "horizon": 3, "period": 8}
NUMBERS: dict[str, dict[str, Any]] = {
    "forecast": {**FORECAST, "targets": ["a"]},
    "independent": {**FORECAST, "channels": "independent", "horizon": 20},
    "together": {**FORECAST, "horizon": 30},
    "known ahead": {**FORECAST, "targets": ["a"], "future": ["b"], "static": ["k"], "id": "id"},
    "long ahead": {**FORECAST, "horizon": 60, "targets": ["a"], "future": ["b", "c"]},
    "estimate": {"context": 12, "horizon": 0, "targets": ["a"], "inputs": ["b", "c"]},
    "one row": {"context": 1, "horizon": 1, "targets": ["a"]},
    "target is no input": {"context": 16, "horizon": 3, "targets": ["a"], "inputs": ["b", "c"]},
}
"""Settings of `[data]`"""
NAMES = {"forecast": ("repeat", "seasonal", "ridge", "gbm"), "estimate": ("repeat", "gbm")}
CASES = [(case, name) for case in NUMBERS for name in NAMES.get(case, ("gbm",))]
CLASS_CASES = [
    (case, name) for case in ("classes", "classes ahead") for name in ("logistic", "gbm", "rocket")
]
ALL_CASES = [*CASES, *CLASS_CASES]
QUICK_CASES = (("forecast", "gbm"), ("classes", "rocket"), ("classes ahead", "logistic"))
SOME_CASES = [case if case in QUICK_CASES else slow(*case) for case in ALL_CASES]


def make_table(case: str) -> pa.Table:
    if "classes" in case:
        return states(900)
    if case == "few":
        return waves(20)
    table = waves(1400)
    number = np.repeat([0, 1], 700)
    table = table.append_column("id", pa.array(number))
    return table.append_column("k", pa.array(0.5 + number))


def make_config(case: str, folder: Path, **data: Any) -> Any:
    path = folder / f"{case}.parquet"
    pa.parquet.write_table(make_table(case), path)
    sections: dict[str, Any] = {"data": NUMBERS.get(case, {})}
    if "classes" in case:
        sections = merged(CLASSIFY, {"data": {"context": 16}})
        if case == "classes ahead":
            sections = merged(sections, {"data": {"horizon": 9, "future": ["b"]}})
    path_and_more = {"data": {"path": str(path), **data}}
    return small_config(folder / "runs", **merged(sections, path_and_more))


@pytest.fixture(scope="module")
def make_run(tmp_path_factory):
    @functools.cache
    def make(case: str, name: str) -> Path:
        folder = tmp_path_factory.mktemp("baseline")
        return build_run(folder / "best", [(make_config(case, folder), name)], [1.0])

    return make


@pytest.mark.parametrize(("case", "name"), ALL_CASES)
def test_the_network_of_a_baseline_predicts_what_the_baseline_predicts(tmp_path, case, name):
    config = make_config(case, tmp_path)
    dataset, baseline, network = fit(config, name)
    own = replace_model(config, network.model)
    plan = make_plan(own, data_bytes=0, training=False)
    predict = build_predictor(network.weights, own, dataset, plan)
    starts = dataset.memory.starts["test"]
    with torch.inference_mode():
        found, wanted = (one(dataset.memory.series, starts) for one in (predict, baseline.predict))
    # a random convolution in double precision may have another sign than in single precision
    close(found, wanted, rel=1e-3 if name == "rocket" else 2e-5)


@pytest.mark.parametrize(("case", "name"), SOME_CASES)
def test_numpy_computes_what_pytorch_computes(make_run, case, name):
    assert compare_numpy(make_run(case, name)) < 1e-5


def compare_numpy(run: Path) -> float:
    """Return the largest difference over the test windows, relative to the target's spread."""
    portable = load_portable(run)
    trained = load_trained(run, overrides=(), ensemble=None, allow_code=False)
    interface = make_interface(portable)
    differences = Differences(interface, portable.first.scaler)
    for batch in iter_reference(load_verification_data(trained, None), interface, 256):
        scaled = predict_windows(portable.members[0].models, batch.windows)
        values = restore_outputs([scaled], portable.signature, portable.first.scaler)
        found = values if portable.signature.classes else values[..., 0]
        wanted = batch.outputs[interface.output]
        differences.add({interface.output: found}, {interface.output: wanted})
    return differences.max_rel


FORMATS = [
    ("onnx", {}),
    ("torch", {}),
    pytest.param("c", {}, marks=needs_compiler),
    pytest.param("c", {"int8": True}, marks=needs_compiler),
]


@pytest.mark.parametrize(("to", "options"), FORMATS)
@pytest.mark.parametrize(("case", "name"), SOME_CASES)
def test_an_export_computes_what_pytorch_computes(make_run, tmp_path, case, name, to, options):
    """The export itself compares every test window."""
    out = tmp_path / "export"
    written = slipstream.export(make_run(case, name), to=to, out=out, quiet=True, **options)
    assert written["parity"]["windows"] > 50
    assert written["parity"]["max_rel"] < (1.0 if options else 1e-5)


@needs_compiler
@pytest.mark.parametrize("shares", [boosting.ANCHORS[-1], *map(slow, boosting.ANCHORS[:-1])])
def test_trees_are_relative_to_every_anchor(monkeypatch, tmp_path, shares):
    """The context has three seasons and a rest."""
    monkeypatch.setattr(boosting, "ANCHORS", (shares,))
    config = make_config("together", tmp_path, context=27)
    run = build_run(tmp_path / "best", [(config, "gbm")], [1.0])
    assert load_portable(run).first.config.model.options["anchor"] == shares
    assert compare_numpy(run) < 1e-5
    for to in ("onnx", "torch", "c"):
        slipstream.export(run, to=to, out=tmp_path / to, quiet=True)


@needs_compiler
def test_too_few_windows_have_no_trees(tmp_path):
    config = make_config("few", tmp_path, targets=["a"], context=8, horizon=2)
    run = build_run(tmp_path / "best", [(config, "gbm")], [1.0])
    assert load_portable(run).first.config.model.options["trees"] == 0
    assert compare_numpy(run) < 1e-5
    for to in ("onnx", "torch", "c"):
        slipstream.export(run, to=to, out=tmp_path / to, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gbm", "ridge"])
def test_real_windows_are_predicted_alike(tmp_path, name):
    data = {"path": str(real_file("ETTh1.csv")), "time": "date", "context": 96, "horizon": 24}
    data |= {"stride": 4, "split": {"rows": [8640, 2880, 2880]}, "targets": ["OT", "HUFL"]}
    config = configs.load({"data": data, "engine": {"device": "cpu"}, "out": str(tmp_path)})
    run = build_run(tmp_path / "best", [(config, name)], [1.0])
    assert compare_numpy(run) < 1e-5
    for to in ("onnx", "torch"):
        slipstream.export(run, to=to, out=tmp_path / to, quiet=True)


JOINT = {
    "forecast": [("gbm", 24), ("seasonal", 16), ("ridge", 40)],
    "known ahead": [("gbm", 24), ("ridge", 12)],
    "estimate": [("repeat", 12), ("gbm", 5)],
    "classes": [("rocket", 16), ("gbm", 8), ("logistic", 12)],
}
"""Members of an ensemble, and their contexts"""


@pytest.mark.parametrize("case", ["forecast", *map(slow, list(JOINT)[1:])])
def test_an_ensemble_of_baselines_is_streamed_and_exported(tmp_path, case):
    members = [(make_config(case, tmp_path, context=rows), name) for name, rows in JOINT[case]]
    weights = [0.5, *[0.5 / (len(members) - 1)] * (len(members) - 1)]
    run = build_run(tmp_path / "best", members, weights)
    for to in ("onnx", "torch", "c"):
        written = slipstream.export(run, to=to, out=tmp_path / to, quiet=True)
        assert written["parity"]["max_rel"] < 1e-5
    table = make_table(case).slice(0, 120)
    stream, found = slipstream.Stream(run), []
    ahead = {"known ahead": ["b"]}.get(case, [])
    rows = table.to_pylist()
    horizon = members[0][0].data.horizon
    for number, row in enumerate(rows[: len(rows) - horizon]):
        after = rows[number + 1 : number + 1 + horizon]
        future = {name: [other[name] for other in after] for name in ahead}
        found.append(stream.push(row, future=future) if ahead else stream.push(row))
    last = found[-1]
    assert last is not None
    # the table up to this row: what is to be forecast has no target yet
    known = table.slice(0, len(rows) - horizon)
    if ahead:
        hidden = [row["a"] if n < known.num_rows else None for n, row in enumerate(rows)]
        known = table.set_column(table.column_names.index("a"), "a", pa.array(hidden))
    predicted = slipstream.predict(run, known, quiet=True).to_pandas()
    newest = predicted.tail(max(horizon, 1))
    for name, values in last.to_dict().items():
        if name in newest and newest[name].dtype.kind == "f":
            close(np.ravel(values), newest[name].to_numpy(), rel=1e-5)
