from __future__ import annotations

import os
import subprocess
import sys
from typing import get_type_hints

import pytest
import typer
from typer.models import OptionInfo

from slipstream.cli.commands import app
from tests.conftest import slow


@pytest.mark.parametrize("width", ["80", slow("50")])
@pytest.mark.parametrize("group", [(), ("runs",), ("bench",)], ids=" ".join)
def test_no_summary_of_a_command_is_cut_off(group, width):
    """In a process of its own: typer's runner has wider lines than a terminal of 80 columns."""
    command = [sys.executable, "-m", "slipstream", *group, "--help"]
    environment = os.environ | {"COLUMNS": width}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    commands = shown.stdout.partition("Commands:")[2]
    assert commands
    assert "..." not in commands
    assert max(map(len, shown.stdout.splitlines())) <= int(width)


def test_only_commands_that_read_settings_take_them():
    commands = typer.main.get_command(app).commands
    without = {
        name
        for name, command in commands.items()
        if not any("--set" in parameter.opts for parameter in command.params)
    }
    assert without == {"report", "doctor", "runs", "bench", "serve", "ui", "follow", "copy"}


def test_options_whose_value_has_their_name_state_it():
    """Typer 0.27 takes `--KIND` for the name of an option `kind` with the metavar KIND."""

    def list_commands(group):
        for command in group.commands.values():
            yield from list_commands(command) if hasattr(command, "commands") else [command]

    unnamed = [
        f"{command.name} --{name}"
        for command in list_commands(typer.main.get_command(app))
        for name, hint in get_type_hints(command.callback, include_extras=True).items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, OptionInfo)
        and (option.metavar or "").lower() == name
        and not str(option.default).startswith("--")  # in Annotated, the first name is there
    ]
    assert not unnamed
