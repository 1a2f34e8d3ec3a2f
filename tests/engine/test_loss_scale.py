"""fp16: a step whose gradients overflow is repeated at a smaller loss scale, so none is lost.

A CPU has no fp16 of its own, but runs it well enough to overflow.
"""

from __future__ import annotations

import math
import signal
from dataclasses import replace

import pytest
import torch

from slipstream import runs
from slipstream.base.signals import catch_signals
from slipstream.engine import checkpoint as checkpoints
from slipstream.engine import lanes as engine_lanes
from slipstream.engine import loop, optim, planning
from slipstream.engine import pack as packs
from slipstream.engine import state as states
from slipstream.engine.events import LaneEvents
from slipstream.engine.lanes import Lane
from slipstream.engine.pack import compute_capacity
from slipstream.engine.planning import make_plan
from slipstream.engine.single import SingleProgram
from tests.conftest import close, small_config, small_dataset
from tests.engine.steps import make_task
from tests.logs import as_lines, read_lines

FINE, HUGE = 2.0**10, 2.0**40
"""Loss scales to begin with: no gradient overflows, and all of them do until it is halved often"""
MODEL = {"kind": "mlp", "hidden": 8, "layers": 1, "dropout": 0.0}


@pytest.fixture
def scale(monkeypatch):
    return lambda value: monkeypatch.setattr(optim, "FIRST_SCALE", value)


def make_half_plan(config):
    return replace(make_plan(config, data_bytes=0), precision="fp16")


def fit(tmp_path, watch=None, resume=None, **sections):
    """Train one model in fp16, or what is left of it; return the result and its run."""
    sections = {"model": MODEL, "engine": {"log_every": 4}} | sections
    config = small_config(tmp_path, **sections)
    chosen = make_half_plan(config)
    run = resume or runs.create_run("half", out=str(tmp_path), watch=as_lines(watch))
    task = make_task(config, small_dataset(config), chosen, run)
    with chosen.flags(), catch_signals() as stop:
        lane, events = task.build_lane(), LaneEvents(run, single=True)
        build = lambda _: SingleProgram(task, chosen)  # noqa: E731
        if resume:
            saved, _ = checkpoints.read_newest(run)
            state = states.restore(saved, [lane], build, events)
        else:
            state = states.start([lane], build, events, num_places=1)
        return loop.fit(state, stop), run


def of_kind(run, kind):
    return [event for event in read_lines(run) if event["event"] == kind]


@pytest.mark.parametrize("home", ["device", "loader"])
def test_no_update_is_lost_to_an_overflow(tmp_path, scale, home):
    results = []
    for first in (FINE, HUGE):
        scale(first)
        engine = {"log_every": 4, "home": home, "workers": 0}
        found, run = fit(tmp_path, engine=engine, train={"epochs": 2})
        (lane,) = found.lanes
        results.append((lane, run))
    (calm, before), (wild, after) = results
    assert calm.progress.repeated == 0 < wild.progress.repeated
    assert calm.progress.step == wild.progress.step == found.steps
    assert wild.progress.best_epoch == calm.progress.best_epoch
    close(
        *(torch.cat([w.flatten() for w in one.weights.values()]) for one in (wild, calm)), rel=1e-3
    )
    ends = [[(one["epoch"], one["step"]) for one in of_kind(r, "epoch")] for r in (before, after)]
    assert ends[0] == ends[1]
    assert not any("repeated" in one for one in of_kind(before, "log"))
    assert of_kind(after, "log")[-1]["repeated"] == wild.progress.repeated
    assert of_kind(after, "trained")[-1]["repeated"] == wild.progress.repeated


@pytest.mark.parametrize("stop_at", [3, 29, 45])
def test_a_run_that_stops_between_two_attempts_ends_with_the_same_bits(tmp_path, scale, stop_at):
    scale(HUGE)
    whole, _ = fit(tmp_path / "whole", train={"epochs": 3})

    def watch(event):
        if event["event"] == "step":
            launched.append(event)
            if len(launched) == stop_at:
                signal.raise_signal(signal.SIGINT)

    launched = []
    cut, run = fit(tmp_path / "cut", watch, train={"epochs": 3})
    assert cut.signal_number
    rest, _ = fit(tmp_path / "cut", resume=replace(run, watch=None), train={"epochs": 3})
    (wanted,), (found,) = whole.lanes, rest.lanes
    assert found.progress == wanted.progress
    assert all(torch.equal(found.weights[name], value) for name, value in wanted.weights.items())


def test_a_carried_state_is_that_of_the_step_that_counts(tmp_path, scale):
    found = []
    for first in (FINE, HUGE):
        scale(first)
        config = small_config(
            tmp_path,
            data={"horizon": 0, "inputs": ["a", "b"], "targets": ["c"]},
            model={"kind": "gru", "hidden": 8, "layers": 1, "dropout": 0.0},
            train={"state": "carried", "epochs": 2, "batch": 4},
        )
        chosen = make_half_plan(config)
        task = make_task(config, small_dataset(config), chosen, runs.Run(tmp_path))
        program = SingleProgram(task, chosen)
        with chosen.flags():
            program.begin({0: engine_lanes.EpochStart()})
            while int(program.positions) < program.num_steps(0):
                program.advance()
        found.append([state.clone() for state in program.step.buffers.states])
        program.close()
    for calm, wild in zip(*found, strict=True):
        close(wild, calm, rel=5e-3)


@pytest.mark.parametrize("mode", ["together", "branches"])
def test_lanes_repeat_their_own_steps_alone(tmp_path, mode):
    config = small_config(tmp_path, model=MODEL, train={"epochs": 2}, engine={"log_every": 4})
    dataset = small_dataset(config)
    chosen = make_half_plan(config)
    lanes = [
        Lane(config.model_copy(update={"seed": seed}), dataset.memory.starts) for seed in (0, 1)
    ]
    capacity = compute_capacity(lanes, places=2)
    series = dataset.memory.series
    results = {}
    for name, scales in {"calm": (FINE, FINE), "wild": (FINE, HUGE)}.items():
        run = runs.create_run(name, out=str(tmp_path))
        build = lambda n: packs.Pack(n, capacity, dataset.signature, series, chosen, mode)  # noqa: E731
        with chosen.flags(), catch_signals() as stop:
            state = states.start(lanes, build, LaneEvents(run), num_places=2)
            state.program.live["scale"].copy_(torch.tensor(scales))
            state.program.good["scale"].copy_(torch.tensor(scales))
            results[name] = loop.fit(state, stop).lanes
    for calm, wild in zip(results["calm"], results["wild"], strict=True):
        assert calm.progress.step == wild.progress.step
        close(wild.progress.best_loss, calm.progress.best_loss, rel=1e-3)
    first, second = results["wild"]
    assert first.progress.repeated == 0 < second.progress.repeated
    assert all(torch.equal(w, first.weights[n]) for n, w in results["calm"][0].weights.items())


def test_gradients_that_no_scale_can_save_lead_to_fp32(tmp_path, scale):
    scale(math.inf)
    found, run = fit(tmp_path, train={"epochs": 2})
    (lane,) = found.lanes
    (recovery,) = of_kind(run, "recovery")
    assert recovery["remedy"] == "fp32 instead of fp16"
    assert found.plan.precision == "fp32"
    assert lane.progress.epochs == 2
    assert math.isfinite(lane.progress.best_loss)


def test_a_plan_is_chosen_by_losses_of_steps_that_count(tmp_path, scale):
    losses = []
    for first in (FINE, HUGE):
        scale(first)
        config = small_config(tmp_path, model=MODEL)
        chosen = make_half_plan(config)
        task = make_task(config, small_dataset(config), chosen)
        losses.append(planning.measure_step(task, chosen).loss)
    assert losses[0] == losses[1] > 0
