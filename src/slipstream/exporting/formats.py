"""The formats of an export: a dict of modules, each with `write(source, folder)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import Option, UserError
from slipstream.base.text import find_nearest
from slipstream.exporting.interface import Interface
from slipstream.inference.portable import PortableRun
from slipstream.inference.rows import PhysicalWindows

if TYPE_CHECKING:
    from slipstream.inference.trained import TrainedRun

Floats = npt.NDArray[np.float64]
LIMIT = 1e-5
"""The largest relative difference of an export in float32"""


def to_inputs(windows: PhysicalWindows, dtype: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that there are by name, in this type."""
    return {
        name: np.ascontiguousarray(values, dtype=dtype)
        for name, values in windows._asdict().items()
        if values is not None
    }


class ReferenceBatch(NamedTuple):
    """Some windows, and what the model predicts for them."""

    windows: PhysicalWindows
    outputs: dict[str, Floats]
    truth: Floats | None = None
    """[B, H, C] in physical units, or the numbers of classes, where it is known"""


Runner = Callable[[PhysicalWindows], Mapping[str, npt.NDArray[Any]]]
"""Runs the files that were written: windows to the outputs that the `Interface` names"""


class SeriesPiece(NamedTuple):
    """Consecutive rows of a series in physical units, from where the state is zero."""

    rows: Floats
    """[T, inputs]"""
    static: Floats | None
    """[columns]"""
    future: Floats | None
    """[T, H, columns]: what is known ahead after each row"""


class ReferencePiece(NamedTuple):
    """Such rows, and what the model predicts after some of them."""

    piece: SeriesPiece
    ends: npt.NDArray[np.int64]
    """The rows that predictions are known after"""
    outputs: dict[str, Floats]
    truth: Floats | None = None


PieceRunner = Callable[[SeriesPiece], Mapping[str, npt.NDArray[Any]]]
"""Runs the files that were written row by row: outputs after each row, [T, ...]"""


@dataclass(frozen=True)
class ExportSource:
    """What a format is written from."""

    run: PortableRun
    """Of the user's own class, without weights"""
    interface: Interface
    trained: TrainedRun
    """The same in torch, on the CPU in fp32"""
    read_examples: Callable[[int], ReferenceBatch]
    """Returns so many of the windows that it is verified on, spread evenly over them"""
    read_start: Callable[[int], SeriesPiece]
    """Returns so many rows from the start of a series"""
    units: Mapping[str, str] = field(default_factory=dict)
    """Of columns, as the files state them"""
    new_data: Any = None
    """Rows to verify on, instead of the run's own"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the format itself"""


@dataclass(frozen=True)
class WrittenExport:
    """What a format wrote, and how to run it."""

    run: Runner | None
    """None where the files compute rows one by one only"""
    inside: tuple[str, ...]
    """What the files do, in a few words each"""
    others: Mapping[str, Runner] = field(default_factory=dict)
    """By file: what else has to compute the same"""
    rows: Mapping[str, PieceRunner] = field(default_factory=dict)
    """By file: what computes rows one by one, of models that were trained for a carried state"""
    limit: float = LIMIT
    """The largest relative difference from the model"""
    largest_loss: float | None = None
    """By which share the test error may be larger than the model's; None where it is not measured,
    since the numbers are the same"""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the libraries that wrote and ran the files"""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of export.json"""
    notes: tuple[str, ...] = ()


class ExportFormat(NamedTuple):
    """One format of `slipstream export --to`."""

    module: str
    """Has `write(source: ExportSource, folder: Path) -> WrittenExport`"""
    what: str
    kinds: tuple[str, ...] = ("lstm", "gru", "transformer", "mlp", "linear", "tcn")
    """Of `model.kind`"""
    takes_own_classes: bool = False
    """Whether it can hold the user's own class"""
    settings: tuple[str, ...] = ()
    """Options of the command that are for this format"""
    is_run: bool = False
    """Whether its folder is to be a run as well, which predict, serve and containers take"""
    why_not: str = ""
    """Why it does not hold other kinds"""
    why_no_state: str = ""
    """Why it does not hold models that were trained for a carried state"""

    def load_writer(self) -> Callable[[ExportSource, Path], WrittenExport]:
        """Import the module; a library that is missing is the caller's to report."""
        writer: Callable[[ExportSource, Path], WrittenExport] = import_module(self.module).write
        return writer


FORMATS = {
    "onnx": ExportFormat(
        "slipstream.exporting.onnx.files",
        "ONNX graphs for onnxruntime, MATLAB, C# or a browser",
        takes_own_classes=True,
        is_run=True,
    ),
    "c": ExportFormat(
        "slipstream.exporting.c.files",
        "C99 source for microcontrollers and other programs, row by row",
        ("lstm", "gru", "mlp", "linear", "tcn"),
        settings=("int8", "name", "state", "after_prepare"),
        why_not="attention needs all rows of a window in memory at once",
    ),
    "torch": ExportFormat(
        "slipstream.exporting.torch_program",
        "a torch.export program",
        takes_own_classes=True,
        why_no_state="a program takes windows of data.context rows and starts each from zero",
    ),
    "hub": ExportFormat(
        "slipstream.exporting.hub",
        "a folder for the Hugging Face Hub, with a model card",
        settings=("license",),
        is_run=True,
    ),
    "triton": ExportFormat(
        "slipstream.exporting.triton",
        "a model repository for NVIDIA Triton",
        takes_own_classes=True,
    ),
    "ray": ExportFormat(
        "slipstream.exporting.ray_serve",
        "an application for Ray Serve",
        is_run=True,
    ),
}


def find_format(name: str) -> ExportFormat:
    """Return the format of this name."""
    if name in FORMATS:
        return FORMATS[name]
    nearest = find_nearest(name, FORMATS)
    hint = f'did you mean "{nearest}"?' if nearest else f"there are {', '.join(FORMATS)}"
    raise UserError(Option("to") + f': there is no format "{name}"; {hint}')


def refuse_settings(name: str, settings: Iterable[str]) -> None:
    """Refuse options that are for other formats."""
    for setting in settings:
        if setting not in FORMATS[name].settings:
            others = [other for other, one in FORMATS.items() if setting in one.settings]
            owner = "is for " + Option("to", " or ".join(others)) if others else "is no option"
            raise UserError(Option(setting.replace("_", "-")) + " " + owner, fix="remove it")


def refuse_unsupported(name: str, run: PortableRun) -> None:
    """Refuse a model that the format cannot hold."""
    chosen = FORMATS[name]
    if run.signature.state == "carried" and chosen.why_no_state:
        others = [other for other, one in FORMATS.items() if not one.why_no_state]
        raise UserError(
            f'{run.run.folder}: was trained with train.state = "carried", which '
            + Option("to", name)
            + f" does not hold: {chosen.why_no_state}; use "
            + Option("to", " or ".join(others))
        )
    for member in run.members:
        model = member.first.config.model
        fits = chosen.takes_own_classes if model.is_custom else model.kind in chosen.kinds
        if not fits:
            others = [
                other
                for other, one in FORMATS.items()
                if (one.takes_own_classes if model.is_custom else model.kind in one.kinds)
            ]
            what = "a class of your own" if model.is_custom else f'"{model.kind}"'
            what += f": {chosen.why_not}" if chosen.why_not and not model.is_custom else ""
            raise UserError(
                f"{member.run.folder}: "
                + Option("to", name)
                + f" does not know model.kind = {what}",
                fix="use " + Option("to", " or ".join(others)) if others else None,
            )
