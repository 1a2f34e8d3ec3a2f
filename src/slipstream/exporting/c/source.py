"""The C source of a model: header, memory and the functions that are called."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata, resources
from typing import Any, NamedTuple

import jinja2
import numpy as np
import numpy.typing as npt

from slipstream.base.statistics import find_median
from slipstream.base.text import escape_controls, format_c_double, format_count
from slipstream.config import Signature
from slipstream.config.prepare import name_step
from slipstream.data.files import read_tables
from slipstream.data.filters import FilterDesign, design_filter
from slipstream.data.prepare.chain import StepPlan
from slipstream.data.prepare.frames import SeriesFrame, split_frames
from slipstream.data.prepare.resampling import ROUNDING, get_lengths
from slipstream.data.prepare.steps import Resampling, Step, StepInputs, make_step
from slipstream.data.series import Times, is_date, list_rows
from slipstream.exporting.c.prepare import PreparedColumns
from slipstream.exporting.formats import Interface
from slipstream.inference.networks import explain_no_steps
from slipstream.inference.portable import PortableModel, PortableRun, Widths
from slipstream.models.c_code import (
    LANES,
    POINTER_BYTES,
    ConstArrays,
    NetworkShape,
    add_network,
    format_float,
    format_floats,
    format_integers,
    format_list,
)
from slipstream.models.kinds import load_kind
from slipstream.models.numpy_layers import NORM_EPSILON, SMALLEST_VARIANCE
from slipstream.models.shapes import count_products

Floats = npt.NDArray[np.float64]
MAX_ROWS = 1_000_000
"""Rows compared of a table on disk, which may be larger than memory"""


class SeriesRows(NamedTuple):
    """All rows of one series."""

    name: str
    raw: Floats
    """[rows, columns] before `data.prepare`"""
    prepared: Floats
    """[rows, inputs] after `data.prepare`, without padding"""
    times: Times | None = None
    """[rows] before `data.prepare`; None where rows have no times"""
    new_times: Times | None = None
    """[rows] after `data.prepare`, without padding"""
    num_late: int = 0
    """Rows left out because the code ignores them: they repeat the time of a complete new row"""


def iter_series(model: PortableModel, steps: PreparedColumns, source: Any) -> Iterator[SeriesRows]:
    """Yield every series of the run's own data, or of new data; of a table on disk, those of its
    first rows."""
    data = model.config.data
    if isinstance(source, (str, os.PathLike)):
        data, source = data.model_copy(update={"path": str(source)}), None
    own = [name for name in steps.columns if name not in _list_written(steps.given)]
    plan = StepPlan((*steps.given, *steps.steps), data)
    names = dict.fromkeys(own, "data.inputs") | plan.list_sources()
    for table in read_tables(data, source):
        if table.row_groups and table.num_rows > MAX_ROWS:
            table = table.slice_rows(0, MAX_ROWS)
        for frame in split_frames(table, data, names, 0):
            for step in steps.given:
                limits = model.limits.get(str(step.number))
                frame = step.apply(frame, StepInputs(data.context, limits))
            num_rows = frame.num_rows
            if steps.resampling is not None:
                frame = _drop_late_rows(frame, steps.resampling)
            num_late = num_rows - frame.num_rows
            raw = np.stack([frame.columns[name] for name in steps.columns], axis=1)
            times = frame.times
            for step in steps.steps:
                limits = model.limits.get(str(step.number))
                frame = step.apply(frame, StepInputs(data.context, limits))
            inputs = [frame.columns[name][frame.padding :] for name in model.signature.inputs]
            prepared = np.stack(inputs, axis=1)
            new_times = None if frame.times is None else frame.times[frame.padding :]
            yield SeriesRows(frame.name, raw, prepared, times, new_times, num_late)


def _drop_late_rows(frame: SeriesFrame, step: Resampling) -> SeriesFrame:
    """Return the rows without those that repeat a time at the very end of a bin: the first of them
    completes the new row, which C code does not take back."""
    times = frame.times
    assert times is not None
    every, _ = get_lengths(times, step.config.every, step.config.limit)
    rounding = 0 if is_date(times) else ROUNDING * every
    at_end = np.abs(times - np.round(times / every) * every) <= rounding
    if is_date(times):
        at_end = times % every == 0  # exact, where a double is not
    remains = ~(np.append(False, np.diff(times) == 0) & at_end)
    if remains.all():
        return frame
    return replace(
        frame,
        times=times[remains],
        columns={name: values[remains] for name, values in frame.columns.items()},
        origin=list_rows(frame.origin)[remains],
    )


def _list_written(steps: Sequence[Step[Any]]) -> set[str]:
    return {name for step in steps for name in step.writes}


BYTES = {"float": 4, "int32_t": 4, "double": 8}


@dataclass(frozen=True)
class CSettings:
    """Options of the C code."""

    name: str = "slip"
    """The prefix of files, functions and constants"""
    int8: bool = False
    """Whether matrices have 8 bits and a scale for each row"""
    double: bool = False
    """Whether rows and predictions are double: float would lose digits of some column"""
    carried: bool = True
    """Whether a step carries the network's state instead of a window, where the model can"""
    after_prepare: bool | str = False
    """Whether the caller passes rows to which `data.prepare` has been applied; or the kind of the
    last step that has been, such as "resample" """
    has_dates: bool = False
    """Whether the times of rows that are resampled are dates and not plain numbers"""
    filtered: bool = True
    """Whether a step filters its predictions, where the run does"""
    has_steps: bool = True
    """Whether the code has functions for single rows; that of a model of an ensemble has none"""

    @property
    def value_type(self) -> str:
        return "double" if self.double else "float"


@dataclass(frozen=True)
class CSizes:
    """Memory and operations of a model on a 32-bit microcontroller, without its code."""

    flash_bytes: int
    """Constant arrays and tables"""
    scratch_bytes: int
    """Memory that all calls share"""
    state_bytes: int
    """Memory of one series"""
    num_weights: int
    step_multiply_adds: int
    window_multiply_adds: int | None
    """None where windows are not computed"""


@dataclass(frozen=True)
class StepParts:
    """The parts of a step function beside the network."""

    networks: int
    carried: bool
    prepared: int = 0
    """Numbers that the steps of `data.prepare` keep"""
    resampled: int = 0
    """Columns of rows that are resampled; 0 where none are"""
    padded: bool = False
    """Whether rows are put before the first one"""
    filter_past: int = 0
    """Numbers that `predict.filter` keeps of the past"""
    has_window: bool = True
    """Whether the code has a function for windows; a model trained for a carried state has none"""


class About(NamedTuple):
    """The model's origin, as the header states it."""

    run: str = ""
    units: Mapping[str, str] = {}
    """Units by column, where they are known"""
    regime: str = ""
    """Why a step carries the state or predicts windows"""


@dataclass(frozen=True)
class CLayout:
    """All facts that decide the C code, except for the weights."""

    model: PortableModel
    shape: NetworkShape
    settings: CSettings
    parts: StepParts
    sizes: CSizes
    """Of an ensemble: of all of its models together"""
    prepared: PreparedColumns | None
    about: About
    members: tuple[MemberLayout, ...] = ()
    """The models of an ensemble, each with code of its own; `model` then has the columns of all"""

    @property
    def sources(self) -> list[str]:
        """The names of the source files."""
        return [f"{layout.settings.name}.c" for layout in (self, *(m.layout for m in self.members))]


class MemberLayout(NamedTuple):
    """A model of an ensemble."""

    layout: CLayout
    weight: float


class StructMember(NamedTuple):
    """A member of a struct."""

    kind: str
    name: str
    length: int = 0
    """Length of an array; 0 for a single value"""
    num_bytes: int = 4
    """Size of one value"""

    @property
    def text(self) -> str:
        array = f"[{self.length}]" if self.length else ""
        return f"{self.kind} {self.name}{array}"

    @property
    def total(self) -> int:
        return max(self.length, 1) * self.num_bytes


def list_cells(shape: NetworkShape) -> list[StructMember]:
    """Return the members of a network's state."""
    layers = shape.layers
    floats = [StructMember("float", name, length) for name, length in layers.cells.items()]
    return floats + [
        StructMember("int32_t", name, length) for name, length in layers.counters.items()
    ]


def list_state(shape: NetworkShape, settings: CSettings, parts: StepParts) -> list[StructMember]:
    """Return the members of a series' state, those of 8 bytes first."""
    value = StructMember(f"{settings.name}_value", "", 0, BYTES[settings.value_type])
    signature, inputs = shape.signature, len(shape.signature.inputs)
    result = [StructMember("double", "prepare", parts.prepared, 8)] if parts.prepared else []
    if parts.filter_past:
        targets = 1 if signature.classes else len(signature.targets)
        outputs = signature.steps_out * targets * signature.outputs
        result.append(StructMember("double", "filter_first", outputs, 8))
        result.append(StructMember("double", "filter_past", outputs * parts.filter_past, 8))
    if parts.resampled:
        result += _list_bins(parts.resampled, settings)
    if shape.holds:
        result.append(value._replace(name="last", length=inputs))
    if parts.carried:
        cells = sum(cell.total for cell in list_cells(shape))
        count = parts.networks * signature.sequences_per_window
        result.append(StructMember(f"{settings.name}_cells", "cells", count, cells))
    else:
        result.append(value._replace(name="ring", length=signature.context * inputs))
        result.append(StructMember("int32_t", "next"))
    if parts.filter_past:
        result += [StructMember("int32_t", "filtered"), StructMember("int32_t", "filter_next")]
    if parts.padded:
        result.append(StructMember("int32_t", "padded"))
    if parts.resampled:
        result.append(StructMember("int32_t", "bin_count", parts.resampled))
        result.append(StructMember("int32_t", "has_value", parts.resampled))
        flags = ("has_row", "has_made", "is_pending", "follows")
        result += [StructMember("int32_t", name) for name in flags]
    return [*result, StructMember("int32_t", "rows")]


def _list_bins(columns: int, settings: CSettings) -> list[StructMember]:
    """Return the members of 8 bytes that resampling needs: the open bin and the newest row."""
    time = StructMember(f"{settings.name}_time", "", 0, 8)
    rows = ("pending", "bin_sum", "bin_first", "bin_last")
    return [
        *(StructMember("double", name, columns, 8) for name in rows),
        time._replace(name="bin_seen", length=columns),
        *(time._replace(name=name) for name in ("pending_time", "bin_time")),
        *(StructMember("int64_t", name, 0, 8) for name in ("bin_number", "bin_next", "bin_made")),
    ]


def list_scratch(shape: NetworkShape, settings: CSettings, parts: StepParts) -> list[StructMember]:
    """Return the members of the memory that calls share, beside rows and outputs."""
    result = [StructMember("float", name, count) for name, count in shape.list_work().items()]
    if not shape.is_flat and parts.has_window:
        if cells := sum(cell.total for cell in list_cells(shape)):
            result.append(StructMember(f"{settings.name}_cells", "cells", 0, cells))
        if shape.model.pool == "attention":
            result += [StructMember("float", "largest"), StructMember("float", "weights")]
    return [*result, StructMember("int32_t", "failed")]


def measure_sizes(
    shape: NetworkShape, settings: CSettings, parts: StepParts, constants: int, num_weights: int
) -> CSizes:
    """Return the sizes of a model with this many bytes of constants."""
    signature = shape.signature
    outputs = signature.steps_out * signature.model_targets * signature.outputs
    rows = shape.rows_at_once * signature.model_inputs
    token, head = count_products(shape.model, shape.signature)
    passes = parts.networks * signature.sequences_per_window
    tokens = 1 if shape.is_flat else shape.tokens
    constant = load_kind(shape.model).count_constant_products(shape.model, signature, tokens)
    window = passes * (token * tokens + head + constant)
    return CSizes(
        flash_bytes=constants,
        scratch_bytes=4 * (rows + outputs + max(outputs, LANES))
        + _measure(list_scratch(shape, settings, parts)),
        state_bytes=_measure(list_state(shape, settings, parts)),
        num_weights=num_weights,
        step_multiply_adds=passes * (token + head) if parts.carried else window,
        window_multiply_adds=window if parts.has_window else None,
    )


def _measure(members: Iterable[StructMember]) -> int:
    """Return the bytes of a struct; members of 8 bytes have to come first."""
    ordered = list(members)
    total = sum(member.total for member in ordered)
    return total + total % 8 if any(member.num_bytes == 8 for member in ordered) else total


def format_defines(defines: Mapping[str, int]) -> str:
    return "\n".join(f"#define {name} {value}" for name, value in defines.items())


WIDTH = 96
ARM = "-mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16"


def describe_model(layout: CLayout) -> list[str]:
    """Return the lines of the header's comment."""
    parts = (_describe_network, _list_columns, _describe_steps, _describe_sizes, _describe_use)
    lines: list[str] = []
    for part in parts:
        lines += ["", *part(layout)] if lines else part(layout)
    return [wrapped for line in lines for wrapped in _wrap(line)]


def _wrap(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    safe = escape_controls(line)
    for mark in ("*/", "/*", "??"):  # they would end the comment, or warn
        safe = safe.replace(mark, " ".join(mark))
    return textwrap.wrap(safe, WIDTH, subsequent_indent=indent + "  ") or [""]


def _describe_network(layout: CLayout) -> Iterator[str]:
    signature, settings = layout.model.signature, layout.settings
    ahead = f", {format_count(signature.horizon, 'row')} ahead" if signature.horizon else ""
    is_fitted = layout.model.config.model.spec.is_fitted and not layout.members
    if layout.members:
        yield f"The weighted mean of {format_count(len(layout.members), 'model')}{ahead}:"
        for member, weight in layout.members:
            yield f"  {weight:.3g}  {member.settings.name}.c: {_name_network(member)}"
    else:
        yield f"{_name_network(layout)}{ahead}."
    if signature.step is not None:
        yield f"One row every {signature.step:g} (seconds, or the unit of the time column)."
    numbers = (
        "Networks are in float: sums of 8 rows of a matrix at a time stay in registers, there is "
        "no double in the inner loops. Columns are scaled in double, as in training."
    )
    if is_fitted:
        numbers = (
            "Columns are scaled, and features of the window summed, in double, as when it was "
            "fitted: it compares them with thresholds. Its weights are float."
        )
    yield f"C99 without heap; math.h, string.h and stdint.h only. {numbers}"
    if settings.int8:
        yield (
            "Matrices are int8 with a scale for each row; everything else"
            + (", thresholds and leaves too, is float." if is_fitted else " is float.")
        )
    if settings.double:
        yield "Rows and predictions are double: in float, a column would lose digits."


def _name_network(layout: CLayout) -> str:
    """Return the kind, the widths and the windows of a model."""
    model = layout.model.config.model
    widths = "fitted" if model.spec.is_fitted else " x ".join(map(str, layout.shape.sizes))
    widths = widths or "no hidden layer"
    count = layout.parts.networks
    networks = f"the mean of {count} networks; " if count > 1 else ""
    rows = f"windows of {format_count(layout.model.signature.context, 'row')}"
    if not layout.parts.has_window:
        rows = "trained to carry its state on from row to row"
    return f"{model.kind}, {widths}; {networks}{rows}"


def _list_columns(layout: CLayout) -> Iterator[str]:
    signature, name = layout.model.signature, layout.settings.name
    if layout.prepared:
        yield f"Columns of a row for {name}_step and {name}_prepare_state, physical units:"
        yield from (f"  {i}  {column}" for i, column in enumerate(layout.prepared.columns))
        whose = f"of a row for {name}_window" if layout.parts.has_window else "that the model reads"
        yield f"Columns {whose}, after data.prepare (range in training):"
    else:
        yield "Columns of a row, in physical units (range in training):"
    yield from _list_named(layout, signature.inputs)
    if signature.static:
        yield "Columns of `constants`:"
        yield from _list_named(layout, signature.static)
    if signature.future_shape[0]:
        yield f"Columns of `future`, [{signature.horizon}][{len(signature.future)}]:"
        yield from _list_named(layout, signature.future)
    if signature.classes:
        yield f"Predictions: the probability of each class, {', '.join(signature.classes)}."
    else:
        yield "Predictions, in physical units:"
        yield from _list_named(layout, signature.targets)
    if signature.quantiles:
        levels = ", ".join(f"{level:g}" for level in signature.quantiles)
        yield f"Each has the quantiles {levels}."
    if signature.output_range is not None:
        low, high = signature.output_range
        yield f"Limited to {low:g} to {high:g}."


def _list_named(layout: CLayout, names: Sequence[str]) -> Iterator[str]:
    scaler = layout.model.scaler
    units = dict(layout.about.units)
    for number, step in enumerate(layout.model.config.data.prepare, start=1):
        units |= make_step(number, step).units
    for i, name in enumerate(names):
        unit = f" [{units[name]}]" if name in units else ""
        yield f"  {i}  {name}{unit}: {scaler.low[name]:g} to {scaler.high[name]:g}"


def _describe_steps(layout: CLayout) -> Iterator[str]:
    name = layout.settings.name
    given = [name_step(n, step) for n, step in enumerate(layout.model.config.data.prepare, 1)]
    if layout.prepared:
        given = [step.where for step in layout.prepared.given]
        inside = "; ".join(step.where for step in layout.prepared.steps)
        if inside:
            yield f"Inside {name}_step, in double: {inside}."
    if given:
        yield f"NOT inside, to be done to the rows before: {'; '.join(given)}."
    elif not layout.prepared:
        models = "the models and their mean" if layout.members else "the network"
        yield f"Inside: scaling, {models}, predictions in physical units."
    if layout.parts.resampled:
        yield from _describe_resampling(layout)
    if layout.parts.filter_past:
        kind = layout.model.config.predict.filter.kind
        window = f"; {name}_window not" if layout.parts.has_window else ""
        yield f'{name}_step filters its predictions (predict.filter, "{kind}"){window}.'


def _describe_resampling(layout: CLayout) -> Iterator[str]:
    """Say what goes in and out where rows are resampled."""
    assert layout.prepared is not None
    assert layout.prepared.resampling is not None
    config = layout.prepared.resampling.config
    unit = "in microseconds" if layout.settings.has_dates else "in the unit of the time column"
    yield (
        f"Rows come at any times, {unit}, none earlier than the one before. Each new row, one "
        f"every {config.every}, is predicted once: by the call with a row at its very time, or "
        "else by the first call with a later one. A call that completes several new rows returns "
        "the prediction after the last. After a gap, the context begins anew by itself. A row that "
        "repeats the time of a new row which is complete comes too late for it."
    )


def _describe_sizes(layout: CLayout) -> Iterator[str]:
    name, sizes = layout.settings.name, layout.sizes
    weights = f"{sizes.num_weights:,} weights"
    yield f"Flash: {sizes.flash_bytes:,} bytes of constants ({weights}), and code."
    if not layout.settings.has_steps:
        yield (
            f"RAM: {sizes.scratch_bytes:,} bytes that all calls share. Calls must not overlap. "
            f"Multiply-adds: {sizes.window_multiply_adds:,} a window."
        )
        return
    yield (
        f"RAM: {sizes.scratch_bytes:,} bytes that all calls share, and {sizes.state_bytes:,} for "
        f"each {name}_state ({name}_step has one of its own). Calls must not overlap."
    )
    window = sizes.window_multiply_adds
    windows = "" if window is None else f", {window:,} a window"
    yield f"Multiply-adds: {sizes.step_multiply_adds:,} a step{windows}."
    because = f": {layout.about.regime}" if layout.about.regime else ""
    if not layout.parts.has_window:
        yield (
            f"{name}_step carries the network's state from row to row, as in training: call "
            f"{name}_reset at the start of each series and after a gap, and pass every row."
        )
    elif layout.parts.carried:
        yield (
            f"Use {name}_step, which carries the network's state from row to row{because}. "
            f"{name}_window starts each window from a state of zero, as training and slipstream "
            "predict do."
        )
    else:
        rows = format_count(layout.model.signature.context, "row")
        yield (
            f"Use {name}_step, which keeps the last {rows} and predicts their window, as "
            f"slipstream predict does{because}."
        )


def _describe_use(layout: CLayout) -> Iterator[str]:
    if not layout.settings.has_steps:
        return
    files = " ".join(layout.sources)
    yield f"Compile:    cc -std=c99 -O2 -ffunction-sections -fdata-sections -c {files}"
    yield f"Self-test:  cc -std=c99 -O2 {files} main.c -lm -o selftest && ./selftest"
    yield f"Cortex-M4F: arm-none-eabi-gcc {ARM}"
    yield f"            -std=c99 -O2 -ffunction-sections -fdata-sections -c {files}"


def describe_step(layout: CLayout) -> str:
    """Return the comment of the step function."""
    upper, parts = layout.settings.name.upper(), layout.parts
    does = "carry the state on" if parts.carried else f"predict from the last {upper}_CONTEXT rows"
    row = f"row[{upper}_COLUMNS]" if layout.prepared else f"row[{upper}_INPUTS]"
    if parts.resampled:
        row += " with its time"
        does += ", where it completes a new row"
    early = "out is a prediction from fewer rows" if parts.carried else "out is not written"
    missing = " A missing value (NaN) is the last known one." if layout.shape.holds else ""
    text = (
        f"Take one {row} and {does}. Returns 1 where out holds a prediction from at least "
        f"{upper}_CONTEXT rows, and 0 before that: {early}. A row with a value that is not finite, "
        f"or that a float cannot hold once it is scaled, is ignored, and 0 is returned.{missing} "
        "Where a value is so large that the network cannot compute it, 0 is returned and out is "
        f"NaN, until {upper}_CONTEXT other rows have come."
    )
    if parts.resampled:
        text += " A row that completes no new row returns 0, and out is not written."
    return "/* " + "\n * ".join(textwrap.wrap(text, WIDTH)) + " */"


@dataclass(frozen=True)
class CSource:
    """A model in C."""

    layout: CLayout
    values: Mapping[str, Any]
    """The variables of the templates"""
    members: tuple[CSource, ...] = ()
    """The models of an ensemble"""

    @property
    def files(self) -> dict[str, str]:
        """The texts of the source and its header by name."""
        name = self.layout.settings.name
        template = "ensemble.c.j2" if self.members else "model.c.j2"
        texts = {
            f"{name}.c": render(template, self.values),
            f"{name}.h": render("model.h.j2", self.values),
        }
        for member in self.members:
            texts |= member.files
        return texts


def make_source(
    models: Sequence[PortableModel],
    settings: CSettings,
    *,
    half_widths: Widths | None = None,
    about: About | None = None,
) -> CSource:
    """Return the C code of networks whose mean is the prediction; they differ in weights only."""
    arrays = ConstArrays(settings.int8)
    layout, networks, design = _lay_out(models, settings, arrays, half_widths or {}, about)
    shape, parts = layout.shape, layout.parts
    values = {
        "arrays": "\n".join(arrays.lines),
        "networks": networks,
        "cells": [member.text for member in list_cells(shape)],
        "work": [member.text for member in list_scratch(shape, settings, parts)],
        "members": [],
        **_list_steps(layout, design, half_widths or {}),
        **_list_shape(shape, settings),
    }
    return CSource(layout, values)


def _list_steps(
    layout: CLayout, design: FilterDesign | None, half_widths: Widths
) -> dict[str, Any]:
    """Return the template variables of the functions, of a model and of an ensemble."""
    settings, parts, prepared = layout.settings, layout.parts, layout.prepared
    state = list_state(layout.shape, settings, parts)
    return {
        "state": [member.text for member in state],
        "carried": parts.carried,
        "has_window": parts.has_window,
        "has_steps": settings.has_steps,
        "about": describe_model(layout),
        "run": layout.about.run,
        "step_comment": describe_step(layout),
        "raw_columns": prepared.columns if prepared else (),
        "pad_rows": 0,
        "resample": None,
        "time_param": f"{settings.name}_time time, " if parts.resampled else "",
        **(prepared.values if prepared else {}),
        "filter": None if design is None else _list_filter(design),
        "half_widths": [
            (level, format_list(widths.ravel(), double=True))
            for level, widths in half_widths.items()
        ],
        **_list_interface(layout.model.signature, settings, holds=layout.shape.holds),
        **_list_scaling(layout.model),
    }


def make_ensemble_source(
    run: PortableRun,
    interface: Interface,
    settings: CSettings,
    *,
    half_widths: Widths | None = None,
    about: About | None = None,
) -> CSource:
    """Return the C code of an ensemble: a source for each model, which predicts windows, and one
    that prepares rows, keeps them, and returns the weighted mean."""
    used = [pair for pair in zip(run.members, run.weights, strict=True) if pair[1]]
    sources = []
    for number, (member, _) in enumerate(used, start=1):
        own = replace(
            settings,
            name=f"{settings.name}_{number}",
            carried=False,
            after_prepare=True,
            filtered=False,
            has_steps=False,
        )
        origin = About(member.name, about.units if about else {})
        sources.append(make_source(member.models, own, about=origin))
    layouts = [source.layout for source in sources]
    members = tuple(map(MemberLayout, layouts, (weight for _, weight in used)))
    joint = join_models(run, interface)
    holds = joint.config.data.missing == "forward"
    shape = NetworkShape(joint.config.model, joint.signature, holds)
    prepared = _prepare(joint, settings)
    design = _design_filter(joint, settings)
    parts = _list_parts(joint, len(sources), prepared, design, carried=False)
    described = [
        _describe_member(member.layout, member.weight, joint.signature) for member in members
    ]
    work = _list_ensemble_scratch(members, joint.signature, settings)
    sizes = [member.layout.sizes for member in members]
    constants = sum(size.flash_bytes for size in sizes)
    constants += sum(member["num_bytes"] for member in described)
    constants += _count_constants(joint, prepared, design, half_widths or {})
    window = sum(size.window_multiply_adds or 0 for size in sizes)
    layout = CLayout(
        joint,
        shape,
        settings,
        parts,
        CSizes(
            flash_bytes=constants,
            scratch_bytes=sum(size.scratch_bytes for size in sizes) + _measure(work),
            state_bytes=_measure(list_state(shape, settings, parts)),
            num_weights=sum(size.num_weights for size in sizes),
            step_multiply_adds=window,
            window_multiply_adds=window,
        ),
        prepared,
        about or About(),
        members,
    )
    values = {
        "members": described,
        "work": [member.text for member in work],
        **_list_steps(layout, design, half_widths or {}),
    }
    return CSource(layout, values, tuple(sources))


def join_models(run: PortableRun, interface: Interface) -> PortableModel:
    """Return a model without weights that reads the columns of all members."""
    models = [run.first, *(member.first for member in run.members)]
    scalers = [model.scaler for model in reversed(models)]  # the reference's columns count

    def join(part: str) -> dict[str, float]:
        return {name: value for by in scalers for name, value in getattr(by, part).items()}

    scaler = replace(
        run.first.scaler,
        shift=join("shift"),
        size=join("size"),
        deviation=join("deviation"),
        low=join("low"),
        high=join("high"),
    )
    columns = {name: getattr(interface, name) for name in ("inputs", "static", "future", "context")}
    signature = run.signature.model_copy(update=columns)
    limits = {number: found for model in reversed(models) for number, found in model.limits.items()}
    return PortableModel(run.first.config, signature, scaler, {}, limits)


def _describe_member(layout: CLayout, weight: float, joint: Signature) -> dict[str, Any]:
    """Return what the template says of a model: which columns it reads, and where in its outputs
    those of the ensemble are."""
    own = layout.model.signature
    low, high, share = find_median(own.quantiles)
    per_target = own.outputs
    places = list[int]()
    others = list[int]()
    for step in range(joint.steps_out):
        for target in range(1 if joint.classes else len(joint.targets)):
            place = 0 if joint.classes else own.targets.index(joint.targets[target])
            first = (step * len(own.targets) + place) * per_target
            if joint.outputs == per_target:
                places += range(first, first + per_target)
            else:
                places.append(first + low)
                others.append(first + high)
    interpolates = bool(others) and share > 0
    is_same = places == list(range(len(places))) and not interpolates
    ahead = own.future if own.future_shape[0] else ()
    lists = {
        "columns": [joint.inputs.index(name) for name in own.inputs],
        "constants": [joint.static.index(name) for name in own.static],
        "future": [joint.future.index(name) for name in ahead],
        "places": [] if is_same else places,
        "next": others if interpolates else [],
    }
    return {
        "name": layout.settings.name,
        "about": _name_network(layout),
        "weight": format_c_double(weight),
        "share": format_c_double(share) if interpolates else "",
        "rest": format_c_double(1 - share),
        "num_bytes": 4 * sum(map(len, lists.values())),
        **{name: format_integers(values) if values else "" for name, values in lists.items()},
    }


def _list_ensemble_scratch(
    members: Sequence[MemberLayout], joint: Signature, settings: CSettings
) -> list[StructMember]:
    """Return the members of the memory that calls of an ensemble share: the window, the numbers
    beside it and the outputs of one model, and the sums."""
    own = [member.layout.model.signature for member in members]
    value = StructMember(f"{settings.name}_value", "", 0, BYTES[settings.value_type])
    targets = 1 if joint.classes else len(joint.targets)

    def size(signature: Signature) -> int:
        return signature.steps_out * targets * signature.outputs

    result = [StructMember("double", "total", size(joint), 8)]
    result.append(value._replace(name="rows", length=max(s.context * len(s.inputs) for s in own)))
    result.append(value._replace(name="out", length=max(map(size, own))))
    pointer = StructMember(f"const {settings.name}_value", "", 0, POINTER_BYTES)
    if joint.static:
        width = max(len(signature.static) for signature in own)
        result.append(value._replace(name="member_constants", length=max(width, 1)))
        result.append(pointer._replace(name="*constants"))
    if joint.future_shape[0]:
        width = max(math.prod(signature.future_shape) for signature in own)
        result.append(value._replace(name="member_future", length=max(width, 1)))
        result.append(pointer._replace(name="*future"))
    return [*result, StructMember("int32_t", "failed")]


def compute_sizes(model: PortableModel, settings: CSettings, half_widths: Widths) -> CSizes:
    """Return the sizes that the C code of a network states, without writing it; of the weights only
    the shapes matter."""
    arrays = ConstArrays(settings.int8, has_text=False)
    layout, _, _ = _lay_out([model], settings, arrays, half_widths, None)
    return layout.sizes


def _lay_out(
    models: Sequence[PortableModel],
    settings: CSettings,
    arrays: ConstArrays,
    half_widths: Widths,
    about: About | None,
) -> tuple[CLayout, list[Any], FilterDesign | None]:
    """Add the networks to the arrays; return the layout with its sizes, the networks, and the
    filter of the predictions, if there is one."""
    first = models[0]
    holds = first.config.data.missing == "forward"
    carried = settings.carried and explain_no_steps(first.config.model) is None
    shape = NetworkShape(first.config.model, first.signature, holds, carried)
    networks = [add_network(arrays, shape, model.weights, i) for i, model in enumerate(models)]
    prepared = _prepare(first, settings)
    design = _design_filter(first, settings)
    parts = _list_parts(first, len(models), prepared, design, carried=carried)
    constants = arrays.num_bytes + shape.layers.num_bytes
    constants += _count_constants(first, prepared, design, half_widths)
    sizes = measure_sizes(shape, settings, parts, constants, arrays.num_weights)
    layout = CLayout(first, shape, settings, parts, sizes, prepared, about or About())
    return layout, networks, design


def _design_filter(model: PortableModel, settings: CSettings) -> FilterDesign | None:
    """Return the filter of the predictions, if there is one."""
    if not settings.filtered:
        return None
    return design_filter(model.config.predict.filter, model.signature.step)


def _list_parts(
    model: PortableModel,
    networks: int,
    prepared: PreparedColumns | None,
    design: FilterDesign | None,
    *,
    carried: bool,
) -> StepParts:
    return StepParts(
        networks=networks,
        carried=carried,
        prepared=prepared.num_state if prepared else 0,
        resampled=len(prepared.columns) if prepared and prepared.resampling else 0,
        padded=prepared is not None and prepared.pad_rows > 0,
        filter_past=0 if design is None else 2 * len(design.sections) + len(design.weights),
        has_window=model.signature.state == "windows",
    )


def _count_constants(
    model: PortableModel,
    prepared: PreparedColumns | None,
    design: FilterDesign | None,
    half_widths: Widths,
) -> int:
    """Return the bytes of constants beside those of the networks."""
    total: int = _list_scaling(model)["num_bytes"]
    total += 8 * (prepared.num_constants if prepared else 0)
    total += 0 if design is None else design.sections.nbytes + design.weights.nbytes
    return total + sum(widths.nbytes for widths in half_widths.values())


def _prepare(model: PortableModel, settings: CSettings) -> PreparedColumns | None:
    after = settings.after_prepare
    if after is True or not model.config.data.prepare:
        return None
    from slipstream.exporting.c.prepare import prepare_in_c  # takes a while to import

    prepared = prepare_in_c(model, settings.name, after=after or None, has_dates=settings.has_dates)
    return prepared if prepared.steps or prepared.given else None


def _list_shape(shape: NetworkShape, settings: CSettings) -> dict[str, Any]:
    """Return the template variables of the network."""
    signature, model = shape.signature, shape.model
    return {
        "lanes": LANES,
        "int8": settings.int8,
        "stored": "int8_t" if settings.int8 else "float",
        "network_template": shape.template,
        "has_head": not model.spec.is_fitted,
        "features": signature.model_inputs,
        "rows_at_once": shape.rows_at_once,
        "width": shape.width,
        "layers": len(shape.sizes),
        "pool": None if shape.is_flat else model.pool,
        "normalize": model.normalize,
        "decoder": shape.decoder,
        "shape_lines": format_defines(shape.list_defines()),
        "uses_dense": not shape.is_flat or bool(shape.sizes),
        "norm_epsilon": NORM_EPSILON,
        "smallest_variance": format_float(SMALLEST_VARIANCE),
        **shape.layers.values,
    }


def _list_interface(signature: Signature, settings: CSettings, *, holds: bool) -> dict[str, Any]:
    """Return the template variables of rows and predictions."""
    name = settings.name
    value = f"const {name}_value *"
    reads_ahead = signature.future_shape[0] > 0
    extra = [*(["constants"] if signature.static else []), *(["future"] if reads_ahead else [])]
    params = ", ".join(f"{value}{argument}" for argument in extra)
    return {
        "p": name,
        "version": metadata.version("slipstream"),
        "value_type": settings.value_type,
        "ahead_columns": len(signature.future),
        "reads_ahead": reads_ahead,
        "targets": signature.model_targets,
        "shared": signature.model_shared,
        "channels": signature.sequences_per_window,
        "quantiles": signature.outputs,
        "sorts": len(signature.quantiles) > 1,
        "median": find_median(signature.quantiles)[0],
        "median_share": find_median(signature.quantiles)[2],
        "classes": signature.classes,
        "steps": signature.steps_out,
        "context": signature.context,
        "inputs": signature.inputs,
        "extra": signature.static_width,
        "fixed": len(signature.static),
        "holds": holds,
        "values_are": _name_values(signature),
        "extra_params": params,
        "comma_extra_params": f", {params}" if params else "",
        "extra_arguments": ", ".join(extra),
        "comma_extra_arguments": "".join(f", {argument}" for argument in extra),
    }


def _name_values(signature: Signature) -> str:
    if signature.classes:
        return "a probability for each class"
    return "its quantiles" if signature.quantiles else "the prediction"


def _list_filter(design: FilterDesign) -> dict[str, Any]:
    sections = design.sections
    return {
        "kind": design.kind,
        "delay_rows": design.delay_rows,
        "num_sections": len(sections),
        "rows": len(design.weights),
        "numbers": format_list([*sections.ravel(), *design.weights], double=True),
    }


def _list_scaling(model: PortableModel) -> dict[str, Any]:
    """Return the initializers of the scaling of every column, and how many bytes they take."""
    signature, scaler = model.signature, model.scaler
    groups = {"input": signature.inputs, "constant": signature.static}
    if not signature.classes:
        groups["target"] = signature.targets
    result: dict[str, Any] = {"num_bytes": 16 * sum(map(len, groups.values())), "lowest": ""}
    for group, names in groups.items():
        for part in ("shift", "size"):
            numbers = [getattr(scaler, part)[name] for name in names]
            result[f"{group}_{part}"] = format_list(numbers, double=True)
    if signature.output_range is not None and not signature.classes:
        low, high = signature.output_range
        result |= {"output_low": format_c_double(low), "output_high": format_c_double(high)}
        for name, edge, outwards in (("lowest", low, -math.inf), ("highest", high, math.inf)):
            scaled = [
                (edge - scaler.shift[target]) / scaler.size[target] for target in signature.targets
            ]
            rounded = np.nextafter(np.array(scaled, dtype=np.float32), np.float32(outwards))
            result[name] = "{" + ", ".join(format_floats(rounded)) + "}"
        result["num_bytes"] += 8 * len(signature.targets)
    return result


def render(template: str, values: Mapping[str, Any]) -> str:
    """Fill in a template."""
    return _get_environment().get_template(template).render(values)


@cache
def _get_environment() -> jinja2.Environment:
    return jinja2.Environment(
        autoescape=False,  # this is C
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read_template),
    )


def _read_template(name: str) -> str:
    return resources.files("slipstream.exporting.c").joinpath("templates", name).read_text("utf-8")
