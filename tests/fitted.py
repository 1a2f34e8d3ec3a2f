"""Runs whose models are fitted baselines, as `slipstream auto` writes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.data.dataset import Dataset, load_dataset
from slipstream.scoring import baselines
from slipstream.search import ensemble
from slipstream.search.candidates import replace_model
from slipstream.training.trained_lanes import LoadedData


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
    ensemble.build_from_weights(folder, "best", entries, data, [], best=0, watch=None)
    return folder
