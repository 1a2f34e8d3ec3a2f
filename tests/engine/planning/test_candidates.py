from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.config import Config
from slipstream.engine import planning
from slipstream.engine.planning import make_plan


def test_layers_of_their_own_size_may_each_have_their_algorithm():
    chosen = make_plan(Config(model={"hidden": [8, 16]}, engine={"device": "cpu"}), data_bytes=0)
    first, second = planning.list_cudnn_algorithms([8, 16])
    assert chosen.rnn == ("torch", "torch")
    chosen = replace(chosen, rnn=first.change(chosen))
    assert chosen.rnn == ("cudnn-standard", "torch")
    assert second.change(chosen) == ("cudnn-standard", "cudnn-standard")
    (both,) = planning.list_cudnn_algorithms([8, 8])
    assert both.change(chosen) == ("cudnn-standard", "cudnn-standard")


def test_pytorch_is_tried_first_where_our_own_kernels_are_the_start():
    config = Config(model={"hidden": [8, 16]}, engine={"device": "cpu"})
    chosen = make_plan(config, data_bytes=0)
    own = replace(chosen, rnn=("slipstream", "slipstream"))
    first = next(planning.list_candidates(config, own))
    assert (first.name, first.change(own)) == (
        "rnn = torch",
        ("torch", "torch"),
    )
    assert next(planning.list_candidates(config, chosen)).setting != "rnn"
    layers = [one.change(own) for one in planning.list_cudnn_algorithms([8, 16])]
    assert layers == [("cudnn-standard", "torch"), ("torch", "cudnn-standard")]
    assert planning.get_rnn_override("tf32", own) == {"rnn": ("torch", "torch")}
    assert not planning.get_rnn_override("fp16", own)
    assert not planning.get_rnn_override("tf32", chosen)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), ["fp32", "fp16"]), ((8, 6), ["fp32", "tf32", "fp16", "bf16"])],
    ids=["Turing", "Ampere"],
)
def test_a_gpu_is_offered_the_precisions_that_it_has(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    config = Config(model={"kind": "mlp"})
    plan = make_plan(Config(model={"kind": "mlp"}, engine={"device": "cpu"}), data_bytes=0)
    hardware = plan.hardware | {"gpu": "Tesla T4"}
    plan = replace(plan, device=torch.device("cuda"), hardware=hardware, precision="none")
    every = planning.list_candidates(config, plan)
    names = [one.change(plan) for one in every if one.setting == "precision"]
    assert names == expected
