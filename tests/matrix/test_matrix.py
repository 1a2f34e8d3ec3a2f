"""Every command and every function of the package on every kind of run: a result, or a refusal that
`REFUSALS` lists with its reason."""

from __future__ import annotations

import re
import traceback

import pytest
import typer

import slipstream
from slipstream.cli.commands import app
from tests.matrix.commands import COMMANDS, Cell, Refusal
from tests.matrix.kinds import KINDS, train_kind
from tests.matrix.refusals import REFUSALS, find_refusal

RAISED = {name for name in slipstream.__all__ if name.endswith("Error")} | {"Interrupted"}


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory):
    """One folder for each process: every kind is trained once there."""
    return tmp_path_factory.mktemp("matrix")


def try_command(cell, name):
    """Return what is wrong with a cell; empty where it gives a result, or refuses as listed."""
    listed = find_refusal(cell.kind, name)
    try:
        COMMANDS[name].call(cell)
    except Refusal as refusal:
        text = " ".join(str(refusal).split())
        if listed is None:
            return f"refuses: {text}"
        return "" if re.search(listed.says, text) else f"does not say {listed.says!r}: {text}"
    except Exception:
        return traceback.format_exc(limit=-6)
    return "" if listed is None else f"does not refuse, although {listed.why}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_takes_a_kind_of_run_or_says_why_not(kind, trained_runs, tmp_path):
    trained, wrong = train_kind(kind, trained_runs), []
    for number, (name, command) in enumerate(COMMANDS.items()):
        if not command.only or kind in command.only:
            folder = tmp_path / str(number)
            folder.mkdir()
            if problem := try_command(Cell(kind, trained, folder), name):
                wrong.append(f"{name}: {problem}")
    assert not wrong, "\n".join(wrong)


def test_every_refusal_is_one_of_a_cell():
    cells = [
        (kind, name)
        for kind in KINDS
        for name, command in COMMANDS.items()
        if not command.only or kind in command.only
    ]
    used = {id(find_refusal(*cell)) for cell in cells}
    assert not [one for one in REFUSALS if id(one) not in used]
    assert all(one.why for one in REFUSALS)


def test_every_command_is_in_the_matrix():
    def list_names(group, before=""):
        for name, command in group.commands.items():
            path = f"{before}{name}"
            if hasattr(command, "commands"):
                yield from list_names(command, f"{path} ")
            else:
                yield path.removesuffix(" list")

    names = set(list_names(typer.main.get_command(app)))
    tried = {
        name
        for name in names
        if any(one == name or one.startswith((f"{name} ", f"{name},")) for one in COMMANDS)
    }
    assert names - tried == {"bench compare"}  # after bench ladder


def test_every_public_name_is_in_the_matrix():
    tried = {name.removeprefix("slipstream.").partition(",")[0] for name in COMMANDS}
    tried |= {one for command in COMMANDS.values() for one in command.returns}
    assert set(slipstream.__all__) - tried - RAISED == set()
