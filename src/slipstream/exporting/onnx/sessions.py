"""onnxruntime sessions over graphs: what runs an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from slipstream.exporting.formats import Runner, to_inputs
from slipstream.exporting.interface import Interface
from slipstream.portable.rows import PhysicalWindows

STATE = "state_"
"""Names of states begin so"""


def open_session(model: bytes | Path, threads: int = 1) -> onnxruntime.InferenceSession:
    """Open a graph on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    content = str(model) if isinstance(model, Path) else model
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def make_runner(path: Path, interface: Interface) -> Runner:
    """Return a function from windows to what the file computes."""
    session = open_session(path)

    def run(windows: PhysicalWindows) -> Mapping[str, npt.NDArray[Any]]:
        values = session.run(list(interface.outputs), to_inputs(windows, interface.dtype))
        return dict(zip(interface.outputs, values, strict=True))

    return run


def make_step_runner(path: Path, interface: Interface) -> Runner:
    """Return a function from windows to what the file computes of their rows, one at a time from
    zero states."""
    session = open_session(path)
    outputs = [one.name for one in session.get_outputs()]
    states = [one for one in session.get_inputs() if one.name.startswith(STATE)]
    sequences = interface.signature.sequences_per_window

    def run(windows: PhysicalWindows) -> Mapping[str, npt.NDArray[Any]]:
        inputs = to_inputs(windows, interface.dtype)
        rows = np.ascontiguousarray(inputs.pop("rows").transpose(1, 0, 2))
        for one in states:
            shape = (len(windows.rows) * sequences, *one.shape[1:])
            inputs[one.name] = np.zeros(shape, dtype=np.float32)
        for row in rows:
            values = dict(zip(outputs, session.run(outputs, inputs | {"row": row}), strict=True))
            inputs |= {one.name: values[f"new_{one.name}"] for one in states}
        return {name: values[name] for name in interface.outputs}

    return run
