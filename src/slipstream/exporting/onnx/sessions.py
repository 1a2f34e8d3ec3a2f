"""onnxruntime sessions over graphs: what runs an export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnxruntime

from slipstream.exporting.formats import Runner, to_inputs
from slipstream.exporting.interface import Interface
from slipstream.portable.rows import PhysicalWindows


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
