"""A format that writes numbers which differ from the model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slipstream.exporting.formats import ExportSource, WrittenExport
from slipstream.exporting.onnx import files


def write(source: ExportSource, folder: Path) -> WrittenExport:
    written = files.write(source, folder)

    def run(windows):
        return {name: values * 1.0001 for name, values in written.run(windows).items()}

    return replace(written, run=run)
