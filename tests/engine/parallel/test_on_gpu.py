"""NCCL inside a captured step, with the one rank that a single GPU can have."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.parallel import join
from tests.conftest import close, small_config, small_dataset
from tests.engine.steps import run_steps


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_an_all_reduce_of_one_rank_changes_nothing(tmp_path, kind, capture):
    model = {"kind": kind, "layers": 2, "dropout": 0.2}
    engine = {"device": "cuda", "precision": "fp32"}
    train = {"accumulate": 2, "clip": 0.5}
    config = small_config(tmp_path, model=model, engine=engine, train=train)
    dataset = small_dataset(config)
    alone, weights = run_steps(config, dataset, steps=12, capture=capture)
    where = {"init_method": (tmp_path / "store").as_uri()}
    with join(0, 1, torch.device("cuda", 0), **where) as ranks:
        together, others = run_steps(config, dataset, steps=12, capture=capture, ranks=ranks)
    close(together, alone)
    for name in weights:
        close(others[name], weights[name], rel=1e-4)
