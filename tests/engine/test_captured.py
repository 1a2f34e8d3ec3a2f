"""On a GPU: the captured step is the eager step."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager

import pyarrow as pa
import pytest
import torch

import slipstream
from slipstream.engine.capture import EAGER_FIRST, CapturedProgram
from tests.conftest import KINDS, close, small_config, small_dataset, waves
from tests.engine.steps import run_steps

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

STEPS = 200


def both(precision: str, **sections):
    config = small_config(
        engine={"device": "cuda", "precision": precision},
        train={"epochs": 40} | sections.pop("train", {}),
        **sections,
    )
    dataset = small_dataset(config, waves(900))
    eager = run_steps(config, dataset, steps=STEPS)
    return eager, run_steps(config, dataset, steps=STEPS, capture=True)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_captured_steps_equal_eager_ones_to_the_bit_in_fp32(kind, dropout):
    eager, captured = both(
        "fp32", model={"kind": kind, "hidden": 16, "layers": 2, "dropout": dropout}
    )
    assert eager[0] == captured[0]
    for name, weights in eager[1].items():
        assert torch.equal(weights, captured[1][name]), name


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_equal_eager_ones_in_every_precision(kind, precision):
    eager, captured = both(precision, model={"kind": kind, "hidden": 16, "layers": 2})
    close(captured[0], eager[0], rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "rmsprop"])
def test_every_optimizer_is_captured(optimizer, precision):
    eager, captured = both(precision, train={"optimizer": optimizer, "lr": 1e-2})
    close(captured[0], eager[0])
    assert sum(captured[0][-20:]) < sum(captured[0][:20])


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "quantile"])
def test_every_loss_is_captured(loss):
    eager, captured = both("fp32", train={"loss": loss})
    assert eager[0] == captured[0]


def test_accumulation_bidirection_patches_and_channels_are_captured():
    eager, captured = both(
        "fp32",
        data={"channels": "independent"},
        model={"bidirectional": True, "patch": 4, "pool": "attention", "normalize": "window"},
        train={"accumulate": 3},
    )
    assert eager[0] == captured[0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_carried_state_is_captured(kind, precision):
    """In buffers that stay where they are, in passes of two streams and over several epochs."""
    eager, captured = both(
        precision,
        model={"kind": kind, "hidden": 16, "layers": 2, "dropout": 0.2},
        train={"state": "carried", "batch": 2, "accumulate": 2},
    )
    if precision == "fp32":
        assert eager[0] == captured[0]
    close(captured[0], eager[0])


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_close_to_fp32(kind):
    (exact, _), _ = both("fp32", model={"kind": kind, "dropout": 0.0})
    for precision in ("tf32", "bf16", "fp16"):
        (rough, _), _ = both(precision, model={"kind": kind, "dropout": 0.0})
        close(rough, exact, rel=0.05)


def test_the_gpu_trains_as_the_cpu_does():
    sections = {"model": {"dropout": 0.0, "hidden": 16}, "train": {"epochs": 40}}
    on_cpu = small_config(**sections)
    on_gpu = small_config(engine={"device": "cuda", "precision": "fp32"}, **sections)
    table = waves(900)
    slow, _ = run_steps(on_cpu, small_dataset(on_cpu, table), steps=50)
    fast, _ = run_steps(on_gpu, small_dataset(on_gpu, table), steps=50, capture=True)
    close(fast, slow, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        *((name, precision) for name in ("adam", "adamw", "sgd") for precision in ("fp32", "fp16")),
        ("rmsprop", "fp32"),  # in fp16, eager, it has to ask for overflows: nothing of it is fused
    ],
)
@pytest.mark.parametrize("loss", ["mse", "quantile"])
def test_no_step_waits_for_the_device(optimizer, precision, loss):
    config = small_config(
        engine={"device": "cuda", "precision": precision},
        data={"static": ["k"], "future": ["b"]},
        train={"optimizer": optimizer, "loss": loss, "accumulate": 2},
    )
    table = waves(900).append_column("k", pa.array([1.0] * 900))
    config = config.model_copy(update={"data": config.data.model_copy(update={"scale": "none"})})
    dataset = small_dataset(config, table)
    run_steps(config, dataset, steps=2)  # what happens once may wait
    run_steps(config, dataset, steps=3, around=no_waiting)


@contextmanager
def no_waiting():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run_is_the_same_captured_or_eager(kind, tmp_path):
    sections = {"model": {"kind": kind, "layers": 2}, "train": {"epochs": 6}}
    captured, eager = (
        slipstream.train(
            small_config(
                tmp_path,
                engine={"device": "cuda", "precision": "fp32", "capture": capture},
                **sections,
            ),
            waves(3000),
        )
        for capture in (True, False)
    )
    assert captured.summary["plan"]["capture"] is True
    assert captured.metrics == eager.metrics
    assert captured.baselines == eager.baselines
    slipstream.report(captured.run)
    on_cpu = slipstream.evaluate(captured.run, waves(3000), overrides=("engine.device=cpu",))
    on_gpu = slipstream.evaluate(captured.run, waves(3000))
    assert on_cpu["metrics"]["mae"] == pytest.approx(on_gpu["metrics"]["mae"], rel=1e-4)


def test_garbage_with_a_graph_in_it_does_not_end_a_recording():
    device, x = torch.device("cuda"), torch.zeros(4, device="cuda")

    def program() -> None:
        _ = [[i] for i in range(1000)]  # enough for a collection
        x.add_(1)

    before = gc.get_threshold()
    gc.set_threshold(100)
    try:
        for _ in range(3):
            made = CapturedProgram(program, device)
            for _ in range(EAGER_FIRST + 2):
                made()
            assert made.failure is None
            made.cycle = made  # only a collection can free its graph
    finally:
        gc.set_threshold(*before)
    assert x.tolist() == [3.0 * (EAGER_FIRST + 2)] * 4
