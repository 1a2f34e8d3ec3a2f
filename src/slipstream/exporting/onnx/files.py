"""The format "onnx": model.onnx for windows, and step.onnx for single rows if possible."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime

from slipstream.exporting.formats import (
    ExportSource,
    PieceRunner,
    Runner,
    WrittenExport,
)
from slipstream.exporting.onnx.graph import (
    OPSET,
    build_step_graph,
    build_window_graph,
    explain_no_step_graph,
)
from slipstream.exporting.onnx.sessions import (
    make_pass_runner,
    make_piece_runner,
    make_runner,
    make_step_runner,
)
from slipstream.inference.stream import DefaultRegime

MODEL_FILE, STEP_FILE = "model.onnx", "step.onnx"


def write(source: ExportSource, folder: Path) -> WrittenExport:
    """Write the graphs."""
    if source.run.first.config.model.is_custom:
        from slipstream.exporting import torch_program  # it imports torch

        torch_program.write_own_class(source, folder / MODEL_FILE)
        opset = torch_program.OWN_OPSET
    else:
        onnx.save(build_window_graph(source.run), str(folder / MODEL_FILE))
        opset = OPSET
    window_runners: dict[str, Runner] = {}
    rows: dict[str, PieceRunner] = {}
    if source.interface.signature.state == "carried":
        rows[MODEL_FILE] = make_pass_runner(folder / MODEL_FILE, source.interface)
    notes = []
    if reason := explain_no_step_graph(source.run):
        notes.append(f"no {STEP_FILE}: {reason}")
    else:
        onnx.save(build_step_graph(source.run), str(folder / STEP_FILE))
        if source.interface.signature.state == "carried":
            rows[STEP_FILE] = make_piece_runner(folder / STEP_FILE, source.interface)
        else:
            window_runners[STEP_FILE] = make_step_runner(folder / STEP_FILE, source.interface)
    return WrittenExport(
        run=make_runner(folder / MODEL_FILE, source.interface),
        window_runners=window_runners,
        rows=rows,
        inside=describe_inside(source),
        versions={"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__},
        details={
            "opset": opset,
            "deploy": describe_deployment(
                source.regime, STEP_FILE if (folder / STEP_FILE).exists() else None
            ),
        },
        notes=tuple(notes),
    )


def describe_deployment(
    regime: DefaultRegime, step: str | None, window: str = MODEL_FILE
) -> dict[str, str]:
    """Return which of the models to deploy, `window` or `step` where there is one, and why."""
    use = step if regime.name == "carried" and step is not None else window
    return {"regime": regime.name, "reason": regime.reason, "use": use}


def describe_inside(source: ExportSource) -> tuple[str, ...]:
    """List the operations of the graph between physical rows and physical predictions."""
    run, signature = source.run, source.interface.signature
    model = run.first.config.model
    parts = ["scaling of the inputs"]
    if model.normalize != "none":
        parts.append(f'normalization of each window ("{model.normalize}")')
    count = sum(len(member.models) for member in run.members)
    parts.append(f"{count} networks and their mean" if count > 1 else "the network")
    parts.append("class probabilities" if signature.classes else "predictions in physical units")
    if signature.quantiles:
        parts.append("quantiles")
    if signature.output_range:
        parts.append("model.output_range")
    if source.interface.levels:
        parts.append(f"intervals of {' and '.join(source.interface.levels)} %")
    return tuple(parts)
