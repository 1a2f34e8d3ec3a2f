from __future__ import annotations

import pytest
import torch

from slipstream import UserError
from slipstream.base import machine
from slipstream.config import Config, Engine
from slipstream.engine.planning import (
    _refuse_own_kernels,
    does_building_pay,
    is_half_faster,
    make_plan,
)


def test_a_cpu_plan_explains_itself():
    chosen = make_plan(Config(engine=Engine(device="cpu")), data_bytes=12_000_000)
    assert (chosen.precision, chosen.capture, chosen.home) == ("fp32", False, "device")
    assert chosen.threads == machine.count_available_cores()
    assert chosen.reasons["home"].startswith("12.0 MB of series")
    assert set(chosen.to_dict()) >= {"device", "precision", "home", "capture", "threads", "reasons"}
    assert chosen.hardware["torch"] == torch.__version__


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_a_cpu_has_no_half_precision_of_that_kind(precision):
    with pytest.raises(UserError, match=f'"{precision}", which a CPU does not have'):
        make_plan(Config(engine=Engine(device="cpu", precision=precision)), data_bytes=0)


def test_a_cpu_cannot_capture():
    with pytest.raises(UserError, match=r"engine.capture is true, but steps are captured on CUDA"):
        make_plan(Config(engine=Engine(device="cpu", capture=True)), data_bytes=0)


def test_cuda_is_refused_by_name_where_there_is_none():
    if torch.cuda.is_available():
        with pytest.raises(UserError, match=r"has \d+ GPU"):
            make_plan(Config(engine=Engine(device="cuda:99")), data_bytes=0)
    else:
        with pytest.raises(UserError, match=r'engine.device is "cuda" but torch .*; use "cpu"'):
            make_plan(Config(engine=Engine(device="cuda")), data_bytes=0)


def test_flags_are_put_back():
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    with machine.set_flags(threads=before[0] + 1, tf32=True):
        assert torch.get_num_threads() == before[0] + 1
    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == before


def test_deterministic_kernels_are_asked_for_and_let_go():
    config = Config(engine=Engine(device="cpu", deterministic=True))
    with make_plan(config, data_bytes=0).flags():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("kind", "hidden", "batch", "pays"),
    [
        ("lstm", 128, 512, True),  # A
        ("lstm", 64, 256, False),  # B, LG HG2
        ("lstm", 128, 200, True),  # C
        ("lstm", 128, 64, True),  # ETTh1, 7 sequences a window
        ("lstm", 64, 512, True),
        ("lstm", [32, 128], 16, True),
        ("gru", 64, 256, False),
        ("transformer", 128, 512, False),
        ("mlp", 128, 512, False),
    ],
)
def test_recurrent_layers_are_taken_to_be_faster_in_fp16_from_a_size_on(kind, hidden, batch, pays):
    config = Config(model={"kind": kind, "hidden": hidden}, train={"batch": batch})
    assert is_half_faster(config) is pays


@pytest.mark.parametrize(
    "sections", [{"train": {"repeats": 4}}, {"data": {"split": {"walk_forward": 3}}}]
)
def test_recurrent_lanes_go_in_fp16(sections):
    assert is_half_faster(Config(model={"kind": "gru", "hidden": 16}, **sections))
    assert not is_half_faster(Config(model={"kind": "mlp", "hidden": 16}, **sections))


def test_our_own_kernels_are_refused_where_there_are_none():
    _refuse_own_kernels(512, None)
    with pytest.raises(UserError, match=r"model\.hidden is 513.*\"auto\""):
        _refuse_own_kernels(513, None)
    with pytest.raises(UserError, match="older"):
        _refuse_own_kernels(64, "the GPU is older than Turing")


def test_a_cpu_has_its_own_recurrent_layers_whatever_rnn_is_set_to():
    config = Config(model={"hidden": 200}, engine=Engine(device="cpu", rnn="slipstream"))
    assert make_plan(config, data_bytes=0).device.type == "cpu"


def test_own_kernels_are_built_for_shorter_runs_of_large_steps():
    assert not does_building_pay(1.6, windows=256, is_quick=False)
    assert does_building_pay(1.6, windows=4096, is_quick=False)
    assert does_building_pay(1.6, windows=256, is_quick=True)
    assert does_building_pay(0.6, windows=4096, is_quick=True)
    assert not does_building_pay(0.1, windows=4096, is_quick=True)
