"""On a GPU: homes, recurrent calls, switches, recoveries and the plan."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

import slipstream
from slipstream import runs, training
from slipstream.base import machine
from slipstream.config import Model, Signature
from slipstream.config.model import SPECS
from slipstream.data import dataset as datasets
from slipstream.engine import loop, optim, planning, recovery
from slipstream.engine.lanes import EpochStart
from slipstream.engine.planning import MAX_OWN_HIDDEN, WORTHWHILE_RATIO, make_plan
from slipstream.engine.single import SingleProgram
from slipstream.models.forecaster import OWN_KERNELS, build, set_execution
from slipstream.tools.bench.cases import get_preset
from tests.conftest import HUNG_S, KINDS, close, small_config, small_dataset, waves
from tests.engine.steps import make_task, run_steps
from tests.labelled import NAMES, class_config, states
from tests.logs import as_lines, read_lines
from tests.training.test_resume import ended, interrupted

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)


def cuda_config(tmp_path="runs", *, engine=None, **sections):
    wanted = {"device": "cuda", "precision": "fp32"} | (engine or {})
    return small_config(tmp_path, engine=wanted, **sections)


@pytest.mark.parametrize("algorithm", ["cudnn", "cudnn-standard"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("hidden", [[24], [24, 24], [24, 24, 24], [24, 16]])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_cudnn_from_one_buffer_is_the_module_itself(kind, hidden, bidirectional, algorithm):
    """Values and gradients as on the CPU, and not a word about scattered weights."""
    model = Model(kind=kind, hidden=tuple(hidden), bidirectional=bidirectional, dropout=0.0)
    names = ("a", "b", "c")
    signature = Signature(
        inputs=names,
        targets=names,
        static=(),
        shared=3,
        context=20,
        horizon=4,
        channels="together",
        quantiles=(),
        step=None,
    )
    torch.manual_seed(0)
    on_cpu = build(model, signature)
    on_gpu = build(model, signature)
    on_gpu.load_state_dict(on_cpu.state_dict())
    on_gpu.to(DEVICE)
    set_execution(on_gpu, algorithms=(algorithm,) * len(hidden), recompute=False, compiled=False)
    inputs = torch.randn(20, 9, 3)
    with machine.set_flags(threads=1, tf32=False):
        wanted, found = on_cpu(inputs, None), on_gpu(inputs.to(DEVICE), None)
        wanted.square().sum().backward()
        found.square().sum().backward()
    close(found.detach().cpu(), wanted.detach(), rel=1e-4)
    for (name, mine), theirs in zip(on_gpu.named_parameters(), on_cpu.parameters(), strict=True):
        assert mine.grad is not None, name
        close(mine.grad.cpu(), theirs.grad, rel=2e-3)


SHAPES = {
    "plain": {},
    "independent": {"data": {"channels": "independent"}},
    "accumulate": {"train": {"accumulate": 3, "batch": 17}},
}


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("home", ["host", "loader"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_home_gives_the_same_bits(shape, home, capture):
    sections = {"model": {"kind": "gru"}, **SHAPES[shape]}
    dataset = small_dataset(cuda_config(**sections), waves(900))
    wanted = run_steps(cuda_config(**sections), dataset, steps=60, capture=capture)
    other = cuda_config(engine={"home": home, "workers": 2}, **sections)
    found = run_steps(other, dataset, steps=60, capture=capture)
    assert wanted[0] == found[0]
    assert all(torch.equal(wanted[1][name], found[1][name]) for name in wanted[1])


@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
def test_a_captured_step_of_classes_gives_the_same_bits(loss):
    train = {"loss": loss, "class_weights": [1.0, 2.0, 0.5], "label_smoothing": 0.1}
    engine = {"device": "cuda", "precision": "fp32"}
    config = class_config(model={"kind": "gru", "hidden": 16}, train=train, engine=engine)
    dataset = datasets.load_dataset(config, states(900))
    wanted = run_steps(config, dataset, steps=40, capture=False)
    found = run_steps(config, dataset, steps=40, capture=True)
    assert wanted[0] == found[0]
    assert all(torch.equal(wanted[1][name], found[1][name]) for name in wanted[1])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_classes_are_told_apart_by_lanes(tmp_path, precision):
    config = class_config(
        tmp_path,
        model={"kind": "gru", "hidden": 32},
        train={"repeats": 3, "class_weights": "balanced"},
        engine={"device": "cuda", "precision": precision},
    )
    result = slipstream.train(config, states(3000, stay=60))
    assert all(
        lane["metrics"]["test"]["balanced_accuracy"] > 0.8 for lane in result.summary["lanes"]
    )
    likely = slipstream.predict(result.run, states(100, seed=1), ensemble=True)
    total = sum(likely[f"p_{name}"].to_numpy() for name in NAMES)
    np.testing.assert_allclose(total, 1, atol=1e-5)


@pytest.mark.parametrize(
    "engine",
    [
        {"steps_per_graph": 4},
        {"set_to_none": False},
        {"fused": False},
        {"recompute": True},
        {"cudnn_benchmark": True},
        {"non_blocking": False, "pinned": False, "home": "host"},
        {"rnn": "torch"},
    ],
    ids=lambda engine: "-".join(engine),
)
@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_no_switch_changes_the_numbers(kind, engine):
    sections = {"model": {"kind": kind, "layers": 2, "dropout": 0.0}}
    dataset = small_dataset(cuda_config(**sections), waves(900))
    wanted, _ = run_steps(cuda_config(**sections), dataset, steps=50, capture=True)
    found, _ = run_steps(cuda_config(engine=engine, **sections), dataset, steps=50, capture=True)
    close(found, wanted, rel=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch.compile has several to say
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_compiled_models_give_the_same_losses(kind):
    sections = {"model": {"kind": kind, "dropout": 0.0}}
    dataset = small_dataset(cuda_config(**sections), waves(900))
    wanted, _ = run_steps(cuda_config(**sections), dataset, steps=30, capture=True)
    compiled = cuda_config(engine={"compile": True}, **sections)
    found, _ = run_steps(compiled, dataset, steps=30, capture=True)
    close(found, wanted, rel=1e-4)


@pytest.mark.parametrize("preset", ["baseline", "classic"])
def test_presets_train_the_same_model(preset, tmp_path):
    sections = {"train": {"epochs": 4}, "model": {"dropout": 0.0}}
    ours = slipstream.train(cuda_config(tmp_path, **sections), waves(900))
    engine = get_preset(preset, on_gpu=True) | {"workers": 2}
    theirs = slipstream.train(cuda_config(tmp_path, engine=engine, **sections), waves(900))
    assert theirs.summary["plan"]["home"] == "loader"
    assert theirs.metrics["test"]["mae"] == pytest.approx(ours.metrics["test"]["mae"], rel=0.02)


def test_real_memory_that_runs_out_is_survived_with_the_same_losses(tmp_path):
    sections = {
        "data": {"context": 200, "horizon": 1},
        "model": {"kind": "gru", "hidden": 128, "layers": 2, "dropout": 0.0},
        "train": {"epochs": 1, "batch": 4096, "clip": 1.0},
    }
    table = waves(12_000)

    def losses():
        config = cuda_config(tmp_path, engine={"log_every": 1}, **sections)
        seen = []
        result = training.train(config, table, watch=as_lines(seen.append))
        del result
        gc.collect()
        torch.cuda.empty_cache()
        return [e["loss"] for e in seen if e["event"] == "log"], [
            e for e in seen if e["event"] == "recovery"
        ]

    calm, none = losses()
    assert not none
    assert torch.cuda.memory_reserved(DEVICE) < 100e6  # a run gives back what it took
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    allowed = torch.cuda.memory_reserved(DEVICE) + 2e9
    torch.cuda.set_per_process_memory_fraction(allowed / total, DEVICE)
    try:
        found, recoveries = losses()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    assert recoveries
    assert "out of memory" in recoveries[0]["what"]
    close(found, calm, rel=1e-3)


def test_memory_does_not_grow_over_many_recoveries(tmp_path):
    config = cuda_config(
        tmp_path,
        train={"batch": 64, "epochs": 1},
        model={"kind": "linear"},
        engine={"capture": False},
    )
    dataset = small_dataset(config)
    gc.collect()
    gc.freeze()
    chosen = make_plan(config, data_bytes=0)
    task = make_task(config, dataset, chosen, runs.create_run("t", out=str(tmp_path)))
    program, lane = SingleProgram(task, chosen), task.build_lane()
    program.put(0, lane)
    sizes = []
    for i in range(200):
        program.begin({0: EpochStart()})
        for _ in range(5):
            program.advance()
        if program.step.micro_batch > 1:
            program._halve("injected")
        else:
            program.plan = chosen
            program.put(0, lane)
        if i >= 20:
            torch.cuda.synchronize()
            recovery.free_memory()  # cuBLAS's workspaces, which a put keeps and a halving does not
            sizes.append(torch.cuda.memory_allocated(DEVICE))
    gc.unfreeze()
    assert max(sizes) - min(sizes[:20]) < 4e6


def test_a_poisoned_fp16_run_leaves_fp16(tmp_path):
    config = cuda_config(
        tmp_path, engine={"precision": "fp16", "log_every": 2}, train={"epochs": 5}
    )
    dataset = small_dataset(config, waves(900))
    chosen = make_plan(config, data_bytes=0)
    spoilt = []

    def spoil(event):
        """Poison the weights in the middle of the third epoch, once."""
        if event["event"] == "log" and event["epoch"] > 2 and not spoilt:
            spoilt.append(event["step"])
            with torch.no_grad():
                task.model.core.head.linear.bias.fill_(torch.nan)

    run = runs.create_run("t", out=str(tmp_path), watch=as_lines(spoil))
    task = make_task(config, dataset, chosen, run)
    with chosen.flags():
        fit = loop.fit_single(task, chosen)
    (result,) = fit.lanes
    found = [event for event in read_lines(run) if event["event"] == "recovery"]
    assert [event["remedy"] for event in found] == ["fp32 instead of fp16"]
    assert found[0]["step"] < spoilt[0]
    assert fit.plan.precision == "fp32"
    assert result.stop_reason == "all epochs done"
    assert torch.isfinite(task.model.core.head.linear.bias).all()


@pytest.mark.parametrize("hidden", [520, 160, 64])
def test_the_plan_measures_and_tells(hidden, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    draw = np.random.default_rng(0)
    table = pa.table({f"x{i}": draw.standard_normal(40_000) for i in range(4)})
    config = small_config(
        tmp_path,
        data={"time": None, "context": 100, "horizon": 1, "targets": ["x0"]},
        model={"kind": "lstm", "hidden": hidden, "layers": 1},
        train={"epochs": 10_000, "batch": 512},
        engine={"device": "cuda", "plan": "measure"},
    )
    dataset = small_dataset(config, table)
    chosen = make_plan(config, data_bytes=dataset.data_bytes)
    decided = planning.choose_plan(make_task(config, dataset, chosen), chosen)
    names = {item["candidate"] for item in decided.evidence if "ms" in item}
    assert {"rules of thumb", "precision = fp32", "precision = tf32"} <= names
    assert {"rnn = cudnn-standard", "fused = False", "capture = False"} <= names
    fastest = min(item["ms"] for item in decided.evidence if "ms" in item)
    assert decided.ms_per_step <= fastest / WORTHWHILE_RATIO
    assert ("rnn = cudnn" in names) == (hidden <= MAX_OWN_HIDDEN)
    assert decided.rnn != ("slipstream",) or hidden <= MAX_OWN_HIDDEN
    persistent = any("Persist" in name for name in decided.kernels)
    wide = hidden > MAX_OWN_HIDDEN  # where cuDNN has no such kernel
    assert wide or persistent == (decided.rnn == ("cudnn",))


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_is_found(kind, tmp_path):
    config = small_config(
        tmp_path,
        model={"kind": kind},
        train={"batch": "auto", "epochs": 1},
        engine={"device": "cuda", "plan": "off"},
    )
    result = slipstream.train(config, waves(9000))
    assert "the most that fit" in result.summary["plan"]["reasons"]["batch"]
    assert result.summary["steps"] >= 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_stopped_run_ends_as_the_unbroken_one(tmp_path, kind, precision, deterministic):
    sections = {"model": {"kind": kind, "layers": 2, "dropout": 0.2}}
    engine = {"precision": precision, "deterministic": deterministic}
    engine |= {"device": "cuda", "log_every": 4, "checkpoint_minutes": 1e-9}
    table = waves(600)

    def configured(name):
        return small_config(tmp_path / name, engine=engine, train={"epochs": 4}, **sections)

    wanted = ended(runs.open_run(slipstream.train(configured("a"), table).run))
    for step in (2, 9, 20):
        run = interrupted(configured(f"b{step}"), table, step)
        slipstream.train(data=table, resume=run.folder)
        assert ended(run)[:2] == wanted[:2]


def test_twenty_kills_on_the_gpu():
    """Whole processes, killed at random and resumed: captured steps, fp32 and fp16."""
    command = [sys.executable, "-m", "tests.soak", "--gpu"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "0 lost, 0 wrong, 20 tried" in found.stdout


def test_kernels_of_ours_that_fail_are_left_for_cudnn(tmp_path, monkeypatch):
    from slipstream.kernels.cuda import rnn

    config = cuda_config(
        tmp_path, model={"kind": "lstm", "hidden": 32}, engine={"precision": "fp16"}
    )
    dataset = small_dataset(config)
    plan = make_plan(config, data_bytes=0)
    run = runs.create_run("own", out=str(tmp_path))
    plan = replace(plan, rnn=(OWN_KERNELS,) * len(plan.rnn))
    task = make_task(config, dataset, plan, run)

    def refuse(*_, **__):
        raise ValueError("out of resource: shared memory")

    monkeypatch.setattr(rnn, "launch_program", refuse)
    result = loop.fit_single(task, plan)
    assert result.plan.rnn == ("cudnn",) * len(plan.rnn)
    assert "shared memory" in result.plan.reasons["rnn"]
    assert any(event["event"] == "fallback" for event in read_lines(run))
    assert result.lanes[0].weights


def draw_job(number):
    """Draw the settings of a small job; the first one skipped most of its updates in fp16."""
    if number == 0:
        model = {"kind": "lstm", "hidden": [130, 48], "layers": 2, "dropout": 0.1}
        return {"data": {"context": 96}, "model": model, "train": {"batch": 64}}
    draw = np.random.default_rng(number)
    kind, pick = str(draw.choice(KINDS)), draw.choice
    sizes = [8, 24, 48, 64, 96, 128] if SPECS[kind].has_one_width else [7, 32, 48, 100, 130]
    model = {
        "kind": kind,
        "hidden": int(pick(sizes)),
        "layers": int(pick([1, 2])),
        "heads": 4,
        "dropout": float(pick([0.0, 0.1])),
        "normalize": str(pick(["none", "last", "window"])),
    }
    if kind in ("lstm", "gru"):
        model["bidirectional"] = bool(pick([False, True]))
    return {
        "data": {"context": int(pick([16, 48, 96])), "horizon": int(pick([0, 4, 24]))},
        "model": model,
        "train": {
            "batch": int(pick([16, 64, 256])),
            "loss": str(pick(["mse", "mae", "huber"])),
            "lr": float(pick([1e-3, 3e-3])),
            "clip": "off" if draw.random() < 0.5 else 1.0,
        },
    }


PRECISIONS = {
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16 with cuDNN": {"precision": "fp16", "rnn": "cudnn"},
    "fp16 with our kernels": {"precision": "fp16", "rnn": "slipstream"},
}


@pytest.mark.parametrize("how", PRECISIONS)
@pytest.mark.parametrize("number", range(24))
def test_random_jobs_follow_fp32_over_their_first_steps_in_every_precision(number, how):
    """No update is lost: fp16 used to skip those whose gradients overflowed."""
    sections = draw_job(number)
    if sections["data"].get("horizon") == 0:
        sections["data"] |= {"inputs": ["a", "b"], "targets": ["c"]}
    config = cuda_config(**sections)
    dataset = small_dataset(config, waves(1800))
    wanted, _ = run_steps(config, dataset, steps=50, capture=True)
    engine = PRECISIONS[how] if config.model.spec.is_recurrent else {"precision": how.split()[0]}
    found, _ = run_steps(cuda_config(engine=engine, **sections), dataset, steps=50, capture=True)
    close(found, wanted, rel=0.03)  # tf32 is up to 0.024 apart


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_short_job_in_fp16_ends_where_fp32_does(tmp_path, repeats):
    sections = draw_job(0)
    sections["train"] |= {"epochs": 2, "repeats": repeats}
    losses = {}
    for how in ("fp32", "fp16"):
        engine = {"precision": how, "rnn": "cudnn"}
        config = cuda_config(tmp_path / how, engine=engine, **sections)
        result = slipstream.train(config, waves(1800))
        events = read_lines(runs.Run(result.run))
        losses[how] = [e["val_loss"] for e in events if e["event"] == "epoch"]
        assert result.summary["repeated_steps"] >= 0
    close(losses["fp16"], losses["fp32"], rel=0.015)


@pytest.mark.parametrize("home", ["host", "loader"])
def test_steps_that_overflow_are_repeated_with_the_same_windows(home, monkeypatch):
    """Also where these come from the host; and several steps to a graph are for the device only."""
    monkeypatch.setattr(optim, "FIRST_SCALE", 2.0**30)
    sections = {"model": {"kind": "lstm", "hidden": 24}, "train": {"batch": 64}}
    half = {"precision": "fp16", "rnn": "cudnn", "steps_per_graph": 4}
    dataset = small_dataset(cuda_config(**sections), waves(900))
    wanted, _ = run_steps(cuda_config(engine=half, **sections), dataset, steps=30, capture=True)
    other = cuda_config(engine=half | {"home": home, "workers": 2}, **sections)
    found, _ = run_steps(other, dataset, steps=30, capture=True)
    assert found == wanted
