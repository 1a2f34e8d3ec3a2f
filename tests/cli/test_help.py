from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from slipstream.cli.commands import app


@pytest.mark.parametrize("group", [(), ("runs",), ("bench",)], ids=" ".join)
def test_no_summary_of_a_command_is_cut_off_at_80_columns(group):
    found = CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": "80"})
    assert found.exit_code == 0
    commands = found.stdout.partition("Commands:")[2]
    assert commands
    assert "..." not in commands


def test_only_commands_that_read_settings_take_them():
    commands = typer.main.get_command(app).commands
    without = {
        name
        for name, command in commands.items()
        if not any("--set" in parameter.opts for parameter in command.params)
    }
    assert without == {"report", "doctor", "runs", "bench", "serve", "ui", "follow", "copy"}
