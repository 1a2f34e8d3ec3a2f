"""A `torch.export` program: it computes what the model computes, in any number of windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import slipstream
from slipstream.base.errors import UserError
from slipstream.exporting.torch_program import (
    restore_recurrent_layers,
    stand_in_for_recurrent_layers,
)
from tests.conftest import close, slow
from tests.exporting.small_runs import RUNS, train_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


FAST = ("lstm", "own class")


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(slow(name) for name in RUNS if name not in (*FAST, "repeats", "own class that decides")),
    ],
)
def test_every_kind_of_run_is_exported_and_verified(name, folder, tmp_path):
    run = train_run(folder, name)
    result = slipstream.export(run, to="torch", out=tmp_path / "out", allow_code=True)
    assert result["parity"]["windows"] == slipstream.evaluate(run, allow_code=True)["windows"]
    assert result["parity"]["max_rel"] <= 1e-5
    extra = {"slipstream.json": ""}
    program = torch.export.load(tmp_path / "out" / "model.pt2", extra_files=extra)
    about = json.loads(extra["slipstream.json"])
    assert list(about["outputs"]) == list(result["interface"]["outputs"])
    operations = {str(node.target) for node in program.graph.nodes}
    assert not any("slipstream" in name for name in operations)


@pytest.mark.slow
def test_the_program_takes_its_inputs_and_returns_its_outputs_by_name(folder, tmp_path):
    run = train_run(folder, "repeats")
    slipstream.export(run, to="torch", out=tmp_path / "out")
    program = torch.export.load(tmp_path / "out" / "model.pt2")
    outputs = program.module()(rows=torch.full((5, 16, 3), 20.0))
    assert {name: list(one.shape) for name, one in outputs.items()} == {
        "prediction": [5, 4, 3],
        "lower": [5, 4, 3, 2],
        "upper": [5, 4, 3, 2],
    }
    assert outputs["upper"].max() <= 31


def test_a_class_that_cannot_be_traced_is_refused_with_torchs_reason(folder, tmp_path):
    run = train_run(folder, "own class that decides")
    with pytest.raises(UserError, match="cannot trace the model: Could not guard on data-dep"):
        slipstream.export(run, to="torch", out=tmp_path / "out", allow_code=True)
    assert not list(tmp_path.iterdir())


class Stack(nn.Module):
    """Recurrent layers as a user may combine them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
        self.second = nn.GRU(8, 5, num_layers=2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out, (_, cell) = self.first(rows)
        out, state = self.second(out.transpose(0, 1))
        return torch.cat([out[-1], state[0], cell[1]], dim=-1)


def test_recurrent_layers_are_traced_without_a_loop_over_rows():
    model, rows = Stack().eval(), torch.randn(3, 300, 3)
    with stand_in_for_recurrent_layers():
        program = torch.export.export(model, (rows,))
    program = restore_recurrent_layers(program)
    assert len(list(program.graph.nodes)) < 60
    close(program.module()(rows).detach(), model(rows).detach())
