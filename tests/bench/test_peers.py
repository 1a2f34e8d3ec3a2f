from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream import config as configs
from slipstream.bench import others, peers
from slipstream.bench.others import Way
from slipstream.data import dataset as datasets
from slipstream.engine.trial import Trial
from tests.bench.small import small_case

pytest.importorskip("lightning", reason="the peer is not installed")


def first_losses(case, way):
    timed = others.time_plain if way.framework == "plain" else others.time_lightning
    found = timed(case.config, case.dataset, way, warm_up=4, stretches=2, steps=2)
    assert len(found.times) == 2
    return found.losses[:4]


@pytest.mark.parametrize("kind", ["lstm", "gru", "mlp", "transformer"])
@pytest.mark.parametrize("framework", ["plain", "lightning"])
def test_others_do_the_same_work(kind, framework):
    """The same weights, batches, clipping and update: the losses of the first steps agree."""
    case = peers.alike(small_case(kind=kind, clip=0.1))
    trial = Trial(case.config, case.dataset, first=4)
    trial.close()
    found = first_losses(case, Way("", framework, "fp32", 0))
    assert found == pytest.approx(trial.first_losses, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop"])
def test_others_have_the_same_optimizer(optimizer):
    case = peers.alike(small_case(optimizer=optimizer))
    trial = Trial(case.config, case.dataset, first=4)
    trial.close()
    found = first_losses(case, Way("", "plain", "fp32", 0))
    assert found == pytest.approx(trial.first_losses, rel=1e-4)


def test_bidirectional_layers_are_the_same_network():
    case = small_case()
    model = case.config.model.model_copy(update={"bidirectional": True, "layers": 2})
    case = type(case)("small", case.config.model_copy(update={"model": model}), case.dataset)
    case = peers.alike(case)
    trial = Trial(case.config, case.dataset, first=4)
    trial.close()
    assert isinstance(others.network(case.config, case.dataset), others.PlainRecurrent)
    found = first_losses(case, Way("", "plain", "fp32", 0))
    assert found == pytest.approx(trial.first_losses, rel=1e-4)


def test_lightning_can_ask_for_the_precision_of_products():
    """In a fresh process and after ours; torch refuses where the two ways to set it disagree."""
    code = (
        "import torch; from slipstream import hardware; from slipstream.bench import others\n"
        "for precision in ('tf32', 'fp16', 'fp32', 'tf32'):\n"
        "    with others.settings_of(others.Way('', 'lightning', precision, 0)):\n"
        "        found = torch.get_float32_matmul_precision()\n"
        "        assert found == ('high' if precision == 'tf32' else 'highest'), found\n"
        "    for tf32 in (True, False):\n"
        "        with hardware.flags(threads=1, tf32=tf32): pass\n"
        "assert torch.backends.cuda.matmul.fp32_precision == 'none'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
    case = type(case)("job", config, datasets.load(config))
    outcome = peers.peers([case], [case], minutes=2.0, watch=lambda _, __: None, most_jobs=1)
    steps = [row for row in outcome.rows if row.case == "job"]
    assert {row.way.split(",")[0] for row in steps} == {
        *("plain loop", "Lightning at its best", "Lightning as people run it", "Slipstream"),
    }
    assert all(row.repeats for row in steps)
    apart = {row.way: row.more["losses_apart"] for row in steps}
    assert max(apart.values()) < 1e-3, apart
    jobs = [row for row in outcome.rows if row.case == "job, whole job"]
    assert len(jobs) == 5
    assert all(row.more["best_loss"] <= row.more["target_loss"] for row in jobs)
    losses = [row.more["best_loss"] for row in jobs]
    assert max(losses) == pytest.approx(min(losses), rel=0.02)
    assert "over Lightning at its best job" in outcome.headline
