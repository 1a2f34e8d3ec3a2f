"""Locks, disks that take no more, crashes, signals, and files that cannot be trusted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors.torch
from safetensors import SafetensorError

import slipstream
from slipstream import UserError, runs, training
from slipstream.base import storage
from slipstream.base.errors import ResumableError
from slipstream.engine import checkpoint
from slipstream.events import End
from tests.conftest import HUNG_S, slow, small_config, waves
from tests.logs import as_lines, read_lines
from tests.soak import Soak
from tests.training.test_resume import configured, ended, interrupted


@pytest.mark.slow
def test_a_kill_a_stop_and_damage_lose_nothing(tmp_path):
    soak = Soak(tmp_path, 0)
    soak.broken("linear, sgd", signal.SIGKILL)
    soak.broken("repeats", signal.SIGTERM)
    soak.damaged(5)
    assert soak.counts["damaged files: survived"] == 5
    assert not [what for what in soak.counts if what.endswith(("lost", "wrong"))]


@pytest.mark.slow
def test_a_short_soak_loses_nothing():
    command = [sys.executable, "-m", "tests.soak", "--short"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    told = found.stdout.splitlines()
    assert told[0].startswith("kill -9: 0 lost, 0 wrong, 10 tried")
    assert all("0 lost, 0 wrong" in line for line in told[:-1])


def test_a_run_has_one_writer(tmp_path):
    run = runs.create_run("a", out=str(tmp_path))
    with (
        runs.lock_run(run),
        pytest.raises(UserError, match=f"process {os.getpid()} on this machine is writing"),
        runs.lock_run(run),
    ):
        pass
    assert not (run.folder / "lock.json").exists()


@pytest.mark.parametrize(
    "held",
    [
        "",
        "{",
        '{"host": "%s", "pid": 999999999, "since": 1.0}',
        '{"host": "%s", "pid": %d, "since": 1.0}',  # the number has gone to another process
    ],
)
def test_a_stale_lock_is_taken_over(tmp_path, held):
    run = runs.create_run("a", out=str(tmp_path))
    text = held.replace("%s", os.uname().nodename).replace("%d", str(os.getpid()))
    (run.folder / "lock.json").write_text(text)
    with runs.lock_run(run):
        assert json.loads((run.folder / "lock.json").read_text())["pid"] == os.getpid()


def test_a_lock_of_another_machine_is_left_alone(tmp_path):
    run = runs.create_run("a", out=str(tmp_path))
    (run.folder / "lock.json").write_text('{"host": "elsewhere", "pid": 1, "since": 1.0}')
    told = r"process 1 on elsewhere holds this run; .* remove"
    with pytest.raises(UserError, match=told), runs.lock_run(run):
        pass


def test_a_log_line_is_written_whole_or_not_at_all(tmp_path):
    run = runs.create_run("a", out=str(tmp_path))
    run.append(End(seconds=1.0))
    with run.log.open("a") as log:
        log.write('{"event": "cut o')
    assert [event["event"] for event in read_lines(run)] == ["end"]


def test_a_fault_of_our_own_leaves_its_traceback_and_a_run_that_goes_on(tmp_path):
    table = waves(400)
    wanted = ended(runs.open_run(slipstream.train(configured(tmp_path / "a"), table).run))

    def fail(event):
        if event["event"] == "scoring" and event["what"] == "the baselines":
            raise ZeroDivisionError("by accident")

    with pytest.raises(ZeroDivisionError):
        training.train(configured(tmp_path / "b"), table, watch=as_lines(fail))
    run = runs.open_run(runs.find_last(str(tmp_path / "b")))
    assert "ZeroDivisionError: by accident" in (run.folder / "crash.txt").read_text()
    slipstream.train(data=table, resume=run.folder)
    assert ended(run) == wanted


def test_a_folder_removed_under_our_feet_does_not_stop_training(tmp_path):
    table, told = waves(400), []

    def remove(event):
        told.append(event)
        if event["event"] == "epoch" and event["epoch"] == 2:
            shutil.rmtree(runs.find_last(str(tmp_path)), ignore_errors=True)

    result = training.train(
        configured(tmp_path, engine={"async_checkpoints": False}), table, watch=as_lines(remove)
    )
    troubles = [event["what"] for event in told if event["event"] == "trouble"]
    assert any("events.jsonl cannot be written" in text for text in troubles)
    assert any("checkpoints cannot be written to" in text for text in troubles)
    assert len(troubles) == 2
    assert len(slipstream.predict(result.run, table)) > 0


def test_a_model_that_cannot_be_written_is_kept_elsewhere(tmp_path, monkeypatch):
    write = safetensors.torch.save_file

    def full(tensors, path):
        if tmp_path in path.parents:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        write(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(
        ResumableError, match=r"No space left.*best weights are in (\S+);"
    ) as caught:
        slipstream.train(small_config(tmp_path), waves(400))
    folder = str(caught.value).partition("best weights are in ")[2].partition(";")[0]
    assert "weights.safetensors" in storage.read_verified(Path(folder))
    shutil.rmtree(Path(folder).parent)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, slow(2)])
def test_signals_end_a_command_with_its_code_and_no_orphans(tmp_path, workers):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(waves(900), path, row_group_size=100)
    settings = {
        "out": tmp_path / "runs",
        "data.path": path,
        "data.time": "time",
        "data.context": 16,
        "data.horizon": 2,
        "model.hidden": 8,
        "train.epochs": 10_000,
        "train.patience": "off",
        "engine.plan": "off",
        "engine.threads": 1,
        "engine.home": "stream",
        "engine.workers": workers,
        "engine.buffer_rows": 300,
    }
    (tmp_path / "job.toml").write_text("")
    command = [sys.executable, "-m", "slipstream", "train", str(tmp_path / "job.toml")]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(tmp_path.glob("runs/*/checkpoints/step-*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    workers_now = psutil.Process(process.pid).children(recursive=True)
    assert len(workers_now) >= workers
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
    _, told = process.communicate(timeout=HUNG_S)
    assert process.returncode == 130, told
    assert "resume with: slipstream train --resume" in told
    assert "Traceback" not in told
    gone, alive = psutil.wait_procs(workers_now, timeout=HUNG_S)
    assert not alive, (gone, alive)
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "lock.json").exists()


def test_every_kind_of_damage_is_named(tmp_path):
    run = interrupted(configured(tmp_path), waves(400), 12)
    folder = run.checkpoints / f"step-{checkpoint.list_steps(run)[-1]}"
    copy = tmp_path / "copy"

    def damage(change):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        change(copy)
        with pytest.raises(UserError) as caught:
            storage.read_verified(copy)
        return str(caught.value)

    assert "lanes.safetensors: is missing" in damage(lambda at: (at / "lanes.safetensors").unlink())
    assert "extra.bin: is not in the manifest" in damage(lambda at: (at / "extra.bin").touch())
    assert "lists no files" in damage(lambda at: (at / "manifest.json").write_text("{}"))
    assert "cannot be read as JSON" in damage(lambda at: (at / "manifest.json").write_text(""))
    assert "manifest.json: is missing" in damage(lambda at: (at / "manifest.json").unlink())
    assert "lanes.safetensors: is damaged" in damage(
        lambda at: (at / "lanes.safetensors").write_bytes(b"")
    )


def test_a_model_with_a_flipped_bit_predicts_nothing(tmp_path):
    result = slipstream.train(small_config(tmp_path), waves(400))
    path = result.run / "model" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"weights.safetensors: is damaged"):
        slipstream.predict(result.run, waves(400))


def test_other_units_are_a_warning_and_another_step_an_error(tmp_path):
    table = waves(400)
    result = slipstream.train(small_config(tmp_path), table)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    scaled = pa.table(columns | {"b": columns["b"] * 1000})
    with pytest.warns(UserWarning, match=r'column "b": \d+ % .* are its units the same'):
        slipstream.predict(result.run, scaled)
    notes = slipstream.evaluate(result.run, scaled)["notes"]
    assert any('column "b"' in note for note in notes)
    apart = columns["time"] * 60 if columns["time"].dtype.kind in "if" else None
    if apart is None:
        first = columns["time"][0]
        apart = first + (columns["time"] - first) * 60
    slower = pa.table(columns | {"time": apart})
    with pytest.raises(UserError, match=r"rows are .* apart, .* resample them"):
        slipstream.predict(result.run, slower)


def test_columns_may_be_reordered_and_more_but_not_fewer(tmp_path):
    table = waves(400)
    result = slipstream.train(small_config(tmp_path), table)
    wanted = slipstream.predict(result.run, table)
    more = table.append_column("z", pa.array(np.zeros(table.num_rows)))
    other = more.select(list(reversed(more.column_names)))
    assert slipstream.predict(result.run, other).equals(wanted)
    with pytest.raises(UserError, match='no column "b"'):
        slipstream.predict(result.run, table.drop_columns(["b"]))
    with pytest.raises(UserError, match="rows"):
        slipstream.predict(result.run, table.slice(0, 10))
