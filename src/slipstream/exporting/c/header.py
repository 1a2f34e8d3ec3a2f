"""What the header of a model says of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from slipstream.config.prepare import UnitStep, name_step
from slipstream.exporting.c.memory import CLayout
from slipstream.portable.networks.steps import explain_no_steps
from slipstream.text import escape_controls, format_count

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
    widths = " x ".join(map(str, layout.shape.sizes)) or "no hidden layer"
    count = layout.parts.networks
    networks = f"the mean of {count} networks; " if count > 1 else ""
    rows = f"windows of {format_count(signature.context, 'row')}"
    if not layout.parts.has_window:
        rows = "trained to carry its state on from row to row"
    ahead = f", {format_count(signature.horizon, 'row')} ahead" if signature.horizon else ""
    yield f"{layout.model.config.model.kind}, {widths}; {networks}{rows}{ahead}."
    if signature.step is not None:
        yield f"One row every {signature.step:g} (seconds, or the unit of the time column)."
    yield (
        "C99 without heap; math.h, string.h and stdint.h only. Networks are in float: sums of 8 "
        "rows of a matrix at a time stay in registers, there is no double in the inner loops. "
        "Columns are scaled in double, as in training."
    )
    if settings.int8:
        yield "Matrices are int8 with a scale for each row; everything else is float."
    if settings.double:
        yield "Rows and predictions are double: in float, a column would lose digits."


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
        levels = ", ".join(f"{one:g}" for one in signature.quantiles)
        yield f"Each has the quantiles {levels}."
    if signature.output_range is not None:
        low, high = signature.output_range
        yield f"Limited to {low:g} to {high:g}."


def _list_named(layout: CLayout, names: Sequence[str]) -> Iterator[str]:
    scaler = layout.model.scaler
    units = dict(layout.about.units)
    for step in layout.model.config.data.prepare:
        if isinstance(step, UnitStep):
            units |= dict.fromkeys(step.columns, step.unit)
    for i, name in enumerate(names):
        unit = f" [{units[name]}]" if name in units else ""
        yield f"  {i}  {name}{unit}: {scaler.low[name]:g} to {scaler.high[name]:g}"


def _describe_steps(layout: CLayout) -> Iterator[str]:
    name = layout.settings.name
    if layout.prepared:
        inside = "; ".join(step.where for step in layout.prepared.steps)
        yield f"Inside {name}_step, in double: {inside}."
    elif steps := layout.model.config.data.prepare:
        every = [name_step(number, step) for number, step in enumerate(steps, start=1)]
        yield f"NOT inside, to be done to the rows before: {'; '.join(every)}."
    else:
        yield "Inside: scaling, the network, predictions in physical units."
    if layout.parts.filter_past:
        kind = layout.model.config.predict.filter.kind
        window = f"; {name}_window not" if layout.parts.has_window else ""
        yield f'{name}_step filters its predictions (predict.filter, "{kind}"){window}.'


def _describe_sizes(layout: CLayout) -> Iterator[str]:
    name, sizes, shape = layout.settings.name, layout.sizes, layout.shape
    weights = f"{sizes.num_weights:,} weights"
    yield f"Flash: {sizes.flash_bytes:,} bytes of constants ({weights}), and code."
    yield (
        f"RAM: {sizes.scratch_bytes:,} bytes that all calls share, and {sizes.state_bytes:,} for "
        f"each {name}_state ({name}_step has one of its own). Calls must not overlap."
    )
    window = sizes.window_multiply_adds
    windows = "" if window is None else f", {window:,} a window"
    yield f"Multiply-adds: {sizes.step_multiply_adds:,} a step{windows}."
    why = explain_no_steps(layout.model.config.model)
    if not layout.parts.has_window:
        yield (
            f"{name}_step carries the network's state from row to row, as in training: call "
            f"{name}_reset at the start of each series and after a gap, and pass every row."
        )
    elif layout.parts.carried:
        yield (
            f"{name}_step carries the network's state from row to row. {name}_window starts each "
            "window from a state of zero, as training and slipstream predict do; slipstream "
            "evaluate RUN --stream measures both."
        )
    else:
        because = f": {why}, so no state can be carried" if why else ""
        rows = format_count(shape.signature.context, "row")
        yield f"{name}_step keeps the last {rows} and predicts their window{because}."


def _describe_use(layout: CLayout) -> Iterator[str]:
    name = layout.settings.name
    yield f"Compile:    cc -std=c99 -O2 -ffunction-sections -fdata-sections -c {name}.c"
    yield f"Self-test:  cc -std=c99 -O2 {name}.c main.c -lm -o selftest && ./selftest"
    yield f"Cortex-M4F: arm-none-eabi-gcc {ARM}"
    yield f"            -std=c99 -O2 -ffunction-sections -fdata-sections -c {name}.c"


def describe_step(layout: CLayout) -> str:
    """Return the comment of the step function."""
    upper, parts = layout.settings.name.upper(), layout.parts
    does = "carry the state on" if parts.carried else f"predict from the last {upper}_CONTEXT rows"
    row = f"row[{upper}_COLUMNS]" if layout.prepared else f"row[{upper}_INPUTS]"
    early = "out is a prediction from fewer rows" if parts.carried else "out is not written"
    missing = " A missing value (NaN) is the last known one." if layout.shape.holds else ""
    text = (
        f"Take one {row} and {does}. Returns 1 where out holds a prediction from at least "
        f"{upper}_CONTEXT rows, and 0 before that: {early}. A row with a value that is not finite, "
        f"or that a float cannot hold once it is scaled, is ignored, and 0 is returned.{missing} "
        "Where a value is so large that the network cannot compute it, 0 is returned and out is "
        f"NaN, until {upper}_CONTEXT other rows have come."
    )
    return "/* " + "\n * ".join(textwrap.wrap(text, WIDTH)) + " */"
