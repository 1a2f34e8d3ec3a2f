"""Predict row after row with a trained run: numpy only, no torch.

`Stream.push` parses a row (`RowParser`); each member of the run prepares, scales and checks it
(`StreamMember.read`). Only a row that passed all checks is added to the state of its series, which
gives the prediction (`StreamMember.advance`).

Shapes: T context rows, F inputs, H predicted rows, U inputs that are known ahead, C targets, Q
quantiles, K numbers beside the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream import runs
from slipstream.base.errors import Command, UserError
from slipstream.base.statistics import select_median
from slipstream.base.text import find_nearest, format_count
from slipstream.config import Data, Signature
from slipstream.data import predictions
from slipstream.data.columns import LARGEST, join_times, list_numbers, read_times
from slipstream.data.filters import PredictionFilter, make_filter
from slipstream.data.predictions import PhysicalPredictions, list_number_columns
from slipstream.data.prepare.rows import (
    BinState,
    FutureSteps,
    MadeRow,
    PreparedRow,
    RowResampler,
    RowSteps,
    RowTime,
    plan_future,
)
from slipstream.data.scaler import Scaler
from slipstream.data.series import Floats, accepts_repeated
from slipstream.data.table import DataTable, wrap_table
from slipstream.inference.networks import (
    RowNetwork,
    explain_no_steps,
    predict_scaled,
    restore_outputs,
)
from slipstream.inference.portable import PortableMember, PortableRun, load_portable
from slipstream.models.files import WEIGHTS_FILE
from slipstream.models.kinds import RowState
from slipstream.models.numpy_layers import Array
from slipstream.runs import Run

Regime = Literal["auto", "window", "carried"]
Arrays = dict[str, npt.NDArray[Any]]
EPOCH = datetime(1970, 1, 1)
MICROSECOND = timedelta(microseconds=1)
LARGEST_SCALED = float(np.finfo(np.float32).max)
"""Scaled values beyond it would be infinite in the network's float32"""
STREAM_FILE = "stream.json"
"""What `evaluate --stream` measured, in the run's folder"""
METRICS = {"mae": "MAE", "log_loss": "log loss"}
"""The errors that regimes are compared by, of numbers and of classes"""


@dataclass(frozen=True)
class StreamMeasurement:
    """The result of the last `evaluate --stream` of a run, which decides what is deployed."""

    use: str
    """The regime to deploy: "window" or "carried" """
    metric: str
    window: float
    """The error of windows"""
    carried: float | None
    """The error of a carried state; None where the model cannot carry one"""
    on: str
    """The set that was scored, or "data" for new rows"""
    windows: int
    networks: int
    """Networks of which the mean was scored"""
    weights: str
    """SHA-256 of the weights: the measurement of another model does not count"""

    def describe(self) -> str:
        """Return both errors, and what they were measured on."""
        where = "new data" if self.on == "data" else f"the {self.on} set"
        carried = "" if self.carried is None else f" and {self.carried:.4g} with a carried state"
        return (
            f"evaluate --stream measured {METRICS[self.metric]} {self.window:.4g} with windows"
            f"{carried} on {format_count(self.windows, 'window')} of {where}"
        )


def save_measurement(run: Run, measurement: StreamMeasurement) -> Path:
    """Write what `evaluate --stream` measured into the run's folder."""
    path = run.folder / STREAM_FILE
    runs.write_json(path, asdict(measurement))
    return path


def read_measurement(run: PortableRun) -> StreamMeasurement | None:
    """Return what was measured of this model; None where nothing was, or of other weights."""
    path = run.run.folder / STREAM_FILE
    if not path.is_file():
        return None
    try:
        measurement = StreamMeasurement(**runs.read_json(path))
        measurement.describe()
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: is damaged; remove it, or measure again: "
            + Command("evaluate", run.run.folder, stream=True)
        ) from None
    networks = sum(len(member.models) for member in run.members)
    weights = run.hashes.get(f"{run.run.model.name}/{WEIGHTS_FILE}")
    is_same = measurement.weights == weights and measurement.networks == networks
    return measurement if is_same else None


class DefaultRegime(NamedTuple):
    """The regime that a run is deployed with unless another one is chosen."""

    name: Literal["window", "carried"]
    reason: str


def choose_default_regime(run: PortableRun) -> DefaultRegime:
    """Return the regime to deploy: carried for a run that was trained for it; for one trained on
    windows, what `evaluate --stream` of it advised, or windows where it was not run.

    `Stream`, the server and every export follow this function.
    """
    if run.signature.state == "carried":
        return DefaultRegime("carried", 'the run was trained with train.state = "carried"')
    if run.is_ensemble:
        return DefaultRegime("window", "the members of an ensemble were trained on windows")
    if refusal := explain_no_steps(run.first.config.model):
        return DefaultRegime("window", refusal)
    measurement = read_measurement(run)
    if measurement is None:
        return DefaultRegime(
            "window",
            "the run was trained on windows, and a carried state has not been measured "
            "(slipstream evaluate RUN --stream)",
        )
    use: Literal["window", "carried"] = "carried" if measurement.use == "carried" else "window"
    return DefaultRegime(use, measurement.describe())


class ParsedRow(NamedTuple):
    """A row with all its columns, converted to numbers."""

    values: Floats
    """In the order of the stream's columns; NaN where a value is missing"""
    static: Floats | None
    """In the order of `data.static`; None where the row has none"""
    time: RowTime | None
    series: str


class RowParser:
    """Reads rows of some columns: a mapping by name, or numbers in their order."""

    def __init__(
        self,
        data: Data,
        columns: Sequence[str],
        static: Sequence[str],
        label: str | None = None,
        codes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Prepare a parser; `label` is a column of classes, and `codes` are their numbers."""
        self.data, self.columns, self.static = data, tuple(columns), tuple(static)
        self.label, self.codes = label, codes
        self.time_column, self.ids = data.time_column, data.ids
        self.missing = frozenset(list_numbers(data.na))

    def parse(self, row: Any, *, time: Any, series: Any, static: Any) -> ParsedRow:
        """Return the parsed row; keywords override its columns."""
        is_mapping = isinstance(row, Mapping)
        if is_mapping:
            values = np.array([self._read(row, name, "data.inputs") for name in self.columns])
        else:
            values = self._read_array(row)
        fixed = None
        if self.static:
            source = row if static is None and is_mapping else static
            if isinstance(source, Mapping):
                fixed = np.array([self._read(source, name, "data.static") for name in self.static])
            elif source is not None:
                fixed = np.asarray(source, dtype=np.float64).reshape(-1)
                if len(fixed) != len(self.static):
                    raise UserError(
                        f"static has {len(fixed)} values; data.static has {len(self.static)}: "
                        f"{', '.join(self.static)}"
                    )
        if time is None and is_mapping and self.time_column is not None:
            time = self._find_time(row)
        if series is None and self.ids:
            if not is_mapping:
                raise UserError(
                    f"the rows have a series ({', '.join(self.ids)}, data.id); pass id=..."
                )
            series = tuple(self._find(row, name, "data.id") for name in self.ids)
        moment = time
        if time is not None and not isinstance(time, RowTime):
            moment = parse_time(time, self.data.time_format)
        return ParsedRow(values, fixed, moment, "" if series is None else self.name_series(series))

    def name_series(self, series: Any) -> str:
        """Return the name of the series with this id, as for a file; a tuple is an id of several
        columns."""
        parts = series if isinstance(series, tuple) else (series,)
        return "/".join(map(_to_text, parts))

    def _find_time(self, row: Mapping[str, Any]) -> Any:
        """Return the time of a row; several columns are joined and parsed as in a file."""
        columns = self.data.time_columns
        if len(columns) == 1 or self.time_column in row:
            return self._find(row, str(self.time_column), "data.time")
        parts = pa.table({name: [self._find(row, name, "data.time")] for name in columns})
        table = join_times(wrap_table(parts, "the row"), columns)
        return _read_time(table, str(self.time_column), self.data.time_format)

    def _find(self, row: Mapping[str, Any], name: str, setting: str) -> Any:
        try:
            return row[name]
        except KeyError:
            names = [str(column) for column in row]
            nearest = find_nearest(name, names)
            hint = f'did you mean "{nearest}"?' if nearest else f"it has {', '.join(names[:20])}"
            raise UserError(f'the row has no column "{name}" ({setting}); {hint}') from None

    def _read(self, row: Mapping[str, Any], name: str, setting: str) -> float:
        value = self._find(row, name, setting)
        if value is None:
            return math.nan
        if name == self.label and value in self.codes:
            return float(self.codes[value])
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UserError(
                f'the row has {value!r} in the column "{name}" ({setting}), not a number'
            ) from None
        return self._check(number, name)

    def _check(self, number: float, name: str) -> float:
        if number in self.missing:
            return math.nan
        if abs(number) > LARGEST:
            size = "infinite" if math.isinf(number) else number
            raise UserError(f'the row has a value in the column "{name}" that is {size}')
        return number

    def _read_array(self, row: Any) -> Floats:
        try:
            values = np.array(row, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.empty(())
        if values.ndim != 1:
            raise UserError(
                "a row is a mapping of columns to values, or the numbers of "
                f"{', '.join(self.columns)} in this order; this one is {str(row)[:100]}"
            )
        if values.shape != (len(self.columns),):
            raise UserError(
                f"the row has {values.size} values of the {len(self.columns)} columns: "
                f"{', '.join(self.columns)}"
            )
        if self.missing or np.abs(values).max(initial=0) > LARGEST:
            pairs = zip(values.tolist(), self.columns, strict=True)
            values = np.array([self._check(number, name) for number, name in pairs])
        return values


def _to_text(value: Any) -> str:
    """Return a part of a series' name as a file's column has it: whole numbers without a point."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def parse_time(value: Any, time_format: str | None) -> RowTime:
    """Return a time: a number, a date or a text such as "2026-01-31 12:00"."""
    if isinstance(value, (int, float, np.integer, np.floating)):
        if not math.isfinite(value):
            raise UserError(f"the time of the row is {value}")
        return RowTime(float(value), False)
    if isinstance(value, np.datetime64):
        return RowTime(int(value.astype("datetime64[us]").astype(np.int64)), True)
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, datetime):
        plain = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        return RowTime((plain - EPOCH) // MICROSECOND, True)
    if not isinstance(value, str):
        raise UserError(f"the time of the row is {value!r}; it should be a number, date or text")
    return _read_time(wrap_table(pa.table({"time": [value]}), "the row"), "time", time_format)


def _read_time(table: DataTable, name: str, time_format: str | None) -> RowTime:
    times = read_times(table, name, time_format)
    return RowTime(times[0].item(), times.dtype == np.int64)


@dataclass
class MemberState:
    """The state of one member for one series."""

    prepared: PreparedRow
    inputs: Floats
    """The last known value of each input, for `data.missing = "forward"`"""
    rows: npt.NDArray[Any]
    """[T, F]: the last rows, the newest last, scaled, or where each series has its own scale, in
    physical units; empty with a carried state"""
    networks: list[RowState]
    """The carried state of each network"""
    count: int = 0
    """Rows since the series began, or since the last gap"""
    has_started: bool = False
    """Whether a row has entered the state"""
    follows: bool = True
    """Whether the next row follows from the last; a row that was left out makes a gap"""
    scaler: Scaler | None = None
    """What scales the series; None of a new series with a scale of its own, until its first context
    is complete"""
    first: list[Floats] = field(default_factory=list)
    """The first rows of such a series"""


class NextRow(NamedTuple):
    """A row that passed all checks, and the new state of the preparation."""

    prepared: PreparedRow
    inputs: Floats
    scaled: Array
    beside: Array | None
    """[K]: static columns and rows known ahead, scaled"""
    is_used: bool
    """False where the row is left out: a value is missing, or steps look back further"""
    makes_gap: bool
    """Whether the row is left out because a value is missing"""


@dataclass(frozen=True)
class StreamMember:
    """A member of the run, ready to predict after each row."""

    member: PortableMember
    columns: tuple[str, ...]
    """The columns of a row that the member reads"""
    steps: RowSteps | None
    future: FutureSteps | None
    networks: tuple[RowNetwork, ...]
    """Networks that carry a state; empty for windows"""
    reads_beside: bool
    """Whether the member reads static columns or rows ahead"""
    shift: Floats
    size: Floats
    """[F]: shift and size that scale the inputs, where all series have one scale"""

    def start(self, name: str) -> MemberState:
        """Return the state of a series without rows yet."""
        signature, scaler = self.member.first.signature, self.member.first.scaler
        own = scaler.select_series(name) if scaler.series else scaler
        if own is None and self.networks:
            raise UserError(
                f'series "{name}" is new, and data.scale_by = "series" scales it by its first '
                f"{signature.context} rows, but a carried state reads the first of them already; "
                'use regime="window"'
            )
        context = 0 if self.networks else signature.context
        dtype = np.float64 if scaler.series else np.float32
        return MemberState(
            prepared=self.steps.start() if self.steps else PreparedRow(np.empty(0)),
            inputs=np.full(len(signature.inputs), np.nan),
            rows=np.zeros((context, len(signature.inputs)), dtype=dtype),
            networks=[network.start() for network in self.networks],
            scaler=own,
        )

    def read(
        self, state: MemberState, row: ParsedRow, values: Floats, static: Floats | None, future: Any
    ) -> NextRow:
        """Check and scale a row; `values` are those of `columns`. The state stays as it is."""
        data = self.member.first.config.data
        prepared, inputs = state.prepared, values
        if self.steps is not None:
            prepared = self.steps.add(state.prepared, values, row.time)
            inputs = prepared.inputs
        waits = self.steps is not None and prepared.waits and not state.has_started
        incomplete = math.isnan(inputs.sum())  # no value is infinite
        if incomplete and not waits:
            if data.missing == "error":
                self._refuse_missing(np.isnan(inputs))
            if data.missing == "forward":
                inputs = np.where(np.isnan(inputs), state.inputs, inputs)
                incomplete = math.isnan(inputs.sum())
        is_used = not waits and not incomplete
        beside = self._read_beside(row, static, future) if is_used else None
        scaled = self._scale(inputs, state.scaler) if is_used else np.empty(0, dtype=np.float32)
        makes_gap = incomplete and not waits and state.has_started
        return NextRow(prepared, inputs, scaled, beside, is_used, makes_gap)

    def _refuse_missing(self, missing: npt.NDArray[np.bool_]) -> None:
        name = self.member.first.signature.inputs[int(missing.argmax())]
        raise UserError(
            f'the row has no value in the column "{name}"; a stream takes such rows only of a run '
            'with data.missing = "forward" or "drop"'
        )

    def _scale(self, inputs: Floats, scaler: Scaler | None) -> Array:
        """Return inputs [..., F] scaled, or of a series whose scale is not known yet, nothing."""
        if scaler is None:
            return np.empty(0, dtype=np.float32)
        columns, shift, size = self.member.first.signature.inputs, self.shift, self.size
        if scaler.series:
            shift = np.array([scaler.shift[name] for name in columns])
            size = np.array([scaler.size[name] for name in columns])
        scaled = (inputs - shift) / size
        if max(scaled.max(), -scaled.min()) > LARGEST_SCALED:
            name = columns[int(np.abs(scaled).argmax()) % len(columns)]
            raise UserError(
                f'column "{name}" has a value so far from the training rows that it cannot be '
                "scaled; correct it"
            )
        return scaled.astype(np.float32)

    def _read_beside(self, row: ParsedRow, static: Floats | None, future: Any) -> Array | None:
        """Return the static columns and the rows known ahead, scaled."""
        if not self.reads_beside:
            return None
        model = self.member.first
        signature, scaler = model.signature, model.scaler
        parts: list[Array] = []

        def scale(values: Floats, names: Sequence[str]) -> Array:
            scaled = np.empty(values.shape, dtype=np.float32)
            for i, name in enumerate(names):
                scaler.apply(name, values[:, i], scaled[:, i])
            return scaled.reshape(-1)

        if signature.static:
            assert static is not None
            parts.append(scale(static[None], signature.static))
        if signature.future:
            parts.append(scale(self._read_future(row, future), signature.future))
        return np.concatenate(parts)

    def _read_future(self, row: ParsedRow, future: Any) -> Floats:
        """Return the columns that are known ahead over the rows to predict, [H, U]."""
        signature = self.member.first.signature
        names = ", ".join(signature.future)
        wanted = f"{names} (data.future) over the next {format_count(signature.horizon, 'row')}"
        if future is None:
            if self.future is None:
                raise UserError(f"the model reads {wanted}; pass them: future={{column: values}}")
            if row.time is None:
                raise UserError(f"{wanted} are made from the time of each row; pass time=...")
            return self.future.compute(row.time)
        try:
            if isinstance(future, Mapping):
                future = np.array([future[name] for name in signature.future], dtype=float).T
            values = np.asarray(future, dtype=np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the model reads {wanted}; future lacks them ({error})") from None
        if values.shape != signature.future_shape or not np.isfinite(values).all():
            raise UserError(
                f"future has the shape {values.shape}; the model reads {wanted}, all of them known"
            )
        return values

    def advance(self, state: MemberState, row: NextRow, *, predict: bool) -> Floats | None:
        """Add a row to the series; return the prediction [H, C, Q] in physical units, or the
        probabilities of classes [H, Q], once there is enough context."""
        state.prepared = row.prepared
        if not row.is_used:
            state.follows = state.follows and not row.makes_gap
            return None
        if not state.follows:
            self.restart(state)
        if not state.has_started and self.steps is not None and self.steps.padding:
            first = row
            if self.steps.pads_zero:
                zeros = np.zeros_like(row.inputs)
                first = row._replace(inputs=zeros, scaled=self._scale(zeros, state.scaler))
            for _ in range(self.steps.padding):
                self._append(state, first)
        outputs = self._append(state, row)
        state.inputs, state.has_started = row.inputs, True
        if state.scaler is None:
            state.first.append(row.inputs)
            if len(state.first) == len(state.rows):
                columns = self.member.first.signature.inputs
                fitted = self.member.first.scaler.fit_series(columns, np.stack(state.first))
                state.scaler, state.first = fitted, []
        if self.networks:
            return self._to_physical(outputs, state) if predict else None
        if state.count < len(state.rows) or not predict:
            return None
        beside = None if row.beside is None else row.beside[None]
        windows = state.rows[None]
        if self.member.first.scaler.series:
            windows = self._scale(state.rows, state.scaler)[None]
        outputs = [predict_scaled(model, windows, beside)[0] for model in self.member.models]
        return self._to_physical(outputs, state)

    def _append(self, state: MemberState, row: NextRow) -> list[Array]:
        """Add a scaled row to the context; return the predictions of networks with a carried
        state."""
        state.count += 1
        if self.networks:
            pairs = zip(self.networks, state.networks, strict=True)
            return [network.step(row.scaled, row.beside, carried) for network, carried in pairs]
        state.rows[:-1] = state.rows[1:]
        state.rows[-1] = row.inputs if self.member.first.scaler.series else row.scaled
        return []

    def restart(self, state: MemberState) -> None:
        """Forget the context, as after a gap; steps of `data.prepare` go on."""
        state.count, state.follows = 0, True
        state.networks = [network.start() for network in self.networks]

    def _to_physical(self, outputs: Sequence[Array], state: MemberState) -> Floats:
        assert state.scaler is not None
        return restore_outputs(outputs, self.member.first.signature, state.scaler)

    def find_factor(self, state: MemberState) -> Floats | None:
        """Return the size of a series' targets relative to the whole table, [1, C]; None where all
        series have one scale."""
        scaler, targets = self.member.first.scaler, self.member.first.signature.targets
        if not scaler.series or state.scaler is None:
            return None
        return np.array([[state.scaler.size[name] / scaler.size[name] for name in targets]])


def make_member(member: PortableMember, *, carried: bool) -> StreamMember:
    """Make a member ready to stream; refuse a run that cannot predict row by row."""
    model = member.first
    data, signature, scaler = model.config.data, model.signature, model.scaler
    steps = future = None
    if data.prepare:
        steps = RowSteps(data, signature.inputs, model.limits, signature.step)
        if signature.static and set(signature.static) & set(steps.sources):
            raise UserError("data.prepare changes a static column, which cannot be streamed")
        future = plan_future(data, signature)
    return StreamMember(
        member=member,
        columns=signature.inputs if steps is None else steps.sources,
        steps=steps,
        future=future,
        networks=tuple(map(RowNetwork, member.models)) if carried else (),
        reads_beside=signature.static_width > 0,
        shift=np.array([scaler.shift[name] for name in signature.inputs]),
        size=np.array([scaler.size[name] for name in signature.inputs]),
    )


def make_resampler(members: Sequence[StreamMember], columns: Sequence[str]) -> RowResampler | None:
    """Return what resamples the rows for all members; None where no `data.prepare` does."""
    steps = [None if member.steps is None else member.steps.resampling for member in members]
    if not any(steps):
        return None
    first = members[0].member.first
    number = 0 if steps[0] is None else steps[0].number
    chains = {member.member.first.config.data.prepare[:number] for member in members}
    if len(chains) > 1 or not number:
        raise UserError(
            "the members of an ensemble resample their rows differently; stream one of them"
        )
    return RowResampler(first.config.data, columns, first.limits)


def copy_state(state: MemberState) -> MemberState:
    """Return a state that can be changed by itself."""
    networks = [
        {name: values.copy() for name, values in network.items()} for network in state.networks
    ]
    return replace(state, rows=state.rows.copy(), networks=networks, first=list(state.first))


def save_bins(bins: BinState) -> Arrays:
    """Return the bin of a resampled series as arrays by name, but for its time."""
    counts = np.array([bins.number, bins.is_made, bins.prepared.count], dtype=np.int64)
    prepared = {f"prepared.{name}": array for name, array in save_prepared(bins.prepared).items()}
    return {"values": bins.values, "counts": counts, **prepared}


def load_bins(empty: BinState, arrays: Mapping[str, npt.NDArray[Any]]) -> BinState:
    """Return the bin that `save_bins` wrote, and its time."""
    try:
        values = np.array(arrays["values"])
        number, is_made, num_rows = (int(count) for count in arrays["counts"])
        prepared = load_prepared(_select(arrays, "prepared."), num_rows)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"the state is not one of this stream ({error!r})") from None
    if values.shape != empty.values.shape:
        raise UserError("the state is not one of this stream: its arrays have other shapes")
    time = RowTime.from_array(arrays.get("time"))
    return BinState(values, prepared, time, number, bool(is_made))


def save_prepared(prepared: PreparedRow) -> Arrays:
    """Return what steps remember as arrays by name, but for the number of rows."""
    result: Arrays = {
        "times": prepared.times,
        "known": np.array(sorted(prepared.known), dtype=np.str_),
    }
    result |= {f"past.{name}": values for name, values in prepared.past.items()}
    return result | {f"filters.{name}": values for name, values in prepared.filters.items()}


def load_prepared(arrays: Mapping[str, npt.NDArray[Any]], count: int) -> PreparedRow:
    """Return what `save_prepared` wrote after so many rows."""
    return PreparedRow(
        inputs=np.empty(0),
        count=count,
        past=_select(arrays, "past."),
        times=np.array(arrays["times"]),
        filters=_select(arrays, "filters."),
        known=frozenset(map(str, arrays["known"])),
    )


def save_state(state: MemberState) -> Arrays:
    """Return a state as arrays by name."""
    result: Arrays = {
        "inputs": state.inputs,
        "rows": state.rows.copy(),
        "counts": np.array([state.count, state.has_started, state.follows, state.prepared.count]),
    }
    prepared = save_prepared(state.prepared)
    result |= {f"prepared.{name}": values for name, values in prepared.items()}
    if state.scaler is not None and state.scaler.series:
        columns = list(state.scaler.series_shift)
        result["scale"] = np.array(
            [[state.scaler.shift[name], state.scaler.size[name]] for name in columns]
        )
    if state.first:
        result["first"] = np.stack(state.first)
    for number, network in enumerate(state.networks):
        result |= {f"network{number}.{name}": values.copy() for name, values in network.items()}
    return result


def load_state(
    member: StreamMember, arrays: Mapping[str, npt.NDArray[Any]], name: str
) -> MemberState:
    """Return the state from the arrays of `save_state`; a UserError for another model's state."""
    state = member.start(name)

    try:
        counts = [int(count) for count in arrays["counts"]]
        prepared = load_prepared(_select(arrays, "prepared."), counts[3])
        networks = [_select(arrays, f"network{n}.") for n in range(len(state.networks))]
        inputs, rows = np.array(arrays["inputs"]), np.array(arrays["rows"])
        scaler = _load_scale(member.member.first.scaler, arrays)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"the state is not one of this stream ({error!r})") from None
    has_same_shapes = inputs.shape == state.inputs.shape and rows.shape == state.rows.shape
    for expected, loaded in zip(state.networks, networks, strict=True):
        has_same_shapes = has_same_shapes and _list_shapes(expected) == _list_shapes(loaded)
    if not has_same_shapes:
        raise UserError("the state is not one of this stream: its arrays have other shapes")
    return MemberState(
        prepared,
        inputs,
        rows,
        networks,
        counts[0],
        bool(counts[1]),
        bool(counts[2]),
        scaler,
        list(np.array(arrays["first"])) if "first" in arrays else [],
    )


def _load_scale(scaler: Scaler, arrays: Mapping[str, npt.NDArray[Any]]) -> Scaler | None:
    """Return the scaler of the series that `save_state` wrote; None where it was not known yet."""
    if not scaler.series:
        return scaler
    if "scale" not in arrays:
        return None
    pairs = dict(zip(scaler.series_shift, np.array(arrays["scale"]).tolist(), strict=True))
    return scaler.replace_scale(
        {name: pair[0] for name, pair in pairs.items()},
        {name: pair[1] for name, pair in pairs.items()},
    )


def _select(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> Arrays:
    """Return copies of the arrays whose names begin with a prefix, named without it."""
    return {
        name.removeprefix(prefix): np.array(values)
        for name, values in arrays.items()
        if name.startswith(prefix)
    }


def _list_shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: values.shape for name, values in arrays.items()}


class StreamPrediction(NamedTuple):
    """The prediction of `Stream.push` after a row, in physical units.

    Attributes:
        signature: The names of columns and classes, and the shape of a window.
        rows: Rows since the series began, or since the last gap.
        point: Predicted rows x targets; None for classes.
        quantiles: Predicted rows x targets x quantiles, of a run with `train.loss = "quantile"`.
        intervals: By level, such as "80", the lower and upper limits, each predicted rows x
            targets; empty if the run has none.
        probabilities: Predicted rows x classes, of a classifier.
        factor: 1 x targets, with `data.scale_by = "series"`: the size of the series relative to
            that of all training rows, which the width of the intervals follows.
        time: The time of the row that it follows, where rows have times: a datetime or a number.
            Where `data.prepare` resamples, that of the new row, not of the row that completed it.
        row: The number of that row in its series, from 0, as the model counts rows.
        earlier: Where `data.prepare` resamples: the predictions after earlier new rows that the
            same row completed, the oldest first.
        value: The first target of the first predicted row.
        label: The likeliest class of the first predicted row.
        to_dict: A function: one value for each predicted row, by the names of
            `slipstream.predict`.

    Example:
        prediction = slipstream.Stream("runs/cell", regime="carried").push(row)
        prediction.value, prediction.to_dict()
    """

    signature: Signature
    rows: int
    point: Floats | None = None
    quantiles: Floats | None = None
    intervals: Mapping[str, tuple[Floats, Floats]] = {}
    probabilities: Floats | None = None
    time: datetime | float | None = None
    row: int = 0
    earlier: tuple[StreamPrediction, ...] = ()
    factor: Floats | None = None

    @property
    def value(self) -> float:
        """The first target of the first predicted row."""
        if self.point is None:
            raise UserError("a classifier predicts probabilities, no value")
        return float(self.point[0, 0])

    @property
    def label(self) -> str:
        """The likeliest class of the first predicted row."""
        if self.probabilities is None:
            raise UserError("this run predicts numbers, no classes")
        return self.signature.classes[int(self.probabilities[0].argmax())]

    def to_dict(self) -> dict[str, list[Any]]:
        """Return one value for each predicted row, by the names of `slipstream.predict`."""
        if self.probabilities is not None:
            classes = self.signature.classes
            likely = [classes[number] for number in self.probabilities.argmax(axis=1)]
            named = {
                predictions.name_probability(name): self.probabilities[:, i].tolist()
                for i, name in enumerate(classes)
            }
            return {predictions.PREDICTED: likely, **named}
        assert self.point is not None
        values = PhysicalPredictions(self.point, self.quantiles, self.intervals)
        return {
            name: column.tolist() for name, column in list_number_columns(values, self.signature)
        }


@dataclass
class StreamSeries:
    """The state of one series."""

    members: list[MemberState]
    filter: PredictionFilter | None
    time: RowTime | None = None
    """Of the last row that the model was given"""
    count: int = 0
    """Rows that the model was given"""
    static: Floats | None = None
    bins: BinState | None = None
    """Where `data.prepare` resamples"""
    arrived: RowTime | None = None
    """The newest time of a row that was pushed"""
    repeated: Floats | None = None
    """[2, columns]: sums and counts of the known values of all rows with the newest time, where
    `data.duplicates` averages them"""
    before: StreamSeries | None = None
    """The series before the first row of the newest time changed its members, where another row of
    that time may replace the prediction"""


class Stream:
    """Predict row by row with a trained run; needs numpy and no torch.

    `push` adds a row and returns the prediction after it. A refused row does not change the state.
    Each series has its own state; `save_state` and `load_state` move it between processes.

    Args:
        run: A run folder, the beginning of its name, `"last"`, or a result.
        regime: `"window"` predicts from the last `data.context` rows, as `slipstream.predict` does,
            and returns None until there are as many. `"carried"` carries the state of an LSTM, GRU
            or TCN from row to row: the cost of a row does not depend on the context, and there is a
            prediction from the first row on. Its errors differ; `slipstream evaluate --stream`
            measures them. `"auto"`: carried if the run was trained for it, or if that evaluation
            advises it; otherwise windows.
        gaps: `"error"` refuses a row that does not follow the one before it by the usual time step;
            `"reset"` starts a new context there, as `predict` does.
        ensemble: For a run with several models: True for their mean, False for the best.

    Attributes:
        columns: The columns of a row, in the order of an array.
        regime: `"window"` or `"carried"`.
        signature: The names of columns and classes, and the shape of a window.
        ids: The series that have had a row.
        push: A function: adds a row, `push(row, time=..., id=...)`, and returns a
            `StreamPrediction`, or None until there is enough context.
        reset: A function: forgets a series, or all of them.
        save_state: A function: the state of a series, as a dict of arrays.
        load_state: A function: continues a series from such a state.

    Raises:
        UserError: The run cannot be used, or not row by row: the message names the setting or the
            step of `data.prepare`.

    Example:
        stream = slipstream.Stream("runs/cell")
        for row in rows:  # {"voltage": 3.7, "current": -1.2, ...}
            prediction = stream.push(row)
            if prediction is not None:
                print(prediction.value)
    """

    def __init__(
        self,
        run: str | Path | PortableRun,
        *,
        regime: Regime = "auto",
        gaps: Literal["error", "reset"] = "error",
        ensemble: bool | None = None,
    ) -> None:
        if not isinstance(run, PortableRun):
            run = load_portable(getattr(run, "run", run), ensemble=ensemble)
        if regime not in ("auto", "window", "carried"):
            raise UserError(f'regime is "{regime}"; use "auto", "window" or "carried"')
        if gaps not in ("error", "reset"):
            raise UserError(f'gaps is "{gaps}"; use "error" or "reset"')
        if regime == "auto":
            regime = choose_default_regime(run).name
        self.run, self.signature, self.regime = run, run.signature, regime
        self._resets = gaps == "reset"
        pairs = zip(run.members, run.weights, strict=True)
        used = [(member, weight) for member, weight in pairs if weight]
        self._members = [make_member(member, carried=regime == "carried") for member, _ in used]
        self._weights = [weight for _, weight in used]
        names = (name for member in self._members for name in member.columns)
        columns = tuple(dict.fromkeys(names))
        self._positions = [
            np.array([columns.index(name) for name in member.columns], dtype=np.int64)
            for member in self._members
        ]
        """Of each member's columns among all columns that members read"""
        self._data = run.first.config.data
        self._resampler = make_resampler(self._members, columns)
        self.columns = columns if self._resampler is None else self._resampler.sources
        self._replaces = self._resampler is not None or self._data.duplicates in ("last", "mean")
        """Whether a further row of the same time may replace the last prediction"""
        self.merges = self._replaces or self._data.duplicates == "first"
        """Whether several rows may become one row of the model"""
        self._static = self.signature.static
        for member in self._members:
            if member.member.first.signature.static != self._static:
                raise UserError("the members of an ensemble differ in data.static; stream one")
        codes = {}
        if self.signature.classes and self.signature.targets[0] in self.columns:
            codes = {name: i for i, name in enumerate(self.signature.classes)}
        label = self.signature.targets[0] if codes else None
        self._parser = RowParser(self._data, self.columns, self._static, label, codes)
        self._series: dict[str, StreamSeries] = {}

    @property
    def passed_ahead(self) -> tuple[str, ...]:
        """The columns of `data.future` that `push` needs: no step makes them from times."""
        lacking = [member.member.first for member in self._members if member.future is None]
        return tuple(dict.fromkeys(name for model in lacking for name in model.signature.future))

    @property
    def ids(self) -> tuple[str, ...]:
        """The series that have had a row."""
        return tuple(self._series)

    def push(
        self,
        row: Any,
        *,
        time: Any = None,
        id: Any = None,  # the name that data.id has
        static: Any = None,
        future: Any = None,
        predict: bool = True,
    ) -> StreamPrediction | None:
        """Add a row and return the prediction after it; None until there is enough context.

        Args:
            row: A mapping of column names to values in physical units, or an array in the order of
                `columns`.
            time: A number, a date or text; by default the mapping's column `data.time`. An array
                without a time follows the row before it.
            id: The series; by default the mapping's column `data.id`.
            static: The static columns of a new series; by default from the mapping.
            future: The columns of `data.future` over the rows to predict, as `predict` has them
                after `data.prepare`: a mapping, or an array of rows. What steps make from times
                alone need not be passed.
            predict: False adds the row only, which saves the time of a prediction.

        Raises:
            UserError: The row is incomplete, out of order, or after a gap.
        """
        parsed = self._parser.parse(row, time=time, series=id, static=static)
        known = self._series.get(parsed.series)
        series = known or self._start(parsed.series)
        fixed = self._check_static(series, parsed)
        is_repeated = self._check_order(series, parsed)
        if is_repeated and self._data.duplicates == "first":
            return None
        if self._replaces:
            # on copies, so that a row which is refused changes nothing
            series, found = self._replace_rows(series, parsed, fixed, future, predict, is_repeated)
        else:
            found = [self._add_row(series, parsed, fixed, future, predict)]
        series.static = fixed
        if parsed.time is not None:
            series.arrived = parsed.time
        self._series[parsed.series] = series
        made = [prediction for prediction in found if prediction is not None]
        return made[-1]._replace(earlier=tuple(made[:-1])) if made else None

    def _replace_rows(
        self,
        series: StreamSeries,
        row: ParsedRow,
        static: Floats | None,
        future: Any,
        predict: bool,
        is_repeated: bool,
    ) -> tuple[StreamSeries, list[StreamPrediction | None]]:
        """Return the series after a row, and the predictions after each row that the model is
        given: the row itself, or those that it completes. A row with the time of the one before is
        merged with it, and what that had changed is done again."""
        merges, values, repeated = self._data.duplicates != "error", row.values, None
        if self._data.duplicates == "mean":
            repeated = np.stack([np.nan_to_num(values), ~np.isnan(values)])
            if is_repeated and series.repeated is not None:
                repeated = repeated + series.repeated
            with np.errstate(invalid="ignore"):
                values = repeated[0] / repeated[1]
        bins = series.bins
        if is_repeated and merges:
            assert series.before is not None
            series = series.before
            bins = series.bins
        elif is_repeated and bins is not None and bins.is_made:
            # all rows of a bin count, whatever their times
            assert series.before is not None
            series, bins = series.before, replace(bins, is_made=False)
        rows = [MadeRow(values, row.time, ends_bin=True)]
        after = bins
        if self._resampler is not None:
            after, rows = self._resample(self._resampler, bins, values, row.time)
            if is_repeated:  # what the first row of this time completed is there
                rows = [made for made in rows if made.ends_bin]
            if not self._resets:
                self._refuse_gap(series, after, rows, row)
        result = self._copy(series) if rows else replace(series)
        found = [
            self._add_row(
                result, row._replace(values=made.values, time=made.time), static, future, predict
            )
            for made in rows
            if not made.ends_bin
        ]
        ends = [made for made in rows if made.ends_bin]
        before = replace(self._copy(result) if ends else result, bins=bins, before=None)
        found += [
            self._add_row(
                result, row._replace(values=made.values, time=made.time), static, future, predict
            )
            for made in ends
        ]
        result.bins, result.repeated, result.before = after, repeated, before
        return result, found

    def _resample(
        self,
        resampler: RowResampler,
        bins: BinState | None,
        values: Floats,
        time: RowTime | None,
    ) -> tuple[BinState, list[MadeRow]]:
        if time is None:
            raise UserError(
                f"{resampler.step.where} needs the time of each row; pass time=..., or a row with "
                f'the column "{self._data.time_column}"'
            )
        assert bins is not None
        return resampler.add(bins, values, time)

    def _add_row(
        self,
        series: StreamSeries,
        row: ParsedRow,
        static: Floats | None,
        future: Any,
        predict: bool,
    ) -> StreamPrediction | None:
        """Give the model a row; return the prediction after it."""
        has_gap = self._check_time(series, row)
        triples = zip(self._members, series.members, self._positions, strict=True)
        rows = [
            member.read(state, row, row.values[positions], static, future)
            for member, state, positions in triples
        ]
        # from here on nothing is refused, and the state changes
        series.count += 1
        if row.time is not None:
            series.time = row.time
        if has_gap:
            self._restart(series)
        elif series.filter and not all(state.follows for state in series.members):
            series.filter.reset()
        predicts = predict or series.filter is not None
        steps = zip(self._members, series.members, rows, strict=True)
        values = [member.advance(state, row, predict=predicts) for member, state, row in steps]
        known = [value for value in values if value is not None]
        return self._finish(series, known) if len(known) == len(values) else None

    def reset(self, id: Any = None) -> None:
        """Forget a series, or all of them where `id` is None."""
        if id is None:
            self._series.clear()
        else:
            self._series.pop(self._find_name(id))

    def save_state(self, id: Any = None) -> dict[str, npt.NDArray[Any]]:
        """Return the state of a series as arrays by name; without `data.id` there is one series."""
        return self._save(self._series[self._find_name("" if id is None else id)])

    def _save(self, series: StreamSeries) -> dict[str, npt.NDArray[Any]]:
        result: dict[str, npt.NDArray[Any]] = {}
        for number, state in enumerate(series.members):
            result |= {f"{number}.{name}": array for name, array in save_state(state).items()}
        times = {"time": series.time}
        if self.merges:
            times["arrived"], result["count"] = series.arrived, np.array(series.count)
        if series.bins is not None:
            times["bins.time"] = series.bins.time
            result |= {f"bins.{name}": array for name, array in save_bins(series.bins).items()}
        result |= {name: time.to_array() for name, time in times.items() if time is not None}
        if series.static is not None:
            result["static"] = series.static
        if series.repeated is not None:
            result["repeated"] = series.repeated
        if series.filter is not None:
            filtered = series.filter.rows.get_state()
            result |= {f"filter.{name}": array for name, array in filtered.items()}
        if series.before is not None:
            earlier = self._save(series.before)
            result |= {f"before.{name}": array for name, array in earlier.items()}
        return result

    def load_state(self, state: Mapping[str, npt.NDArray[Any]], id: Any = None) -> None:
        """Continue a series from what `save_state` returned, in this process or another."""
        name = "" if id is None else self._parser.name_series(id)
        self._series[name] = self._load(state, name)

    def _load(self, state: Mapping[str, npt.NDArray[Any]], name: str) -> StreamSeries:
        series = self._start(name)
        series.members = [
            load_state(member, _select(state, f"{number}."), name)
            for number, member in enumerate(self._members)
        ]
        series.time = series.arrived = RowTime.from_array(state.get("time"))
        if self.merges:
            series.arrived = RowTime.from_array(state.get("arrived"))
            series.count = int(state.get("count", 0))
        series.static, series.repeated = state.get("static"), state.get("repeated")
        if series.bins is not None:
            series.bins = load_bins(series.bins, _select(state, "bins."))
        if series.filter is not None:
            series.filter.rows.set_state(_select(state, "filter."))
        if earlier := _select(state, "before."):
            series.before = self._load(earlier, name)
        return series

    def _find_name(self, id: Any) -> str:
        name = self._parser.name_series(id)
        if name not in self._series:
            subject = f'the series "{name}" has' if name else "the stream has"
            raise UserError(f"{subject} had no row; push one first")
        return name

    def _start(self, name: str) -> StreamSeries:
        row_filter = make_filter(self.run.first.config, self.signature)
        bins = None if self._resampler is None else self._resampler.start()
        return StreamSeries([member.start(name) for member in self._members], row_filter, bins=bins)

    def _copy(self, series: StreamSeries) -> StreamSeries:
        """Return a copy that rows can be added to."""
        row_filter = make_filter(self.run.first.config, self.signature)
        if row_filter is not None and series.filter is not None:
            row_filter.rows.set_state(series.filter.rows.get_state())
        members = [copy_state(state) for state in series.members]
        return replace(series, members=members, filter=row_filter)

    def _restart(self, series: StreamSeries) -> None:
        for member, state in zip(self._members, series.members, strict=True):
            member.restart(state)
        if series.filter:
            series.filter.reset()

    def _check_static(self, series: StreamSeries, row: ParsedRow) -> Floats | None:
        """Return the static values of the series, which must not change within it."""
        if not self._static:
            return None
        if row.static is None:
            if series.static is None:
                raise UserError(
                    f"the first row of a series needs {', '.join(self._static)} (data.static); "
                    "pass static={column: value}"
                )
            return series.static
        wrong = np.isnan(row.static)
        if series.static is not None:
            wrong = ~(row.static == series.static)
        if wrong.any():
            name, value = self._static[int(wrong.argmax())], row.static[int(wrong.argmax())]
            raise UserError(
                f'column "{name}" is {value:g} in this row; a data.static column is known and '
                "constant within a series"
            )
        return row.static

    def _check_order(self, series: StreamSeries, row: ParsedRow) -> bool:
        """Return whether a row has the time of the one before it; refuse one out of order."""
        before = series.arrived
        if before is None or row.time is None:
            return False
        which = f' of series "{row.series}"' if row.series else ""
        if before.is_date != row.time.is_date:
            raise UserError(f"times{which} are numbers in some rows and dates in others")
        since = row.time.since(before)
        if since > 0 or (since == 0 and accepts_repeated(self._data)):
            return since == 0
        what = "the same time as" if since == 0 else "earlier than"
        hint = "" if since else "; a run with data.duplicates set merges such rows"
        raise UserError(
            f"the row{which} has {what} the row before it; push rows in time order, and each "
            f"series by its id{hint}"
        )

    def _check_time(self, series: StreamSeries, row: ParsedRow) -> bool:
        """Return whether there is a gap before a row that the model is given; refuse it where gaps
        are errors."""
        before, step = series.time, self.signature.step
        if before is None or row.time is None:
            return False
        since = row.time.since(before)
        if step is None or abs(since - step) <= self._data.gap_tolerance * step:
            return False
        if not self._resets:
            which = f' of series "{row.series}"' if row.series else ""
            raise UserError(
                f"the row{which} comes {since:g} after the one before it, but the model's rows are "
                f'{step:g} apart; push the rows between, or start anew: gaps="reset", or reset()'
            )
        return True

    def _refuse_gap(
        self, series: StreamSeries, bins: BinState | None, made: Sequence[MadeRow], row: ParsedRow
    ) -> None:
        """Refuse a row after a gap at once, not only when its bin is complete."""
        last = made[-1].time if made else series.time
        if self._resampler is None or bins is None or bins.is_made or last is None:
            return
        end = self._resampler.get_time(bins.number, is_date=last.is_date)
        self._check_time(replace(series, time=last), row._replace(time=end))

    def _finish(self, series: StreamSeries, values: list[Floats]) -> StreamPrediction:
        signature = self.signature
        result = self._mix(values) if len(self.run.members) > 1 else values[0]
        if series.filter:
            result = series.filter.push(result)
        rows = min(state.count for state in series.members)
        place: dict[str, Any] = {"row": series.count - 1}
        if series.time is not None:
            place["time"] = series.time.to_value()
        if signature.classes:
            return StreamPrediction(signature, rows, probabilities=result, **place)
        point = select_median(result, signature.quantiles)
        limits = signature.output_range or (-np.inf, np.inf)
        factor = self._members[0].find_factor(series.members[0])
        widths = self.run.half_widths or {}
        if factor is not None:
            widths = {level: width * factor for level, width in widths.items()}
        return StreamPrediction(
            signature,
            rows,
            point=point,
            quantiles=result if signature.quantiles else None,
            intervals={
                level: ((point - width).clip(*limits), (point + width).clip(*limits))
                for level, width in widths.items()
            },
            factor=factor,
            **place,
        )

    def _mix(self, values: list[Floats]) -> Floats:
        """Return the weighted mean of the members' predictions, in the reference's column order."""
        total = np.zeros(1)
        for member, weight, value in zip(self._members, self._weights, values, strict=True):
            signature = member.member.first.signature
            if not signature.classes:
                if signature.quantiles != self.signature.quantiles:
                    value = select_median(value, signature.quantiles)[..., None]
                value = value[:, [signature.targets.index(name) for name in self.signature.targets]]
            total = total + weight * value
        return total
