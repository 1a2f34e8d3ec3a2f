from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream import config as configs
from slipstream.data import dataset as datasets
from slipstream.engine.planning import TrainingWorkload
from slipstream.tools.bench import frameworks, peers
from slipstream.tools.bench.frameworks import PeerSettings, StepTimings
from tests.conftest import slow
from tests.tools.bench.small import small_case

pytest.importorskip("lightning", reason="the peer is not installed")


def first_losses(case, peer):
    is_plain = peer.framework == "plain"
    time_steps = frameworks.time_plain_steps if is_plain else frameworks.time_lightning_steps
    found = time_steps(case.config, case.dataset, peer, warm_up=4, repeats=2, steps=2)
    assert len(found.times) == 2
    return found.losses[:4]


@pytest.mark.parametrize("kind", ["lstm", slow("gru"), "mlp", slow("transformer")])
@pytest.mark.parametrize("framework", ["plain", "lightning"])
def test_others_do_the_same_work(kind, framework):
    """The same weights, batches, clipping and update: the losses of the first steps agree."""
    case = peers.make_comparable(small_case(kind=kind, clip=0.1))
    trial = TrainingWorkload(case.config, case.dataset, first=4)
    trial.close()
    found = first_losses(case, PeerSettings("", framework, "fp32", 0))
    assert found == pytest.approx(trial.first_losses, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", slow("sgd"), slow("rmsprop")])
def test_others_have_the_same_optimizer(optimizer):
    case = peers.make_comparable(small_case(optimizer=optimizer))
    trial = TrainingWorkload(case.config, case.dataset, first=4)
    trial.close()
    found = first_losses(case, PeerSettings("", "plain", "fp32", 0))
    assert found == pytest.approx(trial.first_losses, rel=1e-4)


@pytest.mark.slow
def test_bidirectional_layers_are_the_same_network():
    case = small_case()
    model = case.config.model.model_copy(update={"bidirectional": True, "layers": 2})
    case = type(case)("small", case.config.model_copy(update={"model": model}), case.dataset)
    case = peers.make_comparable(case)
    trial = TrainingWorkload(case.config, case.dataset, first=4)
    trial.close()
    assert isinstance(
        frameworks.build_network(case.config, case.dataset), frameworks.PlainRecurrent
    )
    found = first_losses(case, PeerSettings("", "plain", "fp32", 0))
    assert found == pytest.approx(trial.first_losses, rel=1e-4)


@pytest.mark.slow
def test_lightning_can_ask_for_the_precision_of_products():
    """In a fresh process and after ours; torch refuses where the two ways to set it disagree."""
    code = (
        "import torch; from slipstream.base import machine\n"
        "from slipstream.tools.bench import frameworks\n"
        "for precision in ('tf32', 'fp16', 'fp32', 'tf32'):\n"
        "    with frameworks.apply_flags(frameworks.PeerSettings('', 'lightning', precision, 0)):\n"
        "        found = torch.get_float32_matmul_precision()\n"
        "        assert found == ('high' if precision == 'tf32' else 'highest'), found\n"
        "    for tf32 in (True, False):\n"
        "        with machine.set_flags(threads=1, tf32=tf32): pass\n"
        "assert torch.backends.cuda.matmul.fp32_precision == 'none'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def compared(name, precision, losses, **ours):
    held = {"fp32": [1.45, 2.44, 1.09]} | ours
    return peers.compare_losses(name, StepTimings([1.0], losses, precision), held)


SKIPPED = [1.45, 2.44, 2.67]
"""Of another tool in fp16 whose second update overflowed, and was skipped"""
HALF = [1.45, 2.43, 1.09]
"""Ours: an update that overflows is repeated"""


def test_a_step_that_others_skip_in_fp16_is_the_same_work():
    others_way = compared("Lightning at its best, fp16", "fp16", SKIPPED, fp16=HALF)
    assert others_way["same_work"]
    assert others_way["held_against"] == HALF[:1]  # before any update
    our_preset = compared("Slipstream, classic", "fp16", HALF, fp16=HALF)
    assert our_preset["same_work"]
    our_fp16 = compared("Slipstream, fp16", "fp16", HALF, fp16=HALF)
    assert our_fp16["same_work"]
    assert our_fp16["held_against"] == [1.45, 2.44, 1.09]  # those of fp32


@pytest.mark.parametrize(
    ("name", "precision", "losses"),
    [
        ("Lightning at its best, fp16", "fp16", [1.52, 2.44, 1.09]),
        ("plain loop, tf32", "tf32", [1.45, 2.44, 1.2]),
        ("Slipstream, tf32", "tf32", [1.45, 2.6, 1.09]),
        ("Slipstream, fp16", "fp16", SKIPPED),
        ("Slipstream, baseline", "fp32", [1.45, 2.44, 1.2]),
    ],
)
def test_other_losses_are_not_the_same_work(name, precision, losses):
    ours = {"fp16": HALF, "tf32": [1.45, 2.44, 1.09]}
    assert not compared(name, precision, losses, **ours)["same_work"]


def test_where_our_own_precision_failed_fp32_is_held_against():
    assert compared("plain loop, bf16", "bf16", [1.45, 2.43, 1.09])["same_work"]
    found = compared("plain loop, fp16", "fp16", SKIPPED)
    assert found["same_work"]
    assert found["held_against"] == [1.45]


@pytest.mark.slow
def test_steps_and_a_whole_job_beside_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {
        "name": "job",
        "data": {"path": "simulated:cell", "time": "time_s", "id": "cell"}
        | {"inputs": ["voltage_V"], "targets": ["soc_percent"], "context": 20, "horizon": 0}
        | {"stride": 40, "split": {"by": "set", "val": ["val"], "test": ["test"]}},
        "model": {"kind": "mlp", "hidden": [8], "layers": 1, "dropout": 0.0},
        "train": {"epochs": 2, "batch": 64},
    }
    config = configs.load(settings)
    case = small_case()
    case = type(case)("job", config, datasets.load_dataset(config))
    outcome = peers.compare_with_peers(
        [case], [case], minutes=2.0, watch=lambda _, __: None, max_rounds=1
    )
    steps = [row for row in outcome.rows if row.case == "job"]
    assert {row.variant.split(",")[0] for row in steps} == {
        *("plain loop", "Lightning at its best", "Lightning as people run it", "Slipstream"),
    }
    assert all(row.repeats for row in steps)
    apart = {row.variant: row.extra["losses_apart"] for row in steps}
    assert max(apart.values()) < 1e-3, apart
    assert {row.extra["precision"] for row in steps} == {"fp32"}
    assert "with its fp32." in outcome.tables[0].note
    jobs = [row for row in outcome.rows if row.case == "job, whole job"]
    assert len(jobs) == 5
    assert all(row.extra["best_loss"] <= row.extra["target_loss"] for row in jobs)
    losses = [row.extra["best_loss"] for row in jobs]
    assert max(losses) == pytest.approx(min(losses), rel=0.02)
    assert "over Lightning at its best job" in outcome.headline
