"""The formats of an export, and the inputs and outputs of an exported model.

A format is a module with `write(source, folder)`. All columns are in physical units. Shapes: B
windows, T rows, H predicted rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import Command, Message, Option, Setting, Text, UserError
from slipstream.base.text import find_nearest, format_count
from slipstream.config import Model, Signature
from slipstream.config.prepare import name_step
from slipstream.data.scaler import Scaler
from slipstream.inference.portable import PortableModel, PortableRun
from slipstream.inference.rows import PhysicalWindows
from slipstream.inference.stream import DefaultRegime

if TYPE_CHECKING:
    from slipstream.inference.trained import TrainedRun

ROUNDING = 2.0**-24
"""The share of a value that float32 rounds off at most"""
LARGEST_ROUNDING = 2e-6
"""How far float32 may move a value, of its spread or in scaled units, before rows are float64"""
NUM_ROUNDINGS = 8
"""Roundings of a number by which two float32 programs of the same computation may differ"""


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a run; an ensemble reads the columns of all its members."""

    signature: Signature
    """The signature of the predictions"""
    inputs: tuple[str, ...]
    """Columns of `rows` [B, T, inputs]"""
    static: tuple[str, ...]
    """Columns of `static` [B, columns]"""
    future: tuple[str, ...]
    """Columns of `future` [B, H, columns]: the columns that are known ahead"""
    context: int
    """Rows of a window"""
    fixed_length: bool
    """Whether a window must have exactly `context` rows"""
    patch: int
    """The number of rows must be a multiple of this"""
    dtype: str
    """The type of inputs and numeric outputs: "float32" or "float64" """
    levels: tuple[str, ...]
    """The levels of the intervals, in percent"""
    before: tuple[str, ...]
    """Steps of `data.prepare` that come before the model, by name"""
    after: tuple[str, ...] = ()
    """Operations of `predict` on the model's predictions, by name"""

    @property
    def output(self) -> str:
        """The name of the main output."""
        return "probability" if self.signature.classes else "prediction"

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.output, "lower", "upper") if self.levels else (self.output,)

    def get_output_shape(self, name: str) -> list[str | int]:
        """[B, H, targets], with quantiles or levels of intervals behind, or [B, H, classes]."""
        signature = self.signature
        shape: list[str | int] = ["batch", signature.steps_out]
        if signature.classes:
            return [*shape, len(signature.classes)]
        shape.append(len(signature.targets))
        if name != self.output:
            return [*shape, len(self.levels)]
        return [*shape, len(signature.quantiles)] if signature.quantiles else shape

    def get_input_shapes(self) -> dict[str, list[str | int]]:
        """Shapes by the name of each input."""
        length = self.context if self.fixed_length else "time"
        shapes: dict[str, list[str | int]] = {"rows": ["batch", length, len(self.inputs)]}
        if self.static:
            shapes["static"] = ["batch", len(self.static)]
        if self.future:
            shapes["future"] = ["batch", self.signature.horizon, len(self.future)]
        return shapes

    def describe(self) -> dict[str, Any]:
        """Return the inputs, outputs and steps outside the file, ready for JSON."""
        signature = self.signature
        columns = {"rows": self.inputs, "static": self.static, "future": self.future}
        inputs = {
            name: {"shape": shape, "type": self.dtype, "columns": list(columns[name])}
            for name, shape in self.get_input_shapes().items()
        }
        outputs: dict[str, Any] = {}
        for name in self.outputs:
            kind = "float32" if signature.classes else self.dtype
            outputs[name] = {"shape": self.get_output_shape(name), "type": kind}
            if signature.classes:
                outputs[name]["classes"] = list(signature.classes)
            else:
                outputs[name]["columns"] = list(signature.targets)
            if name != self.output:
                outputs[name]["levels"] = list(self.levels)
            elif signature.quantiles:
                outputs[name]["quantiles"] = list(signature.quantiles)
        return {
            "inputs": inputs,
            "outputs": outputs,
            "context": self.context,
            "length": self._describe_length(),
            "horizon": signature.horizon,
            "step": signature.step,
            "state": signature.state,
            "prepare_before": list(self.before),
            "filter_after": list(self.after),
        }

    def _describe_length(self) -> str:
        if self.fixed_length:
            return format_count(self.context, "row")
        if self.signature.state == "carried":
            return "all rows since the start of the series or the last gap"
        rows = f"any multiple of {self.patch} rows" if self.patch > 1 else "any number of rows"
        return f"{rows}; the model was trained on {self.context}"


def make_interface(run: PortableRun) -> Interface:
    """Return the inputs and outputs of a run."""
    members = [member.first for member in run.members]
    _refuse_other_members(run)
    ordered = [run.first, *members]
    contexts = {model.signature.context for model in members}
    return Interface(
        signature=run.signature,
        inputs=_join(model.signature.inputs for model in ordered),
        static=_join(model.signature.static for model in ordered),
        future=_join(
            model.signature.future for model in ordered if model.signature.future_shape[0]
        ),
        context=max(contexts),
        fixed_length=len(contexts) > 1
        or any(has_fixed_length(model.config.model) for model in members),
        patch=int(np.lcm.reduce([model.config.model.patch for model in members])),
        dtype="float32" if all(map(keeps_digits, members)) else "float64",
        levels=tuple(run.half_widths or ()),
        before=name_steps(run.first),
        after=name_filter(run.first),
    )


def has_fixed_length(model: Model) -> bool:
    """Return whether all windows must have `data.context` rows: weights belong to single rows."""
    spec = model.spec
    flat = spec.is_sequential and model.pool == "flatten"
    return spec.flattens or spec.is_custom or spec.knows_positions or flat


def keeps_digits(model: PortableModel) -> bool:
    """Return whether float32 holds every column closely enough. A value that is far from zero
    compared with its spread loses digits that the scaled value needs. Windows that are divided by
    their own deviation, which may be tiny, need every digit; so do numbers that are compared with
    thresholds."""
    if model.config.model.normalize == "window" or model.config.model.spec.has_thresholds:
        return False
    scaler, signature = model.scaler, model.signature
    targets = () if signature.classes else signature.targets
    columns = (*signature.inputs, *signature.static, *targets)
    spreads = zip(columns, measure_spreads(columns, scaler), strict=True)
    return all(
        max(abs(scaler.low[name]), abs(scaler.high[name])) * ROUNDING
        <= LARGEST_ROUNDING * min(scaler.size[name], spread)
        for name, spread in spreads
    )


def measure_spreads(columns: Iterable[str], scaler: Scaler) -> npt.NDArray[np.float64]:
    """Return the unit of differences in each column: its standard deviation in training.
    A column that was constant there, which `data.scale = "none"` allows, has none: its value."""
    return np.array(
        [scaler.deviation[name] or abs(scaler.high[name]) or 1.0 for name in columns],
        dtype=np.float64,
    )


def widen_limit(limit: float, distance: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the allowed difference, in spreads, of numbers computed from values that are this many
    spreads from zero. Any float32 network computes a scaled prediction of 100 to 1e-5 at best."""
    allowed: npt.NDArray[np.float64] = np.maximum(limit, NUM_ROUNDINGS * ROUNDING * distance)
    return allowed


def name_steps(model: PortableModel) -> tuple[str, ...]:
    """Name the steps of `data.prepare`."""
    steps = enumerate(model.config.data.prepare, start=1)
    return tuple(name_step(number, step) for number, step in steps)


def name_filter(model: PortableModel) -> tuple[str, ...]:
    """Name the filter of the predictions, if there is one."""
    chosen = model.config.predict.filter
    settings = ", ".join(
        f"{name} = {value}" for name, value in chosen.model_dump(exclude_none=True).items()
    )
    return () if chosen.kind == "none" else (f"predict.filter ({settings})",)


def _join(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for columns in names for name in columns))


def _refuse_other_members(run: PortableRun) -> None:
    """Refuse members that cannot be fed from one window: columns of one name are not the same
    numbers, or a state is carried on from before it."""
    steps = run.first.config.data.prepare
    for member in run.members:
        if member.first.config.data.prepare != steps:
            raise UserError(
                f"{member.run.folder}: its data.prepare differs from that of "
                f"{run.members[run.reference].run.folder}, so that one table cannot feed both; "
                "export the members by themselves"
            )
        if len(run.members) > 1 and member.first.signature.state == "carried":
            raise UserError(
                f'{member.run.folder}: was trained with train.state = "carried", so that it needs '
                "more rows than the other members; export the members by themselves"
            )


Floats = npt.NDArray[np.float64]
LIMIT = 1e-5
"""The largest relative difference of an export in float32"""


def to_inputs(windows: PhysicalWindows, dtype: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of the windows by name, without absent ones, converted to this type."""
    return {
        name: np.ascontiguousarray(values, dtype=dtype)
        for name, values in windows._asdict().items()
        if values is not None
    }


class ReferenceBatch(NamedTuple):
    """Some windows and the model's predictions for them."""

    windows: PhysicalWindows
    outputs: dict[str, Floats]
    truth: Floats | None = None
    """[B, H, C]: the targets in physical units, or class numbers; None where unknown"""


Runner = Callable[[PhysicalWindows], Mapping[str, npt.NDArray[Any]]]
"""Runs the files that were written: windows to the outputs that the `Interface` names"""


class SeriesPiece(NamedTuple):
    """Consecutive rows of a series in physical units, starting where the state is zero."""

    rows: Floats
    """[T, inputs]"""
    static: Floats | None
    """[columns]"""
    future: Floats | None
    """[T, H, columns]: the columns known ahead, after each row"""


class ReferencePiece(NamedTuple):
    """A piece of a series and the model's predictions after some of its rows."""

    piece: SeriesPiece
    ends: npt.NDArray[np.int64]
    """The rows of the piece after which there is a prediction"""
    outputs: dict[str, Floats]
    truth: Floats | None = None


PieceRunner = Callable[[SeriesPiece], Mapping[str, npt.NDArray[Any]]]
"""Runs the files that were written row by row: outputs after each row, [T, ...]"""


@dataclass(frozen=True)
class ExportSource:
    """The run and the data from which a format is written."""

    run: PortableRun
    """The run without torch; a network of the user's own class comes without weights"""
    interface: Interface
    trained: TrainedRun
    """The same run in torch, on the CPU in fp32"""
    read_examples: Callable[[int], ReferenceBatch]
    """Returns this many of the windows for the verification, evenly spread"""
    read_start: Callable[[int], SeriesPiece]
    """Returns this many rows from the start of a series"""
    regime: DefaultRegime
    """What to deploy, unless the options of the format choose otherwise"""
    units: Mapping[str, str] = field(default_factory=dict)
    """Units by column, as the data files state them"""
    new_data: Any = None
    """Rows to verify on, instead of the run's own data"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that only this format has"""


@dataclass(frozen=True)
class WrittenExport:
    """The result of writing a format: functions that run the files, and facts for export.json."""

    run: Runner | None
    """Runs the main file on windows; None where the files take single rows only"""
    inside: tuple[str, ...]
    """The operations inside the files, a few words each"""
    window_runners: Mapping[str, Runner] = field(default_factory=dict)
    """By file: further programs that must give the same predictions for windows"""
    rows: Mapping[str, PieceRunner] = field(default_factory=dict)
    """By file: programs that take rows one by one, of models trained for a carried state"""
    limit: float = LIMIT
    """The largest relative difference from the model"""
    largest_loss: float | None = None
    """The share by which the test error may exceed the model's; None where it is not measured
    because the numbers are the same"""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote and ran the files"""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of export.json"""
    notes: tuple[str, ...] = ()


class ExportFormat(NamedTuple):
    """One format of `slipstream export --to`."""

    module: str
    """Has `write(source: ExportSource, folder: Path) -> WrittenExport`"""
    description: str
    takes_own_classes: bool = False
    """Whether the format can hold the user's own class"""
    settings: tuple[str, ...] = ()
    """Options of the command that are for this format"""
    is_run: bool = False
    """Whether the folder is a run as well, for predict, serve and containers"""
    why_no_state: str = ""
    """Why the format does not hold models trained for a carried state; "" where it does"""

    def holds(self, model: Model) -> bool:
        """Return whether the format can hold a model of this kind."""
        return self.takes_own_classes or not model.is_custom

    def load_writer(self) -> Callable[[ExportSource, Path], WrittenExport]:
        """Import the module of the format; the caller reports a missing library."""
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
        settings=("int8", "name", "state", "after_prepare"),
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
            accepting = [key for key, format_ in FORMATS.items() if setting in format_.settings]
            owner = "is for " + _name_formats(accepting) if accepting else "is no option"
            raise UserError(Option(setting.replace("_", "-")) + " " + owner, fix="remove it")


def _name_formats(names: Sequence[str]) -> Message:
    """Return the option with the first format, and the other formats."""
    return Option("to", names[0]) + "".join(f" or {name}" for name in names[1:])


def refuse_series_scales(run: PortableRun, reason: Text) -> None:
    """Refuse a model that scales each series by itself."""
    for member in run.members:
        if member.first.scaler.series:
            raise UserError(
                f'{member.run.folder}: was trained with data.scale_by = "series", but '
                + reason
                + "; use "
                + Command("predict")
                + ", a Stream or the server, or train it with "
                + Setting({"data.scale_by": "window"})
            )


def refuse_unsupported(name: str, run: PortableRun) -> None:
    """Refuse a model that the format cannot hold."""
    chosen = FORMATS[name]
    refuse_series_scales(run, Option("to", name) + " has one scale for all series")
    if run.signature.state == "carried" and chosen.why_no_state:
        accepting = [key for key, format_ in FORMATS.items() if not format_.why_no_state]
        raise UserError(
            f'{run.run.folder}: was trained with train.state = "carried", which '
            + Option("to", name)
            + f" does not hold: {chosen.why_no_state}; use "
            + _name_formats(accepting)
        )
    for member in run.members:
        model = member.first.config.model
        if not chosen.holds(model):
            accepting = [key for key, format_ in FORMATS.items() if format_.holds(model)]
            raise UserError(
                f"{member.run.folder}: "
                + Option("to", name)
                + " does not know model.kind = a class of your own",
                fix="use " + _name_formats(accepting) if accepting else None,
            )
