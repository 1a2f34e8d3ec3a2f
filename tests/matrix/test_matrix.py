"""Every command and every function of the package on every kind of run: a result, or a refusal that
`refusals.REFUSALS` lists with its reason."""

from __future__ import annotations

import inspect
import json
import os
import time
import traceback
import typer
import pytest

import slipstream
from slipstream.cli.commands import app
from tests.matrix.commands import COMMANDS, Cell, Refusal
from tests.matrix.kinds import KINDS, train_kind


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory):
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_takes_a_kind_of_run_or_says_why_not(kind, trained_runs, tmp_path):
    trained = train_kind(kind, trained_runs)
    for name, command in COMMANDS.items():
        if command.only and kind not in command.only:
            continue
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        t0 = time.time()
        row = {"kind": kind, "command": name, "what": "ok"}
        try:
            command.call(Cell(kind, trained, folder))
        except Refusal as r:
            row |= {"what": "refusal", "text": str(r)}
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            row |= {"what": "error", "text": traceback.format_exc()[-3500:]}
        row["s"] = time.time() - t0
        with open(os.environ["MATRIX_OUT"] + f"-{os.getpid()}", "a") as out:
            print(json.dumps(row), file=out)
