"""The format "torch": model.pt2, a `torch.export` program.

It runs wherever PyTorch does, without Slipstream, takes any number of windows of the context's
length, and returns its outputs by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch.export import Dim, ExportedProgram

from slipstream import runs
from slipstream.errors import UserError
from slipstream.exporting.formats import ExportSource, Runner, WrittenExport, to_inputs
from slipstream.exporting.interface import Interface
from slipstream.exporting.pytorch.module import PhysicalModel
from slipstream.exporting.pytorch.recurrent import (
    restore_recurrent_layers,
    stand_in_for_recurrent_layers,
)
from slipstream.portable.rows import PhysicalWindows

PROGRAM_FILE, DESCRIPTION = "model.pt2", "slipstream.json"
EXAMPLE_WINDOWS = 3
"""Windows that the model is traced with; a single one would fix their number"""


def write(source: ExportSource, folder: Path) -> WrittenExport:
    """Write the program."""
    program = trace(PhysicalModel(source.trained, source.interface))
    path, description = folder / PROGRAM_FILE, runs.to_json(source.interface.describe())
    torch.export.save(program, path, extra_files={DESCRIPTION: description})
    return WrittenExport(
        run=make_runner(path, source.interface),
        inside=("scaling of the inputs", "the networks", "predictions in physical units"),
        versions={"torch": torch.__version__},
    )


def trace(model: PhysicalModel) -> ExportedProgram:
    """Return the model as a program for any number of windows."""
    interface, batch = model.interface, Dim("batch")
    shapes = {
        name: _make_shape(dims, interface) for name, dims in interface.get_input_shapes().items()
    }
    example = {
        name: torch.zeros(EXAMPLE_WINDOWS, *shape, dtype=model.dtype)
        for name, shape in shapes.items()
    }
    with torch.no_grad(), stand_in_for_recurrent_layers():
        try:
            program = torch.export.export(
                model.eval(), (), example, dynamic_shapes={name: {0: batch} for name in example}
            )
        except Exception as error:  # torch's own kinds of errors, and those of users' classes
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(f"torch.export cannot trace the model: {reason}") from error
    return restore_recurrent_layers(program)


def make_runner(path: Path, interface: Interface) -> Runner:
    """Load the program again, and return a function from windows to what it computes."""
    module = torch.export.load(path).module()

    def run(windows: PhysicalWindows) -> Mapping[str, npt.NDArray[Any]]:
        inputs = to_inputs(windows, interface.dtype)
        with torch.no_grad():
            outputs = module(**{name: torch.from_numpy(each) for name, each in inputs.items()})
        return {name: values.numpy() for name, values in outputs.items()}

    return run


def _make_shape(dims: list[str | int], interface: Interface) -> tuple[int, ...]:
    """Return the shape of one window's input; the time has the context's length."""
    return tuple(interface.context if one == "time" else int(one) for one in dims[1:])
