"""Carry out one step on the rows of one series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slipstream.config.prepare import (
    CalendarStep,
    ClipStep,
    FilterStep,
    FormulaStep,
    JoinStep,
    LabelStep,
    OutliersStep,
    PadStep,
    ResampleStep,
    UnitStep,
)
from slipstream.data.prepare import calendars, filters, joins, labelling, resampling
from slipstream.data.prepare.chain.frames import SeriesFrame
from slipstream.data.prepare.chain.plan import PlannedStep, list_features
from slipstream.data.prepare.chain.replay import Limits
from slipstream.data.series import MICROSECONDS, Flags, Floats, Times, is_date, list_rows
from slipstream.errors import UserError

TO_DEVIATION = 1.4826
"""Median distances from the median to standard deviations, for a normal distribution"""


class JoinedRows(NamedTuple):
    """The rows of a joined table that belong to one series."""

    times: Times
    columns: dict[str, Floats]


def apply_step(
    step: PlannedStep,
    frame: SeriesFrame,
    *,
    context: int,
    limits: Limits | None = None,
    joined: JoinedRows | None = None,
) -> SeriesFrame:
    """Return the rows after a step; `context` is how many rows a model reads."""
    columns = frame.columns
    match step.config:
        case ResampleStep():
            return _resample(frame, step.config)
        case FilterStep() as config:
            return frame.write(_filter(frame, config))
        case FormulaStep(name=name):
            assert step.formula is not None
            return frame.write({name: step.formula.evaluate(columns, frame.times)})
        case CalendarStep() as config:
            assert frame.times is not None
            features, dates = list_features(config), config.holidays
            return frame.write(
                calendars.compute_calendar(frame.times, features, holidays=dates, zone=config.zone)
            )
        case JoinStep() as config:
            return frame.write(_join(frame, step, config, joined))
        case LabelStep(name=name) as config:
            return frame.write({name: labelling.label_rows(columns, config)})
        case UnitStep(columns=names, factor=factor, offset=offset):
            return frame.write({name: columns[name] * factor + offset for name in names})
        case ClipStep(columns=names, low=low, high=high):
            return frame.write({name: np.clip(columns[name], low, high) for name in names})
        case OutliersStep() as config:
            return frame.write(_limit(columns, config, limits))
        case PadStep() as config:
            return _pad(frame, config.rows or context - 1, zero=config.value == "zero")


def _resample(frame: SeriesFrame, config: ResampleStep) -> SeriesFrame:
    assert frame.times is not None
    result = resampling.resample(
        frame.times,
        frame.columns,
        every=config.every,
        method=config.method,
        limit=config.limit,
        keep=False,  # this frame is not used again
    )
    step, _ = resampling.get_lengths(frame.times, config.every, config.limit)
    ahead = 0
    if frame.ahead:  # a row that holds the last value, or a mean of fewer rows, is ahead too
        ahead = int((result.times > frame.times[-frame.ahead - 1]).sum())
    return replace(
        frame,
        ahead=ahead,
        skipped=0,  # its rows are others
        times=result.times,
        columns=result.columns,
        origin=list_rows(frame.origin)[result.rows],
        step=step / MICROSECONDS if is_date(frame.times) else step,
    )


def _filter(frame: SeriesFrame, config: FilterStep) -> dict[str, Floats]:
    pairs = zip(config.columns, config.outputs, strict=True)
    return {
        output: filters.apply_filter(
            frame.columns[name],
            kind=config.kind,
            rows=config.rows,
            cutoff_hz=config.cutoff_hz,
            order=config.order or filters.DEFAULT_ORDER,
            step_s=frame.step,
            centered=config.centered,
        )
        for name, output in pairs
    }


def _join(
    frame: SeriesFrame, step: PlannedStep, config: JoinStep, joined: JoinedRows | None
) -> dict[str, Floats]:
    assert frame.times is not None
    if joined is None:  # no row of the file has this series' id
        return {name: np.full(frame.num_rows, np.nan) for name in step.writes}
    return joins.join_as_of(
        frame.times,
        joined.times,
        joined.columns,
        period=config.period,
        label=config.label,
        delay=config.delay,
    )


def _limit(
    columns: Mapping[str, Floats], config: OutliersStep, limits: Limits | None
) -> dict[str, Floats]:
    """Limit columns to the fitted ranges; without any, before they are fitted, change nothing."""
    result = {}
    for name, (low, high) in (limits or {}).items():
        values = columns[name]
        if config.action == "clip":
            result[name] = np.clip(values, low, high)
        else:
            result[name] = np.where((values < low) | (values > high), np.nan, values)
    return result


def fit_limits(step: PlannedStep, frames: Sequence[SeriesFrame], training: Flags) -> Limits:
    """Fit the range of each column on the training rows, which `training` marks by position."""
    config = step.config
    assert isinstance(config, OutliersStep)
    limits: Limits = {}
    for name in config.columns:
        parts = []
        for frame in frames:
            positions = frame.first_position + list_rows(frame.origin)
            own = positions < len(training)
            own[own] = training[positions[own]]
            own[: frame.padding] = False
            values = frame.columns[name][own]
            parts.append(values[~np.isnan(values)])
        known = np.concatenate(parts)
        if not len(known):
            raise UserError(f'{step.where}: "{name}" has no value in the training rows')
        limits[name] = _fit_range(known, config)
        if limits[name][0] == limits[name][1]:
            raise UserError(
                f'{step.where}: more than half of the training values of "{name}" are '
                f"{limits[name][0]:g}, so their spread is 0; use method = "
                '"quantile", or leave the column out'
            )
    return limits


def _fit_range(values: Floats, config: OutliersStep) -> tuple[float, float]:
    if config.method == "quantile":
        low, high = np.quantile(values, (config.low, config.high))
        return float(low), float(high)
    middle = float(np.median(values))
    spread = config.z * TO_DEVIATION * float(np.median(np.abs(values - middle)))
    return middle - spread, middle + spread


def _pad(frame: SeriesFrame, rows: int, *, zero: bool) -> SeriesFrame:
    """Put rows before the first one, at the usual step."""
    if not rows:
        return frame
    times = frame.times
    if times is not None:
        unit = MICROSECONDS if is_date(times) else 1
        before = times[0] - np.arange(rows, 0, -1) * ((frame.step or 1.0) * unit)
        times = np.concatenate([before.astype(times.dtype), times])
    return replace(
        frame,
        times=times,
        columns={
            name: np.concatenate([np.full(rows, 0.0 if zero else values[0]), values])
            for name, values in frame.columns.items()
        },
        origin=np.concatenate([np.full(rows, frame.origin[0]), list_rows(frame.origin)]),
        padding=rows,
    )
