"""One run of a stream: what it reads of each row, the context of each series, and its predictions.

Shapes: T context rows, F inputs, S static columns, H predicted rows, U inputs known ahead, C
targets, Q quantiles or classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.data.series import Floats
from slipstream.errors import UserError
from slipstream.portable.model import PortableMember
from slipstream.portable.networks.arithmetic import Array
from slipstream.portable.networks.steps import RowNetwork, State
from slipstream.portable.networks.windows import predict_scaled, restore_outputs
from slipstream.portable.streaming.parsing import ParsedRow
from slipstream.portable.streaming.prepared import PreparedRow
from slipstream.text import format_count

if TYPE_CHECKING:
    from slipstream.portable.streaming.preparation import FutureSteps, StreamedSteps

Arrays = dict[str, npt.NDArray[Any]]
LARGEST_SCALED = float(np.finfo(np.float32).max)


@dataclass
class MemberState:
    """What a run remembers of one series."""

    prepared: PreparedRow
    inputs: Floats
    """The last known value of each input, for `data.missing = "forward"`"""
    rows: Array
    """[T, F]: the last rows, scaled, the newest last; empty with a carried state"""
    networks: list[State]
    """The carried state of each network"""
    count: int = 0
    """Rows since the series began, or since the last gap"""
    has_started: bool = False
    """Whether some row has counted"""
    follows: bool = True
    """Whether the next row follows from the last; a row that was left out makes a gap"""


class NextRow(NamedTuple):
    """A row that passed all checks, and what becomes of the state with it."""

    prepared: PreparedRow
    inputs: Floats
    scaled: Array
    beside: Array | None
    """[K]: what is known beside the rows, scaled"""
    is_used: bool
    """False where the row is left out: a value is missing, or steps look back further"""
    makes_gap: bool
    """Whether it is left out because a value is missing"""


@dataclass(frozen=True)
class StreamMember:
    """A run that predicts after each row."""

    member: PortableMember
    columns: tuple[str, ...]
    """What it reads of a row"""
    steps: StreamedSteps | None
    future: FutureSteps | None
    networks: tuple[RowNetwork, ...]
    """With a carried state"""
    reads_beside: bool
    """Whether it reads static columns or rows ahead"""
    shift: Floats
    size: Floats
    """[F], of the inputs"""

    def start(self) -> MemberState:
        """Return the state of a new series."""
        signature = self.member.first.signature
        context = 0 if self.networks else signature.context
        return MemberState(
            prepared=self.steps.start() if self.steps else PreparedRow(np.empty(0)),
            inputs=np.full(len(signature.inputs), np.nan),
            rows=np.zeros((context, len(signature.inputs)), dtype=np.float32),
            networks=[one.start() for one in self.networks],
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
        scaled = self._scale(inputs) if is_used else np.empty(0, dtype=np.float32)
        makes_gap = incomplete and not waits and state.has_started
        return NextRow(prepared, inputs, scaled, beside, is_used, makes_gap)

    def _refuse_missing(self, missing: npt.NDArray[np.bool_]) -> None:
        name = self.member.first.signature.inputs[int(missing.argmax())]
        raise UserError(
            f'the row has no value in the column "{name}"; a stream takes such rows only of a run '
            'with data.missing = "forward" or "drop"'
        )

    def _scale(self, inputs: Floats) -> Array:
        scaled = (inputs - self.shift) / self.size
        if max(scaled.max(), -scaled.min()) > LARGEST_SCALED:
            name = self.member.first.signature.inputs[int(np.abs(scaled).argmax())]
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
            first = self._scale(np.zeros_like(row.inputs)) if self.steps.pads_zero else row.scaled
            for _ in range(self.steps.padding):
                self._append(state, first, row.beside)
        outputs = self._append(state, row.scaled, row.beside)
        state.inputs, state.has_started = row.inputs, True
        if self.networks:
            return self._to_physical(outputs) if predict else None
        if state.count < len(state.rows) or not predict:
            return None
        beside = None if row.beside is None else row.beside[None]
        every = [predict_scaled(one, state.rows[None], beside)[0] for one in self.member.models]
        return self._to_physical(every)

    def _append(self, state: MemberState, row: Array, beside: Array | None) -> list[Array]:
        """Add a scaled row to the context; return what networks with a carried state predict."""
        state.count += 1
        if self.networks:
            pairs = zip(self.networks, state.networks, strict=True)
            return [network.step(row, beside, carried) for network, carried in pairs]
        state.rows[:-1] = state.rows[1:]
        state.rows[-1] = row
        return []

    def restart(self, state: MemberState) -> None:
        """Forget the context, as after a gap; steps of `data.prepare` go on."""
        state.count, state.follows = 0, True
        state.networks = [one.start() for one in self.networks]

    def _to_physical(self, outputs: Sequence[Array]) -> Floats:
        return restore_outputs(outputs, self.member.first.signature, self.member.first.scaler)


def make_member(member: PortableMember, *, carried: bool) -> StreamMember:
    """Make a run ready to stream; refuse what cannot be."""
    model = member.first
    data, signature, scaler = model.config.data, model.signature, model.scaler
    steps = future = None
    if data.prepare:
        from slipstream.portable.streaming import preparation  # scipy takes a while to import

        steps = preparation.StreamedSteps(data, signature.inputs, model.limits, signature.step)
        if signature.static and set(signature.static) & set(steps.sources):
            raise UserError("data.prepare changes a static column, which cannot be streamed")
        future = preparation.plan_future(data, signature)
    return StreamMember(
        member=member,
        columns=signature.inputs if steps is None else steps.sources,
        steps=steps,
        future=future,
        networks=tuple(RowNetwork(one) for one in member.models) if carried else (),
        reads_beside=signature.static_width > 0,
        shift=np.array([scaler.shift[name] for name in signature.inputs]),
        size=np.array([scaler.size[name] for name in signature.inputs]),
    )


def save_state(state: MemberState) -> Arrays:
    """Return a state as arrays by name."""
    prepared = state.prepared
    result: Arrays = {
        "inputs": state.inputs,
        "rows": state.rows.copy(),
        "counts": np.array([state.count, state.has_started, state.follows, prepared.count]),
        "prepared.times": prepared.times,
        "prepared.known": np.array(sorted(prepared.known), dtype=np.str_),
    }
    result |= {f"prepared.past.{name}": values for name, values in prepared.past.items()}
    result |= {f"prepared.filters.{name}": values for name, values in prepared.filters.items()}
    for number, network in enumerate(state.networks):
        result |= {f"network{number}.{name}": values.copy() for name, values in network.items()}
    return result


def load_state(member: StreamMember, arrays: Mapping[str, npt.NDArray[Any]]) -> MemberState:
    """Return the state that `save_state` wrote; a UserError where it is of another model."""
    state = member.start()

    def select(prefix: str) -> Arrays:
        return {
            name.removeprefix(prefix): np.array(values)
            for name, values in arrays.items()
            if name.startswith(prefix)
        }

    try:
        counts = [int(count) for count in arrays["counts"]]
        prepared = PreparedRow(
            inputs=np.empty(0),
            count=counts[3],
            past=select("prepared.past."),
            times=np.array(arrays["prepared.times"]),
            filters=select("prepared.filters."),
            known=frozenset(map(str, arrays["prepared.known"])),
        )
        networks = [select(f"network{number}.") for number in range(len(state.networks))]
        inputs, rows = np.array(arrays["inputs"]), np.array(arrays["rows"])
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"the state is not one of this stream ({error!r})") from None
    alike = inputs.shape == state.inputs.shape and rows.shape == state.rows.shape
    for own, other in zip(state.networks, networks, strict=True):
        alike = alike and {n: a.shape for n, a in own.items()} == {
            n: a.shape for n, a in other.items()
        }
    if not alike:
        raise UserError("the state is not one of this stream: its arrays have other shapes")
    return MemberState(
        prepared, inputs, rows, networks, counts[0], bool(counts[1]), bool(counts[2])
    )
