"""Run ONNX graphs: sessions of onnxruntime, and runners for windows, rows and series.

A server imports this module, and the package onnx only where a graph is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from slipstream.exporting.formats import Interface, PieceRunner, Runner, SeriesPiece, to_inputs
from slipstream.inference.rows import PhysicalWindows

STATE = "state_"
"""The prefix of the names of states"""


def open_session(model: bytes | Path, threads: int = 1) -> onnxruntime.InferenceSession:
    """Open a graph on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    content = str(model) if isinstance(model, Path) else model
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def make_runner(path: Path, interface: Interface) -> Runner:
    """Return a function that runs the file on windows."""
    session = open_session(path)

    def run(windows: PhysicalWindows) -> Mapping[str, npt.NDArray[Any]]:
        values = session.run(list(interface.outputs), to_inputs(windows, interface.dtype))
        return dict(zip(interface.outputs, values, strict=True))

    return run


class StepSession:
    """A graph of one row, with its states."""

    def __init__(self, path: Path, interface: Interface) -> None:
        self._session = open_session(path)
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._states = [
            state for state in self._session.get_inputs() if state.name.startswith(STATE)
        ]
        self._sequences = interface.signature.sequences_per_window

    def iter_rows(
        self, inputs: Iterable[Mapping[str, npt.NDArray[Any]]], *, batch: int
    ) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
        """Yield the outputs after each row, from zero states on."""
        states = {
            state.name: np.zeros((batch * self._sequences, *state.shape[1:]), dtype=np.float32)
            for state in self._states
        }
        for row in inputs:
            values = self._session.run(self._outputs, {**row, **states})
            outputs = dict(zip(self._outputs, values, strict=True))
            states = {name: outputs[f"new_{name}"] for name in states}
            yield outputs


def make_step_runner(path: Path, interface: Interface) -> Runner:
    """Return a function that runs the file on the rows of windows, one at a time from zero
    states."""
    session = StepSession(path, interface)

    def run(windows: PhysicalWindows) -> Mapping[str, npt.NDArray[Any]]:
        beside = to_inputs(windows, interface.dtype)
        rows = np.ascontiguousarray(beside.pop("rows").transpose(1, 0, 2))
        inputs = (beside | {"row": row} for row in rows)
        *_, last = session.iter_rows(inputs, batch=len(windows.rows))
        return {name: last[name] for name in interface.outputs}

    return run


def make_piece_runner(path: Path, interface: Interface) -> PieceRunner:
    """Return a function that runs the file on the rows of a series, one output after each row."""
    session = StepSession(path, interface)

    def list_inputs(piece: SeriesPiece) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
        for number, row in enumerate(piece.rows):
            ahead = None if piece.future is None else piece.future[number]
            values = {"row": row, "static": piece.static, "future": ahead}
            yield {
                name: np.asarray(value, dtype=interface.dtype)[None]
                for name, value in values.items()
                if value is not None
            }

    def run(piece: SeriesPiece) -> Mapping[str, npt.NDArray[Any]]:
        rows = [
            [outputs[name] for name in interface.outputs]
            for outputs in session.iter_rows(list_inputs(piece), batch=1)
        ]
        columns = map(np.concatenate, zip(*rows, strict=True))
        return dict(zip(interface.outputs, columns, strict=True))

    return run


def make_pass_runner(path: Path, interface: Interface) -> PieceRunner:
    """Return a function that runs the graph of windows on a series, one output for each row.

    The graph of windows selects the last row; a copy of it keeps all rows instead. One pass over
    the series then gives the outputs of the windows that end with each row.
    """
    import onnx

    model = onnx.load(str(path))
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    for node in model.graph.node:
        if node.op_type == "Gather" and np.all(constants.get(node.input[1], 0) == -1):
            flatten = onnx.helper.make_node("Flatten", node.input[:1], node.output, axis=2)
            node.CopyFrom(flatten)  # [rows, sequences, width] to [rows * sequences, width]
    session = open_session(model.SerializeToString())

    def run(piece: SeriesPiece) -> Mapping[str, npt.NDArray[Any]]:
        count = len(piece.rows)
        static = None if piece.static is None else np.repeat(piece.static[None], count, axis=0)
        windows = PhysicalWindows(piece.rows[None], static, piece.future)
        values = session.run(list(interface.outputs), to_inputs(windows, interface.dtype))
        return dict(zip(interface.outputs, values, strict=True))

    return run
