from __future__ import annotations

import math
import signal

import pytest
import torch

import slipstream
from slipstream import UserError, runs, training
from slipstream.engine import loop
from slipstream.engine.planning import make_plan
from tests.conftest import small_config, small_dataset, waves
from tests.engine.steps import make_task
from tests.logs import as_lines, read_lines


def fit(tmp_path, watch=None, table=None, change=None, **sections):
    config = small_config(tmp_path, **sections)
    dataset = small_dataset(config, table)
    chosen = make_plan(config, data_bytes=0)
    run = runs.create_run("t", out=str(tmp_path), watch=as_lines(watch))
    with chosen.flags():
        task = make_task(config, dataset, chosen, run)
        if change:
            change(task.model)
        (result,) = loop.fit_single(task, chosen).lanes
    return result, list(read_lines(run)), run, task.model


def of_kind(events, kind):
    return [event for event in events if event["event"] == kind]


def test_losses_are_read_once_per_interval_and_at_the_epochs_end(tmp_path):
    _, events, _, _ = fit(tmp_path, engine={"log_every": 3}, train={"batch": 32, "epochs": 2})
    steps = [event["step"] for event in of_kind(events, "log")]
    assert steps == [3, 6, 9, 12, 15, 18]  # 9 steps an epoch
    assert all(event["loss"] > 0 for event in of_kind(events, "log"))


def test_the_first_losses_are_read_early(tmp_path):
    train = {"batch": 4, "epochs": 2}
    _, events, _, _ = fit(tmp_path, engine={"log_every": 30}, train=train)
    steps = [event["step"] for event in of_kind(events, "log")]
    assert steps == [1, 10, 30, 60, 66, 96, 126, 132]  # 66 steps an epoch
    _, others, _, _ = fit(tmp_path, engine={"log_every": 10}, train=train)
    losses = {event["step"]: event["val_loss"] for event in of_kind(events, "epoch")}
    assert losses == {event["step"]: event["val_loss"] for event in of_kind(others, "epoch")}


@pytest.mark.parametrize("step", [1, 4, 10, 25])
def test_the_log_of_a_run_that_stops_early_goes_on_as_if_unbroken(tmp_path, step):
    often = {"engine": {"log_every": 20}, "train": {"batch": 8, "epochs": 1}}
    config, table = small_config(tmp_path, **often), waves(400)

    def stop(event):
        if event["event"] == "step" and event["step"] == step:
            signal.raise_signal(signal.SIGINT)

    whole = runs.open_run(slipstream.train(config, table).run)
    with pytest.raises(slipstream.Interrupted):
        training.train(config, table, watch=as_lines(stop))
    stopped = runs.open_run(runs.find_last(config.out))
    slipstream.train(data=table, resume=stopped.folder)
    expected, log = (
        [(one["step"], one["loss"]) for one in of_kind(read_lines(run), "log")]
        for run in (whole, stopped)
    )
    assert [number for number, _ in expected] == [1, 10, 20, 33]
    assert log == expected


def test_the_best_weights_come_back(tmp_path):
    result, events, _, model = fit(
        tmp_path, train={"epochs": 12, "min_delta": 0.2, "patience": "off"}
    )
    epochs = of_kind(events, "epoch")
    best = [event for event in epochs if event["best"]][-1]
    assert result.progress.best_epoch == best["epoch"] < 12
    assert result.progress.best_loss == pytest.approx(best["val_loss"])
    last = model.state_dict()
    assert any(not torch.equal(last[name], value) for name, value in result.weights.items())


def test_patience_and_min_delta_end_it_early(tmp_path):
    result, events, _, _ = fit(tmp_path, train={"epochs": 50, "patience": 3, "min_delta": 10.0})
    assert result.stop_reason == "no improvement in 3 validations"
    assert len(of_kind(events, "epoch")) == 4
    assert result.progress.best_epoch == 1


def test_the_low_rate_begins_at_the_best_weights(tmp_path):
    """At a rate of almost nothing the model stays the best one."""
    low = {"exploit_epochs": 3, "exploit_lr": 1e-30, "exploit_lr_min": 0.0}
    result, events, _, _ = fit(
        tmp_path, train={"epochs": 50, "patience": 2, "min_delta": 10.0, "validate_every": 2} | low
    )
    first, *others = of_kind(events, "epoch")
    assert [event["epoch"] for event in (first, *others)] == [2, 4, 6, 8, 9]
    assert [event.get("phase") for event in others] == [None, None, "exploit", "exploit"]
    assert others[0]["val_loss"] != first["val_loss"] == others[2]["val_loss"]
    assert others[3]["val_loss"] == first["val_loss"]
    (event,) = of_kind(events, "exploit")
    assert (event["epoch"], event["best_epoch"], event["epochs"]) == (6, 2, 3)
    assert result.stop_reason == "no improvement, then 3 epochs at a low rate"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop"])
def test_a_better_model_of_the_low_rate_is_kept(tmp_path, optimizer):
    wild = {"lr": 0.3, "schedule": "constant", "patience": 1, "optimizer": optimizer}
    low = {"exploit_epochs": 4, "exploit_lr": 3e-3}
    result, events, _, _ = fit(tmp_path, train={"epochs": 50} | wild | low)
    before = [e["val_loss"] for e in of_kind(events, "epoch") if "phase" not in e]
    after = [e for e in of_kind(events, "epoch") if "phase" in e]
    assert len(after) == 4
    assert result.progress.best_loss == min(e["val_loss"] for e in after) < min(before)
    assert all(e["lr"] <= 3e-3 for e in after)


def test_validation_happens_every_so_many_epochs_and_at_the_end(tmp_path):
    result, events, _, _ = fit(tmp_path, train={"epochs": 5, "validate_every": 2})
    assert [event["epoch"] for event in of_kind(events, "epoch")] == [2, 4, 5]
    assert result.stop_reason == "all epochs done"


def test_the_plateau_schedule_cuts_the_rate(tmp_path):
    settings = {"schedule": "plateau", "plateau_patience": 2, "plateau_factor": 0.1}
    _, events, _, _ = fit(
        tmp_path, train=settings | {"epochs": 7, "min_delta": 10.0, "patience": "off"}
    )
    rates = [event["lr"] for event in of_kind(events, "epoch")]
    assert rates == pytest.approx([1e-3] * 3 + [1e-4] * 2 + [1e-5] * 2)


def test_a_time_limit_ends_it_with_a_validation(tmp_path):
    result, events, _, _ = fit(tmp_path, train={"epochs": 500, "minutes": 1e-6})
    assert result.stop_reason == "train.minutes have passed"
    assert len(of_kind(events, "epoch")) == 1
    assert result.weights


def test_a_loss_that_is_not_finite_says_what_to_do(tmp_path):
    table = waves().to_pydict()
    table["a"] = [v * 1e28 for v in table["a"]]
    config = small_config(tmp_path, data={"scale": "none"}, train={"clip": "off"})
    with pytest.raises(UserError, match=r"no validation loss was finite .* lower train.lr"):
        slipstream.train(config, table)


def test_an_interrupt_finishes_the_step_and_saves(tmp_path):
    def press(event):
        if event["event"] == "step" and event["step"] == 19:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result, _, _, _ = fit(tmp_path, watch=as_lines(press), train={"epochs": 100})
    assert result.signal_number == signal.SIGINT
    assert result.stop_reason == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before
    assert result.progress.step == 19
    assert list(tmp_path.glob("*/checkpoints/step-19/manifest.json"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_that_repeats_its_signal_does_not_cost_the_checkpoint(tmp_path, number):
    def send(event):
        if event["event"] == "step" and event["step"] == 19:
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(number)
    result, _, _, _ = fit(tmp_path, watch=as_lines(send), train={"epochs": 100})
    assert result.signal_number == number
    assert signal.getsignal(number) is before
    assert list(tmp_path.glob("*/checkpoints/step-19/manifest.json"))


def test_the_newest_and_the_best_checkpoint_stay(tmp_path):
    result, events, run, _ = fit(
        tmp_path,
        train={"epochs": 4, "min_delta": 10.0},
        engine={"async_checkpoints": False, "checkpoint_minutes": 1e-9},
    )
    kept = {folder.name for folder in run.checkpoints.iterdir()}
    assert kept == {"step-9", "step-35", "step-36"}  # the best, and the newest two
    last = run.checkpoints / f"step-{result.progress.step}"
    files = {file.name for file in last.iterdir()}
    assert files == {"ended.safetensors", "state.json", "manifest.json"}
    before = {file.name for file in (run.checkpoints / "step-35").iterdir()}
    assert before == {"lanes.safetensors", "state.json", "manifest.json"}
    (lane,) = runs.read_json(last / "state.json")["lanes"]
    assert lane["progress"]["best_epoch"] == 1
    assert of_kind(events, "checkpoint")


def test_the_validation_loss_covers_every_window_once(tmp_path):
    from slipstream.data import windows
    from slipstream.models.losses import compute_window_losses

    config = small_config(tmp_path)
    dataset = small_dataset(config, waves(6000))
    assert len(dataset.memory.starts["val"]) > 500
    result, events, _, model = fit(tmp_path, table=waves(6000), train={"epochs": 1})
    model.load_state_dict(result.weights)
    batch = windows.gather(dataset.memory.series, dataset.memory.starts["val"])
    with torch.no_grad():
        wanted = compute_window_losses(
            model.eval()(batch.inputs, None), batch.targets, config.train
        ).mean()
    assert of_kind(events, "epoch")[0]["val_loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert math.isfinite(result.progress.best_loss)


def test_the_time_is_estimated_once_after_ten_steps_that_count(tmp_path):
    _, events, _, _ = fit(tmp_path, train={"epochs": 5})  # 9 steps an epoch, so across two
    (found,) = of_kind(events, "estimate")
    assert found["step"] == 14
    left_s = (5 * 9 - 14) * found["ms_per_step"] / 1e3
    assert found["expected_s"] == pytest.approx(found["trained_s"] + left_s)
    _, events, _, _ = fit(tmp_path, train={"epochs": 1})
    assert not of_kind(events, "estimate")


def test_checkpoints_come_by_the_clock_whatever_else_happens(tmp_path):
    """Between log lines, and in epochs that are not validated."""
    _, events, _, _ = fit(
        tmp_path,
        train={"epochs": 2, "validate_every": 2},
        engine={"log_every": 100, "checkpoint_minutes": 1e-9, "async_checkpoints": False},
    )
    assert [event["step"] for event in of_kind(events, "checkpoint")] == list(range(1, 19))
