"""The format "hub": a folder to upload to the Hugging Face Hub, which is a run as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.numpy

from slipstream import __version__, runs
from slipstream.exporting.formats import ExportSource, WrittenExport
from slipstream.exporting.hub.card import write_card
from slipstream.exporting.onnx import files as onnx_files
from slipstream.portable.files import Weights
from slipstream.portable.model import PortableRun

CARD, DESCRIPTION, WEIGHTS = "README.md", "config.json", "model.safetensors"


def write(source: ExportSource, folder: Path) -> WrittenExport:
    """Write the ONNX graphs, the weights and the model card."""
    written = onnx_files.write(source, folder)
    safetensors.numpy.save_file(
        join_weights(source.run), folder / WEIGHTS, metadata={"format": "pt"}
    )
    runs.write_json(folder / DESCRIPTION, describe(source))
    summary = None
    if (source.run.run.folder / "metrics.json").exists():
        summary = runs.read_metrics(source.run.run.folder)
    names = sorted(path.name for path in folder.iterdir())
    (folder / CARD).write_text(write_card(source, summary, names), encoding="utf-8")
    return written


def join_weights(run: PortableRun) -> Weights:
    """Return the weights of all networks that predict; of several, the names begin with the
    network's number."""
    networks = [
        network
        for member, weight in zip(run.members, run.weights, strict=True)
        for network in member.models
        if weight
    ]
    if len(networks) == 1:
        return networks[0].weights
    return {
        f"{number}/{name}": array
        for number, network in enumerate(networks)
        for name, array in network.weights.items()
    }


def describe(source: ExportSource) -> dict[str, Any]:
    """Return config.json: the network, the columns and the scaling of each member."""
    members = [
        {
            "model": member.first.config.model.model_dump(),
            "signature": member.first.signature.model_dump(),
            "scaler": vars(member.first.scaler),
            "networks": len(member.models),
            "weight": weight,
        }
        for member, weight in zip(source.run.members, source.run.weights, strict=True)
    ]
    return {
        "library_name": "slipstream",
        "slipstream_version": __version__,
        "model_type": source.run.first.config.model.kind,
        "interface": source.interface.describe(),
        "members": members,
    }
