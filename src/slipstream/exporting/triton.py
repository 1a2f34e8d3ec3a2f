"""The format "triton": a model repository for NVIDIA Triton Inference Server.

In `models/`, `NAME` takes windows and batches requests that arrive together. `NAME_step` takes one
row of a sequence; Triton keeps the states, which begin at zero with a request that starts one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from slipstream.exporting.formats import ExportSource, WrittenExport
from slipstream.exporting.onnx import files as onnx_files
from slipstream.exporting.onnx.sessions import make_runner

REPOSITORY, VERSION, CONFIG = "models", "1", "config.pbtxt"
MAX_BATCH = 256
MAX_DELAY_US = 2_000
"""How long a request waits for others to form a batch"""
MAX_SEQUENCES = 1_024
IDLE_US = 60_000_000
"""How long a sequence may pause before its state is dropped"""
TYPES = {
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.DOUBLE: "TYPE_FP64",
}
STATE, NEW_STATE = "state_", "new_state_"


def write(source: ExportSource, folder: Path) -> WrittenExport:
    """Write the repository: one model for windows and, where possible, one for single rows."""
    written = onnx_files.write(source, folder)
    name, notes = name_model(source.run.first.config.name), list(written.notes)
    windows, rows = (folder / REPOSITORY / folder_name for folder_name in (name, f"{name}_step"))
    model = _move(folder / onnx_files.MODEL_FILE, windows)
    _write_config(windows, model, _format_dynamic_batching())
    if (graph_of_rows := folder / onnx_files.STEP_FILE).exists():
        if source.run.signature.sequences_per_window > 1:
            graph_of_rows.unlink()
            written = replace(written, window_runners={}, rows={})
            notes.append(
                'no model for single rows: with data.channels = "independent" a row has several '
                "states, and Triton batches one per request"
            )
        else:
            graph = _move(graph_of_rows, rows)
            _write_config(rows, graph, _format_sequence_batching(graph))
    step = rows.name if rows.exists() else None
    deploy = onnx_files.describe_deployment(source.regime, step, windows.name)
    return replace(
        written,
        run=make_runner(model, source.interface),
        details={**written.details, "deploy": deploy},
        notes=tuple(notes),
    )


def name_model(name: str) -> str:
    """Return a name that is safe in paths and URLs."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _move(file: Path, model: Path) -> Path:
    """Move a graph to its path in the model repository."""
    to = model / VERSION / onnx_files.MODEL_FILE
    to.parent.mkdir(parents=True)
    return file.rename(to)


def _write_config(folder: Path, model: Path, batching: Iterator[str]) -> None:
    graph = onnx.load(model, load_external_data=False).graph
    lines = [
        f'name: "{folder.name}"',
        'backend: "onnxruntime"',
        f"max_batch_size: {MAX_BATCH}",
        *_format_tensors("input", [tensor for tensor in graph.input if not _is_state(tensor.name)]),
        *_format_tensors(
            "output", [tensor for tensor in graph.output if not _is_state(tensor.name)]
        ),
        *batching,
    ]
    (folder / CONFIG).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _is_state(name: str) -> bool:
    return name.startswith((STATE, NEW_STATE))


def _read_type(tensor: Any) -> tuple[str, str]:
    """Return a tensor's type and its dimensions without the batch; -1 stands for any length."""
    kind = tensor.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim[1:]]
    return TYPES[kind.elem_type], f"[ {', '.join(map(str, dims))} ]"


def _format_tensors(field: str, tensors: Sequence[Any]) -> Iterator[str]:
    for tensor in tensors:
        kind, dims = _read_type(tensor)
        yield f"{field} {{"
        yield f'  name: "{tensor.name}"'
        yield f"  data_type: {kind}"
        yield f"  dims: {dims}"
        yield "}"


def _format_dynamic_batching() -> Iterator[str]:
    yield "dynamic_batching {"
    yield f"  max_queue_delay_microseconds: {MAX_DELAY_US}"
    yield "}"


def _format_sequence_batching(model: Path) -> Iterator[str]:
    """Yield the scheduler of sequences, with each state's input and output."""
    yield "sequence_batching {"
    yield f"  max_sequence_idle_microseconds: {IDLE_US}"
    yield "  oldest {"
    yield f"    max_candidate_sequences: {MAX_SEQUENCES}"
    yield f"    max_queue_delay_microseconds: {MAX_DELAY_US}"
    yield "  }"
    for tensor in onnx.load(model, load_external_data=False).graph.input:
        if not _is_state(tensor.name):
            continue
        kind, dims = _read_type(tensor)
        yield "  state {"
        yield f'    input_name: "{tensor.name}"'
        yield f'    output_name: "{NEW_STATE}{tensor.name.removeprefix(STATE)}"'
        yield f"    data_type: {kind}"
        yield f"    dims: {dims}"
        yield "    initial_state {"
        yield '      name: "zeros"'
        yield f"      data_type: {kind}"
        yield f"      dims: {dims}"
        yield "      zero_data: true"
        yield "    }"
        yield "  }"
    yield "}"
