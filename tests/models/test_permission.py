"""A run may come from anybody: the code that its config names runs where the user allows it."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import slipstream
from slipstream import UserError
from slipstream.config import Config, Model
from slipstream.models import custom
from tests.cli.test_cli import invoke, sets
from tests.conftest import merged, small_config, waves

NET = """
import pathlib
import torch

pathlib.Path({marker!r}).touch()


class Net(torch.nn.Module):
    def __init__(self, *, context, inputs, static, outputs):
        super().__init__()
        self.head = torch.nn.Linear(inputs, outputs)

    def forward(self, inputs, static):
        return self.head(inputs[-1])
"""


class Received:
    """A run of somebody else's, the modules in the working folder, and whether they were run."""

    def __init__(self, folder, module):
        self.folder, self.module, self.marker = folder, module, folder / "ran"
        self.file = folder.joinpath(*module.split(".")).with_suffix(".py")
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(NET.format(marker=str(self.marker)))
        pq.write_table(waves(200), folder / "table.parquet")

    def config(self, **sections):
        data = {"path": str(self.folder / "table.parquet")}
        first = {"data": data, "model": {"kind": f"{self.module}:Net"}}
        return small_config(self.folder / "runs", **merged(first, sections))

    def elsewhere(self, work, *given, **named):
        """Have another process, which may import the module, do something."""
        process = multiprocessing.get_context("fork").Process(target=work, args=given, kwargs=named)
        process.start()
        process.join()
        self.marker.unlink(missing_ok=True)
        (run,) = (self.folder / "runs").iterdir()
        return run

    @property
    def ran(self):
        return self.marker.exists()


@pytest.fixture
def received(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    return Received(tmp_path, f"nets_of_{request.node.name.replace('[', '_').replace(']', '')}")


def refused(received, work, *given, **named):
    with pytest.raises(UserError) as caught:
        work(*given, **named)
    told = str(caught.value)
    assert str(received.file) in told
    assert "allow_code=True" in told
    assert not received.ran
    return told


def test_a_run_that_was_received_imports_nothing_until_it_is_allowed(received):
    run = received.elsewhere(slipstream.train, received.config())
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for work in (
        lambda **more: slipstream.predict(run, waves(200), **more),
        lambda **more: slipstream.evaluate(run, **more),
        lambda **more: slipstream.train(resume=run, overrides=("train.epochs=3",), **more),
    ):
        told = refused(received, work)
        assert f"{run}/config.toml: model.kind" in told
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert slipstream.predict(run, waves(200), allow_code=True).num_rows == 4
    assert received.ran
    assert slipstream.evaluate(run)["windows"] > 0  # what was allowed once, is


def test_a_search_that_was_received_asks_for_every_class_that_it_may_try(received):
    space = {"model.kind": ["linear", f"{received.module}:Net"]}
    tune = {"trials": 2, "retrain": 1, "retrain_seeds": 2, "sampler": "grid", "space": space}
    config = received.config(model={"kind": "linear"}, tune=tune)
    run = received.elsewhere(slipstream.tune, config)
    refused(received, slipstream.tune, resume=run)
    assert slipstream.tune(resume=run, allow_code=True).summary["trials"]["finished"] == 2


def test_a_config_that_is_named_is_the_users_word(received):
    run = received.elsewhere(slipstream.train, received.config())
    refused(received, slipstream.train, resume=run, overrides=("train.epochs=3",))
    longer = received.config(train={"epochs": 3})
    assert slipstream.train(longer, resume=run).summary["epochs"] == 3
    assert received.ran


def test_an_override_is_the_users_word(received):
    run = received.elsewhere(slipstream.train, received.config())
    named = (f"model.kind={received.module}:Net",)
    assert slipstream.evaluate(run, overrides=named)["windows"] > 0


def test_the_command_asks_and_takes_yes_for_an_answer(received):
    (received.folder / "job.toml").write_text(
        f'out = "{received.folder}/runs"\n[data]\npath = "table.parquet"\n'
    )
    mine = sets(f"model.kind={received.module}:Net")
    run = received.elsewhere(invoke, "train", received.folder / "job.toml", *mine)
    table = received.folder / "table.parquet"
    for words in (
        ("predict", run, table),
        ("evaluate", run),
        ("train", "--resume", run, "--set", "train.epochs=3"),
        ("tune", "--resume", run),
    ):
        found = invoke(*words, "--json")
        assert found.exit_code == 2
        assert f"would run {received.file}" in json.loads(found.stdout)["error"]
    assert not received.ran
    found = invoke("predict", run, table, "--allow-code", "--out", received.folder / "ahead.csv")
    assert found.exit_code == 0, found.output
    assert received.ran


def test_the_files_of_a_package_are_named_without_running_it(tmp_path, monkeypatch):
    package = tmp_path / "received_package" / "inner"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py", package / "nets.py"):
        path.write_text("raise AssertionError('it was run')")
    monkeypatch.chdir(tmp_path)
    assert custom.list_module_files("received_package.inner.nets") == [
        str(package.parent / "__init__.py"),
        str(package / "__init__.py"),
        str(package / "nets.py"),
    ]
    assert custom.list_module_files("received_package.missing") == []
    assert not [name for name in sys.modules if name.startswith("received_package")]
    assert custom.list_module_files("json.decoder")[-1].endswith("decoder.py")
    assert custom.list_module_files("sys") == []


def test_a_class_that_nobody_named_is_not_imported(received):
    refused(received, custom.import_class, f"{received.module}:Net")
    custom.allow_classes(Config(model=Model(kind=f"{received.module}:Net")))
    assert custom.import_class(f"{received.module}:Net").__name__ == "Net"


def test_an_encoder_that_was_received_names_no_class(received):
    run = received.folder / "runs" / "encoder"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(f'[model]\nkind = "{received.module}:Net"\n[data]\n')
    settings = {"data": {"time": "time"}, "train": {"init_from": str(run)}}
    with pytest.raises(UserError, match=rf"{run}/config\.toml: .*is not an encoder"):
        slipstream.train(settings, waves(200))
    assert not received.ran


@pytest.mark.slow
def test_a_module_beside_a_run_is_not_imported_instead_of_an_installed_one(received):
    run = received.elsewhere(slipstream.train, received.config(model={"kind": "linear"}))
    shutil.copy(received.file, run / "matplotlib.py")
    words = [sys.executable, "-m", "slipstream", "report", "."]
    source = {"PYTHONPATH": str(Path(slipstream.__file__).parents[1])}
    found = subprocess.run(
        words, cwd=run, env=os.environ | source, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert not received.ran
