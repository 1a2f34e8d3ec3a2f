"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from slipstream import config as configs
from slipstream.cli.commands import app
from slipstream.cli.options import list_overrides


@pytest.mark.parametrize("name", ["runs", 'a "b"', "back\\slash", "über/all", "x = 1", "7"])
def test_out_is_a_setting_whatever_the_name_of_the_folder(name):
    assert configs.load({}, list_overrides(["out=other", "seed=3"], Path(name))).out == name
    assert configs.load({}, list_overrides(["out=other"], None)).out == "other"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["RUN"], None),
        (["RUN", "--after-prepare"], "all"),
        (["--after-prepare", "RUN"], "all"),
        (["RUN", "--after-prepare", "--json"], "all"),
        (["RUN", "--after-prepare", "resample"], "resample"),
        (["--after-prepare", "resample", "RUN"], "resample"),
    ],
)
def test_after_prepare_takes_a_step_or_none(arguments, wanted):
    command = typer.main.get_command(app).commands["export"]
    context = command.make_context("export", [*arguments, "--to", "c", "--out", "x"])
    assert context.params["after_prepare"] == wanted
    assert str(context.params["run"]) == "RUN"
