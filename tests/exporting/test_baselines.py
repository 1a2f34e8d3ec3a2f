"""Baselines as members of an ensemble are networks: every format computes what PyTorch computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import slipstream
from slipstream.data.dataset import Dataset, load_dataset
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
from slipstream.scoring import baselines
from slipstream.scoring.ensemble import build_predictor
from slipstream.search import ensemble
from slipstream.search.candidates import replace_model
from slipstream.training.trained_lanes import LoadedData
from tests.conftest import close, merged, small_config, waves
from tests.exporting.c.programs import needs_compiler
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


def make_table(case: str) -> pa.Table:
    if "classes" in case:
        return states(900)
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


def fit(config: Any, name: str) -> tuple[Dataset, baselines.Baseline, baselines.BaselineNetwork]:
    dataset = load_dataset(config)
    others = [other for other in baselines.list_baselines(dataset) if other != name]
    load = functools.partial(dataset.iter_chunks, series=None, rows=0)
    baseline = baselines.fit_baselines(dataset, load, without=others)[name]
    network = baselines.make_network(name, baseline.state, dataset.signature)
    assert network is not None
    return dataset, baseline, network


def build_run(folder: Path, members: Sequence[tuple[Any, str]], weights: Sequence[float]) -> Path:
    """Write a run of fitted baselines, as a search does; of one, an ordinary run."""
    entries, data = [], []
    for (config, name), weight in zip(members, weights, strict=True):
        dataset, _, network = fit(config, name)
        own = replace_model(config, network.model)
        entries.append(ensemble.NewMember(name, own, network.weights, weight))
        data.append(LoadedData(dataset, dataset.compute_fingerprint(), None))
    ensemble.build_from_weights(folder, "best", entries, data, {}, watch=None)
    return folder


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


@pytest.mark.parametrize(("case", "name"), ALL_CASES)
def test_numpy_computes_what_pytorch_computes(make_run, case, name):
    run = make_run(case, name)
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
    assert differences.max_rel < 1e-5


FORMATS = [
    ("onnx", {}),
    ("torch", {}),
    pytest.param("c", {}, marks=needs_compiler),
    pytest.param("c", {"int8": True}, marks=needs_compiler),
]


@pytest.mark.parametrize(("to", "options"), FORMATS)
@pytest.mark.parametrize(("case", "name"), ALL_CASES)
def test_an_export_computes_what_pytorch_computes(make_run, tmp_path, case, name, to, options):
    """The export itself compares every test window."""
    out = tmp_path / "export"
    written = slipstream.export(make_run(case, name), to=to, out=out, quiet=True, **options)
    assert written["parity"]["windows"] > 50
    assert written["parity"]["max_rel"] < (1.0 if options else 1e-5)
