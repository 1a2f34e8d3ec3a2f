"""Training on a CPU with our kernels in C: PyTorch's numbers, exact where it counts."""

from __future__ import annotations

import signal

import pytest

import slipstream
from slipstream import Interrupted, runs, training
from slipstream.engine import planning
from slipstream.engine.planning import make_plan
from slipstream.kernels import find_library
from tests.conftest import close, merged, slow, small_config, small_dataset, waves
from tests.engine.lanes.test_pack import BASE, MIXED, lanes_of, packed, same_as_alone, train
from tests.engine.steps import make_task, run_steps
from tests.logs import as_lines

pytestmark = pytest.mark.usefixtures("native_kernels")
OWN, TORCH = ({"engine": {"rnn": name}} for name in ("slipstream", "torch"))
MODELS = (
    {"kind": "lstm", "hidden": [12, 7], "layers": 2, "dropout": 0.2},
    {"kind": "gru", "layers": 2, "bidirectional": True, "pool": "attention"},
    {"kind": "gru", "patch": 4, "layers": 3, "layer_norm": True},
    {"kind": "lstm", "bidirectional": True, "pool": "last"},
)


@pytest.mark.parametrize("model", MODELS)
def test_the_steps_are_those_of_torch(model):
    sections = {"model": model, "train": {"accumulate": 2, "batch": 20}}
    config = small_config(**merged(sections, OWN))
    assert make_plan(config, data_bytes=0).native_kernels == ["rnn_forward", "rnn_backward"]
    dataset = small_dataset(config)
    losses, weights = run_steps(config, dataset, steps=12)
    other = small_config(**merged(sections, TORCH))
    assert not make_plan(other, data_bytes=0).native_kernels
    wanted, reference = run_steps(other, dataset, steps=12)
    close(losses, wanted)
    weights.pop("core.pool.score.bias", None)  # softmax cancels it: its gradient is rounding alone
    for name, weight in weights.items():
        close(weight, reference[name], rel=1e-4)


@pytest.mark.parametrize("mode", ["together", slow("branches")])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_lanes_are_the_models_alone(kind, mode):
    common = {
        "model": BASE["model"] | {"kind": kind},
        "engine": {"rnn": "slipstream", "threads": 2},
    }
    dataset = small_dataset()
    lanes = lanes_of(MIXED, dataset, **common)
    pack = packed(lanes, dataset, mode)
    losses = train(pack, steps=12)
    assert pack.kernels() == ["rnn_forward", "rnn_backward"]
    same_as_alone(lanes, dataset, pack, losses)
    pack.close()


def test_smaller_passes_and_threads_give_the_same_numbers():
    config = small_config(**merged(OWN, {"train": {"batch": 64}}))
    dataset = small_dataset(config)
    whole, _ = run_steps(config, dataset, steps=6)
    close(run_steps(config, dataset, steps=6, batch=16)[0], whole)
    threaded = small_config(**merged(OWN, {"train": {"batch": 64}, "engine": {"threads": 2}}))
    assert run_steps(threaded, dataset, steps=6)[0] == whole


def test_kernels_that_are_built_are_the_rule_where_they_can_do_the_job():
    assert find_library() is not None
    assert make_plan(small_config(), data_bytes=0).native_kernels
    for engine in ({"precision": "bf16"}, {"recompute": True}, {"rnn": "torch"}, {"rnn": "cudnn"}):
        assert not make_plan(small_config(engine=engine), data_bytes=0).native_kernels
    assert not make_plan(small_config(model={"kind": "mlp"}), data_bytes=0).native_kernels


def test_a_measured_plan_compares_them_with_torch_and_names_what_ran(tmp_path):
    config = small_config(
        tmp_path, engine={"plan": "measure"}, train={"epochs": 100_000}, model={"hidden": 32}
    )
    rules = make_plan(config, data_bytes=0)
    decided = planning.choose_plan(make_task(config, small_dataset(config), rules), rules)
    assert "rnn = torch" in [item["candidate"] for item in decided.evidence]
    assert decided.kernels == decided.native_kernels


@pytest.mark.parametrize("train", [{}, {"objective": "masked"}], ids=["forecast", "masked"])
def test_a_run_resumed_after_its_last_step_is_scored_by_the_same_layers(tmp_path, train):
    def interrupt(event):
        if event["event"] == "scoring":
            signal.raise_signal(signal.SIGINT)

    sections = merged(OWN, {"train": train})
    config, table = small_config(tmp_path / "cut", **sections), waves()
    whole = slipstream.train(small_config(tmp_path / "whole", **sections), table)
    with pytest.raises(Interrupted):
        training.train(config, table, watch=as_lines(interrupt))
    resumed = slipstream.train(None, table, resume=runs.find_last(tmp_path / "cut"))
    assert resumed.summary["metrics"] == whole.summary["metrics"]
