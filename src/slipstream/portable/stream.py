"""Predict row after row with a trained run: numpy only, no torch.

Shapes: H predicted rows, C targets, Q quantiles, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.config import Signature
from slipstream.data import prediction_columns
from slipstream.data.series import Floats
from slipstream.errors import UserError
from slipstream.portable.filters import PredictionFilter, make_filter
from slipstream.portable.model import PortableRun, load_portable
from slipstream.portable.streaming.members import (
    MemberState,
    load_state,
    make_member,
    save_state,
)
from slipstream.portable.streaming.parsing import ParsedRow, RowParser, RowTime
from slipstream.portable.table import PhysicalPredictions, list_number_columns
from slipstream.stats import select_median

Regime = Literal["auto", "window", "carried"]


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
                prediction_columns.name_probability(name): self.probabilities[:, i].tolist()
                for i, name in enumerate(classes)
            }
            return {prediction_columns.PREDICTED: likely, **named}
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
    static: Floats | None = None


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
            measures them. `"auto"`: carried if the run was trained for it, otherwise windows.
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
            regime = "carried" if run.signature.state == "carried" else "window"
        self.run, self.signature, self.regime = run, run.signature, regime
        self._resets = gaps == "reset"
        every = zip(run.members, run.weights, strict=True)
        used = [(member, weight) for member, weight in every if weight]
        self._members = [make_member(one, carried=regime == "carried") for one, _ in used]
        self._weights = [weight for _, weight in used]
        self.columns = tuple(dict.fromkeys(name for one in self._members for name in one.columns))
        self._places = [
            np.array([self.columns.index(name) for name in one.columns], dtype=np.int64)
            for one in self._members
        ]
        self._data = run.first.config.data
        self._static = self.signature.static
        for one in self._members:
            if one.member.first.signature.static != self._static:
                raise UserError("the members of an ensemble differ in data.static; stream one")
        codes = {}
        if self.signature.classes and self.signature.targets[0] in self.columns:
            codes = {name: i for i, name in enumerate(self.signature.classes)}
        label = self.signature.targets[0] if codes else None
        self._parser = RowParser(self._data, self.columns, self._static, label, codes)
        self._series: dict[str, StreamSeries] = {}

    @property
    def passed_ahead(self) -> tuple[str, ...]:
        """The columns of `data.future` that `push` has to be given, which no step makes from
        times."""
        lacking = [one.member.first for one in self._members if one.future is None]
        return tuple(dict.fromkeys(name for one in lacking for name in one.signature.future))

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
        series = known or self._start()
        fixed = self._check_static(series, parsed)
        has_gap = self._check_time(series, parsed)
        pairs = zip(self._members, series.members, self._places, strict=True)
        rows = [
            member.read(state, parsed, parsed.values[places], fixed, future)
            for member, state, places in pairs
        ]
        # from here on nothing is refused, and the state changes
        self._series[parsed.series] = series
        if parsed.time is not None:
            series.time = parsed.time
        series.static = fixed
        if has_gap:
            self._restart(series)
        elif series.filter and not all(state.follows for state in series.members):
            series.filter.reset()
        predicts = predict or series.filter is not None
        triples = zip(self._members, series.members, rows, strict=True)
        values = [member.advance(state, one, predict=predicts) for member, state, one in triples]
        if any(one is None for one in values):
            return None
        return self._finish(series, [one for one in values if one is not None])

    def reset(self, id: Any = None) -> None:
        """Forget a series, or all of them where `id` is None."""
        if id is None:
            self._series.clear()
        else:
            self._series.pop(self._find_name(id))

    def save_state(self, id: Any = None) -> dict[str, npt.NDArray[Any]]:
        """Return the state of a series as arrays by name; without `data.id` there is one series."""
        series = self._series[self._find_name("" if id is None else id)]
        result: dict[str, npt.NDArray[Any]] = {}
        for number, state in enumerate(series.members):
            result |= {f"{number}.{name}": array for name, array in save_state(state).items()}
        if series.time is not None:
            kind = np.int64 if series.time.is_date else np.float64
            result["time"] = np.array(series.time.value, dtype=kind)
        if series.static is not None:
            result["static"] = series.static
        if series.filter is not None:
            filtered = series.filter.rows.get_state()
            result |= {f"filter.{name}": array for name, array in filtered.items()}
        return result

    def load_state(self, state: Mapping[str, npt.NDArray[Any]], id: Any = None) -> None:
        """Continue a series from what `save_state` returned, in this process or another."""
        series = self._start()

        def select(prefix: str) -> dict[str, npt.NDArray[Any]]:
            return {n.removeprefix(prefix): a for n, a in state.items() if n.startswith(prefix)}

        series.members = [
            load_state(member, select(f"{number}.")) for number, member in enumerate(self._members)
        ]
        if (time := state.get("time")) is not None:
            series.time = RowTime(time.item(), time.dtype == np.int64)
        series.static = state.get("static")
        if series.filter is not None:
            series.filter.rows.set_state(select("filter."))
        self._series["" if id is None else self._parser.name_series(id)] = series

    def _find_name(self, id: Any) -> str:
        name = self._parser.name_series(id)
        if name not in self._series:
            which = f'the series "{name}" has' if name else "the stream has"
            raise UserError(f"{which} had no row; push one first")
        return name

    def _start(self) -> StreamSeries:
        row_filter = make_filter(self.run.first.config, self.signature)
        return StreamSeries([member.start() for member in self._members], row_filter)

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

    def _check_time(self, series: StreamSeries, row: ParsedRow) -> bool:
        """Return whether there is a gap before a row; refuse one that is out of order."""
        before, step = series.time, self.signature.step
        if before is None or row.time is None:
            return False
        which = f' of series "{row.series}"' if row.series else ""
        if before.is_date != row.time.is_date:
            raise UserError(f"times{which} are numbers in some rows and dates in others")
        since = row.time.since(before)
        if since <= 0:
            what = "the same time as" if since == 0 else "earlier than"
            raise UserError(
                f"the row{which} has {what} the row before it; push rows in time order, and each "
                "series by its id"
            )
        if step is None or abs(since - step) <= self._data.gap_tolerance * step:
            return False
        if not self._resets:
            raise UserError(
                f"the row{which} comes {since:g} after the one before it, but the model's rows are "
                f'{step:g} apart; push the rows between, or start anew: gaps="reset", or reset()'
            )
        return True

    def _finish(self, series: StreamSeries, values: list[Floats]) -> StreamPrediction:
        signature = self.signature
        result = values[0] if len(values) == 1 else self._mix(values)
        if series.filter:
            result = series.filter.push(result)
        rows = min(state.count for state in series.members)
        if signature.classes:
            return StreamPrediction(signature, rows, probabilities=result)
        point = select_median(result, signature.quantiles)
        limits = signature.output_range or (-np.inf, np.inf)
        return StreamPrediction(
            signature,
            rows,
            point=point,
            quantiles=result if signature.quantiles else None,
            intervals={
                level: ((point - width).clip(*limits), (point + width).clip(*limits))
                for level, width in (self.run.half_widths or {}).items()
            },
        )

    def _mix(self, values: list[Floats]) -> Floats:
        """Return the weighted mean of what the members predict, in the order of the reference."""
        total = np.zeros(1)
        for member, weight, value in zip(self._members, self._weights, values, strict=True):
            of = member.member.first.signature
            if not of.classes:
                if of.quantiles != self.signature.quantiles:
                    value = select_median(value, of.quantiles)[..., None]
                value = value[:, [of.targets.index(name) for name in self.signature.targets]]
            total = total + weight * value
        return total
